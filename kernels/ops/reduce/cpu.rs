//! One algorithm for every reduction: kept dims are walked in output order; where the innermost kept dim is contiguous,
//! a block of accumulators runs down the reduced dims, else each row is folded on its own. Accumulators are f64, i64
//! or u64, so that long sums lose nothing.

use super::Axes;
use crate::cpu::arithmetic::Number;
use crate::cpu::map::BLOCK;
use crate::cpu::view::{Strides, View};
use crate::cpu::wide::{Load, Store, Wide};
use crate::kernel::{Kernel, RunCx};
use crate::par::SharedMut;
use crate::settings::Tier;
use abi::Result;

/// A reduction over accumulators `A`. The functions are `#[inline(always)]`.
pub trait Reduce<A: Number>: Send + Sync + 'static {
    /// Whether the maximum is subtracted first ([`LogSumExp`]).
    const SHIFTED: bool = false;
    /// The value over no elements.
    fn empty() -> A;
    /// Takes an element in.
    fn step(acc: A, x: A) -> A;
    /// Merges two partial results.
    fn join(a: A, b: A) -> A;
    /// Turns the result over `n` elements, shifted by `shift`, into the output.
    fn finish(acc: A, n: usize, shift: A) -> A {
        let _ = (n, shift);
        acc
    }
}

macro_rules! reduce {
    ($(#[$doc:meta] $struct:ident[$A:ident: $($bound:tt)*] $empty:expr, |$acc:ident, $x:ident| $step:expr, |$a:ident, $b:ident| $join:expr
        $(, finish |$r:ident, $n:ident, $shift:ident| $finish:expr, $shifted:literal)?;)*) => {$(
        #[$doc]
        pub struct $struct;
        reduce!(@impl $struct [$A: $($bound)*] $empty, |$acc, $x| $step, |$a, $b| $join $(, |$r, $n, $shift| $finish, $shifted)?);
    )*};
    (@impl $struct:ident [A: $($bound:tt)*] $($body:tt)*) => {
        impl<A: $($bound)*> Reduce<A> for $struct {
            reduce!(@body A $($body)*);
        }
    };
    (@impl $struct:ident [f64: $($bound:tt)*] $($body:tt)*) => {
        impl Reduce<f64> for $struct {
            reduce!(@body f64 $($body)*);
        }
    };
    (@body $A:ident $empty:expr, |$acc:ident, $x:ident| $step:expr, |$a:ident, $b:ident| $join:expr
        $(, |$r:ident, $n:ident, $shift:ident| $finish:expr, $shifted:literal)?) => {
        $(const SHIFTED: bool = $shifted;)?
        #[inline(always)]
        fn empty() -> $A {
            $empty
        }
        #[inline(always)]
        fn step($acc: $A, $x: $A) -> $A {
            $step
        }
        #[inline(always)]
        fn join($a: $A, $b: $A) -> $A {
            $join
        }
        $(
            #[inline(always)]
            fn finish($r: $A, $n: usize, $shift: $A) -> $A {
                $finish
            }
        )?
    };
}

