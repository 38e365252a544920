//! Functions of one or more tensors that broadcast: Max, Min, Sum, Mean.

use super::{CHEAP, claim_same, cuda, infer_broadcast};
use crate::cpu::arithmetic::Number;
use crate::cpu::map::{self, BLOCK, Loop1, Loop2, Op1, Op2, Reader, loop1, loop2};
use crate::cpu::number::{FLOATS, NUMBERS, Stored};
use crate::cpu::view::View;
use crate::kernel::{Kernel, RunCx};
use crate::op::{NodeCx, OpDef};
use crate::settings::Tier;
use crate::{with_number, with_real};
use abi::Result;

macro_rules! folds {
    ($($struct:ident $name:literal $types:ident $with:ident $mean:literal |$a:ident, $b:ident| $body:expr;)*) => {
        $(
            struct $struct;
            impl<C: Number> Op2<C> for $struct {
                type R = C;
                #[inline(always)]
                fn apply($a: C, $b: C) -> C {
                    $body
                }
            }
        )*
        /// Functions of one or more tensors.
        pub const OPS: &[OpDef] = &[$(OpDef::new("", $name, (6, 13), |cx| claim_same(cx, 1, $types), infer, |cx| {
            let tier = cx.settings().tier;
            let n = cx.inputs_len() as f64;
            Ok($with!(cx.required(0)?.dtype, T => {
                type C = <T as Stored>::C;
                Box::new(Fold::<T> { f: loop2::<$struct, C>, divide: $mean.then_some((loop1::<Scale, C>, C::of_f64(n))), tier })
            }))
        })
        .with_cuda_claim(cuda::claim_variadic, |cx, device| cuda::variadic(cx, device, cuda::Variadic::$struct))),*];
    };
}

folds! {
    Max "Max" NUMBERS with_number false |a, b| a.larger(b);
    Min "Min" NUMBERS with_number false |a, b| a.smaller(b);
    Sum "Sum" FLOATS with_real false |a, b| a.add(b);
    Mean "Mean" FLOATS with_real true |a, b| a.add(b);
}

struct Scale;
impl<C: Number> Op1<C> for Scale {
    type R = C;
    #[inline(always)]
    fn apply(x: C, p: [C; 2]) -> C {
        x.div(p[0])
    }
}

fn infer(cx: &NodeCx) -> Result<Vec<crate::fact::Fact>> {
    infer_broadcast(cx, cx.required(0)?.dtype)
}

/// A loop that divides, and the divisor.
type Division<C> = (Loop1<C, C>, C);

/// Left fold over the inputs, rounded once.
struct Fold<T: Stored> {
    f: Loop2<T::C, T::C>,
    /// The division by the number of inputs that makes a mean.
    divide: Option<Division<T::C>>,
    tier: Tier,
}

impl<T: Stored> Kernel for Fold<T> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        let shape = out.shape();
        let inputs = cx.inputs;
        map::blocks(
            cx.par,
            out.slice::<T>(),
            CHEAP,
            || (),
            |(), range, out| {
                let mut other = [T::C::default(); BLOCK];
                let other = &mut other[..out.len()];
                for (i, input) in inputs.iter().flatten().enumerate() {
                    let view = View::broadcast(input.shape(), shape);
                    let mut reader = Reader::new(input.slice::<T>(), &view);
                    let block = reader.read(range.clone());
                    if i == 0 {
                        out.copy_from_slice(block);
                    } else {
                        (self.f)(self.tier, out, block, other);
                        out.copy_from_slice(other);
                    }
                }
                if let Some((divide, n)) = self.divide {
                    divide(self.tier, out, other, [n; 2]);
                    out.copy_from_slice(other);
                }
            },
        );
        Ok(())
    }
}
