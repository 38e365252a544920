//! Softmax and LogSoftmax: <https://onnx.ai/onnx/operators/onnx__Softmax.html>. Before opset 13 all dims from `axis` on
//! are one; since then the axis stands alone.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::arithmetic::{Number, Real};
use crate::cpu::map::{BLOCK, Task, vectorize};
use crate::cpu::number::{FLOATS, Stored};
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::par::SharedMut;
use crate::settings::Tier;
use crate::with_real;
use abi::Result;
use std::marker::PhantomData;

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Softmax", (1, 13), claim, infer, |cx| build(cx, false)).with_cuda(cuda::build),
    OpDef::new("", "LogSoftmax", (1, 13), claim, infer, |cx| build(cx, true)).with_cuda(cuda::build),
];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "input", FLOATS)
}

fn asked_axis(cx: &NodeCx) -> i64 {
    cx.int("axis", if cx.node().since_version < 13 { 1 } else { -1 })
}

/// Elements of a row, and how far apart they lie.
fn rows_of(shape: &[usize], axis: i64, merged: bool) -> (usize, usize) {
    let axis = fact::axis(axis, shape.len()).unwrap_or(shape.len());
    match shape.get(axis) {
        Some(_) if merged => (shape[axis..].iter().product(), 1),
        Some(&n) => (n, shape[axis + 1..].iter().product()),
        None => (1, 1),
    }
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let input = cx.required(0)?;
    if let Some(rank) = input.rank() {
        let asked = asked_axis(cx);
        // One past the end is an axis of the older versions: rows of one element.
        let past_end = cx.node().since_version < 13 && asked == rank as i64;
        let scalar = rank == 0 && (-1..=0).contains(&asked);
        if fact::axis(asked, rank).is_none() && !past_end && !scalar {
            return Err(cx.error("attribute 'axis'", asked, format_args!("an axis of rank {rank}")));
        }
    }
    Ok(vec![input.with_dtype(input.dtype)])
}

fn build(cx: &mut BuildCx, log: bool) -> Result<Box<dyn Kernel>> {
    let (axis, merged) = (asked_axis(cx), cx.node().since_version < 13);
    let tier = cx.settings().tier;
    Ok(with_real!(cx.required(0)?.dtype, T => Box::new(Softmax::<T> { axis, merged, log, tier, kind: PhantomData })))
}

struct Softmax<T> {
    axis: i64,
    /// Whether the axis stands for all dims from it on.
    merged: bool,
    log: bool,
    tier: Tier,
    kind: PhantomData<T>,
}

impl<T: Stored<C: Real>> Kernel for Softmax<T> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.required(0);
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        let shape = input.shape();
        let (n, inner) = rows_of(shape, self.axis, self.merged);
        let data = input.slice::<T>();
        let out = SharedMut::new(out.slice::<T>());
        let grain = ((1 << 13) / n).max(1);
        cx.par.ranges(data.len() / n, grain, |range| {
            for row in range {
                let base = row / inner * n * inner + row % inner;
                self.row(Row { data, base, n, stride: inner }, &out);
            }
        });
        Ok(())
    }
}

/// `n` elements, `stride` apart.
struct Row<'a, T> {
    data: &'a [T],
    base: usize,
    n: usize,
    stride: usize,
}

impl<T: Stored> Row<'_, T> {
    /// Calls `f(first, elements)` on pieces of the row in the type of the computation.
    fn blocks(&self, mut f: impl FnMut(usize, &[T::C])) {
        let mut block = [T::C::default(); BLOCK];
        for start in (0..self.n).step_by(BLOCK) {
            let len = (self.n - start).min(BLOCK);
            let from = self.base + start * self.stride;
            if self.stride == 1 {
                let raw = &self.data[from..from + len];
                match T::as_computed(raw) {
                    Some(xs) => f(start, xs),
                    None => {
                        T::load_slice(raw, &mut block[..len]);
                        f(start, &block[..len]);
                    }
                }
            } else {
                for (i, x) in block[..len].iter_mut().enumerate() {
                    *x = self.data[from + i * self.stride].load();
                }
                f(start, &block[..len]);
            }
        }
    }
}

impl<T: Stored<C: Real>> Softmax<T> {
    /// Three passes; exponentials are computed twice, so that half floats round once and nothing is allocated.
    fn row(&self, row: Row<'_, T>, out: &SharedMut<'_, T>) {
        let mut max = T::C::LOWEST;
        row.blocks(|_, xs| max = xs.iter().fold(max, |max, x| max.larger(*x)));
        // A row of -infinity has no softmax: 0/0, as in ORT.
        let mut sum = 0f64;
        row.blocks(|_, xs| {
            let mut part = T::C::ZERO;
            vectorize(self.tier, SumExp { xs, max, sum: &mut part });
            sum += part.to_f64();
        });
        let scale = if self.log { T::C::of_f64(sum.ln()) } else { T::C::of_f64(1.0 / sum) };
        let mut computed = [T::C::default(); BLOCK];
        row.blocks(|start, xs| {
            let computed = &mut computed[..xs.len()];
            if self.log {
                for (out, x) in computed.iter_mut().zip(xs) {
                    *out = x.sub(max).sub(scale);
                }
            } else {
                vectorize(self.tier, ScaledExp { xs, max, scale, out: computed });
            }
            let from = row.base + start * row.stride;
            if row.stride == 1 {
                // SAFETY: rows do not overlap, and each is written by one task.
                T::store_slice(computed, unsafe { out.slice(from..from + xs.len()) });
            } else {
                for (i, v) in computed.iter().enumerate() {
                    let at = from + i * row.stride;
                    // SAFETY: as above.
                    let slot = unsafe { out.slice(at..at + 1) };
                    slot[0] = T::store(*v);
                }
            }
        });
    }
}

struct SumExp<'a, C> {
    xs: &'a [C],
    max: C,
    sum: &'a mut C,
}

impl<C: Real> Task for SumExp<'_, C> {
    const SIMD: bool = C::SIMD;
    #[inline(always)]
    fn run(self) {
        let mut lanes = [C::ZERO; 16];
        let (chunks, rest) = self.xs.as_chunks::<16>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane = lane.add(x.sub(self.max).exp());
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = lane.add(x.sub(self.max).exp());
        }
        *self.sum = lanes.into_iter().fold(C::ZERO, C::add);
    }
}

struct ScaledExp<'a, C> {
    xs: &'a [C],
    max: C,
    scale: C,
    out: &'a mut [C],
}

impl<C: Real> Task for ScaledExp<'_, C> {
    const SIMD: bool = C::SIMD;
    #[inline(always)]
    fn run(self) {
        for (out, x) in self.out.iter_mut().zip(self.xs) {
            *out = x.sub(self.max).exp().mul(self.scale);
        }
    }
}
