//! Elementwise ops on CUDA devices: which kernel, its op code and how its operands broadcast.

use crate::build::BuildCx;
use crate::cuda::number::{code, size};
use crate::cuda::walk::{Walk, claim_rank, spread};
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, suffix};
use crate::kernel_params;
use crate::op::{Decline, NodeCx};
use abi::cuda::Function;
use abi::{DType, Result};
use std::sync::Arc;

type Built = Result<Box<dyn DeviceKernel>>;

/// Bytes of a vector.
const VECTOR: usize = 16;

/// `UnaryCode` of `unary.cu`.
#[derive(Clone, Copy, PartialEq)]
#[rustfmt::skip]
pub(super) enum Unary {
    Neg, Abs, Sign, Relu, BitwiseNot, Clip,
    Sqrt, Reciprocal, Floor, Ceil, Round, Exp, Log, Erf, Tanh, Sigmoid, Softplus, Softsign, HardSigmoid,
    HardSwish, LeakyRelu, ThresholdedRelu, Swish, ErfGelu, TanhGelu,
    Sin, Cos, Tan, Asin, Acos, Atan, Sinh, Cosh, Asinh, Acosh, Atanh, Elu, Selu, Celu, Mish,
    IsNan, IsInf, Not,
}

impl Unary {
    #[allow(non_upper_case_globals)]
    pub(super) const QuickGelu: Self = Self::Swish;
}

kernel_params! {
    /// As in `unary.cu`.
    struct UnaryParams { x: DevPtr, low: DevPtr, high: DevPtr, y: DevPtr, n: u64, p: [f64; 2], q: [f32; 2], op: u32, bounds: u32 }
}

/// A function of one tensor and two numbers, or of Clip's bounds.
pub(super) fn unary(cx: &mut BuildCx, device: &Arc<Device>, op: Unary, p: Option<[f64; 2]>) -> Built {
    let dtype = cx.required(0)?.dtype;
    let name = match op {
        Unary::Not => "logical_not".into(),
        Unary::IsNan | Unary::IsInf => format!("is_special_{}", suffix(dtype)),
        _ if op as u32 >= Unary::Sin as u32 => format!("unary_rare_{}", suffix(dtype)),
        _ => format!("unary_{}", suffix(dtype)),
    };
    Ok(Box::new(UnaryKernel { function: device.function("elementwise_unary", &name)?, op, p }))
}

struct UnaryKernel {
    function: Function,
    op: Unary,
    /// `None`: inputs 1 and 2 are the bounds.
    p: Option<[f64; 2]>,
}

impl DeviceKernel for UnaryKernel {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (x, Some(y)) = (cx.required(0), cx.output(0)) else { return Ok(()) };
        let p = self.p.unwrap_or_default();
        let bound = |slot| if self.p.is_none() { cx.input_ptr(slot) } else { DevPtr::NULL };
        let params = UnaryParams {
            x: x.ptr,
            low: bound(1),
            high: bound(2),
            y: y.ptr,
            n: x.len() as u64,
            p,
            q: p.map(|v| v as f32),
            op: self.op as u32,
            bounds: self.p.is_none().into(),
        };
        let unit = if (self.op as u32) < Unary::Sin as u32 { VECTOR / size(x.dtype) } else { 1 };
        cx.push(&self.function, spread(cx.device(), x.len().div_ceil(unit)), &params)
    }
}

/// `BinaryCode` of `binary.cu`.
#[derive(Clone, Copy, PartialEq)]
#[rustfmt::skip]
pub(super) enum Binary {
    Add, Sub, Mul, Div, Modulo, Rem, Max, Min, PRelu, SwiGlu,
    BitwiseAnd, BitwiseOr, BitwiseXor, ShiftLeft, ShiftRight,
    Equal, Less, LessOrEqual, Greater, GreaterOrEqual,
}

kernel_params! {
    /// As in `binary.cu`.
    struct BinaryParams {
        a: DevPtr, b: DevPtr, y: DevPtr, n: u64, walk: Walk<2>, op: u32, vector: u32, alpha: f32, pad: u32,
    }
}

/// A function of two tensors that broadcast.
pub(super) fn binary(cx: &mut BuildCx, device: &Arc<Device>, op: Binary) -> Built {
    let dtype = cx.required(0)?.dtype;
    let name = match dtype {
        DType::Bool if op == Binary::Equal => "compare_u8".into(),
        DType::Bool => "logic".into(),
        _ if op as u32 >= Binary::Equal as u32 => format!("compare_{}", suffix(dtype)),
        _ => format!("binary_{}", suffix(dtype)),
    };
    let function = device.function("elementwise_binary", &name)?;
    Ok(Box::new(BinaryKernel { function, op, alpha: cx.float("alpha", 1.0) }))
}

struct BinaryKernel {
    function: Function,
    op: Binary,
    alpha: f32,
}

impl DeviceKernel for BinaryKernel {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (a, b, Some(y)) = (cx.required(0), cx.required(1), cx.output(0)) else { return Ok(()) };
        if y.is_empty() {
            return Ok(());
        }
        let walk = walk(cx, [a.shape, b.shape], y.shape)?;
        let vector = VECTOR / size(a.dtype);
        let vectors = walk.has_vectors(vector);
        let params = BinaryParams {
            a: a.ptr,
            b: b.ptr,
            y: y.ptr,
            n: y.len() as u64,
            walk,
            op: self.op as u32,
            vector: vectors.into(),
            alpha: self.alpha,
            pad: 0,
        };
        let units = if vectors { y.len().div_ceil(vector) } else { y.len() };
        cx.push(&self.function, spread(cx.device(), units), &params)
    }
}

