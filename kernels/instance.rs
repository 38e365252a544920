//! A plan for one set of input shapes: every shape known, every tensor placed.

use crate::arena::Arena;
use crate::cuda::{COUNTER_BYTES, Program};
use crate::fact::{Fact, Facts};
use crate::fuse::cluster::Cluster;
use crate::kernel::{RunCx, Shapes, Tensor, TensorMut};
use crate::op::NodeCx;
use crate::par::Par;
use crate::plan::{Io, Plan, Step};
use crate::shape_program::input_tensor;
use abi::tensor::AlignedBytes;
use abi::{DType, Error, HostTensor, Result, ValueId};
use smallvec::SmallVec;
use std::sync::Arc;

mod adapt;

/// What decides every shape of a Run: the input shapes, and the contents of the inputs that shapes depend on.
#[derive(PartialEq, Eq)]
pub struct Key {
    shapes: Vec<usize>,
    contents: Vec<u8>,
}

impl Key {
    /// Reads the key off a Run's inputs.
    pub fn of(plan: &Plan, io: &dyn Io) -> Result<Self> {
        let (mut shapes, mut contents) = (Vec::with_capacity(4 * plan.graph.inputs.len()), Vec::new());
        for i in 0..plan.graph.inputs.len() {
            let (_, shape, _) = io.input(i)?;
            shapes.push(shape.len());
            shapes.extend_from_slice(shape);
        }
        for &i in &plan.key_inputs {
            contents.extend_from_slice(input_tensor(io, i)?.bytes());
        }
        Ok(Self { shapes, contents })
    }

    /// In how many dims the inputs differ.
    pub fn distance(&self, other: &Self) -> usize {
        if self.shapes.len() != other.shapes.len() {
            return usize::MAX;
        }
        self.shapes.iter().zip(&other.shapes).filter(|(a, b)| a != b).count()
    }
}

/// Where a tensor's bytes are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Input(usize),
    Output(usize),
    Workspace(usize),
    Constant(ValueId),
    Host(usize),
}

#[derive(Clone)]
struct Placed {
    dtype: DType,
    shape: Arc<[usize]>,
    place: Option<Place>,
    /// Bytes behind the place: an alias of a part of another tensor.
    shift: usize,
    /// Bytes from there on that the tensor may take, in the workspace.
    room: usize,
}

impl Placed {
    fn bytes(&self) -> usize {
        self.dtype.bytes(self.shape.iter().product()).unwrap_or(0)
    }
}

/// See the module.
#[derive(Clone)]
pub struct Instance {
    facts: Facts,
    values: Vec<Option<Placed>>,
    /// Steps whose outputs the shape program did not compute already, with their scratch bytes (CPU plans).
    pub(crate) steps: Vec<(usize, usize)>,
    /// Values that the shape program computed.
    pub(crate) host: Vec<HostTensor>,
    /// Where a CUDA plan puts them in the workspace, those that kernels read.
    pub(crate) host_slots: Vec<Option<usize>>,
    /// Graph outputs that no kernel writes directly.
    pub(crate) copies: Vec<(usize, ValueId)>,
    scratch_offset: usize,
    scratch_bytes: usize,
    /// What a CUDA plan launches.
    program: Option<Arc<Program>>,
}

impl Instance {
    /// Places every tensor of a Run with these facts, the shape program's.
    pub fn new(plan: &Plan, facts: Facts) -> Result<Self> {
        let mut made = Self {
            facts,
            values: Vec::with_capacity(plan.graph.values.len()),
            steps: Vec::new(),
            host: Vec::new(),
            host_slots: Vec::new(),
            copies: Vec::new(),
            scratch_offset: 0,
            scratch_bytes: 0,
            program: None,
        };
        for (id, fact) in made.facts.iter().enumerate() {
            made.values.push(made_value(fact.as_deref(), plan.constants.contains_key(&id), id, &mut made.host));
        }
        made.place(plan);
        match &plan.device {
            None => made.size_scratch(plan, |_| true),
            Some(side) => made.program = Some(Arc::new(Program::new(plan, side, &made)?)),
        }
        Ok(made)
    }

    /// What a CUDA plan launches.
    pub fn program(&self) -> Option<&Arc<Program>> {
        self.program.as_ref()
    }

    /// Type and shape of graph output `j`.
    pub fn output(&self, plan: &Plan, j: usize) -> Result<(DType, &[usize])> {
        let placed = self.values[plan.graph.outputs[j]].as_ref();
        let placed = placed.ok_or_else(|| Error::Internal(format!("graph output {j} was not inferred")))?;
        Ok((placed.dtype, &placed.shape))
    }

    /// Where scratch begins in the workspace.
    pub(crate) fn scratch_offset(&self) -> usize {
        self.scratch_offset
    }

