//! What a CUDA kernel's host part sees when it writes its launches down.

use super::{Base, ConstantProduct, DevPtr, Device, HostStep, Launch, Params};
use crate::op::NodeLabel;
use abi::cuda::{Function, LaunchShape};
use abi::{DType, Error, HostTensor, Result};
use std::fmt;
use std::sync::Arc;

/// The workspace of a plan with clusters begins with so many bytes of counters: zero when it is allocated, and between
/// launches.
pub const COUNTER_BYTES: usize = 4096;

/// A node made ready for a device: attributes parsed, weights packed, functions found.
pub trait DeviceKernel: Send + Sync {
    /// The product by constant 16-bit or quantised weights that this is, if it is one: `y = x w^T + c`.
    fn product(&self) -> Option<ConstantProduct> {
        None
    }

    /// Writes down the launches that compute the outputs for the shapes of `cx`. Nothing runs yet, so nothing may
    /// depend on tensors' contents, but those of `value`s that the host knows.
    ///
    /// # Errors
    /// When the shapes break a limit that only shows now.
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()>;
}

/// A tensor in device memory.
#[derive(Clone, Copy)]
pub struct DeviceTensor<'a> {
    /// The element type.
    pub dtype: DType,
    /// The dimensions.
    pub shape: &'a [usize],
    /// Where its first byte will be.
    pub ptr: DevPtr,
    /// Its contents, where the shapes decide them.
    pub value: Option<&'a HostTensor>,
}

impl DeviceTensor<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.dtype.bytes(self.len()).unwrap_or(0)
    }

    /// Whether `ptr` is the address of one of its bytes.
    fn holds(&self, ptr: DevPtr) -> bool {
        let from = self.ptr.offset();
        ptr.base() == self.ptr.base() && (from..from + self.bytes() as u64).contains(&ptr.offset())
    }

    /// The contents as integers, where the shapes decide them.
    pub fn ints(&self) -> Option<Vec<i64>> {
        self.value.and_then(HostTensor::to_i64s)
    }
}

/// One node on its way to being launched.
pub struct LaunchCx<'a> {
    pub(super) inputs: &'a [Option<DeviceTensor<'a>>],
    pub(super) outputs: &'a [Option<DeviceTensor<'a>>],
    pub(super) device: &'a Device,
    pub(super) label: &'a NodeLabel,
    /// Where scratch begins in the workspace, and how much of it this node has taken.
    pub(super) scratch_offset: usize,
    pub(super) scratch_bytes: usize,
    pub(super) launches: Vec<Launch>,
    pub(super) then: Option<Arc<dyn HostStep>>,
    /// What the launch in front of this node's first writes; `None` where that is not known, or there is none.
    pub(super) before: Option<&'a [DeviceTensor<'a>]>,
    pub(super) hastens: bool,
}

impl<'a> LaunchCx<'a> {
    /// A node without tensors, whose scratch begins at `scratch_offset`.
    pub(super) fn new(device: &'a Device, label: &'a NodeLabel, scratch_offset: usize) -> Self {
        Self {
            inputs: &[],
            outputs: &[],
            device,
            label,
            scratch_offset,
            scratch_bytes: 0,
            launches: Vec::new(),
            then: None,
            before: None,
            hastens: false,
        }
    }

