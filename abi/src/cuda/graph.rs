//! Kernel launches, one by one and as graphs.

use super::{Context, Function, Stream};
use crate::{Error, Result};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// How a kernel is spread over the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaunchShape {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory a block, in bytes.
    pub shared: u32,
    /// Whether it may start before the kernel in front of it has ended (where the device can do that). Such a
    /// kernel must wait for its predecessor on the device before it touches memory, and before it ends.
    pub overlap: bool,
}

/// Queues one kernel.
///
/// # Safety
/// `params` is the kernel's one parameter struct, and the pointers in it are valid for what the kernel does when
/// it runs. With `overlap`, the kernel waits for its predecessor.
pub unsafe fn launch(stream: &Stream, function: &Function, shape: &LaunchShape, params: &[u8]) -> Result<()> {
    function.check_parameters(params)?;
    let context = stream.context();
    let _current = context.enter()?;
    let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    value.programmaticStreamSerializationAllowed = 1;
    let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    let mut attribute = sys::CUlaunchAttribute { id, pad: [0; 4], value };
    let config = sys::CUlaunchConfig {
        gridDimX: shape.grid[0],
        gridDimY: shape.grid[1],
        gridDimZ: shape.grid[2],
        blockDimX: shape.block[0],
        blockDimY: shape.block[1],
        blockDimZ: shape.block[2],
        sharedMemBytes: shape.shared,
        hStream: stream.handle().cast(),
        attrs: &mut attribute,
        numAttrs: u32::from(shape.overlap && context.info().overlaps()),
    };
    let mut params: [*mut c_void; 1] = [params.as_ptr().cast_mut().cast()];
    // SAFETY: stream and function are alive, and the driver copies the parameters, whose size is right, before it
    // returns. The kernel itself is as the caller promises.
    unsafe { call!(cuLaunchKernelEx(&config, function.handle(), params.as_mut_ptr(), null_mut())) }
        .map_err(|e| failed_launch(e, function, shape))
}

/// Adds which launch an error was about.
#[cold]
fn failed_launch(error: Error, function: &Function, shape: &LaunchShape) -> Error {
    match error {
        Error::Cuda { call, code, message } => {
            let message = format!("{message} (kernel {}, {shape:?})", function.name());
            Error::Cuda { call, code, message }
        }
        other => other,
    }
}

/// A chain of kernels that is still being put together.
pub struct Graph {
    context: Arc<Context>,
    handle: sys::CUgraph,
    nodes: Vec<Node>,
}

struct Node {
    handle: sys::CUgraphNode,
    /// Keeps the kernel's library loaded.
    function: Function,
    overlap: bool,
}

// SAFETY: a graph may move between threads; not to be used from two at once, it is not Sync.
unsafe impl Send for Graph {}

