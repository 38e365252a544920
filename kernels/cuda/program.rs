//! The launches of one plan instance, in order.

use super::{Base, Buffer, DevPtr, Device, DeviceTensor, HostStep, Launch, LaunchCx, linear};
use crate::fuse::cluster::{Cluster, Member};
use crate::instance::{Instance, Place};
use crate::kernel_params;
use crate::plan::{Plan, Step};
use crate::weights::{Constant, PackCache};
use abi::cuda::Function;
use abi::{DType, HostTensor, Result, ValueId};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// What a Run launches: a listing, and what differs from it. Programs of one listing compare fast.
pub struct Program {
    listing: Arc<Listing>,
    /// Stretches in the listing's stead, by number; each has as many launches.
    patches: SmallVec<[(usize, Stretch); 16]>,
    workspace_bytes: usize,
}

/// What one step does.
#[derive(Clone, Default)]
struct Stretch {
    launches: Arc<[Launch]>,
    /// What the host does after them.
    then: Option<Arc<dyn HostStep>>,
    /// Bytes of scratch that all that needs.
    scratch: usize,
}

impl Stretch {
    fn of(launches: Vec<Launch>) -> Self {
        Self { launches: launches.into(), ..Self::default() }
    }
}

impl From<LaunchCx<'_>> for Stretch {
    fn from(cx: LaunchCx<'_>) -> Self {
        Self { launches: cx.launches.into(), then: cx.then, scratch: cx.scratch_bytes }
    }
}

