//! SwiGLU: <https://onnx.ai/onnx/operators/onnx__SwiGLU.html>.

use super::{COSTLY, claim_same, cuda};
use crate::build::BuildCx;
use crate::cpu::arithmetic::{Number, Real};
use crate::cpu::map::{self, Reader, Task, vectorize};
use crate::cpu::number::{FLOATS, Stored};
use crate::cpu::view::View;
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx};
use crate::op::{NodeCx, OpDef};
use crate::settings::Tier;
use crate::with_real;
use abi::Result;

/// SwiGLU.
pub const OPS: &[OpDef] = &[OpDef::new("", "SwiGLU", (28, 28), |cx| claim_same(cx, 2, FLOATS), infer, build)
    .with_cuda(|cx, device| cuda::binary(cx, device, cuda::Binary::SwiGlu))];

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (a, b) = (cx.required(0)?, cx.required(1)?);
    let (Some(gate), Some(value)) = (&a.shape, &b.shape) else {
        return Ok(vec![a.with_dtype(a.dtype)]);
    };
    let dims = gate.iter().zip(value).map(|(g, v)| fact::unify(g, v));
    match dims.collect() {
        Some(dims) if gate.len() == value.len() => Ok(vec![Fact::new(a.dtype, dims)]),
        _ => Err(cx.error("input 1 (B)", format_args!("{value:?}"), format_args!("{gate:?}, A's shape"))),
    }
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let (alpha, tier) = (cx.float("alpha", 1.0), cx.settings().tier);
    Ok(with_real!(cx.required(0)?.dtype, T => {
        Box::new(SwiGlu::<T> { alpha: <T as Stored>::C::of_f64(alpha.into()), tier })
    }))
}

struct SwiGlu<T: Stored> {
    alpha: T::C,
    tier: Tier,
}

impl<T: Stored<C: Real>> Kernel for SwiGlu<T> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (a, b) = (cx.required(0).slice::<T>(), cx.required(1).slice::<T>());
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        let view = View::new(0, [(a.len(), 1)]);
        let start = || (Reader::new(a, &view), Reader::new(b, &view));
        map::blocks(cx.par, out.slice::<T>(), COSTLY, start, |(a, b), range, out| {
            let (a, b) = (a.read(range.clone()), b.read(range));
            vectorize(self.tier, Gate { a, b, alpha: self.alpha, out });
        });
        Ok(())
    }
}

struct Gate<'a, C> {
    a: &'a [C],
    b: &'a [C],
    alpha: C,
    out: &'a mut [C],
}

impl<C: Real> Task for Gate<'_, C> {
    const SIMD: bool = C::SIMD;
    #[inline(always)]
    fn run(self) {
        for ((out, a), b) in self.out.iter_mut().zip(self.a).zip(self.b) {
            *out = a.mul(a.mul(self.alpha).sigmoid()).mul(*b);
        }
    }
}