    /// Input `slot`; `None` when absent or packed.
    pub fn input(&self, slot: usize) -> Option<DeviceTensor<'a>> {
        self.inputs.get(slot).copied().flatten()
    }

    /// A required input. Panics when absent: `claim` has checked it.
    pub fn required(&self, slot: usize) -> DeviceTensor<'a> {
        self.input(slot).expect("the claim checked that required inputs are present")
    }

    /// Number of input slots, trailing absent ones included.
    pub fn inputs_len(&self) -> usize {
        self.inputs.len()
    }

    /// Address of input `slot`; null when absent.
    pub fn input_ptr(&self, slot: usize) -> DevPtr {
        self.input(slot).map_or(DevPtr::NULL, |t| t.ptr)
    }

    /// Output `slot`; `None` when nobody reads it.
    pub fn output(&self, slot: usize) -> Option<DeviceTensor<'a>> {
        self.outputs.get(slot).copied().flatten()
    }

    /// Address of output `slot`; null when nobody reads it.
    pub fn output_ptr(&self, slot: usize) -> DevPtr {
        self.output(slot).map_or(DevPtr::NULL, |t| t.ptr)
    }

    /// The node's label.
    pub fn label(&self) -> &'a NodeLabel {
        self.label
    }

    /// The device.
    pub fn device(&self) -> &'a Device {
        self.device
    }

    /// `bytes` of scratch, 256-byte aligned, for this node's launches alone; contents arbitrary.
    pub fn scratch(&mut self, bytes: usize) -> DevPtr {
        let at = self.scratch_offset + self.scratch_bytes;
        self.scratch_bytes += bytes.next_multiple_of(256);
        DevPtr::new(Base::Workspace, at as u64)
    }

    /// `n` zeros for this node's launches alone, which leave them zero; `None` where there are not so many.
    pub fn counters(&self, n: usize) -> Option<DevPtr> {
        (4 * n <= COUNTER_BYTES).then(|| DevPtr::new(Base::Workspace, 0))
    }

    /// Whether what begins at `ptr`, a tensor that a kernel of this node reads, is complete when the launch in front of the
    /// node's first begins. A kernel may then read it before its wait: see `NXRT_KERNEL_EARLY`.
    pub fn settled(&self, ptr: DevPtr) -> bool {
        let left = |all: &[DeviceTensor<'_>]| !all.iter().any(|tensor| tensor.holds(ptr));
        ptr.base() == Base::Absolute || (self.launches.is_empty() && self.before.is_some_and(left))
    }

    /// Whether the launch behind this node's last may begin before that one's own predecessor has ended: it reads constants
    /// alone before its wait. A kernel that is told so lets it begin at once: see `NXRT_KERNEL_EARLY`.
    pub fn hastens(&self) -> bool {
        self.hastens
    }

    /// Appends a launch; it runs after all launches before it. A grid without blocks is left out. `shape.overlap` says
    /// whether it may begin, up to its wait, before those have ended; the device's option forbids it.
    ///
    /// # Errors
    /// When the device does not have that much shared memory a block.
    pub fn push<P: Params>(&mut self, function: &Function, shape: LaunchShape, params: &P) -> Result<()> {
        if shape.shared > self.device.shared_limit() {
            let (got, limit) = (shape.shared, self.device.shared_limit());
            return Err(self.error(
                format_args!("kernel {}", function.name()),
                format_args!("{got} bytes of shared memory a block"),
                format_args!("at most {limit}"),
            ));
        }
        function.set_shared_limit(shape.shared)?;
        let shape = LaunchShape { overlap: shape.overlap && self.device.overlap(), ..shape };
        if shape.grid.iter().all(|&n| n > 0) {
            self.launches.push(Launch::new(function, shape, params));
        }
        Ok(())
    }

    /// Lets the host do the rest of the node's work in every Run, once the launches so far are queued. Such a Run is not a
    /// CUDA graph.
    pub fn finish_on_host(&mut self, step: Arc<dyn HostStep>) {
        self.then = Some(step);
    }

    /// An [`Error::Node`] for this node.
    pub fn error(&self, slot: impl fmt::Display, got: impl fmt::Display, expected: impl fmt::Display) -> Error {
        self.label.error(slot, got, expected)
    }
}

/// A one-dimensional launch: `blocks` blocks of `threads` threads. Panics past 2^31 blocks, which no tensor that fits
/// a device needs.
pub fn linear(blocks: usize, threads: u32) -> LaunchShape {
    let blocks = u32::try_from(blocks).ok().filter(|&n| n < 1 << 31).expect("a grid within the device's limit");
    LaunchShape { grid: [blocks, 1, 1], block: [threads, 1, 1], shared: 0, overlap: true }
}

/// `f32`, `f16` or `bf16`: the part of a kernel's name that says its type.
pub fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F64 => "f64",
        DType::I8 => "i8",
        DType::U8 => "u8",
        DType::I16 => "i16",
        DType::U16 => "u16",
        DType::I32 => "i32",
        DType::U32 => "u32",
        DType::I64 => "i64",
        DType::U64 => "u64",
        DType::Bool => "bool",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_holds_its_own_bytes() {
        let at = |base, offset| DevPtr::new(base, offset);
        let tensor = DeviceTensor { dtype: DType::F16, shape: &[2, 4], ptr: at(Base::Workspace, 256), value: None };
        let held = [255, 256, 264, 271, 272].map(|offset| tensor.holds(at(Base::Workspace, offset)));
        assert_eq!(held, [false, true, true, true, false]);
        assert!(!tensor.holds(at(Base::Input(0), 256)) && !tensor.holds(at(Base::Absolute, 256)));
    }
}
