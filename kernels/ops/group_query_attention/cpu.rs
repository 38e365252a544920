//! One step: append the new keys and values to the cache, then attend over it.

use super::window::Window;
use super::{Attrs, slot};
use crate::cpu::attention::{Attention, Output, Rows, Sizes};
use crate::cpu::float::Float;
use crate::cpu::rotary::rotate;
use crate::kernel::{Carver, Kernel, RunCx, Shapes, Tensor, TensorMut};
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use crate::with_float;
use abi::{DType, Result};
use std::ops::Range;

pub(super) struct Gqa {
    pub attrs: Attrs,
    pub tier: Tier,
    pub lanes: usize,
}

/// Sizes that shapes decide.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dims {
    /// B.
    pub batch: usize,
    /// S.
    pub rows: usize,
    /// L.
    pub new_rows: usize,
    /// P.
    pub past: usize,
    /// H.
    pub head: usize,
    pub packed: bool,
}

impl Dims {
    pub fn new<'a>(attrs: &Attrs, input: impl Fn(usize) -> Option<&'a [usize]>) -> Self {
        let query = input(slot::QUERY).expect("a required input");
        let key = input(slot::KEY);
        let parts = attrs.heads + if key.is_none() { 2 * attrs.kv_heads } else { 0 };
        Self {
            batch: query[0],
            rows: query[1],
            new_rows: key.map_or(query[1], |k| k[1]),
            past: input(slot::PAST_KEY).map_or(0, |p| p[2]),
            head: query[2] / parts,
            packed: key.is_none(),
        }
    }

    fn sizes(&self, attrs: &Attrs) -> Sizes {
        Sizes {
            batch: self.batch,
            heads: attrs.heads,
            kv_heads: attrs.kv_heads,
            rows: self.rows,
            keys: self.past + self.new_rows,
            dim: self.head,
            v_dim: self.head,
        }
    }

    /// Elements of one cache that holds past and new rows.
    fn staged(&self, attrs: &Attrs) -> usize {
        self.batch * attrs.kv_heads * (self.past + self.new_rows) * self.head
    }
}

impl Kernel for Gqa {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let dims = Dims::new(&self.attrs, |s| shapes.inputs.get(s).copied().flatten().map(|(_, s)| s));
        let staged = [slot::PRESENT_KEY, slot::PRESENT_VALUE]
            .into_iter()
            .filter(|&s| self.attrs.window_cache || shapes.outputs.get(s).copied().flatten().is_none());
        let element = match shapes.inputs[slot::QUERY] {
            Some((DType::F32, _)) => 4,
            _ => 2,
        };
        let rows = Carver::size::<f32>(dims.batch * self.attrs.kv_heads * dims.head);
        rows + staged.count() * Carver::size::<u8>(dims.staged(&self.attrs) * element)
            + dims.sizes(&self.attrs).scratch_bytes(self.lanes)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        with_float!(cx.required(slot::QUERY).dtype(), T => self.step::<T>(cx))
    }
}

/// One Run's inputs and lengths, checked.
pub(super) struct Step<'a, T> {
    attrs: &'a Attrs,
    dims: Dims,
    /// All new tokens, none before them.
    first: bool,
    lengths: &'a [i32],
    window: Option<Window>,
    query: &'a [T],
    cos: Option<Tensor<'a>>,
    sin: Option<Tensor<'a>>,
    positions: Option<Tensor<'a>>,
    q_norm: Option<&'a [T]>,
    k_norm: Option<&'a [T]>,
}

