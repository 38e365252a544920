//! Computes one node on the host: constant folding, shape arithmetic, unit tests.

use crate::build::{BuildCx, Constants};
use crate::fact::{Fact, Facts};
use crate::kernel::{Kernel, RunCx, Shapes, Tensor, TensorMut};
use crate::op::{NodeCx, NodeLabel, OpDef};
use crate::par::Par;
use crate::settings::Settings;
use crate::weights::PackCache;
use abi::tensor::AlignedBytes;
use abi::{DType, Dim, Error, Graph, HostTensor, NodeId, Result};
use std::sync::Arc;

/// Runs `kernel` on host tensors. `outputs`: type and shape by slot, `None` where nobody reads it.
pub fn run(
    kernel: &dyn Kernel,
    label: &NodeLabel,
    inputs: &[Option<HostTensor>],
    outputs: &[Option<(DType, Vec<usize>)>],
    par: Par<'_>,
) -> Result<Vec<Option<HostTensor>>> {
    run_in_place(kernel, label, inputs, outputs, par, &[])
}

/// [`run`], where the (input, output) slots of `shared` have one buffer each.
fn run_in_place(
    kernel: &dyn Kernel,
    label: &NodeLabel,
    inputs: &[Option<HostTensor>],
    outputs: &[Option<(DType, Vec<usize>)>],
    par: Par<'_>,
    shared: &[(usize, usize)],
) -> Result<Vec<Option<HostTensor>>> {
    let in_shapes: Vec<_> = inputs.iter().map(|t| t.as_ref().map(|t| (t.dtype(), t.shape()))).collect();
    let out_shapes: Vec<_> = outputs.iter().map(|o| o.as_ref().map(|(d, s)| (*d, s.as_slice()))).collect();
    let scratch_len = kernel.scratch_bytes(&Shapes { inputs: &in_shapes, outputs: &out_shapes });
    let memory = |asked, purpose: &str| Error::Memory { asked, purpose: purpose.into() };
    let mut scratch = AlignedBytes::try_zeroed(scratch_len).ok_or_else(|| memory(scratch_len, "scratch"))?;
    let mut buffers = Vec::with_capacity(outputs.len());
    for output in outputs {
        let bytes = output
            .as_ref()
            .map_or(Some(0), |(d, s)| s.iter().try_fold(1usize, |n, &v| n.checked_mul(v)).and_then(|n| d.bytes(n)));
        let bytes = bytes.ok_or_else(|| memory(usize::MAX, "an output"))?;
        buffers.push(AlignedBytes::try_zeroed(bytes).ok_or_else(|| memory(bytes, "an output"))?);
    }
    let mut tensors: Vec<_> =
        inputs.iter().map(|t| t.as_ref().and_then(|t| Tensor::from_bytes(t.dtype(), t.shape(), t.bytes()))).collect();
    for (input, output) in shared {
        let from = inputs[*input].as_ref().expect("a shared input is present");
        let buffer = buffers[*output].as_mut_slice();
        buffer.copy_from_slice(from.bytes());
        // SAFETY: the buffer lives as long as the Run; the op declares that it may be the output's.
        tensors[*input] = Some(unsafe { Tensor::from_raw(from.dtype(), from.shape(), buffer.as_ptr()) });
    }
    let mut views: Vec<_> = outputs
        .iter()
        .zip(&mut buffers)
        .map(|(o, b)| {
            let ptr = b.as_mut_slice().as_mut_ptr();
            // SAFETY: the buffer has the shape's size, is aligned, and is borrowed for the kernel alone.
            o.as_ref().map(|(d, s)| unsafe { TensorMut::from_raw(*d, s, ptr) })
        })
        .collect();
    kernel.run(&mut RunCx { inputs: &tensors, outputs: &mut views, scratch: scratch.as_mut_slice(), par, label })?;
    Ok(outputs
        .iter()
        .zip(buffers)
        .map(|(o, b)| o.as_ref().and_then(|(d, s)| HostTensor::from_aligned(*d, s, b)))
        .collect())
}

/// Infers, builds and runs node `id` of `graph` on `inputs` (by slot).
pub fn node(
    def: &OpDef,
    graph: &Graph,
    id: NodeId,
    inputs: &[Option<HostTensor>],
    settings: &Settings,
    par: Par<'_>,
) -> Result<Vec<Option<HostTensor>>> {
    node_in_place(def, graph, id, inputs, settings, par, &[])
}

/// [`node`], where the (input, output) slots of `shared` have one buffer each.
fn node_in_place(
    def: &OpDef,
    graph: &Graph,
    id: NodeId,
    inputs: &[Option<HostTensor>],
    settings: &Settings,
    par: Par<'_>,
    shared: &[(usize, usize)],
) -> Result<Vec<Option<HostTensor>>> {
    let node = &graph.nodes[id];
    let mut facts: Facts = vec![None; graph.values.len()];
    for (slot, tensor) in node.inputs.iter().zip(inputs) {
        if let (Some(value), Some(tensor)) = (slot, tensor) {
            facts[*value] = Some(Arc::new(Fact::with_value(tensor.clone())));
        }
    }
    let cx = NodeCx::new(graph, id, &facts);
    let inferred = (def.infer)(&cx)?;
    if let Some(value) = inferred.first().and_then(|f| f.value.clone()).filter(|_| def.shape_only) {
        return Ok(vec![Some(value)]);
    }
    let mut outputs = Vec::with_capacity(node.outputs.len());
    for (slot, value) in node.outputs.iter().enumerate() {
        let fact = inferred.get(slot).filter(|_| value.is_some());
        outputs.push(match fact {
            None => None,
            Some(fact) => Some((fact.dtype, fact.known_shape().ok_or_else(|| unknown_shape(&cx, slot, fact))?)),
        });
    }
    let (mut constants, cache) = (Constants::default(), PackCache::default());
    let mut build = BuildCx::new(cx, settings, &mut constants, &cache);
    let kernel = (def.build)(&mut build)?;
    let packed = build.into_packed();
    let mut inputs = inputs.to_vec();
    packed.iter().for_each(|&slot| inputs[slot] = None);
    run_in_place(&*kernel, &NodeLabel::of(node), &inputs, &outputs, par, shared)
}

