//! One EP of one session: the safe traits, and the C callbacks that call them.

use super::context::Binding;
use super::factory::FactoryState;
use super::memory::{AllocatorSource, create_allocator};
use super::reader::{Depth, list, read_graph, value_names};
use super::status::{caught, caught_or, ort, ort_ep, slice_from, string_from};
use super::stream::{StreamSource, create_stream};
use super::{Api, Context, Level, Logger, sys};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};

/// An execution provider of one session.
pub trait Ep: Send + Sync {
    /// The groups of nodes to run here, each to be fused into one node. No group may hold two nodes with a foreign node
    /// between them: ORT would drop all groups.
    ///
    /// ORT asks for the bodies of control flow first ([`Graph::is_body`]), asks again while it inlines functions, and
    /// changes the graph in between: the answer must follow from the graph alone.
    ///
    /// # Errors
    /// Fail the session.
    fn claim(&self, graph: &Graph) -> Result<Vec<Vec<NodeId>>>;

    /// Prepares a claimed group, which `graph` holds alone. ORT drops the constant initializers afterwards.
    ///
    /// # Errors
    /// Fail the session.
    fn compile(&self, graph: Graph, name: &str) -> Result<Box<dyn Compiled>>;

    /// Whether Runs may overlap; asked once.
    fn concurrent(&self) -> bool {
        true
    }

    /// Before each Run.
    ///
    /// # Errors
    /// Fail the Run.
    fn run_start(&self, _options: &RunOptions<'_>) -> Result<()> {
        Ok(())
    }

    /// After each Run; `sync` tells whether the caller expects all work to be done on return.
    ///
    /// # Errors
    /// Fail the Run.
    fn run_end(&self, _options: &RunOptions<'_>, _sync: bool) -> Result<()> {
        Ok(())
    }

    /// Options changed during the session's life.
    ///
    /// # Errors
    /// Reach the caller.
    fn set_dynamic_options(&self, options: &[(String, String)]) -> Result<()> {
        match options.first() {
            None => Ok(()),
            Some((name, value)) => Err(Error::Option {
                name: name.clone(),
                got: value.clone(),
                expected: "no option at all: this EP has none that change during a session".into(),
            }),
        }
    }

    /// Waits for all work on the device.
    ///
    /// # Errors
    /// Reach the caller.
    fn sync(&self) -> Result<()> {
        Ok(())
    }

    /// Whether this EP copies values between its nodes and ORT's CPU nodes, by the factory's
    /// [`super::DataTransfer`] on the Run's stream; asked once. Otherwise ORT's CPU EP "copies" them, and they arrive in
    /// host memory.
    fn memcpy_kernels(&self) -> bool {
        false
    }

    /// Whether ORT should have Runs captured as graphs and replayed. All of the model's nodes must then be on this EP,
    /// and ORT repeats a Run, up to 8 times, until [`Self::is_graph_captured`] says yes. ORT before 1.26 never asks.
    fn graph_capture_enabled(&self) -> bool {
        false
    }

    /// Whether there is a graph of this id, the Run option `gpu_graph_id`, 0 by default. ORT then calls
    /// [`Self::replay_graph`] and [`Self::sync`] and nothing else, whatever the Run's inputs and outputs are.
    fn is_graph_captured(&self, _id: i32) -> bool {
        false
    }

    /// Does the Run of this id again.
    ///
    /// # Errors
    /// Fail the Run.
    fn replay_graph(&self, id: i32) -> Result<()> {
        Err(Error::Internal(format!("there is no graph {id} to replay")))
    }

    /// Forgets the graph of this id, if there is one.
    ///
    /// # Errors
    /// Reach the caller.
    fn release_captured_graph(&self, _id: i32) -> Result<()> {
        Ok(())
    }

    /// Allocators of this session's own, in place of the factory's.
    fn allocators(&self) -> Option<&dyn AllocatorSource> {
        None
    }

