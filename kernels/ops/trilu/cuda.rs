//! Trilu on CUDA devices.

use crate::build::BuildCx;
use crate::cuda::number::size;
use crate::cuda::walk::spread;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct TriluParams { x: DevPtr, k: DevPtr, y: DevPtr, n: u64, rows: u64, columns: u64, upper: u32, element: u32 }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    Ok(Box::new(Trilu { function: device.function("trilu", "trilu")?, upper: cx.int("upper", 1) != 0 }))
}

struct Trilu {
    function: Function,
    upper: bool,
}

impl DeviceKernel for Trilu {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let x = cx.required(0);
        let (&[.., rows, columns], Some(y)) = (x.shape, cx.output(0)) else { return Ok(()) };
        let params = TriluParams {
            x: x.ptr,
            k: cx.input_ptr(1),
            y: y.ptr,
            n: x.len() as u64,
            rows: rows as u64,
            columns: columns as u64,
            upper: self.upper.into(),
            element: size(x.dtype) as u32,
        };
        cx.push(&self.function, spread(cx.device(), x.len()), &params)
    }
}
