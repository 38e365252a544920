//! com.microsoft BiasGelu 1 and FastGelu 1:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.BiasGelu>.
//!
//! Gelu of the input plus a bias along its last dim: by erf (BiasGelu), or by tanh with an optional bias.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::convert::{self, Floats, FloatsMut};
use crate::cpu::math::{erf, tanh};
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::shapes::{agree, ranked, show};
use abi::{DType, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("com.microsoft", "BiasGelu", (1, 1), claim, infer, build).with_cuda(cuda::build),
    OpDef::new("com.microsoft", "FastGelu", (1, 1), claim, infer, build).with_cuda(cuda::build),
];

fn is_fast(cx: &NodeCx) -> bool {
    cx.node().op_type == "FastGelu"
}

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(if is_fast(cx) { 1 } else { 2 })?;
    cx.check_dtype(0, "input", &[DType::F32, DType::F16, DType::BF16])?;
    cx.check_dtype(1, "bias", &[cx.required(0)?.dtype])
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let input = cx.required(0)?;
    let mut fact = input.with_dtype(input.dtype);
    if let (Some(shape), true) = (&mut fact.shape, cx.has_input(1)) {
        let bias = ranked(cx, 1, "bias", 1)?;
        if shape.is_empty() {
            return Err(cx.error("input 0 (input)", show(shape), "at least one dim, for the bias"));
        }
        let last = shape.len() - 1;
        shape[last] = agree(cx, 1, "bias", 0, &bias[0], &shape[last])?;
    }
    Ok(vec![fact])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(BiasGelu { fast: is_fast(cx) }))
}

struct BiasGelu {
    /// By tanh.
    fast: bool,
}

impl Kernel for BiasGelu {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let Some(output) = cx.output(0) else { return Ok(()) };
        let bias = cx.input(1).map(Floats::of);
        let fast = self.fast;
        convert::map(cx.par, Floats::of(cx.required(0)), FloatsMut::of(output), |i, x| {
            let x = x + bias.map_or(0.0, |bias| bias.get(i % bias.len()));
            if fast { 0.5 * x * (1.0 + tanh(FAST_1 * x + FAST_3 * x * x * x)) } else { gelu(x) }
        });
        Ok(())
    }
}

/// The definition's factors of x and x^3: sqrt(2 / pi), and 0.044715 times it.
const FAST_1: f32 = 0.797_884_6;
const FAST_3: f32 = 0.035_677_41;

fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
}
