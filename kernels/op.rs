//! The op table: what an op is, whether a node of it can run here, and what shapes it makes.
//!
//! One [`OpDef`] an op. The same functions answer the claim, `explain`, the plan and every Run, so what
//! is claimed is what runs.

use crate::build::BuildCx;
use crate::cuda::{Device, DeviceKernel};
use crate::experts::Experts;
use crate::fact::Fact;
use crate::kernel::Kernel;
use abi::{Attr, DType, Error, Graph, HostTensor, Node, NodeId, Result};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock};

/// Why a node is not claimed: one sentence that names op, node, slot, got and expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decline(pub String);

impl fmt::Display for Decline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Error> for Decline {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

/// One ONNX op, in the opset versions that share a definition here.
pub struct OpDef {
    /// The domain; the default domain is `""`.
    pub domain: &'static str,
    /// The op type.
    pub name: &'static str,
    /// First and last `since_version` that this definition covers.
    pub since: (u32, u32),
    /// Whether this node can run. Attributes, dtypes and (where known) shapes and constants are at hand.
    pub claim: fn(&NodeCx) -> Result<(), Decline>,
    /// Facts of every output slot from those of the inputs. Must work with unknown dims (claim, explain)
    /// and give known ones when all inputs are known; an `Err` says that the inputs break the definition.
    pub infer: fn(&NodeCx) -> Result<Vec<Fact>>,
    /// Makes the kernel; prepacks weights.
    pub build: fn(&mut BuildCx) -> Result<Box<dyn Kernel>>,
    /// Input slots whose VALUES decide output shapes: the shape program computes them on the host.
    pub host_inputs: &'static [usize],
    /// Output 0 depends on the inputs' shapes only (Shape, Size): `infer` gives its value.
    pub shape_only: bool,
    /// Output 0 is input 0's bytes under another shape (Reshape): nothing moves.
    pub view: bool,
    /// Where in input 0 the outputs' bytes already lie one after the other, for the shapes at hand (all known): the byte
    /// offset of each output slot. `None` when some byte must move.
    pub alias: Option<Alias>,
    /// Pairs (input, output) that the caller may bind to one buffer, and the kernel then updates in place.
    pub in_place: &'static [(usize, usize)],
    /// Whether all that is made of the node but the results themselves - the outputs' facts, scratch, launches, those of a
    /// cluster too - stays what it was when the fact of this input slot was that one; for values that grow with each Run.
    pub steady: Option<Steady>,
    /// The op on CUDA devices; ops that move nothing (`view`, `shape_only`) need none.
    pub cuda: Option<CudaOp>,
}

/// Byte offsets of the outputs in input 0, if their bytes lie there.
pub type Alias = fn(&NodeCx) -> Option<Vec<usize>>;

/// Node, an input slot, and the fact that it had: see [`OpDef::steady`].
pub type Steady = fn(&NodeCx, usize, &Fact) -> bool;

/// Makes an op's kernel for a CUDA device; packs and uploads weights.
pub type CudaBuild = fn(&mut BuildCx, &Arc<Device>) -> Result<Box<dyn DeviceKernel>>;

/// How an op runs on CUDA devices, besides what [`OpDef`] says of it.
#[derive(Clone, Copy)]
pub struct CudaOp {
    /// Whether this node, which `OpDef::claim` accepts, has a CUDA kernel too.
    pub claim: fn(&NodeCx) -> Result<(), Decline>,
    /// Makes the kernel; packs and uploads weights.
    pub build: CudaBuild,
    /// A claimed node's experts, where the op has some: they need not all be on the device.
    pub experts: Option<fn(&NodeCx) -> Result<Experts>>,
}

impl OpDef {
    /// A definition with nothing special; see the `with_*` methods.
    pub const fn new(
        domain: &'static str,
        name: &'static str,
        since: (u32, u32),
        claim: fn(&NodeCx) -> Result<(), Decline>,
        infer: fn(&NodeCx) -> Result<Vec<Fact>>,
        build: fn(&mut BuildCx) -> Result<Box<dyn Kernel>>,
    ) -> Self {
        Self {
            domain,
            name,
            since,
            claim,
            infer,
            build,
            host_inputs: &[],
            shape_only: false,
            view: false,
            alias: None,
            in_place: &[],
            steady: None,
            cuda: None,
        }
    }

    /// Gives the op's kernel for CUDA devices, which takes every node that the op's claim takes.
    pub const fn with_cuda(self, build: CudaBuild) -> Self {
        self.with_cuda_claim(|_| Ok(()), build)
    }

    /// Gives the op's kernel for CUDA devices, and what of the op's nodes it takes.
    pub const fn with_cuda_claim(mut self, claim: fn(&NodeCx) -> Result<(), Decline>, build: CudaBuild) -> Self {
        self.cuda = Some(CudaOp { claim, build, experts: None });
        self
    }

