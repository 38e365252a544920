//! The attention of a decode step: GroupQueryAttention of one new token with what stands before it (splits of a joint
//! projection, a norm of each head, rotary embeddings between casts) and behind it (a sigmoid gate).

mod kernel;
mod view;

use super::cluster::{Pattern, Search};
use crate::ops::rotary_embedding as rotary;
use abi::{DType, NodeId, ValueId};

/// See the module.
pub const PATTERN: Pattern = Pattern { find, build: kernel::build };

const MS: &str = "com.microsoft";

/// Something that the kernel does on the way to an input, with the nodes that say it, the last one first.
struct Unit {
    what: What,
    nodes: Vec<NodeId>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    /// Other shapes, or a piece.
    View,
    Norm,
    Rotary,
    /// The gate's sigmoid.
    Sigmoid,
}

/// What leads to an input, backwards.
type Chain = Vec<Unit>;

fn find(search: &Search<'_>, id: NodeId) -> Option<Vec<NodeId>> {
    if !search.is(id, MS, "GroupQueryAttention") {
        return None;
    }
    let heads = 0..if search.input(id, 1).is_some() { 3 } else { 1 };
    let mut chains: Vec<Chain> = heads.map(|slot| before(search, id, slot)).collect();
    let gate = gated(search, id);
    chains.push(gate.as_ref().map_or_else(Chain::new, |(_, chain)| gate_chain(search, chain)));
    let mut last = vec![id];
    last.extend(gate.map(|(mul, _)| mul));
    shorten(search, &mut chains, &mut last);
    let mut nodes = last;
    for node in chains.iter().flatten().flat_map(|unit| &unit.nodes) {
        if !nodes.contains(node) {
            nodes.push(*node);
        }
    }
    Some(nodes)
}

/// What leads to input `slot`: query, key or value.
fn before(search: &Search<'_>, id: NodeId, slot: usize) -> Chain {
    let node = search.node(id);
    let own = (node.has_input(14), node.int("do_rotary", 0) != 0);
    let mut chain = Chain::new();
    let Some(mut value) = search.input(id, slot) else { return chain };
    let packed = search.input(id, 1).is_none();
    let dtype = search.facts[value].as_ref().map(|fact| fact.dtype);
    value = views(search, value, false, &mut chain);
    if slot < 2 && !packed {
        if !own.0
            && !own.1
            && let Some(unit) = rotary_unit(search, value, dtype)
        {
            value = first_input(search, &unit);
            chain.push(unit);
            value = views(search, value, false, &mut chain);
        }
        if !own.0
            && let Some(norm) = search.producer(value).filter(|&n| is_norm(search, n))
        {
            let unit = Unit { what: What::Norm, nodes: vec![norm] };
            value = first_input(search, &unit);
            chain.push(unit);
        }
    }
    views(search, value, true, &mut chain);
    chain
}

fn first_input(search: &Search<'_>, unit: &Unit) -> ValueId {
    search.graph.nodes[unit.nodes[unit.nodes.len() - 1]].inputs[0].expect("input 0 of such nodes is required")
}

/// Walks back over what only names bytes; with `pieces`, over splits too.
fn views(search: &Search<'_>, mut value: ValueId, pieces: bool, chain: &mut Chain) -> ValueId {
    while let Some(id) = search.producer(value) {
        let Some(from) = search.input(id, 0).filter(|_| search.is_view(id) || (pieces && search.is(id, "", "Split")))
        else {
            break;
        };
        chain.push(Unit { what: What::View, nodes: vec![id] });
        value = from;
    }
    value
}

/// A rotary embedding that ends at `value`, perhaps between casts from and back to `dtype`.
fn rotary_unit(search: &Search<'_>, value: ValueId, dtype: Option<DType>) -> Option<Unit> {
    let mut seen = Chain::new();
    let mut at = value;
    let cast = search.producer(value).filter(|&id| search.is(id, "", "Cast"));
    if let Some(id) = cast {
        seen.push(Unit { what: What::Rotary, nodes: vec![id] });
        at = views(search, search.input(id, 0)?, false, &mut seen);
    }
    let id = search.producer(at).filter(|&id| is_rotary(search, id))?;
    seen.push(Unit { what: What::Rotary, nodes: vec![id] });
    if cast.is_some() {
        at = views(search, search.input(id, 0)?, false, &mut seen);
        let back = search.producer(at).filter(|&id| search.is(id, "", "Cast"))?;
        let from = search.facts[search.input(back, 0)?].as_ref()?.dtype;
        let wide = search.facts[at].as_ref()?.dtype;
        if Some(from) != dtype || wide != DType::F32 {
            return None;
        }
        seen.push(Unit { what: What::Rotary, nodes: vec![back] });
    }
    Some(Unit { what: What::Rotary, nodes: seen.into_iter().flat_map(|unit| unit.nodes).collect() })
}