    /// Streams of this session's own, in place of the factory's.
    fn streams(&self) -> Option<&dyn StreamSource> {
        None
    }
}

/// A compiled group of nodes.
pub trait Compiled: Send + Sync {
    /// Runs the group. Overlapping calls happen when [`Ep::concurrent`].
    ///
    /// # Errors
    /// Fail the Run, with the message.
    fn run(&self, context: &Context<'_>) -> Result<()>;
}

/// The options of one Run.
pub struct RunOptions<'a> {
    api: Api,
    raw: *const sys::OrtRunOptions,
    run: std::marker::PhantomData<&'a ()>,
}

impl RunOptions<'_> {
    /// A configuration entry, e.g. `gpu_graph_id`.
    pub fn get(&self, key: &str) -> Option<String> {
        if self.raw.is_null() {
            return None;
        }
        let key = super::status::c_string(key);
        // SAFETY: the options are live for the callback; the string belongs to them.
        unsafe {
            let value = ((*self.api.ort()).GetRunConfigEntry)(self.raw, key.as_ptr());
            (!value.is_null()).then(|| string_from(value))
        }
    }
}

/// What ORT holds as an `OrtEp`.
#[repr(C)]
pub(crate) struct EpObject {
    c: sys::OrtEp,
    api: Api,
    name: CString,
    logger: Logger,
    ep: Box<dyn Ep>,
    /// Keeps what the EP came from alive: ORT may release the factory first.
    factory: Arc<FactoryState>,
    /// Why this EP cannot work. ORT would answer an error of CreateEp (before 1.32) or of GetCapability by quietly
    /// running the model on its CPU EP, so a broken EP claims a node, and Compile fails with the reason.
    broken: OnceLock<Error>,
}

impl EpObject {
    /// An `OrtEp` of `ep`, or one that only reports why there is none.
    pub(crate) fn create(
        api: Api,
        factory: Arc<FactoryState>,
        logger: Logger,
        ep: Result<Box<dyn Ep>>,
    ) -> *mut sys::OrtEp {
        let broken = OnceLock::new();
        let ep = ep.unwrap_or_else(|error| {
            broken.get_or_init(|| error);
            Box::new(NoEp)
        });
        let c = sys::OrtEp {
            ort_version_supported: sys::COMPILED,
            GetName: Some(get_name),
            GetCapability: Some(get_capability),
            Compile: Some(compile),
            ReleaseNodeComputeInfos: Some(release_compute_infos),
            SetDynamicOptions: Some(set_dynamic_options),
            OnRunStart: Some(on_run_start),
            OnRunEnd: Some(on_run_end),
            CreateAllocator: ep.allocators().map(|_| session_allocator as _),
            CreateSyncStreamForDevice: ep.streams().map(|_| session_stream as _),
            GetKernelRegistry: ep.memcpy_kernels().then_some(get_kernel_registry as _),
            IsConcurrentRunSupported: Some(is_concurrent_run_supported),
            Sync: Some(sync),
            IsGraphCaptureEnabled: Some(is_graph_capture_enabled),
            IsGraphCaptured: Some(is_graph_captured),
            ReplayGraph: Some(replay_graph),
            GetGraphCaptureNodeAssignmentPolicy: Some(graph_capture_node_assignment_policy),
            ReleaseCapturedGraph: Some(release_captured_graph),
            ..Default::default()
        };
        let name = factory.name().to_owned();
        let object = Self { c, api, name, logger, ep, factory, broken };
        Box::into_raw(Box::new(object)).cast()
    }

    /// # Safety
    /// `this` came from [`Self::create`] and is released once.
    pub(crate) unsafe fn release(this: *mut sys::OrtEp) {
        // SAFETY: the caller vouches for it.
        let object = unsafe { Box::from_raw(this.cast::<Self>()) };
        caught_or((), || drop(object));
    }

