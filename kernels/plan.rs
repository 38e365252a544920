//! A graph made ready to run: constants folded, weights packed, kernels built, and one instance for every
//! distinct set of input shapes.

use crate::build::{BuildCx, Constants};
use crate::claim::stated_facts;
use crate::cuda::{Device, DeviceKernel, DeviceSide, Program};
use crate::eval;
use crate::fact::{Fact, Facts};
use crate::fuse::cluster::{self, Cluster};
use crate::instance::{Instance, Key};
use crate::kernel::Kernel;
use crate::op::{self, NodeCx, NodeLabel, OpDef};
use crate::par::Par;
use crate::settings::Settings;
use crate::shape_program;
use crate::weights::{Constant, PackCache, share_twins};
use abi::tensor::AlignedBytes;
use abi::{DType, Error, Graph, InitializerData, Node, NodeId, Result, ValueId};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Instances kept for shapes seen before; a client that alternates between a few shapes hits every time.
const INSTANCES: usize = 16;
/// Workspaces kept between Runs; as many as Runs commonly overlap.
const WORKSPACES: usize = 4;
/// Initializers of at most this many bytes are read at once, since shapes may depend on them.
const SMALL_INITIALIZER: usize = 4096;

/// A compiled graph. Shared by concurrent Runs.
pub struct Plan {
    pub(crate) graph: Graph,
    /// Facts before any input is known: constants, and the stated types.
    pub(crate) template: Facts,
    /// Nodes that are left after folding, in execution order.
    pub(crate) steps: Vec<Step>,
    /// Steps that the device may run as one, in order.
    pub(crate) clusters: Vec<Cluster>,
    /// Per value: the steps that read it, in order.
    pub(crate) readers: Vec<SmallVec<[usize; 2]>>,
    /// Per value: whether some shape depends on its contents.
    pub(crate) on_host: Vec<bool>,
    /// Graph inputs (by position) whose contents decide shapes: they are part of an instance's key.
    pub(crate) key_inputs: Vec<usize>,
    /// Raw constants that kernels read in their Runs.
    pub(crate) constants: HashMap<ValueId, Constant>,
    /// (graph input, graph output) positions that may share a buffer: one step updates it in place and nobody
    /// reads the input after that step.
    pub(crate) in_place: Vec<(usize, usize)>,
    pub(crate) width: usize,
    /// What lies on the CUDA device, for plans that run there.
    pub(crate) device: Option<DeviceSide>,
    instances: Mutex<Vec<(Key, Arc<Instance>)>>,
    workspaces: Mutex<Vec<AlignedBytes>>,
}

/// A node with its kernels.
pub(crate) struct Step {
    pub node: NodeId,
    pub def: &'static OpDef,
    /// On the host: for every step of a CPU plan; of a CUDA plan, where shapes depend on the outputs.
    pub host: Option<HostKernel>,
    /// On the device of a CUDA plan; `None` where nothing moves.
    pub device: Option<Box<dyn DeviceKernel>>,
    pub label: NodeLabel,
    /// Input values by slot, without those that were packed away.
    pub inputs: Vec<Option<ValueId>>,
}

/// A node's kernel on the host.
pub(crate) struct HostKernel {
    pub kernel: Box<dyn Kernel>,
    /// As [`Step::inputs`].
    pub inputs: Vec<Option<ValueId>>,
}

/// A CUDA plan for one set of shapes.
pub struct Prepared {
    instance: Arc<Instance>,
    /// What to launch.
    pub program: Arc<Program>,
}

impl Prepared {
    /// Type and shape of graph output `j`.
    pub fn output(&self, plan: &Plan, j: usize) -> Result<(DType, &[usize])> {
        self.instance.output(plan, j)
    }
}

/// Where a Run's inputs and outputs are.
pub trait Io {
    /// Type, shape and first byte of graph input `i`.
    fn input(&self, i: usize) -> Result<(DType, &[usize], *const u8)>;
    /// First byte of graph output `j`, allocated for `shape`.
    fn output(&mut self, j: usize, dtype: DType, shape: &[usize]) -> Result<*mut u8>;
}