impl<'a, T: Float> Step<'a, T> {
    fn new<'x: 'a>(attrs: &'a Attrs, cx: &RunCx<'x>) -> Result<Self> {
        let dims = Dims::new(attrs, |s| cx.input(s).map(|t| t.shape()));
        let total = cx.required(slot::TOTAL).slice::<i32>()[0];
        let norm = |s: usize| cx.input(s).map(|t| t.slice::<T>());
        let rotary = |s: usize| cx.input(s).filter(|_| attrs.rotary);
        let step = Self {
            attrs,
            dims,
            first: usize::try_from(total) == Ok(dims.rows),
            lengths: cx.required(slot::SEQLENS).slice::<i32>(),
            window: attrs.window_cache.then_some(Window { capacity: dims.past, window: attrs.window }),
            query: cx.required(slot::QUERY).slice::<T>(),
            cos: rotary(slot::COS),
            sin: rotary(slot::SIN),
            positions: rotary(slot::POSITIONS),
            q_norm: norm(slot::Q_NORM),
            k_norm: norm(slot::K_NORM),
        };
        step.check_lengths(cx, usize::try_from(total).unwrap_or(0))?;
        step.check_positions(cx)?;
        Ok(step)
    }

    fn check_lengths(&self, cx: &RunCx<'_>, total: usize) -> Result<()> {
        let d = &self.dims;
        // A windowed cache forgets, so only the caller's total bounds what was ever in it.
        let mut most = if self.window.is_some() { total } else { d.past.max(total) };
        if cx.input(slot::BIAS).is_some() {
            most = most.min(total);
        }
        let least = if self.first { 1 } else { d.rows.max(1) };
        for (b, &length) in self.lengths.iter().enumerate() {
            let tokens = i64::from(length) + 1;
            if tokens < least as i64 || tokens > most as i64 {
                return Err(cx.error(
                    "input 5 (seqlens_k)",
                    format_args!("{length} for batch entry {b}"),
                    format_args!("{} to {}", least as i64 - 1, most as i64 - 1),
                ));
            }
        }
        Ok(())
    }

    fn check_positions(&self, cx: &RunCx<'_>) -> Result<()> {
        let Some(cos) = self.cos else { return Ok(()) };
        let limit = cos.shape()[0];
        let error = |slot: &str, got: i64| {
            Err(cx.error(
                slot,
                format_args!("position {got}"),
                format_args!("0 to {}, the rows of cos_cache", limit as i64 - 1),
            ))
        };
        for b in 0..self.dims.batch {
            for s in 0..self.dims.rows {
                let position = self.position(b, s);
                if position < 0 || position >= limit as i64 {
                    let slot = match self.positions {
                        Some(_) => "input 9 (position_ids)",
                        None => "input 5 (seqlens_k)",
                    };
                    return error(slot, position);
                }
            }
        }
        Ok(())
    }

    /// T.
    fn tokens(&self, b: usize) -> usize {
        self.lengths[b] as usize + 1
    }

    /// Position of the first query row.
    fn before(&self, b: usize) -> usize {
        if self.first { 0 } else { self.tokens(b) - self.dims.rows }
    }

    /// Past rows that stay, at the front of the cache.
    fn kept(&self, b: usize) -> usize {
        let before = if self.dims.new_rows == 0 { self.tokens(b) } else { self.before(b) };
        self.window.map_or(before, |w| w.resident(before))
    }

    /// Position of the cache's first row.
    fn base(&self, b: usize) -> usize {
        let before = if self.dims.new_rows == 0 { self.tokens(b) } else { self.before(b) };
        before - self.kept(b)
    }

    /// Where row `s` is rotated to.
    fn position(&self, b: usize, s: usize) -> i64 {
        match self.positions {
            None => (self.before(b) + s) as i64,
            // ORT reads one number only for a first prompt.
            Some(ids) if self.first => ids.slice::<i64>()[0].saturating_add(s as i64),
            Some(ids) => ids.slice::<i64>()[b * ids.shape()[1] + s],
        }
    }

    /// Cache rows that query row `s` sees.
    fn visible(&self, b: usize, s: usize) -> Range<usize> {
        let (tokens, base) = (self.tokens(b), self.base(b));
        let here = self.before(b) + s + 1;
        let end = if self.attrs.causal { here.min(tokens) } else { tokens };
        let start = match self.attrs.window {
            0 => 0,
            w => here.saturating_sub(w),
        };
        start.max(base) - base..end.max(base) - base
    }