/// The error for an output whose shape the inputs do not decide.
pub fn unknown_shape(cx: &NodeCx<'_>, slot: usize, fact: &Fact) -> Error {
    let got = match &fact.shape {
        None => "an unknown rank".to_owned(),
        Some(dims) => format!("shape {}", dims.iter().map(dim).collect::<Vec<_>>().join("x")),
    };
    cx.error(format_args!("output {slot}"), got, "a shape that the inputs' shapes and the shape inputs' values decide")
}

fn dim(dim: &Dim) -> String {
    match dim {
        Dim::Known(n) => n.to_string(),
        Dim::Symbol(name) => name.to_string(),
        Dim::Unknown => "?".into(),
    }
}

/// One node on its own, for tests and fuzzing: claims, infers, builds and runs it.
pub struct Single {
    graph: Graph,
    inputs: Vec<Option<HostTensor>>,
}

impl Single {
    /// A node of `domain::op_type` that first appeared in opset `since`, with `outputs` output slots.
    pub fn new(domain: &str, op_type: &str, since: u32, outputs: usize) -> Self {
        let mut graph = Graph::default();
        let outputs: Vec<_> = (0..outputs).map(|i| Some(value(&mut graph, format!("y{i}"), None))).collect();
        graph.outputs = outputs.iter().flatten().copied().collect();
        graph.nodes.push(abi::Node {
            name: "node".into(),
            domain: domain.into(),
            op_type: op_type.into(),
            since_version: since,
            inputs: Vec::new(),
            outputs,
            attrs: Vec::new(),
            implicit_inputs: Vec::new(),
            handle: 0,
        });
        Self { graph, inputs: Vec::new() }
    }

    /// Sets an attribute.
    pub fn attr(mut self, name: &str, attr: abi::Attr) -> Self {
        self.graph.nodes[0].attrs.retain(|(set, _)| set != name);
        self.graph.nodes[0].attrs.push((name.into(), attr));
        self
    }

    /// Says that nobody reads these outputs.
    pub fn without_outputs(mut self, slots: &[usize]) -> Self {
        slots.iter().for_each(|&slot| self.graph.nodes[0].outputs[slot] = None);
        self.graph.outputs = self.graph.nodes[0].outputs.iter().flatten().copied().collect();
        self
    }

    /// Adds the next input: a tensor that arrives at run time.
    pub fn input(self, tensor: HostTensor) -> Self {
        self.push(Some(tensor), false)
    }

    /// Adds the next input: a constant of the model.
    pub fn constant(self, tensor: HostTensor) -> Self {
        self.push(Some(tensor), true)
    }

    /// Leaves the next input out.
    pub fn absent(self) -> Self {
        self.push(None, false)
    }

    fn push(mut self, tensor: Option<HostTensor>, constant: bool) -> Self {
        let slot = tensor.as_ref().map(|t| {
            let name = format!("x{}", self.inputs.len());
            let id = value(&mut self.graph, name, Some(t.dtype()));
            let shape = t.shape().iter().map(|&d| Dim::Known(d)).collect();
            self.graph.values[id].shape = Some(shape);
            self.graph.values[id].initializer = constant.then(|| abi::Initializer {
                dtype: t.dtype(),
                shape: t.shape().to_vec(),
                data: abi::InitializerData::Inline(t.clone()),
            });
            id
        });
        self.graph.nodes[0].inputs.push(slot);
        self.inputs.push(tensor);
        self
    }

    /// The outputs by slot. A decline comes back as [`Error::Internal`] with its sentence.
    pub fn run(&self, settings: &Settings, par: Par<'_>) -> Result<Vec<Option<HostTensor>>> {
        self.run_with(settings, par, false)
    }

    /// [`Self::run`] with one buffer for each (input, output) pair that the op declares as in place.
    pub fn run_in_place(&self, settings: &Settings, par: Par<'_>) -> Result<Vec<Option<HostTensor>>> {
        self.run_with(settings, par, true)
    }

    fn run_with(&self, settings: &Settings, par: Par<'_>, in_place: bool) -> Result<Vec<Option<HostTensor>>> {
        let node = &self.graph.nodes[0];
        let declined = |d: crate::op::Decline| Error::Internal(d.0);
        let def = crate::op::find(node).map_err(declined)?;
        let mut facts: Facts = vec![None; self.graph.values.len()];
        for (slot, tensor) in node.inputs.iter().zip(&self.inputs) {
            if let (Some(id), Some(tensor)) = (slot, tensor) {
                let constant = self.graph.values[*id].initializer.is_some();
                facts[*id] = Some(Arc::new(Fact { constant, ..Fact::with_value(tensor.clone()) }));
            }
        }
        (def.claim)(&NodeCx::new(&self.graph, 0, &facts)).map_err(declined)?;
        let shared = if in_place { def.in_place } else { &[] };
        node_in_place(def, &self.graph, 0, &self.inputs, settings, par, shared)
    }
}

fn value(graph: &mut Graph, name: String, dtype: Option<DType>) -> abi::ValueId {
    graph.values.push(abi::Value { name, dtype, shape: None, initializer: None });
    graph.values.len() - 1
}
