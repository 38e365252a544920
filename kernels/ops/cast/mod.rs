//! Cast and CastLike: <https://onnx.ai/onnx/operators/onnx__Cast.html>,
//! <https://onnx.ai/onnx/operators/onnx__CastLike.html>.

mod convert;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::number::{ANY, Stored};
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::elementwise::CHEAP;
use crate::ops::identity::Copy;
use crate::settings::Tier;
use crate::with_any;
use abi::{DType, Result};
use convert::{Convert, convert};

/// The definitions.
pub const OPS: &[OpDef] =
    &[OpDef::new("", "Cast", (6, 28), claim, infer, build), OpDef::new("", "CastLike", (15, 25), claim, infer, build)];

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

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let (from, to, tier) = (cx.required(0)?.dtype, target(cx)?, cx.settings().tier);
    if from == to {
        return Ok(Box::new(Copy));
    }
    Ok(with_any!(from, T => with_any!(to, R => Box::new(Cast::<T, R> { convert: convert::<T, R>, tier }))))
}

struct Cast<T, R> {
    convert: fn(Tier, &[T], &mut [R]),
    tier: Tier,
}

impl<T: Stored<C: Convert<R::C>>, R: Stored> Kernel for Cast<T, R> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let from = cx.required(0).slice::<T>();
        if let Some(mut out) = cx.output(0) {
            cx.par.chunks_mut(out.slice::<R>(), CHEAP, |i, out| {
                let start = i * CHEAP;
                (self.convert)(self.tier, &from[start..start + out.len()], out);
            });
        }
        Ok(())
    }
}
