//! BiasGelu and FastGelu on CUDA devices: one pass, 16 bytes a thread.

use super::is_fast;
use crate::build::BuildCx;
use crate::cuda::walk::spread;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, suffix};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct GeluParams { x: DevPtr, bias: DevPtr, y: DevPtr, elements: u64, n: u64, fast: u32, pad: u32 }
}

struct BiasGelu {
    function: Function,
    fast: bool,
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let name = format!("bias_gelu_{}", suffix(cx.required(0)?.dtype));
    Ok(Box::new(BiasGelu { function: device.function("bias_gelu", &name)?, fast: is_fast(cx) }))
}

impl DeviceKernel for BiasGelu {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let x = cx.required(0);
        let params = GeluParams {
            x: x.ptr,
            bias: cx.input_ptr(1),
            y: cx.output_ptr(0),
            elements: x.len() as u64,
            n: x.shape.last().copied().unwrap_or(1) as u64,
            fast: u32::from(self.fast),
            pad: 0,
        };
        cx.push(&self.function, spread(cx.device(), x.bytes().div_ceil(16)), &params)
    }
}
