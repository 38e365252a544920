//! TopK: <https://onnx.ai/onnx/operators/onnx__TopK.html>. K is an attribute in opset 1 and an input since 10; opset 11
//! adds `largest` and `sorted`.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::arithmetic::Number;
use crate::cpu::map::{words, words_mut};
use crate::cpu::number::{NUMBERS, Stored};
use crate::fact::{self, Fact};
use crate::kernel::{Carver, Kernel, RunCx, Shapes, Tensor};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::gather::axis;
use crate::par::SharedMut;
use crate::{with_number, with_word};
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "TopK", (1, 1), claim, infer, build).with_cuda(cuda::build),
    OpDef::new("", "TopK", (10, 24), claim, infer, build).with_host_inputs(&[1]).with_cuda(cuda::build),
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
    let (axis, largest, dtype) = (cx.int("axis", -1), cx.int("largest", 1) != 0, cx.required(0)?.dtype);
    Ok(Box::new(TopK { axis, largest, keys: with_number!(dtype, T => keys::<T>) }))
}

/// Always sorted, equals by index, as `sorted = 0` leaves the order open.
struct TopK {
    axis: i64,
    largest: bool,
    /// Reads every `stride`th element from the first on as numbers of the same order.
    keys: fn(&Tensor<'_>, usize, usize, &mut [u64]),
}

impl Kernel for TopK {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let n = shapes.input(0).iter().product();
        Carver::size::<u64>(n) + Carver::size::<u32>(n)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.required(0);
        let shape = input.shape();
        let axis = fact::axis(self.axis, shape.len()).expect("infer has checked the axis");
        let (n, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
        let mut carver = Carver::new(cx.take_scratch());
        let (keys, order) = (carver.take::<u64>(input.len()), carver.take::<u32>(input.len()));
        let (mut values, mut indices) = (cx.output(0), cx.output(1));
        let k = values.as_ref().or(indices.as_ref()).map_or(0, |t| t.shape()[axis]);
        if k == 0 || input.is_empty() {
            return Ok(());
        }
        let keys = SharedMut::new(keys);
        let indices = SharedMut::new(indices.as_mut().map_or(&mut [][..], |t| t.slice::<i64>()));
        cx.par.chunks_mut(order, n, |row, order| {
            let first = row / inner * n * inner + row % inner;
            // SAFETY: each row has its own keys.
            let keys = unsafe { keys.slice(row * n..(row + 1) * n) };
            (self.keys)(&input, first, inner, keys);
            if self.largest {
                keys.iter_mut().for_each(|key| *key = !*key);
            }
            order.iter_mut().zip(0..).for_each(|(o, i)| *o = i);
            let rank = |i: &u32| (keys[*i as usize], *i);
            if k < n {
                order.select_nth_unstable_by_key(k, rank);
            }
            order[..k].sort_unstable_by_key(rank);
            for (i, from) in order[..k].iter().enumerate().filter(|_| !indices.is_empty()) {
                let at = row / inner * k * inner + i * inner + row % inner;
                // SAFETY: each output element belongs to one row, each row to one task.
                let slot = unsafe { indices.slice(at..at + 1) };
                slot[0] = (*from).into();
            }
        });
        if let Some(values) = &mut values {
            with_word!(input.dtype(), W => {
                let (data, out) = (words::<W>(&input), words_mut::<W>(values));
                for (at, out) in out.iter_mut().enumerate() {
                    let (outer, i, column) = (at / inner / k, at / inner % k, at % inner);
                    let from = order[(outer * inner + column) * n + i] as usize;
                    *out = data[(outer * n + from) * inner + column];
                }
            });
        }
        Ok(())
    }
}

/// Numbers of the same order as the elements; NaN is above all, and the zeros are equal.
fn keys<T: Stored<C: Number>>(tensor: &Tensor<'_>, first: usize, stride: usize, out: &mut [u64]) {
    let data = tensor.slice::<T>();
    for (i, key) in out.iter_mut().enumerate() {
        *key = data[first + i * stride].load().order();
    }
}
