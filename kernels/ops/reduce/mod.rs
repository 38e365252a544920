//! Reductions: <https://onnx.ai/onnx/operators/onnx__ReduceSum.html> and its kin. The axes are an attribute before
//! opset 18 (13 for ReduceSum) and an input since.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::wide::Wide;
use crate::cuda::walk::claim_rank as claim_device_rank;
use crate::fact::{self, Fact};
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::elementwise::{check_rank, claim_rank};
use crate::with_wide;
use abi::{DType, Dim, Result};
use cpu::{Folds, Reduce, Reducer};

/// float, double, the half floats and the integers that the schemas name.
const TYPES: &[DType] =
    &[DType::F32, DType::F16, DType::BF16, DType::F64, DType::I64, DType::I32, DType::U32, DType::U64];
/// What ReduceMax and ReduceMin take beside [`TYPES`].
const NARROW: &[DType] = &[DType::U8, DType::I8, DType::Bool];

/// Two definitions an op: with the axes as attribute, and as input from the given version on.
macro_rules! reductions {
    ($($name:literal $input:literal..=$last:literal $claim:ident $build:expr, $op:ident;)*) => {
        /// The definitions.
        pub const OPS: &[OpDef] = &[$(
            OpDef::new("", $name, (1, $input - 1), $claim, infer, $build)
                .with_cuda_claim(claim_device_rank, |cx, device| cuda::build(cx, device, cuda::Op::$op)),
            OpDef::new("", $name, ($input, $last), $claim, infer, $build)
                .with_host_inputs(&[1])
                .with_cuda_claim(claim_device_rank, |cx, device| cuda::build(cx, device, cuda::Op::$op)),
        )*];
    };
}

reductions! {
    "ReduceSum" 13..=13 claim_number build::<cpu::Sum>, Sum;
    "ReduceMean" 18..=18 claim_number build::<cpu::Mean>, Mean;
    "ReduceProd" 18..=18 claim_number build::<cpu::Prod>, Prod;
    "ReduceMax" 18..=20 claim_extremum build::<cpu::Max>, Max;
    "ReduceMin" 18..=20 claim_extremum build::<cpu::Min>, Min;
    "ReduceL1" 18..=18 claim_number build::<cpu::L1>, L1;
    "ReduceSumSquare" 18..=18 claim_number build::<cpu::SumSquare>, SumSquare;
    "ReduceL2" 18..=18 claim_number build_f64::<cpu::L2>, L2;
    "ReduceLogSum" 18..=28 claim_number build_f64::<cpu::LogSum>, LogSum;
    "ReduceLogSumExp" 18..=28 claim_number build_f64::<cpu::LogSumExp>, LogSumExp;
}

fn claim(cx: &NodeCx, allowed: &[DType]) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "data", allowed)?;
    cx.check_dtype(1, "axes", &[DType::I64])?;
    claim_rank(cx)
}

fn claim_number(cx: &NodeCx) -> Result<(), Decline> {
    claim(cx, TYPES)
}

fn claim_extremum(cx: &NodeCx) -> Result<(), Decline> {
    claim(cx, &[TYPES, NARROW].concat())
}

/// The attribute `axes`, if any, and whether no axes at all means to reduce none.
struct Axes {
    attribute: Option<Vec<i64>>,
    noop: bool,
}

impl Axes {
    fn of(cx: &NodeCx) -> Self {
        Self { attribute: cx.ints("axes").map(<[i64]>::to_vec), noop: cx.int("noop_with_empty_axes", 0) != 0 }
    }

    /// Which of `rank` dims are reduced, one bit a dim; the error is the axis at fault.
    fn mask(&self, input: Option<&[i64]>, rank: usize) -> Result<u32, i64> {
        let axes = input.or(self.attribute.as_deref()).unwrap_or(&[]);
        if axes.is_empty() {
            return Ok(if self.noop { 0 } else { (1 << rank) - 1 });
        }
        axes.iter().try_fold(0, |mask, &axis| match fact::axis(axis, rank) {
            Some(i) => Ok(mask | 1 << i),
            // A scalar has no axis, yet ORT takes 0 and -1 of it.
            None if rank == 0 && (-1..=0).contains(&axis) => Ok(mask),
            None => Err(axis),
        })
    }
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let data = cx.required(0)?;
    let Some(shape) = &data.shape else {
        return Ok(vec![Fact::unranked(data.dtype)]);
    };
    let keep = cx.int("keepdims", 1) != 0;
    let input = cx.input(1).map(Fact::ints);
    if let Some(None) = input {
        let dims = keep.then(|| vec![Dim::Unknown; shape.len()]);
        return Ok(vec![Fact::of(data.dtype, dims)]);
    }
    let mask = Axes::of(cx).mask(input.flatten().as_deref(), shape.len());
    let mask = mask.map_err(|axis| cx.error("axes", axis, format_args!("axes of rank {}", shape.len())))?;
    let dims = shape.iter().enumerate().filter_map(|(i, dim)| match (mask >> i & 1 == 1, keep) {
        (false, _) => Some(dim.clone()),
        (true, true) => Some(Dim::Known(1)),
        (true, false) => None,
    });
    Ok(vec![Fact::new(data.dtype, dims.collect())])
}

/// In the wide type of the input's kind.
fn build<O>(cx: &mut BuildCx) -> Result<Box<dyn Kernel>>
where
    O: Reduce<f64> + Reduce<i64> + Reduce<u64>,
{
    with_wide!(cx.required(0)?.dtype, W => reducer(cx, Folds::<W>::of::<O>()))
}

/// In f64: the result is not a whole number even for integers.
fn build_f64<O: Reduce<f64>>(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    reducer(cx, Folds::<f64>::of::<O>())
}

/// One instance for every reduction in `A`.
fn reducer<A: Wide>(cx: &mut BuildCx, ops: Folds<A>) -> Result<Box<dyn Kernel>> {
    let (axes, tier) = (Axes::of(cx), cx.settings().tier);
    let (load, store) = A::access(cx.required(0)?.dtype);
    Ok(Box::new(Reducer { ops, load, store, axes, tier }))
}
