//! Where: <https://onnx.ai/onnx/operators/onnx__Where.html>.

use super::{CHEAP, claim_rank, cuda, infer_broadcast};
use crate::build::BuildCx;
use crate::cpu::map::{self, Reader, words, words_mut};
use crate::cpu::number::{ANY, Bool, Stored};
use crate::cpu::view::View;
use crate::cuda::walk;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::with_word;
use abi::{DType, Result};

/// Where.
pub const OPS: &[OpDef] =
    &[OpDef::new("", "Where", (9, 16), claim, infer, build).with_cuda_claim(walk::claim_rank, cuda::select)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(3)?;
    cx.check_dtype(0, "condition", &[DType::Bool])?;
    cx.check_dtype(1, "X", ANY)?;
    cx.check_dtype(2, "Y", &[cx.required(1)?.dtype])?;
    claim_rank(cx)
}

fn infer(cx: &NodeCx) -> Result<Vec<crate::fact::Fact>> {
    infer_broadcast(cx, cx.required(1)?.dtype)
}

fn build(_: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Where))
}

struct Where;

impl Kernel for Where {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        with_word!(cx.required(1).dtype(), W => run::<W>(cx));
        Ok(())
    }
}

fn run<W: Stored<C = W>>(cx: &mut RunCx<'_>) {
    let (condition, x, y) = (cx.required(0), cx.required(1), cx.required(2));
    let Some(mut out) = cx.output(0) else { return };
    if out.is_empty() {
        return;
    }
    let views = [condition.shape(), x.shape(), y.shape()].map(|shape| View::broadcast(shape, out.shape()));
    let (condition, x, y) = (condition.slice::<Bool>(), words::<W>(&x), words::<W>(&y));
    let start = || (Reader::new(condition, &views[0]), Reader::new(x, &views[1]), Reader::new(y, &views[2]));
    map::blocks(cx.par, words_mut::<W>(&mut out), CHEAP, start, |(condition, x, y), range, out| {
        let condition = condition.read(range.clone());
        let (x, y) = (x.read(range.clone()), y.read(range));
        for (((out, c), x), y) in out.iter_mut().zip(condition).zip(x).zip(y) {
            *out = if c.is_true() { *x } else { *y };
        }
    });
}
