//! GatedAdd on CUDA devices: one pass, 16 bytes a thread.

use crate::build::BuildCx;
use crate::cuda::walk::spread;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, suffix};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct GatedAddParams { x: DevPtr, y: DevPtr, gate: DevPtr, out: DevPtr, elements: u64, n: u64 }
}

struct GatedAdd(Function);

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let name = format!("gated_add_{}", suffix(cx.required(0)?.dtype));
    Ok(Box::new(GatedAdd(device.function("gated_add", &name)?)))
}

impl DeviceKernel for GatedAdd {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (x, gate) = (cx.required(0), cx.required(2));
        if x.is_empty() {
            return Ok(());
        }
        let params = GatedAddParams {
            x: x.ptr,
            y: cx.input_ptr(1),
            gate: gate.ptr,
            out: cx.output_ptr(0),
            elements: x.len() as u64,
            n: (x.len() / gate.len()) as u64,
        };
        cx.push(&self.0, spread(cx.device(), x.bytes().div_ceil(16)), &params)
    }
}
