//! Which nodes can run here, in which groups, and why the others cannot.

use crate::eval;
use crate::experts::Experts;
use crate::fact::{self, Fact, Facts};
use crate::op::{self, Decline, NodeCx, NodeLabel, OpDef};
use crate::par::Par;
use crate::settings::{Settings, Target};
use abi::{Graph, InitializerData, NodeId, ValueId};
use std::sync::Arc;

/// The answer to GetCapability and to `explain`.
#[derive(Debug)]
pub struct Claim {
    /// Sets of nodes, each convex and to be fused into one, in topological order.
    pub groups: Vec<Vec<NodeId>>,
    /// The other nodes, with the reason.
    pub declined: Vec<(NodeId, Decline)>,
    /// What experts claimed nodes have, for a CUDA device.
    pub experts: Vec<(NodeLabel, Experts)>,
}

/// Claims what can run of `graph`. Pure: the same graph gives the same answer.
pub fn claim(graph: &Graph, settings: &Settings) -> Claim {
    let mut facts = stated_facts(graph);
    let (mut declined, mut experts) = (Vec::new(), Vec::new());
    let mut claimed = vec![false; graph.nodes.len()];
    let mut from_shapes = OnlyFromShapes::of(graph);
    for (id, claimed) in claimed.iter_mut().enumerate() {
        let cx = NodeCx::new(graph, id, &facts);
        let outputs = claim_node(&cx, settings, &from_shapes);
        match outputs.and_then(|outputs| Ok((outputs, experts_of(&cx, settings)?))) {
            Ok((outputs, own)) => {
                from_shapes.record(&graph.nodes[id]);
                *claimed = true;
                experts.extend(own);
                record(graph, id, outputs, &mut facts);
            }
            Err(reason) => {
                declined.push((id, reason));
                record_foreign(graph, id, &mut facts);
            }
        }
    }
    let mut groups = partition(graph, &claimed);
    groups.retain(|group| {
        let worth = is_worth(graph, group);
        if !worth {
            let reason = "only changes shapes, between nodes that run elsewhere: not worth a group of its own";
            declined
                .extend(group.iter().map(|&id| (id, Decline(format!("{} {reason}", NodeLabel::of(&graph.nodes[id]))))));
        }
        worth
    });
    declined.sort_by_key(|&(id, _)| id);
    Claim { groups, declined, experts }
}

/// What experts a claimed node has.
fn experts_of(cx: &NodeCx<'_>, settings: &Settings) -> Result<Option<(NodeLabel, Experts)>, Decline> {
    let cuda = op::find(cx.node())?.cuda.filter(|_| settings.target == Target::Cuda);
    let experts = cuda.and_then(|cuda| cuda.experts).map(|experts| experts(cx)).transpose()?;
    Ok(experts.map(|experts| (cx.label(), experts)))
}

/// What the graph itself states about its values.
pub fn stated_facts(graph: &Graph) -> Facts {
    let fact = |value: &abi::Value| {
        if let Some(init) = &value.initializer {
            let known = match &init.data {
                InitializerData::Inline(tensor) => Fact::with_value(tensor.clone()),
                _ => Fact::new(init.dtype, init.shape.iter().map(|&d| d.into()).collect()),
            };
            return Some(Fact { constant: true, ..known });
        }
        value.dtype.map(|dtype| Fact::of(dtype, value.shape.clone()))
    };
    graph.values.iter().map(|value| fact(value).map(Arc::new)).collect()
}

/// Which values the shapes of the graph's inputs decide (and constants): those that the host knows before a Run.
struct OnlyFromShapes(Vec<bool>);

impl OnlyFromShapes {
    fn of(graph: &Graph) -> Self {
        Self(graph.values.iter().map(|v| v.initializer.is_some()).collect())
    }

    /// Takes in a claimed node.
    fn record(&mut self, node: &abi::Node) {
        let shape_only = op::find(node).is_ok_and(|def| def.shape_only);
        let known = shape_only || node.inputs.iter().flatten().all(|&v| self.0[v]);
        node.outputs.iter().flatten().for_each(|&v| self.0[v] = known);
    }
}