impl Plan {
    /// Compiles `graph`, every node of which was claimed. `cache` is the session's; `device` is where the plan runs, when
    /// that is not the host.
    pub fn build(graph: Graph, settings: &Settings, cache: &PackCache, device: Option<&Arc<Device>>) -> Result<Self> {
        let graph = crate::ops::scan::lower::rewrite(graph)?;
        let mut graph = if settings.fusion { crate::fuse::fuse(graph)? } else { graph };
        share_twins(&mut graph)?;
        let mut constants = Constants::default();
        let mut template = read_small_initializers(stated_facts(&graph), &graph, &mut constants)?;
        let mut left = Vec::new();
        for id in 0..graph.nodes.len() {
            if let Some(def) = fold(&graph, id, &mut template, &mut constants, settings)? {
                left.push((id, def));
            }
        }
        let candidates = match device {
            Some(_) if settings.fusion => cluster::find(&graph, &template, &mut left),
            _ => Vec::new(),
        };
        let (on_host, key_inputs) = host_cone(&graph, &left, &template);
        let mut builder =
            Builder { graph: &graph, facts: &template, settings, cache, device, constants: &mut constants };
        let steps = left.iter().map(|&(id, def)| builder.step(id, def, &on_host)).collect::<Result<Vec<_>>>()?;
        let build =
            |device| candidates.iter().filter_map(|c| c.build(&graph, &template, device, &steps).transpose()).collect();
        let mut clusters: Vec<_> = device.map_or_else(|| Ok(Vec::new()), build)?;
        clusters.sort_by_key(|cluster: &Cluster| cluster.steps.start);
        cache.end_compile();
        let mut raw = raw_constants(&graph, &steps, &mut constants)?;
        let device = device
            .map(|device| DeviceSide::new(device.clone(), &steps, &mut raw, &graph.outputs, cache))
            .transpose()?;
        let readers = readers(&graph, &steps);
        let roots = roots(&graph, &steps);
        let in_place = in_place_pairs(&graph, &steps, &roots);
        forget_weights(&mut graph, &mut template, &steps);
        Ok(Self {
            graph,
            template,
            steps,
            clusters,
            readers,
            on_host,
            key_inputs,
            constants: raw,
            in_place,
            width: settings.chunks,
            device,
            instances: Mutex::default(),
            workspaces: Mutex::default(),
        })
    }

    /// Number of kernels that a Run may call.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Runs once. Errors leave the plan as it was; outputs are then unspecified.
    pub fn run(&self, io: &mut dyn Io, pool: &dyn abi::ParallelFor) -> Result<()> {
        let key = Key::of(self, io)?;
        let instance = self.instance(key, io)?;
        let mut workspace = self.workspace(instance.workspace_bytes())?;
        let result = instance.run(self, io, workspace.as_mut_slice(), Par::new(pool, self.width));
        let mut kept = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < WORKSPACES {
            kept.push(workspace);
        }
        result
    }

    /// The cluster that step `at` belongs to.
    pub(crate) fn cluster(&self, at: usize) -> Option<&Cluster> {
        let next = self.clusters.partition_point(|cluster| cluster.steps.end <= at);
        self.clusters.get(next).filter(|cluster| cluster.steps.contains(&at))
    }

    /// Names of the graph's inputs and outputs, for messages.
    pub fn io_names(&self) -> (impl Iterator<Item = &str>, impl Iterator<Item = &str>) {
        let name = |&v: &ValueId| self.graph.values[v].name.as_str();
        (self.graph.inputs.iter().map(name), self.graph.outputs.iter().map(name))
    }

    /// The plan for the shapes of `io`: made once a set of shapes.
    pub fn prepare(&self, io: &dyn Io) -> Result<Prepared> {
        let instance = self.instance(Key::of(self, io)?, io)?;
        let program = instance.program().cloned();
        let program = program.ok_or_else(|| Error::Internal("a CPU plan has no program for a device".into()))?;
        Ok(Prepared { instance, program })
    }

    /// The graph inputs whose contents decide shapes, by position. A CUDA plan of a whole graph has none.
    pub fn key_inputs(&self) -> &[usize] {
        &self.key_inputs
    }

