//! Gather, GatherElements and GatherND on CUDA devices.

use crate::build::BuildCx;
use crate::cuda::number::{code, size};
use crate::cuda::walk::{MAX_RANK, Walk, row_major, spread, word};
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx};
use crate::fact;
use crate::kernel_params;
use abi::cuda::Function;
use abi::{DType, Result};
use std::sync::Arc;

const IMAGE: &str = "gather";

kernel_params! {
    /// As in `cuda.cu`.
    struct GatherParams {
        x: DevPtr, indices: DevPtr, y: DevPtr, units: u64, row_units: u64, count: u64, dim: u64,
        index_type: u32, word: u32, element: u32, pad: u32,
    }
}

pub(super) fn gather(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    Ok(Box::new(Gather { function: Rows::function(device)?, axis: cx.int("axis", 0) }))
}

struct Gather {
    function: Function,
    axis: i64,
}

impl DeviceKernel for Gather {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (data, by) = (cx.required(0), cx.required(1));
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let axis = fact::axis(self.axis, data.shape.len()).expect("infer has checked the axis");
        let element = size(data.dtype);
        let row = data.shape[axis + 1..].iter().product::<usize>() * element;
        let dim = data.shape[axis];
        let rows = Rows { x: data.ptr, y: out.ptr, bytes: out.bytes(), row, dim, element };
        rows.push(cx, &self.function, by.ptr, (by.len(), by.dtype))
    }
}

/// Rows of `row` bytes, gathered into `bytes` bytes.
pub(crate) struct Rows {
    pub x: DevPtr,
    pub y: DevPtr,
    pub bytes: usize,
    pub row: usize,
    /// Rows of x that an index chooses from.
    pub dim: usize,
    /// Bytes of an element.
    pub element: usize,
}

impl Rows {
    /// The kernel.
    pub fn function(device: &Device) -> Result<Function> {
        device.function(IMAGE, "gather")
    }

    /// Gathers the rows that the indices choose.
    pub fn push(
        &self,
        cx: &mut LaunchCx<'_>,
        function: &Function,
        indices: DevPtr,
        (count, dtype): (usize, DType),
    ) -> Result<()> {
        let word = word([self.row]);
        let params = GatherParams {
            x: self.x,
            indices,
            y: self.y,
            units: (self.bytes / word) as u64,
            row_units: (self.row / word) as u64,
            count: count as u64,
            dim: self.dim as u64,
            index_type: code(dtype),
            word: word as u32,
            element: self.element as u32,
            pad: 0,
        };
        cx.push(function, spread(cx.device(), self.bytes / word), &params)
    }
}

kernel_params! {
    /// As in `cuda.cu`.
    struct ElementsParams {
        x: DevPtr, indices: DevPtr, y: DevPtr, n: u64, dim: u64, stride: i64, walk: Walk<1>, index_type: u32, element: u32,
    }
}

pub(super) fn elements(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    Ok(Box::new(Elements { function: device.function(IMAGE, "gather_elements")?, axis: cx.int("axis", 0) }))
}

struct Elements {
    function: Function,
    axis: i64,
}

impl DeviceKernel for Elements {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (data, by) = (cx.required(0), cx.required(1));
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let axis = fact::axis(self.axis, data.shape.len()).expect("infer has checked the axis");
        let strides = row_major(data.shape);
        let params = ElementsParams {
            x: data.ptr,
            indices: by.ptr,
            y: out.ptr,
            n: out.len() as u64,
            dim: data.shape[axis] as u64,
            stride: strides[axis] as i64,
            walk: elements_walk(cx, data.shape, by.shape, axis)?,
            index_type: code(by.dtype),
            element: size(data.dtype) as u32,
        };
        cx.push(&self.function, spread(cx.device(), out.len()), &params)
    }
}

/// The walk over the indices `by` of an Elements op with the strides of `shape`, none along the axis.
pub(crate) fn elements_walk(cx: &LaunchCx, shape: &[usize], by: &[usize], axis: usize) -> Result<Walk<1>> {
    let strides = row_major(shape);
    let dims = by.iter().zip(&strides).enumerate();
    let walk = Walk::new(dims.map(|(d, (&dim, &stride))| (dim, [if d == axis { 0 } else { stride }])));
    walk.ok_or_else(|| {
        cx.error("input 1 (indices)", format_args!("rank {}", by.len()), format_args!("at most {MAX_RANK}"))
    })
}

kernel_params! {
    /// As in `cuda.cu`.
    struct NdParams {
        x: DevPtr, indices: DevPtr, y: DevPtr, units: u64, inner_units: u64, per_batch: u64, batch_units: u64,
        dims: [u64; MAX_RANK], depth: u32, word: u32, element: u32, pad: u32,
    }
}

pub(super) fn nd(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    Ok(Box::new(Nd { function: device.function(IMAGE, "gather_nd")?, batch: cx.int("batch_dims", 0) as usize }))
}

struct Nd {
    function: Function,
    batch: usize,
}

impl DeviceKernel for Nd {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (data, by) = (cx.required(0), cx.required(1));
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let (&depth, lead) = by.shape.split_last().expect("infer has checked the rank");
        let element = size(data.dtype);
        let inner = data.shape[self.batch + depth..].iter().product::<usize>() * element;
        let word = word([inner]);
        let mut dims = [1; MAX_RANK];
        let addressed = &data.shape[self.batch..self.batch + depth];
        if depth > MAX_RANK {
            return Err(cx.error("input 1 (indices)", depth, format_args!("tuples of at most {MAX_RANK}")));
        }
        dims.iter_mut().zip(addressed).for_each(|(to, &dim)| *to = dim as u64);
        let params = NdParams {
            x: data.ptr,
            indices: by.ptr,
            y: out.ptr,
            units: (out.bytes() / word) as u64,
            inner_units: (inner / word) as u64,
            per_batch: lead[self.batch..].iter().product::<usize>() as u64,
            batch_units: (data.shape[self.batch..].iter().product::<usize>() * element / word) as u64,
            dims,
            depth: depth as u32,
            word: word as u32,
            element: element as u32,
            pad: 0,
        };
        cx.push(&self.function, spread(cx.device(), out.bytes() / word), &params)
    }
}
