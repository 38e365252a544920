//! ai.onnx MatMul: <https://onnx.ai/onnx/operators/onnx__MatMul.html>, ai.onnx Gemm:
//! <https://onnx.ai/onnx/operators/onnx__Gemm.html>, and com.microsoft FusedMatMul:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.FusedMatMul>.

mod cpu;
mod cuda;
mod exact;
mod problem;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::fact::{self, Fact};
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use abi::{DType, Dim, Result};
use problem::Spec;

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "MatMul", (1, u32::MAX), claim_matmul, infer_matmul, build).with_cuda(cuda::build),
    OpDef::new("com.microsoft", "FusedMatMul", (1, 1), claim_fused, infer_matmul, build).with_cuda(cuda::build),
    OpDef::new("", "Gemm", (7, u32::MAX), claim_gemm, infer_gemm, build).with_cuda(cuda::build),
];

/// Input slots.
const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

const FLOATS: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];
const NUMBERS: [DType; 8] =
    [DType::F32, DType::F16, DType::BF16, DType::F64, DType::I32, DType::U32, DType::I64, DType::U64];

fn claim_matmul(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(A, "A", &NUMBERS)?;
    cx.check_dtype(B, "B", &[cx.required(A)?.dtype])?;
    cx.check_absent(C, "C", "the op has two inputs")
}

fn claim_fused(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(A, "A", &FLOATS)?;
    cx.check_dtype(B, "B", &[cx.required(A)?.dtype])?;
    cx.check_int("transA", 0, &[0, 1])?;
    cx.check_int("transB", 0, &[0, 1])?;
    cx.check_int("transBatchA", 0, &[0])?;
    cx.check_int("transBatchB", 0, &[0])?;
    cx.check_absent(C, "C", "the op has two inputs")
}

fn claim_gemm(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(A, "A", &FLOATS)?;
    let dtype = cx.required(A)?.dtype;
    cx.check_dtype(B, "B", &[dtype])?;
    cx.check_dtype(C, "C", &[dtype])
}

/// The attributes of any of the three ops.
fn spec(cx: &NodeCx) -> Spec {
    let gemm = cx.node().op_type == "Gemm";
    Spec {
        trans_a: cx.int("transA", 0) != 0,
        trans_b: cx.int("transB", 0) != 0,
        alpha: cx.float("alpha", 1.0),
        beta: if gemm { cx.float("beta", 1.0) } else { 0.0 },
    }
}

/// The last two dims of an operand, transposed if asked for; a vector has one row (A) or one column (B).
fn matrix(shape: &[Dim], trans: bool, is_a: bool) -> (Dim, Dim) {
    let one = Dim::Known(1);
    match shape {
        [k] if is_a => (one, k.clone()),
        [k] => (k.clone(), one),
        [.., rows, columns] if trans => (columns.clone(), rows.clone()),
        [.., rows, columns] => (rows.clone(), columns.clone()),
        [] => (one.clone(), one),
    }
}

/// The operands' shapes, when both ranks are known; checks ranks and K.
fn operands<'a>(cx: &NodeCx<'a>, ranks: std::ops::RangeInclusive<usize>) -> Result<Option<(&'a [Dim], &'a [Dim])>> {
    let (Some(a), Some(b)) = (&cx.required(A)?.shape, &cx.required(B)?.shape) else {
        return Ok(None);
    };
    for (slot, shape) in [(A, a), (B, b)] {
        if !ranks.contains(&shape.len()) {
            let expected = format!("a rank of {} to {}", ranks.start(), ranks.end());
            return Err(cx.error(format_args!("input {slot}"), format_args!("shape {shape:?}"), expected));
        }
    }
    let spec = spec(cx);
    let (_, ka) = matrix(a, spec.trans_a, true);
    let (kb, _) = matrix(b, spec.trans_b, false);
    if fact::unify(&ka, &kb).is_none() {
        let got = format!("shape {b:?} (K = {kb:?})");
        return Err(cx.error("input 1 (B)", got, format_args!("K = {ka:?}, as input 0 has it")));
    }
    Ok(Some((a, b)))
}

fn infer_matmul(cx: &NodeCx) -> Result<Vec<Fact>> {
    let dtype = cx.required(A)?.dtype;
    let Some((a, b)) = operands(cx, 1..=problem::MAX_RANK)? else {
        return Ok(vec![Fact::unranked(dtype)]);
    };
    let spec = spec(cx);
    let batch = |shape: &'_ [Dim]| shape[..shape.len().saturating_sub(2)].to_vec();
    let (batch_a, batch_b) = (batch(a), batch(b));
    let Some(mut out) = fact::broadcast(&[&batch_a, &batch_b]) else {
        let expected = format!("batch dims that broadcast with {batch_a:?}");
        return Err(cx.error("input 1 (B)", format_args!("shape {b:?}"), expected));
    };
    if a.len() > 1 {
        out.push(matrix(a, spec.trans_a, true).0);
    }
    if b.len() > 1 {
        out.push(matrix(b, spec.trans_b, false).1);
    }
    Ok(vec![Fact::new(dtype, out)])
}

fn infer_gemm(cx: &NodeCx) -> Result<Vec<Fact>> {
    let dtype = cx.required(A)?.dtype;
    let Some((a, b)) = operands(cx, 2..=2)? else {
        return Ok(vec![Fact::new(dtype, vec![Dim::Unknown; 2])]);
    };
    let spec = spec(cx);
    let out = vec![matrix(a, spec.trans_a, true).0, matrix(b, spec.trans_b, false).1];
    if let Some(c) = cx.input(C).and_then(|f| f.shape.as_ref()) {
        // C may have fewer dims or ones, never more than the output.
        let lead = 2usize.checked_sub(c.len());
        let fits = lead.is_some_and(|lead| {
            c.iter().zip(&out[lead..]).all(|(c, out)| *c == Dim::Known(1) || fact::unify(c, out).is_some())
        });
        if !fits {
            let expected = format!("a shape that broadcasts to {out:?}");
            return Err(cx.error("input 2 (C)", format_args!("shape {c:?}"), expected));
        }
    }
    Ok(vec![Fact::new(dtype, out)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let spec = spec(cx);
    match cx.required(A)?.dtype {
        DType::F32 | DType::F16 | DType::BF16 => cpu::build(cx, spec),
        _ => Ok(Box::new(exact::Product { spec })),
    }
}