/// A piece of a Run's work.
pub enum Work<'a> {
    /// A kernel.
    Launch(&'a Launch),
    /// Something that the host decides on once the work before it is done.
    Host(&'a dyn HostStep),
}

/// A stretch for the uploads, one for every step of the instance, and one for the copies.
struct Listing {
    stretches: Vec<Stretch>,
    /// Per stretch: the number of its first launch; then the number of launches.
    starts: Vec<usize>,
    /// The most scratch that a stretch needs.
    scratch: usize,
    /// Which of the instance's host values are uploaded.
    uploaded: Vec<usize>,
    slots: Arc<[Slot]>,
    /// Each base that a launch has an address of, with the launch's number; in order.
    users: Vec<(Base, usize)>,
    /// Whether the host has a part in a Run.
    needs_host: bool,
}

/// Where a host value that kernels read lies in the workspace: first byte, end, number. In rising order.
type Slot = (u64, u64, usize);

impl Listing {
    fn new(stretches: Vec<Stretch>, uploaded: Vec<usize>, slots: Arc<[Slot]>) -> Self {
        let mut starts = vec![0];
        starts.extend(stretches.iter().scan(0, |at, stretch| {
            *at += stretch.launches.len();
            Some(*at)
        }));
        let scratch = stretches.iter().map(|stretch| stretch.scratch).max().unwrap_or(0);
        let needs_host = stretches.iter().any(|stretch| stretch.then.is_some());
        let launches = stretches.iter().flat_map(|stretch| stretch.launches.iter()).enumerate();
        let mut users: Vec<_> =
            launches.flat_map(|(n, kernel)| kernel.addresses().map(move |p| (p.base(), n))).collect();
        users.sort_unstable();
        users.dedup();
        Self { stretches, starts, scratch, uploaded, slots, users, needs_host }
    }
}

impl Program {
    /// Bytes of workspace that a Run needs.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Every launch in order.
    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        (0..self.listing.stretches.len()).flat_map(|at| self.stretch(at).launches.iter())
    }

    /// Whether the host has a part in a Run, so that it cannot be a CUDA graph.
    pub fn needs_host(&self) -> bool {
        self.listing.needs_host
    }

    /// All that a Run does, in order.
    pub fn work(&self) -> impl Iterator<Item = Work<'_>> {
        (0..self.listing.stretches.len()).flat_map(|at| {
            let Stretch { launches, then, .. } = self.stretch(at);
            launches.iter().map(Work::Launch).chain(then.as_deref().map(Work::Host))
        })
    }

    /// Number of launches.
    pub fn len(&self) -> usize {
        self.listing.starts.last().copied().unwrap_or(0)
    }

    /// Whether nothing is launched.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether both launch the same functions in the same order.
    pub fn same_functions(&self, other: &Self) -> bool {
        let same = |(a, b): (&Launch, &Launch)| a.same_function(b);
        if Arc::ptr_eq(&self.listing, &other.listing) {
            return self.apart(other).into_iter().all(|at| self.pairs(other, at).all(same));
        }
        self.len() == other.len() && self.launches().zip(other.launches()).all(same)
    }

    /// The launches whose geometry or parameters differ from `other`'s, which has the same functions; by number.
    pub fn differences<'a>(&'a self, other: &'a Self) -> Vec<(usize, &'a Launch)> {
        let differ = |(n, (mine, theirs)): (usize, (&'a Launch, &'a Launch))| {
            (!mine.same_parameters(theirs)).then_some((n, mine))
        };
        if !Arc::ptr_eq(&self.listing, &other.listing) {
            return self.launches().zip(other.launches()).enumerate().filter_map(differ).collect();
        }
        let stretch = |at: usize| (self.listing.starts[at]..).zip(self.pairs(other, at));
        self.apart(other).into_iter().flat_map(stretch).filter_map(differ).collect()
    }

    /// The launches that have an address of `base`, by number; some more than once.
    pub fn users(&self, base: Base) -> impl Iterator<Item = (usize, &Launch)> {
        let listing = &self.listing;
        let first = listing.users.partition_point(|&user| user < (base, 0));
        let listed = listing.users[first..].iter().take_while(move |user| user.0 == base).map(|&(_, n)| {
            let at = listing.starts.partition_point(|&start| start <= n) - 1;
            (n, &self.stretch(at).launches[n - listing.starts[at]])
        });
        let patched = self.patches.iter().flat_map(|(at, patch)| (listing.starts[*at]..).zip(patch.launches.iter()));
        listed.chain(patched).filter(move |(_, kernel)| kernel.addresses().any(|p| p.base() == base))
    }

    /// The stretches that another program of this listing may have otherwise, in order.
    fn apart(&self, other: &Self) -> SmallVec<[usize; 32]> {
        let mut apart: SmallVec<_> = self.patches.iter().chain(&other.patches).map(|&(at, _)| at).collect();
        apart.sort_unstable();
        apart.dedup();
        apart
    }

    fn stretch(&self, at: usize) -> &Stretch {
        match self.patches.binary_search_by_key(&at, |&(at, _)| at) {
            Ok(patch) => &self.patches[patch].1,
            Err(_) => &self.listing.stretches[at],
        }
    }

    /// The launches of stretch `at`, each with that of another program of this listing.
    fn pairs<'a>(&'a self, other: &'a Self, at: usize) -> impl Iterator<Item = (&'a Launch, &'a Launch)> {
        self.stretch(at).launches.iter().zip(other.stretch(at).launches.iter())
    }

    /// Writes down the launches of `instance`.
    pub(crate) fn new(plan: &Plan, side: &DeviceSide, instance: &Instance) -> Result<Self> {
        let mut stretches = Vec::with_capacity(instance.steps.len() + 2);
        stretches.push(Stretch::default());
        let mut order = 0;
        let mut before = 0..0;
        while order < instance.steps.len() {
            let (cluster, steps) = cluster_at(plan, instance, order);
            side.launch_steps(plan, instance, steps.clone(), (cluster, before.clone()), &mut stretches)?;
            order = steps.end;
            if stretches[steps.start + 1..].iter().any(|stretch| !stretch.launches.is_empty()) {
                before = steps;
            }
        }
        let slots = slots(instance);
        let uploaded = read_from_memory(&slots, stretches.iter());
        stretches.push(Stretch::of(side.copies(plan, instance)));
        stretches[0] = Stretch::of(side.uploads(instance, &uploaded));
        let listing = Listing::new(stretches, uploaded, slots);
        let workspace_bytes = instance.scratch_offset() + listing.scratch;
        Ok(Self { workspace_bytes, listing: Arc::new(listing), patches: SmallVec::new() })
    }

    /// The program of `instance`, which has this one's places and other shapes; `touched` are the steps that see them.
    pub(crate) fn adapted(
        &self,
        plan: &Plan,
        side: &DeviceSide,
        instance: &Instance,
        touched: &[usize],
    ) -> Result<Self> {
        let mut patches: SmallVec<[(usize, Stretch); 16]> = SmallVec::new();
        let mut order = 0;
        for &at in touched {
            let found = instance.steps[order..].binary_search_by_key(&at, |&(at, _)| at);
            let Ok(found) = found.map(|found| order + found) else { continue };
            let (cluster, steps) = cluster_at(plan, instance, found);
            let mut made = Vec::with_capacity(steps.len());
            let before = (0..steps.start).rev().find(|order| !self.stretch(order + 1).launches.is_empty());
            let before = before.map_or(0..0, |order| cluster_at(plan, instance, order).1);
            side.launch_steps(plan, instance, steps.clone(), (cluster, before), &mut made)?;
            patches.extend((steps.start + 1..).zip(made));
            order = steps.end;
        }
        // A launch that comes or goes changes what is in front of the next.
        let is_empty = |stretch: &Stretch| stretch.launches.is_empty();
        if patches.iter().any(|(at, stretch)| is_empty(stretch) != is_empty(self.stretch(*at))) {
            return Self::new(plan, side, instance);
        }
        let mut uploaded = self.listing.uploaded.clone();
        uploaded.extend(read_from_memory(&self.listing.slots, patches.iter().map(|(_, stretch)| stretch)));
        uploaded.sort_unstable();
        uploaded.dedup();
        let last = self.listing.stretches.len() - 1;
        patches.insert(0, (0, Stretch::of(side.uploads(instance, &uploaded))));
        patches.push((last, Stretch::of(side.copies(plan, instance))));
        Ok(self.patched(patches, uploaded, instance.scratch_offset()))
    }

    /// This with `patches` over it, by number.
    fn patched(&self, patches: SmallVec<[(usize, Stretch); 16]>, uploaded: Vec<usize>, scratch_offset: usize) -> Self {
        let mut all: SmallVec<[(usize, Stretch); 16]> = SmallVec::new();
        let kept = self.patches.iter().filter(|(at, _)| patches.binary_search_by_key(at, |&(at, _)| at).is_err());
        all.extend(kept.cloned());
        all.extend(patches);
        all.sort_unstable_by_key(|&(at, _)| at);
        // A stretch that patches replace may have needed the most: that is not worth a look at all the others.
        let scratch = all.iter().map(|(_, stretch)| stretch.scratch).fold(self.listing.scratch, usize::max);
        let workspace_bytes = scratch_offset + scratch;
        let count = |stretch: &Stretch| stretch.launches.len();
        let fits = |(at, stretch): &(usize, Stretch)| count(stretch) == count(&self.listing.stretches[*at]);
        if uploaded == self.listing.uploaded && all.iter().all(fits) {
            return Self { listing: self.listing.clone(), patches: all, workspace_bytes };
        }
        let mut stretches = self.listing.stretches.clone();
        all.into_iter().for_each(|(at, stretch)| stretches[at] = stretch);
        let listing = Listing::new(stretches, uploaded, self.listing.slots.clone());
        Self { listing: Arc::new(listing), patches: SmallVec::new(), workspace_bytes }
    }
}

