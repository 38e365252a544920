//! Range: <https://onnx.ai/onnx/operators/onnx__Range.html>.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::arithmetic::Number;
use crate::cpu::number::{FLOATS, Stored, to_f64s};
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::with_number;
use abi::{DType, Dim, Result};
use std::marker::PhantomData;

/// The definition.
pub const OPS: &[OpDef] =
    &[OpDef::new("", "Range", (11, 27), claim, infer, build).with_host_inputs(&[0, 1, 2]).with_cuda(cuda::build)];

const INTS: &[DType] = &[DType::I64, DType::I32, DType::I16];
const NAMES: [&str; 3] = ["start", "limit", "delta"];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(3)?;
    cx.check_dtype(0, "start", &[FLOATS, INTS].concat())?;
    let dtype = cx.required(0)?.dtype;
    (1..3).try_for_each(|slot| cx.check_dtype(slot, NAMES[slot], &[dtype]))
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let dtype = cx.required(0)?.dtype;
    let mut values = [0.0; 3];
    for (slot, value) in values.iter_mut().enumerate() {
        let fact = cx.required(slot)?;
        if let Some(n) = fact.elements().filter(|&n| n != 1) {
            let slot = format!("input {slot} ({})", NAMES[slot]);
            return Err(cx.error(slot, format_args!("{n} elements"), "a scalar"));
        }
        let Some(known) = fact.value.as_ref().and_then(to_f64s) else {
            return Ok(vec![Fact::new(dtype, vec![Dim::Unknown])]);
        };
        *value = known[0];
    }
    let ints: Option<Vec<i64>> = (0..3).map(|slot| cx.input(slot)?.ints().map(|v| v[0])).collect();
    let n = match ints.as_deref() {
        // Whole numbers beyond 2^53 are not exact in f64.
        Some(&[start, limit, delta]) if delta != 0 => {
            let (span, delta) = (i128::from(limit) - i128::from(start), i128::from(delta));
            let (span, delta) = if delta < 0 { (-span, -delta) } else { (span, delta) };
            usize::try_from(((span + delta - 1) / delta).max(0)).ok()
        }
        _ => {
            let n = ((values[1] - values[0]) / values[2]).ceil();
            (values[2] != 0.0 && n < 2f64.powi(53)).then_some(n.max(0.0) as usize)
        }
    };
    match n {
        Some(n) => Ok(vec![Fact::new(dtype, vec![Dim::Known(n)])]),
        None => Err(cx.error("inputs", format_args!("{values:?}"), "a start and limit that the delta connects")),
    }
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(with_number!(cx.required(0)?.dtype, T => Box::new(Range::<T>(PhantomData))))
}

struct Range<T>(PhantomData<T>);

impl<T: Stored<C: Number>> Kernel for Range<T> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let [start, delta] = [0, 2].map(|slot| cx.required(slot).slice::<T>()[0].load());
        if let Some(mut out) = cx.output(0) {
            for (i, out) in out.slice::<T>().iter_mut().enumerate() {
                *out = T::store(start.add(delta.mul(T::C::of_f64(i as f64))));
            }
        }
        Ok(())
    }
}