    /// Bytes of workspace that a Run needs.
    pub fn workspace_bytes(&self) -> usize {
        self.scratch_offset + self.scratch_bytes
    }

    /// Decides every place: inputs and outputs where the host has them, the rest in the workspace by lifetime.
    fn place(&mut self, plan: &Plan) {
        let graph = &plan.graph;
        for (i, &value) in graph.inputs.iter().enumerate() {
            self.set(value, Place::Input(i));
        }
        let roots = Roots::of(self, plan);
        for (at, step) in plan.steps.iter().enumerate() {
            let node = &graph.nodes[step.node];
            let known = node.outputs.iter().flatten().all(|&v| self.placed(v).is_some());
            if !known && !roots.moves_nothing[at] {
                self.steps.push((at, 0));
            }
        }
        for (j, &value) in graph.outputs.iter().enumerate() {
            let (root, shift) = roots.of[value];
            let bytes = |v: ValueId| self.values[v].as_ref().map(Placed::bytes);
            if self.placed(root).is_none() && shift == 0 && bytes(root) == bytes(value) {
                self.set(root, Place::Output(j));
            } else {
                self.copies.push((j, value));
            }
        }
        self.place_workspace(plan, &roots);
        // A view shows its root's bytes, unless the shape program knows it better.
        for (value, &(root, shift)) in roots.of.iter().enumerate() {
            let room = self.values[root].as_ref().map_or(0, |root| root.room.saturating_sub(shift));
            if let (None, Some(place), Some(placed)) = (self.placed(value), self.placed(root), &mut self.values[value])
            {
                (placed.place, placed.shift, placed.room) = (Some(place), shift, room);
            }
        }
    }

    fn place_workspace(&mut self, plan: &Plan, roots: &Roots) {
        let root = |value: ValueId| roots.of[value].0;
        let mut last = vec![0usize; self.values.len()];
        for (order, &(at, _)) in self.steps.iter().enumerate() {
            let step = &plan.steps[at];
            // What a cluster reads stays until the last of its steps.
            let within = |cluster: &Cluster| self.steps.partition_point(|&(other, _)| other < cluster.steps.end) - 1;
            let order = plan.cluster(at).map_or(order, within);
            for &value in step.inputs.iter().flatten().chain(plan.graph.nodes[step.node].outputs.iter().flatten()) {
                last[root(value)] = order;
            }
        }
        self.copies.iter().for_each(|&(_, value)| last[root(value)] = usize::MAX);
        let mut arena = Arena::default();
        if plan.device.is_some() {
            // First of all, and never given back.
            arena.take(if plan.clusters.is_empty() { 0 } else { COUNTER_BYTES });
            self.place_host_values(plan, roots, &mut arena);
        }
        let mut ends: Vec<Vec<(usize, usize)>> = vec![Vec::new(); self.steps.len()];
        for order in 0..self.steps.len() {
            let node = &plan.graph.nodes[plan.steps[self.steps[order].0].node];
            for &value in node.outputs.iter().flatten() {
                if self.placed(value).is_some() {
                    continue;
                }
                let Some(placed) = &mut self.values[value] else { continue };
                let bytes = roomy(placed.bytes());
                let offset = arena.take(bytes);
                (placed.place, placed.room) = (Some(Place::Workspace(offset)), bytes);
                if let Some(end) = ends.get_mut(last[value]) {
                    end.push((offset, bytes));
                }
            }
            ends[order].iter().for_each(|&(offset, bytes)| arena.give(offset, bytes));
        }
        self.scratch_offset = arena.bytes();
    }

    /// Gives values that the host computed, and that kernels read (themselves or as views), a place for the whole Run.
    fn place_host_values(&mut self, plan: &Plan, roots: &Roots, arena: &mut Arena) {
        self.host_slots = vec![None; self.host.len()];
        for &(at, _) in &self.steps {
            for &value in plan.steps[at].inputs.iter().flatten() {
                if let Some(Place::Host(i)) = self.placed(value).or_else(|| self.placed(roots.of[value].0))
                    && self.host_slots[i].is_none()
                {
                    self.host_slots[i] = Some(arena.take(self.host[i].bytes().len()));
                }
            }
        }
    }

