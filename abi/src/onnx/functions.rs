//! Expands calls of model-local functions.

use super::graph::place;
use super::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto};
use super::{Call, Model, model_error, opset};
use crate::Result;
use prost::Message;
use std::collections::{HashMap, HashSet};

/// What expansion may add to a model, so that a small hostile file cannot fill the memory.
const MAX_NODES: usize = 1 << 20;
const MAX_BYTES: usize = 1 << 30;

/// What expansion has added.
#[derive(Default)]
pub struct Budget {
    nodes: usize,
    bytes: usize,
    calls: usize,
}

/// See [`Model::inline`].
pub fn inline(model: &mut Model, keep: &HashSet<usize>) -> Result<bool> {
    let is_expanded = |(index, call): (usize, &Call)| !keep.contains(&index) && model.function(&call.node).is_some();
    if !model.nodes.iter().enumerate().any(is_expanded) {
        return Ok(false);
    }
    let mut opsets: HashMap<*const FunctionProto, usize> = HashMap::new();
    let mut new_opsets = Vec::new();
    let mut budget = std::mem::take(&mut model.expanded);
    let mut nodes = Vec::with_capacity(model.nodes.len());
    for (index, call) in std::mem::take(&mut model.nodes).into_iter().enumerate() {
        let function = model.function(&call.node).filter(|_| !keep.contains(&index));
        let Some(function) = function else {
            nodes.push(call);
            continue;
        };
        if call.depth >= model.functions.len() {
            return Err(model_error(&place(&call.node), "calls itself"));
        }
        let next = model.opsets.len() + new_opsets.len();
        let opset_id = *opsets.entry(function).or_insert(next);
        if opset_id == next {
            new_opsets.push(opset(&function.opset_import)?);
        }
        budget.spend(&call.node, function)?;
        let prefix = format!("_inline{}_", budget.calls);
        for node in Expansion::new(&call.node, function, &prefix)?.nodes() {
            nodes.push(Call { node, opset: opset_id, depth: call.depth + 1 });
        }
    }
    model.nodes = nodes;
    model.opsets.extend(new_opsets);
    model.expanded = budget;
    Ok(true)
}

impl Budget {
    fn spend(&mut self, call: &NodeProto, function: &FunctionProto) -> Result<()> {
        self.calls += 1;
        self.nodes += function.node.len() + function.output.len();
        self.bytes = self.bytes.saturating_add(function.encoded_len());
        if self.nodes > MAX_NODES || self.bytes > MAX_BYTES {
            let problem = "expanding functions makes the model too large";
            return Err(model_error(&place(call), problem));
        }
        Ok(())
    }
}

/// One call's body with the caller's names and attributes put in.
struct Expansion<'a> {
    call: &'a NodeProto,
    function: &'a FunctionProto,
    prefix: &'a str,
    names: HashMap<&'a str, String>,
    attributes: HashMap<&'a str, &'a AttributeProto>,
    /// (caller's input, caller's output) where the function hands an input through.
    passed: Vec<(String, String)>,
}

impl<'a> Expansion<'a> {
    fn new(call: &'a NodeProto, function: &'a FunctionProto, prefix: &'a str) -> Result<Self> {
        if call.input.len() > function.input.len() || call.output.len() > function.output.len() {
            let (inputs, outputs) = (call.input.len(), call.output.len());
            let problem = format!(
                "passes {inputs} inputs and takes {outputs} outputs, but the function has {} and {}",
                function.input.len(),
                function.output.len()
            );
            return Err(model_error(&place(call), problem));
        }
        let mut names = HashMap::new();
        for (index, formal) in function.input.iter().enumerate() {
            let actual = call.input.get(index).cloned().unwrap_or_default();
            names.insert(formal.as_str(), actual);
        }
        let mut passed = Vec::new();
        for (formal, actual) in function.output.iter().zip(&call.output) {
            if actual.is_empty() {
                continue;
            }
            match names.get(formal.as_str()) {
                Some(source) => passed.push((source.clone(), actual.clone())),
                None => {
                    names.insert(formal, actual.clone());
                }
            }
        }
        let defaults = function.attribute_proto.iter();
        let given = call.attribute.iter();
        let attributes = defaults.chain(given).map(|a| (a.name.as_str(), a)).collect();
        Ok(Self { call, function, prefix, names, attributes, passed })
    }

    fn nodes(&self) -> Vec<NodeProto> {
        let copies = self.passed.iter().enumerate().map(|(index, (from, to))| NodeProto {
            name: format!("{}{}_output{index}", self.prefix, self.call.name),
            op_type: "Identity".into(),
            input: vec![from.clone()],
            output: vec![to.clone()],
            ..NodeProto::default()
        });
        let body = self.function.node.iter().map(|n| self.node(n));
        body.chain(copies).collect()
    }

    fn node(&self, node: &NodeProto) -> NodeProto {
        let rename = |names: &[String]| names.iter().map(|n| self.rename(n)).collect();
        NodeProto {
            name: format!("{}{}", self.prefix, node.name),
            input: rename(&node.input),
            output: rename(&node.output),
            attribute: node.attribute.iter().filter_map(|a| self.attribute(a)).collect(),
            op_type: node.op_type.clone(),
            domain: node.domain.clone(),
            overload: node.overload.clone(),
        }
    }

    fn rename(&self, name: &str) -> String {
        match self.names.get(name) {
            _ if name.is_empty() => String::new(),
            Some(actual) => actual.clone(),
            None => format!("{}{name}", self.prefix),
        }
    }

    /// The attribute with the caller's value for a reference, or `None` where the caller leaves it unset.
    fn attribute(&self, attribute: &AttributeProto) -> Option<AttributeProto> {
        if !attribute.ref_attr_name.is_empty() {
            let given = *self.attributes.get(attribute.ref_attr_name.as_str())?;
            return Some(AttributeProto { name: attribute.name.clone(), ..given.clone() });
        }
        let mut copy = attribute.clone();
        copy.g = attribute.g.as_ref().map(|g| self.body(g));
        Some(copy)
    }

    fn body(&self, graph: &GraphProto) -> GraphProto {
        let mut copy = graph.clone();
        let infos = copy.input.iter_mut().chain(&mut copy.output).chain(&mut copy.value_info);
        infos.for_each(|info| info.name = self.rename(&info.name));
        for tensor in &mut copy.initializer {
            tensor.name = self.rename(&tensor.name);
        }
        for values in copy.sparse_initializer.iter_mut().filter_map(|s| s.values.as_mut()) {
            values.name = self.rename(&values.name);
        }
        copy.node = graph.node.iter().map(|n| self.node(n)).collect();
        copy
    }
}
