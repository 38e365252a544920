//! com.microsoft GatedDeltaNet 1:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GatedDeltaNet>.
//!
//! LinearAttention's recurrence with its gates and norms fused. Tokens are one axis `[N]`, perhaps of ragged
//! sequences, or two [B, S]. Hq query and key heads, Hv value heads, D key size, E value size: query and key
//! [tokens, Hq, D], value [tokens, Hv, E] (or all three packed in query), decay [tokens, Hv] or
//! [tokens, Hv, D], beta [tokens, Hv]; states [B, Hv, E, D] in f32; output [tokens, Hv, E].

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::linear_attention::Rule;
use crate::build::BuildCx;
use crate::fact::Fact;
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use crate::shapes::{agree, agree_all, ranked, show};
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[OpDef::new("com.microsoft", "GatedDeltaNet", (1, 1), claim, infer, build)
    .with_in_place(&[(6, 1)])
    .with_cuda(cuda::build)];

const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// How the log decay comes from input 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gate {
    /// It is input 4.
    Given,
    /// -exp(a_log) softplus(decay + dt_bias)
    Softplus,
    /// gate_lower_bound sigmoid(exp(a_log) (decay + dt_bias))
    Sigmoid,
}

impl Gate {
    fn of(cx: &NodeCx) -> Self {
        match cx.string("gate_activation", "none") {
            "softplus" | "qwen" => Self::Softplus,
            "sigmoid" | "kda" => Self::Sigmoid,
            _ => Self::Given,
        }
    }
}

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    check_types(cx)?;
    cx.check_string("update_rule", "gated_delta", Rule::NAMES)?;
    cx.check_string("gate_activation", "none", &["none", "softplus", "qwen", "sigmoid", "kda"])?;
    cx.check_string("beta_activation", "none", &["none", "sigmoid"])?;
    cx.check_int("qk_l2_norm", 0, &[0, 1])?;
    cx.check_int("state_update_capacity", 0, &[0])?;
    cx.check_absent(9, "capture_count", "state updates are not captured")?;
    if cx.has_output(2) {
        return Err(cx.decline("output 2 (state_update)", "a reader", "none: state updates are not captured"));
    }
    let bound = cx.float("gate_lower_bound", -5.0);
    if !(bound.is_finite() && bound < 0.0) {
        return Err(cx.decline("attribute 'gate_lower_bound'", bound, "a negative number"));
    }
    check_presence(cx)
}

fn check_types(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_dtype(0, "query", FLOATS)?;
    let dtype = cx.required(0)?.dtype;
    cx.check_dtype(1, "key", &[dtype])?;
    cx.check_dtype(2, "value", &[dtype])?;
    cx.check_dtype(3, "cu_seqlens", &[DType::I32])?;
    cx.check_dtype(4, "decay", &[DType::F32, dtype])?;
    // Decay and beta are of one type.
    let gates = cx.input(4).map_or([DType::F32, dtype], |decay| [decay.dtype; 2]);
    cx.check_dtype(5, "beta", &gates)?;
    for (slot, name) in [(6, "initial_state"), (7, "a_log"), (8, "dt_bias")] {
        cx.check_dtype(slot, name, &[DType::F32])?;
    }
    Ok(())
}

/// Which optional inputs must be there, and which must not.
fn check_presence(cx: &NodeCx) -> Result<(), Decline> {
    let rule = Rule::of(cx);
    let gate = Gate::of(cx) != Gate::Given;
    let packed = !cx.has_input(1);
    let expected = [
        (2, "value", !packed, "as key is or is not"),
        (4, "decay", rule.decay, "as 'update_rule' asks"),
        (5, "beta", rule.delta, "as 'update_rule' asks"),
        (7, "a_log", gate, "as 'gate_activation' asks"),
        (8, "dt_bias", gate, "as 'gate_activation' asks"),
    ];
    for (slot, name, needed, why) in expected {
        if cx.has_input(slot) != needed {
            let words = |present: bool| if present { "a tensor" } else { "nothing" };
            return Err(cx.decline(
                format_args!("input {slot} ({name})"),
                words(!needed),
                format_args!("{}, {why}", words(needed)),
            ));
        }
    }
    if packed && !cx.has_input(6) {
        return Err(cx.decline("input 6 (initial_state)", "nothing", "a tensor, since query holds packed QKV"));
    }
    Ok(())
}

