//! Functions of one tensor.

use super::{CHEAP, COSTLY, cuda, infer_like, infer_same};
use crate::build::BuildCx;
use crate::cpu::arithmetic::{Bits, Number, Real};
use crate::cpu::map::{self, Loop1, Op1, loop1};
use crate::cpu::number::{Bool, FLOATS, INTS, NUMBERS, Stored};
use crate::cuda::{Device, DeviceKernel};
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::settings::Tier;
use crate::{with_integer, with_number, with_real};
use abi::{DType, Result};
use std::marker::PhantomData;
use std::sync::Arc;

const SIGNED: &[DType] =
    &[DType::F32, DType::F16, DType::BF16, DType::F64, DType::I64, DType::I32, DType::I16, DType::I8];

/// Two float attributes and their defaults.
type Params = [(&'static str, f64); 2];
const NONE: Params = [("", 0.0), ("", 0.0)];

const fn one(name: &'static str, default: f64) -> Params {
    [(name, default), ("", 0.0)]
}

const fn two(a: (&'static str, f64), b: (&'static str, f64)) -> Params {
    [a, b]
}

/// A table of ops: domain, op, first and last opset version, allowed types, elements worth a task, attributes, type
/// class and function of element `x` and parameters `p`.
macro_rules! unary_ops {
    ($const:ident: $($struct:ident $domain:literal $name:literal $first:literal..=$last:literal $types:ident $grain:ident
        $params:expr, $with:ident $Class:ident |$x:ident, $p:ident| $body:expr;)*) => {
        $(
            struct $struct;
            impl<C: $Class> Op1<C> for $struct {
                type R = C;
                #[inline(always)]
                fn apply($x: C, $p: [C; 2]) -> C {
                    $body
                }
            }
        )*
        /// Functions that keep the type.
        pub const $const: &[OpDef] = &[$(OpDef::new(
            $domain,
            $name,
            ($first, $last),
            |cx| claim(cx, $types),
            |cx| infer_same(cx),
            |cx| {
                let p = params(cx, $params);
                let tier = cx.settings().tier;
                Ok($with!(cx.required(0)?.dtype, T => Box::new(Unary::<T, T> {
                    f: loop1::<$struct, <T as Stored>::C>,
                    p: p.map(<T as Stored>::C::of_f64),
                    tier,
                    grain: $grain,
                })))
            },
        )
        .with_cuda(|cx, device| {
            let p = params(cx, $params);
            cuda::unary(cx, device, cuda::Unary::$struct, Some(p))
        })),*];
    };
}

unary_ops! { OPS:
    Neg "" "Neg" 6..=13 SIGNED CHEAP NONE, with_number Number |x, _p| x.neg();
    Abs "" "Abs" 6..=13 NUMBERS CHEAP NONE, with_number Number |x, _p| x.abs();
    Sign "" "Sign" 9..=13 NUMBERS CHEAP NONE, with_number Number |x, _p| x.sign();
    Relu "" "Relu" 6..=14 SIGNED CHEAP NONE, with_number Number |x, _p| x.larger(C::ZERO);
    BitwiseNot "" "BitwiseNot" 18..=18 INTS CHEAP NONE, with_integer Bits |x, _p| x.not();
    Sqrt "" "Sqrt" 6..=13 FLOATS CHEAP NONE, with_real Real |x, _p| x.sqrt();
    Reciprocal "" "Reciprocal" 6..=13 FLOATS CHEAP NONE, with_real Real |x, _p| C::ONE.div(x);
    Floor "" "Floor" 6..=13 FLOATS CHEAP NONE, with_real Real |x, _p| x.floor();
    Ceil "" "Ceil" 6..=13 FLOATS CHEAP NONE, with_real Real |x, _p| x.ceil();
    Round "" "Round" 11..=22 FLOATS CHEAP NONE, with_real Real |x, _p| x.round();
    Exp "" "Exp" 6..=13 FLOATS COSTLY NONE, with_real Real |x, _p| x.exp();
    Log "" "Log" 6..=13 FLOATS COSTLY NONE, with_real Real |x, _p| x.ln();
    Erf "" "Erf" 9..=13 FLOATS COSTLY NONE, with_real Real |x, _p| x.erf();
    Tanh "" "Tanh" 6..=13 FLOATS COSTLY NONE, with_real Real |x, _p| x.tanh();
    Sigmoid "" "Sigmoid" 6..=13 FLOATS COSTLY NONE, with_real Real |x, _p| x.sigmoid();
    Softplus "" "Softplus" 1..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.softplus();
    Softsign "" "Softsign" 1..=22 FLOATS CHEAP NONE, with_real Real |x, _p| x.div(C::ONE.add(x.abs()));
    Sin "" "Sin" 7..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.sin();
    Cos "" "Cos" 7..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.cos();
    Tan "" "Tan" 7..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.tan();
    Asin "" "Asin" 7..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.asin();
    Acos "" "Acos" 7..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.acos();
    Atan "" "Atan" 7..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.atan();
    Sinh "" "Sinh" 9..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.sinh();
    Cosh "" "Cosh" 9..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.cosh();
    Asinh "" "Asinh" 9..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.asinh();
    Acosh "" "Acosh" 9..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.acosh();
    Atanh "" "Atanh" 9..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.atanh();
    HardSigmoid "" "HardSigmoid" 6..=22 FLOATS CHEAP two(("alpha", 0.2), ("beta", 0.5)), with_real Real
        |x, p| x.mul(p[0]).add(p[1]).larger(C::ZERO).smaller(C::ONE);
    HardSwish "" "HardSwish" 14..=22 FLOATS CHEAP two(("", 1.0 / 6.0), ("", 0.5)), with_real Real
        |x, p| x.mul(x.mul(p[0]).add(p[1]).larger(C::ZERO).smaller(C::ONE));
    LeakyRelu "" "LeakyRelu" 6..=16 FLOATS CHEAP one("alpha", 0.01), with_real Real
        |x, p| if x < C::ZERO { x.mul(p[0]) } else { x };
    ThresholdedRelu "" "ThresholdedRelu" 10..=22 FLOATS CHEAP one("alpha", 1.0), with_real Real
        |x, p| if x > p[0] { x } else { C::ZERO };
    Elu "" "Elu" 6..=22 FLOATS COSTLY one("alpha", 1.0), with_real Real
        |x, p| if x < C::ZERO { p[0].mul(x.exp_m1()) } else { x };
    Selu "" "Selu" 6..=22 FLOATS COSTLY
        two(("alpha", 1.673_263_192_176_818_8), ("gamma", 1.050_701_022_148_132_3)), with_real Real
        |x, p| p[1].mul(if x > C::ZERO { x } else { p[0].mul(x.exp_m1()) });
    Celu "" "Celu" 12..=28 FLOATS COSTLY one("alpha", 1.0), with_real Real
        |x, p| x.larger(C::ZERO).add(p[0].mul(x.div(p[0]).exp_m1()).smaller(C::ZERO));
    Mish "" "Mish" 18..=22 FLOATS COSTLY NONE, with_real Real |x, _p| x.mul(x.softplus().tanh());
    Swish "" "Swish" 24..=24 FLOATS COSTLY one("alpha", 1.0), with_real Real |x, p| x.mul(x.mul(p[0]).sigmoid());
    QuickGelu "com.microsoft" "QuickGelu" 1..=1 FLOATS COSTLY one("alpha", 1.702), with_real Real
        |x, p| x.mul(x.mul(p[0]).sigmoid());
    Clip "" "Clip" 6..=6 FLOATS CHEAP two(("min", f64::NEG_INFINITY), ("max", f64::INFINITY)), with_real Real
        |x, p| x.larger(p[0]).smaller(p[1]);
}

/// x/2 (1 + erf(x / sqrt 2)), or its approximation by tanh.
struct ErfGelu;
impl<C: Real> Op1<C> for ErfGelu {
    type R = C;
    /// Parameters: 1 / sqrt 2 and 1/2.
    #[inline(always)]
    fn apply(x: C, p: [C; 2]) -> C {
        p[1].mul(x).mul(C::ONE.add(x.mul(p[0]).erf()))
    }
}

struct TanhGelu;
impl<C: Real> Op1<C> for TanhGelu {
    type R = C;
    /// Parameters: 2 sqrt(2 / pi) and 0.044715. As 1/2 (1 + tanh u) is sigmoid(2 u).
    #[inline(always)]
    fn apply(x: C, p: [C; 2]) -> C {
        let u = x.add(p[1].mul(x).mul(x).mul(x));
        x.mul(p[0].mul(u).sigmoid())
    }
}

struct IsNan;
impl<C: Real> Op1<C> for IsNan {
    type R = Bool;
    #[inline(always)]
    fn apply(x: C, _: [C; 2]) -> Bool {
        x.is_nan().into()
    }
}

/// Parameters: whether to detect the negative and the positive infinity.
struct IsInf;
impl<C: Real> Op1<C> for IsInf {
    type R = Bool;
    #[inline(always)]
    fn apply(x: C, p: [C; 2]) -> Bool {
        let negative = x == C::LOWEST && p[0] != C::ZERO;
        (negative || (x == C::HIGHEST && p[1] != C::ZERO)).into()
    }
}

struct Not;
impl Op1<Bool> for Not {
    type R = Bool;
    #[inline(always)]
    fn apply(x: Bool, _: [Bool; 2]) -> Bool {
        (!x.is_true()).into()
    }
}

/// Functions of one tensor that the table's form does not hold.
pub const IRREGULAR: &[OpDef] = &[
    OpDef::new(
        "",
        "IsNaN",
        (9, 20),
        |cx| claim(cx, FLOATS),
        infer_bool,
        |cx| {
            let tier = cx.settings().tier;
            Ok(with_real!(cx.required(0)?.dtype, T => Box::new(Unary::<T, Bool> {
                f: loop1::<IsNan, <T as Stored>::C>, p: [<T as Stored>::C::ZERO; 2], tier, grain: CHEAP,
            })))
        },
    )
    .with_cuda(|cx, device| cuda::unary(cx, device, cuda::Unary::IsNan, Some([0.0; 2]))),
    OpDef::new(
        "",
        "IsInf",
        (10, 20),
        |cx| claim(cx, FLOATS),
        infer_bool,
        |cx| {
            let flags = detected(cx);
            let tier = cx.settings().tier;
            Ok(with_real!(cx.required(0)?.dtype, T => Box::new(Unary::<T, Bool> {
                f: loop1::<IsInf, <T as Stored>::C>, p: flags.map(<T as Stored>::C::of_f64), tier, grain: CHEAP,
            })))
        },
    )
    .with_cuda(|cx, device| {
        let flags = detected(cx);
        cuda::unary(cx, device, cuda::Unary::IsInf, Some(flags))
    }),
    OpDef::new(
        "",
        "Not",
        (1, 1),
        |cx| claim(cx, &[DType::Bool]),
        infer_bool,
        |cx| {
            let tier = cx.settings().tier;
            Ok(Box::new(Unary::<Bool, Bool> { f: loop1::<Not, Bool>, p: [Bool(0); 2], tier, grain: CHEAP }))
        },
    )
    .with_cuda(|cx, device| cuda::unary(cx, device, cuda::Unary::Not, Some([0.0; 2]))),
    OpDef::new("", "Gelu", (20, 20), claim_gelu, infer_same, build_gelu).with_cuda(build_gelu_cuda),
    OpDef::new("com.microsoft", "Gelu", (1, 1), claim_gelu, infer_same, build_gelu).with_cuda(build_gelu_cuda),
    OpDef::new("", "Clip", (11, 13), claim_clip, infer_clip, |cx| {
        let tier = cx.settings().tier;
        Ok(with_number!(cx.required(0)?.dtype, T => Box::new(Clamp::<T> { tier, kind: PhantomData })))
    })
    .with_cuda(|cx, device| cuda::unary(cx, device, cuda::Unary::Clip, None)),
];

/// Whether IsInf detects the negative and the positive infinity: 0 or 1.
fn detected(cx: &NodeCx) -> [f64; 2] {
    ["detect_negative", "detect_positive"].map(|name| (cx.int(name, 1) != 0) as u8 as f64)
}

fn claim(cx: &NodeCx, allowed: &[DType]) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "X", allowed)
}

