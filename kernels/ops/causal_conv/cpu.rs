//! The depthwise causal convolution on the CPU, in f32.
//!
//! The past state is copied to scratch first, so that the present one may lie in its buffer.

use crate::cpu::convert::{Floats, FloatsMut, narrowed, widened, widened_bytes};
use crate::cpu::isa::{Isa, Job, dispatch};
use crate::cpu::math::silu;
use crate::kernel::{Carver, Kernel, RunCx, Shapes};
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use abi::{DType, Result};
use std::ops::Range;
use std::sync::Arc;

pub struct CausalConv {
    pub tier: Tier,
    pub silu: bool,
    pub channels_last: bool,
    pub dilation: usize,
    /// [C, K], or [K, C] with channels_last; `None` when it comes with each Run.
    pub weight: Option<Arc<Vec<f32>>>,
    /// `[C]`; `None` when absent or when it comes with each Run.
    pub bias: Option<Arc<Vec<f32>>>,
}

/// [K, C] of [C, K].
pub fn transposed(weight: &[f32], channels: usize) -> Vec<f32> {
    let mut to = vec![0.0; weight.len()];
    transpose(weight, channels, &mut to);
    to
}

fn transpose(from: &[f32], channels: usize, to: &mut [f32]) {
    let taps = from.len() / channels.max(1);
    for (c, row) in from.chunks_exact(taps.max(1)).enumerate() {
        for (j, w) in row.iter().enumerate() {
            to[j * channels + c] = *w;
        }
    }
}

/// B, C, T and L.
#[derive(Clone, Copy)]
struct Dims {
    batch: usize,
    channels: usize,
    tokens: usize,
    length: usize,
}

impl CausalConv {
    fn dims(&self, input: &[usize], state: &[usize]) -> Dims {
        if self.channels_last {
            Dims { batch: input[0], tokens: input[1], channels: input[2..].iter().product(), length: state[1] }
        } else {
            Dims { batch: input[0], tokens: input[2], channels: input[1], length: state[2] }
        }
    }

    /// The state's shape: whichever of past and present there is; else what the weight says.
    fn state_shape(&self, past: &[usize], present: &[usize], weight: usize, input: &[usize]) -> [usize; 3] {
        if let Some(shape) = [past, present].into_iter().find(|s| s.len() >= 3) {
            return [shape[0], shape[1], shape[2]];
        }
        let channels: usize = if self.channels_last { input[2..].iter().product() } else { input[1] };
        let length = (weight / channels.max(1)).saturating_sub(1) * self.dilation;
        [input[0], length, length]
    }
}

impl Kernel for CausalConv {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let is_f32 = matches!(shapes.inputs.first(), Some(Some((DType::F32, _))));
        let input = shapes.input(0);
        let weight = self.weight.as_ref().map_or_else(|| shapes.input(1).iter().product(), |weight| weight.len());
        let state = self.state_shape(shapes.input(3), shapes.output(1), weight, input);
        let dims = self.dims(input, &state);
        let elements = input.iter().product();
        Carver::size::<f32>(dims.batch * dims.channels * dims.length)
            + 2 * Carver::size::<f32>(weight)
            + Carver::size::<f32>(dims.channels)
            + widened_bytes(is_f32, elements)
            + widened_bytes(is_f32, elements)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let par = cx.par;
        let input = cx.required(0);
        let mut carver = Carver::new(cx.take_scratch());
        let weight = match &self.weight {
            Some(weight) => weight.as_slice(),
            None => self.weight_of_run(cx, &mut carver),
        };
        let bias = match &self.bias {
            Some(bias) => Some(bias.as_slice()),
            None => cx.input(2).map(|bias| widened(par, bias, &mut carver)),
        };
        let (present, past_input) = (cx.output(1), cx.input(3));
        let past_shape = past_input.map_or(&[][..], |past| past.shape());
        let present_shape = present.as_ref().map_or(&[][..], |present| present.shape());
        let state = self.state_shape(past_shape, present_shape, weight.len(), input.shape());
        let dims = self.dims(input.shape(), &state);
        let past = carver.take::<f32>(dims.batch * dims.channels * dims.length);
        match past_input {
            Some(from) => Floats::of(from).read(0..past.len(), past),
            None => past.fill(0.0),
        }
        let x = widened(par, input, &mut carver);
        let call = Call { dims, dilation: self.dilation, weight, bias, silu: self.silu, past, x };
        if let Some(output) = cx.output(0) {
            if output.dtype() == DType::F32 {
                self.convolve(par, &call, output.into_slice::<f32>());
            } else {
                let wide = carver.take::<f32>(x.len());
                self.convolve(par, &call, wide);
                narrowed(par, wide, output);
            }
        }
        if let Some(present) = present {
            let (rows, width) =
                if self.channels_last { (dims.batch, dims.channels) } else { (dims.batch * dims.channels, 1) };
            call.shift(rows, width, FloatsMut::of(present));
        }
        Ok(())
    }
}

impl CausalConv {
    /// The weight where it is no constant.
    fn weight_of_run<'a>(&self, cx: &RunCx<'a>, carver: &mut Carver<'a>) -> &'a [f32] {
        let tensor = cx.required(1);
        let wide = widened(cx.par, tensor, carver);
        if !self.channels_last {
            return wide;
        }
        let to = carver.take::<f32>(wide.len());
        transpose(wide, tensor.shape()[0], to);
        to
    }

