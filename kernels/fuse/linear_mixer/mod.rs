//! A linear-attention layer's part between its projections, for one token a sequence: one launch.
//!
//! The delta rule with as much of the rest as is there: the causal convolution of queries, keys and values, the norms of
//! queries and keys, the gates, the gated norm of the output. Longer sequences run node by node.
//!
//! B sequences, Hk key and query heads, Hv value heads, D key size, E value size.

mod launch;
mod trace;

use super::cluster::{Built, ClusterKernel, Member, Occurrence, Pattern, Search};
use crate::cuda::{LaunchCx, suffix};
use crate::op::NodeCx;
use crate::ops::linear_attention::Rule;
use abi::cuda::Function;
use abi::{DType, NodeId, Result, ValueId};
use trace::{Links, Mixer};

/// See the module.
pub const PATTERN: Pattern = Pattern { find, build };

fn find(search: &Search<'_>, id: NodeId) -> Option<Vec<NodeId>> {
    if !trace::is_core(search.graph, id) {
        return None;
    }
    // Nodes whose results others read stay outside, and with them what leads to them.
    let mut outside = Vec::new();
    loop {
        let mixer = {
            let inside = |id: &NodeId| !outside.contains(id);
            let producer = |value: ValueId| search.producer(value).filter(inside);
            let reader = |value: ValueId| match search.readers(value) {
                &[reader] if !search.leaves(value) => Some(reader).filter(inside),
                _ => None,
            };
            trace::trace(&Links { graph: search.graph, facts: search.facts, producer: &producer, reader: &reader }, id)?
        };
        let leaving = |id: NodeId| (id == mixer.core || Some(id) == mixer.conv()).then_some(1);
        let inner = |id: NodeId| id == mixer.last() || search.is_inner(id, leaving(id), &mixer.nodes);
        if let Some(&leak) = mixer.nodes.iter().find(|&&id| !inner(id)) {
            if leak == id {
                return None;
            }
            outside.push(leak);
            continue;
        }
        let works = mixer.nodes.iter().any(|&n| n != id && !search.is_view(n));
        return (works && kernel_name(&search.node(id)).is_some()).then_some(mixer.nodes);
    }
}

/// The states' layout and the kernels for it; `None` where there is none.
fn kernel_name(core: &NodeCx<'_>) -> Option<String> {
    let dtype = core.input(0)?.dtype;
    let delta_net = core.node().op_type == "GatedDeltaNet";
    let past = core.input(if delta_net { 6 } else { 3 });
    let state = match past {
        Some(past) => past.dtype,
        None if delta_net => DType::F32,
        None => core.stated_output_dtype(1).unwrap_or(dtype),
    };
    let fits = matches!(dtype, DType::F32 | DType::F16 | DType::BF16) && (state == dtype || state == DType::F32);
    let major = if delta_net { "v_major" } else { "k_major" };
    (fits && !(delta_net && core.has_input(3))).then(|| format!("{major}_{}_{}", suffix(dtype), suffix(state)))
}

/// What the core's attributes say.
struct Core {
    delta_net: bool,
    packed: bool,
    rule: Rule,
    /// LinearAttention's.
    q_heads: usize,
    v_heads: usize,
    /// 0: 1 / sqrt(D).
    scale: f32,
    l2_norm: bool,
    /// As in `mixer.cu`.
    gate: u32,
    lower_bound: f32,
    sigmoid_beta: bool,
}

impl Core {
    fn of(core: &NodeCx<'_>) -> Self {
        let heads = |name: &str| usize::try_from(core.int(name, 0)).unwrap_or(0);
        let delta_net = core.node().op_type == "GatedDeltaNet";
        Self {
            delta_net,
            packed: delta_net && !core.has_input(1),
            rule: Rule::of(core),
            q_heads: heads("q_num_heads"),
            v_heads: heads("kv_num_heads"),
            scale: core.float("scale", 0.0),
            l2_norm: core.int("qk_l2_norm", 0) == 1,
            gate: match core.string("gate_activation", "none") {
                "softplus" | "qwen" => 2,
                "sigmoid" | "kda" => 3,
                _ => 0,
            },
            lower_bound: core.float("gate_lower_bound", -5.0),
            sigmoid_beta: core.string("beta_activation", "none") == "sigmoid",
        }
    }
}

