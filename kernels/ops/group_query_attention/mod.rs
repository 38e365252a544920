//! `com.microsoft::GroupQueryAttention`: attention with grouped key heads over a KV cache that it updates.
//! Spec: <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention>;
//! what the text leaves open was measured on ORT 1.32's CPU kernel.
//!
//! Dims: B batch, N query heads, K key heads, S new query tokens, L new key tokens (S, or 0 when the cache belongs to another node),
//! P capacity of the past, C capacity of the present, T cached tokens after the step (by batch entry), H head size.

mod cpu;
mod cuda;
mod shape;
#[cfg(test)]
mod tests;
mod window;

pub(crate) use cpu::Dims;

use crate::build::BuildCx;
use crate::cpu::rotary::Pairs;
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use abi::{DType, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[OpDef::new("com.microsoft", "GroupQueryAttention", (1, 1), claim, shape::infer, build)
    .with_host_inputs(&[slot::TOTAL])
    .with_steady(shape::steady)
    .with_in_place(&[(slot::PAST_KEY, slot::PRESENT_KEY), (slot::PAST_VALUE, slot::PRESENT_VALUE)])
    .with_cuda_claim(cuda::claim, cuda::build)];

/// Input and output slots.
pub(crate) mod slot {
    pub const QUERY: usize = 0;
    pub const KEY: usize = 1;
    pub const VALUE: usize = 2;
    pub const PAST_KEY: usize = 3;
    pub const PAST_VALUE: usize = 4;
    pub const SEQLENS: usize = 5;
    pub const TOTAL: usize = 6;
    pub const COS: usize = 7;
    pub const SIN: usize = 8;
    pub const POSITIONS: usize = 9;
    pub const BIAS: usize = 10;
    pub const SINK: usize = 11;
    pub const K_SCALE: usize = 12;
    pub const V_SCALE: usize = 13;
    pub const Q_NORM: usize = 14;
    pub const K_NORM: usize = 15;
    pub const QUERY_SEQLENS: usize = 16;

    pub const PRESENT_KEY: usize = 1;
    pub const PRESENT_VALUE: usize = 2;
    pub const QK: usize = 3;
}

/// The attributes.
#[derive(Debug, Clone)]
pub(crate) struct Attrs {
    pub heads: usize,
    pub kv_heads: usize,
    /// 0: one over the root of H.
    pub scale: f32,
    pub softcap: f32,
    pub causal: bool,
    /// Keys that a row sees, its own included; 0: all before it.
    pub window: usize,
    /// The cache holds the window only.
    pub window_cache: bool,
    pub smooth: bool,
    pub rotary: bool,
    pub pairs: Pairs,
    pub q_epsilon: f32,
    pub k_epsilon: f32,
}

impl Attrs {
    /// Parses; a message names the attribute that cannot be had.
    pub fn parse(cx: &NodeCx) -> Result<Self, Decline> {
        let count = |name: &str| match usize::try_from(cx.int(name, 0)) {
            Ok(n) if (1..=1 << 20).contains(&n) => Ok(n),
            _ => Err(cx.decline(format_args!("attribute '{name}'"), cx.int(name, 0), "a number of heads")),
        };
        let (heads, kv_heads) = (count("num_heads")?, count("kv_num_heads")?);
        if heads % kv_heads != 0 {
            return Err(cx.decline(
                "attribute 'num_heads'",
                heads,
                format_args!("a multiple of kv_num_heads, which is {kv_heads}"),
            ));
        }
        let window = cx.int("local_window_size", -1);
        if window != -1 && window < 1 {
            return Err(cx.decline("attribute 'local_window_size'", window, "-1 or more than 0"));
        }
        let epsilon = cx.float("qk_norm_epsilon", 1e-6);
        let attrs = Self {
            heads,
            kv_heads,
            scale: cx.float("scale", 0.0),
            softcap: cx.float("softcap", 0.0),
            causal: cx.int("causal", 1) != 0,
            window: usize::try_from(window).unwrap_or(0),
            window_cache: cx.int("sliding_window_cache", 0) != 0,
            smooth: cx.int("smooth_softmax", -1) == 1,
            rotary: cx.int("do_rotary", 0) != 0,
            pairs: Pairs::from_attribute(cx.int("rotary_interleaved", 0)),
            q_epsilon: cx.float("q_norm_epsilon", epsilon),
            k_epsilon: cx.float("k_norm_epsilon", epsilon),
        };
        if attrs.window > 0 && !attrs.causal {
            return Err(cx.decline("attribute 'local_window_size'", window, "-1 when causal is 0"));
        }
        if attrs.window_cache && attrs.window == 0 {
            return Err(cx.decline(
                "attribute 'local_window_size'",
                window,
                "more than 0 when sliding_window_cache is 1",
            ));
        }
        Ok(attrs)
    }
}

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
    let attrs = Attrs::parse(cx)?;
    for (s, name) in [(0, "query"), (5, "seqlens_k"), (6, "total_sequence_length")] {
        if !cx.has_input(s) {
            return Err(cx.decline(format_args!("input {s} ({name})"), "nothing", "a tensor"));
        }
    }
    cx.check_dtype(slot::QUERY, "query", &FLOATS)?;
    let dtype = cx.required(slot::QUERY)?.dtype;
    for (s, name) in [
        (slot::KEY, "key"),
        (slot::VALUE, "value"),
        (slot::COS, "cos_cache"),
        (slot::SIN, "sin_cache"),
        (slot::BIAS, "attention_bias"),
        (slot::SINK, "head_sink"),
        (slot::Q_NORM, "q_norm_weight"),
        (slot::K_NORM, "k_norm_weight"),
        // A cache of another type is a quantised one.
        (slot::PAST_KEY, "past_key"),
        (slot::PAST_VALUE, "past_value"),
    ] {
        cx.check_dtype(s, name, &[dtype])?;
    }
    cx.check_dtype(slot::SEQLENS, "seqlens_k", &[DType::I32])?;
    cx.check_dtype(slot::TOTAL, "total_sequence_length", &[DType::I32])?;
    cx.check_dtype(slot::POSITIONS, "position_ids", &[DType::I64])?;
    cx.check_string("k_quant_type", "NONE", &["NONE"])?;
    cx.check_string("v_quant_type", "NONE", &["NONE"])?;
    cx.check_int("causal", 1, &[0, 1])?;
    cx.check_int("qk_output", 0, &[0])?;
    cx.check_absent(slot::K_SCALE, "k_scale", "a quantised cache is not supported")?;
    cx.check_absent(slot::V_SCALE, "v_scale", "a quantised cache is not supported")?;
    cx.check_absent(slot::QUERY_SEQLENS, "query_seqlens", "right-padded chunks are not supported")?;
    if cx.has_output(slot::QK) {
        return Err(cx.decline("output 3 (output_qk)", "a reader", "none: qk_output is not supported"));
    }
    check_pairs(cx, &attrs)
}

