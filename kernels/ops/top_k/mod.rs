//! TopK: <https://onnx.ai/onnx/operators/onnx__TopK.html>. K is an attribute in opset 1 and an input since 10; opset 11
//! adds `largest` and `sorted`.

#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::arithmetic::Number;
use crate::cpu::number::{NUMBERS, Stored};
use crate::fact::{self, Fact};
use crate::kernel::{Carver, Kernel, RunCx, Shapes};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::gather::axis;
use crate::par::SharedMut;
use crate::with_number;
use abi::{DType, Dim, Result};
use std::cmp::Ordering;
use std::marker::PhantomData;

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "TopK", (1, 1), claim, infer, build),
    OpDef::new("", "TopK", (10, 24), claim, infer, build).with_host_inputs(&[1]),
];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(if cx.node().since_version == 1 { 1 } else { 2 })?;
    cx.check_dtype(0, "X", NUMBERS)?;
    cx.check_dtype(1, "K", &[DType::I64])
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let x = cx.required(0)?;
    let Some(mut shape) = x.shape.clone() else {
        return Ok(vec![Fact::unranked(x.dtype), Fact::unranked(DType::I64)]);
    };
    let axis = axis(cx, &shape, -1)?;
    let k = match cx.node().since_version {
        1 => Some(vec![cx.int("k", -1)]),
        _ => cx.required(1)?.ints(),
    };
    let dim = shape[axis].clone();
    shape[axis] = match k.as_deref() {
        None => Dim::Unknown,
        Some(&[k]) if k >= 0 && dim.known().is_none_or(|d| k as usize <= d) => Dim::Known(k as usize),
        Some(k) => return Err(cx.error("K", format_args!("{k:?}"), format_args!("one number of 0 to {dim:?}"))),
    };
    Ok(vec![Fact::new(x.dtype, shape.clone()), Fact::new(DType::I64, shape)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let (axis, largest) = (cx.int("axis", -1), cx.int("largest", 1) != 0);
    Ok(with_number!(cx.required(0)?.dtype, T => Box::new(TopK::<T> { axis, largest, kind: PhantomData })))
}

/// Always sorted, equals by index, as `sorted = 0` leaves the order open.
struct TopK<T> {
    axis: i64,
    largest: bool,
    kind: PhantomData<T>,
}

impl<T: Stored<C: Number>> Kernel for TopK<T> {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        Carver::size::<u32>(shapes.input(0).iter().product())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.required(0);
        let shape = input.shape();
        let axis = fact::axis(self.axis, shape.len()).expect("infer has checked the axis");
        let (n, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
        let order = Carver::new(cx.take_scratch()).take::<u32>(input.len());
        let (mut values, mut indices) = (cx.output(0), cx.output(1));
        let out_shape = values.as_ref().or(indices.as_ref()).map(|t| t.shape());
        let k = out_shape.map_or(0, |shape| shape[axis]);
        if k == 0 || input.is_empty() {
            return Ok(());
        }
        let data = input.slice::<T>();
        let values = SharedMut::new(values.as_mut().map_or(&mut [][..], |t| t.slice::<T>()));
        let indices = SharedMut::new(indices.as_mut().map_or(&mut [][..], |t| t.slice::<i64>()));
        cx.par.chunks_mut(order, n, |row, order| {
            let (outer, column) = (row / inner, row % inner);
            let x = |i: u32| data[(outer * n + i as usize) * inner + column].load();
            order.iter_mut().zip(0..).for_each(|(o, i)| *o = i);
            let compare = |a: &u32, b: &u32| {
                let order = total(x(*a), x(*b));
                let order = if self.largest { order.reverse() } else { order };
                order.then(a.cmp(b))
            };
            if k < n {
                order.select_nth_unstable_by(k, compare);
            }
            order[..k].sort_unstable_by(compare);
            for (i, &from) in order[..k].iter().enumerate() {
                let at = (outer * k + i) * inner + column;
                if !values.is_empty() {
                    // SAFETY: each output element belongs to one row, each row to one task.
                    let slot = unsafe { values.slice(at..at + 1) };
                    slot[0] = T::store(x(from));
                }
                if !indices.is_empty() {
                    // SAFETY: as above.
                    let slot = unsafe { indices.slice(at..at + 1) };
                    slot[0] = from.into();
                }
            }
        });
        Ok(())
    }
}

/// A total order: NaN is greater than every number.
fn total<C: Number>(a: C, b: C) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}
