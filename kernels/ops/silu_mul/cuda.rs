//! SiluMul on CUDA devices: one pass, 16 bytes a thread.

use crate::build::BuildCx;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, linear, suffix};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct SiluMulParams { x: DevPtr, gate: DevPtr, y: DevPtr, n: u64 }
}

struct SiluMul(Function);

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let name = format!("silu_mul_{}", suffix(cx.required(0)?.dtype));
    Ok(Box::new(SiluMul(device.function("silu_mul", &name)?)))
}

impl DeviceKernel for SiluMul {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let x = cx.required(0);
        let n = x.len();
        let params = SiluMulParams { x: x.ptr, gate: cx.input_ptr(1), y: cx.output_ptr(0), n: n as u64 };
        let (threads, bytes_a_thread) = (256, 16);
        cx.push(&self.0, linear(x.bytes().div_ceil(threads * bytes_a_thread), threads as u32), &params)
    }
}