/// Declines where one of two inputs that belong together is absent.
fn check_pairs(cx: &NodeCx, attrs: &Attrs) -> Result<(), Decline> {
    for (a, b, names) in [
        (slot::KEY, slot::VALUE, "key and value"),
        (slot::PAST_KEY, slot::PAST_VALUE, "past_key and past_value"),
        (slot::COS, slot::SIN, "cos_cache and sin_cache"),
        (slot::Q_NORM, slot::K_NORM, "q_norm_weight and k_norm_weight"),
    ] {
        if cx.has_input(a) != cx.has_input(b) {
            return Err(cx.decline(format_args!("inputs {a} and {b} ({names})"), "one of the two", "both or neither"));
        }
    }
    if attrs.rotary && !cx.has_input(slot::COS) {
        return Err(cx.decline("input 7 (cos_cache)", "nothing", "a tensor when do_rotary is 1"));
    }
    if attrs.window_cache && !cx.has_input(slot::PAST_KEY) {
        return Err(cx.decline(
            "input 3 (past_key)",
            "nothing",
            "a tensor when sliding_window_cache is 1: it gives the capacity",
        ));
    }
    Ok(())
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let attrs = Attrs::parse(cx).map_err(|d| abi::Error::Internal(d.0))?;
    Ok(Box::new(cpu::Gqa { attrs, tier: cx.settings().tier, lanes: cx.settings().chunks }))
}
