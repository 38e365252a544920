//! One Run: ORT's kernel context as addresses, and the lane of its stream.

use crate::counters::{Counter, add};
use crate::graphs::{Graphs, Wanted};
use crate::replay::{Addresses, Lane};
use abi::cuda::Stream;
use abi::ort::{Compiled, Context, DeviceKind, Input};
use abi::{DType, Error, HostTensor, Result};
use kernels::cuda::{Buffer, Device};
use kernels::plan::{Io, Plan, Prepared};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// Lanes of streams that no longer exist are let go beyond this many.
const LANES: usize = 16;

/// Kernels load 16 bytes at a time.
const ALIGN: u64 = 16;

/// A compiled group.
pub struct CompiledPlan {
    pub plan: Plan,
    pub device: Arc<Device>,
    pub graphs: Arc<Graphs>,
    /// Whether Runs launch a CUDA graph.
    pub use_graphs: bool,
    /// For Runs that ORT gives no stream.
    pub default_stream: Stream,
    lanes: Mutex<Lanes>,
}

/// By stream handle, least recently used first.
type Lanes = Vec<(usize, Arc<Mutex<StreamLane>>)>;

/// What a stream needs besides its graphs.
#[derive(Default)]
struct StreamLane {
    lane: Lane,
    /// By graph input: memory for a copy of it.
    copies: HashMap<usize, Buffer>,
}

impl CompiledPlan {
    pub fn new(plan: Plan, device: Arc<Device>, graphs: Arc<Graphs>, use_graphs: bool) -> Result<Self> {
        let default_stream = Stream::new(device.context())?;
        Ok(Self { plan, device, graphs, use_graphs, default_stream, lanes: Mutex::default() })
    }

    fn lane(&self, stream: &Stream) -> Arc<Mutex<StreamLane>> {
        let key = stream.handle() as usize;
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let found = lanes.iter().position(|(k, _)| *k == key).map(|at| lanes.remove(at));
        let (_, lane) = found.unwrap_or_default();
        if lanes.len() >= LANES {
            // One in use lives on through its user's reference.
            lanes.remove(0);
        }
        lanes.push((key, lane.clone()));
        lane
    }

    /// The Run's stream, and whether the Run must wait for it itself.
    fn stream(&self, handle: *mut c_void) -> (Stream, bool) {
        if handle.is_null() {
            return (self.default_stream.clone(), true);
        }
        // SAFETY: ORT keeps the Run's stream alive until the Run ends, and it is one of this device (the factory makes
        // them, or the user has passed it).
        (unsafe { Stream::from_raw(self.device.context(), handle) }, false)
    }

