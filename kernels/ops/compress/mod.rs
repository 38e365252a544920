//! Compress and NonZero, whose output shapes depend on values: <https://onnx.ai/onnx/operators/onnx__Compress.html>,
//! <https://onnx.ai/onnx/operators/onnx__NonZero.html>.

#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::map::{words, words_mut};
use crate::cpu::number::{ANY, Bool, MOVABLE, Stored, to_f64s};
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::{with_any, with_word};
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Compress", (9, 28), claim_compress, infer_compress, build_compress).with_host_inputs(&[1]),
    OpDef::new("", "NonZero", (9, 13), claim_non_zero, infer_non_zero, build_non_zero).with_host_inputs(&[0]),
];

fn claim_compress(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(0, "input", MOVABLE)?;
    cx.check_dtype(1, "condition", &[DType::Bool])
}

/// Attribute `axis`; `None` when the input counts as flat.
fn compress_axis(cx: &NodeCx) -> Option<i64> {
    cx.node().attr("axis").map(|_| cx.int("axis", 0))
}

fn infer_compress(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (input, condition) = (cx.required(0)?, cx.required(1)?);
    if let Some(rank) = condition.rank().filter(|&r| r != 1) {
        return Err(cx.error("input 1 (condition)", format_args!("rank {rank}"), "rank 1"));
    }
    let flags = condition.value.as_ref().and_then(|v| v.as_slice::<Bool>().map(<[Bool]>::to_vec));
    let count = |dim: Option<usize>| match (&flags, dim) {
        // Flags beyond the dim choose nothing.
        (Some(flags), Some(dim)) => Dim::Known(flags.iter().take(dim).filter(|f| f.is_true()).count()),
        _ => Dim::Unknown,
    };
    let Some(asked) = compress_axis(cx) else {
        return Ok(vec![Fact::new(input.dtype, vec![count(input.elements())])]);
    };
    let Some(mut shape) = input.shape.clone() else {
        return Ok(vec![Fact::unranked(input.dtype)]);
    };
    let Some(axis) = fact::axis(asked, shape.len()) else {
        return Err(cx.error("attribute 'axis'", asked, format_args!("an axis of rank {}", shape.len())));
    };
    shape[axis] = count(shape[axis].known());
    Ok(vec![Fact::new(input.dtype, shape)])
}

fn build_compress(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Compress(compress_axis(cx))))
}

/// Compress with its axis.
struct Compress(Option<i64>);

impl Kernel for Compress {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (input, condition) = (cx.required(0), cx.required(1));
        let shape = input.shape();
        let (dim, inner) = match self.0 {
            None => (input.len(), 1),
            Some(axis) => {
                let axis = fact::axis(axis, shape.len()).expect("infer has checked the axis");
                (shape[axis], shape[axis + 1..].iter().product())
            }
        };
        let flags = condition.slice::<Bool>();
        let flags = &flags[..flags.len().min(dim)];
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        let (slot, expected) = ("output 0", format_args!("{:?}", out.shape()).to_string());
        if dim == 0 || inner == 0 || input.is_empty() {
            return Ok(());
        }
        with_word!(input.dtype(), W => {
            let mut to = words_mut::<W>(&mut out).chunks_exact_mut(inner);
            for block in words::<W>(&input).chunks_exact(dim * inner) {
                for (i, _) in flags.iter().enumerate().filter(|(_, f)| f.is_true()) {
                    let Some(to) = to.next() else {
                        return Err(cx.error(slot, expected, "as many rows as the condition chooses"));
                    };
                    to.copy_from_slice(&block[i * inner..(i + 1) * inner]);
                }
            }
        });
        Ok(())
    }
}

fn claim_non_zero(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "X", ANY)
}

fn infer_non_zero(cx: &NodeCx) -> Result<Vec<Fact>> {
    let input = cx.required(0)?;
    let values = input.value.as_ref().and_then(to_f64s);
    let n = values.map_or(Dim::Unknown, |v| Dim::Known(v.iter().filter(|&&v| v != 0.0).count()));
    // A scalar counts as one dim.
    let rank = input.rank().map_or(Dim::Unknown, |rank| Dim::Known(rank.max(1)));
    Ok(vec![Fact::new(DType::I64, vec![rank, n])])
}

fn build_non_zero(_: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(NonZero))
}

struct NonZero;

impl Kernel for NonZero {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.required(0);
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        let n = out.shape()[1];
        let out = out.slice::<i64>();
        let found = with_any!(input.dtype(), T => {
            let zero = T::default().load();
            let hits = input.slice::<T>().iter().enumerate().filter(|(_, v)| v.load() != zero);
            let mut found = 0;
            for (k, (i, _)) in hits.enumerate() {
                found += 1;
                let mut rest = i;
                for (d, &dim) in input.shape().iter().enumerate().rev() {
                    if let Some(out) = out.get_mut(d * n + k).filter(|_| k < n) {
                        *out = (rest % dim) as i64;
                    }
                    rest /= dim;
                }
                if input.shape().is_empty() && k < n {
                    out[k] = 0;
                }
            }
            found
        });
        if found == n {
            return Ok(());
        }
        Err(cx.error("output 0", format_args!("{n} columns"), format_args!("{found}, the elements that are not 0")))
    }
}
