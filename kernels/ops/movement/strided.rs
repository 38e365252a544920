//! Ops that are one strided view of their input: Transpose, Expand, Tile.
//! <https://onnx.ai/onnx/operators/onnx__Transpose.html>, <https://onnx.ai/onnx/operators/onnx__Expand.html>,
//! <https://onnx.ai/onnx/operators/onnx__Tile.html>.

use super::cuda::Views;
use super::gather_view;
use crate::cpu::number::MOVABLE;
use crate::cpu::view::{Strides, View};
use crate::cuda::{DeviceKernel, LaunchCx, walk};
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::elementwise::{check_rank, claim_rank};
use abi::{DType, Dim, Result};

/// Transpose, Expand and Tile.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Transpose", (1, 25), claim_transpose, infer_transpose, |cx| {
        Ok(Box::new(Transpose(cx.ints("perm").map(<[i64]>::to_vec))))
    })
    .with_alias(alias_transpose)
    .with_cuda_claim(walk::claim_rank, |cx, device| {
        let transpose = Transpose(cx.ints("perm").map(<[i64]>::to_vec));
        Ok(Box::new(OnCuda { view: transpose, views: Views::new(device)? }))
    }),
    OpDef::new("", "Expand", (8, 13), claim_by_shape, infer_expand, |_| Ok(Box::new(Expand)))
        .with_host_inputs(&[1])
        .with_alias(alias_same_size)
        .with_cuda_claim(walk::claim_rank, |_, device| {
            Ok(Box::new(OnCuda { view: Expand, views: Views::new(device)? }))
        }),
    OpDef::new("", "Tile", (6, 13), claim_by_shape, infer_tile, |_| Ok(Box::new(Tile)))
        .with_host_inputs(&[1])
        .with_alias(alias_same_size)
        .with_cuda_claim(walk::claim_rank, |_, device| Ok(Box::new(OnCuda { view: Tile, views: Views::new(device)? }))),
];

fn claim_transpose(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "data", MOVABLE)?;
    claim_rank(cx)
}

fn infer_transpose(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let data = cx.required(0)?;
    let Some(shape) = &data.shape else {
        let rank = cx.ints("perm").map(<[i64]>::len);
        return Ok(vec![Fact::of(data.dtype, rank.map(|r| vec![Dim::Unknown; r]))]);
    };
    let dims = match cx.ints("perm") {
        None => shape.iter().rev().cloned().collect(),
        Some(perm) => {
            let mut sorted = perm.to_vec();
            sorted.sort_unstable();
            if !sorted.iter().copied().eq(0..shape.len() as i64) {
                let expected = format!("a permutation of the axes of rank {}", shape.len());
                return Err(cx.error("attribute 'perm'", format_args!("{perm:?}"), expected));
            }
            perm.iter().map(|&axis| shape[axis as usize].clone()).collect()
        }
    };
    Ok(vec![Fact::new(data.dtype, dims)])
}

/// Nothing moves when the axes longer than 1 stay in order.
fn alias_transpose(cx: &NodeCx) -> Option<Vec<usize>> {
    let shape = cx.input(0)?.known_shape()?;
    let reversed: Vec<i64> = (0..shape.len() as i64).rev().collect();
    let perm = cx.ints("perm").unwrap_or(&reversed);
    perm.iter().filter(|&&axis| shape[axis as usize] != 1).is_sorted().then(|| vec![0])
}

/// Nothing moves when nothing is repeated.
fn alias_same_size(cx: &NodeCx) -> Option<Vec<usize>> {
    let size = cx.input(0)?.elements()?;
    let out = (OPS.iter().find(|def| def.name == cx.node().op_type)?.infer)(cx).ok()?;
    (out.first()?.elements()? == size).then(|| vec![0])
}

/// An op that is one view.
trait Viewed: Send + Sync {
    /// Lengths and strides of the output's dims, or of finer ones.
    fn dims(&self, shape: &[usize], out: &[usize]) -> Vec<(usize, isize)>;
}

/// A [`Viewed`] op on a device.
struct OnCuda<V> {
    view: V,
    views: Views,
}

impl<V: Viewed> DeviceKernel for OnCuda<V> {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let Some(out) = cx.output(0) else { return Ok(()) };
        self.views.launch(cx, 0, self.view.dims(cx.required(0).shape, out.shape))
    }
}

