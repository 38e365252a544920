//! `x * Sigmoid(x)`, and `x * Sigmoid(x) * y`, become one pass over memory.

use super::{DOMAIN, Links, remove};
use abi::{Graph, NodeId, ValueId};

/// Rewrites every occurrence. Shapes must be equal: the pattern with broadcasting stays as it is.
pub fn rewrite(graph: &mut Graph) {
    let links = Links::of(graph);
    let mut gone = vec![false; graph.nodes.len()];
    for id in 0..graph.nodes.len() {
        let Some(sigmoid) = silu(graph, &links, id) else { continue };
        let x = graph.nodes[sigmoid].inputs[0];
        gone[sigmoid] = true;
        let (mut last, mut inputs) = (id, vec![x]);
        if let Some((mul, y)) = gate(graph, &links, id) {
            gone[id] = true;
            last = mul;
            inputs.push(Some(y));
        }
        let node = &mut graph.nodes[last];
        (node.domain, node.op_type, node.since_version, node.inputs) = (DOMAIN.into(), "SiluMul".into(), 1, inputs);
    }
    remove(graph, &gone);
}

/// The Sigmoid behind `mul` when that is `x * Sigmoid(x)`.
fn silu(graph: &Graph, links: &Links, mul: NodeId) -> Option<NodeId> {
    let (a, b) = operands(graph, mul)?;
    let half = |x: ValueId, s: ValueId| {
        let sigmoid = links.sole(graph, s, "Sigmoid")?;
        (graph.nodes[sigmoid].inputs[0] == Some(x) && is_float(graph, x)).then_some(sigmoid)
    };
    half(a, b).or_else(|| half(b, a))
}

/// The only reader of `silu` when it multiplies it with a tensor of the same shape, and that tensor.
fn gate(graph: &Graph, links: &Links, silu: NodeId) -> Option<(NodeId, ValueId)> {
    let value = graph.nodes[silu].outputs[0]?;
    if links.readers[value] != 1 || graph.outputs.contains(&value) {
        return None;
    }
    let mul = (silu + 1..graph.nodes.len()).find(|&n| graph.nodes[n].inputs.contains(&Some(value)))?;
    let (a, b) = operands(graph, mul)?;
    let y = if a == value { b } else { a };
    let shape = |v: ValueId| graph.values[v].shape.as_ref();
    let same = shape(y).is_some() && shape(y) == shape(value) && !shape(y)?.contains(&abi::Dim::Unknown);
    same.then_some((mul, y))
}

/// The operands of a Mul of the default domain.
fn operands(graph: &Graph, id: NodeId) -> Option<(ValueId, ValueId)> {
    let node = &graph.nodes[id];
    match node.inputs[..] {
        [Some(a), Some(b)] if node.domain.is_empty() && node.op_type == "Mul" => Some((a, b)),
        _ => None,
    }
}

fn is_float(graph: &Graph, value: ValueId) -> bool {
    graph.values[value].dtype.is_some_and(abi::DType::is_compute_float)
}
