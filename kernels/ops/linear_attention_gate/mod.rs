//! com.microsoft LinearAttentionGate 1:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.LinearAttentionGate>.
//!
//! H heads. a and b [..., H], dt_bias and decay_scale [H] in f32:
//! decay = decay_scale softplus(a + dt_bias), beta = sigmoid(b).

#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::float::Float;
use crate::cpu::math::softplus;
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::par::SharedMut;
use crate::shapes::{agree, agree_all, ranked};
use crate::with_float;
use abi::{DType, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[OpDef::new("com.microsoft", "LinearAttentionGate", (1, 1), claim, infer, build)];

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

/// Elements below which another thread is not worth it; each takes some tens of nanoseconds.
const GRAIN: usize = 2048;

impl Kernel for Gate {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        with_float!(cx.required(0).dtype(), T => run::<T>(cx));
        Ok(())
    }
}

fn run<T: Float>(cx: &mut RunCx<'_>) {
    let a = cx.required(0).slice::<T>();
    let (bias, scale) = (cx.required(1).slice::<f32>(), cx.required(2).slice::<f32>());
    if let Some(decay) = cx.output(0) {
        let decay = SharedMut::new(decay.into_slice::<T>());
        cx.par.ranges(a.len(), GRAIN, |range| {
            for i in range.clone() {
                let h = i % bias.len();
                let value = T::from_f32(scale[h] * softplus(a[i].to_f32() + bias[h]));
                // SAFETY: each element belongs to one range.
                let one = unsafe { decay.slice(i..i + 1) };
                one[0] = value;
            }
        });
    }
    if let (Some(b), Some(beta)) = (cx.input(3), cx.output(1)) {
        let (b, beta) = (b.slice::<T>(), SharedMut::new(beta.into_slice::<T>()));
        cx.par.ranges(b.len(), GRAIN, |range| {
            // SAFETY: `ranges` gives disjoint ranges.
            let beta = unsafe { beta.slice(range.clone()) };
            for (beta, b) in beta.iter_mut().zip(&b[range]) {
                *beta = T::from_f32(1.0 / (1.0 + (-b.to_f32()).exp()));
            }
        });
    }
}
