//! Reductions on CUDA devices: a warp or a block a row, or neighbouring lanes for neighbouring results.

use super::Axes;
use crate::build::BuildCx;
use crate::cpu::number::FLOATS;
use crate::cuda::number::{code, size};
use crate::cuda::walk::{MAX_RANK, THREADS, Walk, row_major};
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, linear, suffix};
use crate::kernel_params;
use abi::cuda::Function;
use abi::{DType, Result};
use std::sync::Arc;

/// `ReduceCode` of `cuda.cu`.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Op {
    Sum,
    Mean,
    Prod,
    Max,
    Min,
    L1,
    SumSquare,
    L2,
    LogSum,
    LogSumExp,
}

/// `ReduceShape` of `cuda.cu`.
enum Shape {
    WarpRows,
    BlockRows,
    Columns,
}

kernel_params! {
    /// As in `cuda.cu`.
    struct ReduceParams {
        x: DevPtr, y: DevPtr, kept: u64, n: u64, kept_walk: Walk<1>, reduced_walk: Walk<1>,
        op: u32, dtype: u32, shape: u32, vector: u32,
    }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>, op: Op) -> Result<Box<dyn DeviceKernel>> {
    let dtype = cx.required(0)?.dtype;
    let name = if FLOATS.contains(&dtype) {
        format!("reduce_{}", suffix(dtype))
    } else if matches!(op, Op::L2 | Op::LogSum | Op::LogSumExp) {
        // The result is not a whole number even for integers.
        "reduce_as_f64".into()
    } else if matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64) {
        "reduce_signed".into()
    } else {
        "reduce_unsigned".into()
    };
    Ok(Box::new(Reduce { function: device.function("reduce", &name)?, op, axes: Axes::of(cx) }))
}

struct Reduce {
    function: Function,
    op: Op,
    axes: Axes,
}

const WARP: usize = 32;
const WARPS: usize = THREADS / WARP;
/// Elements of a row that keep a block busy.
const LONG_ROW: usize = 1024;
/// Elements that go into a result, from which on several warps share it.
const LONG_COLUMN: usize = 16;

impl DeviceKernel for Reduce {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let data = cx.required(0);
        let axes = cx.input(1).and_then(|t| t.ints());
        let mask = self.axes.mask(axes.as_deref(), data.shape.len());
        let mask = mask.map_err(|axis| cx.error("axes", axis, format_args!("axes of rank {}", data.shape.len())))?;
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let strides = row_major(data.shape);
        let walk = |reduced: bool| {
            let dims = data.shape.iter().zip(&strides).enumerate();
            let dims = dims.filter(|(d, _)| (mask >> d & 1 == 1) == reduced);
            let walk = Walk::<1>::new(dims.map(|(_, (&dim, &stride))| (dim, [stride])));
            walk.ok_or_else(|| {
                cx.error("input 0", format_args!("{:?}", data.shape), format_args!("at most {MAX_RANK} dims"))
            })
        };
        let (kept_walk, reduced_walk) = (walk(false)?, walk(true)?);
        let reduced = data.shape.iter().enumerate().filter(|(d, _)| mask >> d & 1 == 1);
        let (kept, n) = (out.len(), reduced.map(|(_, &dim)| dim).product::<usize>());
        let multiprocessors = cx.device().multiprocessors() as usize;
        let (shape, vector, blocks) = if kept_walk.inner().1 == [1] {
            let alone = kept.div_ceil(THREADS);
            let split = if n >= LONG_COLUMN && alone < 2 * multiprocessors { WARPS } else { 1 };
            (Shape::Columns, split, (kept * split).div_ceil(THREADS))
        } else {
            let vector = vectors(data.dtype, &kept_walk, &reduced_walk, n).into();
            if n <= LONG_ROW || kept >= 4 * WARPS * multiprocessors {
                (Shape::WarpRows, vector, kept.div_ceil(WARPS))
            } else {
                (Shape::BlockRows, vector, kept)
            }
        };
        let params = ReduceParams {
            x: data.ptr,
            y: out.ptr,
            kept: kept as u64,
            n: n as u64,
            kept_walk,
            reduced_walk,
            op: self.op as u32,
            dtype: code(data.dtype),
            shape: shape as u32,
            vector: vector as u32,
        };
        cx.push(&self.function, linear(blocks, THREADS as u32), &params)
    }
}

/// Whether rows are contiguous and, as far as the shapes say, aligned for vectors of 16 bytes.
fn vectors(dtype: DType, kept: &Walk<1>, reduced: &Walk<1>, n: usize) -> bool {
    let vector = 16 / size(dtype);
    FLOATS.contains(&dtype)
        && n.is_multiple_of(vector)
        && reduced.inner().1 == [1]
        && reduced.has_vectors(vector)
        && kept.has_multiples(vector)
}
