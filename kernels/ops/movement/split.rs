//! Split: <https://onnx.ai/onnx/operators/onnx__Split.html>. The sizes are an attribute before opset 13 and an input since;
//! opset 18 adds `num_outputs`, whose last piece may be smaller.

use super::Rows;
use super::cuda::Pieces;
use crate::build::BuildCx;
use crate::cpu::number::MOVABLE;
use crate::cuda::number::size;
use crate::cuda::{Device, DeviceKernel, LaunchCx};
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use abi::{DType, Dim, Result};
use smallvec::SmallVec;
use std::sync::Arc;

/// Split.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Split", (2, 11), claim, infer, build).with_alias(alias).with_cuda(build_cuda),
    OpDef::new("", "Split", (13, 18), claim, infer, build)
        .with_host_inputs(&[1])
        .with_alias(alias)
        .with_cuda(build_cuda),
];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "input", MOVABLE)?;
    cx.check_dtype(1, "split", &[DType::I64])
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (input, n) = (cx.required(0)?, cx.node().outputs.len());
    let Some(shape) = &input.shape else {
        return Ok(vec![Fact::unranked(input.dtype); n]);
    };
    let asked = cx.int("axis", 0);
    let Some(axis) = fact::axis(asked, shape.len()) else {
        return Err(cx.error("attribute 'axis'", asked, format_args!("an axis of rank {}", shape.len())));
    };
    let given = cx.ints("split").map(<[i64]>::to_vec);
    let given = given.or_else(|| cx.input(1).and_then(Fact::ints));
    let with_dim = |dim: Dim| {
        let mut shape = shape.clone();
        shape[axis] = dim;
        Fact::new(input.dtype, shape)
    };
    let dim = shape[axis].known();
    if let Some(sizes) = given {
        let valid = sizes.len() == n && sizes.iter().all(|&s| s >= 0);
        let sum = sizes.iter().try_fold(0i64, |sum, &s| sum.checked_add(s));
        if !valid || dim.is_some_and(|d| sum != Some(d as i64)) {
            let expected = format!("{n} sizes that add up to {:?}", shape[axis]);
            return Err(cx.error("split", format_args!("{sizes:?}"), expected));
        }
        return Ok(sizes.iter().map(|&s| with_dim(Dim::Known(s as usize))).collect());
    }
    let Some(dim) = dim.filter(|_| !cx.has_input(1)) else {
        return Ok(vec![with_dim(Dim::Unknown); n]);
    };
    if cx.node().since_version < 18 && dim % n.max(1) != 0 {
        return Err(cx.error("input 0 (input)", dim, format_args!("a multiple of {n} outputs")));
    }
    let asked = cx.int("num_outputs", n as i64);
    if asked != n as i64 || dim.div_ceil(n.max(1)) * n.saturating_sub(1) > dim {
        let expected = format!("{n}, the number of outputs, and a piece of {dim} for each");
        return Err(cx.error("attribute 'num_outputs'", asked, expected));
    }
    Ok((0..n).map(|i| with_dim(Dim::Known(even_piece(dim, n, i)))).collect())
}

/// Nothing moves when the dims before the axis are 1.
fn alias(cx: &NodeCx) -> Option<Vec<usize>> {
    let input = cx.input(0)?;
    let shape = input.known_shape()?;
    let axis = fact::axis(cx.int("axis", 0), shape.len())?;
    if shape[..axis].iter().any(|&d| d != 1) {
        return None;
    }
    let (mut offsets, mut at) = (Vec::new(), 0);
    for piece in infer(cx).ok()? {
        offsets.push(at);
        at += piece.dtype.bytes(piece.elements()?)?;
    }
    Some(offsets)
}

/// Piece `i` of `dim` cut evenly into `n`, where the last may be smaller.
fn even_piece(dim: usize, n: usize, i: usize) -> usize {
    let size = dim.div_ceil(n);
    dim.saturating_sub(i * size).min(size)
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Split {
        axis: cx.int("axis", 0),
        sizes: cx.ints("split").map(<[i64]>::to_vec),
        outputs: cx.node().outputs.len(),
    }))
}

fn build_cuda(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let (axis, outputs) = (cx.int("axis", 0), cx.node().outputs.len());
    Ok(Box::new(CudaSplit {
        axis,
        outputs,
        sizes: cx.ints("split").map(<[i64]>::to_vec),
        pieces: Pieces::new(device)?,
    }))
}

struct CudaSplit {
    axis: i64,
    outputs: usize,
    sizes: Option<Vec<i64>>,
    pieces: Pieces,
}

impl DeviceKernel for CudaSplit {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let input = cx.required(0);
        let axis = fact::axis(self.axis, input.shape.len()).expect("infer has checked the axis");
        let count: usize = input.shape[..axis].iter().product();
        let inner: usize = input.shape[axis + 1..].iter().product();
        let element = size(input.dtype);
        let given = self.sizes.clone().or_else(|| cx.input(1)?.ints());
        let pieces: SmallVec<[_; 16]> = (0..self.outputs)
            .map(|slot| {
                let even = || even_piece(input.shape[axis], self.outputs, slot);
                let size = given.as_ref().map_or_else(even, |sizes| sizes[slot] as usize);
                (cx.output_ptr(slot), size * inner * element)
            })
            .collect();
        self.pieces.launch(cx, (input.ptr, count), &pieces, (element, true))
    }
}

struct Split {
    axis: i64,
    sizes: Option<Vec<i64>>,
    outputs: usize,
}

impl Kernel for Split {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.required(0);
        let shape = input.shape();
        let axis = fact::axis(self.axis, shape.len()).expect("infer has checked the axis");
        let given = self.sizes.as_deref().or(cx.input(1).map(|t| t.slice::<i64>()));
        let count: usize = shape[..axis].iter().product();
        let row = input.bytes().len() / count.max(1);
        let element = row / shape[axis].max(1);
        let mut at = 0;
        for slot in 0..self.outputs {
            let size = given.map_or_else(|| even_piece(shape[axis], self.outputs, slot), |s| s[slot] as usize);
            let len = size * element;
            if let Some(mut out) = cx.output(slot) {
                let rows = Rows { count, len, from: (at, row), to: (0, len) };
                rows.copy(cx.par, input.bytes(), out.bytes());
            }
            at += len;
        }
        Ok(())
    }
}
