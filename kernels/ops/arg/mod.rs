//! ArgMax and ArgMin: <https://onnx.ai/onnx/operators/onnx__ArgMax.html>.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::arithmetic::Number;
use crate::cpu::number::{NUMBERS, Stored};
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::gather::axis;
use crate::par::SharedMut;
use crate::with_number;
use abi::{DType, Dim, Result};
use std::marker::PhantomData;

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "ArgMax", (1, 13), claim, infer, |cx| build(cx, true))
        .with_cuda(|cx, device| cuda::build(cx, device, true)),
    OpDef::new("", "ArgMin", (1, 13), claim, infer, |cx| build(cx, false))
        .with_cuda(|cx, device| cuda::build(cx, device, false)),
];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "data", NUMBERS)
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let Some(mut shape) = cx.required(0)?.shape.clone() else {
        return Ok(vec![Fact::unranked(DType::I64)]);
    };
    let axis = axis(cx, &shape, 0)?;
    if shape[axis] == Dim::Known(0) {
        return Err(cx.error("input 0 (data)", format_args!("{shape:?}"), "elements along the axis"));
    }
    if cx.int("keepdims", 1) != 0 {
        shape[axis] = Dim::Known(1);
    } else {
        shape.remove(axis);
    }
    Ok(vec![Fact::new(DType::I64, shape)])
}

fn build(cx: &mut BuildCx, max: bool) -> Result<Box<dyn Kernel>> {
    let (axis, last) = (cx.int("axis", 0), cx.int("select_last_index", 0) != 0);
    Ok(with_number!(cx.required(0)?.dtype, T => Box::new(Arg::<T> { axis, max, last, kind: PhantomData })))
}

struct Arg<T> {
    axis: i64,
    max: bool,
    /// Whether the last of equals wins.
    last: bool,
    kind: PhantomData<T>,
}

impl<T: Stored<C: Number>> Kernel for Arg<T> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.required(0);
        let shape = input.shape();
        let axis = fact::axis(self.axis, shape.len()).expect("infer has checked the axis");
        let (n, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        let data = input.slice::<T>();
        let out = SharedMut::new(out.slice::<i64>());
        cx.par.ranges(out.len(), ((1 << 14) / n).max(1), |range| {
            // SAFETY: the ranges of one loop do not overlap.
            let part = unsafe { out.slice(range.clone()) };
            for (row, out) in range.zip(part) {
                let base = row / inner * n * inner + row % inner;
                *out = self.find((0..n).map(|i| data[base + i * inner].load())) as i64;
            }
        });
        Ok(())
    }
}

impl<T: Stored<C: Number>> Arg<T> {
    fn find(&self, mut xs: impl Iterator<Item = T::C>) -> usize {
        let (mut best, mut at) = (xs.next().expect("infer refuses empty axes"), 0);
        for (i, x) in xs.enumerate() {
            let better = if self.max { x > best } else { x < best };
            if better || (self.last && x == best) {
                (best, at) = (x, i + 1);
            }
        }
        at
    }
}