    /// Says what experts the op's nodes have on CUDA devices.
    pub const fn with_cuda_experts(mut self, experts: fn(&NodeCx) -> Result<Experts>) -> Self {
        if let Some(cuda) = &mut self.cuda {
            cuda.experts = Some(experts);
        }
        self
    }

    /// Names the input slots whose values decide output shapes.
    pub const fn with_host_inputs(mut self, slots: &'static [usize]) -> Self {
        self.host_inputs = slots;
        self
    }

    /// Says that output 0 depends on input shapes only.
    pub const fn with_shape_only(mut self) -> Self {
        self.shape_only = true;
        self
    }

    /// Says that output 0 is input 0's bytes.
    pub const fn with_view(mut self) -> Self {
        self.view = true;
        self
    }

    /// Says where outputs lie in input 0 when nothing needs to move.
    pub const fn with_alias(mut self, alias: Alias) -> Self {
        self.alias = Some(alias);
        self
    }

    /// Names (input, output) pairs that may share a buffer.
    pub const fn with_in_place(mut self, pairs: &'static [(usize, usize)]) -> Self {
        self.in_place = pairs;
        self
    }

    /// Says which new facts of inputs make no difference.
    pub const fn with_steady(mut self, steady: Steady) -> Self {
        self.steady = Some(steady);
        self
    }
}

/// The definition that covers `node`, or the sentence that says why there is none.
pub fn find(node: &Node) -> Result<&'static OpDef, Decline> {
    static TABLE: LazyLock<HashMap<(&'static str, &'static str), Vec<&'static OpDef>>> = LazyLock::new(|| {
        let mut table: HashMap<_, Vec<_>> = HashMap::new();
        for def in crate::ops::all() {
            table.entry((def.domain, def.name)).or_default().push(def);
        }
        table
    });
    let label = || NodeLabel::of(node);
    let Some(defs) = TABLE.get(&(node.domain.as_str(), node.op_type.as_str())) else {
        return Err(Decline(format!("{} has no kernel here", label())));
    };
    let version = node.since_version;
    defs.iter().find(|d| (d.since.0..=d.since.1).contains(&version)).copied().ok_or_else(|| {
        let known: Vec<_> = defs.iter().map(|d| format!("{} to {}", d.since.0, d.since.1)).collect();
        Decline(format!("{}: got opset version {version}, expected {}", label(), known.join(" or ")))
    })
}

/// A node's name and op, for messages.
#[derive(Debug, Clone)]
pub struct NodeLabel {
    /// The node's name.
    pub node: String,
    /// `domain::op_type`.
    pub op: String,
}

impl NodeLabel {
    /// The label of `node`; an unnamed node goes by its first output slot's number.
    pub fn of(node: &Node) -> Self {
        let name = if node.name.is_empty() { "(unnamed)".into() } else { node.name.clone() };
        Self { node: name, op: node.op() }
    }

    /// An [`Error::Node`] for this node.
    pub fn error(&self, slot: impl fmt::Display, got: impl fmt::Display, expected: impl fmt::Display) -> Error {
        Error::Node {
            node: self.node.clone(),
            op: self.op.clone(),
            slot: slot.to_string(),
            got: got.to_string(),
            expected: expected.to_string(),
        }
    }
}

impl fmt::Display for NodeLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node '{}' ({})", self.node, self.op)
    }
}

/// A node with what is known of its inputs.
#[derive(Clone, Copy)]
pub struct NodeCx<'a> {
    graph: &'a Graph,
    id: NodeId,
    facts: &'a [Option<Arc<Fact>>],
}

impl<'a> NodeCx<'a> {
    /// `facts` is indexed by `ValueId`.
    pub fn new(graph: &'a Graph, id: NodeId, facts: &'a [Option<Arc<Fact>>]) -> Self {
        Self { graph, id, facts }
    }

