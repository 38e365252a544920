//! Direct convolution: every row of the output (its last dim) is built in the type of the computation from scaled rows
//! of the input, one for each channel and kernel element, and rounded once.

use super::Slide;
use crate::cpu::arithmetic::Number;
use crate::cpu::map::{BLOCK, Task, vectorize};
use crate::cpu::number::Stored;
use crate::cpu::view::MAX_RANK;
use crate::kernel::{Kernel, RunCx};
use crate::par::SharedMut;
use crate::settings::Tier;
use abi::Result;
use std::marker::PhantomData;

/// Conv with its attributes.
pub struct Conv<T> {
    /// By spatial dim; the kernel's lengths are those of the run's weights.
    slides: Vec<Slide>,
    group: usize,
    tier: Tier,
    kind: PhantomData<T>,
}

impl<T> Conv<T> {
    pub(super) fn new(slides: Vec<Slide>, group: usize, tier: Tier) -> Self {
        Self { slides, group, tier, kind: PhantomData }
    }
}

impl<T: Stored<C: Number>> Kernel for Conv<T> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (x, w, bias) = (cx.required(0), cx.required(1), cx.input(2));
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        let mut slides = [Slide::default(); MAX_RANK];
        let slides = &mut slides[..self.slides.len()];
        slides.copy_from_slice(&self.slides);
        for (slide, &kernel) in slides.iter_mut().zip(&w.shape()[2..]) {
            slide.kernel = kernel;
        }
        let out_shape = out.shape();
        let mut before = [0; MAX_RANK];
        for ((before, slide), &dim) in before.iter_mut().zip(&*slides).zip(&x.shape()[2..]) {
            *before = slide.over(dim).expect("infer has checked that the kernel fits").0;
        }
        let walk = Walk {
            slides,
            group: self.group,
            tier: self.tier,
            x: x.slice::<T>(),
            x_shape: x.shape(),
            w: w.slice::<T>(),
            per_group: w.shape()[1],
            bias: bias.map(|b| b.slice::<T>()),
            out_shape,
            before: &before,
        };
        let row = *out_shape.last().expect("rank 3 or more");
        let out = SharedMut::new(out.slice::<T>());
        let work = row * walk.per_group * walk.slides.iter().map(|s| s.kernel).product::<usize>();
        cx.par.ranges(out.len() / row, ((1 << 15) / work.max(1)).max(1), |range| {
            for i in range {
                // SAFETY: rows do not overlap, and each is written by one task.
                walk.row(i, unsafe { out.slice(i * row..(i + 1) * row) });
            }
        });
        Ok(())
    }
}

struct Walk<'a, T> {
    slides: &'a [Slide],
    group: usize,
    tier: Tier,
    x: &'a [T],
    x_shape: &'a [usize],
    w: &'a [T],
    /// Input channels of a group.
    per_group: usize,
    bias: Option<&'a [T]>,
    out_shape: &'a [usize],
    /// Zeros before the input, by spatial dim.
    before: &'a [usize; MAX_RANK],
}

impl<T: Stored<C: Number>> Walk<'_, T> {
    /// Row `i` of the output: all positions along the last dim.
    fn row(&self, i: usize, out: &mut [T]) {
        let slides = self.slides;
        let outer = slides.len() - 1;
        let mut at = [0; MAX_RANK];
        let mut rest = i;
        for d in (0..outer).rev() {
            at[d] = rest % self.out_shape[2 + d];
            rest /= self.out_shape[2 + d];
        }
        let maps = self.out_shape[1];
        let (n, m) = (rest / maps, rest % maps);
        let first_channel = m / (maps / self.group) * self.per_group;
        let bias = self.bias.map_or(T::C::ZERO, |b| b[m].load());
        let taps: usize = slides[..outer].iter().map(|s| s.kernel).product();
        for (b, out) in out.chunks_mut(BLOCK).enumerate() {
            let mut acc = [bias; BLOCK];
            let acc = &mut acc[..out.len()];
            for c in 0..self.per_group {
                let channel = n * self.x_shape[1] + first_channel + c;
                for tap in 0..taps {
                    if let Some(row) = self.input_row(channel, tap, &at) {
                        let weights = ((m * self.per_group + c) * taps + tap) * slides[outer].kernel;
                        self.add_row(acc, b * BLOCK, row, weights);
                    }
                }
            }
            T::store_slice(acc, out);
        }
    }

    /// First element of the input row that kernel element `tap` (of all dims but the last) meets for the output row
    /// at `at`; `None` in the padding.
    fn input_row(&self, channel: usize, tap: usize, at: &[usize; MAX_RANK]) -> Option<usize> {
        let slides = self.slides;
        let dims = &self.x_shape[2..];
        let (mut rest, mut row, mut stride) = (tap, 0, 1);
        for d in (0..slides.len() - 1).rev() {
            let k = rest % slides[d].kernel;
            rest /= slides[d].kernel;
            let i = (at[d] * slides[d].stride + k * slides[d].dilation).checked_sub(self.before[d])?;
            if i >= dims[d] {
                return None;
            }
            row += i * stride;
            stride *= dims[d];
        }
        Some((channel * stride + row) * dims[dims.len() - 1])
    }

    /// Adds the last dim's kernel elements, from weight `weights` on, over the input row from `row` on, to the outputs from
    /// position `start` on.
    fn add_row(&self, acc: &mut [T::C], start: usize, row: usize, weights: usize) {
        let last = self.slides.len() - 1;
        let slide = self.slides[last];
        let dim = self.x_shape[2 + last];
        let before = self.before[last];
        let mut block = [T::C::default(); BLOCK];
        for k in 0..slide.kernel {
            let weight = self.w[weights + k].load();
            // Output j reads input j * stride + k * dilation - before, which must be of 0..dim.
            let shift = k * slide.dilation;
            let first = before.saturating_sub(shift).div_ceil(slide.stride).max(start);
            let end = (dim + before).saturating_sub(shift).div_ceil(slide.stride).min(start + acc.len());
            if first >= end {
                continue;
            }
            let from = row + first * slide.stride + shift - before;
            let n = end - first;
            let acc = &mut acc[first - start..end - start];
            let xs = (slide.stride == 1).then(|| &self.x[from..from + n]);
            let xs = match xs.map(|raw| (T::as_computed(raw), raw)) {
                Some((Some(xs), _)) => xs,
                Some((None, raw)) => {
                    T::load_slice(raw, &mut block[..n]);
                    &block[..n]
                }
                None => {
                    for (i, x) in block[..n].iter_mut().enumerate() {
                        *x = self.x[from + i * slide.stride].load();
                    }
                    &block[..n]
                }
            };
            vectorize(self.tier, AddScaled { acc, xs, weight });
        }
    }
}

struct AddScaled<'a, C> {
    acc: &'a mut [C],
    xs: &'a [C],
    weight: C,
}

impl<C: Number> Task for AddScaled<'_, C> {
    const SIMD: bool = C::SIMD;
    #[inline(always)]
    fn run(self) {
        for (acc, x) in self.acc.iter_mut().zip(self.xs) {
            *acc = acc.add(self.weight.mul(*x));
        }
    }
}
