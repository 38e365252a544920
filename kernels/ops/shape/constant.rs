//! Constant and ConstantOfShape: <https://onnx.ai/onnx/operators/onnx__Constant.html>,
//! <https://onnx.ai/onnx/operators/onnx__ConstantOfShape.html>.

use crate::cpu::number::MOVABLE;
use crate::cuda::{DeviceKernel, LaunchCx};
use crate::fact::Fact;
use crate::kernel::{Kernel, RunCx};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::movement::cuda;
use abi::{Attr, DType, Dim, HostTensor, Result};

/// Constant and ConstantOfShape.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Constant", (1, 25), claim_constant, infer_constant, |cx| Ok(Box::new(Fill(constant(cx)?))))
        .with_shape_only(),
    OpDef::new("", "ConstantOfShape", (9, 25), claim_of_shape, infer_of_shape, |cx| Ok(Box::new(Fill(element(cx)?))))
        .with_host_inputs(&[0])
        .with_cuda(|cx, device| Ok(Box::new(CudaFill(cuda::Fill::new(device, element(cx)?.bytes())?)))),
];

struct CudaFill(cuda::Fill);

impl DeviceKernel for CudaFill {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        self.0.launch(cx)
    }
}

/// The tensor that a Constant's one attribute gives.
fn constant(cx: &NodeCx) -> Result<HostTensor> {
    let name = |wanted: &str| cx.node().attr(wanted);
    if let Some(Attr::Tensor(tensor)) = name("value") {
        return Ok(tensor.clone());
    }
    if let Some(Attr::Int(v)) = name("value_int") {
        return Ok(HostTensor::new(&[], &[*v]));
    }
    if let Some(Attr::Float(v)) = name("value_float") {
        return Ok(HostTensor::new(&[], &[*v]));
    }
    if let Some(Attr::Ints(v)) = name("value_ints") {
        return Ok(HostTensor::new(&[v.len()], v));
    }
    if let Some(Attr::Floats(v)) = name("value_floats") {
        return Ok(HostTensor::new(&[v.len()], v));
    }
    let got: Vec<_> = cx.node().attrs.iter().map(|(name, _)| name.as_str()).collect();
    let expected = "one of value, value_int, value_ints, value_float and value_floats";
    Err(cx.error("attributes", format_args!("{got:?}"), expected))
}

fn claim_constant(cx: &NodeCx) -> Result<(), Decline> {
    let dtype = constant(cx)?.dtype();
    if MOVABLE.contains(&dtype) {
        return Ok(());
    }
    Err(cx.decline("attribute 'value'", dtype, "numbers of whole bytes or bool"))
}

fn infer_constant(cx: &NodeCx) -> Result<Vec<Fact>> {
    Ok(vec![Fact::with_value(constant(cx)?)])
}

/// The element that fills a ConstantOfShape.
fn element(cx: &NodeCx) -> Result<HostTensor> {
    match cx.tensor("value") {
        None => Ok(HostTensor::new(&[1], &[0f32])),
        Some(tensor) if tensor.shape().iter().product::<usize>() == 1 => Ok(tensor.clone()),
        Some(tensor) => Err(cx.error("attribute 'value'", format_args!("{tensor:?}"), "one element")),
    }
}

fn claim_of_shape(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(1)?;
    cx.check_dtype(0, "input", &[DType::I64])?;
    let dtype = element(cx)?.dtype();
    if MOVABLE.contains(&dtype) {
        return Ok(());
    }
    Err(cx.decline("attribute 'value'", dtype, "a number of whole bytes or bool"))
}

fn infer_of_shape(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (dtype, input) = (element(cx)?.dtype(), cx.required(0)?);
    let Some(dims) = input.ints() else {
        let rank = input.elements();
        return Ok(vec![Fact::of(dtype, rank.map(|r| vec![Dim::Unknown; r]))]);
    };
    let shape: Option<Vec<Dim>> = dims.iter().map(|&d| usize::try_from(d).ok().map(Dim::Known)).collect();
    match shape {
        Some(shape) => Ok(vec![Fact::new(dtype, shape)]),
        None => Err(cx.error("input 0 (input)", format_args!("{dims:?}"), "dims of 0 or more")),
    }
}

/// Writes a tensor over and over until the output is full.
struct Fill(HostTensor);

impl Kernel for Fill {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        let value = self.0.bytes();
        if value.iter().all(|&b| b == 0) {
            out.bytes().fill(0);
        } else {
            for piece in out.bytes().chunks_exact_mut(value.len()) {
                piece.copy_from_slice(value);
            }
        }
        Ok(())
    }
}
