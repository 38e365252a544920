//! double and integer products: plain loops, integers wrap.

use super::problem::{Problem, Spec};
use super::{A, B, C};
use crate::kernel::{Kernel, RunCx, Tensor};
use crate::par::{Par, SharedMut};
use abi::tensor::Element;
use abi::{DType, Result};

/// A product of double or 32- or 64-bit integers.
pub struct Product {
    pub spec: Spec,
}

trait Number: Element {
    const ZERO: Self;
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// `alpha * self + beta * c`; integers have neither.
    fn finish(self, spec: &Spec, c: Option<Self>) -> Self;
}

impl Number for f64 {
    const ZERO: Self = 0.0;
    fn mul_add(self, b: Self, c: Self) -> Self {
        self * b + c
    }
    fn finish(self, spec: &Spec, c: Option<Self>) -> Self {
        let product = f64::from(spec.alpha) * self;
        c.map_or(product, |c| product + f64::from(spec.beta) * c)
    }
}

macro_rules! integer {
    ($($t:ty),*) => {$(
        impl Number for $t {
            const ZERO: Self = 0;
            fn mul_add(self, b: Self, c: Self) -> Self {
                self.wrapping_mul(b).wrapping_add(c)
            }
            fn finish(self, _: &Spec, _: Option<Self>) -> Self {
                self
            }
        }
    )*};
}
integer!(i32, u32, i64, u64);

impl Kernel for Product {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (a, b, c) = (cx.required(A), cx.required(B), cx.input(C));
        let Some(out) = cx.output(0) else { return Ok(()) };
        let problem = Problem::new(&self.spec, a.shape(), b.shape(), out.shape());
        let spec = &self.spec;
        match a.dtype() {
            DType::F64 => run::<f64>(spec, &problem, (a, b, c), out.into_slice(), cx.par),
            DType::I32 => run::<i32>(spec, &problem, (a, b, c), out.into_slice(), cx.par),
            DType::U32 => run::<u32>(spec, &problem, (a, b, c), out.into_slice(), cx.par),
            DType::I64 => run::<i64>(spec, &problem, (a, b, c), out.into_slice(), cx.par),
            _ => run::<u64>(spec, &problem, (a, b, c), out.into_slice(), cx.par),
        }
        Ok(())
    }
}

fn run<T: Number>(
    spec: &Spec,
    p: &Problem<'_>,
    (a, b, c): (Tensor<'_>, Tensor<'_>, Option<Tensor<'_>>),
    out: &mut [T],
    par: Par<'_>,
) {
    let (a, b) = (a.slice::<T>(), b.slice::<T>());
    let c = c.map(|c| (c.slice::<T>(), super::cpu::addend_strides(c.shape())));
    let out = SharedMut::new(out);
    let grain = (1 << 14) / (p.k * p.n).max(1);
    par.ranges(p.batch * p.m, grain, |rows| {
        for row in rows {
            // SAFETY: each row is visited once.
            let out = unsafe { out.slice(row * p.n..(row + 1) * p.n) };
            out.fill(T::ZERO);
            let (batch_a, batch_b) = p.operands(row / p.m);
            let (i, b) = (row % p.m, &b[batch_b * p.k * p.n..]);
            for k in 0..p.k {
                let v = a[batch_a * p.m * p.k + i * p.a.row + k * p.a.column];
                let b = b[k * p.b.row..].iter().step_by(p.b.column.max(1));
                out.iter_mut().zip(b).for_each(|(out, &b)| *out = v.mul_add(b, *out));
            }
            for (j, out) in out.iter_mut().enumerate() {
                let c = c.map(|(c, (row, column))| c[i * row + j * column]);
                *out = out.finish(spec, c);
            }
        }
    });
}
