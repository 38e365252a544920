//! The launches of one plan instance, in order.

use super::{Base, Buffer, DevPtr, Device, DeviceTensor, Launch, LaunchCx, linear};
use crate::fuse::cluster::{Cluster, Member};
use crate::instance::{Instance, Place};
use crate::kernel_params;
use crate::plan::{Plan, Step};
use crate::weights::{Constant, PackCache};
use abi::cuda::Function;
use abi::{DType, HostTensor, Result, ValueId};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// What a Run launches. Stretches that equal another program's are shared with it, so that two programs compare fast.
pub struct Program {
    stretches: Vec<Stretch>,
    workspace_bytes: usize,
}

/// The launches of one step.
type Stretch = (Arc<[Launch]>, usize);

impl Program {
    /// Bytes of workspace that a Run needs.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Every launch in order.
    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        self.stretches.iter().flat_map(|(launches, _)| launches.iter())
    }

    /// Number of launches.
    pub fn len(&self) -> usize {
        self.stretches.iter().map(|(launches, _)| launches.len()).sum()
    }

    /// Whether nothing is launched.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether both launch the same functions in the same order.
    pub fn same_functions(&self, other: &Self) -> bool {
        let shared = |(a, b): (&Stretch, &Stretch)| Arc::ptr_eq(&a.0, &b.0);
        (self.stretches.len() == other.stretches.len() && self.stretches.iter().zip(&other.stretches).all(shared))
            || (self.len() == other.len() && self.launches().zip(other.launches()).all(|(a, b)| a.same_function(b)))
    }

    /// The numbers of this program's launches whose geometry or parameters differ from `other`'s, which has the same
    /// functions.
    pub fn differences<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = usize> + 'a {
        let mut at = 0;
        let aligned = self.stretches.len() == other.stretches.len()
            && self.stretches.iter().zip(&other.stretches).all(|(a, b)| a.0.len() == b.0.len());
        let stretches = self.stretches.iter().enumerate().flat_map(move |(i, (launches, _))| {
            let start = at;
            at += launches.len();
            let same = aligned && Arc::ptr_eq(launches, &other.stretches[i].0);
            if same { start..start } else { start..at }
        });
        let (mine, theirs): (Vec<_>, Vec<_>) = (self.launches().collect(), other.launches().collect());
        stretches.filter(move |&n| !mine[n].same_parameters(theirs[n]))
    }

    /// Writes down the launches of `instance`. Steps that `touched` does not name are taken from `base`, a program of
    /// the same places.
    pub(crate) fn new(
        plan: &Plan,
        side: &DeviceSide,
        instance: &Instance,
        base: Option<(&Self, &dyn Fn(usize) -> bool)>,
    ) -> Result<Self> {
        let mut made = Self { stretches: Vec::with_capacity(instance.steps.len() + 2), workspace_bytes: 0 };
        made.stretches.push((Arc::new([]), 0));
        let mut order = 0;
        while order < instance.steps.len() {
            let cluster = plan.cluster(instance.steps[order].0);
            let end = cluster.map_or(order + 1, |c| instance.steps.partition_point(|&(at, _)| at < c.steps.end));
            let steps = &instance.steps[order..end];
            let stretches = order + 1..end + 1;
            let kept = base.filter(|(_, touched)| !steps.iter().any(|&(at, _)| touched(at)));
            match kept.and_then(|(base, _)| base.stretches.get(stretches)) {
                Some(kept) => made.stretches.extend_from_slice(kept),
                None => side.launch_steps(plan, instance, steps, cluster, &mut made.stretches)?,
            }
            order = end;
        }
        let scratch_most = made.stretches.iter().map(|stretch| stretch.1).max().unwrap_or(0);
        made.stretches.push((side.copies(plan, instance).into(), 0));
        made.stretches[0].0 = side.uploads(instance, &made).into();
        made.workspace_bytes = instance.scratch_offset() + scratch_most;
        Ok(made)
    }
}

/// What a plan keeps on a device.
pub(crate) struct DeviceSide {
    pub device: Arc<Device>,
    /// Raw constants that kernels read, by value.
    pub constants: HashMap<ValueId, Arc<Buffer>>,
    small_upload: Function,
    large_upload: Function,
    copy: Function,
}

const SMALL: usize = 64;
const LARGE: usize = 3840;

