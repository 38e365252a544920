//! Reshape and Flatten: <https://onnx.ai/onnx/operators/onnx__Reshape.html>,
//! <https://onnx.ai/onnx/operators/onnx__Flatten.html>.

use crate::build::BuildCx;
use crate::cpu::number::MOVABLE;
use crate::fact::{self, Fact};
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::identity::Copy;
use abi::{DType, Dim, Result};

/// Reshape and Flatten.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Reshape", (5, 25), claim_reshape, infer_reshape, build).with_view().with_host_inputs(&[1]),
    OpDef::new("", "Flatten", (1, 25), claim_flatten, infer_flatten, build).with_view(),
];

pub(super) fn build(_: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Copy))
}

fn claim_reshape(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(0, "data", MOVABLE)?;
    cx.check_dtype(1, "shape", &[DType::I64])?;
    cx.check_int("allowzero", 0, &[0, 1])
}

fn infer_reshape(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (data, shape) = (cx.required(0)?, cx.required(1)?);
    let Some(asked) = shape.ints() else {
        let rank = shape.dim(0).known().filter(|_| shape.rank() == Some(1));
        return Ok(vec![Fact::of(data.dtype, rank.map(|r| vec![Dim::Unknown; r]))]);
    };
    let allow_zero = cx.int("allowzero", 0) != 0;
    let problem = |got: String, expected: &str| Err(cx.error("input 1 (shape)", got, expected));
    let mut dims = Vec::with_capacity(asked.len());
    let mut rest = None;
    for (i, &dim) in asked.iter().enumerate() {
        match dim {
            -1 if rest.is_some() => return problem(format!("{asked:?}"), "at most one -1"),
            -1 => {
                rest = Some(i);
                dims.push(Dim::Known(1));
            }
            0 if !allow_zero => match &data.shape {
                Some(from) if i >= from.len() => {
                    return problem(format!("{asked:?}"), "0 only where the data has that dim");
                }
                _ => dims.push(data.dim(i as isize)),
            },
            n if n < 0 => return problem(format!("{asked:?}"), "dims of -1 or more"),
            n => dims.push(Dim::Known(n as usize)),
        }
    }
    if let (Some(i), Some(from)) = (rest, &data.shape) {
        dims[i] = match quotient(from, &dims) {
            Some(dim) => dim,
            None => return problem(format!("{asked:?}"), &format!("a shape of {from:?}'s elements")),
        };
    } else if let Some(i) = rest {
        dims[i] = Dim::Unknown;
    }
    let out = Fact::new(data.dtype, dims);
    match (data.elements(), out.known_shape()) {
        // Nor is a product that overflows a shape of the data's.
        (Some(from), Some(_)) if out.elements() != Some(from) => {
            problem(format!("{asked:?}"), &format!("a shape of {from} elements"))
        }
        _ => Ok(vec![out]),
    }
}

/// The dim that makes `dims` hold as many elements as `from`; `None` when there is none.
fn quotient(from: &[Dim], dims: &[Dim]) -> Option<Dim> {
    let mut left: Vec<Dim> = Vec::new();
    let (mut above, mut below) = (1usize, 1usize);
    for dim in from {
        match dim {
            Dim::Known(n) => above = above.checked_mul(*n)?,
            other => left.push(other.clone()),
        }
    }
    for dim in dims {
        match dim {
            Dim::Known(n) => below = below.checked_mul(*n)?,
            Dim::Symbol(_) => match left.iter().position(|d| d == dim) {
                Some(i) => {
                    left.swap_remove(i);
                }
                None => return Some(Dim::Unknown),
            },
            Dim::Unknown => return Some(Dim::Unknown),
        }
    }
    match left.as_slice() {
        // Nothing to divide by: ORT and ONNX both refuse -1 beside a 0.
        _ if below == 0 => None,
        [] if above % below == 0 => Some(Dim::Known(above / below)),
        [] => None,
        [dim] if above == below => Some(dim.clone()),
        _ => Some(Dim::Unknown),
    }
}

fn claim_flatten(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "input", MOVABLE)
}

fn infer_flatten(cx: &NodeCx) -> Result<Vec<Fact>> {
    let input = cx.required(0)?;
    let Some(shape) = &input.shape else {
        return Ok(vec![Fact::new(input.dtype, vec![Dim::Unknown; 2])]);
    };
    let asked = cx.int("axis", 1);
    // The axis may point behind the last dim.
    let axis = if asked < 0 { asked + shape.len() as i64 } else { asked };
    if !(0..=shape.len() as i64).contains(&axis) {
        return Err(cx.error("attribute 'axis'", asked, format_args!("an axis of rank {}", shape.len())));
    }
    let product = |dims: &[Dim]| dims.iter().fold(Dim::Known(1), |product, d| fact::mul(&product, d));
    let (rows, columns) = shape.split_at(axis as usize);
    Ok(vec![Fact::new(input.dtype, vec![product(rows), product(columns)])])
}