/// What the shapes say, as far as they are known.
struct Sizes {
    /// `[N]` or [B, S]
    lead: Vec<Dim>,
    batch: Dim,
    q_heads: Dim,
    v_heads: Dim,
    dk: Dim,
    dv: Dim,
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let query = cx.required(0)?;
    let Some(shape) = &query.shape else {
        return Ok(vec![Fact::unranked(query.dtype), Fact::unranked(DType::F32)]);
    };
    let mut sizes = if cx.has_input(1) { separate(cx, shape)? } else { packed(cx, shape)? };
    if let (Dim::Known(q), Dim::Known(v)) = (&sizes.q_heads, &sizes.v_heads)
        && (*q == 0 || *v == 0 || v % q != 0)
    {
        let slot = if cx.has_input(1) { "input 2 (value), heads" } else { "input 6 (initial_state), heads" };
        return Err(cx.error(slot, v, format_args!("a positive multiple of {q} query heads")));
    }
    sizes.batch = batch(cx, &sizes.lead)?;
    if cx.has_input(6) {
        let Sizes { batch, v_heads, dv, dk, .. } = &sizes;
        let expected = [batch.clone(), v_heads.clone(), dv.clone(), dk.clone()];
        let state = agree_all(cx, 6, "initial_state", &expected)?;
        [sizes.batch, sizes.v_heads, sizes.dv, sizes.dk] =
            <[Dim; 4]>::try_from(state).expect("agree_all keeps the rank");
    }
    if let ([Dim::Known(tokens)], Dim::Known(batch), false) = (&sizes.lead[..], &sizes.batch, cx.has_input(3))
        && (*batch == 0 || tokens % batch != 0)
    {
        return Err(cx.error(
            "input 0 (query), tokens",
            tokens,
            format_args!("a multiple of the {batch} sequences of initial_state"),
        ));
    }
    check_gates(cx, &sizes)?;
    let Sizes { mut lead, batch, v_heads, dk, dv, .. } = sizes;
    lead.extend([v_heads.clone(), dv.clone()]);
    Ok(vec![Fact::new(query.dtype, lead), Fact::new(DType::F32, vec![batch, v_heads, dv, dk])])
}

/// Sizes from query [lead, Hq, D], key and value.
fn separate(cx: &NodeCx, query: &[Dim]) -> Result<Sizes> {
    let rank = query.len();
    if rank != 3 && rank != 4 {
        return Err(cx.error("input 0 (query)", show(query), "rank 3 or 4"));
    }
    let key = agree_all(cx, 1, "key", query)?;
    let value = ranked(cx, 2, "value", rank)?;
    let lead = (0..rank - 2).map(|axis| agree(cx, 2, "value", axis, &value[axis], &key[axis]));
    Ok(Sizes {
        lead: lead.collect::<Result<_>>()?,
        batch: Dim::Unknown,
        q_heads: key[rank - 2].clone(),
        v_heads: value[rank - 2].clone(),
        dk: key[rank - 1].clone(),
        dv: value[rank - 1].clone(),
    })
}

