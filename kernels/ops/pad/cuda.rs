//! Pad on CUDA devices.

use super::{Axis, attributes, mode, spread as spread_pads};
use crate::build::BuildCx;
use crate::cuda::number::size;
use crate::cuda::walk::{MAX_RANK, row_major, spread};
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx};
use crate::kernel_params;
use crate::ops::gather::Indices;
use abi::cuda::Function;
use abi::{HostTensor, Result};
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct PadParams {
        x: DevPtr, value: DevPtr, y: DevPtr, n: u64, constant: u64, dims: [u64; MAX_RANK], strides: [i64; MAX_RANK],
        before: [i64; MAX_RANK], starts: [i64; MAX_RANK], lengths: [i64; MAX_RANK],
        rank: u32, mode: u32, element: u32, pad: u32,
    }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    Ok(Box::new(Pad { function: device.function("pad", "pad")?, mode: mode(cx) as u32, attributes: attributes(cx)? }))
}

struct Pad {
    function: Function,
    mode: u32,
    /// Opset 2's pads and value.
    attributes: Option<(Vec<i64>, HostTensor)>,
}

impl DeviceKernel for Pad {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let data = cx.required(0);
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let rank = data.shape.len();
        if rank > MAX_RANK {
            return Err(cx.error("input 0 (data)", format_args!("rank {rank}"), format_args!("at most {MAX_RANK}")));
        }
        let (pads, axes) = match &self.attributes {
            Some((pads, _)) => (Some(pads.clone()), None),
            None => (cx.required(1).ints(), cx.input(3).and_then(|t| t.ints())),
        };
        let pads = spread_pads(rank, pads.as_deref().unwrap_or(&[]), axes.as_deref().map(Indices::I64));
        let pads = pads.map_err(|got| cx.error("pads", got, "as in the definition"))?;
        let mut constant = [0; 8];
        if let Some((_, value)) = &self.attributes {
            constant[..value.bytes().len()].copy_from_slice(value.bytes());
        }
        let mut params = PadParams {
            x: data.ptr,
            value: if self.attributes.is_none() { cx.input_ptr(2) } else { DevPtr::NULL },
            y: out.ptr,
            n: out.len() as u64,
            constant: u64::from_ne_bytes(constant),
            dims: [1; MAX_RANK],
            strides: [0; MAX_RANK],
            before: [0; MAX_RANK],
            starts: [0; MAX_RANK],
            lengths: [0; MAX_RANK],
            rank: rank as u32,
            mode: self.mode,
            element: size(data.dtype) as u32,
            pad: 0,
        };
        for (d, stride) in row_major(data.shape).into_iter().enumerate() {
            let axis = Axis::new(data.shape[d], pads[d]);
            (params.dims[d], params.strides[d]) = (out.shape[d] as u64, stride as i64);
            (params.before[d], params.starts[d], params.lengths[d]) = (axis.before, axis.start, axis.len);
        }
        cx.push(&self.function, spread(cx.device(), out.len()), &params)
    }
}
