//! OneHot on CUDA devices.

use crate::build::BuildCx;
use crate::cuda::number::{code, size};
use crate::cuda::walk::spread;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct OneHotParams { indices: DevPtr, values: DevPtr, y: DevPtr, n: u64, depth: u64, inner: u64, index_type: u32, element: u32 }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    Ok(Box::new(OneHot { function: device.function("one_hot", "one_hot")?, axis: cx.int("axis", -1) }))
}

struct OneHot {
    function: Function,
    axis: i64,
}

impl DeviceKernel for OneHot {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (indices, values) = (cx.required(0), cx.required(2));
        let Some(out) = cx.output(0) else { return Ok(()) };
        let rank = out.shape.len() as i64;
        let axis = if self.axis < 0 { self.axis + rank } else { self.axis } as usize;
        let params = OneHotParams {
            indices: indices.ptr,
            values: values.ptr,
            y: out.ptr,
            n: out.len() as u64,
            depth: out.shape[axis] as u64,
            inner: out.shape[axis + 1..].iter().product::<usize>() as u64,
            index_type: code(indices.dtype),
            element: size(values.dtype) as u32,
        };
        cx.push(&self.function, spread(cx.device(), out.len()), &params)
    }
}