    /// RMS normalisation, then rotation.
    fn prepare(&self, row: &mut [f32], weight: Option<&[T]>, epsilon: f32, b: usize, s: usize) {
        if let Some(weight) = weight {
            let square = row.iter().map(|v| v * v).sum::<f32>() / row.len() as f32;
            let by = 1.0 / (square + epsilon).sqrt();
            row.iter_mut().zip(weight).for_each(|(v, w)| *v = *v * by * w.to_f32());
        }
        if let (Some(cos), Some(sin)) = (self.cos, self.sin) {
            let half = cos.shape()[1];
            let at = self.position(b, s) as usize * half;
            let (cos, sin) = (&cos.slice::<T>()[at..at + half], &sin.slice::<T>()[at..at + half]);
            rotate(row, cos, sin, self.attrs.pairs);
        }
    }

    fn load_query(&self, b: usize, head: usize, s: usize, row: &mut [f32]) {
        let (d, a) = (&self.dims, self.attrs);
        let parts = a.heads + if d.packed { 2 * a.kv_heads } else { 0 };
        let at = ((b * d.rows + s) * parts + head) * d.head;
        T::widen(&self.query[at..at + d.head], row);
        self.prepare(row, self.q_norm, a.q_epsilon, b, s);
    }
}

/// A cache being written: `[B, K, rows, H]`.
struct Cache<'a, T> {
    data: &'a mut [T],
    rows: usize,
    /// The past is this very buffer.
    aliased: bool,
}

impl<'a, T: Float> Cache<'a, T> {
    fn output(out: TensorMut<'a>, past: Option<Tensor<'a>>) -> Self {
        let rows = out.shape()[2];
        let aliased = past.is_some_and(|p| p.ptr() == out.ptr() && !p.is_empty());
        Self { data: out.into_slice(), rows, aliased }
    }
}

impl<T: Float> Step<'_, T> {
    /// Fills one cache: what stays of the past, the new rows, zeros behind.
    fn append(&self, cx: &RunCx<'_>, key: bool, past: Option<Tensor<'_>>, cache: &mut Cache<'_, T>, rows: &mut [f32]) {
        let (d, a) = (&self.dims, self.attrs);
        let chunk = cache.rows * d.head;
        if chunk == 0 {
            return;
        }
        let source = match (d.packed, key) {
            (true, _) => self.query,
            (false, true) => cx.required(slot::KEY).slice::<T>(),
            (false, false) => cx.required(slot::VALUE).slice::<T>(),
        };
        let (parts, first) = match (d.packed, key) {
            (false, _) => (a.kv_heads, 0),
            (true, true) => (a.heads + 2 * a.kv_heads, a.heads),
            (true, false) => (a.heads + 2 * a.kv_heads, a.heads + a.kv_heads),
        };
        // Not read where it is the buffer being written.
        let past = past.filter(|p| !cache.aliased && !p.is_empty()).map(|p| p.slice::<T>());
        let moved = if cache.aliased { d.new_rows * d.head } else { chunk };
        let par = if d.batch * a.kv_heads * moved * size_of::<T>() < 1 << 17 { Par::serial() } else { cx.par };
        let rows = SharedMut::new(rows);
        let plain = !key || (self.k_norm.is_none() && self.cos.is_none());
        let aliased = cache.aliased;
        par.chunks_mut(cache.data, chunk, |i, to| {
            let (b, head) = (i / a.kv_heads, i % a.kv_heads);
            let kept = self.kept(b) * d.head;
            let end = kept + d.new_rows * d.head;
            if !aliased {
                if let Some(past) = past {
                    let from = &past[i * d.past * d.head..];
                    to[..kept].copy_from_slice(&from[..kept]);
                }
                to[end..].fill(T::from_f32(0.0));
            }
            // SAFETY: one piece a chunk.
            let row = unsafe { rows.slice(i * d.head..(i + 1) * d.head) };
            for (s, to) in to[kept..end].chunks_exact_mut(d.head).enumerate() {
                let at = ((b * d.new_rows + s) * parts + first + head) * d.head;
                let from = &source[at..at + d.head];
                if plain {
                    to.copy_from_slice(from);
                    continue;
                }
                T::widen(from, row);
                self.prepare(row, self.k_norm, a.k_epsilon, b, s);
                T::narrow(row, to);
            }
        });
    }
}

