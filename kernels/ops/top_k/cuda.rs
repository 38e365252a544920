//! TopK on CUDA devices: always sorted, equals by index.

use crate::build::BuildCx;
use crate::cuda::number::{code, size};
use crate::cuda::walk::{THREADS, spread};
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, linear};
use crate::fact;
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct TopKParams {
        x: DevPtr, values: DevPtr, indices: DevPtr, rows: u64, n: u64, k: u64, inner: u64,
        dtype: u32, element: u32, largest: u32, pad: u32,
    }
}

/// Results for each of which a pass over the row is worth it.
const FEW: usize = 32;
/// Elements of a row that keep a block busy.
const LONG: usize = 1024;

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    Ok(Box::new(TopK {
        warps: device.function("top_k", "top_k_warps")?,
        blocks: device.function("top_k", "top_k_blocks")?,
        rank: device.function("top_k", "top_k_rank")?,
        axis: cx.int("axis", -1),
        largest: cx.int("largest", 1) != 0,
    }))
}

struct TopK {
    warps: Function,
    blocks: Function,
    rank: Function,
    axis: i64,
    largest: bool,
}

impl DeviceKernel for TopK {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let x = cx.required(0);
        let Some(out) = cx.output(0).or(cx.output(1)).filter(|out| !out.is_empty()) else { return Ok(()) };
        let axis = fact::axis(self.axis, x.shape.len()).expect("infer has checked the axis");
        let (n, k, rows) = (x.shape[axis], out.shape[axis], x.len() / x.shape[axis]);
        let params = TopKParams {
            x: x.ptr,
            values: cx.output_ptr(0),
            indices: cx.output_ptr(1),
            rows: rows as u64,
            n: n as u64,
            k: k as u64,
            inner: x.shape[axis + 1..].iter().product::<usize>() as u64,
            dtype: code(x.dtype),
            element: size(x.dtype) as u32,
            largest: self.largest.into(),
            pad: 0,
        };
        if k > FEW {
            cx.push(&self.rank, spread(cx.device(), x.len()), &params)
        } else if n > LONG {
            cx.push(&self.blocks, linear(rows.min(1 << 20), THREADS as u32), &params)
        } else {
            cx.push(&self.warps, spread(cx.device(), rows * 32), &params)
        }
    }
}