kernel_params! {
    /// Writes its payload to memory.
    struct SmallUpload { to: DevPtr, bytes: u64, payload: [u64; SMALL / 8] }
}
kernel_params! {
    /// Writes its payload to memory.
    struct LargeUpload { to: DevPtr, bytes: u64, payload: [u64; LARGE / 8] }
}
kernel_params! {
    /// Copies bytes.
    struct Copy { from: DevPtr, to: DevPtr, bytes: u64 }
}

impl DeviceSide {
    /// Uploads those of `raw` that device kernels read, and forgets those that only they do.
    pub fn new(
        device: Arc<Device>,
        steps: &[Step],
        raw: &mut HashMap<ValueId, Constant>,
        outputs: &[ValueId],
        cache: &PackCache,
    ) -> Result<Self> {
        let read = |s: &Step| s.device.is_some().then(|| s.inputs.iter().flatten().copied().collect::<Vec<_>>());
        let host = |s: &Step| s.host.iter().flat_map(|h| h.inputs.iter().flatten().copied()).collect::<Vec<_>>();
        let kept: HashSet<ValueId> = steps.iter().flat_map(host).collect();
        let mut constants = HashMap::new();
        for value in steps.iter().filter_map(read).flatten().chain(outputs.iter().copied()) {
            let Some(constant) = raw.get(&value) else { continue };
            let upload = |c: &[Option<Constant>]| device.upload(c[0].as_ref().map_or(&[], Constant::bytes));
            constants.insert(value, cache.get(std::slice::from_ref(&Some(constant.clone())), "cuda raw", upload)?);
        }
        let gone = HostTensor::from_bytes(DType::U8, &[0], &[]).map(Constant::computed);
        for (value, constant) in raw.iter_mut() {
            if let (false, true, Some(gone)) = (kept.contains(value), constants.contains_key(value), &gone) {
                *constant = gone.clone();
            }
        }
        Ok(Self {
            small_upload: device.function("cuda", "upload_small")?,
            large_upload: device.function("cuda", "upload_large")?,
            copy: device.function("cuda", "copy_bytes")?,
            constants,
            device,
        })
    }

    /// Values that the shape program computed, for the launches of `program` that read them from memory.
    fn uploads(&self, instance: &Instance, program: &Program) -> Vec<Launch> {
        let mut launches = Vec::new();
        for (tensor, slot) in instance.host.iter().zip(&instance.host_slots) {
            let Some(offset) = *slot else { continue };
            let range = offset as u64..(offset + tensor.bytes().len()) as u64;
            let within = |ptr: DevPtr| ptr.base() == Base::Workspace && range.contains(&ptr.offset());
            if program.launches().any(|launch| launch.addresses().any(within)) {
                self.upload(tensor.bytes(), DevPtr::new(Base::Workspace, offset as u64), &mut launches);
            }
        }
        launches
    }

    fn upload(&self, bytes: &[u8], to: DevPtr, launches: &mut Vec<Launch>) {
        if bytes.len() <= SMALL && !bytes.is_empty() {
            let params = SmallUpload { to, bytes: bytes.len() as u64, payload: words(bytes) };
            launches.push(Launch::new(&self.small_upload, linear(1, SMALL as u32), &params));
            return;
        }
        for (i, chunk) in bytes.chunks(LARGE).enumerate() {
            let params = LargeUpload { to: to.plus(i * LARGE), bytes: chunk.len() as u64, payload: words(chunk) };
            launches.push(Launch::new(&self.large_upload, linear(1, 256), &params));
        }
    }

    /// Graph outputs that no kernel writes directly.
    fn copies(&self, plan: &Plan, instance: &Instance) -> Vec<Launch> {
        let mut launches = Vec::new();
        for &(j, value) in &instance.copies {
            let to = DevPtr::new(Base::Output(j), 0);
            match instance.find(value) {
                // Or a view of it.
                Some((dtype, shape, Place::Host(i), shift)) => {
                    let bytes = dtype.bytes(shape.iter().product()).unwrap_or(0);
                    self.upload(&instance.host[i].bytes()[shift..][..bytes], to, &mut launches);
                }
                _ => {
                    let Some(tensor) = self.tensor(plan, instance, value) else { continue };
                    let bytes = tensor.bytes();
                    // 16 bytes a thread, a few passes each.
                    let blocks = bytes.div_ceil(256 * 16).clamp(1, 4096);
                    if bytes > 0 {
                        let params = Copy { from: tensor.ptr, to, bytes: bytes as u64 };
                        launches.push(Launch::new(&self.copy, linear(blocks, 256), &params));
                    }
                }
            }
        }
        launches
    }

