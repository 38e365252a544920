//! Softmax and LogSoftmax on CUDA devices.

use super::{asked_axis, rows_of};
use crate::build::BuildCx;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, linear, suffix};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct SoftmaxParams { x: DevPtr, y: DevPtr, rows: u64, n: u64, inner: u64, log: u32, pad: u32 }
}

struct Softmax {
    axis: i64,
    merged: bool,
    log: bool,
    thread: Function,
    warp: Function,
    block: Function,
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let dtype = suffix(cx.required(0)?.dtype);
    let function = |scope: &str| device.function("softmax", &format!("softmax_{dtype}_{scope}"));
    Ok(Box::new(Softmax {
        axis: asked_axis(cx),
        merged: cx.node().since_version < 13,
        log: cx.node().op_type == "LogSoftmax",
        thread: function("thread")?,
        warp: function("warp")?,
        block: function("block")?,
    }))
}

impl DeviceKernel for Softmax {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let x = cx.required(0);
        let Some(y) = cx.output(0).filter(|y| !y.is_empty()) else { return Ok(()) };
        let (n, inner) = rows_of(x.shape, self.axis, self.merged);
        let rows = x.len() / n;
        let params = SoftmaxParams {
            x: x.ptr,
            y: y.ptr,
            rows: rows as u64,
            n: n as u64,
            inner: inner as u64,
            log: u32::from(self.log),
            pad: 0,
        };
        // Neighbouring threads read neighbours wherever that can be.
        let (function, shape) = if inner >= 32 && rows >= 4096 {
            (&self.thread, linear(rows.div_ceil(128), 128))
        } else if n <= 1024 {
            (&self.warp, linear(rows.div_ceil(8), 256))
        } else {
            (&self.block, linear(rows, if n <= 8192 { 256 } else { 1024 }))
        };
        cx.push(function, shape, &params)
    }
}
