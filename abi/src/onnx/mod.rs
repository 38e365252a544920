//! Reads ONNX model files into [`Graph`]s without ORT and without their weights: what `explain` starts from.
//!
//! The result looks like what ORT shows an execution provider before its optimisers ran: Constant nodes are
//! initializers, nodes are in topological order, since-versions are resolved, and calls of model-local functions
//! are nodes until [`Model::inline`] expands them. Bytes are not trusted: damage of any kind is an
//! [`Error::Model`], never a panic.

mod functions;
mod graph;
mod proto;
pub mod schema;
mod tensor;

#[cfg(test)]
mod tests;

use crate::{Error, Graph, Result};
use prost::Message;
use prost::bytes::Bytes;
use proto::{FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};

/// An ONNX model, decoded.
pub struct Model {
    path: Option<PathBuf>,
    ir_version: i64,
    /// The main graph, its nodes moved to `nodes`.
    graph: GraphProto,
    nodes: Vec<Call>,
    functions: HashMap<FunctionKey, FunctionProto>,
    /// Opset imports: the model's own, then those of functions.
    opsets: Vec<Opset>,
    /// What has been expanded so far, for the limits.
    expanded: functions::Budget,
}

/// Domain, name and overload.
type FunctionKey = (String, String, String);

/// Opset version per domain, `ai.onnx` being `""`.
type Opset = HashMap<String, u32>;

/// A node of the main graph.
struct Call {
    node: NodeProto,
    /// Index into [`Model::opsets`].
    opset: usize,
    /// How many functions deep its text stood.
    depth: usize,
}

impl Model {
    /// Reads the model file at `path`; external data is relative to its folder.
    pub fn open(path: &Path) -> Result<Self> {
        let fail =
            |error: std::io::Error| model_error(&format!("'{}'", path.display()), format!("cannot be read: {error}"));
        let file = File::open(path).map_err(fail)?;
        if !file.metadata().map_err(fail)?.is_file() {
            return Err(fail(std::io::Error::other("not a file")));
        }
        // SAFETY: the map is private and read-only. Nothing protects it from another process that cuts the
        // file off meanwhile, as nothing protects ORT, which maps model files too.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(fail)?;
        Self::decode(Bytes::from_owner(map), Some(path.to_path_buf()))
    }

    /// Reads a model from memory. External data is not looked for.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::decode(Bytes::copy_from_slice(bytes), None)
    }

    fn decode(bytes: Bytes, path: Option<PathBuf>) -> Result<Self> {
        let proto =
            ModelProto::decode(bytes).map_err(|error| model_error("file", format!("is not an ONNX model: {error}")))?;
        let Some(mut graph) = proto.graph else {
            return Err(model_error("file", "holds no graph"));
        };
        let nodes = std::mem::take(&mut graph.node);
        let as_call = |node| Call { node, opset: 0, depth: 0 };
        let mut functions = HashMap::new();
        for function in proto.functions {
            let domain = canonical(&function.domain).to_owned();
            let key = (domain, function.name.clone(), function.overload.clone());
            if let Some(twice) = functions.insert(key, function) {
                let problem = "is defined twice";
                return Err(model_error(&format!("function '{}'", twice.name), problem));
            }
        }
        Ok(Self {
            path,
            ir_version: proto.ir_version.unwrap_or(0),
            graph,
            nodes: nodes.into_iter().map(as_call).collect(),
            functions,
            opsets: vec![opset(&proto.opset_import)?],
            expanded: functions::Budget::default(),
        })
    }

    /// The main graph. `Node::handle` is what [`Self::inline`] takes.
    pub fn graph(&self) -> Result<Graph> {
        graph::build(self)
    }

    /// Expands the calls of model-local functions whose `Node::handle` is not in `keep`, one level deep, and says
    /// whether there were any. Handles change then. Errors when functions are recursive or explode.
    pub fn inline(&mut self, keep: &HashSet<usize>) -> Result<bool> {
        functions::inline(self, keep)
    }

    /// Whether the node with that `Node::handle` calls a model-local function.
    pub fn is_call(&self, handle: usize) -> bool {
        self.nodes.get(handle).is_some_and(|call| self.function(&call.node).is_some())
    }

    /// The function that `node` calls, if it is a call.
    fn function(&self, node: &NodeProto) -> Option<&FunctionProto> {
        if self.functions.is_empty() {
            return None;
        }
        let domain = canonical(&node.domain).to_owned();
        self.functions.get(&(domain, node.op_type.clone(), node.overload.clone()))
    }

    /// The folder of the model file.
    fn folder(&self) -> Option<&Path> {
        self.path.as_deref().and_then(Path::parent)
    }
}

/// The one spelling of a domain: `""` for `ai.onnx`.
fn canonical(domain: &str) -> &str {
    match domain {
        "ai.onnx" => "",
        other => other,
    }
}

/// Opset imports by domain.
fn opset(imports: &[OperatorSetIdProto]) -> Result<Opset> {
    let entry = |import: &OperatorSetIdProto| match u32::try_from(import.version) {
        Ok(version) => Ok((canonical(&import.domain).to_owned(), version)),
        Err(_) => Err(model_error(
            &format!("opset import '{}'", import.domain),
            format!("version {} is no opset version", import.version),
        )),
    };
    imports.iter().map(entry).collect()
}

fn model_error(place: &str, problem: impl Into<String>) -> Error {
    Error::Model { place: place.to_owned(), problem: problem.into() }
}
