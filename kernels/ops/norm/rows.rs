//! Normalisation of rows: one engine for RMS, layer and Lp norms of every float format.
//!
//! A row is read in chunks of f32 on the stack, once for each statistic and once to write, so that half
//! formats and sums need no row of scratch.

use crate::cpu::convert::{Floats, FloatsMut};
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

/// One call: `rows` rows of `n` elements, y = act(gate) (scale norm(x + skip + skip_bias) + bias).
pub struct Call<'a> {
    pub norm: Norm,
    pub rows: usize,
    pub n: usize,
    /// [rows, n]
    pub x: Floats<'a>,
    /// [some rows, n], repeated.
    pub skip: Option<Floats<'a>>,
    /// `[n]`
    pub skip_bias: Option<&'a [f32]>,
    /// [rows, n], takes x + skip + skip_bias.
    pub sum: Option<FloatsMut<'a>>,
    /// `[n]` or [rows, n]; `None`: 1.
    pub scale: Option<&'a [f32]>,
    /// `[n]` or [rows, n]; `None`: 0.
    pub bias: Option<&'a [f32]>,
    /// [rows, n], and its activation.
    pub gate: Option<(Floats<'a>, Activation)>,
    /// [rows, n]; `None`: nobody reads the rows.
    pub y: Option<FloatsMut<'a>>,
    /// Each row's mean (layer norms).
    pub mean: Option<SharedMut<'a, f32>>,
    /// Each row's factor.
    pub inverse: Option<SharedMut<'a, f32>>,
}

/// Of a gate z.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// z sigmoid(z)
    Silu,
    /// sigmoid(z)
    Sigmoid,
}

/// Elements below which another thread is not worth it.
const GRAIN: usize = 8 * 1024;

/// Elements of a chunk: some vectors, small beside the first-level cache.
const CHUNK: usize = 512;

impl<'a> Call<'a> {
    /// Norms of `x`'s rows of `n` elements, with nothing around them.
    pub fn new(norm: Norm, x: Floats<'a>, n: usize, y: Option<FloatsMut<'a>>) -> Self {
        Self {
            norm,
            rows: x.len() / n.max(1),
            n,
            x,
            skip: None,
            skip_bias: None,
            sum: None,
            scale: None,
            bias: None,
            gate: None,
            y,
            mean: None,
            inverse: None,
        }
    }

    /// Runs every row.
    pub fn run(&self, tier: Tier, par: Par<'_>) {
        par.ranges(self.rows, GRAIN / self.n.max(1), |rows| dispatch(tier, RowRange { call: self, rows }));
    }

    /// Reads elements `at` of a row, the sum where there is one; the first reading writes it too.
    #[inline(always)]
    fn read(&self, row: usize, at: &Range<usize>, first: bool, to: &mut [f32]) {
        self.x.read(self.part(row, at), to);
        if let Some(skip) = self.skip {
            let mut buffer = [0f32; CHUNK];
            let values = &mut buffer[..to.len()];
            let skip_rows = skip.len() / self.n;
            skip.read(self.part(row % skip_rows, at), values);
            for (x, s) in to.iter_mut().zip(values) {
                *x += *s;
            }
        }
        if let Some(bias) = self.skip_bias {
            for (x, b) in to.iter_mut().zip(&bias[at.clone()]) {
                *x += *b;
            }
        }
        if let Some(sum) = self.sum.filter(|_| first) {
            // SAFETY: each row belongs to one range.
            unsafe { sum.write(self.part(row, at), to) };
        }
    }

    #[inline(always)]
    fn part(&self, row: usize, at: &Range<usize>) -> Range<usize> {
        row * self.n + at.start..row * self.n + at.end
    }

