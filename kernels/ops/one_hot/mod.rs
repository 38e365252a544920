//! OneHot: <https://onnx.ai/onnx/operators/onnx__OneHot.html>.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::arithmetic::Number;
use crate::cpu::map::{words, words_mut};
use crate::cpu::number::{MOVABLE, NUMBERS, Stored, to_f64s};
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx, Tensor};
use crate::op::{Decline, NodeCx, OpDef};
use crate::{with_number, with_word};
use abi::{Dim, Result};

/// The definition.
pub const OPS: &[OpDef] =
    &[OpDef::new("", "OneHot", (9, 28), claim, infer, build).with_host_inputs(&[1]).with_cuda(cuda::build)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(3)?;
    cx.check_dtype(0, "indices", NUMBERS)?;
    cx.check_dtype(1, "depth", NUMBERS)?;
    cx.check_dtype(2, "values", MOVABLE)
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (indices, depth, values) = (cx.required(0)?, cx.required(1)?, cx.required(2)?);
    if let Some(n) = values.elements().filter(|&n| n != 2) {
        return Err(cx.error("input 2 (values)", format_args!("{n} elements"), "off and on value"));
    }
    if let Some(n) = depth.elements().filter(|&n| n != 1) {
        return Err(cx.error("input 1 (depth)", format_args!("{n} elements"), "a scalar"));
    }
    let depth = match depth.value.as_ref().and_then(to_f64s) {
        None => Dim::Unknown,
        Some(depth) if depth[0] >= 0.0 && depth[0] < 2f64.powi(53) => Dim::Known(depth[0] as usize),
        Some(depth) => return Err(cx.error("input 1 (depth)", depth[0], "0 or more")),
    };
    let Some(mut shape) = indices.shape.clone() else {
        return Ok(vec![Fact::unranked(values.dtype)]);
    };
    let (asked, rank) = (cx.int("axis", -1), shape.len() as i64 + 1);
    let axis = if asked < 0 { asked + rank } else { asked };
    if !(0..rank).contains(&axis) {
        return Err(cx.error("attribute 'axis'", asked, format_args!("an axis of rank {rank}")));
    }
    shape.insert(axis as usize, depth);
    Ok(vec![Fact::new(values.dtype, shape)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(OneHot(cx.int("axis", -1))))
}

struct OneHot(i64);

impl Kernel for OneHot {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (indices, values) = (cx.required(0), cx.required(2));
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        let rank = out.shape().len() as i64;
        let axis = if self.0 < 0 { self.0 + rank } else { self.0 } as usize;
        let depth = out.shape()[axis];
        let inner: usize = out.shape()[axis + 1..].iter().product();
        with_word!(values.dtype(), W => {
            let &[off, on] = words::<W>(&values) else {
                return Err(cx.error("input 2 (values)", format_args!("{values:?}"), "two elements"));
            };
            let out = words_mut::<W>(&mut out);
            out.fill(off);
            with_number!(indices.dtype(), T => each::<T>(&indices, depth, |i, hot| {
                out[(i / inner * depth + hot) * inner + i % inner] = on;
            }));
        });
        Ok(())
    }
}

/// Calls `f` with the indices of `-depth..depth`; others leave their row off.
fn each<T: Stored<C: Number>>(indices: &Tensor<'_>, depth: usize, mut f: impl FnMut(usize, usize)) {
    for (i, index) in indices.slice::<T>().iter().enumerate() {
        // Types wider than f64's mantissa hold no valid index there.
        let index = index.load().to_f64().trunc();
        let hot = if index < 0.0 { index + depth as f64 } else { index };
        if hot >= 0.0 && hot < depth as f64 {
            f(i, hot as usize);
        }
    }
}
