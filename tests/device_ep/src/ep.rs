//! Claim, compile and run.

use crate::arena::arena;
use crate::graphs::{Graphs, Work};
use crate::memory::{Source, VENDOR, place};
use crate::report::count;
use crate::stream::{Streams, queue_of};
use abi::options::Options;
use abi::ort::{
    AllocatorSource, Compiled, Context, DeviceKind, Ep, Level, Logger, MemoryKind, RunOptions, StreamSource,
};
use abi::{DType, Error, Graph, HostTensor, InitializerData, Node, NodeId, ParallelFor, Result, ValueId};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where failures are injected.
#[derive(Clone)]
struct Faults {
    fail_at: String,
    panic_at: String,
}

impl Faults {
    fn inject(&self, stage: &str) -> Result<()> {
        if self.panic_at == stage {
            panic!("injected panic in {stage}");
        }
        match self.fail_at == stage {
            true => Err(Error::Internal(format!("injected failure in {stage}"))),
            false => Ok(()),
        }
    }
}

/// The EP of one session.
pub struct DeviceEp {
    faults: Faults,
    concurrent: bool,
    fuse: bool,
    /// Op to claim, or "both".
    ops: String,
    own: Option<(Source, Streams)>,
    memcpy: bool,
    graphs: Option<Arc<Graphs>>,
    /// Folder to write graphs to; empty for none.
    dump: String,
    dumped: AtomicUsize,
    compiled: AtomicUsize,
}

impl DeviceEp {
    pub fn new(options: Options, logger: Logger) -> Self {
        logger.log(Level::Info, format_args!("device_ep: a session"));
        let faults = Faults { fail_at: options.text("fail_at").into(), panic_at: options.text("panic_at").into() };
        count("ep_create");
        Self {
            faults,
            concurrent: options.bool("concurrent"),
            fuse: options.bool("fuse"),
            ops: options.text("ops").into(),
            own: options.bool("own_memory").then_some((Source { fail: false }, Streams)),
            memcpy: options.bool("memcpy"),
            graphs: options.bool("graphs").then(Arc::default),
            dump: options.text("dump").into(),
            dumped: AtomicUsize::default(),
            compiled: AtomicUsize::default(),
        }
    }

    /// Writes the graph to the dump folder as `<stage><number>.json`.
    fn dump(&self, stage: &str, graph: &Graph) {
        if !self.dump.is_empty() {
            let number = self.dumped.fetch_add(1, Ordering::Relaxed);
            let file = std::path::Path::new(&self.dump).join(format!("{stage}{number}.json"));
            std::fs::write(file, crate::dump::json(graph)).expect("the test gives a folder");
        }
    }

    pub fn inject(&self, stage: &str) -> Result<()> {
        self.faults.inject(stage)
    }
}

impl Drop for DeviceEp {
    fn drop(&mut self) {
        count("ep_release");
    }
}

/// Whether the node is an Add or Mul of float tensors, with its operands.
fn operands(graph: &Graph, node: &Node) -> Option<[ValueId; 2]> {
    let is_float = |&id: &ValueId| graph.values[id].dtype == Some(DType::F32);
    let arithmetic = node.domain.is_empty() && ["Add", "Mul"].contains(&node.op_type.as_str());
    match node.inputs[..] {
        [Some(a), Some(b)] if arithmetic && is_float(&a) && is_float(&b) => Some([a, b]),
        _ => None,
    }
}

impl Ep for DeviceEp {
    /// Stretches of the topological order without a foreign node, which are convex.
    fn claim(&self, graph: &Graph) -> Result<Vec<Vec<NodeId>>> {
        count("claim");
        self.dump("claim", graph);
        self.inject("claim")?;
        if graph.is_body {
            return Ok(Vec::new());
        }
        let wanted = |op: &str| self.ops == "both" || self.ops == op;
        let ours = |id: &NodeId| {
            let node = &graph.nodes[*id];
            wanted(&node.op_type) && operands(graph, node).is_some()
        };
        let ids: Vec<NodeId> = (0..graph.nodes.len()).collect();
        Ok(match self.fuse {
            true => ids.split(|id| !ours(id)).filter(|run| !run.is_empty()).map(<[_]>::to_vec).collect(),
            false => ids.into_iter().filter(ours).map(|id| vec![id]).collect(),
        })
    }