    /// Whether input `i` may have output `j`'s buffer: the plan then updates it in place.
    pub fn may_share(&self, i: usize, j: usize) -> bool {
        self.in_place.contains(&(i, j))
    }

    fn instance(&self, key: Key, io: &dyn Io) -> Result<Arc<Instance>> {
        let lock = || self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        let nearest = {
            let mut cached = lock();
            if let Some(at) = cached.iter().position(|(k, _)| *k == key) {
                let hit = cached.remove(at);
                let instance = hit.1.clone();
                cached.push(hit);
                return Ok(instance);
            }
            let nearest = (0..cached.len()).rev().min_by_key(|&at| key.distance(&cached[at].0));
            nearest.map(|at| cached.remove(at))
        };
        let keep = |key: Key, instance: &Arc<Instance>| {
            let mut cached = lock();
            if cached.len() >= INSTANCES {
                cached.remove(0);
            }
            cached.push((key, instance.clone()));
        };
        // Most new shapes differ little from others (one token more): that instance becomes the new one, since lengths
        // that grow do not come back.
        let facts = match nearest {
            None => shape_program::infer(self, io)?,
            Some((old, instance)) => {
                let mut instance = Arc::unwrap_or_clone(instance);
                let adapted = instance.adapt(self, io);
                let instance = Arc::new(instance);
                let Some(facts) = adapted.transpose() else {
                    keep(key, &instance);
                    return Ok(instance);
                };
                keep(old, &instance);
                facts?
            }
        };
        let instance = Arc::new(Instance::new(self, facts)?);
        keep(key, &instance);
        Ok(instance)
    }

    /// A workspace of at least `bytes`, reused where possible.
    fn workspace(&self, bytes: usize) -> Result<AlignedBytes> {
        let kept = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(workspace) = kept.filter(|w| w.len() >= bytes) {
            return Ok(workspace);
        }
        // An eighth of slack: lengths that grow by one token then seldom need a new workspace.
        let asked = bytes + bytes / 8;
        AlignedBytes::try_zeroed(asked).ok_or_else(|| Error::Memory { asked, purpose: "the workspace of a Run".into() })
    }
}

/// Reads small external initializers, so that shape arithmetic sees them.
fn read_small_initializers(mut facts: Facts, graph: &Graph, constants: &mut Constants) -> Result<Facts> {
    for (id, value) in graph.values.iter().enumerate() {
        let Some(init) = &value.initializer else { continue };
        let InitializerData::External { len, .. } = init.data else {
            continue;
        };
        if len > SMALL_INITIALIZER {
            continue;
        }
        if let Some(constant) = constants.get(graph, id)? {
            facts[id] = Some(Arc::new(Fact { constant: true, ..Fact::with_value(constant.to_tensor()?) }));
        }
    }
    Ok(facts)
}

/// Infers the node's outputs; when all its inputs are constants, computes them, else returns the definition.
fn fold(
    graph: &Graph,
    id: NodeId,
    facts: &mut [Option<Arc<Fact>>],
    constants: &mut Constants,
    settings: &Settings,
) -> Result<Option<&'static OpDef>> {
    let def = op::find(&graph.nodes[id]).map_err(|d| Error::Internal(format!("an unclaimed node was fused: {d}")))?;
    let node = &graph.nodes[id];
    let inferred = (def.infer)(&NodeCx::new(graph, id, facts))?;
    let constant = node.inputs.iter().flatten().all(|&v| facts[v].as_ref().is_some_and(|f| f.constant));
    let mut outputs: Vec<_> = inferred.into_iter().map(|f| Fact { constant, ..f }).collect();
    if constant && def.view {
        fold_view(graph, node, &mut outputs, constants)?;
    } else if constant {
        fold_values(def, graph, id, &mut outputs, constants, settings)?;
    }
    for (value, fact) in node.outputs.iter().zip(outputs) {
        if let Some(value) = *value {
            facts[value] = Some(Arc::new(fact));
        }
    }
    Ok((!constant).then_some(def))
}

