//! CumSum and CumProd: <https://onnx.ai/onnx/operators/onnx__CumSum.html>.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::arithmetic::Number;
use crate::cpu::number::{NUMBERS, Stored};
use crate::cuda::walk::claim_rank;
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::gather::Indices;
use crate::par::SharedMut;
use crate::with_number;
use abi::{DType, Result};
use std::marker::PhantomData;

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "CumSum", (11, 14), claim, infer, |cx| build(cx, false))
        .with_cuda_claim(claim_rank, |cx, device| cuda::build(cx, device, false)),
    OpDef::new("", "CumProd", (26, 26), claim, infer, |cx| build(cx, true))
        .with_cuda_claim(claim_rank, |cx, device| cuda::build(cx, device, true)),
];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(0, "x", NUMBERS)?;
    cx.check_dtype(1, "axis", &[DType::I64, DType::I32])?;
    cx.check_int("exclusive", 0, &[0, 1])?;
    cx.check_int("reverse", 0, &[0, 1])
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (x, axis) = (cx.required(0)?, cx.required(1)?);
    if let Some(n) = axis.elements().filter(|&n| n != 1) {
        return Err(cx.error("input 1 (axis)", format_args!("{n} elements"), "a scalar"));
    }
    Ok(vec![x.with_dtype(x.dtype)])
}

fn build(cx: &mut BuildCx, product: bool) -> Result<Box<dyn Kernel>> {
    let (exclusive, reverse) = (cx.int("exclusive", 0) != 0, cx.int("reverse", 0) != 0);
    Ok(with_number!(cx.required(0)?.dtype, T => {
        Box::new(Cumulative::<T> { product, exclusive, reverse, kind: PhantomData })
    }))
}

struct Cumulative<T> {
    product: bool,
    /// Whether an element's own value is left out of its result.
    exclusive: bool,
    reverse: bool,
    kind: PhantomData<T>,
}

impl<T: Stored<C: Number>> Kernel for Cumulative<T> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.required(0);
        let (shape, asked) = (input.shape(), Indices::of(&cx.required(1)).get(0));
        let Some(axis) = fact::axis(asked, shape.len()) else {
            return Err(cx.error("input 1 (axis)", asked, format_args!("an axis of rank {}", shape.len())));
        };
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        let (n, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
        let data = input.slice::<T>();
        let out = SharedMut::new(out.slice::<T>());
        cx.par.ranges(data.len() / n, ((1 << 14) / n).max(1), |range| {
            for row in range {
                let base = row / inner * n * inner + row % inner;
                let mut acc = if self.product { T::C::ONE } else { T::C::ZERO };
                for i in 0..n {
                    let at = base + if self.reverse { n - 1 - i } else { i } * inner;
                    let x = data[at].load();
                    let next = if self.product { acc.mul(x) } else { acc.add(x) };
                    let result = if self.exclusive { acc } else { next };
                    // SAFETY: each element belongs to one row, each row to one task.
                    let slot = unsafe { out.slice(at..at + 1) };
                    slot[0] = T::store(result);
                    acc = next;
                }
            }
        });
        Ok(())
    }
}
