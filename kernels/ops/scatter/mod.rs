//! ScatterElements (Scatter before opset 11) and ScatterND:
//! <https://onnx.ai/onnx/operators/onnx__ScatterElements.html>, <https://onnx.ai/onnx/operators/onnx__ScatterND.html>.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::arithmetic::Number;
use crate::cpu::map::{words, words_mut};
use crate::cpu::number::{MOVABLE, NUMBERS, Stored};
use crate::cuda::walk;
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::elementwise::{check_rank, claim_rank};
use crate::ops::gather::{Indices, NdPlan, axis, check_elements, element};
use crate::{with_number, with_word};
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Scatter", (9, 9), claim_elements, infer_elements, build)
        .with_cuda_claim(walk::claim_rank, cuda::build),
    OpDef::new("", "ScatterElements", (11, 18), claim_elements, infer_elements, build)
        .with_cuda_claim(walk::claim_rank, cuda::build),
    OpDef::new("", "ScatterND", (11, 18), claim_nd, infer_nd, build).with_cuda_claim(walk::claim_rank, cuda::build),
];

/// What becomes of an element that an update names.
#[derive(Clone, Copy, PartialEq)]
enum Reduction {
    Replace,
    Add,
    Mul,
    Max,
    Min,
}

fn claim(cx: &NodeCx, indices: &[DType]) -> Result<(), Decline> {
    cx.check_required(3)?;
    let reductions = ["none", "add", "mul", "max", "min"];
    cx.check_string("reduction", "none", &reductions)?;
    let replace = reduction(cx) == Reduction::Replace;
    cx.check_dtype(0, "data", if replace { MOVABLE } else { NUMBERS })?;
    cx.check_dtype(1, "indices", indices)?;
    cx.check_dtype(2, "updates", &[cx.required(0)?.dtype])?;
    claim_rank(cx)
}

fn claim_elements(cx: &NodeCx) -> Result<(), Decline> {
    claim(cx, &[DType::I64, DType::I32])
}

fn claim_nd(cx: &NodeCx) -> Result<(), Decline> {
    claim(cx, &[DType::I64])
}

fn reduction(cx: &NodeCx) -> Reduction {
    match cx.string("reduction", "none") {
        "add" => Reduction::Add,
        "mul" => Reduction::Mul,
        "max" => Reduction::Max,
        "min" => Reduction::Min,
        _ => Reduction::Replace,
    }
}

/// Errors unless `got` may be `expected`.
fn check_shape(cx: &NodeCx, slot: &str, got: &[Dim], expected: &[Dim]) -> Result<()> {
    let agree = |(a, b)| fact::unify(a, b).is_some();
    if got.len() == expected.len() && got.iter().zip(expected).all(agree) {
        return Ok(());
    }
    Err(cx.error(slot, format_args!("{got:?}"), format_args!("{expected:?}")))
}

fn infer_elements(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let (data, indices, updates) = (cx.required(0)?, cx.required(1)?, cx.required(2)?);
    if let (Some(by), Some(updates)) = (&indices.shape, &updates.shape) {
        check_shape(cx, "input 2 (updates)", updates, by)?;
    }
    if let (Some(shape), Some(by)) = (&data.shape, &indices.shape) {
        check_elements(cx, shape, by, axis(cx, shape, 0)?)?;
    }
    Ok(vec![data.with_dtype(data.dtype)])
}

fn infer_nd(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let (data, indices, updates) = (cx.required(0)?, cx.required(1)?, cx.required(2)?);
    if let (Some(shape), Some(by)) = (&data.shape, &indices.shape) {
        let Some((last, lead)) = by.split_last() else {
            return Err(cx.error("input 1 (indices)", "a scalar", "rank 1 or more"));
        };
        if let Some(depth) = last.known() {
            if depth == 0 || depth > shape.len() {
                let expected = format!("a last dim of 1 to {}", shape.len());
                return Err(cx.error("input 1 (indices)", format_args!("{by:?}"), expected));
            }
            if let Some(updates) = &updates.shape {
                let expected = [lead, &shape[depth..]].concat();
                check_shape(cx, "input 2 (updates)", updates, &expected)?;
            }
        }
    }
    Ok(vec![data.with_dtype(data.dtype)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let nd = cx.node().op_type == "ScatterND";
    Ok(Box::new(Scatter { axis: (!nd).then(|| cx.int("axis", 0)), reduction: reduction(cx) }))
}

struct Scatter {
    /// ScatterElements' axis; `None` for ScatterND.
    axis: Option<i64>,
    reduction: Reduction,
}

impl Kernel for Scatter {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let dtype = cx.required(0).dtype();
        if self.reduction == Reduction::Replace {
            return with_word!(dtype, W => self.replace::<W>(cx));
        }
        with_number!(dtype, T => self.combine::<T>(cx))
    }
}

impl Scatter {
    fn replace<W: Stored<C = W>>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (data, updates) = (cx.required(0), cx.required(2));
        let Some(mut out) = cx.output(0) else {
            return self.each(cx, |_, _, _| {});
        };
        let (out, updates) = (words_mut::<W>(&mut out), words::<W>(&updates));
        out.copy_from_slice(words::<W>(&data));
        self.each(cx, |to, from, n| out[to..to + n].copy_from_slice(&updates[from..from + n]))
    }

    fn combine<T: Stored<C: Number>>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let f = match self.reduction {
            Reduction::Replace => |_, update| update,
            Reduction::Add => T::C::add,
            Reduction::Mul => T::C::mul,
            Reduction::Max => T::C::larger,
            Reduction::Min => T::C::smaller,
        };
        let (data, updates) = (cx.required(0), cx.required(2));
        let Some(mut out) = cx.output(0) else {
            return self.each(cx, |_, _, _| {});
        };
        let (out, updates) = (out.slice::<T>(), updates.slice::<T>());
        out.copy_from_slice(data.slice::<T>());
        self.each(cx, |to, from, n| {
            for (out, update) in out[to..to + n].iter_mut().zip(&updates[from..from + n]) {
                *out = T::store(f(out.load(), update.load()));
            }
        })
    }

    /// Checks the indices, then calls `f(element of data, element of updates, length)` for every update in order.
    fn each(&self, cx: &RunCx<'_>, mut f: impl FnMut(usize, usize, usize)) -> Result<()> {
        let (data, by) = (cx.required(0), cx.required(1));
        let shape = data.shape();
        let Some(axis) = self.axis else {
            let (plan, indices) = (NdPlan::new(shape, by.shape(), 0), by.slice::<i64>());
            plan.check(cx.label, indices)?;
            (0..plan.rows).for_each(|row| f(plan.offset(indices, row), row * plan.inner, plan.inner));
            return Ok(());
        };
        let axis = fact::axis(axis, shape.len()).expect("infer has checked the axis");
        let indices = Indices::of(&by);
        indices.check(cx.label, shape[axis])?;
        for i in 0..by.len() {
            let index = indices.wrapped(i, shape[axis]);
            f(element(shape, by.shape(), axis, i, index), i, 1);
        }
        Ok(())
    }
}
