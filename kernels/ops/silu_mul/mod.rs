//! nxrt.fused SiluMul, which `fuse::silu_mul` makes: y = x * sigmoid(x) [* gate], all of one shape, f32, f16 or bf16.

mod cuda;

use crate::build::BuildCx;
use crate::cpu::float::Float;
use crate::cpu::isa::{Isa, Job, dispatch};
use crate::cpu::math::silu;
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::par::SharedMut;
use crate::settings::Tier;
use crate::with_float;
use abi::{DType, Result};

/// The definitions.
pub const OPS: &[OpDef] =
    &[OpDef::new(crate::fuse::DOMAIN, "SiluMul", (1, 1), claim, infer, build).with_cuda(cuda::build)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "x", &[DType::F32, DType::F16, DType::BF16])?;
    cx.check_dtype(1, "gate", &[cx.required(0)?.dtype])
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let x = cx.required(0)?;
    if let Some(gate) = cx.input(1).filter(|g| g.known_shape() != x.known_shape()) {
        return Err(cx.error("input 1 (gate)", format_args!("{:?}", gate.shape), format_args!("{:?}", x.shape)));
    }
    Ok(vec![x.with_dtype(x.dtype)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(SiluMul { tier: cx.settings().tier }))
}

struct SiluMul {
    tier: Tier,
}

/// Elements worth a task of their own: about 5 us.
const GRAIN: usize = 16 * 1024;

impl Kernel for SiluMul {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (x, gate) = (cx.required(0), cx.input(1));
        let Some(y) = cx.output(0) else { return Ok(()) };
        with_float!(x.dtype(), T => {
            let (x, gate, y) = (x.slice::<T>(), gate.map(|g| g.slice::<T>()), SharedMut::new(y.into_slice::<T>()));
            cx.par.ranges(x.len(), GRAIN, |range| {
                let gate = gate.map(|g| &g[range.clone()]);
                // SAFETY: the ranges of one loop do not overlap.
                let y = unsafe { y.slice(range.clone()) };
                dispatch(self.tier, Piece { x: &x[range], gate, y });
            });
        });
        Ok(())
    }
}

struct Piece<'a, T> {
    x: &'a [T],
    gate: Option<&'a [T]>,
    y: &'a mut [T],
}

impl<T: Float> Job for Piece<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<I: Isa>(self) {
        match self.gate {
            None => self.y.iter_mut().zip(self.x).for_each(|(y, x)| *y = T::from_f32(silu(x.to_f32()))),
            Some(gate) => {
                for ((y, x), gate) in self.y.iter_mut().zip(self.x).zip(gate) {
                    *y = T::from_f32(silu(x.to_f32()) * gate.to_f32());
                }
            }
        }
    }
}