/// What a CUDA device asks of a node besides its claim: a kernel, and shapes that no tensor's contents decide, since a
/// captured graph cannot wait for them.
fn claim_on_cuda(def: &OpDef, cx: &NodeCx<'_>, from_shapes: &OnlyFromShapes) -> Result<(), Decline> {
    for &slot in def.host_inputs {
        let value = cx.node().inputs.get(slot).copied().flatten();
        if value.is_some_and(|v| !from_shapes.0[v]) {
            return Err(cx.decline(
                format_args!("input {slot}"),
                "values that come from tensor data",
                "values that the inputs' shapes decide: output shapes depend on them, and a captured CUDA graph cannot read them back",
            ));
        }
    }
    match def.cuda {
        Some(cuda) => (cuda.claim)(cx),
        None if def.view || def.shape_only => Ok(()),
        None => Err(Decline(format!("{} has no CUDA kernel", cx.label()))),
    }
}

fn claim_node(cx: &NodeCx<'_>, settings: &Settings, from_shapes: &OnlyFromShapes) -> Result<Vec<Fact>, Decline> {
    let node = cx.node();
    let def = op::find(node)?;
    for (slot, value) in node.inputs.iter().enumerate() {
        if value.is_some() && cx.input(slot).is_none() {
            return Err(cx.decline(format_args!("input {slot}"), "a value of unknown type", "a tensor of known type"));
        }
    }
    (def.claim)(cx)?;
    if settings.target == Target::Cuda {
        claim_on_cuda(def, cx, from_shapes)?;
    }
    let outputs = infer_and_fold(def, cx, settings)?;
    for (slot, fact) in outputs.iter().enumerate() {
        if let Some(stated) = cx.stated_output_dtype(slot).filter(|&d| d != fact.dtype) {
            return Err(cx.decline(format_args!("output {slot}"), stated, fact.dtype));
        }
    }
    Ok(outputs)
}

/// Inputs and outputs of at most this many elements take part in shape arithmetic.
const FOLD_LIMIT: usize = 4096;

/// Infers the outputs and, where all inputs are small and known, computes them.
fn infer_and_fold(def: &OpDef, cx: &NodeCx<'_>, settings: &Settings) -> abi::Result<Vec<Fact>> {
    let mut outputs = (def.infer)(cx)?;
    let small = |f: &Fact| f.elements().is_some_and(|n| n <= FOLD_LIMIT);
    let known = outputs.iter().all(|f| f.value.is_some() || small(f))
        && (0..cx.inputs_len()).all(|s| !cx.has_input(s) || cx.input(s).is_some_and(|f| f.value.is_some() && small(f)));
    if !known || outputs.iter().all(|f| f.value.is_some()) {
        return Ok(outputs);
    }
    let inputs: Vec<_> = (0..cx.inputs_len()).map(|s| cx.input(s).and_then(|f| f.value.clone())).collect();
    let id = cx.id();
    // A value that cannot be computed (say, an index out of range) is the Run's error to report.
    if let Ok(values) = eval::node(def, cx.graph(), id, &inputs, settings, Par::serial()) {
        for (fact, value) in outputs.iter_mut().zip(values) {
            if let Some(value) = value {
                *fact = Fact::with_value(value);
            }
        }
    }
    Ok(outputs)
}

/// Joins inferred facts with what the graph states about the node's outputs.
fn record(graph: &Graph, id: NodeId, outputs: Vec<Fact>, facts: &mut Facts) {
    for (value, mut fact) in graph.nodes[id].outputs.iter().zip(outputs) {
        let Some(value) = *value else { continue };
        let stated = facts[value].as_ref().and_then(|f| f.shape.as_ref());
        fact.shape = match (fact.shape, stated) {
            (Some(inferred), Some(stated)) if inferred.len() == stated.len() => {
                Some(inferred.iter().zip(stated).map(|(a, b)| fact::unify(a, b).unwrap_or_else(|| a.clone())).collect())
            }
            (Some(inferred), _) => Some(inferred),
            (None, stated) => stated.cloned(),
        };
        facts[value] = Some(Arc::new(fact));
    }
}

/// Gives a declined node's outputs the types that its schema says, where the graph states none (`explain`; ORT states
/// all of them).
fn record_foreign(graph: &Graph, id: NodeId, facts: &mut [Option<Arc<Fact>>]) {
    let node = &graph.nodes[id];
    for (slot, value) in node.outputs.iter().enumerate() {
        let Some(value) = value.filter(|&v| facts[v].is_none()) else { continue };
        let input = |slot: usize| {
            let fact = facts[(*node.inputs.get(slot)?)?].as_ref()?;
            Some((fact.dtype, fact.shape.clone()))
        };
        let known = abi::onnx::schema::output_type(node, slot, input);
        facts[value] = known.map(|(dtype, shape)| Arc::new(Fact::of(dtype, shape)));
    }
}

