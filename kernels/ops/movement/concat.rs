//! Concat: <https://onnx.ai/onnx/operators/onnx__Concat.html>.

use super::Rows;
use super::cuda::Pieces;
use crate::build::BuildCx;
use crate::cpu::number::MOVABLE;
use crate::cuda::number::size;
use crate::cuda::{Device, DeviceKernel, LaunchCx};
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use abi::{Dim, Result};
use smallvec::SmallVec;
use std::sync::Arc;

/// Concat.
pub const OPS: &[OpDef] = &[OpDef::new("", "Concat", (4, 13), claim, infer, build).with_cuda(build_cuda)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(cx.inputs_len().max(1))?;
    cx.check_dtype(0, "inputs", MOVABLE)?;
    let first = cx.required(0)?.dtype;
    (1..cx.inputs_len()).try_for_each(|slot| cx.check_dtype(slot, "inputs", &[first]))?;
    match cx.node().attr("axis") {
        Some(_) => Ok(()),
        None => Err(cx.decline("attribute 'axis'", "nothing", "an axis")),
    }
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let dtype = cx.required(0)?.dtype;
    let mut out: Option<(usize, Vec<Dim>)> = None;
    for slot in 0..cx.inputs_len() {
        let Some(shape) = &cx.required(slot)?.shape else {
            return Ok(vec![Fact::unranked(dtype)]);
        };
        let (axis, dims) = match &mut out {
            None => {
                let asked = cx.int("axis", 0);
                let Some(axis) = fact::axis(asked, shape.len()) else {
                    let expected = format!("an axis of rank {}", shape.len());
                    return Err(cx.error("attribute 'axis'", asked, expected));
                };
                out = Some((axis, shape.clone()));
                continue;
            }
            Some((axis, dims)) => (*axis, dims),
        };
        let problem = || {
            let expected = "the shape of input 0 but for the axis";
            Err(cx.error(format_args!("input {slot}"), format_args!("{shape:?}"), expected))
        };
        if shape.len() != dims.len() {
            return problem();
        }
        for (i, (kept, dim)) in dims.iter_mut().zip(shape).enumerate() {
            *kept = if i == axis {
                fact::add(kept, dim)
            } else {
                match fact::unify(kept, dim) {
                    Some(dim) => dim,
                    None => return problem(),
                }
            };
        }
    }
    let (_, dims) = out.ok_or_else(|| cx.error("inputs", "none", "at least one"))?;
    Ok(vec![Fact::new(dtype, dims)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Concat(cx.int("axis", 0))))
}

/// Concat with its axis.
struct Concat(i64);

fn build_cuda(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    Ok(Box::new(CudaConcat { axis: cx.int("axis", 0), pieces: Pieces::new(device)? }))
}

struct CudaConcat {
    axis: i64,
    pieces: Pieces,
}

impl DeviceKernel for CudaConcat {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let Some(out) = cx.output(0) else { return Ok(()) };
        let axis = fact::axis(self.axis, out.shape.len()).expect("infer has checked the axis");
        let count: usize = out.shape[..axis].iter().product();
        let inputs: SmallVec<[_; 16]> =
            (0..cx.inputs_len()).map(|slot| cx.required(slot)).map(|t| (t.ptr, t.bytes() / count.max(1))).collect();
        self.pieces.launch(cx, (out.ptr, count), &inputs, (size(out.dtype), false))
    }
}

impl Kernel for Concat {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        let axis = fact::axis(self.0, out.shape().len()).expect("infer has checked the axis");
        let count: usize = out.shape()[..axis].iter().product();
        let row = out.bytes().len() / count.max(1);
        let mut at = 0;
        for input in cx.inputs.iter().flatten() {
            let len = input.bytes().len() / count.max(1);
            let rows = Rows { count, len, from: (0, len), to: (at, row) };
            rows.copy(cx.par, input.bytes(), out.bytes());
            at += len;
        }
        Ok(())
    }
}
