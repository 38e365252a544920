//! Pow, whose operands may be of two types: <https://onnx.ai/onnx/operators/onnx__Pow.html>.

use super::{COSTLY, claim_rank, cuda, infer_broadcast};
use crate::build::BuildCx;
use crate::cpu::arithmetic::Number;
use crate::cpu::map::{self, Reader};
use crate::cpu::number::{FLOATS, INTS, NUMBERS, Stored};
use crate::cpu::view::View;
use crate::cuda::walk;
use crate::kernel::{Carver, Kernel, RunCx, Shapes, Tensor};
use crate::op::{Decline, NodeCx, OpDef};
use crate::with_number;
use abi::Result;
use std::marker::PhantomData;

/// Pow.
pub const OPS: &[OpDef] =
    &[OpDef::new("", "Pow", (7, 15), claim, infer, build).with_cuda_claim(walk::claim_rank, cuda::pow)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(0, "X", &[FLOATS, &INTS[..2]].concat())?;
    cx.check_dtype(1, "Y", NUMBERS)?;
    claim_rank(cx)
}

fn infer(cx: &NodeCx) -> Result<Vec<crate::fact::Fact>> {
    infer_broadcast(cx, cx.required(0)?.dtype)
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(with_number!(cx.required(0)?.dtype, T => Box::new(Pow::<T>(PhantomData))))
}

struct Pow<T>(PhantomData<T>);

impl<T: Stored<C: Number>> Kernel for Pow<T> {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        Carver::size::<f64>(shapes.input(1).iter().product())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (x, y) = (cx.required(0), cx.required(1));
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        let views = [x.shape(), y.shape()].map(|shape| View::broadcast(shape, out.shape()));
        let exponents = Carver::new(cx.take_scratch()).take::<f64>(y.len());
        with_number!(y.dtype(), E => to_f64::<E>(&y, exponents));
        let (x, exponents) = (x.slice::<T>(), &*exponents);
        let start = || (Reader::new(x, &views[0]), Reader::new(exponents, &views[1]));
        map::blocks(cx.par, out.slice::<T>(), COSTLY, start, |(x, y), range, out| {
            for ((out, x), y) in out.iter_mut().zip(x.read(range.clone())).zip(y.read(range)) {
                *out = pow(*x, *y);
            }
        });
        Ok(())
    }
}

fn to_f64<E: Stored<C: Number>>(y: &Tensor<'_>, out: &mut [f64]) {
    for (out, y) in out.iter_mut().zip(y.slice::<E>()) {
        *out = y.load().to_f64();
    }
}

/// Whole exponents are exact for integer bases and cheap for small ones.
#[inline(always)]
fn pow<C: Number>(x: C, y: f64) -> C {
    let whole = y >= 0.0 && y == y.trunc() && y < 9e15;
    if whole && (C::EXACT || (1.0..=3.0).contains(&y)) { x.powi(y as u64) } else { x.pow(y) }
}
