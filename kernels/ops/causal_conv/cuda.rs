//! The depthwise causal convolution on CUDA devices, in one launch that owns each channel's state once.

use super::dilation;
use crate::build::BuildCx;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, linear, suffix};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct ConvParams {
        input: DevPtr,
        weight: DevPtr,
        bias: DevPtr,
        past: DevPtr,
        present: DevPtr,
        output: DevPtr,
        channels: u64,
        tokens: u32,
        length: u32,
        dilation: u32,
        taps: u32,
        chunk: u32,
        silu: u32,
    }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let suffix = suffix(cx.required(0)?.dtype);
    let function = |name: &str| device.function("causal_conv", &format!("conv_{name}_{suffix}"));
    Ok(Box::new(CausalConv {
        last: function("last")?,
        few: function("few")?,
        rows: function("rows")?,
        channels_last: cx.int("channels_last", 0) == 1,
        silu: cx.string("activation", "none") != "none",
        dilation: dilation(cx)?,
    }))
}

struct CausalConv {
    last: Function,
    few: Function,
    rows: Function,
    channels_last: bool,
    silu: bool,
    dilation: usize,
}

const THREADS: usize = 128;
/// Positions of a thread with channels last: some, so that their loads overlap, few, so that there are many blocks.
const THREAD_CHUNK: usize = 32;
/// Positions of a block with channels first.
const BLOCK_CHUNK: usize = 1024;
/// Positions from which on a channel is worth a block.
const MANY: usize = 64;

impl DeviceKernel for CausalConv {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (input, weight) = (cx.required(0), cx.required(1));
        let shape = input.shape;
        let (tokens, channels) =
            if self.channels_last { (shape[1], shape[2..].iter().product()) } else { (shape[2], shape[1]) };
        let (batch, taps): (usize, usize) = (shape[0], weight.shape[2]);
        let length = (taps - 1) * self.dilation;
        if channels == 0 || batch == 0 {
            return Ok(());
        }
        let u32_of = |n: usize| u32::try_from(n).ok().filter(|&n| n < 1 << 30);
        let too_long =
            || cx.error("input 0 (input)", format_args!("{tokens} positions after {length}"), "less than 2^30");
        let (function, chunk) = if self.channels_last {
            (&self.last, THREAD_CHUNK.max(length))
        } else if tokens >= MANY && tokens >= length {
            (&self.rows, BLOCK_CHUNK.max(length))
        } else {
            (&self.few, tokens.max(length).max(1))
        };
        let params = ConvParams {
            input: input.ptr,
            weight: weight.ptr,
            bias: cx.input_ptr(2),
            past: cx.input_ptr(3),
            present: cx.output_ptr(1),
            output: cx.output_ptr(0),
            channels: channels as u64,
            tokens: u32_of(tokens).ok_or_else(too_long)?,
            length: u32_of(length).ok_or_else(too_long)?,
            dilation: u32_of(self.dilation).unwrap_or(1),
            taps: u32_of(taps).ok_or_else(too_long)?,
            chunk: u32_of(chunk).ok_or_else(too_long)?,
            silu: u32::from(self.silu),
        };
        let by_rows = std::ptr::eq(function, &self.rows);
        let chunks = tokens.div_ceil(chunk).max(1);
        let blocks = if by_rows { batch * channels * chunks } else { batch * chunks * channels.div_ceil(THREADS) };
        cx.push(function, linear(blocks, THREADS as u32), &params)
    }
}
