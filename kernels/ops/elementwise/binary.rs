//! Functions of two tensors that broadcast.

use super::{CHEAP, claim_same, cuda, infer_broadcast};
use crate::build::BuildCx;
use crate::cpu::arithmetic::{Bits, Number};
use crate::cpu::map::{self, Loop2, Op2, loop2};
use crate::cpu::number::{ANY, Bool, FLOATS, INTS, NUMBERS, Stored};
use crate::cpu::view::View;
use crate::cuda::walk::claim_rank;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::settings::Tier;
use crate::{with_any, with_integer, with_number};
use abi::{DType, Result};

const BOOL: &[DType] = &[DType::Bool];

/// A table of ops: op, first and last opset version, allowed types, dispatcher, bound on the type of the
/// computation, result and function.
macro_rules! binary_ops {
    ($const:ident: $($struct:ident $name:literal $first:literal..=$last:literal $types:ident $with:ident
        [$($bound:tt)*] -> $R:ident |$a:ident, $b:ident| $body:expr;)*) => {
        $(
            struct $struct;
            impl<C: Stored<C = C> + $($bound)*> Op2<C> for $struct {
                type R = binary_ops!(@computed $R C);
                #[inline(always)]
                fn apply($a: C, $b: C) -> Self::R {
                    $body.into()
                }
            }
        )*
        /// Functions of two tensors.
        pub const $const: &[OpDef] = &[$(OpDef::new(
            "",
            $name,
            ($first, $last),
            |cx| claim_same(cx, 2, $types),
            |cx| infer_broadcast(cx, binary_ops!(@dtype $R cx)),
            |cx| {
                let tier = cx.settings().tier;
                Ok($with!(cx.required(0)?.dtype, T => Box::new(Binary::<T, binary_ops!(@stored $R T)> {
                    f: loop2::<$struct, <T as Stored>::C>,
                    tier,
                    divides: None,
                })))
            },
        )
        .with_cuda_claim(claim_rank, |cx, device| cuda::binary(cx, device, cuda::Binary::$struct))),*];
    };
    (@computed Same $C:ident) => { $C };
    (@computed Bool $C:ident) => { Bool };
    (@stored Same $T:ident) => { $T };
    (@stored Bool $T:ident) => { Bool };
    (@dtype Same $cx:ident) => { $cx.required(0)?.dtype };
    (@dtype Bool $cx:ident) => { DType::Bool };
}

binary_ops! { OPS:
    Add "Add" 7..=14 NUMBERS with_number [Number] -> Same |a, b| a.add(b);
    Sub "Sub" 7..=14 NUMBERS with_number [Number] -> Same |a, b| a.sub(b);
    Mul "Mul" 7..=14 NUMBERS with_number [Number] -> Same |a, b| a.mul(b);
    PRelu "PRelu" 7..=16 NUMBERS with_number [Number] -> Same |a, b| if a < C::ZERO { a.mul(b) } else { a };
    Equal "Equal" 7..=19 ANY with_any [PartialEq] -> Bool |a, b| a == b;
    Less "Less" 7..=13 NUMBERS with_number [Number] -> Bool |a, b| a < b;
    LessOrEqual "LessOrEqual" 12..=16 NUMBERS with_number [Number] -> Bool |a, b| a <= b;
    Greater "Greater" 7..=13 NUMBERS with_number [Number] -> Bool |a, b| a > b;
    GreaterOrEqual "GreaterOrEqual" 12..=16 NUMBERS with_number [Number] -> Bool |a, b| a >= b;
    BitwiseAnd "BitwiseAnd" 18..=18 INTS with_integer [Bits] -> Same |a, b| a.and(b);
    BitwiseOr "BitwiseOr" 18..=18 INTS with_integer [Bits] -> Same |a, b| a.or(b);
    BitwiseXor "BitwiseXor" 18..=18 INTS with_integer [Bits] -> Same |a, b| a.xor(b);
}

/// Two tensors to one that both broadcast to.
pub(super) struct Binary<T: Stored, R: Stored> {
    f: Loop2<T::C, R::C>,
    tier: Tier,
    /// Whether a divisor is one that must not be: integers have no infinity.
    divides: Option<fn(&T) -> bool>,
}

impl<T: Stored, R: Stored> Kernel for Binary<T, R> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (a, b) = (cx.required(0), cx.required(1));
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        if self.divides.is_some_and(|bad| b.slice::<T>().iter().any(bad)) {
            return Err(cx.error("input 1 (B)", "a zero divisor", "integers other than 0"));
        }
        let views = [a.shape(), b.shape()].map(|shape| View::broadcast(shape, out.shape()));
        let (a, b) = ((a.slice::<T>(), &views[0]), (b.slice::<T>(), &views[1]));
        map::map2(cx.par, self.tier, a, b, out.slice::<R>(), self.f, CHEAP);
        Ok(())
    }
}

struct Div;
impl<C: Number> Op2<C> for Div {
    type R = C;
    #[inline(always)]
    fn apply(a: C, b: C) -> C {
        a.div(b)
    }
}

struct Modulo;
impl<C: Number> Op2<C> for Modulo {
    type R = C;
    #[inline(always)]
    fn apply(a: C, b: C) -> C {
        a.modulo(b)
    }
}