/// Cuts the claimed nodes into convex groups: no path between two nodes of a group leaves it.
///
/// Every value gets a level, which grows by one where a path passes from claimed to unclaimed nodes or back.
/// Nodes of one level form a group: a path between two of them that left the group would have raised the level.
pub fn partition(graph: &Graph, claimed: &[bool]) -> Vec<Vec<NodeId>> {
    let mut producer: Vec<Option<NodeId>> = vec![None; graph.values.len()];
    let mut level = vec![0usize; graph.nodes.len()];
    let mut groups: Vec<Vec<NodeId>> = Vec::new();
    for (id, node) in graph.nodes.iter().enumerate() {
        // Even levels are claimed, odd ones are not.
        let parity = usize::from(!claimed[id]);
        let mut own = parity;
        for value in node.inputs.iter().flatten().chain(&node.implicit_inputs) {
            if let Some(from) = producer[*value] {
                own = own.max(level[from] + usize::from(level[from] % 2 != parity));
            }
        }
        level[id] = own;
        node.outputs.iter().flatten().for_each(|&value: &ValueId| producer[value] = Some(id));
        if claimed[id] {
            if groups.len() <= own / 2 {
                groups.resize_with(own / 2 + 1, Vec::new);
            }
            groups[own / 2].push(id);
        }
    }
    groups.retain(|g| !g.is_empty());
    groups
}

/// A group that only renames shapes between foreign nodes costs more than it gives.
fn is_worth(graph: &Graph, group: &[NodeId]) -> bool {
    group.len() == graph.nodes.len()
        || group.iter().any(|&id| op::find(&graph.nodes[id]).is_ok_and(|def| !def.view && !def.shape_only))
}

#[cfg(test)]
mod tests {
    use super::*;
    use abi::{Node, Value};
    use proptest::prelude::*;

    /// A graph whose node `i` makes value `i` from the values of earlier nodes.
    fn graph(edges: &[Vec<usize>]) -> Graph {
        let mut graph = Graph::default();
        for (id, inputs) in edges.iter().enumerate() {
            graph.values.push(Value { name: format!("v{id}"), dtype: None, shape: None, initializer: None });
            graph.nodes.push(Node {
                name: format!("n{id}"),
                domain: String::new(),
                op_type: "Op".into(),
                since_version: 1,
                inputs: inputs.iter().map(|&v| Some(v)).collect(),
                outputs: vec![Some(id)],
                attrs: Vec::new(),
                implicit_inputs: Vec::new(),
                handle: 0,
            });
        }
        graph
    }

    fn dag() -> impl Strategy<Value = (Vec<Vec<usize>>, Vec<bool>)> {
        (1usize..24).prop_flat_map(|n| {
            let edges: Vec<_> = (0..n).map(|i| prop::collection::vec(0..i.max(1), 0..=i.min(3))).collect();
            (edges, prop::collection::vec(any::<bool>(), n))
        })
    }

    /// Whether a path leads from `from` to `to`.
    fn reaches(edges: &[Vec<usize>], from: usize, to: usize) -> bool {
        let mut seen = vec![false; edges.len()];
        seen[from] = true;
        (from + 1..=to).for_each(|i| seen[i] = edges[i].iter().any(|&p| seen[p]));
        seen[to]
    }

    #[test]
    fn an_unknown_op_in_the_middle_leaves_two_groups() {
        let g = graph(&[vec![], vec![0], vec![1], vec![2], vec![0]]);
        assert_eq!(partition(&g, &[true, true, false, true, true]), vec![vec![0, 1, 4], vec![3]]);
    }

    proptest! {
        #[test]
        fn groups_hold_every_claimed_node_once_and_are_convex((edges, claimed) in dag()) {
            let groups = partition(&graph(&edges), &claimed);
            let mut of = vec![None; edges.len()];
            for (number, group) in groups.iter().enumerate() {
                for &id in group {
                    prop_assert!(claimed[id] && of[id].replace(number).is_none());
                }
            }
            for id in 0..edges.len() {
                prop_assert_eq!(of[id].is_some(), claimed[id]);
            }
            for a in 0..edges.len() {
                for b in a + 1..edges.len() {
                    let same = of[a].is_some() && of[a] == of[b];
                    let outside = (a + 1..b).find(|&m| of[m] != of[a] && reaches(&edges, a, m) && reaches(&edges, m, b));
                    prop_assert!(!same || outside.is_none(), "{a} and {b} are one group, but {outside:?} lies between");
                }
            }
        }
    }
}