    /// # Safety
    /// `this` came from [`Self::create`] and is live for `'a`.
    unsafe fn get<'a>(this: *const sys::OrtEp) -> &'a Self {
        // SAFETY: the caller vouches for it, and nothing ever borrows the object mutably.
        unsafe { &*this.cast() }
    }

    /// Claims the EP's groups, or where that fails some node, so that Compile can say why.
    fn claim(&self, graph: *const sys::OrtGraph, info: *mut sys::OrtEpGraphSupportInfo) -> Result<()> {
        if self.broken.get().is_none() {
            match caught("GetCapability", || self.groups(graph)) {
                Ok(groups) => return groups.iter().try_for_each(|group| self.add(info, group)),
                Err(error) => {
                    let name = self.name.to_string_lossy();
                    self.logger.log(Level::Error, format_args!("{name}: {error}"));
                    self.broken.get_or_init(|| error);
                }
            }
        }
        // SAFETY: ORT passes a graph that lives as long as the callback.
        let nodes = unsafe { list!(self.api, graph, Graph_GetNumNodes, Graph_GetNodes) };
        nodes.first().map_or(Ok(()), |&first| self.add(info, &[first]))
    }

    fn groups(&self, graph: *const sys::OrtGraph) -> Result<Vec<Vec<*const sys::OrtNode>>> {
        // SAFETY: ORT passes a graph that lives as long as the callback.
        let graph = unsafe { read_graph(self.api, graph, Depth::Claim) }?;
        let handle = |&id: &NodeId| {
            let node = graph.nodes.get(id).map(|node| node.handle as *const sys::OrtNode);
            node.ok_or_else(|| Error::Internal("a claim names a node that is not there".into()))
        };
        let groups = self.ep.claim(&graph)?;
        let groups = groups.iter().filter(|group| !group.is_empty());
        groups.map(|group| group.iter().map(handle).collect()).collect()
    }

    fn add(&self, info: *mut sys::OrtEpGraphSupportInfo, nodes: &[*const sys::OrtNode]) -> Result<()> {
        let options = sys::OrtNodeFusionOptions {
            ort_version_supported: sys::COMPILED,
            // The EP reads weights from their file by itself, so that ORT need not keep them.
            drop_constant_initializers: true,
        };
        // SAFETY: the nodes are of the callback's graph; ORT copies the options.
        unsafe {
            let options = &raw const options;
            ort_ep!(self.api, EpGraphSupportInfo_AddNodesToFuse(info, nodes.as_ptr(), nodes.len(), options))
        }
    }

    fn compile(&self, graph: *const sys::OrtGraph, fused: *const sys::OrtNode) -> Result<*mut sys::OrtNodeComputeInfo> {
        let api = self.api;
        let mut name = std::ptr::null();
        // SAFETY: ORT passes a graph and its fused node, both live for the callback.
        let (graph, name, inputs, outputs) = unsafe {
            ort!(api, Node_GetName(fused, &raw mut name))?;
            let (inputs, outputs) = value_names(api, fused)?;
            (read_graph(api, graph, Depth::Compile)?, string_from(name), inputs, outputs)
        };
        let find = |what: &str, names: &[String], ids: &[usize]| -> Result<Vec<usize>> {
            let position = |&id: &usize| {
                let wanted = &graph.values[id].name;
                names
                    .iter()
                    .position(|n| n == wanted)
                    .ok_or_else(|| Error::Internal(format!("fused node '{name}' lacks the graph's {what} '{wanted}'")))
            };
            ids.iter().map(position).collect()
        };
        let binding = Binding {
            inputs: find("input", &inputs, &graph.inputs)?,
            outputs: find("output", &outputs, &graph.outputs)?,
        };
        let compiled = self.ep.compile(graph, &name)?;
        let c = sys::OrtNodeComputeInfo {
            ort_version_supported: sys::COMPILED,
            CreateState: Some(create_state),
            Compute: Some(compute),
            ReleaseState: Some(release_state),
        };
        let object = ComputeObject { c, api, binding, compiled };
        Ok(Box::into_raw(Box::new(object)).cast())
    }
}

