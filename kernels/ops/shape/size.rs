//! Shape and Size: <https://onnx.ai/onnx/operators/onnx__Shape.html>, <https://onnx.ai/onnx/operators/onnx__Size.html>.

use crate::build::BuildCx;
use crate::cpu::number::MOVABLE;
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use abi::{DType, Dim, HostTensor, Result};

/// Shape and Size.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Shape", (1, 25), claim, infer_shape, |cx| Ok(Box::new(Shape(start_end(cx))))).with_shape_only(),
    OpDef::new("", "Size", (1, 25), claim, infer_size, build_size).with_shape_only(),
];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "data", &[MOVABLE, &[DType::I4, DType::U4]].concat())
}

/// Attributes `start` and `end`, 0 and the rank when unset.
fn start_end(cx: &NodeCx) -> (i64, i64) {
    (cx.int("start", 0), cx.int("end", i64::MAX))
}

/// The dims that Shape gives, of `rank`.
fn part((start, end): (i64, i64), rank: usize) -> std::ops::Range<usize> {
    let rank = rank as i64;
    let clamp = |v: i64| if v < 0 { v.saturating_add(rank) } else { v }.clamp(0, rank) as usize;
    let (start, end) = (clamp(start), clamp(end));
    start..end.max(start)
}

fn infer_shape(cx: &NodeCx) -> Result<Vec<Fact>> {
    let Some(shape) = &cx.required(0)?.shape else {
        return Ok(vec![Fact::new(DType::I64, vec![Dim::Unknown])]);
    };
    let dims = &shape[part(start_end(cx), shape.len())];
    let known: Option<Vec<i64>> = dims.iter().map(|d| d.known().map(|d| d as i64)).collect();
    Ok(vec![match known {
        Some(dims) => Fact::with_value(HostTensor::new(&[dims.len()], &dims)),
        None => Fact::new(DType::I64, vec![Dim::Known(dims.len())]),
    }])
}

fn infer_size(cx: &NodeCx) -> Result<Vec<Fact>> {
    Ok(vec![match cx.required(0)?.elements() {
        Some(n) => Fact::with_value(HostTensor::new(&[], &[n as i64])),
        None => Fact::new(DType::I64, Vec::new()),
    }])
}

/// Shape with its `start` and `end`.
struct Shape((i64, i64));

impl Kernel for Shape {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let shape = cx.required(0).shape();
        if let Some(mut out) = cx.output(0) {
            let dims = &shape[part(self.0, shape.len())];
            for (out, dim) in out.slice::<i64>().iter_mut().zip(dims) {
                *out = *dim as i64;
            }
        }
        Ok(())
    }
}

fn build_size(_: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    struct Size;
    impl Kernel for Size {
        fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
            let n = cx.required(0).len() as i64;
            if let Some(mut out) = cx.output(0) {
                out.slice::<i64>().fill(n);
            }
            Ok(())
        }
    }
    Ok(Box::new(Size))
}