impl Graph {
    /// A graph with nothing in it.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let _current = context.enter()?;
        let mut handle = null_mut();
        // SAFETY: the context is current; the driver writes one handle.
        unsafe { call!(cuGraphCreate(&mut handle, 0)) }?;
        Ok(Self { context: context.clone(), handle, nodes: vec![] })
    }

    /// Adds a kernel behind the one added last; returns its index.
    ///
    /// # Safety
    /// As for [`launch`], whenever the graph is launched.
    pub unsafe fn add_kernel(&mut self, function: &Function, shape: &LaunchShape, params: &[u8]) -> Result<usize> {
        function.check_parameters(params)?;
        let _current = self.context.enter()?;
        let previous = self.nodes.last().map(|node| node.handle);
        // The first kernel of a graph has none to overlap with.
        let programmatic = previous.filter(|_| shape.overlap && self.context.info().overlaps());
        let full = if programmatic.is_some() { None } else { previous };
        let mut params: [*mut c_void; 1] = [params.as_ptr().cast_mut().cast()];
        let node_params = self.node_params(function, shape, &mut params);
        let mut handle = null_mut();
        // SAFETY: graph, function and the node in front are alive, and the driver copies the parameters, whose
        // size is right, before it returns.
        unsafe {
            call!(cuGraphAddKernelNode_v2(
                &mut handle,
                self.handle,
                full.as_slice().as_ptr(),
                full.as_slice().len(),
                &node_params
            ))
        }
        .map_err(|e| failed_launch(e, function, shape))?;
        self.nodes.push(Node { handle, function: function.clone(), overlap: shape.overlap });
        if let Some(previous) = programmatic {
            let edge = sys::CUgraphEdgeData {
                from_port: sys::CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC as u8,
                to_port: 0,
                type_: sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
                reserved: [0; 5],
            };
            // SAFETY: graph and both nodes are alive.
            unsafe { call!(cuGraphAddDependencies_v2(self.handle, &previous, &handle, &edge, 1)) }?;
        }
        Ok(self.nodes.len() - 1)
    }

    fn node_params(
        &self,
        function: &Function,
        shape: &LaunchShape,
        params: &mut [*mut c_void; 1],
    ) -> sys::CUDA_KERNEL_NODE_PARAMS {
        sys::CUDA_KERNEL_NODE_PARAMS {
            func: function.handle(),
            gridDimX: shape.grid[0],
            gridDimY: shape.grid[1],
            gridDimZ: shape.grid[2],
            blockDimX: shape.block[0],
            blockDimY: shape.block[1],
            blockDimZ: shape.block[2],
            sharedMemBytes: shape.shared,
            kernelParams: params.as_mut_ptr(),
            extra: null_mut(),
            kern: null_mut(),
            ctx: self.context.handle(),
        }
    }

    /// Makes it ready to launch.
    pub fn instantiate(self) -> Result<Exec> {
        let current = self.context.enter()?;
        let mut handle = null_mut();
        // SAFETY: the graph is alive; the driver writes one handle.
        unsafe { call!(cuGraphInstantiateWithFlags(&mut handle, self.handle, 0)) }?;
        drop(current);
        Ok(Exec { handle, graph: self })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: the graph is ours; a driver that shut down answers an error.
            let _ = unsafe { sys::cuGraphDestroy(self.handle) };
        }
    }
}

/// A chain of kernels ready to launch.
pub struct Exec {
    handle: sys::CUgraphExec,
    /// The nodes by which kernels are named.
    graph: Graph,
}

// SAFETY: as for a graph.
unsafe impl Send for Exec {}

impl Exec {
    /// Changes a kernel for later launches; launches under way keep what they had. `overlap` cannot change.
    ///
    /// # Safety
    /// As for [`launch`], whenever the graph is launched.
    pub unsafe fn set_kernel(
        &mut self,
        node: usize,
        function: &Function,
        shape: &LaunchShape,
        params: &[u8],
    ) -> Result<()> {
        function.check_parameters(params)?;
        let graph = &self.graph;
        let count = graph.nodes.len();
        let Some(old) = graph.nodes.get(node).filter(|old| old.overlap == shape.overlap) else {
            return Err(Error::Internal(format!(
                "node {node} of a graph of {count} cannot become kernel {} with {shape:?}",
                function.name()
            )));
        };
        let current = graph.context.enter()?;
        let mut params: [*mut c_void; 1] = [params.as_ptr().cast_mut().cast()];
        let node_params = graph.node_params(function, shape, &mut params);
        // SAFETY: graph, node and function are alive, and the driver copies the parameters, whose size is right,
        // before it returns.
        unsafe { call!(cuGraphExecKernelNodeSetParams_v2(self.handle, old.handle, &node_params)) }
            .map_err(|e| failed_launch(e, function, shape))?;
        drop(current);
        if !old.function.is_same(function) {
            self.graph.nodes[node].function = function.clone();
        }
        Ok(())
    }

    /// Queues the whole chain. Launches of one graph run one after the other.
    ///
    /// # Safety
    /// What the kernels were added or set with still holds when they run.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        let _current = self.graph.context.enter()?;
        // SAFETY: both are alive; the kernels are as the caller promises.
        unsafe { call!(cuGraphLaunch(self.handle, stream.handle().cast())) }
    }

    /// Brings the graph to the device, so that the first launch does not have to.
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        let _current = self.graph.context.enter()?;
        // SAFETY: both are alive; nothing runs.
        unsafe { call!(cuGraphUpload(self.handle, stream.handle().cast())) }
    }

    /// How many kernels it has.
    pub fn len(&self) -> usize {
        self.graph.nodes.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        if let Ok(_current) = self.graph.context.enter() {
            // SAFETY: it is ours; launches under way are let end. A driver that shut down answers an error.
            let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
        }
    }
}
