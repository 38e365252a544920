//! What would be claimed of a model file, and why the rest would not: the claim without ORT and without weights.

use crate::claim::{Claim, claim};
use crate::op::NodeLabel;
use crate::settings::Settings;
use abi::onnx::Model;
use abi::{Attr, Graph, Result};
use std::collections::HashSet;
use std::path::Path;

/// The answer for one model.
#[derive(Debug)]
pub struct Explanation {
    /// Every node, in topological order; those of a control-flow node's bodies follow it.
    pub nodes: Vec<Verdict>,
    /// How many fused nodes the claimed ones become.
    pub groups: usize,
}

/// What becomes of one node.
#[derive(Debug)]
pub struct Verdict {
    /// The node's name in the model; may be empty.
    pub name: String,
    /// `domain::op_type`.
    pub op: String,
    /// The index of its group, or the sentence that says why it has none.
    pub place: Result<usize, String>,
}

/// Claims what can run of the model at `path`, as a session whose optimisers are off would see it: Constant nodes are
/// initializers, and calls of model-local functions that are not claimed are expanded.
///
/// # Errors
/// [`abi::Error::Model`] for a damaged file.
pub fn explain(path: &Path, settings: &Settings) -> Result<Explanation> {
    let mut model = Model::open(path)?;
    loop {
        let graph = model.graph()?;
        let claim = claim(&graph, settings);
        if model.inline(&kept(&model, &graph, &claim))? {
            continue;
        }
        let mut places = vec![Err(String::new()); graph.nodes.len()];
        for (index, group) in claim.groups.iter().enumerate() {
            group.iter().for_each(|&id| places[id] = Ok(index));
        }
        for (id, reason) in claim.declined {
            places[id] = Err(reason.0);
        }
        let mut nodes = Vec::with_capacity(places.len());
        for (node, place) in graph.nodes.iter().zip(places) {
            let label = NodeLabel::of(node);
            let inner = place.clone().map_err(|_| format!("stands in the body of {label}, which is not claimed"));
            nodes.push(Verdict { name: node.name.clone(), op: node.op(), place });
            bodies(node, &inner, &mut nodes);
        }
        return Ok(Explanation { nodes, groups: claim.groups.len() });
    }
}

/// Handles of the calls not to expand now: those that are claimed, and those that could not be judged yet because the
/// types of their inputs come out of other calls.
fn kept(model: &Model, graph: &Graph, claim: &Claim) -> HashSet<usize> {
    let mut claimed = vec![false; graph.nodes.len()];
    claim.groups.iter().flatten().for_each(|&id| claimed[id] = true);
    let mut waits = vec![false; graph.values.len()];
    let mut kept = HashSet::new();
    for (node, claimed) in graph.nodes.iter().zip(claimed) {
        let is_late = node.inputs.iter().flatten().any(|&value| waits[value]);
        let is_call = model.is_call(node.handle);
        if claimed || is_late {
            kept.insert(node.handle);
        }
        if !claimed && (is_call || is_late) {
            let unstated = node.outputs.iter().flatten().filter(|&&v| graph.values[v].dtype.is_none());
            unstated.for_each(|&value| waits[value] = true);
        }
    }
    kept
}

/// Adds the nodes of `node`'s bodies, however deep; they go where it goes.
fn bodies(node: &abi::Node, place: &Result<usize, String>, into: &mut Vec<Verdict>) {
    let graphs = node.attrs.iter().filter_map(|(_, attr)| match attr {
        Attr::Graph(graph) => Some(&**graph),
        _ => None,
    });
    for inner in graphs.flat_map(|graph: &Graph| &graph.nodes) {
        into.push(Verdict { name: inner.name.clone(), op: inner.op(), place: place.clone() });
        bodies(inner, place, into);
    }
}