fn infer_bool(cx: &NodeCx) -> Result<Vec<Fact>> {
    infer_like(cx, DType::Bool)
}

/// The values of the attributes.
fn params(cx: &NodeCx, params: Params) -> [f64; 2] {
    params.map(|(name, default)| match name {
        "" => default,
        // The defaults are f32 attributes too, but f64 input deserves the exact 1/6.
        _ if cx.node().attr(name).is_none() => default,
        _ => cx.float(name, 0.0).into(),
    })
}

/// One tensor to one of its shape.
struct Unary<T: Stored, R: Stored> {
    f: Loop1<T::C, R::C>,
    p: [T::C; 2],
    tier: Tier,
    grain: usize,
}

impl<T: Stored, R: Stored> Kernel for Unary<T, R> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let x = cx.required(0);
        if let Some(mut out) = cx.output(0) {
            map::map1(cx.par, self.tier, x.slice::<T>(), out.slice::<R>(), self.f, self.p, self.grain);
        }
        Ok(())
    }
}

fn claim_gelu(cx: &NodeCx) -> Result<(), Decline> {
    claim(cx, FLOATS)?;
    cx.check_string("approximate", "none", &["none", "tanh"])
}

/// Whether Gelu is approximated, and its parameters.
fn gelu(cx: &NodeCx) -> (bool, [f64; 2]) {
    if cx.string("approximate", "none") == "tanh" {
        (true, [2.0 * (2.0 / std::f64::consts::PI).sqrt(), 0.044715])
    } else {
        (false, [std::f64::consts::FRAC_1_SQRT_2, 0.5])
    }
}