/// Sizes from query [lead, 2 Hq D + Hv E] and the state.
fn packed(cx: &NodeCx, query: &[Dim]) -> Result<Sizes> {
    let rank = query.len();
    if rank != 2 && rank != 3 {
        return Err(cx.error("input 0 (query)", show(query), "rank 2 or 3, since it holds packed QKV"));
    }
    let state = ranked(cx, 6, "initial_state", 4)?;
    let mut q_heads = Dim::Unknown;
    if let (Dim::Known(width), [_, Dim::Known(v_heads), Dim::Known(dv), Dim::Known(dk)]) =
        (&query[rank - 1], &state[..])
    {
        let values = v_heads.saturating_mul(*dv);
        let heads = width.checked_sub(values).filter(|rest| *dk > 0 && rest % (2 * dk) == 0);
        q_heads = heads.map(|rest| Dim::Known(rest / (2 * dk))).ok_or_else(|| {
            cx.error("input 0 (query), last dim", width, format_args!("{v_heads} x {dv} and a multiple of 2 x {dk}"))
        })?;
    }
    Ok(Sizes {
        lead: query[..rank - 1].to_vec(),
        batch: state[0].clone(),
        q_heads,
        v_heads: state[1].clone(),
        dv: state[2].clone(),
        dk: state[3].clone(),
    })
}

/// Number of sequences: of cu_seqlens, of the [B, S] axes, or of the state.
fn batch(cx: &NodeCx, lead: &[Dim]) -> Result<Dim> {
    if cx.has_input(3) {
        if lead.len() != 1 {
            return Err(cx.error("input 3 (cu_seqlens)", "a tensor", "nothing, since tokens have two axes"));
        }
        return match &ranked(cx, 3, "cu_seqlens", 1)?[0] {
            Dim::Known(0) => Err(cx.error("input 3 (cu_seqlens)", "no element", "at least one")),
            Dim::Known(n) => Ok(Dim::Known(n - 1)),
            _ => Ok(Dim::Unknown),
        };
    }
    if lead.len() == 2 {
        return Ok(lead[0].clone());
    }
    if !cx.has_input(6) {
        return Err(cx.error(
            "input 6 (initial_state)",
            "nothing",
            "a tensor, since neither cu_seqlens nor a batch axis says how many sequences there are",
        ));
    }
    Ok(ranked(cx, 6, "initial_state", 4)?[0].clone())
}

/// Shapes of decay, beta, a_log and dt_bias.
fn check_gates(cx: &NodeCx, sizes: &Sizes) -> Result<()> {
    let per_head: Vec<Dim> = sizes.lead.iter().chain([&sizes.v_heads]).cloned().collect();
    let mut per_key = false;
    if let Some(rank) = cx.input(4).and_then(Fact::rank) {
        per_key = rank == per_head.len() + 1;
        let mut expected = per_head.clone();
        if per_key {
            expected.push(sizes.dk.clone());
        }
        agree_all(cx, 4, "decay", &expected)?;
    }
    if cx.has_input(5) {
        agree_all(cx, 5, "beta", &per_head)?;
    }
    if cx.has_input(7) {
        agree_all(cx, 7, "a_log", std::slice::from_ref(&sizes.v_heads))?;
    }
    let Some(bias) = cx.input(8).and_then(Fact::known_shape) else {
        return Ok(());
    };
    let (Dim::Known(heads), Dim::Known(dk)) = (&sizes.v_heads, &sizes.dk) else {
        return Ok(());
    };
    let fits = bias == [*heads] || (per_key && (bias == [*heads, *dk] || bias == [heads * dk]));
    if fits {
        return Ok(());
    }
    Err(cx.error(
        "input 8 (dt_bias)",
        format_args!("{bias:?}"),
        if per_key { format!("[{heads}] or [{heads}, {dk}]") } else { format!("[{heads}]") },
    ))
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(cpu::GatedDeltaNet {
        tier: cx.settings().tier,
        rule: Rule::of(cx),
        gate: Gate::of(cx),
        lower_bound: cx.float("gate_lower_bound", -5.0),
        sigmoid_beta: cx.string("beta_activation", "none") == "sigmoid",
        l2_norm: cx.int("qk_l2_norm", 0) == 1,
        scale: cx.float("scale", 0.0),
        packed: !cx.has_input(1),
    }))
}
