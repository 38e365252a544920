//! One algorithm for every reduction: kept dims are walked in output order; where the innermost kept dim is contiguous,
//! a block of accumulators runs down the reduced dims, else each row is folded on its own. Accumulators are f64, i64
//! or u64, so that long sums lose nothing.

use super::Axes;
use crate::cpu::arithmetic::Number;
use crate::cpu::map::{BLOCK, Task, vectorize};
use crate::cpu::number::{Bool, Stored};
use crate::cpu::view::{Strides, View};
use crate::kernel::{Kernel, RunCx};
use crate::par::SharedMut;
use crate::settings::Tier;
use abi::Result;
use std::marker::PhantomData;

/// A type of computation that widens to an accumulator.
pub trait Accumulate: Stored<C = Self> + Widen<Self::Wide> + Widen<f64> {
    /// The accumulator that loses nothing.
    type Wide: Number;
}

/// To and from an accumulator.
pub trait Widen<A>: Copy {
    /// Exact where `A` is the type's own accumulator.
    fn widen(self) -> A;
    /// Rounds floats, wraps integers.
    fn narrow(a: A) -> Self;
}

macro_rules! accumulate {
    ($($t:ident $wide:ident;)*) => {$(
        impl Accumulate for $t {
            type Wide = $wide;
        }
        accumulate!(@widen $t $wide);
    )*};
    (@widen $t:ident f64) => {
        accumulate!(@one $t f64);
    };
    (@widen $t:ident $wide:ident) => {
        accumulate!(@one $t $wide);
        accumulate!(@one $t f64);
    };
    (@one $t:ident $a:ident) => {
        impl Widen<$a> for $t {
            #[inline(always)]
            fn widen(self) -> $a {
                self as $a
            }
            #[inline(always)]
            fn narrow(a: $a) -> Self {
                a as $t
            }
        }
    };
}
accumulate! {
    f32 f64;
    f64 f64;
    i8 i64;
    i16 i64;
    i32 i64;
    i64 i64;
    u8 u64;
    u16 u64;
    u32 u64;
    u64 u64;
}

macro_rules! accumulate_bool {
    ($($a:ident)*) => {$(
        impl Widen<$a> for Bool {
            #[inline(always)]
            fn widen(self) -> $a {
                self.is_true() as u8 as $a
            }
            #[inline(always)]
            fn narrow(a: $a) -> Self {
                (a >= 1u8 as $a).into()
            }
        }
    )*};
}
accumulate_bool!(u64 f64);

impl Accumulate for Bool {
    type Wide = u64;
}

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

/// The kernel of reduction `O` of `T` in `A`.
pub struct Reducer<O, T, A> {
    axes: Axes,
    tier: Tier,
    kind: PhantomData<fn() -> (O, T, A)>,
}

impl<O, T, A> Reducer<O, T, A> {
    pub(super) fn new(axes: Axes, tier: Tier) -> Self {
        Self { axes, tier, kind: PhantomData }
    }
}

impl<O: Reduce<A>, T: Stored<C: Widen<A>>, A: Number> Kernel for Reducer<O, T, A> {
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
        let walk = Walk::<T> { data: data.slice(), reduced: &reduced, tier: self.tier };
        let shared = SharedMut::new(out.slice::<T>());
        let grain = (1 << 15) / reduced.len().max(1);
        cx.par.ranges(kept.len(), grain.max(1), |range| {
            // SAFETY: the ranges of one loop do not overlap.
            let mut out = unsafe { shared.slice(range.clone()) }.iter_mut();
            let (_, stride) = kept.inner();
            kept.runs(range, |offset, len| {
                if stride == 1 && len > 1 {
                    for start in (0..len).step_by(BLOCK) {
                        let n = (len - start).min(BLOCK);
                        let mut acc = [O::empty(); BLOCK];
                        walk.columns::<O, A>(offset + start, &mut acc[..n]);
                        out.by_ref().zip(&acc[..n]).for_each(|(out, a)| *out = T::store(T::C::narrow(*a)));
                    }
                } else {
                    for i in 0..len {
                        let a = walk.row::<O, A>((offset as isize + i as isize * stride) as usize);
                        out.by_ref().take(1).for_each(|out| *out = T::store(T::C::narrow(a)));
                    }
                }
            });
        });
        Ok(())
    }
}

/// The reduced dims, walked from the elements of the kept ones.
struct Walk<'a, T> {
    data: &'a [T],
    reduced: &'a View,
    tier: Tier,
}

