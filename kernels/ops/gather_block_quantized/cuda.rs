//! GatherBlockQuantized on CUDA devices: from the tensor as the model stores it, or from the fragments that a MatMulNBits
//! multiplies by.

use super::{DATA, INDICES, SCALES, ZERO_POINTS, shared_layout};
use crate::build::BuildCx;
use crate::cuda::{Buffer, DevPtr, Device, DeviceKernel, LaunchCx, Weights, linear, suffix};
use crate::ops::matmul_nbits;
use crate::quant::nbits::Layout;
use crate::{fact, kernel_params};
use abi::cuda::Function;
use abi::{DType, Error, Result};
use std::sync::Arc;

/// Parses the node; finds its packed table if it has one.
pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let suffix = suffix(cx.required(SCALES)?.dtype);
    let find = |name: String| device.function("gather_block_quantized", &name);
    if let Some(layout) = shared_layout(cx)? {
        let slots = [DATA, SCALES, ZERO_POINTS];
        let name = matmul_nbits::cuda_pack_name(&layout);
        let packed = cx.pack_bytes(&slots, &name, |c| matmul_nbits::cuda_pack(&layout, c, device))?;
        let function = find(format!("gather_packed_{}_{suffix}", layout.bits))?;
        return Ok(Box::new(GatherPacked { layout, packed, function }));
    }
    Ok(Box::new(Gather {
        bits: cx.int("bits", 4) as usize,
        block: cx.int("block_size", 128) as usize,
        gather_axis: cx.int("gather_axis", 0),
        quantize_axis: cx.int("quantize_axis", 1),
        function: find(format!("gather_{suffix}"))?,
    }))
}

const THREADS: usize = 256;

/// Gathers rows of a matrix that a MatMulNBits has packed.
struct GatherPacked {
    layout: Layout,
    packed: Arc<Buffer>,
    function: Function,
}

kernel_params! {
    /// As in `cuda.cu`.
    struct PackedParams { indices: DevPtr, y: DevPtr, w: Weights, count: u64, wide_indices: u32, pad: u32 }
}

impl DeviceKernel for GatherPacked {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let indices = cx.required(INDICES);
        let Some(out) = cx.output(0) else { return Ok(()) };
        let params = PackedParams {
            indices: indices.ptr,
            y: out.ptr,
            w: Weights::quantised(&self.layout, self.packed.ptr()),
            count: indices.len() as u64,
            wide_indices: u32::from(indices.dtype == DType::I64),
            pad: 0,
        };
        let threads = indices.len() * self.layout.k.div_ceil(8);
        cx.push(&self.function, linear(threads.div_ceil(THREADS), THREADS as u32), &params)
    }
}

/// The node's attributes.
struct Gather {
    bits: usize,
    block: usize,
    gather_axis: i64,
    quantize_axis: i64,
    function: Function,
}

kernel_params! {
    /// As in `cuda.cu`.
    struct GatherParams {
        data: DevPtr,
        indices: DevPtr,
        scales: DevPtr,
        zeros: DevPtr,
        y: DevPtr,
        total: u64,
        count: u64,
        size: u64,
        slice: u64,
        along: u64,
        inner: u64,
        zero_row: u64,
        block: u32,
        bits: u32,
        is_signed: u32,
        default_zero: i32,
        wide_indices: u32,
        pad: u32,
    }
}

impl DeviceKernel for Gather {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (data, indices) = (cx.required(DATA), cx.required(INDICES));
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let packed = data.dtype == DType::U8;
        let bits = if packed { self.bits } else { 4 };
        let mut shape = data.shape.to_vec();
        if let (true, Some(last)) = (packed, shape.last_mut()) {
            *last *= 8 / bits;
        }
        let axes = (fact::axis(self.gather_axis, shape.len()), fact::axis(self.quantize_axis, shape.len()));
        let (Some(gather), Some(quantize)) = axes else {
            return Err(Error::Internal("an axis passed the shape check".into()));
        };
        let behind = |axis: usize| shape[axis + 1..].iter().product::<usize>() as u64;
        let blocks = shape[quantize].div_ceil(self.block);
        let params = GatherParams {
            data: data.ptr,
            indices: indices.ptr,
            scales: cx.input_ptr(SCALES),
            zeros: cx.input_ptr(ZERO_POINTS),
            y: out.ptr,
            total: out.len() as u64,
            count: indices.len() as u64,
            size: shape[gather] as u64,
            slice: behind(gather),
            along: shape[quantize] as u64,
            inner: behind(quantize),
            zero_row: (if packed { (blocks * bits).div_ceil(8) * 8 / bits } else { blocks }) as u64,
            block: self.block as u32,
            bits: bits as u32,
            is_signed: u32::from(data.dtype == DType::I4),
            default_zero: if packed { 1 << (bits - 1) } else { 0 },
            wide_indices: u32::from(indices.dtype == DType::I64),
            pad: 0,
        };
        cx.push(&self.function, linear(out.len().div_ceil(THREADS), THREADS as u32), &params)
    }
}
