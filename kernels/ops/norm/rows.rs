//! Normalisation of rows: one engine for RMS, layer and Lp norms of every float format.
//!
//! A row is read in chunks of f32 on the stack, once for each statistic and once to write, so that half
//! formats and sums need no row of scratch.

use crate::cpu::float::Float;
use crate::cpu::isa::{Isa, Job, PARTIALS, dispatch, fold};
use crate::cpu::math::{sigmoid, silu};
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use std::ops::Range;

/// What a row is divided by.
#[derive(Debug, Clone, Copy)]
pub enum Norm {
    /// sqrt(mean(x^2) + epsilon)
    Rms(f32),
    /// The standard deviation, sqrt(var(x) + epsilon), after the mean is subtracted.
    Layer(f32),
    /// sum |x|; a row of zeros stays so.
    L1,
    /// sqrt(sum x^2); a row of zeros stays so.
    L2,
}

/// Where rows come from.
pub trait Source: Sync {
    /// Reads elements `at` of a row. A row is read several times, the first time with `first`.
    fn read(&self, row: usize, at: Range<usize>, first: bool, to: &mut [f32]);
}

/// Where rows go.
pub trait Sink: Sync {
    /// Takes elements `at` of a row, each element once; may use `values` as its scratch.
    fn write(&self, row: usize, at: Range<usize>, values: &mut [f32]);
}

/// One call: `rows` rows of `n` elements.
pub struct Call<'a, S, D> {
    pub norm: Norm,
    pub rows: usize,
    pub n: usize,
    pub source: S,
    /// [n] or [rows, n]; `None`: 1.
    pub scale: Option<&'a [f32]>,
    /// [n] or [rows, n]; `None`: 0.
    pub bias: Option<&'a [f32]>,
    /// `None`: nobody reads the rows.
    pub sink: Option<D>,
    /// Each row's mean (layer norms).
    pub mean: Option<SharedMut<'a, f32>>,
    /// Each row's factor.
    pub inverse: Option<SharedMut<'a, f32>>,
}

/// Elements below which another thread is not worth it.
const GRAIN: usize = 8 * 1024;

impl<S: Source, D: Sink> Call<'_, S, D> {
    /// Runs every row.
    pub fn run(&self, tier: Tier, par: Par<'_>) {
        par.ranges(self.rows, GRAIN / self.n.max(1), |rows| dispatch(tier, RowRange { call: self, rows }));
    }
}

struct RowRange<'a, S, D> {
    call: &'a Call<'a, S, D>,
    rows: Range<usize>,
}

/// Elements of a chunk: some vectors, small beside the first-level cache.
const CHUNK: usize = 512;

impl<S: Source, D: Sink> Job for RowRange<'_, S, D> {
    type Out = ();

    #[inline(always)]
    fn run<I: Isa>(self) {
        let call = self.call;
        for row in self.rows {
            let (mean, inverse) = statistics::<I, S, D>(call, row);
            for (to, value) in [(&call.mean, mean), (&call.inverse, inverse)] {
                if let Some(to) = to {
                    // SAFETY: each row belongs to one range.
                    let one = unsafe { to.slice(row..row + 1) };
                    one[0] = value;
                }
            }
            if let Some(sink) = &call.sink {
                chunks(call, row, false, |at, values| {
                    for x in values.iter_mut() {
                        *x = (*x - mean) * inverse;
                    }
                    apply(call, row, &at, values);
                    sink.write(row, at, values);
                });
            }
        }
    }
}

/// Multiplies by the scale and adds the bias.
#[inline(always)]
fn apply<S, D>(call: &Call<'_, S, D>, row: usize, at: &Range<usize>, values: &mut [f32]) {
    let part = |all: &[f32]| {
        if all.len() == call.n { at.start } else { row * call.n + at.start }
    };
    if let Some(scale) = call.scale {
        for (x, s) in values.iter_mut().zip(&scale[part(scale)..]) {
            *x *= s;
        }
    }
    if let Some(bias) = call.bias {
        for (x, b) in values.iter_mut().zip(&bias[part(bias)..]) {
            *x += b;
        }
    }
}

/// Calls `f` on each chunk of a row.
#[inline(always)]
fn chunks<S: Source, D>(call: &Call<'_, S, D>, row: usize, first: bool, mut f: impl FnMut(Range<usize>, &mut [f32])) {
    let mut buffer = [0f32; CHUNK];
    let mut start = 0;
    while start < call.n {
        let at = start..(start + CHUNK).min(call.n);
        start = at.end;
        let values = &mut buffer[..at.len()];
        call.source.read(row, at.clone(), first, values);
        f(at, values);
    }
}

