//! Squeeze and Unsqueeze: <https://onnx.ai/onnx/operators/onnx__Squeeze.html>,
//! <https://onnx.ai/onnx/operators/onnx__Unsqueeze.html>. The axes are an attribute before opset 13 and an input since.

use super::reshape::build;
use crate::cpu::number::MOVABLE;
use crate::fact::{self, Fact};
use crate::op::{Decline, NodeCx, OpDef};
use abi::{DType, Dim, Result};

/// Squeeze and Unsqueeze.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Squeeze", (1, 11), claim, infer_squeeze, build).with_view(),
    OpDef::new("", "Squeeze", (13, 25), claim, infer_squeeze, build).with_view().with_host_inputs(&[1]),
    OpDef::new("", "Unsqueeze", (1, 11), claim_unsqueeze, infer_unsqueeze, build).with_view(),
    OpDef::new("", "Unsqueeze", (13, 25), claim_unsqueeze, infer_unsqueeze, build).with_view().with_host_inputs(&[1]),
];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "data", MOVABLE)?;
    cx.check_dtype(1, "axes", &[DType::I64])
}

fn claim_unsqueeze(cx: &NodeCx) -> Result<(), Decline> {
    claim(cx)?;
    if cx.node().since_version >= 13 {
        return cx.check_required(2);
    }
    match cx.ints("axes") {
        Some(_) => Ok(()),
        None => Err(cx.decline("attribute 'axes'", "nothing", "axes")),
    }
}

/// What is known of the axes.
enum Axes {
    /// No axes are given.
    Absent,
    /// Given, but not known yet; how many, if known.
    Unknown(Option<usize>),
    Known(Vec<i64>),
}

fn axes(cx: &NodeCx) -> Axes {
    if cx.node().since_version < 13 {
        return cx.ints("axes").map_or(Axes::Absent, |axes| Axes::Known(axes.to_vec()));
    }
    match cx.input(1) {
        None => Axes::Absent,
        Some(fact) => fact.ints().map_or_else(|| Axes::Unknown(fact.elements()), Axes::Known),
    }
}

/// Which dims of `rank` the axes name, each once.
fn mark(cx: &NodeCx, axes: &[i64], rank: usize) -> Result<Vec<bool>> {
    let mut marked = vec![false; rank];
    for &axis in axes {
        let index = fact::axis(axis, rank);
        match index.filter(|&i| !marked[i]) {
            Some(i) => marked[i] = true,
            None => {
                let expected = format!("distinct axes of rank {rank}");
                return Err(cx.error("axes", format_args!("{axes:?}"), expected));
            }
        }
    }
    Ok(marked)
}

fn infer_squeeze(cx: &NodeCx) -> Result<Vec<Fact>> {
    let data = cx.required(0)?;
    let Some(shape) = &data.shape else {
        return Ok(vec![Fact::unranked(data.dtype)]);
    };
    let marked = match axes(cx) {
        Axes::Unknown(n) => {
            let rank = n.and_then(|n| shape.len().checked_sub(n));
            return Ok(vec![Fact::of(data.dtype, rank.map(|r| vec![Dim::Unknown; r]))]);
        }
        Axes::Known(axes) => mark(cx, &axes, shape.len())?,
        Axes::Absent => {
            if shape.iter().any(|d| d.known().is_none()) {
                return Ok(vec![Fact::unranked(data.dtype)]);
            }
            shape.iter().map(|d| *d == Dim::Known(1)).collect()
        }
    };
    let mut kept = Vec::with_capacity(shape.len());
    for (dim, &gone) in shape.iter().zip(&marked) {
        match dim {
            _ if !gone => kept.push(dim.clone()),
            Dim::Known(n) if *n != 1 => {
                return Err(cx.error("input 0 (data)", format_args!("{shape:?}"), "1 in the dims squeezed"));
            }
            _ => {}
        }
    }
    Ok(vec![Fact::new(data.dtype, kept)])
}

fn infer_unsqueeze(cx: &NodeCx) -> Result<Vec<Fact>> {
    let data = cx.required(0)?;
    let (shape, axes) = match (&data.shape, axes(cx)) {
        (Some(shape), Axes::Known(axes)) => (shape, axes),
        (Some(shape), Axes::Unknown(Some(n))) => {
            return Ok(vec![Fact::new(data.dtype, vec![Dim::Unknown; shape.len() + n])]);
        }
        _ => return Ok(vec![Fact::unranked(data.dtype)]),
    };
    let marked = mark(cx, &axes, shape.len() + axes.len())?;
    let mut dims = shape.iter();
    let dims = marked.iter().map(|&new| if new { Dim::Known(1) } else { dims.next().cloned().unwrap_or(Dim::Unknown) });
    Ok(vec![Fact::new(data.dtype, dims.collect())])
}
