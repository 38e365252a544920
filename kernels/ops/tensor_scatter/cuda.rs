//! TensorScatter on CUDA devices.

use crate::build::BuildCx;
use crate::cuda::number::size;
use crate::cuda::walk::{spread, word};
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx};
use crate::fact;
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct TensorScatterParams {
        past: DevPtr, update: DevPtr, starts: DevPtr, present: DevPtr, prefixes: u64, prefixes_per_batch: u64,
        total: u64, new_rows: u64, row_units: u64, circular: u32, word: u32, element: u32, pad: u32,
    }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let circular = cx.string("mode", "linear") == "circular";
    let function = device.function("tensor_scatter", "tensor_scatter")?;
    Ok(Box::new(TensorScatter { function, axis: cx.int("axis", -2), circular }))
}

struct TensorScatter {
    function: Function,
    axis: i64,
    circular: bool,
}

impl DeviceKernel for TensorScatter {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (past, update) = (cx.required(0), cx.required(1));
        let Some(present) = cx.output(0).filter(|present| !present.is_empty()) else { return Ok(()) };
        let axis = fact::axis(self.axis, past.shape.len()).expect("infer has checked the axis");
        let element = size(past.dtype);
        let prefixes: usize = past.shape[..axis].iter().product();
        let row = past.shape[axis + 1..].iter().product::<usize>() * element;
        let word = word([row]);
        let params = TensorScatterParams {
            past: past.ptr,
            update: update.ptr,
            starts: cx.input_ptr(2),
            present: present.ptr,
            prefixes: prefixes as u64,
            prefixes_per_batch: (prefixes / past.shape[0]) as u64,
            total: past.shape[axis] as u64,
            new_rows: update.shape[axis] as u64,
            row_units: (row / word) as u64,
            circular: self.circular.into(),
            word: word as u32,
            element: element as u32,
            pad: 0,
        };
        cx.push(&self.function, spread(cx.device(), present.bytes() / word), &params)
    }
}