    fn compile(&self, graph: Graph, _name: &str) -> Result<Box<dyn Compiled>> {
        count("compile");
        self.dump("compile", &graph);
        self.inject("compile")?;
        if self.compiled.fetch_add(1, Ordering::Relaxed) == 1 {
            self.inject("second_compile")?;
        }
        let mut constants = HashMap::new();
        for (id, value) in graph.values.iter().enumerate() {
            if let Some(initializer) = &value.initializer {
                constants.insert(id, (initializer.shape.clone(), floats(&load(&initializer.data)?)));
            }
        }
        let step = |node: &Node| {
            let output = node.outputs[0].expect("Add and Mul have one output");
            let [a, b] = operands(&graph, node).expect("ORT passes what was claimed");
            Step { multiply: node.op_type == "Mul", a, b, output }
        };
        let program =
            Program { steps: graph.nodes.iter().map(step).collect(), constants, outputs: graph.outputs.clone() };
        let (program, faults, graphs) = (Arc::new(program), self.faults.clone(), self.graphs.clone());
        Ok(Box::new(DeviceCompiled { inputs: graph.inputs, program, faults, graphs }))
    }

    fn concurrent(&self) -> bool {
        self.concurrent
    }

    fn set_dynamic_options(&self, options: &[(String, String)]) -> Result<()> {
        match options {
            [(name, value)] if name == "note" && value == "hello" => {
                count("dynamic_option");
                Ok(())
            }
            other => Err(Error::Internal(format!("unexpected dynamic options {other:?}"))),
        }
    }

    fn sync(&self) -> Result<()> {
        self.graphs.as_ref().map_or(Ok(()), |graphs| graphs.sync())
    }

    fn memcpy_kernels(&self) -> bool {
        self.memcpy
    }

    fn graph_capture_enabled(&self) -> bool {
        self.graphs.is_some()
    }

    fn is_graph_captured(&self, id: i32) -> bool {
        self.graphs.as_ref().is_some_and(|graphs| graphs.captured(id))
    }

    fn replay_graph(&self, id: i32) -> Result<()> {
        self.graphs.as_ref().expect("ORT asks only where capture is enabled").replay(id)
    }

    fn release_captured_graph(&self, id: i32) -> Result<()> {
        self.graphs.as_ref().expect("ORT asks only where capture is enabled").release(id);
        Ok(())
    }

    fn allocators(&self) -> Option<&dyn AllocatorSource> {
        self.own.as_ref().map(|own| {
            count("session_allocators");
            &own.0 as _
        })
    }

    fn streams(&self) -> Option<&dyn StreamSource> {
        self.own.as_ref().map(|own| {
            count("session_streams");
            &own.1 as _
        })
    }

    fn run_start(&self, options: &RunOptions<'_>) -> Result<()> {
        count("run_start");
        if let Some(graphs) = &self.graphs {
            graphs.begin(options);
        }
        if options.get("device_ep.mark").is_some() {
            count("run_start_marked");
        }
        self.inject("run_start")
    }

    fn run_end(&self, _options: &RunOptions<'_>, sync: bool) -> Result<()> {
        count(if sync { "run_end_sync" } else { "run_end_async" });
        self.inject("run_end")
    }
}