reduce! {
    /// Sum.
    Sum[A: Number] A::ZERO, |acc, x| acc.add(x), |a, b| a.add(b);
    /// Sum over number of elements.
    Mean[A: Number] A::ZERO, |acc, x| acc.add(x), |a, b| a.add(b),
        finish |r, n, _shift| if n == 0 && A::EXACT { A::ZERO } else { r.div(A::of_f64(n as f64)) }, false;
    /// Product.
    Prod[A: Number] A::ONE, |acc, x| acc.mul(x), |a, b| a.mul(b);
    /// Greatest element.
    Max[A: Number] A::LOWEST, |acc, x| acc.larger(x), |a, b| a.larger(b);
    /// Least element.
    Min[A: Number] A::HIGHEST, |acc, x| acc.smaller(x), |a, b| a.smaller(b);
    /// Sum of magnitudes.
    L1[A: Number] A::ZERO, |acc, x| acc.add(x.abs()), |a, b| a.add(b);
    /// Sum of squares.
    SumSquare[A: Number] A::ZERO, |acc, x| acc.add(x.mul(x)), |a, b| a.add(b);
    /// Root of the sum of squares.
    L2[f64: ] 0.0, |acc, x| acc + x * x, |a, b| a + b, finish |r, _n, _shift| r.sqrt(), false;
    /// Logarithm of the sum.
    LogSum[f64: ] 0.0, |acc, x| acc + x, |a, b| a + b, finish |r, _n, _shift| r.ln(), false;
    /// Logarithm of the sum of exponentials.
    LogSumExp[f64: ] 0.0, |acc, x| acc + x.exp(), |a, b| a + b, finish |r, _n, shift| r.ln() + shift, true;
}

/// A reduction's loops over accumulators `A`.
pub struct Folds<A> {
    /// See [`Reduce::SHIFTED`].
    shifted: bool,
    empty: A,
    /// Folds elements, less the shift, into one result.
    row: fn(&[A], A) -> A,
    join: fn(A, A) -> A,
    /// Takes an element each, less its shift, into the results.
    columns: fn(&[A], &mut [A], &[A]),
    finish: fn(A, usize, A) -> A,
}

impl<A: Wide> Folds<A> {
    /// Those of `O`.
    pub fn of<O: Reduce<A>>() -> Self {
        Self {
            shifted: O::SHIFTED,
            empty: O::empty(),
            row: row::<O, A>,
            join: O::join,
            columns: columns::<O, A>,
            finish: O::finish,
        }
    }
}

/// Independent partial results of one row.
const LANES: usize = 16;

fn row<O: Reduce<A>, A: Wide>(xs: &[A], shift: A) -> A {
    let mut lanes = [O::empty(); LANES];
    let (chunks, rest) = xs.as_chunks::<LANES>();
    for chunk in chunks {
        for (acc, x) in lanes.iter_mut().zip(chunk) {
            *acc = O::step(*acc, x.sub(shift));
        }
    }
    for (acc, x) in lanes.iter_mut().zip(rest) {
        *acc = O::step(*acc, x.sub(shift));
    }
    lanes.into_iter().fold(O::empty(), O::join)
}

fn columns<O: Reduce<A>, A: Wide>(xs: &[A], acc: &mut [A], shift: &[A]) {
    for ((acc, x), shift) in acc.iter_mut().zip(xs).zip(shift) {
        *acc = O::step(*acc, x.sub(*shift));
    }
}

/// The kernel of a reduction in accumulators `A`.
pub struct Reducer<A> {
    pub(super) ops: Folds<A>,
    pub(super) load: Load<A>,
    pub(super) store: Store<A>,
    pub(super) axes: Axes,
    pub(super) tier: Tier,
}

