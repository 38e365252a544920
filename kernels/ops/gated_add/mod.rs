//! com.microsoft GatedAdd 1, plain mode:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GatedAdd>.
//!
//! X and Y [..., C], gate [..., 1]: X + round(Y gate). A projected gate (input gate_weight) is declined.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::float::Float;
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::par::SharedMut;
use crate::shapes::{agree, agree_all, ranked, show};
use crate::with_float;
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] =
    &[OpDef::new("com.microsoft", "GatedAdd", (1, 1), claim, infer, build).with_cuda(cuda::build)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(3)?;
    cx.check_dtype(0, "X", &[DType::F32, DType::F16, DType::BF16])?;
    let dtype = cx.required(0)?.dtype;
    cx.check_dtype(1, "Y", &[dtype])?;
    cx.check_dtype(2, "gate", &[dtype])?;
    cx.check_absent(3, "gate_weight", "the gate is not projected here")
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let x = cx.required(0)?;
    let Some(mut shape) = x.shape.clone() else {
        return Ok(vec![Fact::unranked(x.dtype)]);
    };
    if shape.is_empty() {
        return Err(cx.error("input 0 (X)", show(&shape), "at least one dim"));
    }
    shape = agree_all(cx, 1, "Y", &shape)?;
    let gate = ranked(cx, 2, "gate", shape.len())?;
    let last = shape.len() - 1;
    for axis in 0..last {
        shape[axis] = agree(cx, 2, "gate", axis, &gate[axis], &shape[axis])?;
    }
    agree(cx, 2, "gate", last, &gate[last], &Dim::Known(1))?;
    Ok(vec![Fact::new(x.dtype, shape)])
}

fn build(_: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(GatedAdd))
}

struct GatedAdd;

/// Elements below which another thread is not worth it.
const GRAIN: usize = 16 * 1024;

impl Kernel for GatedAdd {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        with_float!(cx.required(0).dtype(), T => run::<T>(cx));
        Ok(())
    }
}

fn run<T: Float>(cx: &mut RunCx<'_>) {
    let Some(output) = cx.output(0) else { return };
    let [x, y, gate] = [0, 1, 2].map(|slot| cx.required(slot).slice::<T>());
    let n = (x.len() / gate.len().max(1)).max(1);
    let output = SharedMut::new(output.into_slice::<T>());
    cx.par.ranges(gate.len(), GRAIN / n, |rows| {
        for row in rows {
            let part = row * n..(row + 1) * n;
            let gate = gate[row].to_f32();
            // SAFETY: each row belongs to one range.
            let to = unsafe { output.slice(part.clone()) };
            for ((to, x), y) in to.iter_mut().zip(&x[part.clone()]).zip(&y[part]) {
                let product = T::from_f32(y.to_f32() * gate).to_f32();
                *to = T::from_f32(x.to_f32() + product);
            }
        }
    });
}