    /// Asks the kernels of the steps that `which` holds for how much scratch they need.
    fn size_scratch(&mut self, plan: &Plan, which: impl Fn(usize) -> bool) {
        let mut steps = std::mem::take(&mut self.steps);
        self.scratch_bytes = 0;
        for (at, scratch) in &mut steps {
            if which(*at) {
                let step = &plan.steps[*at];
                let shape = |v: &Option<ValueId>| v.and_then(|v| self.values[v].as_ref()).map(|p| (p.dtype, &*p.shape));
                let inputs: SmallVec<[_; 16]> = step.inputs.iter().map(shape).collect();
                let outputs: SmallVec<[_; 8]> = plan.graph.nodes[step.node].outputs.iter().map(shape).collect();
                let Some(host) = &step.host else { continue };
                *scratch = host.kernel.scratch_bytes(&Shapes { inputs: &inputs, outputs: &outputs });
            }
            self.scratch_bytes = self.scratch_bytes.max(*scratch);
        }
        self.steps = steps;
    }

    /// A value's type, shape, place, and the bytes from there on to its first.
    pub(crate) fn find(&self, value: ValueId) -> Option<(DType, &[usize], Place, usize)> {
        let placed = self.values[value].as_ref()?;
        Some((placed.dtype, &placed.shape, placed.place?, placed.shift))
    }

    /// A value's place.
    pub(crate) fn placed(&self, value: ValueId) -> Option<Place> {
        self.values[value].as_ref().and_then(|p| p.place)
    }

    fn set(&mut self, value: ValueId, place: Place) {
        if let Some(placed) = &mut self.values[value] {
            placed.place = Some(place);
        }
    }

    /// Runs every step. `workspace` has at least `workspace_bytes`.
    pub fn run(&self, plan: &Plan, io: &mut dyn Io, workspace: &mut [u8], par: Par<'_>) -> Result<()> {
        let outputs = self.bind_outputs(plan, io)?;
        let (inputs, _copies) = self.bind_inputs(plan, io, &outputs)?;
        let base = workspace.as_mut_ptr();
        let address = |place: Place| -> *mut u8 {
            match place {
                Place::Input(i) => inputs[i].cast_mut(),
                Place::Output(j) => outputs[j],
                // SAFETY: offsets were handed out below `workspace_bytes`.
                Place::Workspace(offset) => unsafe { base.add(offset) },
                Place::Constant(value) => plan.constants[&value].bytes().as_ptr().cast_mut(),
                Place::Host(i) => self.host[i].bytes().as_ptr().cast_mut(),
            }
        };
        let find = |value: ValueId| {
            let placed = self.values[value].as_ref()?;
            Some((placed.dtype, &*placed.shape, address(placed.place?)))
        };
        for &(at, scratch) in &self.steps {
            let step = &plan.steps[at];
            let tensors: SmallVec<[Option<Tensor>; 16]> = (step.inputs.iter())
                .map(|v| {
                    let (dtype, shape, ptr) = v.and_then(find)?;
                    // SAFETY: placed for the whole Run; the arena keeps a value's bytes until its last reader ran.
                    Some(unsafe { Tensor::from_raw(dtype, shape, ptr) })
                })
                .collect();
            let mut results: Vec<Option<TensorMut>> = (plan.graph.nodes[step.node].outputs.iter())
                .map(|v| {
                    let (dtype, shape, ptr) = v.and_then(find)?;
                    // SAFETY: as above; live ranges do not overlap, and an output that shares a caller's buffer with
                    // an input does so only where the op declares it (`bind_inputs` copies the others).
                    Some(unsafe { TensorMut::from_raw(dtype, shape, ptr) })
                })
                .collect();
            // SAFETY: the scratch region lies behind every placed tensor, within the workspace.
            let scratch = unsafe { std::slice::from_raw_parts_mut(base.add(self.scratch_offset), scratch) };
            let missing = || Error::Internal(format!("{} has no CPU kernel", step.label));
            step.host.as_ref().ok_or_else(missing)?.kernel.run(&mut RunCx {
                inputs: &tensors,
                outputs: &mut results,
                scratch,
                par,
                label: &step.label,
            })?;
        }
        for &(j, value) in &self.copies {
            if let Some((dtype, shape, from)) = find(value) {
                let bytes = dtype.bytes(shape.iter().product()).unwrap_or(0);
                // SAFETY: both hold `bytes` bytes; `copy` allows overlap.
                unsafe { std::ptr::copy(from, outputs[j], bytes) };
            }
        }
        Ok(())
    }

    fn bind_outputs(&self, plan: &Plan, io: &mut dyn Io) -> Result<SmallVec<[*mut u8; 64]>> {
        let mut outputs = SmallVec::new();
        for (j, &value) in plan.graph.outputs.iter().enumerate() {
            let placed = self.values[value].as_ref();
            let placed = placed.ok_or_else(|| Error::Internal(format!("graph output {j} was not inferred")))?;
            outputs.push(io.output(j, placed.dtype, &placed.shape)?);
        }
        Ok(outputs)
    }

