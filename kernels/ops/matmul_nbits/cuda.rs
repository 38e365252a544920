//! MatMulNBits on CUDA devices. 16-bit activations: tensor cores on weights decoded in registers; float ones: float
//! throughout. `accuracy_level` changes nothing: sums are always float.

use super::{A, B, BIAS, SCALES, ZERO_POINTS, cpu, layout, omitted};
use crate::build::BuildCx;
use crate::cuda::{
    Buffer, ConstantProduct, DevPtr, Device, DeviceKernel, LaunchCx, ProductKernels, ProductParams, Weights,
    gemv_shape, linear,
};
use crate::kernel_params;
use crate::quant::fragments::{self, Parts};
use crate::quant::nbits::Layout;
use crate::weights::Constant;
use abi::cuda::Function;
use abi::{DType, Result};
use std::sync::Arc;

/// Parses the node and packs its weights.
pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let layout = layout(cx)?;
    let source = if omitted(cx) {
        Right::Omitted
    } else if cpu::constant_weights(cx)? {
        let slots = [B, SCALES, ZERO_POINTS];
        Right::Packed(cx.pack(&slots, &pack_name(&layout), |c| pack(&layout, c, device))?)
    } else {
        Right::AtRun(Packer::new(&layout, device)?)
    };
    Ok(Box::new(MatMulNBits { layout, source, kernels: Kernels::new(&layout, device)? }))
}

/// The packed form's name for the cache.
pub(crate) fn pack_name(layout: &Layout) -> String {
    format!("cuda fragments {layout:?}")
}

/// Packs constant B, scales and zero points into device memory.
pub(crate) fn pack(layout: &Layout, constants: &[Option<Constant>], device: &Device) -> Result<Buffer> {
    let bytes = |slot: usize| constants[slot].as_ref().map_or(&[][..], Constant::bytes);
    let from = cpu::source(layout, bytes(0), bytes(1), bytes(2))?;
    let packed = fragments::pack(layout, &from, || constants.iter().flatten().for_each(Constant::forget_pages))?;
    device.upload(packed.as_slice())
}

/// Where the weights come from.
enum Right {
    Packed(Arc<Buffer>),
    /// Inputs of the run.
    AtRun(Packer),
    /// An empty B: the product is zero.
    Omitted,
}

struct MatMulNBits {
    layout: Layout,
    source: Right,
    kernels: Kernels,
}

enum Kernels {
    Halves(ProductKernels),
    Floats { gemv_1: Function, gemv_4: Function, gemm: Function },
}

/// Rows up to which float products take the GEMV kernels.
const FLOAT_GEMV_ROWS: usize = 16;

impl Kernels {
    fn new(l: &Layout, device: &Device) -> Result<Self> {
        let bits = l.bits;
        if l.scale == DType::F32 {
            let find = |name: String| device.function("matmul_nbits", &name);
            return Ok(Self::Floats {
                gemv_1: find(format!("gemv_{bits}_1_f32"))?,
                gemv_4: find(format!("gemv_{bits}_4_f32"))?,
                gemm: find(format!("gemm_{bits}_f32"))?,
            });
        }
        Ok(Self::Halves(ProductKernels::quantised(device, l)?))
    }

    fn push(&self, cx: &mut LaunchCx<'_>, params: &ProductParams, constant: bool) -> Result<()> {
        match self {
            Self::Halves(kernels) => kernels.push(cx, params, 1, constant),
            Self::Floats { gemv_1, gemv_4, gemm } => {
                let (m, n) = (params.m as usize, params.w.n());
                if m > FLOAT_GEMV_ROWS {
                    return cx.push(gemm, linear(m.div_ceil(128) * n.div_ceil(64), 256), params);
                }
                let (gemv, rows) = if m == 1 { (gemv_1, 1) } else { (gemv_4, 4) };
                let shape = gemv_shape(params.w.tiles(), params.w.chunks(), [m.div_ceil(rows), 1], cx.device(), 0);
                cx.push(gemv, shape, params)
            }
        }
    }
}

impl DeviceKernel for MatMulNBits {
    fn product(&self) -> Option<ConstantProduct> {
        let Right::Packed(buffer) = &self.source else { return None };
        Some(ConstantProduct {
            weights: Weights::quantised(&self.layout, buffer.ptr()),
            layout: Some(self.layout),
            dtype: self.layout.scale,
            bias: Some(BIAS),
        })
    }

    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let a = cx.required(A);
        let m = a.len() / self.layout.k;
        if m == 0 || cx.output(0).is_none() {
            return Ok(());
        }
        let w = match &self.source {
            Right::Packed(buffer) => Weights::quantised(&self.layout, buffer.ptr()),
            Right::AtRun(packer) => packer.push(cx, &self.layout)?,
            Right::Omitted => Weights::quantised(&self.layout, DevPtr::NULL).without_columns(),
        };
        let params = ProductParams::new(a.ptr, w, cx.output_ptr(0), m).with_bias(cx.input_ptr(BIAS));
        self.kernels.push(cx, &params, matches!(self.source, Right::Packed(_)))
    }
}

kernel_params! {
    /// As in `pack.cu`.
    struct PackParams {
        b: DevPtr,
        scales: DevPtr,
        zeros: DevPtr,
        w: Weights,
        row_bytes: u32,
        blocks: u32,
    }
}

/// Packs weights that arrive with the run.
struct Packer {
    weights: Function,
    blocks: Function,
}

impl Packer {
    fn new(l: &Layout, device: &Device) -> Result<Self> {
        let find = |name: String| device.function("matmul_nbits_pack", &name);
        Ok(Self {
            weights: find(format!("pack_weights_{}", l.bits))?,
            blocks: find(format!("pack_blocks_{}_{}", l.bits, l.scale_bytes()))?,
        })
    }

    fn push(&self, cx: &mut LaunchCx<'_>, l: &Layout) -> Result<Weights> {
        let Parts { shape, blocks, bytes, .. } = fragments::parts(l);
        let w = Weights::quantised(l, cx.scratch(bytes));
        let params = PackParams {
            b: cx.input_ptr(B),
            scales: cx.input_ptr(SCALES),
            zeros: cx.input_ptr(ZERO_POINTS),
            w,
            row_bytes: (l.blocks() * l.blob()) as u32,
            blocks: l.blocks() as u32,
        };
        let threads = 256;
        let lanes = shape.tiles() * shape.chunks() * 32;
        cx.push(&self.weights, linear(lanes.div_ceil(threads), threads as u32), &params)?;
        let pairs = shape.tiles() * blocks * 8;
        cx.push(&self.blocks, linear(pairs.div_ceil(threads), threads as u32), &params)?;
        Ok(w)
    }
}
