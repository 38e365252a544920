//! Cast and CastLike: <https://onnx.ai/onnx/operators/onnx__Cast.html>,
//! <https://onnx.ai/onnx/operators/onnx__CastLike.html>.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::float::Float;
use crate::cpu::map::BLOCK;
use crate::cpu::number::ANY;
use crate::cpu::wide::{Load, Store, Wide};
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::elementwise::CHEAP;
use crate::ops::identity::Copy;
use crate::par::SharedMut;
use crate::settings::Tier;
use crate::with_wide;
use abi::tensor::Element;
use abi::{DType, Result};
use half::{bf16, f16};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Cast", (6, 28), claim, infer, build).with_alias(alias).with_cuda(cuda::build),
    OpDef::new("", "CastLike", (15, 25), claim, infer, build).with_alias(alias).with_cuda(cuda::build),
];

/// The output's type: an attribute of Cast, input 1's type of CastLike.
fn target(cx: &NodeCx) -> Result<DType> {
    if cx.node().op_type == "CastLike" {
        return Ok(cx.required(1)?.dtype);
    }
    let code = cx.int("to", 0);
    let dtype = i32::try_from(code).ok().and_then(DType::from_onnx);
    dtype.ok_or_else(|| cx.error("attribute 'to'", code, "a TensorProto.DataType"))
}

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "input", ANY)?;
    let target = target(cx)?;
    if ANY.contains(&target) {
        return Ok(());
    }
    Err(cx.decline(
        "the type to cast to",
        target,
        "float, double, float16, bfloat16, bool or an integer of whole bytes",
    ))
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    Ok(vec![cx.required(0)?.with_dtype(target(cx)?)])
}

/// Nothing moves when the type stays.
fn alias(cx: &NodeCx) -> Option<Vec<usize>> {
    (target(cx).ok()? == cx.input(0)?.dtype).then(|| vec![0])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let (from, to, tier) = (cx.required(0)?.dtype, target(cx)?, cx.settings().tier);
    if from == to {
        return Ok(Box::new(Copy));
    }
    // The pairs that models are full of go straight.
    Ok(match (from, to) {
        (DType::F16, DType::F32) => Box::new(Direct::<f16, f32>(Float::widen)),
        (DType::BF16, DType::F32) => Box::new(Direct::<bf16, f32>(Float::widen)),
        (DType::F32, DType::F16) => Box::new(Direct::<f32, f16>(Float::narrow)),
        (DType::F32, DType::BF16) => Box::new(Direct::<f32, bf16>(Float::narrow)),
        _ => with_wide!(from, W => {
            let ((load, _), (_, store)) = (W::access(from), W::access(to));
            Box::new(Cast::<W> { load, store, tier })
        }),
    })
}

/// Between float formats, by the slice.
struct Direct<T, R>(fn(&[T], &mut [R]));

impl<T: Element, R: Element> Kernel for Direct<T, R> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let from = cx.required(0).slice::<T>();
        if let Some(mut out) = cx.output(0) {
            cx.par.chunks_mut(out.slice::<R>(), CHEAP, |i, out| {
                let start = i * CHEAP;
                (self.0)(&from[start..start + out.len()], out);
            });
        }
        Ok(())
    }
}

/// By way of the wide type that holds the input exactly.
struct Cast<W> {
    load: Load<W>,
    store: Store<W>,
    tier: Tier,
}

impl<W: Wide> Kernel for Cast<W> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let from = cx.required(0).bytes();
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        let n = out.len();
        if n == 0 {
            return Ok(());
        }
        let size = out.bytes().len() / n;
        let out = SharedMut::new(out.bytes());
        cx.par.ranges(n, CHEAP, |range| {
            let mut block = [W::ZERO; BLOCK];
            for start in range.clone().step_by(BLOCK) {
                let end = (start + BLOCK).min(range.end);
                let block = &mut block[..end - start];
                (self.load)(self.tier, from, start, 1, block);
                // SAFETY: the ranges of one loop do not overlap.
                (self.store)(self.tier, block, unsafe { out.slice(start * size..end * size) });
            }
        });
        Ok(())
    }
}