struct Fmod;
impl<C: Number> Op2<C> for Fmod {
    type R = C;
    #[inline(always)]
    fn apply(a: C, b: C) -> C {
        a.rem(b)
    }
}

struct ShiftLeft;
impl<C: Bits> Op2<C> for ShiftLeft {
    type R = C;
    #[inline(always)]
    fn apply(a: C, b: C) -> C {
        a.shift_left(b)
    }
}

struct ShiftRight;
impl<C: Bits> Op2<C> for ShiftRight {
    type R = C;
    #[inline(always)]
    fn apply(a: C, b: C) -> C {
        a.shift_right(b)
    }
}

macro_rules! logic {
    ($($struct:ident $op:tt)*) => {$(
        struct $struct;
        impl Op2<Bool> for $struct {
            type R = Bool;
            #[inline(always)]
            fn apply(a: Bool, b: Bool) -> Bool {
                (a.is_true() $op b.is_true()).into()
            }
        }
    )*};
}
logic!(And & Or | Xor ^);

/// Functions of two tensors with attributes or conditions on values.
pub const IRREGULAR: &[OpDef] = &[
    OpDef::new(
        "",
        "Div",
        (7, 14),
        |cx| claim_same(cx, 2, NUMBERS),
        infer_same_type,
        |cx| {
            let tier = cx.settings().tier;
            Ok(with_number!(cx.required(0)?.dtype, T => divider::<T>(tier, loop2::<Div, <T as Stored>::C>)))
        },
    )
    .with_cuda_claim(claim_rank, |cx, device| cuda::binary(cx, device, cuda::Binary::Div)),
    OpDef::new("", "Mod", (10, 28), claim_mod, infer_same_type, |cx| {
        let (tier, fmod) = (cx.settings().tier, cx.int("fmod", 0) != 0);
        Ok(with_number!(cx.required(0)?.dtype, T => {
            type C = <T as Stored>::C;
            divider::<T>(tier, if fmod { loop2::<Fmod, C> } else { loop2::<Modulo, C> })
        }))
    })
    .with_cuda_claim(claim_rank, |cx, device| {
        let op = if cx.int("fmod", 0) != 0 { cuda::Binary::Rem } else { cuda::Binary::Modulo };
        cuda::binary(cx, device, op)
    }),
    OpDef::new("", "BitShift", (11, 28), claim_shift, infer_same_type, |cx| {
        let (tier, left) = (cx.settings().tier, cx.string("direction", "") == "LEFT");
        Ok(with_integer!(cx.required(0)?.dtype, T => Box::new(Binary::<T, T> {
            f: if left { loop2::<ShiftLeft, T> } else { loop2::<ShiftRight, T> },
            tier,
            divides: None,
        })))
    })
    .with_cuda_claim(claim_rank, |cx, device| {
        let left = cx.string("direction", "") == "LEFT";
        cuda::binary(cx, device, if left { cuda::Binary::ShiftLeft } else { cuda::Binary::ShiftRight })
    }),
    OpDef::new("", "And", (7, 7), |cx| claim_same(cx, 2, BOOL), infer_same_type, |cx| logic(cx, loop2::<And, Bool>))
        .with_cuda_claim(claim_rank, |cx, device| cuda::binary(cx, device, cuda::Binary::BitwiseAnd)),
    OpDef::new("", "Or", (7, 7), |cx| claim_same(cx, 2, BOOL), infer_same_type, |cx| logic(cx, loop2::<Or, Bool>))
        .with_cuda_claim(claim_rank, |cx, device| cuda::binary(cx, device, cuda::Binary::BitwiseOr)),
    OpDef::new("", "Xor", (7, 7), |cx| claim_same(cx, 2, BOOL), infer_same_type, |cx| logic(cx, loop2::<Xor, Bool>))
        .with_cuda_claim(claim_rank, |cx, device| cuda::binary(cx, device, cuda::Binary::BitwiseXor)),
];

fn infer_same_type(cx: &NodeCx) -> Result<Vec<crate::fact::Fact>> {
    infer_broadcast(cx, cx.required(0)?.dtype)
}

fn divider<T: Stored<C: Number>>(tier: Tier, f: Loop2<T::C, T::C>) -> Box<dyn Kernel> {
    let divides: Option<fn(&T) -> bool> = T::C::EXACT.then_some(|v| v.load() == T::C::ZERO);
    Box::new(Binary::<T, T> { f, tier, divides })
}

fn logic(cx: &mut BuildCx, f: Loop2<Bool, Bool>) -> Result<Box<dyn Kernel>> {
    let tier = cx.settings().tier;
    Ok(Box::new(Binary::<Bool, Bool> { f, tier, divides: None }))
}

fn claim_mod(cx: &NodeCx) -> Result<(), Decline> {
    claim_same(cx, 2, NUMBERS)?;
    let floored = cx.int("fmod", 0) == 0;
    if floored && cx.node().since_version < 28 && FLOATS.contains(&cx.required(0)?.dtype) {
        return Err(cx.decline("attribute 'fmod'", 0, "1 for float types before opset 28"));
    }
    Ok(())
}

fn claim_shift(cx: &NodeCx) -> Result<(), Decline> {
    claim_same(cx, 2, INTS)?;
    cx.check_string("direction", "", &["LEFT", "RIGHT"])
}
