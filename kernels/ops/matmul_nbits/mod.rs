//! com.microsoft MatMulNBits:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits>.
//!
//! `Y[.., N] = A[.., K] * dequantised(B)^T + bias`.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::fact::Fact;
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use crate::quant::nbits::{Layout, ZeroPoint};
use abi::{Attr, DType, Dim, Node, Result};

pub use cpu::{name as pack_name, pack};
pub(crate) use cuda::{pack as cuda_pack, pack_name as cuda_pack_name};

/// The definitions.
pub const OPS: &[OpDef] =
    &[OpDef::new("com.microsoft", "MatMulNBits", (1, 1), claim, infer, build).with_cuda(cuda::build)];

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Input slots.
const A: usize = 0;
const B: usize = 1;
const SCALES: usize = 2;
const ZERO_POINTS: usize = 3;
const BIAS: usize = 5;

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(3)?;
    cx.check_dtype(A, "A", &FLOATS)?;
    cx.check_dtype(B, "B", &[DType::U8])?;
    let dtype = cx.required(A)?.dtype;
    cx.check_dtype(SCALES, "scales", &[dtype])?;
    cx.check_dtype(ZERO_POINTS, "zero_points", &[DType::U8, dtype])?;
    cx.check_dtype(BIAS, "bias", &[dtype])?;
    cx.check_absent(4, "g_idx", "the schema calls it deprecated")?;
    cx.check_int("weight_prepacked", 0, &[0])?;
    cx.check_int("bits", 4, &[2, 4, 8])?;
    cx.check_int("block_size", 0, &[16, 32, 64, 128, 256])?;
    cx.check_int("accuracy_level", 0, &[0, 1, 2, 3, 4])?;
    for name in ["K", "N"] {
        let got = cx.int(name, 0);
        if !(1..=i64::from(i32::MAX)).contains(&got) {
            return Err(cx.decline(format_args!("attribute '{name}'"), got, "a positive 32-bit integer"));
        }
    }
    Ok(check_shapes(cx)?)
}

/// The weights' layout, from the attributes and types that the claim has checked.
fn layout(cx: &NodeCx) -> Result<Layout> {
    Ok(Layout {
        n: cx.int("N", 0) as usize,
        k: cx.int("K", 0) as usize,
        bits: cx.int("bits", 4) as usize,
        block: cx.int("block_size", 0) as usize,
        scale: cx.required(A)?.dtype,
        zero_point: match cx.input(ZERO_POINTS) {
            None => ZeroPoint::Default,
            Some(fact) if fact.dtype == DType::U8 => ZeroPoint::Bytes,
            Some(_) => ZeroPoint::Float,
        },
    })
}

/// Whether B leaves the projection out: one of its dims is 0.
fn omitted(cx: &NodeCx) -> bool {
    cx.input(B).and_then(|f| f.shape.as_ref()).is_some_and(|s| s.iter().any(|d| d.known() == Some(0)))
}

/// Checks the sizes of B, scales, zero points and bias where they are known; ranks are free, as ORT has them.
fn check_shapes(cx: &NodeCx) -> Result<()> {
    let l = layout(cx)?;
    let check = |slot: usize, name: &str, expected: usize, text: String| match cx.input(slot).and_then(Fact::elements) {
        Some(got) if got != expected => Err(cx.error(
            format_args!("input {slot} ({name})"),
            format_args!("{got} elements"),
            format_args!("{expected}: {text}"),
        )),
        _ => Ok(()),
    };
    let (n, blocks, bits) = (l.n, l.blocks(), l.bits);
    check(BIAS, "bias", n, format!("[N = {n}]"))?;
    if omitted(cx) {
        return Ok(());
    }
    let (b, _, zero_points) = l.source_bytes();
    let blob = l.blob();
    check(B, "B", b, format!("[N = {n}, blocks = {blocks}, blob = {blob}]"))?;
    let floats = format!("[N = {n}, blocks = {blocks}]");
    check(SCALES, "scales", n * blocks, floats.clone())?;
    match l.zero_point {
        ZeroPoint::Default => Ok(()),
        ZeroPoint::Float => check(ZERO_POINTS, "zero_points", n * blocks, floats),
        ZeroPoint::Bytes => {
            let text = format!("[N = {n}, ceil(blocks * bits / 8) = ceil({blocks} * {bits} / 8)]");
            check(ZERO_POINTS, "zero_points", zero_points, text)
        }
    }
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_shapes(cx)?;
    let (a, k, n) = (cx.required(A)?, cx.int("K", 0), cx.int("N", 0));
    let Some(shape) = &a.shape else {
        return Ok(vec![Fact::unranked(a.dtype)]);
    };
    let fits = match shape.last() {
        Some(Dim::Known(got)) => *got as i64 == k,
        Some(_) => true,
        None => false,
    };
    if !fits {
        return Err(cx.error(
            "input 0 (A)",
            format_args!("shape {shape:?}"),
            format_args!("a last dimension of K = {k}"),
        ));
    }
    let mut out = shape.clone();
    out[shape.len() - 1] = Dim::Known(n as usize);
    Ok(vec![Fact::new(a.dtype, out)])
}

/// Whether `node` is a MatMulNBits whose attributes ask for `layout`; its inputs are the caller's to compare.
pub fn packs_as(node: &Node, layout: &Layout) -> bool {
    let int = |name: &str, default: usize| match node.attr(name) {
        Some(Attr::Int(v)) => usize::try_from(*v).ok(),
        _ => Some(default),
    };
    let packed = layout.zero_point == ZeroPoint::Bytes;
    node.domain == "com.microsoft"
        && node.op_type == "MatMulNBits"
        && int("K", 0) == Some(layout.k)
        && int("N", 0) == Some(layout.n)
        && int("bits", 4) == Some(layout.bits)
        && int("block_size", 0) == Some(layout.block)
        && layout.k == layout.padded_k()
        && matches!(node.inputs.get(ZERO_POINTS), Some(Some(_))) == packed
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    cpu::build(cx)
}