impl<A: Wide> Kernel for Reducer<A> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let data = cx.required(0);
        let shape = data.shape();
        let axes = cx.input(1).map(|t| t.slice::<i64>());
        let mask = self.axes.mask(axes, shape.len());
        let mask = mask.map_err(|axis| cx.error("axes", axis, format_args!("axes of rank {}", shape.len())))?;
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        let strides = Strides::of(shape);
        let view = |reduced: bool| {
            let dims = shape.iter().enumerate();
            let dims = dims.filter(|(i, _)| (mask >> i & 1 == 1) == reduced);
            View::new(0, dims.map(|(i, &dim)| (dim, strides.get(i))))
        };
        let (kept, reduced) = (view(false), view(true));
        if out.len() != kept.len() {
            return Err(cx.error("output 0", format_args!("{:?}", out.shape()), "the reduced shape"));
        }
        if out.is_empty() {
            return Ok(());
        }
        let walk = Walk { kernel: self, data: data.bytes(), reduced: &reduced };
        let size = out.bytes().len() / kept.len();
        let shared = SharedMut::new(out.bytes());
        let grain = (1 << 15) / reduced.len().max(1);
        cx.par.ranges(kept.len(), grain.max(1), |range| {
            let mut acc = [A::ZERO; BLOCK];
            let mut done = range.start;
            let (_, stride) = kept.inner();
            kept.runs(range, |offset, len| {
                for start in (0..len).step_by(BLOCK) {
                    let acc = &mut acc[..(len - start).min(BLOCK)];
                    let first = (offset as isize + start as isize * stride) as usize;
                    if stride == 1 && len > 1 {
                        walk.columns(first, acc);
                    } else {
                        for (i, acc) in acc.iter_mut().enumerate() {
                            *acc = walk.row((first as isize + i as isize * stride) as usize);
                        }
                    }
                    // SAFETY: the ranges of one loop do not overlap.
                    let out = unsafe { shared.slice(done * size..(done + acc.len()) * size) };
                    (self.store)(self.tier, acc, out);
                    done += acc.len();
                }
            });
        });
        Ok(())
    }
}

/// The reduced dims, walked from the elements of the kept ones.
struct Walk<'a, A> {
    kernel: &'a Reducer<A>,
    data: &'a [u8],
    reduced: &'a View,
}

impl<A: Wide> Walk<'_, A> {
    /// The result over the reduced dims from element `base` on.
    fn row(&self, base: usize) -> A {
        let ops = &self.kernel.ops;
        let shift = if ops.shifted { finite(self.fold(&Folds::of::<Max>(), base, A::ZERO)) } else { A::ZERO };
        (ops.finish)(self.fold(ops, base, shift), self.reduced.len(), shift)
    }

    fn fold(&self, ops: &Folds<A>, base: usize, shift: A) -> A {
        let mut acc = ops.empty;
        let mut block = [A::ZERO; BLOCK];
        let (_, stride) = self.reduced.inner();
        self.reduced.runs(0..self.reduced.len(), |offset, len| {
            for start in (0..len).step_by(BLOCK) {
                let block = &mut block[..(len - start).min(BLOCK)];
                let from = ((base + offset) as isize + start as isize * stride) as usize;
                (self.kernel.load)(self.kernel.tier, self.data, from, stride, block);
                acc = (ops.join)(acc, (ops.row)(block, shift));
            }
        });
        acc
    }

    /// The results for neighbouring kept elements from `base` on, into `acc`.
    fn columns(&self, base: usize, acc: &mut [A]) {
        let ops = &self.kernel.ops;
        let mut shift = [A::ZERO; BLOCK];
        let shift = &mut shift[..acc.len()];
        if ops.shifted {
            self.fold_columns(&Folds::of::<Max>(), base, shift, &[A::ZERO; BLOCK]);
            shift.iter_mut().for_each(|s| *s = finite(*s));
        }
        self.fold_columns(ops, base, acc, shift);
        for (a, shift) in acc.iter_mut().zip(shift) {
            *a = (ops.finish)(*a, self.reduced.len(), *shift);
        }
    }

    fn fold_columns(&self, ops: &Folds<A>, base: usize, acc: &mut [A], shift: &[A]) {
        acc.fill(ops.empty);
        let mut block = [A::ZERO; BLOCK];
        let block = &mut block[..acc.len()];
        let (_, stride) = self.reduced.inner();
        self.reduced.runs(0..self.reduced.len(), |offset, len| {
            for i in 0..len {
                let from = ((base + offset) as isize + i as isize * stride) as usize;
                (self.kernel.load)(self.kernel.tier, self.data, from, 1, block);
                (ops.columns)(block, acc, shift);
            }
        });
    }
}

/// A maximum to subtract: the sum of exponentials of infinities needs none.
fn finite<A: Number>(max: A) -> A {
    if max.sub(max).is_nan() { A::ZERO } else { max }
}
