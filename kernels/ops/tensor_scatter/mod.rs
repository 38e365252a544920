//! TensorScatter: <https://onnx.ai/onnx/operators/onnx__TensorScatter.html>. Dims: B batch, T the cache's length, S new
//! positions. Past and present cache may be one buffer.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::number::MOVABLE;
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::gather::axis;
use abi::{DType, Result};

/// The definition.
pub const OPS: &[OpDef] =
    &[OpDef::new("", "TensorScatter", (24, 24), claim, infer, build).with_in_place(&[(0, 0)]).with_cuda(cuda::build)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(0, "past_cache", MOVABLE)?;
    cx.check_dtype(1, "update", &[cx.required(0)?.dtype])?;
    cx.check_dtype(2, "write_indices", &[DType::I64])?;
    cx.check_string("mode", "linear", &["linear", "circular"])
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (cache, update) = (cx.required(0)?, cx.required(1)?);
    let out = Ok(vec![cache.with_dtype(cache.dtype)]);
    let Some(shape) = &cache.shape else {
        return out;
    };
    let axis = axis(cx, shape, -2)?;
    if axis == 0 {
        return Err(cx.error("attribute 'axis'", cx.int("axis", -2), "an axis behind the batch"));
    }
    if let Some(new) = &update.shape {
        let fits = |(i, (t, s)): (usize, (&abi::Dim, &abi::Dim))| match i == axis {
            true => t.known().zip(s.known()).is_none_or(|(t, s)| s <= t),
            false => fact::unify(t, s).is_some(),
        };
        if new.len() != shape.len() || !shape.iter().zip(new).enumerate().all(fits) {
            let expected = format!("{shape:?}, or less along axis {axis}");
            return Err(cx.error("input 1 (update)", format_args!("{new:?}"), expected));
        }
    }
    if let Some(indices) = cx.input(2) {
        let batch = indices.dim(0).known().zip(shape[0].known());
        if indices.rank().is_some_and(|r| r != 1) || batch.is_some_and(|(n, b)| n != b) {
            let got = format!("{:?}", indices.shape);
            return Err(cx.error("input 2 (write_indices)", got, format_args!("[{:?}]", shape[0])));
        }
    }
    out
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(TensorScatter { axis: cx.int("axis", -2), circular: cx.string("mode", "linear") == "circular" }))
}

struct TensorScatter {
    axis: i64,
    circular: bool,
}

impl Kernel for TensorScatter {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (past, update) = (cx.required(0), cx.required(1));
        let starts = cx.input(2).map(|t| t.slice::<i64>());
        let shape = past.shape();
        let axis = fact::axis(self.axis, shape.len()).expect("infer has checked the axis");
        let (total, new) = (shape[axis], update.shape()[axis]);
        let room = if self.circular { total } else { total - new + 1 };
        if let Some(&bad) = starts.unwrap_or(&[]).iter().find(|v| !(0..room as i64).contains(v)) {
            let expected = format!("0 to {}: {new} positions in a cache of {total}", room as i64 - 1);
            return Err(cx.error("input 2 (write_indices)", bad, expected));
        }
        let Some(mut present) = cx.output(0) else {
            return Ok(());
        };
        // One buffer for both: the rest of the cache is there already.
        let shared = std::ptr::eq(past.ptr(), present.ptr());
        let present = present.bytes();
        if !shared {
            present.copy_from_slice(past.bytes());
        }
        let prefixes: usize = shape[..axis].iter().product();
        if prefixes == 0 || new == 0 || present.is_empty() {
            return Ok(());
        }
        let row = present.len() / prefixes / total;
        for (i, from) in update.bytes().chunks_exact(row).enumerate() {
            let (prefix, s) = (i / new, i % new);
            let start = starts.map_or(0, |v| v[prefix / (prefixes / shape[0])]) as usize;
            let at = (prefix * total + (start + s) % total) * row;
            present[at..at + row].copy_from_slice(from);
        }
        Ok(())
    }
}