/// A view of a constant is the constant's own bytes.
fn fold_view(graph: &Graph, node: &Node, outputs: &mut [Fact], constants: &mut Constants) -> Result<()> {
    let lost = || Error::Internal(format!("{}: a folded view lost its operands", NodeLabel::of(node)));
    let (Some(&Some(from)), Some(&Some(to))) = (node.inputs.first(), node.outputs.first()) else { return Err(lost()) };
    let shape = outputs.first().and_then(Fact::known_shape).ok_or_else(lost)?;
    let constant = constants.get(graph, from)?.ok_or_else(lost)?.reshaped(shape)?;
    if constant.bytes().len() <= SMALL_INITIALIZER {
        outputs[0] = Fact { constant: true, ..Fact::with_value(constant.to_tensor()?) };
    }
    constants.insert(to, constant);
    Ok(())
}

fn fold_values(
    def: &OpDef,
    graph: &Graph,
    id: NodeId,
    outputs: &mut [Fact],
    constants: &mut Constants,
    settings: &Settings,
) -> Result<()> {
    let node = &graph.nodes[id];
    let mut inputs = Vec::with_capacity(node.inputs.len());
    for value in &node.inputs {
        inputs.push(match *value {
            Some(v) => constants.get(graph, v)?.map(|c| c.to_tensor()).transpose()?,
            None => None,
        });
    }
    let values = eval::node(def, graph, id, &inputs, settings, Par::serial())?;
    for (slot, tensor) in values.into_iter().enumerate() {
        if let (Some(tensor), Some(Some(value))) = (tensor, node.outputs.get(slot)) {
            outputs[slot] = Fact { constant: true, ..Fact::with_value(tensor.clone()) };
            constants.insert(*value, Constant::computed(tensor));
        }
    }
    Ok(())
}

/// Makes steps of nodes.
struct Builder<'a> {
    graph: &'a Graph,
    facts: &'a [Option<Arc<Fact>>],
    settings: &'a Settings,
    cache: &'a PackCache,
    device: Option<&'a Arc<Device>>,
    constants: &'a mut Constants,
}

impl Builder<'_> {
    fn step(&mut self, id: NodeId, def: &'static OpDef, on_host: &[bool]) -> Result<Step> {
        let node = &self.graph.nodes[id];
        let label = NodeLabel::of(node);
        let shapes_depend = node.outputs.iter().flatten().any(|&v| on_host[v]);
        let (mut host, mut device, mut inputs) = (None, None, node.inputs.clone());
        if self.device.is_none() || shapes_depend {
            let (kernel, inputs) = self.build(id, def.build)?;
            host = Some(HostKernel { kernel, inputs });
        }
        if let Some(on) = self.device {
            if !def.view && !def.shape_only {
                let missing = || Error::Internal(format!("{label} was claimed without a CUDA kernel"));
                let build = def.cuda.ok_or_else(missing)?.build;
                let (kernel, left) = self.build(id, |cx| build(cx, on))?;
                (device, inputs) = (Some(kernel), left);
            }
        } else if let Some(host) = &host {
            inputs.clone_from(&host.inputs);
        }
        Ok(Step { node: id, def, host, device, label, inputs })
    }

    /// A kernel, and the node's inputs without those that it packed.
    fn build<K>(
        &mut self,
        id: NodeId,
        build: impl FnOnce(&mut BuildCx) -> Result<K>,
    ) -> Result<(K, Vec<Option<ValueId>>)> {
        let node = NodeCx::new(self.graph, id, self.facts);
        let mut cx = BuildCx::new(node, self.settings, self.constants, self.cache);
        let kernel = build(&mut cx)?;
        let mut inputs = self.graph.nodes[id].inputs.clone();
        cx.into_packed().into_iter().for_each(|slot| inputs[slot] = None);
        Ok((kernel, inputs))
    }
}

