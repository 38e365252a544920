//! `ai.onnx::Attention`: scaled dot-product attention with masks, windows and an optional KV cache.
//! Spec: <https://onnx.ai/onnx/operators/onnx__Attention.html>.
//!
//! Dims: B batch, N query heads, K key heads, S query rows, L new key rows, P past rows, T = P + L, H head size of queries and
//! keys, W head size of values.

mod cpu;
mod cuda;
pub(crate) mod flash;
mod scores;
mod shape;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use abi::{Attr, DType, Result};

/// The definitions.
pub const OPS: &[OpDef] =
    &[OpDef::new("", "Attention", (23, 25), claim, shape::infer, build).with_cuda_claim(cuda::claim, cuda::build)];

/// Input and output slots.
mod slot {
    pub const Q: usize = 0;
    pub const K: usize = 1;
    pub const V: usize = 2;
    pub const MASK: usize = 3;
    pub const PAST_KEY: usize = 4;
    pub const PAST_VALUE: usize = 5;
    pub const LENGTHS: usize = 6;

    pub const PRESENT_KEY: usize = 1;
    pub const PRESENT_VALUE: usize = 2;
    pub const SCORES: usize = 3;
}

/// What output 3 holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Raw,
    Softcapped,
    Biased,
    Softmax,
}

/// The attributes.
#[derive(Debug, Clone)]
struct Attrs {
    q_heads: usize,
    kv_heads: usize,
    /// `None`: one over the root of H.
    scale: Option<f32>,
    softcap: f32,
    causal: bool,
    /// Keys before and after the query's own that it sees.
    left: Option<usize>,
    right: Option<usize>,
    stage: Stage,
}

impl Attrs {
    fn parse(cx: &NodeCx) -> Result<Self, Decline> {
        let count = |name: &str| {
            let got = cx.int(name, 0);
            let expected = "a number of heads";
            usize::try_from(got).map_err(|_| cx.decline(format_args!("attribute '{name}'"), got, expected))
        };
        let window = |name: &str| match cx.int(name, -1) {
            -1 => Ok(None),
            got => match usize::try_from(got) {
                Ok(n) => Ok(Some(n)),
                Err(_) => Err(cx.decline(format_args!("attribute '{name}'"), got, "-1 or more")),
            },
        };
        let scale = match cx.node().attr("scale") {
            Some(Attr::Float(v)) => Some(*v),
            _ => None,
        };
        let stage = match cx.int("qk_matmul_output_mode", 0) {
            0 => Stage::Raw,
            1 => Stage::Softcapped,
            2 => Stage::Biased,
            3 => Stage::Softmax,
            got => return Err(cx.decline("attribute 'qk_matmul_output_mode'", got, "0, 1, 2 or 3")),
        };
        // Softmax is computed in f32 whichever is asked for, as ORT's own kernel does.
        cx.check_int("softmax_precision", 1, &[1, 10, 11, 16])?;
        Ok(Self {
            q_heads: count("q_num_heads")?,
            kv_heads: count("kv_num_heads")?,
            scale,
            softcap: cx.float("softcap", 0.0),
            causal: cx.int("is_causal", 0) != 0,
            left: window("left_window_size")?,
            right: window("right_window_size")?,
            stage,
        })
    }
}

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    let attrs = Attrs::parse(cx)?;
    cx.check_required(3)?;
    cx.check_dtype(slot::Q, "Q", &[DType::F32, DType::F16, DType::BF16])?;
    let dtype = cx.required(slot::Q)?.dtype;
    for (s, name) in [(slot::K, "K"), (slot::V, "V"), (slot::PAST_KEY, "past_key"), (slot::PAST_VALUE, "past_value")] {
        cx.check_dtype(s, name, &[dtype])?;
    }
    cx.check_dtype(slot::MASK, "attn_mask", &[dtype, DType::Bool])?;
    cx.check_dtype(slot::LENGTHS, "nonpad_kv_seqlen", &[DType::I64])?;
    if cx.has_input(slot::PAST_KEY) != cx.has_input(slot::PAST_VALUE) {
        return Err(cx.decline("inputs 4 and 5 (past_key and past_value)", "one of the two", "both or neither"));
    }
    if cx.has_input(slot::PAST_KEY) && cx.has_input(slot::LENGTHS) {
        return Err(cx.decline("input 6 (nonpad_kv_seqlen)", "a tensor", "none with past_key and past_value"));
    }
    if cx.required(slot::Q)?.rank() == Some(3) && (attrs.q_heads == 0 || attrs.kv_heads == 0) {
        return Err(cx.decline(
            "attributes 'q_num_heads' and 'kv_num_heads'",
            "0",
            "more than 0 for inputs of 3 dimensions",
        ));
    }
    Ok(())
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let attrs = Attrs::parse(cx).map_err(|d| abi::Error::Internal(d.0))?;
    Ok(Box::new(cpu::Sdpa { attrs, tier: cx.settings().tier, lanes: cx.settings().chunks }))
}
