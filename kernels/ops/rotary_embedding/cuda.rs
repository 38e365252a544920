//! The rotary embeddings on CUDA devices. Positions are read on the device, where those beyond the caches are clamped.

use super::{Attrs, Form, Layout};
use crate::build::BuildCx;
use crate::cpu::rotary::Pairs;
use crate::cuda::{Buffer, DevPtr, Device, DeviceKernel, LaunchCx, linear, suffix};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct RotaryParams {
        x: DevPtr, y: DevPtr, cos: DevPtr, sin: DevPtr, positions: DevPtr, streams: DevPtr,
        batch_step: i64, head_step: i64, row_step: i64,
        batch: u32, rows: u32, heads: u32, dim: u32, half: u32, interleaved: u32, kind: u32, angles: u32,
    }
}

struct Rotary {
    attrs: Attrs,
    rotate: Function,
    streams: Buffer,
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let attrs = Attrs::parse(cx).map_err(|d| abi::Error::Internal(d.0))?;
    let name = format!("rotate_{}", suffix(cx.required(0)?.dtype));
    let streams = device.upload(&attrs.streams)?;
    Ok(Box::new(Rotary { attrs, rotate: device.function("rotary_embedding", &name)?, streams }))
}

impl DeviceKernel for Rotary {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let form = self.attrs.form;
        let (x, cos) = (cx.required(0), cx.required(form.cos()));
        let Some(y) = cx.output(0) else { return Ok(()) };
        let half = cos.shape.last().copied().unwrap_or(0);
        let l = Layout::new(&self.attrs, x.shape, half).map_err(abi::Error::Internal)?;
        let ids = cx.input(form.positions());
        let kind = match (form, ids) {
            (_, None) => 3,
            (Form::Contrib, Some(ids)) if ids.shape.len() == 1 => 1,
            (Form::Multimodal, _) => 2,
            _ => 0,
        };
        let angles = cos.shape[..cos.shape.len() - 1].iter().product::<usize>();
        let (head_step, row_step) = if l.heads_first { (l.rows * l.head, l.head) } else { (l.head, l.heads * l.head) };
        let params = RotaryParams {
            x: x.ptr,
            y: y.ptr,
            cos: cos.ptr,
            sin: cx.input_ptr(form.sin()),
            positions: ids.map_or(DevPtr::NULL, |t| t.ptr),
            streams: self.streams.ptr(),
            batch_step: (l.heads * l.rows * l.head) as i64,
            head_step: head_step as i64,
            row_step: row_step as i64,
            batch: l.batch as u32,
            rows: l.rows as u32,
            heads: l.heads as u32,
            dim: l.head as u32,
            half: half as u32,
            interleaved: u32::from(self.attrs.pairs == Pairs::Interleaved),
            kind,
            angles: angles as u32,
        };
        let blocks = if x.is_empty() { 0 } else { (l.batch * l.rows * l.heads).div_ceil(8) };
        cx.push(&self.rotate, linear(blocks, 256), &params)
    }
}