fn is_rotary(search: &Search<'_>, id: NodeId) -> bool {
    let node = &search.graph.nodes[id];
    matches!(
        (node.domain.as_str(), node.op_type.as_str()),
        (MS, "RotaryEmbedding" | "MRotaryEmbedding") | ("", "RotaryEmbedding")
    ) && rotary::Attrs::parse(&search.node(id)).is_ok()
}

/// Whether `id` normalises rows by their root mean square, over the last axis.
fn is_norm(search: &Search<'_>, id: NodeId) -> bool {
    let node = search.node(id);
    let last = |axis: i64| axis == -1 || node.input(0).and_then(|x| x.rank()).is_some_and(|r| axis == r as i64 - 1);
    let known = search.is(id, "", "SimplifiedLayerNormalization") || search.is(id, "", "RMSNormalization");
    known && last(node.int("axis", -1)) && !node.has_output(1)
}

/// The product of the output and a sigmoid, and the sigmoid's value.
fn gated(search: &Search<'_>, id: NodeId) -> Option<(NodeId, ValueId)> {
    let out = search.output(id, 0)?;
    let &[mul] = search.readers(out) else { return None };
    let (a, b) = (search.input(mul, 0)?, search.input(mul, 1)?);
    let other = if a == out { b } else { a };
    let fits = search.is(mul, "", "Mul") && a != b && search.output(mul, 0).is_some();
    (fits && !search.leaves(out)).then_some((mul, other))
}

/// The sigmoid that makes `value`, and what leads to it; empty when there is none.
fn gate_chain(search: &Search<'_>, value: &ValueId) -> Chain {
    let mut chain = Chain::new();
    let value = views(search, *value, false, &mut chain);
    let Some(sigmoid) = search.producer(value).filter(|&n| search.is(n, "", "Sigmoid")) else { return Chain::new() };
    let unit = Unit { what: What::Sigmoid, nodes: vec![sigmoid] };
    let from = first_input(search, &unit);
    chain.push(unit);
    views(search, from, true, &mut chain);
    chain
}

/// Cuts the chains where somebody else reads what the kernel would not write, and where query and key differ. `last` are
/// the attention and the product with the gate, whose chain is the last.
fn shorten(search: &Search<'_>, chains: &mut [Chain], last: &mut Vec<NodeId>) {
    loop {
        let gate = chains.len() - 1;
        let complete = chains[gate].iter().any(|unit| unit.what == What::Sigmoid);
        if !complete {
            last.truncate(1);
            chains[gate].clear();
        }
        let members: Vec<_> =
            last.iter().chain(chains.iter().flatten().flat_map(|unit| &unit.nodes)).copied().collect();
        let outside = |unit: &Unit| unit.nodes.iter().any(|&id| !search.is_inner(id, None, &members));
        let mut cut = false;
        for chain in chains.iter_mut() {
            if let Some(at) = chain.iter().position(outside) {
                chain.truncate(at);
                cut = true;
            }
        }
        if chains.len() > 2 && !alike(search, &chains[0], &chains[1]) {
            for chain in &mut chains[..2] {
                if let Some(at) = chain.iter().position(|unit| unit.what == What::Rotary) {
                    chain.truncate(at);
                    cut = true;
                }
            }
        }
        if !cut {
            return;
        }
    }
}

/// Whether query and key are rotated alike, or neither is.
fn alike(search: &Search<'_>, query: &Chain, key: &Chain) -> bool {
    let rotary = |chain: &Chain| {
        let unit = chain.iter().find(|unit| unit.what == What::Rotary)?;
        Some((*unit.nodes.iter().find(|&&id| is_rotary(search, id))?, unit.nodes.len() > 1))
    };
    match (rotary(query), rotary(key)) {
        (None, None) => true,
        (Some((a, a_cast)), Some((b, b_cast))) => {
            let inputs = |id: NodeId| &search.graph.nodes[id].inputs[1..];
            let attrs = |id: NodeId| rotary::Attrs::parse(&search.node(id)).ok();
            let same = |(a, b): (rotary::Attrs, rotary::Attrs)| a.rotates_like(&b);
            a_cast == b_cast && inputs(a) == inputs(b) && attrs(a).zip(attrs(b)).is_some_and(same)
        }
        _ => false,
    }
}
