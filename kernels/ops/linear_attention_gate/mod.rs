//! com.microsoft LinearAttentionGate 1:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.LinearAttentionGate>.
//!
//! H heads. a and b [..., H], dt_bias and decay_scale `[H]` in f32:
//! decay = decay_scale softplus(a + dt_bias), beta = sigmoid(b).

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::convert::{self, Floats, FloatsMut};
use crate::cpu::math::softplus;
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::shapes::{agree, agree_all, ranked};
use abi::{DType, Result};

/// The definitions.
pub const OPS: &[OpDef] =
    &[OpDef::new("com.microsoft", "LinearAttentionGate", (1, 1), claim, infer, build).with_cuda(cuda::build)];

const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(3)?;
    cx.check_dtype(0, "a", FLOATS)?;
    cx.check_dtype(1, "dt_bias", &[DType::F32])?;
    cx.check_dtype(2, "decay_scale", &[DType::F32])?;
    cx.check_dtype(3, "b", &[cx.required(0)?.dtype])?;
    if cx.has_output(1) && !cx.has_input(3) {
        return Err(cx.decline("input 3 (b)", "nothing", "a tensor, since output 1 (beta) is read"));
    }
    Ok(())
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let a = cx.required(0)?;
    let mut shape = ranked(cx, 0, "a", 3)?;
    for (slot, name) in [(1, "dt_bias"), (2, "decay_scale")] {
        let dims = ranked(cx, slot, name, 1)?;
        shape[2] = agree(cx, slot, name, 0, &dims[0], &shape[2])?;
    }
    if cx.has_input(3) {
        shape = agree_all(cx, 3, "b", &shape)?;
    }
    let fact = Fact::new(a.dtype, shape);
    Ok(vec![fact.clone(), fact])
}

fn build(_: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Gate))
}

struct Gate;

impl Kernel for Gate {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (bias, scale) = (cx.required(1).slice::<f32>(), cx.required(2).slice::<f32>());
        if let Some(decay) = cx.output(0) {
            convert::map(cx.par, Floats::of(cx.required(0)), FloatsMut::of(decay), |i, a| {
                let head = i % bias.len();
                scale[head] * softplus(a + bias[head])
            });
        }
        if let (Some(b), Some(beta)) = (cx.input(3), cx.output(1)) {
            convert::map(cx.par, Floats::of(b), FloatsMut::of(beta), |_, b| 1.0 / (1.0 + (-b).exp()));
        }
        Ok(())
    }
}
