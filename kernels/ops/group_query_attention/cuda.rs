//! GroupQueryAttention on CUDA devices: one kernel prepares queries and keys and appends to the cache, then attention runs
//! over it. Lengths and positions are read on the device, where values beyond the tensors are clamped.

use super::cpu::Dims;
use super::{Attrs, slot};
use crate::build::BuildCx;
use crate::cpu::rotary::Pairs;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, linear, suffix};
use crate::kernel_params;
use crate::op::{Decline, NodeCx};
use crate::ops::attention::flash::{Flash, Lengths, MOST_DIM, Mask, Problem, Rows};
use abi::cuda::Function;
use abi::{Dim, Result};
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct PrepareParams {
        query: DevPtr, key: DevPtr, value: DevPtr, past_key: DevPtr, past_value: DevPtr,
        keys: DevPtr, values: DevPtr, queries: DevPtr,
        cos: DevPtr, sin: DevPtr, positions: DevPtr, q_norm: DevPtr, k_norm: DevPtr,
        length_data: DevPtr, total: DevPtr, lengths: [u32; 8],
        query_row: i64, key_row: i64,
        batch: u32, heads: u32, kv_heads: u32, dim: u32, half: u32, interleaved: u32, positions_row: u32, angles: u32,
        row_blocks: u32, pieces: u32,
        q_epsilon: f32, k_epsilon: f32,
    }
}
kernel_params! {
    /// As in `cuda.cu`.
    struct ForgetParams {
        staged: DevPtr, cache: DevPtr,
        length_data: DevPtr, total: DevPtr, lengths: [u32; 8],
        kv_heads: u32, dim: u32,
    }
}

struct Gqa {
    attrs: Attrs,
    flash: Flash,
    prepare: Function,
    forget: Function,
}

/// Declines head sizes that no kernel takes.
pub(super) fn claim(cx: &NodeCx) -> Result<(), Decline> {
    let attrs = Attrs::parse(cx)?;
    let parts = attrs.heads + if cx.has_input(slot::KEY) { 0 } else { 2 * attrs.kv_heads };
    match cx.required(slot::QUERY)?.dim(2) {
        Dim::Known(hidden) if hidden / parts > MOST_DIM => Err(cx.decline(
            "input 0 (query)",
            format_args!("a head size of {}", hidden / parts),
            format_args!("at most {MOST_DIM} on a CUDA device"),
        )),
        _ => Ok(()),
    }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let attrs = Attrs::parse(cx).map_err(|d| abi::Error::Internal(d.0))?;
    let flash = Flash::new(cx.required(slot::QUERY)?.dtype);
    let image = "group_query_attention";
    let prepare = device.function(image, &format!("prepare_{}", suffix(flash.dtype())))?;
    let forget = device.function(image, &format!("forget_{}", flash.dtype().bytes(1).unwrap_or(4)))?;
    Ok(Box::new(Gqa { attrs, flash, prepare, forget }))
}

/// The cache that attention reads.
struct Cache {
    keys: DevPtr,
    values: DevPtr,
    /// T.
    rows: usize,
    lengths: Lengths,
}

impl DeviceKernel for Gqa {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let d = Dims::new(&self.attrs, |s| cx.input(s).map(|t| t.shape));
        if d.batch == 0 || d.head == 0 {
            return Ok(());
        }
        let cache = self.cache(cx, &d);
        let queries = self.prepare(cx, &d, &cache)?;
        self.attend(cx, &d, &cache, queries)?;
        if self.attrs.window_cache {
            self.forget(cx, &d, &cache)?;
        }
        Ok(())
    }
}

impl Gqa {
    fn cache(&self, cx: &mut LaunchCx<'_>, d: &Dims) -> Cache {
        let a = &self.attrs;
        let outputs = [slot::PRESENT_KEY, slot::PRESENT_VALUE].map(|s| cx.output(s).filter(|_| !a.window_cache));
        let rows = outputs.iter().flatten().map(|t| t.shape[2]).next().unwrap_or(d.past + d.new_rows);
        let bytes = self.flash.dtype().bytes(d.batch * a.kv_heads * rows * d.head).unwrap_or(0);
        let [keys, values] = outputs.map(|t| t.map_or_else(|| cx.scratch(bytes), |t| t.ptr));
        let total = cx.required(slot::TOTAL);
        let first = match total.ints().as_deref() {
            Some(&[total]) => u32::from(usize::try_from(total) == Ok(d.rows)),
            _ => 2,
        };
        let [capacity, window] = if a.window_cache { [d.past, a.window] } else { [0, 0] };
        let sizes = [1, d.rows, d.new_rows, rows, d.past, capacity, window].map(|n| n as u32);
        let [kind, s, l, t, p, capacity, window] = sizes;
        let total = if first == 2 { total.ptr } else { DevPtr::NULL };
        let sizes = [kind, s, l, t, p, capacity, window, first];
        Cache { keys, values, rows, lengths: Lengths { data: cx.input_ptr(slot::SEQLENS), total, sizes } }
    }