    /// The contents of inputs that decide shapes. Where a model is cut into groups, one may have computed them on the
    /// device for the next.
    fn read_back(&self, stream: &Stream, inputs: &[Input<'_>]) -> Result<HashMap<usize, HostTensor>> {
        let mut contents = HashMap::new();
        for &i in self.plan.key_inputs() {
            let input = &inputs[i];
            if input.memory().host_can_access() || input.is_empty() {
                continue;
            }
            stream.synchronize()?;
            let mut bytes = vec![0; input.len()];
            self.device.context().copy_to_host(&mut bytes, input.data as u64)?;
            add(Counter::ReadBacks, 1);
            let tensor = HostTensor::from_bytes(input.dtype, input.shape, &bytes);
            let tensor = tensor.ok_or_else(|| Error::Internal(format!("input {i}'s size is off")))?;
            contents.insert(i, tensor);
        }
        Ok(contents)
    }

    fn execute(
        &self,
        lane: &mut StreamLane,
        stream: &Stream,
        prepared: &Prepared,
        addresses: &Addresses,
        copies: bool,
    ) -> Result<()> {
        let (device, program) = (&self.device, &prepared.program);
        self.graphs.uses(stream);
        let capturing = stream.is_capturing()?;
        if capturing && program.needs_host() {
            let (name, got) = (kernels::experts::OPTION.into(), "a limit that not all experts fit".into());
            let expected = "none while the caller captures the stream: a captured Run cannot fetch experts".into();
            return Err(Error::Option { name, got, expected });
        }
        match self.graphs.wanted() {
            _ if !self.use_graphs || capturing || program.needs_host() => {
                lane.lane.run_eagerly(device, stream, program, addresses)
            }
            Wanted::No => lane.lane.run_eagerly(device, stream, program, addresses),
            Wanted::Any => lane.lane.run(device, stream, program, addresses),
            Wanted::Kept(id) => {
                let node = std::ptr::from_ref(self).addr();
                let old = self.graphs.take(id, node);
                let replay = lane.lane.run_and_keep(device, stream, program, addresses, old)?;
                self.graphs.keep(id, node, (replay, stream.clone()), addresses, copies)
            }
        }
    }
}

impl Compiled for CompiledPlan {
    fn run(&self, context: &Context<'_>) -> Result<()> {
        let inputs = (0..context.input_count()).map(|i| context.input(i)).collect::<Result<Vec<_>>>()?;
        let (stream, wait) = self.stream(context.stream_handle());
        let contents = self.read_back(&stream, &inputs)?;
        let io = RunIo { inputs, contents };
        let prepared = self.plan.prepare(&io)?;
        let mut addresses = Addresses {
            inputs: io.inputs.iter().map(|input| input.data as u64).collect(),
            outputs: Vec::with_capacity(context.output_count()),
        };
        let mut lengths = Vec::with_capacity(context.output_count());
        for j in 0..context.output_count() {
            let (dtype, shape) = prepared.output(&self.plan, j)?;
            let output = context.output(j, shape)?;
            if output.dtype != dtype {
                return Err(Error::Internal(format!(
                    "output {j}: ORT expects {}, the plan makes {dtype}",
                    output.dtype
                )));
            }
            if output.len > 0 && output.device_kind() != DeviceKind::Gpu {
                return Err(Error::Internal(format!("output {j} is in host memory that the device cannot write")));
            }
            if output.len > 0 && !(output.data as u64).is_multiple_of(ALIGN) {
                let expected = format!("a buffer whose address is a multiple of {ALIGN}");
                let names = self.plan.io_names().1.nth(j).unwrap_or_default().to_owned();
                let problem = format!("got the address {:p}, expected {expected}", output.data);
                return Err(Error::Model { place: format!("graph output '{names}'"), problem });
            }
            addresses.outputs.push(output.data as u64);
            lengths.push(output.len);
        }
        let lane = self.lane(&stream);
        let mut lane = lane.lock().unwrap_or_else(PoisonError::into_inner);
        let copies = lane.copy_inputs(self, &stream, &io.inputs, &mut addresses, &lengths)?;
        self.execute(&mut lane, &stream, &prepared, &addresses, copies)?;
        if wait { stream.synchronize() } else { Ok(()) }
    }
}

impl StreamLane {
    /// Copies inputs that the kernels cannot read where they are: those in pageable memory, the misaligned, and those that
    /// share memory with an output which no declared in-place update explains. Whether there was one.
    fn copy_inputs(
        &mut self,
        of: &CompiledPlan,
        stream: &Stream,
        inputs: &[Input<'_>],
        addresses: &mut Addresses,
        lengths: &[usize],
    ) -> Result<bool> {
        let mut any = false;
        let outputs = Spans::new(&addresses.outputs, lengths);
        for (i, input) in inputs.iter().enumerate() {
            let (start, bytes) = (addresses.inputs[i], input.len());
            let clash = |(out, j)| !(start == out && of.plan.may_share(i, j));
            let pageable = input.device_kind() == DeviceKind::Cpu;
            let misaligned = !start.is_multiple_of(ALIGN);
            if bytes == 0 || !(pageable || misaligned || outputs.within(start, bytes).any(clash)) {
                continue;
            }
            if self.copies.get(&i).is_none_or(|copy| copy.len() < bytes) {
                stream.synchronize()?;
                self.copies.insert(i, of.device.alloc(bytes.next_power_of_two())?);
            }
            let copy = self.copies[&i].address();
            add(Counter::CopiedInputs, 1);
            // SAFETY: both hold `bytes` bytes for the length of the Run, which waits for the stream before ORT lets go of
            // the input; the copy is this lane's alone.
            unsafe {
                if pageable {
                    stream.copy_to_device(copy, input.data, bytes)?;
                } else {
                    stream.copy(copy, start, bytes)?;
                }
            }
            addresses.inputs[i] = copy;
            any = true;
        }
        Ok(any)
    }
}

/// Where outputs lie: first byte, end, number. By first byte; in rising order of ends too, unless some overlap.
struct Spans {
    spans: Vec<(u64, u64, usize)>,
    disjoint: bool,
}

impl Spans {
    fn new(starts: &[u64], lengths: &[usize]) -> Self {
        let all = starts.iter().zip(lengths).enumerate().map(|(j, (&start, &len))| (start, start + len as u64, j));
        let mut spans: Vec<_> = all.filter(|(start, end, _)| start < end).collect();
        spans.sort_unstable();
        let disjoint = spans.windows(2).all(|pair| pair[0].1 <= pair[1].0);
        Self { spans, disjoint }
    }

    /// First byte and number of those that share a byte with `bytes` bytes from `start` on.
    fn within(&self, start: u64, bytes: usize) -> impl Iterator<Item = (u64, usize)> + '_ {
        let first = if self.disjoint { self.spans.partition_point(|&(_, end, _)| end <= start) } else { 0 };
        let near = self.spans[first..].iter().take_while(move |&&(out, ..)| out < start + bytes as u64);
        near.filter(move |&&(_, end, _)| start < end).map(|&(out, _, j)| (out, j))
    }
}

struct RunIo<'a> {
    inputs: Vec<Input<'a>>,
    /// By input: what was read back.
    contents: HashMap<usize, HostTensor>,
}

impl Io for RunIo<'_> {
    fn input(&self, i: usize) -> Result<(DType, &[usize], *const u8)> {
        let input = &self.inputs[i];
        let data = self.contents.get(&i).map_or(input.data, |tensor| tensor.bytes().as_ptr());
        Ok((input.dtype, input.shape, data))
    }

    fn output(&mut self, j: usize, _dtype: DType, _shape: &[usize]) -> Result<*mut u8> {
        Err(Error::Internal(format!("output {j} of a CUDA plan was asked of the host")))
    }
}

#[cfg(test)]
mod tests {
    use super::Spans;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn spans_find_what_overlaps(
            outputs in proptest::collection::vec((0u64..60, 0usize..9), 0..12),
            start in 0u64..60,
            bytes in 1usize..20,
        ) {
            let (starts, lengths): (Vec<_>, Vec<_>) = outputs.iter().copied().unzip();
            let mut found: Vec<_> = Spans::new(&starts, &lengths).within(start, bytes).collect();
            found.sort_unstable_by_key(|&(_, j)| j);
            let overlap = |&(_, (out, len)): &(usize, (u64, usize))| {
                len > 0 && start < out + len as u64 && out < start + bytes as u64
            };
            let expected: Vec<_> = outputs.iter().copied().enumerate().filter(overlap).map(|(j, (out, _))| (out, j)).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