impl<T: Stored> Walk<'_, T> {
    /// The result over the reduced dims from element `base` on.
    fn row<O: Reduce<A>, A: Number>(&self, base: usize) -> A
    where
        T::C: Widen<A>,
    {
        let shift = if O::SHIFTED { finite(self.fold::<Max, A>(base, A::ZERO)) } else { A::ZERO };
        O::finish(self.fold::<O, A>(base, shift), self.reduced.len(), shift)
    }

    fn fold<O: Reduce<A>, A: Number>(&self, base: usize, shift: A) -> A
    where
        T::C: Widen<A>,
    {
        let mut acc = O::empty();
        let mut block = [T::C::default(); BLOCK];
        let (_, stride) = self.reduced.inner();
        self.reduced.runs(0..self.reduced.len(), |offset, len| {
            for start in (0..len).step_by(BLOCK) {
                let n = (len - start).min(BLOCK);
                let from = (base + offset) as isize + start as isize * stride;
                let raw = (stride == 1).then(|| &self.data[from as usize..from as usize + n]);
                let xs = match raw.map(|raw| (T::as_computed(raw), raw)) {
                    Some((Some(xs), _)) => xs,
                    Some((None, raw)) => {
                        T::load_slice(raw, &mut block[..n]);
                        &block[..n]
                    }
                    None => {
                        for (i, x) in block[..n].iter_mut().enumerate() {
                            *x = self.data[(from + i as isize * stride) as usize].load();
                        }
                        &block[..n]
                    }
                };
                let mut lanes = [O::empty(); LANES];
                vectorize(self.tier, Fold::<O, _, A>(xs, &mut lanes, shift, PhantomData));
                acc = lanes.into_iter().fold(acc, O::join);
            }
        });
        acc
    }

    /// The results for neighbouring kept elements from `base` on, into `acc`.
    fn columns<O: Reduce<A>, A: Number>(&self, base: usize, acc: &mut [A])
    where
        T::C: Widen<A>,
    {
        let mut shift = [A::ZERO; BLOCK];
        let shift = &mut shift[..acc.len()];
        if O::SHIFTED {
            shift.fill(Max::empty());
            self.fold_columns::<Max, A>(base, shift, &[A::ZERO; BLOCK]);
            shift.iter_mut().for_each(|s| *s = finite(*s));
        }
        self.fold_columns::<O, A>(base, acc, shift);
        for (a, shift) in acc.iter_mut().zip(shift) {
            *a = O::finish(*a, self.reduced.len(), *shift);
        }
    }

    fn fold_columns<O: Reduce<A>, A: Number>(&self, base: usize, acc: &mut [A], shift: &[A])
    where
        T::C: Widen<A>,
    {
        let mut block = [T::C::default(); BLOCK];
        let (_, stride) = self.reduced.inner();
        self.reduced.runs(0..self.reduced.len(), |offset, len| {
            for i in 0..len {
                let from = ((base + offset) as isize + i as isize * stride) as usize;
                let raw = &self.data[from..from + acc.len()];
                let xs = match T::as_computed(raw) {
                    Some(xs) => xs,
                    None => {
                        T::load_slice(raw, &mut block[..acc.len()]);
                        &block[..acc.len()]
                    }
                };
                vectorize(self.tier, FoldEach::<O, _, A>(xs, acc, shift, PhantomData));
            }
        });
    }
}

/// A maximum to subtract: the sum of exponentials of infinities needs none.
fn finite<A: Number>(max: A) -> A {
    if max.is_nan() || max.sub(max).is_nan() { A::ZERO } else { max }
}

/// Independent partial results of one row.
const LANES: usize = 16;

struct Fold<'a, O, C, A>(&'a [C], &'a mut [A; LANES], A, PhantomData<O>);

impl<O: Reduce<A>, C: Widen<A> + Stored, A: Number> Task for Fold<'_, O, C, A> {
    const SIMD: bool = C::SIMD;
    #[inline(always)]
    fn run(self) {
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        for chunk in chunks {
            for (acc, x) in self.1.iter_mut().zip(chunk) {
                *acc = O::step(*acc, x.widen().sub(self.2));
            }
        }
        for (acc, x) in self.1.iter_mut().zip(rest) {
            *acc = O::step(*acc, x.widen().sub(self.2));
        }
    }
}

struct FoldEach<'a, O, C, A>(&'a [C], &'a mut [A], &'a [A], PhantomData<O>);

impl<O: Reduce<A>, C: Widen<A> + Stored, A: Number> Task for FoldEach<'_, O, C, A> {
    const SIMD: bool = C::SIMD;
    #[inline(always)]
    fn run(self) {
        for ((acc, x), shift) in self.1.iter_mut().zip(self.0).zip(self.2) {
            *acc = O::step(*acc, x.widen().sub(*shift));
        }
    }
}