    /// The node.
    pub fn node(&self) -> &'a Node {
        &self.graph.nodes[self.id]
    }

    /// The node's number in the graph.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// The graph that holds it.
    pub fn graph(&self) -> &'a Graph {
        self.graph
    }

    /// What is known of input `slot`; `None` when it is absent (or, in `explain`, of unknown type: the claim
    /// driver declines such nodes before it asks).
    pub fn input(&self, slot: usize) -> Option<&'a Fact> {
        let value = (*self.node().inputs.get(slot)?)?;
        self.facts[value].as_deref()
    }

    /// What is known of a required input.
    pub fn required(&self, slot: usize) -> Result<&'a Fact> {
        self.input(slot).ok_or_else(|| self.error(format_args!("input {slot}"), "nothing", "a tensor"))
    }

    /// Whether input `slot` is present.
    pub fn has_input(&self, slot: usize) -> bool {
        matches!(self.node().inputs.get(slot), Some(Some(_)))
    }

    /// Number of input slots, trailing absent ones included.
    pub fn inputs_len(&self) -> usize {
        self.node().inputs.len()
    }

    /// Whether a node reads output `slot` or the graph hands it out. Exporters name outputs that nobody reads.
    pub fn has_output(&self, slot: usize) -> bool {
        let Some(&Some(value)) = self.node().outputs.get(slot) else { return false };
        let reads = |node: &Node| node.inputs.contains(&Some(value)) || node.implicit_inputs.contains(&value);
        self.graph.outputs.contains(&value) || self.graph.nodes.iter().any(reads)
    }

    /// The element type that the graph states for output `slot`, if any.
    pub fn stated_output_dtype(&self, slot: usize) -> Option<DType> {
        let value = (*self.node().outputs.get(slot)?)?;
        self.graph.values[value].dtype
    }

    /// An integer attribute, or `default` when unset.
    pub fn int(&self, name: &str, default: i64) -> i64 {
        match self.node().attr(name) {
            Some(Attr::Int(v)) => *v,
            _ => default,
        }
    }

    /// A float attribute, or `default` when unset.
    pub fn float(&self, name: &str, default: f32) -> f32 {
        match self.node().attr(name) {
            Some(Attr::Float(v)) => *v,
            _ => default,
        }
    }

    /// A string attribute, or `default` when unset.
    pub fn string(&self, name: &str, default: &'a str) -> &'a str {
        match self.node().attr(name) {
            Some(Attr::String(v)) => v,
            _ => default,
        }
    }

    /// An integer-list attribute.
    pub fn ints(&self, name: &str) -> Option<&'a [i64]> {
        match self.node().attr(name) {
            Some(Attr::Ints(v)) => Some(v),
            _ => None,
        }
    }

    /// A tensor attribute.
    pub fn tensor(&self, name: &str) -> Option<&'a HostTensor> {
        match self.node().attr(name) {
            Some(Attr::Tensor(v)) => Some(v),
            _ => None,
        }
    }

    /// The node's label.
    pub fn label(&self) -> NodeLabel {
        NodeLabel::of(self.node())
    }

    /// An [`Error::Node`] for this node.
    pub fn error(&self, slot: impl fmt::Display, got: impl fmt::Display, expected: impl fmt::Display) -> Error {
        self.label().error(slot, got, expected)
    }

    /// A [`Decline`] with the same words as [`Self::error`].
    pub fn decline(&self, slot: impl fmt::Display, got: impl fmt::Display, expected: impl fmt::Display) -> Decline {
        self.error(slot, got, expected).into()
    }

    /// Declines unless input `slot` is absent or of one of `allowed`; `name` is the schema's.
    pub fn check_dtype(&self, slot: usize, name: &str, allowed: &[DType]) -> Result<(), Decline> {
        match self.input(slot) {
            Some(fact) if !allowed.contains(&fact.dtype) => {
                let expected: Vec<_> = allowed.iter().map(DType::to_string).collect();
                Err(self.decline(format_args!("input {slot} ({name})"), fact.dtype, expected.join(" or ")))
            }
            _ => Ok(()),
        }
    }

    /// Declines unless integer attribute `name` (or its `default`) is one of `allowed`.
    pub fn check_int(&self, name: &str, default: i64, allowed: &[i64]) -> Result<(), Decline> {
        let got = self.int(name, default);
        if allowed.contains(&got) {
            return Ok(());
        }
        Err(self.decline(format_args!("attribute '{name}'"), got, format_args!("one of {allowed:?}")))
    }

    /// Declines unless string attribute `name` (or its `default`) is one of `allowed`.
    pub fn check_string(&self, name: &str, default: &'static str, allowed: &[&str]) -> Result<(), Decline> {
        let got = self.string(name, default);
        if allowed.contains(&got) {
            return Ok(());
        }
        Err(self.decline(format_args!("attribute '{name}'"), got, format_args!("one of {allowed:?}")))
    }

    /// Declines when optional input `slot` is present.
    pub fn check_absent(&self, slot: usize, name: &str, why: &str) -> Result<(), Decline> {
        if self.has_input(slot) {
            return Err(self.decline(format_args!("input {slot} ({name})"), "a tensor", format_args!("none: {why}")));
        }
        Ok(())
    }

    /// Declines unless required input slots `0..n` are present.
    pub fn check_required(&self, n: usize) -> Result<(), Decline> {
        (0..n).try_for_each(|slot| {
            if self.has_input(slot) {
                return Ok(());
            }
            Err(self.decline(format_args!("input {slot}"), "nothing", "a tensor"))
        })
    }
}