fn build_gelu_cuda(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let (tanh, p) = gelu(cx);
    cuda::unary(cx, device, if tanh { cuda::Unary::TanhGelu } else { cuda::Unary::ErfGelu }, Some(p))
}

fn build_gelu(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let (tanh, p) = gelu(cx);
    let tier = cx.settings().tier;
    Ok(with_real!(cx.required(0)?.dtype, T => {
        type C = <T as Stored>::C;
        let f = if tanh { loop1::<TanhGelu, C> } else { loop1::<ErfGelu, C> };
        Box::new(Unary::<T, T> { f, p: p.map(C::of_f64), tier, grain: COSTLY })
    }))
}

const BOUNDS: [(usize, &str); 2] = [(1, "min"), (2, "max")];

fn claim_clip(cx: &NodeCx) -> Result<(), Decline> {
    claim(cx, NUMBERS)?;
    let dtype = cx.required(0)?.dtype;
    BOUNDS.iter().try_for_each(|&(slot, name)| cx.check_dtype(slot, name, &[dtype]))
}

fn infer_clip(cx: &NodeCx) -> Result<Vec<Fact>> {
    for (slot, name) in BOUNDS {
        let elements = cx.input(slot).and_then(Fact::elements);
        if let Some(n) = elements.filter(|&n| n != 1) {
            let slot = format!("input {slot} ({name})");
            return Err(cx.error(slot, format_args!("{n} elements"), "a scalar"));
        }
    }
    infer_same(cx)
}

/// Clip whose bounds are inputs.
struct Clamp<T> {
    tier: Tier,
    kind: PhantomData<T>,
}

struct Within;
impl<C: Number> Op1<C> for Within {
    type R = C;
    #[inline(always)]
    fn apply(x: C, p: [C; 2]) -> C {
        x.larger(p[0]).smaller(p[1])
    }
}

impl<T: Stored<C: Number>> Kernel for Clamp<T> {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let x = cx.required(0);
        let bound = |slot, none| cx.input(slot).map_or(none, |t| t.slice::<T>()[0].load());
        let p = [bound(1, T::C::LOWEST), bound(2, T::C::HIGHEST)];
        if let Some(mut out) = cx.output(0) {
            let f = loop1::<Within, T::C>;
            map::map1(cx.par, self.tier, x.slice::<T>(), out.slice::<T>(), f, p, CHEAP);
        }
        Ok(())
    }
}
