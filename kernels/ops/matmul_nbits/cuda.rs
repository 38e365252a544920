//! MatMulNBits on CUDA devices. 16-bit activations: tensor cores on weights decoded in registers; float ones: float
//! throughout. `accuracy_level` changes nothing: sums are always float.

use super::{A, B, BIAS, SCALES, ZERO_POINTS, cpu, layout, omitted};
use crate::build::BuildCx;
use crate::cuda::{
    Buffer, ConstantProduct, DevPtr, Device, DeviceKernel, Launch, LaunchCx, ProductKernels, ProductParams, Weights,
    Window, gemv_shape, linear,
};
use crate::kernel_params;
use crate::quant::fragments::{self, Parts, TILE};
use crate::quant::nbits::Layout;
use crate::weights::Constant;
use abi::cuda::{Function, LaunchShape};
use abi::{DType, Result};
use std::sync::Arc;

/// Parses the node and packs its weights.
pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let layout = layout(cx)?;
    let source = if omitted(cx) {
        Right::Omitted
    } else if cpu::constant_weights(cx)? {
        let slots = [B, SCALES, ZERO_POINTS];
        Right::Packed(cx.pack_bytes(&slots, &pack_name(&layout), |c| pack(&layout, c, device))?)
    } else {
        Right::AtRun(Packer::new(&layout, device)?)
    };
    Ok(Box::new(MatMulNBits { layout, source, kernels: Kernels::new(&layout, device)? }))
}

/// The packed form's name for the cache.
pub(crate) fn pack_name(layout: &Layout) -> String {
    format!("cuda fragments {layout:?}")
}

/// Packs constant B, scales and zero points into device memory, on the device.
pub(crate) fn pack(layout: &Layout, constants: &[Option<Constant>], device: &Device) -> Result<Buffer> {
    let bytes = |slot: usize| constants[slot].as_ref().map_or(&[][..], Constant::bytes);
    let from = cpu::source(layout, bytes(0), bytes(1), bytes(2))?;
    let Parts { shape, bytes, .. } = fragments::parts(layout);
    let packed = device.alloc(bytes)?;
    let packer = Packer::new(layout, device)?;
    // Rows of the matrix, of its scales, and of its zero points.
    let rows = [from.b, from.scales, from.zero_points].map(|part| (part, part.len() / layout.n.max(1)));
    let tile_bytes = TILE * rows.iter().map(|(_, row)| row).sum::<usize>();
    let (mut window, at_once) = Window::new(device, shape.tiles(), tile_bytes)?;
    for first in (0..shape.tiles()).step_by(at_once) {
        let tiles = first..(first + at_once).min(shape.tiles());
        let (start, end) = (tiles.start * TILE, layout.n.min(tiles.end * TILE));
        let [mut b, mut scales, mut zeros] = [DevPtr::NULL; 3];
        for (to, (part, row)) in [&mut b, &mut scales, &mut zeros].into_iter().zip(rows) {
            *to = window.put(&part[start * row..end * row])?;
        }
        let to = Weights::tiles_of(layout, packed.ptr(), tiles);
        let (params, kernels) = packer.work(layout, [b, scales, zeros], to);
        let launches = kernels.map(|(function, shape)| Launch::new(function, shape, &params));
        // SAFETY: the sources are in the window, and the tiles are within `packed`.
        unsafe { window.take(&launches)? };
        constants.iter().flatten().for_each(Constant::forget_pages);
    }
    Ok(packed)
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

/// Makes fragments on the device.
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

    /// Packs weights that arrive with the run.
    fn push(&self, cx: &mut LaunchCx<'_>, l: &Layout) -> Result<Weights> {
        let w = Weights::quantised(l, cx.scratch(fragments::parts(l).bytes));
        let from = [B, SCALES, ZERO_POINTS].map(|slot| cx.input_ptr(slot));
        let (params, kernels) = self.work(l, from, w);
        kernels.into_iter().try_for_each(|(function, shape)| cx.push(function, shape, &params))?;
        Ok(w)
    }

    /// What packs B, scales and zero points at the addresses `from` into `w`, which has the whole of its rows.
    fn work(&self, l: &Layout, from: [DevPtr; 3], w: Weights) -> (PackParams, [(&Function, LaunchShape); 2]) {
        let [b, scales, zeros] = from;
        let row_bytes = (l.blocks() * l.blob()) as u32;
        let params = PackParams { b, scales, zeros, w, row_bytes, blocks: l.blocks() as u32 };
        let shape = |threads: usize| linear(threads.div_ceil(256), 256);
        let (lanes, pairs) = (w.tiles() * w.chunks() * 32, w.tiles() * fragments::parts(l).blocks * 8);
        (params, [(&self.weights, shape(lanes)), (&self.blocks, shape(pairs))])
    }
}