fn walk<const K: usize>(cx: &LaunchCx, shapes: [&[usize]; K], out: &[usize]) -> Result<Walk<K>> {
    let walk = Walk::broadcast(shapes, out);
    walk.ok_or_else(|| {
        cx.error("inputs", format_args!("shapes {shapes:?}"), "shapes that broadcast in at most 8 steps")
    })
}

kernel_params! {
    /// As in `select.cu`.
    struct SelectParams {
        condition: DevPtr, x: DevPtr, y: DevPtr, out: DevPtr, n: u64, walk: Walk<3>, vector: u32, pad: u32,
    }
}

/// Where.
pub(super) fn select(cx: &mut BuildCx, device: &Arc<Device>) -> Built {
    let name = format!("select_{}", 8 * size(cx.required(1)?.dtype));
    Ok(Box::new(Select(device.function("elementwise_select", &name)?)))
}

struct Select(Function);

impl DeviceKernel for Select {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (condition, x, y) = (cx.required(0), cx.required(1), cx.required(2));
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let walk = walk(cx, [condition.shape, x.shape, y.shape], out.shape)?;
        let vector = VECTOR / size(x.dtype);
        let vectors = walk.has_vectors(vector);
        let params = SelectParams {
            condition: condition.ptr,
            x: x.ptr,
            y: y.ptr,
            out: out.ptr,
            n: out.len() as u64,
            walk,
            vector: vectors.into(),
            pad: 0,
        };
        let units = if vectors { out.len().div_ceil(vector) } else { out.len() };
        cx.push(&self.0, spread(cx.device(), units), &params)
    }
}

kernel_params! {
    /// As in `pow.cu`.
    struct PowParams { x: DevPtr, y: DevPtr, out: DevPtr, n: u64, walk: Walk<2>, exponent: u32, pad: u32 }
}

/// Pow.
pub(super) fn pow(cx: &mut BuildCx, device: &Arc<Device>) -> Built {
    let name = format!("pow_{}", suffix(cx.required(0)?.dtype));
    Ok(Box::new(Pow(device.function("elementwise_pow", &name)?)))
}

struct Pow(Function);

impl DeviceKernel for Pow {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (x, y) = (cx.required(0), cx.required(1));
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let (n, walk) = (out.len(), walk(cx, [x.shape, y.shape], out.shape)?);
        let exponent = code(y.dtype);
        let params = PowParams { x: x.ptr, y: y.ptr, out: out.ptr, n: n as u64, walk, exponent, pad: 0 };
        cx.push(&self.0, spread(cx.device(), n), &params)
    }
}

/// Inputs that `variadic.cu` takes.
const MOST: usize = 16;

/// `VariadicCode` of `variadic.cu`.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Variadic {
    Max,
    Min,
    Sum,
    Mean,
}

kernel_params! {
    /// As in `variadic.cu`.
    struct VariadicParams { inputs: [DevPtr; MOST], y: DevPtr, n: u64, walk: Walk<MOST>, count: u32, op: u32 }
}

pub(super) fn claim_variadic(cx: &NodeCx) -> Result<(), Decline> {
    if cx.inputs_len() > MOST {
        let expected = format!("at most {MOST} on CUDA devices");
        return Err(cx.decline("inputs", cx.inputs_len(), expected));
    }
    claim_rank(cx)
}

/// A function of one or more tensors.
pub(super) fn variadic(cx: &mut BuildCx, device: &Arc<Device>, op: Variadic) -> Built {
    let of_two = match op {
        Variadic::Max => Some(Binary::Max),
        Variadic::Min => Some(Binary::Min),
        Variadic::Sum => Some(Binary::Add),
        Variadic::Mean => None,
    };
    if let Some(of_two) = of_two.filter(|_| cx.inputs_len() == 2) {
        return binary(cx, device, of_two);
    }
    let name = format!("variadic_{}", suffix(cx.required(0)?.dtype));
    Ok(Box::new(VariadicKernel {
        function: device.function("elementwise_variadic", &name)?,
        op,
        count: cx.inputs_len(),
    }))
}

struct VariadicKernel {
    function: Function,
    op: Variadic,
    count: usize,
}

impl DeviceKernel for VariadicKernel {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let Some(y) = cx.output(0).filter(|y| !y.is_empty()) else { return Ok(()) };
        let (mut inputs, mut shapes) = ([DevPtr::NULL; MOST], [&[][..]; MOST]);
        for slot in 0..self.count {
            let input = cx.required(slot);
            (inputs[slot], shapes[slot]) = (input.ptr, input.shape);
        }
        let (n, walk) = (y.len(), walk(cx, shapes, y.shape)?);
        let (count, op) = (self.count as u32, self.op as u32);
        let params = VariadicParams { inputs, y: y.ptr, n: n as u64, walk, count, op };
        cx.push(&self.function, spread(cx.device(), n), &params)
    }
}