    fn convolve(&self, par: Par<'_>, call: &Call<'_>, out: &mut [f32]) {
        let Dims { batch, channels, tokens, .. } = call.dims;
        let out = SharedMut::new(out);
        if self.channels_last {
            let blocks = channels.div_ceil(BLOCK);
            par.for_each(batch * blocks, |task| {
                let start = task % blocks * BLOCK;
                let channels = start..(start + BLOCK).min(channels);
                let batch = task / blocks;
                dispatch(self.tier, Columns { call, batch, channels, out });
            });
        } else {
            par.ranges(batch * channels, GRAIN / tokens.max(4), |rows| {
                // SAFETY: `ranges` gives disjoint ranges.
                let out = unsafe { out.slice(rows.start * tokens..rows.end * tokens) };
                dispatch(self.tier, Rows { call, rows, out });
            });
        }
    }
}

/// Elements below which another thread is not worth it.
const GRAIN: usize = 4 * 1024;

/// Channels of a task with channels_last: its taps and rows stay in the first-level cache.
const BLOCK: usize = 256;

/// What the loops read.
struct Call<'a> {
    dims: Dims,
    dilation: usize,
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    silu: bool,
    past: &'a [f32],
    x: &'a [f32],
}

impl Call<'_> {
    /// Writes the last L of each of `rows` rows of L past and T new positions of `width` elements.
    fn shift(&self, rows: usize, width: usize, to: FloatsMut<'_>) {
        let (old, new) = (self.dims.length * width, self.dims.tokens * width);
        let kept = old.saturating_sub(new);
        for row in 0..rows {
            let (past, x) = (&self.past[row * old..][..old], &self.x[row * new..][..new]);
            let middle = row * old + kept;
            // SAFETY: nobody else borrows the present state, and the past was copied.
            unsafe {
                to.write(row * old..middle, &past[old - kept..]);
                to.write(middle..(row + 1) * old, &x[new - (old - kept)..]);
            }
        }
    }
}

/// Channels first: rows of one batch and channel.
struct Rows<'a> {
    call: &'a Call<'a>,
    rows: Range<usize>,
    out: &'a mut [f32],
}

impl Job for Rows<'_> {
    type Out = ();

    #[inline(always)]
    fn run<I: Isa>(self) {
        let call = self.call;
        let Dims { channels, tokens, length, .. } = call.dims;
        let taps = call.weight.len() / channels.max(1);
        for (i, row) in self.rows.enumerate() {
            let c = row % channels;
            let weight = &call.weight[c * taps..][..taps];
            let bias = call.bias.map_or(0.0, |bias| bias[c]);
            let past = &call.past[row * length..][..length];
            let x = &call.x[row * tokens..][..tokens];
            let out = &mut self.out[i * tokens..][..tokens];
            if let ([x], [out]) = (x, &mut *out) {
                // One position reads the past but for the last tap.
                let mut sum = bias;
                for (j, w) in weight[..taps - 1].iter().enumerate() {
                    sum = I::fma(*w, past[j * call.dilation], sum);
                }
                *out = I::fma(weight[taps - 1], *x, sum);
                continue;
            }
            out.fill(bias);
            for (j, w) in weight.iter().enumerate() {
                let skip = j * call.dilation;
                let from_past = (length - skip).min(tokens);
                let (early, late) = out.split_at_mut(from_past);
                for (y, x) in early.iter_mut().zip(&past[skip..]) {
                    *y = I::fma(*w, *x, *y);
                }
                for (y, x) in late.iter_mut().zip(&x[(from_past + skip).saturating_sub(length)..]) {
                    *y = I::fma(*w, *x, *y);
                }
            }
        }
        if call.silu {
            self.out.iter_mut().for_each(|y| *y = silu(*y));
        }
    }
}

/// Channels last: some channels of one batch, all positions.
struct Columns<'a> {
    call: &'a Call<'a>,
    batch: usize,
    channels: Range<usize>,
    out: SharedMut<'a, f32>,
}

impl Job for Columns<'_> {
    type Out = ();

    #[inline(always)]
    fn run<I: Isa>(self) {
        let call = self.call;
        let Dims { channels, tokens, length, .. } = call.dims;
        let taps = call.weight.len() / channels.max(1);
        let part = |row: usize| row * channels + self.channels.start..row * channels + self.channels.end;
        for t in 0..tokens {
            // SAFETY: tasks write distinct columns.
            let out = unsafe { self.out.slice(part(self.batch * tokens + t)) };
            match call.bias {
                Some(bias) => out.copy_from_slice(&bias[self.channels.clone()]),
                None => out.fill(0.0),
            }
            for j in 0..taps {
                let at = t + j * call.dilation;
                let x = if at < length {
                    &call.past[part(self.batch * length + at)]
                } else {
                    &call.x[part(self.batch * tokens + at - length)]
                };
                for ((y, x), w) in out.iter_mut().zip(x).zip(&call.weight[part(j)]) {
                    *y = I::fma(*w, *x, *y);
                }
            }
            if call.silu {
                out.iter_mut().for_each(|y| *y = silu(*y));
            }
        }
    }
}
