//! Cast and CastLike on CUDA devices.

use super::target;
use crate::build::BuildCx;
use crate::cuda::number::{code, size};
use crate::cuda::walk::spread;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, suffix};
use crate::kernel_params;
use abi::cuda::Function;
use abi::{DType, Result};
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct CastParams { x: DevPtr, y: DevPtr, n: u64, from: u32, to: u32 }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let (from, to) = (cx.required(0)?.dtype, target(cx)?);
    let direct = [from, to].iter().all(|t| matches!(t, DType::F32 | DType::F16 | DType::BF16)) && from != to;
    let name = if direct { format!("cast_{}_{}", suffix(from), suffix(to)) } else { "cast_any".into() };
    let unit = if direct { 16 / size(from).min(size(to)) } else { 1 };
    Ok(Box::new(Cast { function: device.function("cast", &name)?, unit, codes: [code(from), code(to)] }))
}

struct Cast {
    function: Function,
    /// Elements a thread.
    unit: usize,
    codes: [u32; 2],
}

impl DeviceKernel for Cast {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (x, [from, to]) = (cx.required(0), self.codes);
        let Some(y) = cx.output(0) else { return Ok(()) };
        let params = CastParams { x: x.ptr, y: y.ptr, n: x.len() as u64, from, to };
        cx.push(&self.function, spread(cx.device(), x.len().div_ceil(self.unit)), &params)
    }
}
