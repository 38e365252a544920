//! com.microsoft CausalConvWithState 1 and ai.onnx CausalConvWithState 27:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.CausalConvWithState>.
//!
//! B batch, C channels, T new positions, K taps, L = (K - 1) dilation. input and output [B, C, T] (or
//! [B, T, C...] with channels_last), weight [C, 1, K], bias `[C]`, states [B, C, L] (or [B, L, C...]).
//! With X the past state followed by the input:
//! `output[t]` = activation(bias + sum_j `weight[j]` X[t + j dilation]), present state = X's last L positions.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::fact::{Fact, mul};
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use crate::shapes::{agree, agree_all, ranked, show};
use abi::{DType, Dim, Error, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("com.microsoft", "CausalConvWithState", (1, 1), claim, infer, build)
        .with_in_place(&[(3, 1)])
        .with_cuda(cuda::build),
    OpDef::new("", "CausalConvWithState", (27, 27), claim, infer, build)
        .with_in_place(&[(3, 1)])
        .with_cuda(cuda::build),
];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(0, "input", &[DType::F32, DType::F16, DType::BF16])?;
    let dtype = cx.required(0)?.dtype;
    for (slot, name) in [(1, "weight"), (2, "bias"), (3, "past_state")] {
        cx.check_dtype(slot, name, &[dtype])?;
    }
    cx.check_string("activation", "none", &["none", "silu", "swish"])?;
    cx.check_int("ndim", 1, &[1])?;
    cx.check_int("channels_last", 0, &[0, 1])?;
    for name in ["state_window", "state_update_capacity", "state_length", "input_channel_offset", "input_channels"] {
        cx.check_int(name, 0, &[0])?;
    }
    cx.check_int("state_channels_last", -1, &[-1, cx.int("channels_last", 0)])?;
    dilation(cx)?;
    if cx.has_output(2) {
        return Err(cx.decline("output 2 (state_update)", "a reader", "none: state updates are not captured"));
    }
    Ok(())
}

fn dilation(cx: &NodeCx) -> Result<usize> {
    let got = cx.int("dilation", 1);
    usize::try_from(got).ok().filter(|&d| d > 0).ok_or_else(|| cx.error("attribute 'dilation'", got, "at least 1"))
}

/// L, which is unknown while K is.
fn state_length(cx: &NodeCx, taps: &Dim) -> Result<Dim> {
    let Dim::Known(taps) = taps else {
        return Ok(Dim::Unknown);
    };
    let length = taps.checked_sub(1).and_then(|n| n.checked_mul(dilation(cx).ok()?));
    length.map(Dim::Known).ok_or_else(|| cx.error("input 1 (weight), dim 2", taps, "at least 1 tap"))
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let input = cx.required(0)?;
    let last = cx.int("channels_last", 0) == 1;
    let weight = ranked(cx, 1, "weight", 3)?;
    agree(cx, 1, "weight", 1, &weight[1], &Dim::Known(1))?;
    let length = state_length(cx, &weight[2])?;
    let Some(mut shape) = input.shape.clone() else {
        let unknown = Fact::unranked(input.dtype);
        return Ok(vec![unknown.clone(), unknown]);
    };
    if shape.len() < 3 || (shape.len() > 3 && !last) {
        let expected = if last { "rank 3 or more" } else { "rank 3" };
        return Err(cx.error("input 0 (input)", show(&shape), expected));
    }
    let channels = if last { shape[2..].iter().fold(Dim::Known(1), |n, d| mul(&n, d)) } else { shape[1].clone() };
    let mut channels = agree(cx, 1, "weight", 0, &weight[0], &channels)?;
    if cx.has_input(2) {
        let bias = ranked(cx, 2, "bias", 1)?;
        channels = agree(cx, 2, "bias", 0, &bias[0], &channels)?;
    }
    if !last {
        shape[1] = channels;
    }
    let mut state = shape.clone();
    state[if last { 1 } else { 2 }] = length;
    if cx.has_input(3) {
        state = agree_all(cx, 3, "past_state", &state)?;
        shape[0] = state[0].clone();
    }
    Ok(vec![Fact::new(input.dtype, shape), Fact::new(input.dtype, state)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let last = cx.int("channels_last", 0) == 1;
    let label = cx.label();
    let floats = move |constant: &crate::weights::Constant| -> Result<Vec<f32>, Error> {
        let problem = || label.error("a weight", constant.dtype(), "float, float16 or bfloat16");
        constant.to_f32s().ok_or_else(problem)
    };
    let weight = match cx.constant(1)? {
        None => None,
        Some(_) => {
            let layout = format!("causal_conv weight, channels_last {last}");
            Some(cx.pack(&[1], &layout, |constants| {
                let constant = constants[0].as_ref().expect("it is a constant");
                let (weight, channels) = (floats(constant)?, constant.shape()[0]);
                Ok(if last { cpu::transposed(&weight, channels) } else { weight })
            })?)
        }
    };
    let bias = match cx.constant(2)? {
        None => None,
        Some(_) => Some(
            cx.pack(&[2], "causal_conv bias", |constants| floats(constants[0].as_ref().expect("it is a constant")))?,
        ),
    };
    Ok(Box::new(cpu::CausalConv {
        tier: cx.settings().tier,
        silu: cx.string("activation", "none") != "none",
        channels_last: last,
        dilation: dilation(cx)?,
        weight,
        bias,
    }))
}
