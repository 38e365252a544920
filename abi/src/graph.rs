//! A graph as plain data: what the claim, the plan and `explain` read, wherever it came from.

use crate::tensor::{DType, HostTensor};
use std::path::PathBuf;
use std::sync::Arc;

/// Index into [`Graph::nodes`].
pub type NodeId = usize;
/// Index into [`Graph::values`].
pub type ValueId = usize;

/// One dimension of a shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Dim {
    /// A number known before the first Run.
    Known(usize),
    /// A name: two dimensions of one name are equal in every Run.
    Symbol(Arc<str>),
    /// Nothing is known.
    Unknown,
}

impl Dim {
    /// The number, if known.
    pub fn known(&self) -> Option<usize> {
        match self {
            Self::Known(n) => Some(*n),
            _ => None,
        }
    }
}

impl From<usize> for Dim {
    fn from(n: usize) -> Self {
        Self::Known(n)
    }
}

/// A graph, its values numbered, its nodes in topological order.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// Every graph input, initializer and node output.
    pub values: Vec<Value>,
    /// The nodes, producers before consumers.
    pub nodes: Vec<Node>,
    /// The graph's real inputs, without initializers.
    pub inputs: Vec<ValueId>,
    /// The graph's outputs.
    pub outputs: Vec<ValueId>,
    /// Where the model lies; external data paths are relative to its folder.
    pub model_path: Option<PathBuf>,
    /// Whether this is the body of a control-flow node.
    pub is_body: bool,
}

impl Graph {
    /// The graph with the output slots that nobody reads left empty: exporters name every slot of an op, used or not.
    pub fn without_unread_outputs(mut self) -> Self {
        let mut read = vec![false; self.values.len()];
        let inputs = self.nodes.iter().flat_map(|n| n.inputs.iter().flatten().chain(&n.implicit_inputs));
        inputs.chain(&self.outputs).for_each(|&value| read[value] = true);
        for slot in self.nodes.iter_mut().flat_map(|n| &mut n.outputs) {
            *slot = slot.filter(|&value| read[value]);
        }
        self
    }
}

/// A tensor in the graph.
#[derive(Debug, Clone)]
pub struct Value {
    /// Its unique name.
    pub name: String,
    /// The element type, if known.
    pub dtype: Option<DType>,
    /// The shape, if its rank is known.
    pub shape: Option<Vec<Dim>>,
    /// Its contents, if it is a constant initializer.
    pub initializer: Option<Initializer>,
}

/// A constant's type, shape and bytes.
#[derive(Debug, Clone)]
pub struct Initializer {
    /// The element type.
    pub dtype: DType,
    /// The dimensions.
    pub shape: Vec<usize>,
    /// Where the bytes are.
    pub data: InitializerData,
}

/// Where an initializer's bytes are.
#[derive(Debug, Clone)]
pub enum InitializerData {
    /// In memory of our own.
    Inline(HostTensor),
    /// In a file, `path` already joined with the model's folder.
    External {
        /// The data file.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: usize,
    },
    /// The bytes were not read (`explain` needs none for large weights).
    Unread,
}

/// An operator's use.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its name; may be empty.
    pub name: String,
    /// The op's domain; the default domain is `""`.
    pub domain: String,
    /// The op.
    pub op_type: String,
    /// The opset version in which this form of the op first appeared.
    pub since_version: u32,
    /// Inputs by slot; `None` where an optional input is absent.
    pub inputs: Vec<Option<ValueId>>,
    /// Outputs by slot; `None` where an optional output is absent.
    pub outputs: Vec<Option<ValueId>>,
    /// Attributes that are set, by name.
    pub attrs: Vec<(String, Attr)>,
    /// Values of the enclosing graph that its bodies read (control flow only).
    pub implicit_inputs: Vec<ValueId>,
    /// The host's own handle of the node, opaque here.
    pub handle: usize,
}

impl Node {
    /// `domain::op_type`, with `ai.onnx` written out.
    pub fn op(&self) -> String {
        let domain = if self.domain.is_empty() { "ai.onnx" } else { &self.domain };
        format!("{domain}::{}", self.op_type)
    }

    /// The attribute of that name, if set.
    pub fn attr(&self, name: &str) -> Option<&Attr> {
        self.attrs.iter().find(|(n, _)| n == name).map(|(_, a)| a)
    }
}

/// An attribute's value.
#[derive(Debug, Clone)]
#[allow(missing_docs)] // the names are ONNX's own
pub enum Attr {
    Int(i64),
    Float(f32),
    String(String),
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Strings(Vec<String>),
    Tensor(HostTensor),
    Graph(Box<Graph>),
    /// A kind that no op here reads (sparse tensors, type protos, lists of tensors or graphs).
    Other,
}
