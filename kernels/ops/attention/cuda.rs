//! Attention on CUDA devices: joins past and new rows where asked to, then runs the shared attention kernels. Lengths are
//! read on the device, where values beyond the tensors are clamped.

use super::flash::{Flash, Lengths, MOST_DIM, Mask, Problem, Rows};
use super::shape::Dims;
use super::{Attrs, slot};
use crate::build::BuildCx;
use crate::cuda::{DevPtr, Device, DeviceKernel, DeviceTensor, LaunchCx, linear, suffix};
use crate::kernel_params;
use crate::op::{Decline, NodeCx};
use abi::cuda::Function;
use abi::{DType, Dim, Result};
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct JoinParams {
        past: DevPtr, fresh: DevPtr, to: DevPtr,
        strides: [i64; 3],
        heads: u32, kv_heads: u32, past_rows: u32, rows: u32, dim: u32, pad: u32,
    }
}

struct Sdpa {
    attrs: Attrs,
    flash: Flash,
    join: Function,
    scores: Function,
}

/// Declines head sizes that no kernel takes.
pub(super) fn claim(cx: &NodeCx) -> Result<(), Decline> {
    let attrs = Attrs::parse(cx)?;
    for (s, name, heads) in [(slot::Q, "Q", attrs.q_heads), (slot::V, "V", attrs.kv_heads)] {
        let fact = cx.required(s)?;
        let heads = if fact.rank() == Some(3) { heads.max(1) } else { 1 };
        if let Dim::Known(hidden) = fact.dim(-1)
            && hidden / heads > MOST_DIM
        {
            return Err(cx.decline(
                format_args!("input {s} ({name})"),
                format_args!("a head size of {}", hidden / heads),
                format_args!("at most {MOST_DIM} on a CUDA device"),
            ));
        }
    }
    Ok(())
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let attrs = Attrs::parse(cx).map_err(|d| abi::Error::Internal(d.0))?;
    let flash = Flash::new(cx.required(slot::Q)?.dtype);
    let join = device.function("attention", &format!("join_rows_{}", flash.dtype().bytes(1).unwrap_or(4)))?;
    let scores = device.function("attention", &format!("scores_{}", suffix(flash.dtype())))?;
    Ok(Box::new(Sdpa { attrs, flash, join, scores }))
}

impl DeviceKernel for Sdpa {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let d = Dims::of(&self.attrs, |s| cx.input(s).map(|t| t.shape));
        let k = self.rows(cx, &d, d.head, [slot::K, slot::PAST_KEY, slot::PRESENT_KEY])?;
        let v = self.rows(cx, &d, d.v_head, [slot::V, slot::PAST_VALUE, slot::PRESENT_VALUE])?;
        let lengths = match cx.input(slot::LENGTHS) {
            Some(lengths) => Lengths::counted(lengths.ptr, d.rows, d.keys()),
            None => Lengths::all(d.rows, d.keys(), d.past),
        };
        let out = cx.output(0);
        let problem = Problem {
            q: placed(cx.required(slot::Q).ptr, d.flat, d.q_heads, d.rows, d.head),
            k,
            v,
            out: placed(out.map_or(DevPtr::NULL, |t| t.ptr), d.flat, d.q_heads, d.rows, d.v_head),
            lengths,
            mask: cx.input(slot::MASK).map(|t| mask(&t, d.keys())),
            sink: None,
            batch: d.batch,
            heads: d.q_heads,
            kv_heads: d.kv_heads,
            rows: d.rows,
            keys: d.keys(),
            dim: d.head,
            v_dim: d.v_head,
            left: self.attrs.left,
            right: if self.attrs.causal { Some(0) } else { self.attrs.right },
            scale: self.attrs.scale.unwrap_or(1.0 / (d.head as f32).sqrt()),
            softcap: self.attrs.softcap,
        };
        if let Some(scores) = cx.output(slot::SCORES) {
            Flash::launch_scores(cx, &self.scores, &problem, scores.ptr, self.attrs.stage as u32)?;
        }
        if out.is_none() {
            return Ok(());
        }
        self.flash.launch(cx, &problem)
    }
}

impl Sdpa {
    /// Keys or values as attention reads them, joined where somebody reads the present or there is a past.
    fn rows(&self, cx: &mut LaunchCx<'_>, d: &Dims, head: usize, [new, past, present]: [usize; 3]) -> Result<Rows> {
        let fresh = placed(cx.required(new).ptr, d.flat, d.kv_heads, d.new_keys, head);
        let out = cx.output(present);
        if out.is_none() && d.past == 0 {
            return Ok(fresh);
        }
        let elements = d.batch * d.kv_heads * d.keys() * head;
        let bytes = self.flash.dtype().bytes(elements).unwrap_or(0);
        let to = out.map_or_else(|| cx.scratch(bytes), |t| t.ptr);
        let params = JoinParams {
            past: cx.input_ptr(past),
            fresh: fresh.ptr,
            to,
            strides: fresh.strides.map(|n| n as i64),
            heads: (d.batch * d.kv_heads) as u32,
            kv_heads: d.kv_heads as u32,
            past_rows: d.past as u32,
            rows: d.keys() as u32,
            dim: head as u32,
            pad: 0,
        };
        let blocks = if elements == 0 { 0 } else { (d.batch * d.kv_heads * d.keys()).div_ceil(8).min(1 << 14) };
        cx.push(&self.join, linear(blocks, 256), &params)?;
        Ok(placed(to, false, d.kv_heads, d.keys(), head))
    }
}

/// Rows of `[B, rows, heads * head]` (flat) or `[B, heads, rows, head]`.
fn placed(ptr: DevPtr, flat: bool, heads: usize, rows: usize, head: usize) -> Rows {
    let batch = heads * rows * head;
    let strides = if flat { [batch, head, heads * head] } else { [batch, rows * head, head] };
    Rows { ptr, strides }
}

/// The mask with its strides, broadcast dims 0.
fn mask(tensor: &DeviceTensor<'_>, keys: usize) -> Mask {
    let (mut strides, mut stride) = ([0; 4], 1);
    for (i, &dim) in tensor.shape.iter().rev().enumerate() {
        strides[3 - i] = if dim == 1 { 0 } else { stride };
        stride *= dim;
    }
    let last = tensor.shape.last().copied().unwrap_or(1);
    let [batch, head, row, _] = strides;
    let columns = (last != 1 || keys == 1).then_some(last);
    Mask { ptr: tensor.ptr, strides: [batch, head, row], boolean: tensor.dtype == DType::Bool, columns }
}