/// The output's norm.
struct Norm {
    epsilon: f32,
    /// As in `mixer.cu`: 1 SiLU, 2 sigmoid.
    activation: u32,
}

/// The kernel of one occurrence.
struct Fused {
    function: Function,
    /// For keys of more than [`launch::SHORT`], where that is another one.
    long: Option<Function>,
    /// For 16-bit states of 128 x 128.
    square: Option<Function>,
    /// The same on a device that has clusters, for few sequences.
    quarter: Option<Function>,
    dtype: DType,
    /// Of an element of the recurrent state.
    state_bytes: usize,
    core: Core,
    /// Whether the convolution's state is [B, L, C], and it ends in SiLU.
    conv_last: bool,
    conv_silu: bool,
    norm: Norm,
    /// The permutation of each of the mixer's transposes.
    perms: Vec<Option<Vec<i64>>>,
    /// The axis of the mixer's Split.
    split_axis: i64,
    mixer: Mixer,
    nodes: Vec<NodeId>,
}

fn build(found: &Occurrence<'_>) -> Result<Built> {
    let (graph, nodes) = (found.graph, found.nodes);
    let reads = |id: NodeId, value: ValueId| graph.nodes[id].inputs.contains(&Some(value));
    let makes = |id: NodeId, value: ValueId| graph.nodes[id].outputs.contains(&Some(value));
    let producer = |value: ValueId| nodes.iter().copied().find(|&id| makes(id, value));
    let reader = |value: ValueId| nodes.iter().copied().find(|&id| reads(id, value));
    let links = Links { graph, facts: found.facts, producer: &producer, reader: &reader };
    let Some(mixer) = trace::trace(&links, nodes[0]) else { return Ok(None) };
    let node = |id: NodeId| NodeCx::new(graph, id, found.facts);
    let core = node(mixer.core);
    let (Some(name), Some(query)) = (kernel_name(&core), core.input(0)) else { return Ok(None) };
    let function = |name: &str| found.device.function("fuse_linear_mixer_mixer", name);
    let core = Core::of(&core);
    let split = mixer.joint.as_ref().and_then(|joint| joint.split);
    let conv = mixer.conv().map(node);
    let norm = mixer.norm.map(node);
    let half = match name.as_str() {
        "k_major_f16_f16" => Some("f16"),
        "k_major_bf16_bf16" => Some("bf16"),
        _ => None,
    };
    let sized = |file: &str| {
        let of = |t| found.device.function(&format!("fuse_linear_mixer_{file}"), &format!("k_major_{file}_{t}"));
        half.map(of).transpose()
    };
    Ok(Some(Box::new(Fused {
        function: function(&name)?,
        long: core.delta_net.then(|| function(&name.replace("v_major", "v_major_long"))).transpose()?,
        square: sized("square")?,
        quarter: if found.device.info().has_clusters() { sized("quarter")? } else { None },
        dtype: query.dtype,
        state_bytes: if name.ends_with("f32") { 4 } else { 2 },
        core,
        conv_last: conv.is_some_and(|conv| conv.int("channels_last", 0) == 1),
        conv_silu: conv.is_some_and(|conv| conv.string("activation", "none") != "none"),
        norm: Norm {
            epsilon: norm.map_or(0.0, |norm| norm.float("epsilon", 1e-5)),
            activation: norm.map_or(0, |norm| if norm.string("activation", "silu") == "sigmoid" { 2 } else { 1 }),
        },
        perms: mixer.transposes.iter().map(|&id| node(id).ints("perm").map(<[i64]>::to_vec)).collect(),
        split_axis: split.map_or(0, |id| node(id).int("axis", 0)),
        mixer,
        nodes: nodes.to_vec(),
    })))
}

impl ClusterKernel for Fused {
    fn launch(&self, cx: &mut LaunchCx<'_>, members: &[Member<'_>]) -> Result<bool> {
        match self.prepared(cx.device(), members) {
            Some((function, shape, mut params)) => {
                params.early = u32::from(cx.settled(params.past) && cx.settled(params.conv_past));
                cx.push(function, shape, &params).map(|()| true)
            }
            None => Ok(false),
        }
    }
}