/// A row's mean (0 but for layer norms) and factor.
#[inline(always)]
fn statistics<I: Isa, S: Source, D>(call: &Call<'_, S, D>, row: usize) -> (f32, f32) {
    let n = call.n as f32;
    match call.norm {
        Norm::Rms(epsilon) => {
            let mean_square = sum::<I, S, D>(call, row, true, |x| x * x) / n;
            (0.0, 1.0 / (mean_square + epsilon).sqrt())
        }
        Norm::Layer(epsilon) => {
            let mean = sum::<I, S, D>(call, row, true, |x| x) / n;
            let variance = sum::<I, S, D>(call, row, false, |x| (x - mean) * (x - mean)) / n;
            (mean, 1.0 / (variance + epsilon).sqrt())
        }
        Norm::L1 => (0.0, inverse_or_zero(sum::<I, S, D>(call, row, true, f32::abs))),
        Norm::L2 => (0.0, inverse_or_zero(sum::<I, S, D>(call, row, true, |x| x * x).sqrt())),
    }
}

/// `1 / norm`, or 0 for a row of zeros.
#[inline(always)]
fn inverse_or_zero(norm: f32) -> f32 {
    if norm == 0.0 { 0.0 } else { 1.0 / norm }
}

/// `sum f(x)` over a row.
#[inline(always)]
fn sum<I: Isa, S: Source, D>(call: &Call<'_, S, D>, row: usize, first: bool, f: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0f32; PARTIALS];
    let mut rest = 0f32;
    chunks(call, row, first, |_, values| {
        let (whole, tail) = values.as_chunks::<PARTIALS>();
        for part in whole {
            for i in 0..PARTIALS {
                sums[i] += f(part[i]);
            }
        }
        for x in tail {
            rest += f(*x);
        }
    });
    fold(sums) + rest
}

/// Rows of a tensor.
pub struct Plain<'a, T> {
    /// [rows, n]
    pub x: &'a [T],
    /// n
    pub n: usize,
}

impl<T: Float> Source for Plain<'_, T> {
    #[inline(always)]
    fn read(&self, row: usize, at: Range<usize>, _: bool, to: &mut [f32]) {
        T::widen(&self.x[row * self.n + at.start..row * self.n + at.end], to);
    }
}

/// Rows rounded to a tensor.
pub struct Rounded<'a, T> {
    /// [rows, n]
    pub y: SharedMut<'a, T>,
    /// n
    pub n: usize,
}

impl<T: Float> Sink for Rounded<'_, T> {
    #[inline(always)]
    fn write(&self, row: usize, at: Range<usize>, values: &mut [f32]) {
        // SAFETY: the engine writes each element once.
        let to = unsafe { self.y.slice(row * self.n + at.start..row * self.n + at.end) };
        T::narrow(values, to);
    }
}

/// Rows multiplied by a gate's activation, then rounded to a tensor.
pub struct Gated<'a, T> {
    /// [rows, n]
    pub gate: &'a [T],
    /// z sigmoid(z), else sigmoid(z).
    pub silu: bool,
    /// The product.
    pub product: Rounded<'a, T>,
}

impl<T: Float> Sink for Gated<'_, T> {
    #[inline(always)]
    fn write(&self, row: usize, at: Range<usize>, values: &mut [f32]) {
        let mut buffer = [0f32; CHUNK];
        let gate = &mut buffer[..values.len()];
        let start = row * self.product.n + at.start;
        T::widen(&self.gate[start..start + gate.len()], gate);
        if self.silu {
            for (x, z) in values.iter_mut().zip(gate) {
                *x *= silu(*z);
            }
        } else {
            for (x, z) in values.iter_mut().zip(gate) {
                *x *= sigmoid(*z);
            }
        }
        self.product.write(row, at, values);
    }
}

/// The sum of two tensors' rows and a bias; writes the sum too where it is read.
pub struct Sum<'a, T> {
    /// [rows, n]
    pub x: &'a [T],
    /// [skip_rows, n], repeated
    pub skip: &'a [T],
    /// Rows of `skip`.
    pub skip_rows: usize,
    /// [n]
    pub bias: Option<&'a [f32]>,
    /// [rows, n], where the sum is read.
    pub sum: Option<SharedMut<'a, T>>,
    /// n
    pub n: usize,
}

impl<T: Float> Source for Sum<'_, T> {
    #[inline(always)]
    fn read(&self, row: usize, at: Range<usize>, first: bool, to: &mut [f32]) {
        let part = |row: usize| row * self.n + at.start..row * self.n + at.end;
        let mut buffer = [0f32; CHUNK];
        let skip = &mut buffer[..to.len()];
        T::widen(&self.x[part(row)], to);
        T::widen(&self.skip[part(row % self.skip_rows)], skip);
        for (x, s) in to.iter_mut().zip(skip) {
            *x += *s;
        }
        if let Some(bias) = self.bias {
            for (x, b) in to.iter_mut().zip(&bias[at.clone()]) {
                *x += *b;
            }
        }
        if let Some(sum) = self.sum.as_ref().filter(|_| first) {
            // SAFETY: each row belongs to one range, and its first reading takes each element once.
            T::narrow(to, unsafe { sum.slice(part(row)) });
        }
    }
}