/// The bytes of a constant, inline or in its file.
fn load(data: &InitializerData) -> Result<Vec<u8>> {
    match data {
        InitializerData::Inline(tensor) => {
            count("constant_inline");
            Ok(tensor.bytes().to_vec())
        }
        InitializerData::External { path, offset, len } => {
            count("constant_external");
            Ok(abi::file::MappedFile::open(path, *offset, *len)?.bytes().to_vec())
        }
        InitializerData::Unread => Err(Error::Internal("Compile got an unread constant".into())),
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// A float tensor on its way through the program.
type Tensor = (Vec<usize>, Vec<f32>);

struct Step {
    multiply: bool,
    a: ValueId,
    b: ValueId,
    output: ValueId,
}

/// The compiled group.
struct Program {
    steps: Vec<Step>,
    constants: HashMap<ValueId, Tensor>,
    outputs: Vec<ValueId>,
}

impl Program {
    /// The outputs; with `shapes_only` their shapes alone.
    fn eval(&self, mut values: HashMap<ValueId, Tensor>, shapes_only: bool) -> Result<Vec<Tensor>> {
        for step in &self.steps {
            let get = |id| values.get(id).or_else(|| self.constants.get(id)).expect("topological order");
            let result = combine(get(&step.a), get(&step.b), step.multiply, shapes_only)?;
            values.insert(step.output, result);
        }
        Ok(self.outputs.iter().map(|id| values[id].clone()).collect())
    }
}

/// Element by element, with one side perhaps a single element.
fn combine(a: &Tensor, b: &Tensor, multiply: bool, shapes_only: bool) -> Result<Tensor> {
    let elements = |shape: &[usize]| shape.iter().product::<usize>();
    let (m, n) = (elements(&a.0), elements(&b.0));
    if a.0 != b.0 && m != 1 && n != 1 {
        return Err(Error::Node {
            node: "group".into(),
            op: "ai.onnx::Add".into(),
            slot: "inputs".into(),
            got: format!("{:?} and {:?}", a.0, b.0),
            expected: "equal shapes or a single element".into(),
        });
    }
    let shape = if m == 1 && a.0.len() <= b.0.len() { b.0.clone() } else { a.0.clone() };
    if shapes_only {
        return Ok((shape, Vec::new()));
    }
    let at = |v: &[f32], i: usize| if v.len() == 1 { v[0] } else { v[i] };
    let one = |i| match multiply {
        true => at(&a.1, i) * at(&b.1, i),
        false => at(&a.1, i) + at(&b.1, i),
    };
    let data = (0..elements(&shape)).map(one).collect();
    Ok((shape, data))
}

struct DeviceCompiled {
    inputs: Vec<ValueId>,
    program: Arc<Program>,
    faults: Faults,
    graphs: Option<Arc<Graphs>>,
}

impl Drop for DeviceCompiled {
    fn drop(&mut self) {
        count("compiled_release");
    }
}

/// An address for the stream's thread.
struct Address(usize);

impl Compiled for DeviceCompiled {
    fn run(&self, context: &Context<'_>) -> Result<()> {
        count("run");
        self.faults.inject("run")?;
        self.exercise_threads(context);
        let mut shapes = HashMap::new();
        let mut sources = Vec::new();
        for (index, &id) in self.inputs.iter().enumerate() {
            let input = context.input(index)?;
            let memory = input.memory();
            shapes.insert(id, (input.shape.to_vec(), Vec::new()));
            let here = if memory.host_can_access() {
                // Values that ORT's CPU nodes share come in host memory: its Memcpy nodes run on the CPU.
                count(if memory.kind == DeviceKind::Cpu { "input_host" } else { "input_pinned" });
                // SAFETY: the host can access the memory, and nothing writes inputs during the Run.
                Place::Host(floats(unsafe { input.bytes() }))
            } else {
                count("input_device");
                assert_eq!(memory, place(MemoryKind::Default), "an input on a foreign device");
                Place::Device(Address(input.data.addr()), input.len())
            };
            sources.push((id, input.shape.to_vec(), here));
        }
        let mut targets = Vec::new();
        for (index, (shape, _)) in self.program.eval(shapes, true)?.into_iter().enumerate() {
            let output = context.output(index, &shape)?;
            let memory = output.memory();
            assert_eq!((memory.kind, memory.vendor_id), (DeviceKind::Gpu, VENDOR), "an output off the device");
            count(if memory.memory == MemoryKind::Default { "output_device" } else { "output_pinned" });
            targets.push((Address(output.data.addr()), memory.host_can_access()));
        }
        let program = self.program.clone();
        let work: Work = Arc::new(move || {
            let fetch = |(id, shape, source): &(ValueId, Vec<usize>, Place)| (*id, (shape.clone(), source.read()));
            let values = sources.iter().map(fetch).collect();
            let results = program.eval(values, false).expect("the shapes were checked");
            for ((address, on_host), (_, data)) in targets.iter().zip(results) {
                write(address, *on_host, HostTensor::new(&[data.len()], &data).bytes());
            }
        });
        match queue_of(context.stream_handle()) {
            Some(queue) => {
                count("run_on_stream");
                if let Some(graphs) = &self.graphs {
                    graphs.record(&queue, &work);
                }
                queue.push(move || work());
            }
            None => work(),
        }
        Ok(())
    }
}

impl DeviceCompiled {
    /// A parallel loop on ORT's threads, which may be made to panic in a task.
    fn exercise_threads(&self, context: &Context<'_>) {
        let sum = AtomicUsize::new(0);
        context.run(100, &|i| {
            if i == 37 && self.faults.panic_at == "task" {
                panic!("injected panic in task");
            }
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 4950, "each task runs once");
    }
}

/// Where an input comes from.
enum Place {
    Host(Vec<f32>),
    Device(Address, usize),
}

impl Place {
    fn read(&self) -> Vec<f32> {
        match self {
            Self::Host(values) => values.clone(),
            Self::Device(address, len) => floats(&arena().read(address.0 as *const u8, *len)),
        }
    }
}

fn write(address: &Address, on_host: bool, bytes: &[u8]) {
    let to = address.0 as *mut u8;
    if on_host {
        // SAFETY: an output tensor of this size, which the Run's end waits for.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    } else {
        arena().write(to, bytes);
    }
}