    /// The stretches of `steps`: of a cluster, all that are left of it, or one alone.
    fn launch_steps(
        &self,
        plan: &Plan,
        instance: &Instance,
        steps: &[(usize, usize)],
        cluster: Option<&Cluster>,
        to: &mut Vec<Stretch>,
    ) -> Result<()> {
        if let Some(fused) = cluster.map(|c| self.launch_cluster(plan, instance, c)).transpose()?.flatten() {
            to.push(fused);
            to.extend(steps[1..].iter().map(|_| Stretch::default()));
            return Ok(());
        }
        for &(at, _) in steps {
            to.push(self.launch_step(plan, instance, &plan.steps[at])?);
        }
        Ok(())
    }

    /// A cluster's launches, if its kernel takes these shapes.
    fn launch_cluster(&self, plan: &Plan, instance: &Instance, cluster: &Cluster) -> Result<Option<Stretch>> {
        let tensor = |v: &Option<ValueId>| v.and_then(|v| self.tensor(plan, instance, v));
        let member = |&at: &usize| Member {
            inputs: plan.steps[at].inputs.iter().map(tensor).collect(),
            outputs: plan.graph.nodes[plan.steps[at].node].outputs.iter().map(tensor).collect(),
        };
        let members: SmallVec<[_; 16]> = cluster.members.iter().map(member).collect();
        let mut cx = LaunchCx {
            inputs: &[],
            outputs: &[],
            device: &self.device,
            label: &plan.steps[cluster.members[0]].label,
            scratch_offset: instance.scratch_offset(),
            scratch_bytes: 0,
            launches: Vec::new(),
        };
        let taken = cluster.kernel.launch(&mut cx, &members)?;
        Ok(taken.then(|| (cx.launches.into(), cx.scratch_bytes)))
    }

    fn launch_step(&self, plan: &Plan, instance: &Instance, step: &Step) -> Result<Stretch> {
        let tensor = |v: &Option<ValueId>| v.and_then(|v| self.tensor(plan, instance, v));
        let inputs: SmallVec<[_; 16]> = step.inputs.iter().map(tensor).collect();
        let outputs: SmallVec<[_; 8]> = plan.graph.nodes[step.node].outputs.iter().map(tensor).collect();
        let mut cx = LaunchCx {
            inputs: &inputs,
            outputs: &outputs,
            device: &self.device,
            label: &step.label,
            scratch_offset: instance.scratch_offset(),
            scratch_bytes: 0,
            launches: Vec::new(),
        };
        let kernel = step.device.as_ref();
        let missing = || abi::Error::Internal(format!("{} has no CUDA kernel", step.label));
        kernel.ok_or_else(missing)?.launch(&mut cx)?;
        let scratch = cx.scratch_bytes;
        Ok((cx.launches.into(), scratch))
    }

    fn tensor<'a>(&self, plan: &'a Plan, instance: &'a Instance, value: ValueId) -> Option<DeviceTensor<'a>> {
        let (dtype, shape, place, shift) = instance.find(value)?;
        let ptr = match place {
            Place::Input(i) => DevPtr::new(Base::Input(i), 0),
            Place::Output(j) => DevPtr::new(Base::Output(j), 0),
            Place::Workspace(offset) => DevPtr::new(Base::Workspace, offset as u64),
            Place::Constant(id) => self.constants.get(&id)?.ptr(),
            Place::Host(i) => DevPtr::new(Base::Workspace, instance.host_slots[i]? as u64),
        };
        let value = match place {
            Place::Host(i) => Some(&instance.host[i]),
            _ if shift > 0 => None,
            _ => plan.template[value].as_ref().and_then(|f| f.value.as_ref()),
        };
        Some(DeviceTensor { dtype, shape, ptr: ptr.plus(shift), value })
    }
}

/// `bytes` as words, with zeros behind them.
fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks(8)) {
        let mut full = [0; 8];
        full[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(full);
    }
    words
}
