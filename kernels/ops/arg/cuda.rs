//! ArgMax and ArgMin on CUDA devices.

use crate::build::BuildCx;
use crate::cuda::number::code;
use crate::cuda::walk::{THREADS, spread};
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, linear};
use crate::fact;
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct ArgParams { x: DevPtr, y: DevPtr, rows: u64, n: u64, inner: u64, dtype: u32, min: u32, last: u32, pad: u32 }
}

/// Elements of a row that keep a block busy, and a warp.
const LONG: usize = 1024;
const SHORT: usize = 16;

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>, max: bool) -> Result<Box<dyn DeviceKernel>> {
    Ok(Box::new(Arg {
        blocks: device.function("arg", "arg_blocks")?,
        warps: device.function("arg", "arg_warps")?,
        threads: device.function("arg", "arg_threads")?,
        axis: cx.int("axis", 0),
        min: !max,
        last: cx.int("select_last_index", 0) != 0,
    }))
}

struct Arg {
    blocks: Function,
    warps: Function,
    threads: Function,
    axis: i64,
    min: bool,
    last: bool,
}

impl DeviceKernel for Arg {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let x = cx.required(0);
        let Some(y) = cx.output(0).filter(|y| !y.is_empty()) else { return Ok(()) };
        let axis = fact::axis(self.axis, x.shape.len()).expect("infer has checked the axis");
        let (n, rows) = (x.shape[axis], y.len());
        let inner: usize = x.shape[axis + 1..].iter().product();
        let params = ArgParams {
            x: x.ptr,
            y: y.ptr,
            rows: rows as u64,
            n: n as u64,
            inner: inner as u64,
            dtype: code(x.dtype),
            min: self.min.into(),
            last: self.last.into(),
            pad: 0,
        };
        if n > LONG && inner < THREADS {
            cx.push(&self.blocks, linear(rows.min(1 << 20), THREADS as u32), &params)
        } else if n > SHORT && inner < SHORT {
            cx.push(&self.warps, spread(cx.device(), rows * 32), &params)
        } else {
            cx.push(&self.threads, spread(cx.device(), rows), &params)
        }
    }
}