/// Stands in for an EP that could not be made.
struct NoEp;

impl Ep for NoEp {
    fn claim(&self, _graph: &Graph) -> Result<Vec<Vec<NodeId>>> {
        Ok(Vec::new())
    }

    fn compile(&self, _graph: Graph, _name: &str) -> Result<Box<dyn Compiled>> {
        Err(Error::Internal("a broken EP was asked to compile".into()))
    }
}

/// What ORT holds as an `OrtNodeComputeInfo`.
#[repr(C)]
struct ComputeObject {
    c: sys::OrtNodeComputeInfo,
    api: Api,
    binding: Binding,
    compiled: Box<dyn Compiled>,
}

// Every callback below: SAFETY of `EpObject::get` and of raw arguments is ORT's contract - it passes the object that it
// got from `create`, and arguments that live as long as the call.

unsafe extern "system" fn get_name(this: *const sys::OrtEp) -> *const c_char {
    // SAFETY: ORT's contract, see above.
    unsafe { EpObject::get(this) }.name.as_ptr()
}

unsafe extern "system" fn get_capability(
    this: *mut sys::OrtEp,
    graph: *const sys::OrtGraph,
    info: *mut sys::OrtEpGraphSupportInfo,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    object.api.guard("GetCapability", || object.claim(graph, info))
}

unsafe extern "system" fn compile(
    this: *mut sys::OrtEp,
    graphs: *const *const sys::OrtGraph,
    fused: *const *const sys::OrtNode,
    count: usize,
    infos: *mut *mut sys::OrtNodeComputeInfo,
    _ep_context_nodes: *mut *mut sys::OrtNode,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    object.api.guard("Compile", || {
        if let Some(error) = object.broken.get() {
            return Err(error.clone());
        }
        // SAFETY: each array has `count` entries.
        let (graphs, fused) = unsafe { (slice_from(graphs, count), slice_from(fused, count)) };
        for (i, (&graph, &node)) in graphs.iter().zip(fused).enumerate() {
            let info = object.compile(graph, node)?;
            // SAFETY: as above. ORT releases the entries written so far when a later one fails.
            unsafe { infos.add(i).write(info) };
        }
        Ok(())
    })
}

unsafe extern "system" fn release_compute_infos(
    _this: *mut sys::OrtEp,
    infos: *mut *mut sys::OrtNodeComputeInfo,
    count: usize,
) {
    // SAFETY: the array has `count` entries, each null or made by `EpObject::compile` and released once.
    caught_or((), || unsafe {
        for &info in slice_from(infos, count) {
            if !info.is_null() {
                drop(Box::from_raw(info.cast::<ComputeObject>()));
            }
        }
    });
}

unsafe extern "system" fn create_state(
    this: *mut sys::OrtNodeComputeInfo,
    _context: *mut sys::OrtNodeComputeContext,
    state: *mut *mut c_void,
) -> sys::OrtStatusPtr {
    // The object itself is all the state there is; ORT wants a pointer.
    // SAFETY: ORT's contract, see above.
    unsafe { state.write(this.cast()) };
    sys::OrtStatusPtr::default()
}

unsafe extern "system" fn compute(
    this: *mut sys::OrtNodeComputeInfo,
    _state: *mut c_void,
    context: *mut sys::OrtKernelContext,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above; nothing borrows the object mutably.
    let object = unsafe { &*this.cast::<ComputeObject>() };
    object.api.guard("Compute", || {
        // SAFETY: the context is of this node, for as long as the call.
        object.compiled.run(&unsafe { Context::new(object.api, context, &object.binding) })
    })
}

unsafe extern "system" fn release_state(_this: *mut sys::OrtNodeComputeInfo, _state: *mut c_void) {}