    /// Multiplies by the scale, adds the bias, multiplies by the gate.
    #[inline(always)]
    fn apply(&self, row: usize, at: &Range<usize>, values: &mut [f32]) {
        let start = |all: &[f32]| if all.len() == self.n { at.start } else { row * self.n + at.start };
        if let Some(scale) = self.scale {
            for (x, s) in values.iter_mut().zip(&scale[start(scale)..]) {
                *x *= s;
            }
        }
        if let Some(bias) = self.bias {
            for (x, b) in values.iter_mut().zip(&bias[start(bias)..]) {
                *x += b;
            }
        }
        let Some((gate, activation)) = self.gate else { return };
        let mut buffer = [0f32; CHUNK];
        let factors = &mut buffer[..values.len()];
        gate.read(self.part(row, at), factors);
        match activation {
            Activation::Silu => factors.iter_mut().for_each(|z| *z = silu(*z)),
            Activation::Sigmoid => factors.iter_mut().for_each(|z| *z = sigmoid(*z)),
        }
        for (x, z) in values.iter_mut().zip(factors) {
            *x *= *z;
        }
    }
}

struct RowRange<'a> {
    call: &'a Call<'a>,
    rows: Range<usize>,
}

impl Job for RowRange<'_> {
    type Out = ();

    #[inline(always)]
    fn run<I: Isa>(self) {
        let call = self.call;
        for row in self.rows {
            let (mean, inverse) = statistics::<I>(call, row);
            for (to, value) in [(&call.mean, mean), (&call.inverse, inverse)] {
                if let Some(to) = to {
                    // SAFETY: each row belongs to one range.
                    let one = unsafe { to.slice(row..row + 1) };
                    one[0] = value;
                }
            }
            let Some(y) = call.y else { continue };
            chunks(call, row, false, |at, values| {
                for x in values.iter_mut() {
                    *x = (*x - mean) * inverse;
                }
                call.apply(row, &at, values);
                // SAFETY: each row belongs to one range.
                unsafe { y.write(call.part(row, &at), values) };
            });
        }
    }
}

/// Calls `f` on each chunk of a row.
#[inline(always)]
fn chunks(call: &Call<'_>, row: usize, first: bool, mut f: impl FnMut(Range<usize>, &mut [f32])) {
    let mut buffer = [0f32; CHUNK];
    let mut start = 0;
    while start < call.n {
        let at = start..(start + CHUNK).min(call.n);
        start = at.end;
        let values = &mut buffer[..at.len()];
        call.read(row, &at, first, values);
        f(at, values);
    }
}

/// A row's mean (0 but for layer norms) and factor.
#[inline(always)]
fn statistics<I: Isa>(call: &Call<'_>, row: usize) -> (f32, f32) {
    let n = call.n as f32;
    let inverse_or_zero = |norm: f32| if norm == 0.0 { 0.0 } else { 1.0 / norm };
    match call.norm {
        Norm::Rms(epsilon) => {
            let squares = sum(call, row, true, |x, sum| I::fma(x, x, sum));
            (0.0, 1.0 / (squares / n + epsilon).sqrt())
        }
        Norm::Layer(epsilon) => {
            let mean = sum(call, row, true, |x, sum| x + sum) / n;
            let squares = sum(call, row, false, |x, sum| I::fma(x - mean, x - mean, sum));
            (mean, 1.0 / (squares / n + epsilon).sqrt())
        }
        Norm::L1 => (0.0, inverse_or_zero(sum(call, row, true, |x, sum| x.abs() + sum))),
        Norm::L2 => (0.0, inverse_or_zero(sum(call, row, true, |x, sum| I::fma(x, x, sum)).sqrt())),
    }
}

/// Folds `add` over a row, in independent partial sums.
#[inline(always)]
fn sum(call: &Call<'_>, row: usize, first: bool, add: impl Fn(f32, f32) -> f32) -> f32 {
    let mut sums = [0f32; PARTIALS];
    let mut rest = 0f32;
    chunks(call, row, first, |_, values| {
        let (whole, tail) = values.as_chunks::<PARTIALS>();
        for part in whole {
            for i in 0..PARTIALS {
                sums[i] = add(part[i], sums[i]);
            }
        }
        for x in tail {
            rest = add(*x, rest);
        }
    });
    fold(sums) + rest
}
