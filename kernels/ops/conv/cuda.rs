//! Conv on CUDA devices: a thread for each output.

use super::{Slide, slides, spatial_dims};
use crate::build::BuildCx;
use crate::cuda::walk::spread;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, suffix};
use crate::kernel_params;
use crate::op::{Decline, NodeCx};
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

const MAX_SPATIAL: usize = 6;

kernel_params! {
    /// As in `cuda.cu`.
    struct ConvParams {
        x: DevPtr,
        w: DevPtr,
        bias: DevPtr,
        y: DevPtr,
        elements: u64,
        channels: u32,
        maps: u32,
        per_group: u32,
        group_maps: u32,
        dims: [u32; MAX_SPATIAL],
        out: [u32; MAX_SPATIAL],
        kernel: [u32; MAX_SPATIAL],
        stride: [u32; MAX_SPATIAL],
        dilation: [u32; MAX_SPATIAL],
        before: [u32; MAX_SPATIAL],
        taps: u32,
        line: u32,
    }
}

/// Declines more spatial dims than the kernel has.
pub(super) fn claim(cx: &NodeCx) -> Result<(), Decline> {
    match spatial_dims(cx) {
        Some(n) if n > MAX_SPATIAL => {
            let expected = format!("at most {MAX_SPATIAL} on CUDA devices");
            Err(cx.decline("input 0 (X), spatial dims", n, expected))
        }
        _ => Ok(()),
    }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let spatial = spatial_dims(cx).ok_or_else(|| cx.error("input 1 (W)", "an unknown rank", "a known one"))?;
    let name = format!("conv_{}", suffix(cx.required(0)?.dtype));
    Ok(Box::new(Conv {
        function: device.function("conv", &name)?,
        slides: slides(cx, &vec![1; spatial])?,
        group: cx.int("group", 1) as usize,
    }))
}

struct Conv {
    function: Function,
    /// By spatial dim; the kernel's lengths are those of the weights.
    slides: Vec<Slide>,
    group: usize,
}

impl DeviceKernel for Conv {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (x, w) = (cx.required(0), cx.required(1));
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let small = |n: usize| {
            let too_large = || cx.error("input 0 (X), a length", n, "less than 2^31");
            u32::try_from(n).ok().filter(|&n| n < 1 << 31).ok_or_else(too_large)
        };
        // Beyond every input it does not matter how far.
        let beyond = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let maps = w.shape[0];
        let mut params = ConvParams {
            x: x.ptr,
            w: w.ptr,
            bias: cx.input_ptr(2),
            y: out.ptr,
            elements: out.len() as u64,
            channels: small(x.shape[1])?,
            maps: small(maps)?,
            per_group: small(w.shape[1])?,
            group_maps: small(maps / self.group)?,
            dims: [1; MAX_SPATIAL],
            out: [1; MAX_SPATIAL],
            kernel: [1; MAX_SPATIAL],
            stride: [1; MAX_SPATIAL],
            dilation: [1; MAX_SPATIAL],
            before: [0; MAX_SPATIAL],
            taps: small(w.shape[2..].iter().product())?,
            line: u32::from(w.shape[2..w.shape.len() - 1].iter().all(|&k| k == 1)),
        };
        let lead = MAX_SPATIAL - self.slides.len();
        for (i, slide) in self.slides.iter().enumerate() {
            let (slide, at) = (Slide { kernel: w.shape[2 + i], ..*slide }, lead + i);
            let (before, _) = slide.over(x.shape[2 + i]).expect("infer has checked that the kernel fits");
            params.dims[at] = small(x.shape[2 + i])?;
            params.out[at] = small(out.shape[2 + i])?;
            params.kernel[at] = small(slide.kernel)?;
            params.stride[at] = beyond(slide.stride);
            params.dilation[at] = beyond(slide.dilation);
            params.before[at] = small(before)?;
        }
        cx.push(&self.function, spread(cx.device(), out.len()), &params)
    }
}
