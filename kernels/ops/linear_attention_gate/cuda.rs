//! The gate on CUDA devices: one pass.

use crate::build::BuildCx;
use crate::cuda::walk::spread;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, suffix};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct GateParams {
        a: DevPtr,
        b: DevPtr,
        dt_bias: DevPtr,
        decay_scale: DevPtr,
        decay: DevPtr,
        beta: DevPtr,
        n: u64,
        heads: u64,
    }
}

struct Gate(Function);

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let name = format!("gates_{}", suffix(cx.required(0)?.dtype));
    Ok(Box::new(Gate(device.function("linear_attention_gate", &name)?)))
}

impl DeviceKernel for Gate {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (a, dt_bias) = (cx.required(0), cx.required(1));
        let params = GateParams {
            a: a.ptr,
            b: cx.input_ptr(3),
            dt_bias: dt_bias.ptr,
            decay_scale: cx.input_ptr(2),
            decay: cx.output_ptr(0),
            beta: cx.output_ptr(1),
            n: a.len() as u64,
            heads: dt_bias.len() as u64,
        };
        cx.push(&self.0, spread(cx.device(), a.len()), &params)
    }
}