    /// Appends to the cache; gives the queries that attention reads.
    fn prepare(&self, cx: &mut LaunchCx<'_>, d: &Dims, cache: &Cache) -> Result<Rows> {
        let a = &self.attrs;
        let size = |n: usize| self.flash.dtype().bytes(n).unwrap_or(0);
        let parts = a.heads + if d.packed { 2 * a.kv_heads } else { 0 };
        let query = cx.required(slot::QUERY).ptr;
        let row = parts * d.head;
        let (key, value, key_row) = if d.packed {
            (query.plus(size(a.heads * d.head)), query.plus(size((a.heads + a.kv_heads) * d.head)), row)
        } else {
            (cx.input_ptr(slot::KEY), cx.input_ptr(slot::VALUE), a.kv_heads * d.head)
        };
        let cos = cx.input(slot::COS).filter(|_| a.rotary);
        let plain = cos.is_none() && cx.input(slot::Q_NORM).is_none();
        let queries = if plain { DevPtr::NULL } else { cx.scratch(size(d.batch * d.rows * a.heads * d.head)) };
        let units = if plain { 0 } else { a.heads } + if d.new_rows > 0 { 2 * a.kv_heads } else { 0 };
        let row_blocks = (d.batch * d.rows * units).div_ceil(8);
        // The past may be the very buffer: such blocks end at once, so few of them.
        let heads = d.batch * a.kv_heads;
        let most = (4 * cx.device().multiprocessors() as usize).div_ceil(heads);
        let pieces = if cache.rows == 0 { 0 } else { size(cache.rows * d.head).div_ceil(32 << 10).min(most) };
        let rotary = |s: usize| if cos.is_some() { cx.input_ptr(s) } else { DevPtr::NULL };
        let positions = cx.input(slot::POSITIONS).filter(|_| cos.is_some());
        let params = PrepareParams {
            query,
            key,
            value,
            past_key: cx.input_ptr(slot::PAST_KEY),
            past_value: cx.input_ptr(slot::PAST_VALUE),
            keys: cache.keys,
            values: cache.values,
            queries,
            cos: rotary(slot::COS),
            sin: rotary(slot::SIN),
            positions: positions.map_or(DevPtr::NULL, |t| t.ptr),
            q_norm: cx.input_ptr(slot::Q_NORM),
            k_norm: cx.input_ptr(slot::K_NORM),
            length_data: cache.lengths.data,
            total: cache.lengths.total,
            lengths: cache.lengths.sizes,
            query_row: row as i64,
            key_row: key_row as i64,
            batch: d.batch as u32,
            heads: a.heads as u32,
            kv_heads: a.kv_heads as u32,
            dim: d.head as u32,
            half: cos.map_or(0, |t| t.shape[1] as u32),
            interleaved: u32::from(a.pairs == Pairs::Interleaved),
            positions_row: positions.map_or(0, |t| t.shape[1] as u32),
            angles: cos.map_or(0, |t| t.shape[0] as u32),
            row_blocks: row_blocks as u32,
            pieces: pieces as u32,
            q_epsilon: a.q_epsilon,
            k_epsilon: a.k_epsilon,
        };
        cx.push(&self.prepare, linear(row_blocks + heads * pieces, 256), &params)?;
        let (ptr, row) = if plain { (query, row) } else { (queries, a.heads * d.head) };
        Ok(Rows { ptr, strides: [d.rows * row, d.head, row] })
    }

    fn attend(&self, cx: &mut LaunchCx<'_>, d: &Dims, cache: &Cache, q: Rows) -> Result<()> {
        let Some(out) = cx.output(0) else { return Ok(()) };
        let a = &self.attrs;
        let rows = |ptr| Rows { ptr, strides: [a.kv_heads * cache.rows * d.head, cache.rows * d.head, d.head] };
        let mask = cx.input(slot::BIAS).map(|t| {
            let (batch, heads, columns) = (t.shape[0], t.shape[1], t.shape[3]);
            let row = columns;
            let head = if heads == 1 { 0 } else { d.rows * row };
            let batch = if batch == 1 { 0 } else { heads * d.rows * row };
            Mask { ptr: t.ptr, strides: [batch, head, row], boolean: false, columns: Some(columns) }
        });
        let sink = cx.input(slot::SINK).map(|t| t.ptr);
        let row = a.heads * d.head;
        let problem = Problem {
            q,
            k: rows(cache.keys),
            v: rows(cache.values),
            out: Rows { ptr: out.ptr, strides: [d.rows * row, d.head, row] },
            lengths: cache.lengths,
            mask,
            sink: if a.smooth { Some(sink.unwrap_or(DevPtr::NULL)) } else { sink },
            batch: d.batch,
            heads: a.heads,
            kv_heads: a.kv_heads,
            rows: d.rows,
            keys: cache.rows,
            dim: d.head,
            v_dim: d.head,
            left: a.window.checked_sub(1),
            right: a.causal.then_some(0),
            scale: if a.scale == 0.0 { 1.0 / (d.head as f32).sqrt() } else { a.scale },
            softcap: a.softcap,
        };
        self.flash.launch(cx, &problem)
    }

    /// Moves what stays of a cache that holds the window only.
    fn forget(&self, cx: &mut LaunchCx<'_>, d: &Dims, cache: &Cache) -> Result<()> {
        for (s, staged) in [(slot::PRESENT_KEY, cache.keys), (slot::PRESENT_VALUE, cache.values)] {
            let Some(out) = cx.output(s) else { continue };
            let heads = d.batch * self.attrs.kv_heads;
            let params = ForgetParams {
                staged,
                cache: out.ptr,
                length_data: cache.lengths.data,
                total: cache.lengths.total,
                lengths: cache.lengths.sizes,
                kv_heads: self.attrs.kv_heads as u32,
                dim: d.head as u32,
            };
            let mut shape = linear(heads, 256);
            shape.grid[1] = (d.past * d.head).div_ceil(4096).clamp(1, 64) as u32;
            cx.push(&self.forget, shape, &params)?;
        }
        Ok(())
    }
}