unsafe extern "system" fn set_dynamic_options(
    this: *mut sys::OrtEp,
    keys: *const *const c_char,
    values: *const *const c_char,
    count: usize,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    object.api.guard("SetDynamicOptions", || {
        // SAFETY: each array has `count` strings.
        let options: Vec<_> = unsafe {
            let (keys, values) = (slice_from(keys, count), slice_from(values, count));
            let pairs = keys.iter().zip(values);
            pairs.map(|(&k, &v)| (string_from(k), string_from(v))).collect()
        };
        object.ep.set_dynamic_options(&options)
    })
}

unsafe extern "system" fn on_run_start(this: *mut sys::OrtEp, options: *const sys::OrtRunOptions) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    let options = RunOptions { api: object.api, raw: options, run: std::marker::PhantomData };
    object.api.guard("OnRunStart", || object.ep.run_start(&options))
}

unsafe extern "system" fn on_run_end(
    this: *mut sys::OrtEp,
    options: *const sys::OrtRunOptions,
    sync: bool,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    let options = RunOptions { api: object.api, raw: options, run: std::marker::PhantomData };
    object.api.guard("OnRunEnd", || object.ep.run_end(&options, sync))
}

unsafe extern "system" fn session_allocator(
    this: *mut sys::OrtEp,
    info: *const sys::OrtMemoryInfo,
    out: *mut *mut sys::OrtAllocator,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    object.api.guard("CreateAllocator", || {
        // SAFETY: ORT's contract, see above.
        unsafe { create_allocator(&object.factory, object.ep.allocators(), info, out) }
    })
}

unsafe extern "system" fn session_stream(
    this: *mut sys::OrtEp,
    device: *const sys::OrtMemoryDevice,
    out: *mut *mut sys::OrtSyncStreamImpl,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    object.api.guard("CreateSyncStreamForDevice", || {
        // SAFETY: ORT's contract, see above.
        unsafe { create_stream(object.api, object.ep.streams(), device, out) }
    })
}

unsafe extern "system" fn is_concurrent_run_supported(
    this: *mut sys::OrtEp,
    supported: *mut bool,
) -> sys::OrtStatusPtr {
    // Never an error: ORT would answer it by quietly building the session on the CPU.
    // SAFETY: ORT's contract, see above.
    unsafe {
        let object = EpObject::get(this);
        supported.write(caught_or(false, || object.ep.concurrent()));
    }
    sys::OrtStatusPtr::default()
}

unsafe extern "system" fn sync(this: *mut sys::OrtEp) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    object.api.guard("Sync", || object.ep.sync())
}

unsafe extern "system" fn get_kernel_registry(
    this: *mut sys::OrtEp,
    registry: *mut *const sys::OrtKernelRegistry,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    object.api.guard("GetKernelRegistry", || {
        let made = object.factory.memcpy()?;
        // SAFETY: ORT's contract, see above.
        unsafe { registry.write(made) };
        Ok(())
    })
}

unsafe extern "system" fn is_graph_capture_enabled(this: *const sys::OrtEp) -> bool {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    caught_or(false, || object.ep.graph_capture_enabled())
}

unsafe extern "system" fn is_graph_captured(this: *const sys::OrtEp, id: c_int) -> bool {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    caught_or(false, || object.ep.is_graph_captured(id))
}

unsafe extern "system" fn replay_graph(this: *mut sys::OrtEp, id: c_int) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    object.api.guard("ReplayGraph", || object.ep.replay_graph(id))
}

unsafe extern "system" fn graph_capture_node_assignment_policy(_this: *const sys::OrtEp) -> c_int {
    // Under the other policy a node on the CPU still fails the session.
    sys::ALL_NODES_ON_EP
}

unsafe extern "system" fn release_captured_graph(this: *mut sys::OrtEp, id: c_int) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { EpObject::get(this) };
    object.api.guard("ReleaseCapturedGraph", || object.ep.release_captured_graph(id))
}
