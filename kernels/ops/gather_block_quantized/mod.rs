//! com.microsoft GatherBlockQuantized:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GatherBlockQuantized>.
//!
//! Gathers slices of a block-quantised tensor and dequantises them. An index out of range gives zeros, as the schema
//! says.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::fact::{self, Fact};
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::matmul_nbits;
use crate::quant::nbits::{Layout, ZeroPoint};
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] =
    &[OpDef::new("com.microsoft", "GatherBlockQuantized", (1, 1), claim, infer, build).with_cuda(cuda::build)];

/// Input slots.
const DATA: usize = 0;
const INDICES: usize = 1;
const SCALES: usize = 2;
const ZERO_POINTS: usize = 3;

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(3)?;
    cx.check_dtype(DATA, "data", &[DType::U8, DType::U4, DType::I4])?;
    cx.check_dtype(INDICES, "indices", &[DType::I32, DType::I64])?;
    cx.check_dtype(SCALES, "scales", &[DType::F32, DType::F16, DType::BF16])?;
    cx.check_dtype(ZERO_POINTS, "zero_points", &[cx.required(DATA)?.dtype])?;
    cx.check_int("bits", 4, &[2, 4, 8])?;
    let block = cx.int("block_size", 128);
    if block < 16 || !(block as u64).is_power_of_two() {
        let expected = "a power of two, 16 or more";
        return Err(cx.decline("attribute 'block_size'", block, expected));
    }
    let data = cx.required(DATA)?;
    if data.dtype != DType::U8 && cx.int("bits", 4) != 4 {
        let got = format_args!("{} with {} data", cx.int("bits", 4), data.dtype).to_string();
        return Err(cx.decline("attribute 'bits'", got, "4"));
    }
    if data.shape.is_some() {
        check(cx)?;
    }
    Ok(())
}

/// What the attributes say of a data tensor of known rank.
struct Axes {
    gather: usize,
    quantize: usize,
    /// Values in a stored element: 1, or 8 / bits for uint8.
    per_element: usize,
}

fn axes(cx: &NodeCx, rank: usize) -> Result<Axes> {
    let bits = cx.int("bits", 4) as usize;
    let packed = cx.required(DATA)?.dtype == DType::U8;
    let axis = |name: &str, default: i64| {
        let got = cx.int(name, default);
        fact::axis(got, rank).ok_or_else(|| {
            let expected = format!("an axis of rank-{rank} data");
            cx.error(format_args!("attribute '{name}'"), got, expected)
        })
    };
    let axes = Axes {
        gather: axis("gather_axis", 0)?,
        quantize: axis("quantize_axis", 1)?,
        per_element: if packed { 8 / bits } else { 1 },
    };
    if packed && (axes.gather != 0 || axes.quantize != rank - 1 || rank < 2) {
        let got = format!("{} and {}", axes.gather, axes.quantize);
        let expected = "0 and the last axis, another one, for uint8 data";
        return Err(cx.error("attributes 'gather_axis' and 'quantize_axis'", got, expected));
    }
    Ok(axes)
}

/// The shape of `data` in values, scales and zero points checked where known. `data`'s rank is known.
fn check(cx: &NodeCx) -> Result<(Axes, Vec<Dim>)> {
    let data = cx.required(DATA)?;
    let mut shape = data.shape.clone().unwrap_or_default();
    let rank = shape.len();
    let axes = axes(cx, rank)?;
    shape[rank - 1] = fact::mul(&shape[rank - 1], &Dim::Known(axes.per_element));
    let block = cx.int("block_size", 128) as usize;
    let bits = cx.int("bits", 4) as usize;
    for (slot, name) in [(SCALES, "scales"), (ZERO_POINTS, "zero_points")] {
        let Some(got) = cx.input(slot).and_then(|f| f.shape.as_ref()) else {
            continue;
        };
        let expected: Vec<_> = shape
            .iter()
            .enumerate()
            .map(|(i, dim)| match dim {
                Dim::Known(n) if i == axes.quantize => {
                    let blocks = n.div_ceil(block);
                    let packed = slot == ZERO_POINTS && data.dtype == DType::U8;
                    Dim::Known(if packed { (blocks * bits).div_ceil(8) } else { blocks })
                }
                _ if i == axes.quantize => Dim::Unknown,
                dim => dim.clone(),
            })
            .collect();
        let fits = got.len() == rank && got.iter().zip(&expected).all(|(a, b)| fact::unify(a, b).is_some());
        if !fits {
            return Err(cx.error(
                format_args!("input {slot} ({name})"),
                format_args!("shape {got:?}"),
                format_args!("shape {expected:?}"),
            ));
        }
    }
    Ok((axes, shape))
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (data, dtype) = (cx.required(DATA)?, cx.required(SCALES)?.dtype);
    if data.shape.is_none() {
        return Ok(vec![Fact::unranked(dtype)]);
    }
    let (axes, mut shape) = check(cx)?;
    let Some(indices) = &cx.required(INDICES)?.shape else {
        return Ok(vec![Fact::unranked(dtype)]);
    };
    shape.splice(axes.gather..=axes.gather, indices.iter().cloned());
    Ok(vec![Fact::new(dtype, shape)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    if let Some(layout) = shared_layout(cx)? {
        let slots = [DATA, SCALES, ZERO_POINTS];
        let packed = cx.pack_bytes(&slots, &matmul_nbits::pack_name(&layout), |c| matmul_nbits::pack(&layout, c))?;
        return Ok(Box::new(cpu::GatherPacked { packed }));
    }
    Ok(Box::new(cpu::Gather {
        bits: cx.int("bits", 4) as usize,
        block: cx.int("block_size", 128) as usize,
        gather_axis: cx.int("gather_axis", 0),
        quantize_axis: cx.int("quantize_axis", 1),
    }))
}

/// The layout in which a MatMulNBits packs the very same constants (an embedding that is also the head): rows are then
/// read from the packed form, and the model's own need not stay in memory.
fn shared_layout(cx: &mut BuildCx) -> Result<Option<Layout>> {
    let Some(data) = cx.constant(DATA)?.filter(|d| d.dtype() == DType::U8 && d.shape().len() == 2) else {
        return Ok(None);
    };
    let (scales, zero_points) = (cx.constant(SCALES)?, cx.constant(ZERO_POINTS)?);
    if scales.is_none() || (zero_points.is_none() && cx.has_input(ZERO_POINTS)) {
        return Ok(None);
    }
    let bits = cx.int("bits", 4) as usize;
    let layout = Layout {
        n: data.shape()[0],
        k: data.shape()[1] * 8 / bits,
        bits,
        block: cx.int("block_size", 128) as usize,
        scale: cx.required(SCALES)?.dtype,
        zero_point: if zero_points.is_some() { ZeroPoint::Bytes } else { ZeroPoint::Default },
    };
    let mine = [Some(data), scales, zero_points];
    let graph = cx.graph();
    for node in &graph.nodes {
        if !matmul_nbits::packs_as(node, &layout) {
            continue;
        }
        let mut same = true;
        for (slot, mine) in (1..).zip(&mine) {
            let other = match node.inputs.get(slot) {
                Some(Some(value)) => cx.constant_of(*value)?,
                _ => None,
            };
            same &= match (mine, &other) {
                (None, None) => true,
                (Some(mine), Some(other)) => mine.same_bytes(other),
                _ => false,
            };
        }
        if same {
            return Ok(Some(layout));
        }
    }
    Ok(None)
}
