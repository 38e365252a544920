//! Range on CUDA devices: start and delta are known before a Run, since they decide the shape.

use crate::build::BuildCx;
use crate::cpu::number::to_f64s;
use crate::cuda::number::code;
use crate::cuda::walk::spread;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct RangeParams { y: DevPtr, n: u64, start: f64, delta: f64, whole_start: i64, whole_delta: i64, dtype: u32, pad: u32 }
}

pub(super) fn build(_: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    Ok(Box::new(Range(device.function("range", "range")?)))
}

struct Range(Function);

impl DeviceKernel for Range {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let first = |slot| cx.required(slot).value.and_then(to_f64s).map(|v| v[0]);
        let whole = |slot| cx.required(slot).ints().map_or(0, |v| v[0]);
        let (Some(start), Some(delta)) = (first(0), first(2)) else {
            return Err(cx.error(
                "inputs",
                "values that come from tensor data",
                "values that the inputs' shapes decide",
            ));
        };
        let params = RangeParams {
            y: out.ptr,
            n: out.len() as u64,
            start,
            delta,
            whole_start: whole(0),
            whole_delta: whole(2),
            dtype: code(out.dtype),
            pad: 0,
        };
        cx.push(&self.0, spread(cx.device(), out.len()), &params)
    }
}