impl Gqa {
    fn step<T: Float>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let step = Step::<T>::new(&self.attrs, cx)?;
        let (d, a) = (step.dims, &self.attrs);
        let mut carver = Carver::new(cx.take_scratch());
        let rows = carver.take::<f32>(d.batch * a.kv_heads * d.head);
        let mut caches =
            [(slot::PRESENT_KEY, slot::PAST_KEY), (slot::PRESENT_VALUE, slot::PAST_VALUE)].map(|(present, past)| {
                let past = cx.input(past);
                let out = cx.output(present);
                let (out, kept) = if a.window_cache { (None, out) } else { (out, None) };
                let cache = match out {
                    Some(out) => Cache::<T>::output(out, past),
                    None => Cache { data: carver.take::<T>(d.staged(a)), rows: d.past + d.new_rows, aliased: false },
                };
                (cache, past, kept)
            });
        for (i, (cache, past, _)) in caches.iter_mut().enumerate() {
            step.append(cx, i == 0, *past, cache, rows);
        }
        if let Some(out) = cx.output(0) {
            let [(key, ..), (value, ..)] = &caches;
            self.attend(cx, &step, [key, value], out, carver.rest());
        }
        for (cache, _, out) in caches {
            if let (Some(window), Some(out)) = (step.window, out) {
                window.keep(cache.data, cache.rows, out.into_slice(), d.head, |i| {
                    let b = i / a.kv_heads;
                    (step.kept(b) + d.new_rows, step.tokens(b))
                });
            }
        }
        Ok(())
    }

    fn attend<T: Float>(
        &self,
        cx: &RunCx<'_>,
        step: &Step<'_, T>,
        [key, value]: [&Cache<'_, T>; 2],
        out: TensorMut<'_>,
        scratch: &mut [u8],
    ) {
        let (d, a) = (step.dims, &self.attrs);
        fn rows<'c, T>(cache: &'c Cache<'_, T>, heads: usize, head: usize) -> Rows<'c, T> {
            Rows { data: cache.data, batch: heads * cache.rows * head, head: cache.rows * head, row: head }
        }
        let sink_input = cx.input(slot::SINK).map(|t| t.slice::<T>());
        let sink = |head: usize| sink_input.map_or(0.0, |s| s[head].to_f32());
        let bias_input = cx.input(slot::BIAS);
        let add_bias = |b: usize, head: usize, s: usize, keys: Range<usize>, scores: &mut [f32]| {
            let Some(bias) = bias_input else { return };
            let &[batch, heads, rows, total] = bias.shape() else {
                return;
            };
            let b_index = if batch == 1 { 0 } else { b };
            let head = if heads == 1 { 0 } else { head };
            let at = ((b_index * heads + head) * rows + s) * total + step.base(b);
            let bias = &bias.slice::<T>()[at + keys.start..at + keys.end];
            scores.iter_mut().zip(bias).for_each(|(v, b)| *v += b.to_f32());
        };
        let attention = Attention {
            sizes: d.sizes(a),
            longest: (0..d.batch).map(|b| step.tokens(b)).max().unwrap_or(0),
            keys: rows(key, a.kv_heads, d.head),
            values: rows(value, a.kv_heads, d.head),
            scale: if a.scale == 0.0 { 1.0 / (d.head as f32).sqrt() } else { a.scale },
            softcap: a.softcap,
            load_query: &|b, head, s, row| step.load_query(b, head, s, row),
            visible: &|b, s| step.visible(b, s),
            bias: bias_input.is_some().then_some(&add_bias),
            sink: (a.smooth || sink_input.is_some()).then_some(&sink),
        };
        let out =
            Output { data: out.into_slice(), batch: d.rows * a.heads * d.head, head: d.head, row: a.heads * d.head };
        attention.run(out, self.tier, self.lanes, cx.par, scratch);
    }
}
