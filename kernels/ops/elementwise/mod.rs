//! Elementwise ops of ai.onnx (and their com.microsoft twins), one line an op in the tables of the files below:
//! <https://onnx.ai/onnx/operators/>, <https://onnx.ai/onnx/repo-docs/Broadcasting.html>.

pub mod binary;
mod cuda;
pub mod pow;
pub mod select;
pub mod swiglu;
pub mod unary;
pub mod variadic;

#[cfg(test)]
mod tests;

use crate::cpu::view::MAX_RANK;
use crate::fact::{self, Fact};
use crate::op::{Decline, NodeCx};
use abi::{DType, Result};

/// Elements of cheap work (a few operations each) that are worth a task.
pub(crate) const CHEAP: usize = 1 << 15;
/// The same for work that calls a function on each.
pub(crate) const COSTLY: usize = 1 << 12;

/// Declines unless all inputs are present, of one type of `allowed`, and of a rank that [`crate::cpu::view::View`]
/// takes.
pub(crate) fn claim_same(cx: &NodeCx, least: usize, allowed: &[DType]) -> Result<(), Decline> {
    cx.check_required(least.max(cx.inputs_len()))?;
    cx.check_dtype(0, "A", allowed)?;
    let first = cx.required(0)?.dtype;
    for slot in 0..cx.inputs_len() {
        cx.check_dtype(slot, "operand", &[first])?;
    }
    claim_rank(cx)
}

/// Declines inputs of more than [`MAX_RANK`] dims.
pub(crate) fn claim_rank(cx: &NodeCx) -> Result<(), Decline> {
    Ok(check_rank(cx)?)
}

/// Errors on inputs of more than [`MAX_RANK`] dims.
pub(crate) fn check_rank(cx: &NodeCx) -> Result<()> {
    for slot in 0..cx.inputs_len() {
        let rank = cx.input(slot).and_then(Fact::rank).unwrap_or(0);
        if rank > MAX_RANK {
            let got = format!("rank {rank}");
            return Err(cx.error(format_args!("input {slot}"), got, format_args!("at most {MAX_RANK}")));
        }
    }
    Ok(())
}

/// One output of `dtype` whose shape all inputs broadcast to.
pub(crate) fn infer_broadcast(cx: &NodeCx, dtype: DType) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let mut shapes = Vec::with_capacity(cx.inputs_len());
    for slot in 0..cx.inputs_len() {
        match &cx.required(slot)?.shape {
            Some(shape) => shapes.push(shape.as_slice()),
            None => return Ok(vec![Fact::unranked(dtype)]),
        }
    }
    match fact::broadcast(&shapes) {
        Some(shape) => Ok(vec![Fact::new(dtype, shape)]),
        None => Err(cx.error("inputs", format_args!("shapes {shapes:?}"), "shapes that broadcast")),
    }
}

/// One output like input 0.
pub(crate) fn infer_same(cx: &NodeCx) -> Result<Vec<Fact>> {
    let input = cx.required(0)?;
    Ok(vec![input.with_dtype(input.dtype)])
}

/// One output of input 0's shape and another type.
pub(crate) fn infer_like(cx: &NodeCx, dtype: DType) -> Result<Vec<Fact>> {
    Ok(vec![cx.required(0)?.with_dtype(dtype)])
}
