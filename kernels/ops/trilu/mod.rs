//! Trilu: <https://onnx.ai/onnx/operators/onnx__Trilu.html>.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::map::{words, words_mut};
use crate::cpu::number::MOVABLE;
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::movement::COPY;
use crate::par::SharedMut;
use crate::with_word;
use abi::{DType, Result};

/// The definition.
pub const OPS: &[OpDef] = &[OpDef::new("", "Trilu", (14, 14), claim, infer, build).with_cuda(cuda::build)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "input", MOVABLE)?;
    cx.check_dtype(1, "k", &[DType::I64])?;
    cx.check_int("upper", 1, &[0, 1])
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let input = cx.required(0)?;
    if let Some(rank) = input.rank().filter(|&r| r < 2) {
        return Err(cx.error("input 0 (input)", format_args!("rank {rank}"), "rank 2 or more"));
    }
    if let Some(n) = cx.input(1).and_then(Fact::elements).filter(|&n| n != 1) {
        return Err(cx.error("input 1 (k)", format_args!("{n} elements"), "a scalar"));
    }
    Ok(vec![input.with_dtype(input.dtype)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Trilu { upper: cx.int("upper", 1) != 0 }))
}

struct Trilu {
    upper: bool,
}

impl Kernel for Trilu {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.required(0);
        let k = cx.input(1).map_or(0, |k| k.slice::<i64>()[0]);
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        let &[.., rows, columns] = input.shape() else {
            unreachable!("infer has checked the rank");
        };
        with_word!(input.dtype(), W => {
            let from = words::<W>(&input);
            let out = SharedMut::new(words_mut::<W>(&mut out));
            cx.par.ranges(from.len() / columns, (COPY / columns / size_of::<W>()).max(1), |range| {
                for row in range {
                    let at = row * columns..(row + 1) * columns;
                    // The first column on or above diagonal k, or the first above it for the lower part.
                    let edge = ((row % rows) as i64).saturating_add(k).saturating_add(!self.upper as i64);
                    let edge = edge.clamp(0, columns as i64) as usize;
                    // SAFETY: rows do not overlap, and each is written by one task.
                    let out = unsafe { out.slice(at.clone()) };
                    let kept = if self.upper { edge..columns } else { 0..edge };
                    out.fill(W::default());
                    out[kept.clone()].copy_from_slice(&from[at][kept]);
                }
            });
        });
        Ok(())
    }
}