/// The values on whose contents shapes depend, and the graph inputs among them.
fn host_cone(
    graph: &Graph,
    steps: &[(NodeId, &'static OpDef)],
    facts: &[Option<Arc<Fact>>],
) -> (Vec<bool>, Vec<usize>) {
    let mut needed = vec![false; graph.values.len()];
    let constant = |v: ValueId| facts[v].as_ref().is_some_and(|f| f.constant);
    for &(id, def) in steps.iter().rev() {
        let node = &graph.nodes[id];
        let own = node.outputs.iter().flatten().any(|&v| needed[v]);
        for (slot, value) in node.inputs.iter().enumerate() {
            if let Some(value) = *value {
                let wanted = (own && !def.shape_only) || def.host_inputs.contains(&slot);
                needed[value] |= wanted && !constant(value);
            }
        }
    }
    let inputs = (0..graph.inputs.len()).filter(|&i| needed[graph.inputs[i]]).collect();
    (needed, inputs)
}

/// The constants that kernels read raw, or that are graph outputs.
fn raw_constants(graph: &Graph, steps: &[Step], constants: &mut Constants) -> Result<HashMap<ValueId, Constant>> {
    let mut raw = HashMap::new();
    let own = |s: &'_ Step| s.inputs.iter().flatten().copied().collect::<Vec<_>>();
    let host = |s: &'_ Step| s.host.iter().flat_map(|h| h.inputs.iter().flatten().copied()).collect::<Vec<_>>();
    let read = steps.iter().flat_map(|s| own(s).into_iter().chain(host(s))).chain(graph.outputs.iter().copied());
    for value in read {
        if let Some(constant) = constants.get(graph, value)? {
            raw.insert(value, constant);
        }
    }
    Ok(raw)
}

/// Lets go of initializers' bytes that no Run needs: kernels hold their packed forms and `raw_constants` the rest.
fn forget_weights(graph: &mut Graph, template: &mut [Option<Arc<Fact>>], steps: &[Step]) {
    let mut shapes = vec![false; graph.values.len()];
    for step in steps {
        let inputs = &graph.nodes[step.node].inputs;
        step.def.host_inputs.iter().filter_map(|&slot| *inputs.get(slot)?).for_each(|value| shapes[value] = true);
    }
    graph.values.iter_mut().for_each(|value| value.initializer = None);
    for (fact, shapes) in template.iter_mut().zip(shapes) {
        let Some(fact) = fact else { continue };
        if !shapes && fact.value.is_some() && fact.elements().is_none_or(|n| n > SMALL_INITIALIZER) {
            *fact = Arc::new(Fact { value: None, ..Fact::clone(fact) });
        }
    }
}

fn readers(graph: &Graph, steps: &[Step]) -> Vec<SmallVec<[usize; 2]>> {
    let mut readers = vec![SmallVec::new(); graph.values.len()];
    for (at, step) in steps.iter().enumerate() {
        for &value in graph.nodes[step.node].inputs.iter().flatten() {
            readers[value].push(at);
        }
    }
    readers
}

/// Follows views back to the value whose bytes they show.
fn roots(graph: &Graph, steps: &[Step]) -> Vec<ValueId> {
    let mut roots: Vec<ValueId> = (0..graph.values.len()).collect();
    for step in steps.iter().filter(|s| s.def.view) {
        let node = &graph.nodes[step.node];
        if let (Some(Some(from)), Some(Some(to))) = (node.inputs.first(), node.outputs.first()) {
            roots[*to] = roots[*from];
        }
    }
    roots
}

fn in_place_pairs(graph: &Graph, steps: &[Step], roots: &[ValueId]) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    for (at, step) in steps.iter().enumerate() {
        for &(from, to) in step.def.in_place {
            let node = &graph.nodes[step.node];
            let (Some(&Some(from_value)), Some(&Some(to_value))) = (step.inputs.get(from), node.outputs.get(to)) else {
                continue;
            };
            let reads = |s: &Step| s.inputs.iter().flatten().filter(|&&v| roots[v] == roots[from_value]).count();
            let later = steps[at + 1..].iter().any(|s| reads(s) > 0 && !s.def.shape_only);
            let passed_on = graph.outputs.iter().any(|&v| roots[v] == roots[from_value]);
            if later || passed_on || reads(step) != 1 {
                continue;
            }
            let input = graph.inputs.iter().position(|&v| v == roots[from_value]);
            let output = graph.outputs.iter().position(|&v| roots[v] == to_value);
            pairs.extend(input.zip(output));
        }
    }
    pairs
}
