//! Gather, GatherElements and GatherND: <https://onnx.ai/onnx/operators/onnx__Gather.html>,
//! <https://onnx.ai/onnx/operators/onnx__GatherElements.html>, <https://onnx.ai/onnx/operators/onnx__GatherND.html>.

mod cpu;
pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use crate::cpu::number::MOVABLE;
use crate::cuda::walk::claim_rank as claim_device_rank;
pub(crate) use cpu::{Indices, NdPlan, element};

use crate::fact::{self, Fact};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::elementwise::{check_rank, claim_rank};
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Gather", (1, 13), claim, infer_gather, |cx| Ok(Box::new(cpu::Gather(cx.int("axis", 0)))))
        .with_cuda(cuda::gather),
    OpDef::new("", "GatherElements", (11, 13), claim, infer_elements, |cx| {
        Ok(Box::new(cpu::GatherElements(cx.int("axis", 0))))
    })
    .with_cuda_claim(claim_device_rank, cuda::elements),
    OpDef::new("", "GatherND", (11, 13), claim_nd, infer_nd, |cx| {
        Ok(Box::new(cpu::GatherNd(cx.int("batch_dims", 0) as usize)))
    })
    .with_cuda_claim(claim_device_rank, cuda::nd),
];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(0, "data", MOVABLE)?;
    cx.check_dtype(1, "indices", &[DType::I64, DType::I32])?;
    claim_rank(cx)
}

fn claim_nd(cx: &NodeCx) -> Result<(), Decline> {
    claim(cx)?;
    cx.check_dtype(1, "indices", &[DType::I64])
}

/// Attribute `axis` in a shape.
pub(crate) fn axis(cx: &NodeCx, shape: &[Dim], default: i64) -> Result<usize> {
    let asked = cx.int("axis", default);
    fact::axis(asked, shape.len())
        .ok_or_else(|| cx.error("attribute 'axis'", asked, format_args!("an axis of rank {}", shape.len())))
}

fn infer_gather(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let (data, indices) = (cx.required(0)?, cx.required(1)?);
    let (Some(shape), Some(by)) = (&data.shape, &indices.shape) else {
        return Ok(vec![Fact::unranked(data.dtype)]);
    };
    let axis = axis(cx, shape, 0)?;
    let dims = shape[..axis].iter().chain(by).chain(&shape[axis + 1..]);
    Ok(vec![Fact::new(data.dtype, dims.cloned().collect())])
}

/// Indices of an `...Elements` op have the data's rank and, but for `axis`, at most its dims.
pub(crate) fn check_elements(cx: &NodeCx, shape: &[Dim], by: &[Dim], axis: usize) -> Result<()> {
    let within = |(i, (d, b)): (usize, (&Dim, &Dim))| i == axis || d.known().zip(b.known()).is_none_or(|(d, b)| b <= d);
    if shape.len() == by.len() && shape.iter().zip(by).enumerate().all(within) {
        return Ok(());
    }
    let expected = format!("{shape:?} or less but for axis {axis}");
    Err(cx.error("input 1 (indices)", format_args!("{by:?}"), expected))
}

fn infer_elements(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let (data, indices) = (cx.required(0)?, cx.required(1)?);
    if let (Some(shape), Some(by)) = (&data.shape, &indices.shape) {
        check_elements(cx, shape, by, axis(cx, shape, 0)?)?;
    }
    Ok(vec![indices.with_dtype(data.dtype)])
}

fn infer_nd(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let (data, indices) = (cx.required(0)?, cx.required(1)?);
    let unknown = Ok(vec![Fact::unranked(data.dtype)]);
    let (Some(shape), Some(by)) = (&data.shape, &indices.shape) else {
        return unknown;
    };
    let batch = cx.int("batch_dims", 0);
    let last = by.len().min(shape.len()) as i64;
    if by.is_empty() || !(0..last).contains(&batch) {
        return Err(cx.error("attribute 'batch_dims'", batch, format_args!("less than {last}, the least rank")));
    }
    let batch = batch as usize;
    let same = shape[..batch].iter().zip(by).all(|(a, b)| fact::unify(a, b).is_some());
    if !same {
        let expected = format!("{shape:?} in the first {batch} dims");
        return Err(cx.error("input 1 (indices)", format_args!("{by:?}"), expected));
    }
    let Some(depth) = by[by.len() - 1].known() else {
        return unknown;
    };
    if depth == 0 || batch + depth > shape.len() {
        let expected = format!("a last dim of 1 to {}", shape.len() - batch);
        return Err(cx.error("input 1 (indices)", format_args!("{by:?}"), expected));
    }
    let dims = by[..by.len() - 1].iter().chain(&shape[batch + depth..]);
    Ok(vec![Fact::new(data.dtype, dims.cloned().collect())])
}
