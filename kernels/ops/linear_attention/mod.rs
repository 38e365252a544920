//! com.microsoft LinearAttention 1 and ai.onnx LinearAttention 27:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.LinearAttention>.
//!
//! B batch, T new tokens, Hq query, Hk key and Hv state heads, D key size, E value size. query [B, T, Hq D],
//! key [B, T, Hk D], value [B, T, Hv E], states [B, Hv, D, E], decay [B, T, Hv] or [B, T, Hv D],
//! beta [B, T, Hv] or [B, T, 1]; output [B, T, max(Hq, Hv) E].

mod cpu;
pub mod cuda;
pub mod recurrence;
pub mod state;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::fact::Fact;
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use crate::shapes::{agree, agree_all, ranked};
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("com.microsoft", "LinearAttention", (1, 1), claim, infer, build)
        .with_in_place(&[(3, 1)])
        .with_cuda(cuda::build),
    OpDef::new("", "LinearAttention", (27, 27), claim, infer, build).with_in_place(&[(3, 1)]).with_cuda(cuda::build),
];

const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// Which terms the recurrence has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// The state decays before the update.
    pub decay: bool,
    /// The update is what the state does not hold yet, times beta.
    pub delta: bool,
}

impl Rule {
    /// The values of attribute 'update_rule'.
    pub const NAMES: &'static [&'static str] = &["linear", "gated", "delta", "gated_delta"];

    /// The node's rule.
    pub fn of(cx: &NodeCx) -> Self {
        let name = cx.string("update_rule", "gated_delta");
        Self { decay: name.starts_with("gated"), delta: name.ends_with("delta") }
    }
}

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(3)?;
    for (slot, name) in [(0, "query"), (1, "key"), (2, "value"), (3, "past_state"), (4, "decay"), (5, "beta")] {
        cx.check_dtype(slot, name, FLOATS)?;
    }
    let dtype = cx.required(0)?.dtype;
    for (slot, name) in [(1, "key"), (2, "value"), (4, "decay"), (5, "beta")] {
        cx.check_dtype(slot, name, &[dtype])?;
    }
    cx.check_string("update_rule", "gated_delta", Rule::NAMES)?;
    cx.check_int("state_window", 0, &[0])?;
    let rule = Rule::of(cx);
    for (slot, name, needed) in [(4, "decay", rule.decay), (5, "beta", rule.delta)] {
        if needed && !cx.has_input(slot) {
            let rule = cx.string("update_rule", "gated_delta");
            return Err(cx.decline(
                format_args!("input {slot} ({name})"),
                "nothing",
                format_args!("a tensor for update_rule '{rule}'"),
            ));
        }
    }
    head_counts(cx)?;
    if let Some(dtype) = cx.stated_output_dtype(1) {
        let expected = cx.input(3).map_or(FLOATS, |past| std::slice::from_ref(&past.dtype));
        if !expected.contains(&dtype) {
            let expected: Vec<_> = expected.iter().map(DType::to_string).collect();
            return Err(cx.decline("output 1 (present_state)", dtype, expected.join(" or ")));
        }
    }
    Ok(())
}

/// (Hq, Hv), of which one divides the other.
fn head_counts(cx: &NodeCx) -> Result<(usize, usize)> {
    let count = |name: &str| {
        let got = cx.int(name, 0);
        usize::try_from(got)
            .ok()
            .filter(|&n| n > 0)
            .ok_or_else(|| cx.error(format_args!("attribute '{name}'"), got, "a positive number of heads"))
    };
    let (q, v) = (count("q_num_heads")?, count("kv_num_heads")?);
    // ai.onnx has no inverse grouped-query attention.
    let inverse = v % q == 0 && !cx.node().domain.is_empty();
    if q % v != 0 && !inverse {
        return Err(cx.error("attribute 'q_num_heads'", q, format_args!("a multiple of kv_num_heads = {v}")));
    }
    Ok((q, v))
}

/// `dim / n`; errors when it is known and not a positive multiple.
fn split(cx: &NodeCx, slot: usize, name: &str, dim: &Dim, n: usize) -> Result<Dim> {
    match dim {
        Dim::Known(d) if *d > 0 && d % n == 0 => Ok(Dim::Known(d / n)),
        Dim::Known(d) => Err(cx.error(
            format_args!("input {slot} ({name}), last dim"),
            d,
            format_args!("a positive multiple of {n}"),
        )),
        _ => Ok(crate::fact::div(dim, n)),
    }
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (q_heads, v_heads) = head_counts(cx)?;
    let query = ranked(cx, 0, "query", 3)?;
    let key = ranked(cx, 1, "key", 3)?;
    let value = ranked(cx, 2, "value", 3)?;
    let (mut batch, mut tokens) = (query[0].clone(), query[1].clone());
    for (slot, name, dims) in [(1, "key", &key), (2, "value", &value)] {
        batch = agree(cx, slot, name, 0, &dims[0], &batch)?;
        tokens = agree(cx, slot, name, 1, &dims[1], &tokens)?;
    }
    let mut dk = split(cx, 0, "query", &query[2], q_heads)?;
    let mut dv = split(cx, 2, "value", &value[2], v_heads)?;
    if let Some(dk) = dk.known() {
        let heads = split(cx, 1, "key", &key[2], dk)?;
        if let Some(heads) = heads.known()
            && v_heads % heads != 0
        {
            return Err(cx.error("input 1 (key), heads", heads, format_args!("a divisor of kv_num_heads = {v_heads}")));
        }
    }
    if cx.has_input(3) {
        let past = agree_all(cx, 3, "past_state", &[batch, Dim::Known(v_heads), dk, dv])?;
        [batch, _, dk, dv] = <[Dim; 4]>::try_from(past).expect("agree_all keeps the rank");
    }
    let per_key = crate::fact::mul(&Dim::Known(v_heads), &dk);
    for (slot, name, other) in [(4, "decay", per_key), (5, "beta", Dim::Known(1))] {
        if !cx.has_input(slot) {
            continue;
        }
        let dims = ranked(cx, slot, name, 3)?;
        batch = agree(cx, slot, name, 0, &dims[0], &batch)?;
        tokens = agree(cx, slot, name, 1, &dims[1], &tokens)?;
        if dims[2] != Dim::Known(v_heads) {
            agree(cx, slot, name, 2, &dims[2], &other)?;
        }
    }
    let query = cx.required(0)?;
    let state = cx.input(3).map(|past| past.dtype);
    let state = state.or(cx.stated_output_dtype(1)).unwrap_or(query.dtype);
    let out = crate::fact::mul(&Dim::Known(q_heads.max(v_heads)), &dv);
    Ok(vec![
        Fact::new(query.dtype, vec![batch.clone(), tokens, out]),
        Fact::new(state, vec![batch, Dim::Known(v_heads), dk, dv]),
    ])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let (q_heads, v_heads) = head_counts(cx)?;
    Ok(Box::new(cpu::LinearAttention {
        tier: cx.settings().tier,
        rule: Rule::of(cx),
        q_heads,
        v_heads,
        scale: cx.float("scale", 0.0),
    }))
}
