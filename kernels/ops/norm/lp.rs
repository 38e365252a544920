//! ai.onnx LpNormalization 1 and 22: <https://onnx.ai/onnx/operators/onnx__LpNormalization.html>.
//!
//! Divides by the L1 or L2 norm along one axis, with no epsilon; zeros stay zeros.

use super::cuda;
use super::rows::{Call, Norm};
use crate::build::BuildCx;
use crate::cpu::convert::{Floats, FloatsMut};
use crate::cpu::float::Float;
use crate::fact::{Fact, axis};
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::par::SharedMut;
use crate::settings::Tier;
use crate::with_float;
use abi::tensor::Element;
use abi::{DType, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[OpDef::new("", "LpNormalization", (1, 22), claim, infer, build).with_cuda(cuda::build_lp)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "input", &[DType::F32, DType::F16, DType::BF16, DType::F64])?;
    cx.check_int("p", 2, &[1, 2])
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let input = cx.required(0)?;
    if let Some(rank) = input.rank() {
        let got = cx.int("axis", -1);
        axis(got, rank).ok_or_else(|| cx.error("attribute 'axis'", got, format_args!("a dim of rank {rank}")))?;
    }
    Ok(vec![input.with_dtype(input.dtype)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(LpNorm {
        tier: cx.settings().tier,
        norm: if cx.int("p", 2) == 1 { Norm::L1 } else { Norm::L2 },
        axis: cx.int("axis", -1),
    }))
}

struct LpNorm {
    tier: Tier,
    norm: Norm,
    axis: i64,
}

impl Kernel for LpNorm {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let x = cx.required(0);
        let along = axis(self.axis, x.shape().len()).unwrap_or(0);
        if x.dtype() == DType::F64 {
            self.strided::<f64>(cx, |x| x, |x| x);
        } else if along + 1 == x.shape().len() {
            let y = cx.output(0).map(FloatsMut::of);
            Call::new(self.norm, Floats::of(x), x.shape()[along], y).run(self.tier, cx.par);
        } else {
            with_float!(x.dtype(), T => self.strided::<T>(cx, |x| x.to_f32().into(), |x| T::from_f32(x as f32)));
        }
        Ok(())
    }
}

impl LpNorm {
    /// Along an inner axis, or in doubles: one column after another.
    fn strided<T: Element>(&self, cx: &mut RunCx<'_>, wide: impl Fn(T) -> f64 + Sync, round: impl Fn(f64) -> T + Sync) {
        let x = cx.required(0);
        let Some(y) = cx.output(0) else { return };
        let (from, to) = (x.slice::<T>(), SharedMut::new(y.into_slice::<T>()));
        let along = axis(self.axis, x.shape().len()).unwrap_or(0);
        let (n, inner) = (x.shape()[along], x.shape()[along + 1..].iter().product::<usize>());
        let columns = x.shape()[..along].iter().product::<usize>() * inner;
        cx.par.ranges(columns, 256, |range| {
            for column in range {
                let start = column / inner * n * inner + column % inner;
                let each = || (0..n).map(|i| start + i * inner);
                let norm = match self.norm {
                    Norm::L1 => each().map(|i| wide(from[i]).abs()).sum(),
                    _ => each().map(|i| wide(from[i]).powi(2)).sum::<f64>().sqrt(),
                };
                let inverse = if norm == 0.0 { 0.0 } else { 1.0 / norm };
                for i in each() {
                    // SAFETY: columns are distinct.
                    let one = unsafe { to.slice(i..i + 1) };
                    one[0] = round(wide(from[i]) * inverse);
                }
            }
        });
    }
}