fn slots(instance: &Instance) -> Arc<[Slot]> {
    let slot = |(i, slot): (usize, &Option<usize>)| {
        let bytes = instance.host[i].bytes().len();
        slot.map(|at| (at as u64, (at + bytes) as u64, i))
    };
    let mut slots: Vec<_> = instance.host_slots.iter().enumerate().filter_map(slot).collect();
    slots.sort_unstable();
    slots.into()
}

/// Which host values the launches read from memory, in order.
fn read_from_memory<'a>(slots: &[Slot], stretches: impl Iterator<Item = &'a Stretch>) -> Vec<usize> {
    let value = |ptr: DevPtr| {
        let offset = Some(ptr.offset()).filter(|_| ptr.base() == Base::Workspace)?;
        let at = slots.partition_point(|&(start, ..)| start <= offset).checked_sub(1)?;
        (offset < slots[at].1).then_some(slots[at].2)
    };
    let launches = stretches.flat_map(|stretch| stretch.launches.iter());
    let mut values: Vec<_> = launches.flat_map(Launch::addresses).filter_map(value).collect();
    values.sort_unstable();
    values.dedup();
    values
}

/// The cluster that the `order`th step of `instance` belongs to, if any, and the range of steps that are launched with it.
fn cluster_at<'a>(plan: &'a Plan, instance: &Instance, order: usize) -> (Option<&'a Cluster>, Range<usize>) {
    let Some(cluster) = plan.cluster(instance.steps[order].0) else { return (None, order..order + 1) };
    let first_from = |step: usize| instance.steps.partition_point(|&(at, _)| at < step);
    (Some(cluster), first_from(cluster.steps.start)..first_from(cluster.steps.end))
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

    /// Brings host values to the device.
    fn uploads(&self, instance: &Instance, values: &[usize]) -> Vec<Launch> {
        let mut launches = Vec::new();
        for &i in values {
            if let Some(offset) = instance.host_slots[i] {
                self.upload(instance.host[i].bytes(), DevPtr::new(Base::Workspace, offset as u64), &mut launches);
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

    /// The stretches of `steps`: of a cluster, all that are left of it, or one alone. The launch in front of them is one
    /// of the steps `before`; there is none when that is empty.
    fn launch_steps(
        &self,
        plan: &Plan,
        instance: &Instance,
        steps: Range<usize>,
        (cluster, before): (Option<&Cluster>, Range<usize>),
        to: &mut Vec<Stretch>,
    ) -> Result<()> {
        let next = instance.steps.get(steps.end).and_then(|&(at, _)| plan.cluster(at));
        let hastens = next.is_some_and(|next| next.kernel.is_patient());
        let [steps, before] = [steps, before].map(|range| &instance.steps[range]);
        let launch = |cluster: &Cluster| self.launch_cluster(plan, instance, cluster, before, hastens);
        if let Some(fused) = cluster.map(launch).transpose()?.flatten() {
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
    fn launch_cluster(
        &self,
        plan: &Plan,
        instance: &Instance,
        cluster: &Cluster,
        before: &[(usize, usize)],
        hastens: bool,
    ) -> Result<Option<Stretch>> {
        let tensor = |v: &Option<ValueId>| v.and_then(|v| self.tensor(plan, instance, v));
        let member = |&at: &usize| Member {
            inputs: plan.steps[at].inputs.iter().map(tensor).collect(),
            outputs: plan.graph.nodes[plan.steps[at].node].outputs.iter().map(tensor).collect(),
        };
        let members: SmallVec<[_; 16]> = cluster.members.iter().map(member).collect();
        let made = before.iter().flat_map(|&(at, _)| &plan.graph.nodes[plan.steps[at].node].outputs);
        let made: SmallVec<[_; 16]> = made.filter_map(tensor).collect();
        let label = &plan.steps[cluster.members[0]].label;
        let mut cx = LaunchCx {
            before: Some(&made[..]).filter(|_| !before.is_empty()),
            hastens,
            ..LaunchCx::new(&self.device, label, instance.scratch_offset())
        };
        let taken = cluster.kernel.launch(&mut cx, &members)?;
        Ok(taken.then(|| cx.into()))
    }

    fn launch_step(&self, plan: &Plan, instance: &Instance, step: &Step) -> Result<Stretch> {
        let tensor = |v: &Option<ValueId>| v.and_then(|v| self.tensor(plan, instance, v));
        let inputs: SmallVec<[_; 16]> = step.inputs.iter().map(tensor).collect();
        let outputs: SmallVec<[_; 8]> = plan.graph.nodes[step.node].outputs.iter().map(tensor).collect();
        let mut cx = LaunchCx {
            inputs: &inputs,
            outputs: &outputs,
            ..LaunchCx::new(&self.device, &step.label, instance.scratch_offset())
        };
        let kernel = step.device.as_ref();
        let missing = || abi::Error::Internal(format!("{} has no CUDA kernel", step.label));
        kernel.ok_or_else(missing)?.launch(&mut cx)?;
        Ok(cx.into())
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