    /// Input addresses; an input that overlaps an output which no declared in-place update explains is copied.
    fn bind_inputs(
        &self,
        plan: &Plan,
        io: &dyn Io,
        outputs: &[*mut u8],
    ) -> Result<(SmallVec<[*const u8; 64]>, Vec<AlignedBytes>)> {
        let extents: SmallVec<[(usize, usize); 64]> = (outputs.iter().zip(&plan.graph.outputs))
            .map(|(&out, &value)| (out as usize, self.values[value].as_ref().map_or(0, Placed::bytes)))
            .collect();
        let (mut inputs, mut copies) = (SmallVec::new(), Vec::new());
        for i in 0..plan.graph.inputs.len() {
            let (dtype, shape, ptr) = io.input(i)?;
            let (start, bytes) = (ptr as usize, dtype.bytes(shape.iter().product()).unwrap_or(0));
            let clash = extents.iter().enumerate().any(|(j, &(out, out_bytes))| {
                let overlap = bytes > 0 && out_bytes > 0 && start < out + out_bytes && out < start + bytes;
                overlap && !(start == out && plan.in_place.contains(&(i, j)))
            });
            inputs.push(if clash { copy_of(ptr, bytes, &mut copies)? } else { ptr });
        }
        Ok((inputs, copies))
    }
}

/// An eighth of slack: a tensor that grows by one token seldom needs another place.
fn roomy(bytes: usize) -> usize {
    let eighth = bytes.checked_ilog2().map_or(0, |log| (1 << log) / 8);
    bytes.next_multiple_of(eighth.max(256))
}

/// Whose bytes each value shows.
struct Roots {
    /// Per value: the value that holds its bytes (itself, unless it is a view), and where in that they begin.
    of: Vec<(ValueId, usize)>,
    /// Per step: whether its outputs are all views.
    moves_nothing: Vec<bool>,
}

impl Roots {
    /// Aligned as every tensor of a device plan is.
    const ALIGN: usize = 16;

    fn of(instance: &Instance, plan: &Plan) -> Self {
        let mut roots = Self { of: (0..instance.values.len()).map(|v| (v, 0)).collect(), moves_nothing: Vec::new() };
        for step in &plan.steps {
            let node = &plan.graph.nodes[step.node];
            let Some(&Some(from)) = node.inputs.first() else {
                roots.moves_nothing.push(false);
                continue;
            };
            let offsets = if step.def.view { Some(vec![0]) } else { roots.alias(instance, plan, step, from) };
            roots.moves_nothing.push(offsets.is_some());
            let (root, shift) = roots.of[from];
            for (value, offset) in node.outputs.iter().zip(offsets.unwrap_or_default()) {
                if let Some(value) = *value {
                    roots.of[value] = (root, shift + offset);
                }
            }
        }
        roots
    }

    /// Where a step's outputs lie in its input 0, if that is a tensor which some step of a device plan makes. (Others
    /// stay as they are: graph inputs may be updated in place before the view's last reader.)
    fn alias(&self, instance: &Instance, plan: &Plan, step: &Step, from: ValueId) -> Option<Vec<usize>> {
        let alias = step.def.alias.filter(|_| plan.device.is_some())?;
        let (root, shift) = self.of[from];
        if instance.placed(root).is_some() || instance.values[root].is_none() {
            return None;
        }
        let offsets = alias(&NodeCx::new(&plan.graph, step.node, &instance.facts))?;
        offsets.iter().all(|offset| (shift + offset).is_multiple_of(Self::ALIGN)).then_some(offsets)
    }
}

fn copy_of(ptr: *const u8, bytes: usize, copies: &mut Vec<AlignedBytes>) -> Result<*const u8> {
    let memory = || Error::Memory { asked: bytes, purpose: "a copy of an input that shares an output's buffer".into() };
    let mut copy = AlignedBytes::try_zeroed(bytes).ok_or_else(memory)?;
    // SAFETY: the host promises that the input's bytes are valid for this Run.
    copy.as_mut_slice().copy_from_slice(unsafe { std::slice::from_raw_parts(ptr, bytes) });
    copies.push(copy);
    Ok(copies[copies.len() - 1].as_slice().as_ptr())
}

/// A value's type, shape and, where it is known ahead, place. `None` for values that no step left makes or reads.
fn made_value(fact: Option<&Fact>, constant: bool, id: ValueId, host: &mut Vec<HostTensor>) -> Option<Placed> {
    let fact = fact?;
    let place = if constant {
        Some(Place::Constant(id))
    } else if let Some(value) = fact.value.as_ref().filter(|_| !fact.constant) {
        host.push(value.clone());
        Some(Place::Host(host.len() - 1))
    } else {
        None
    };
    Some(Placed { dtype: fact.dtype, shape: fact.known_shape()?.into(), place, shift: 0, room: 0 })
}