impl Viewed for Transpose {
    fn dims(&self, shape: &[usize], _: &[usize]) -> Vec<(usize, isize)> {
        let (strides, rank) = (walk::row_major(shape), shape.len());
        let axes = (0..rank).map(|i| self.0.as_ref().map_or(rank - 1 - i, |perm| perm[i] as usize));
        axes.map(|axis| (shape[axis], strides[axis])).collect()
    }
}

impl Viewed for Expand {
    fn dims(&self, shape: &[usize], out: &[usize]) -> Vec<(usize, isize)> {
        out.iter().copied().zip(walk::broadcast_strides(shape, out.len())).collect()
    }
}

impl Viewed for Tile {
    fn dims(&self, shape: &[usize], out: &[usize]) -> Vec<(usize, isize)> {
        let dims = shape.iter().zip(out).zip(walk::row_major(shape));
        dims.flat_map(|((&dim, &out), stride)| [(out / dim.max(1), 0), (dim, stride)]).collect()
    }
}

/// Transpose with its permutation; reversed axes when there is none.
struct Transpose(Option<Vec<i64>>);

impl Kernel for Transpose {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let shape = cx.required(0).shape();
        let strides = Strides::of(shape);
        let rank = shape.len();
        let axes = (0..rank).map(|i| self.0.as_ref().map_or(rank - 1 - i, |perm| perm[i] as usize));
        gather_view(cx, &View::new(0, axes.map(|axis| (shape[axis], strides.get(axis)))));
        Ok(())
    }
}

/// Expand and Tile: data and an int64 vector.
fn claim_by_shape(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(0, "input", MOVABLE)?;
    cx.check_dtype(1, "shape or repeats", &[DType::I64])?;
    claim_rank(cx)
}

/// Input 1's values as dims.
fn dims(cx: &NodeCx) -> Result<Option<Vec<Dim>>> {
    let Some(values) = cx.required(1)?.ints() else {
        return Ok(None);
    };
    let dims = values.iter().map(|&v| usize::try_from(v).ok().map(Dim::Known));
    match dims.collect() {
        Some(dims) => Ok(Some(dims)),
        None => Err(cx.error("input 1", format_args!("{values:?}"), "numbers of 0 or more")),
    }
}

fn infer_expand(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let data = cx.required(0)?;
    let unknown = cx.required(1)?.elements().map(|rank| vec![Dim::Unknown; rank]);
    let (Some(shape), Some(asked)) = (&data.shape, dims(cx)?.or(unknown)) else {
        return Ok(vec![Fact::unranked(data.dtype)]);
    };
    match fact::broadcast(&[shape, &asked]) {
        Some(out) if out.len() <= crate::cpu::view::MAX_RANK => Ok(vec![Fact::new(data.dtype, out)]),
        _ => {
            let expected = format!("a shape that {shape:?} broadcasts with");
            Err(cx.error("input 1 (shape)", format_args!("{asked:?}"), expected))
        }
    }
}

struct Expand;

impl Kernel for Expand {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let Some(out) = cx.outputs.first().and_then(Option::as_ref) else {
            return Ok(());
        };
        gather_view(cx, &View::broadcast(cx.required(0).shape(), out.shape()));
        Ok(())
    }
}

fn infer_tile(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let data = cx.required(0)?;
    let Some(shape) = &data.shape else {
        return Ok(vec![Fact::unranked(data.dtype)]);
    };
    let repeats = dims(cx)?.unwrap_or_else(|| vec![Dim::Unknown; shape.len()]);
    if repeats.len() != shape.len() {
        let expected = format!("a number for each of {} dims", shape.len());
        return Err(cx.error("input 1 (repeats)", format_args!("{} numbers", repeats.len()), expected));
    }
    let dims = shape.iter().zip(&repeats).map(|(d, r)| fact::mul(d, r));
    Ok(vec![Fact::new(data.dtype, dims.collect())])
}

struct Tile;

impl Kernel for Tile {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (shape, repeats) = (cx.required(0).shape(), cx.required(1).slice::<i64>());
        let strides = Strides::of(shape);
        let dims = shape.iter().zip(repeats).enumerate();
        let dims = dims.flat_map(|(i, (&dim, &n))| [(n.max(0) as usize, 0), (dim, strides.get(i))]);
        gather_view(cx, &View::new(0, dims));
        Ok(())
    }
}
