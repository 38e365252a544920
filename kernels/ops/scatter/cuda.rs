//! ScatterElements and ScatterND on CUDA devices: a copy of the data, then the updates.

use super::{Reduction, reduction};
use crate::build::BuildCx;
use crate::cuda::number::{code, size};
use crate::cuda::walk::{MAX_RANK, Walk, row_major, spread, word};
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, suffix};
use crate::fact;
use crate::kernel_params;
use crate::ops::gather::cuda::elements_walk;
use crate::ops::movement::cuda::Views;
use abi::Result;
use abi::cuda::Function;
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct ScatterParams {
        y: DevPtr, indices: DevPtr, updates: DevPtr, n: u64, length: u64, inner: u64, stride: i64, dims: [u64; MAX_RANK],
        walk: Walk<1>, lines: Walk<1>, line_stride: i64,
        index_type: u32, word: u32, element: u32, depth: u32, reduction: u32, pad: u32,
    }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let nd = cx.node().op_type == "ScatterND";
    let reduction = reduction(cx);
    let name = match reduction {
        Reduction::Replace if nd => "scatter_nd".into(),
        Reduction::Replace => "scatter_elements".into(),
        _ => format!("combine_{}", suffix(cx.required(0)?.dtype)),
    };
    Ok(Box::new(Scatter {
        function: device.function("scatter", &name)?,
        views: Views::new(device)?,
        axis: (!nd).then(|| cx.int("axis", 0)),
        reduction,
    }))
}

struct Scatter {
    function: Function,
    views: Views,
    /// ScatterElements' axis; `None` for ScatterND.
    axis: Option<i64>,
    reduction: Reduction,
}

impl DeviceKernel for Scatter {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (data, by, updates) = (cx.required(0), cx.required(1), cx.required(2));
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        self.views.launch(cx, 0, [(data.len(), 1)])?;
        if updates.is_empty() {
            return Ok(());
        }
        let element = size(data.dtype);
        let none = Walk::broadcast([&[]], &[]).expect("a scalar has no dim");
        let mut params = ScatterParams {
            y: out.ptr,
            indices: by.ptr,
            updates: updates.ptr,
            n: updates.len() as u64,
            length: 1,
            inner: 1,
            stride: 0,
            dims: [1; MAX_RANK],
            walk: none,
            lines: none,
            line_stride: 0,
            index_type: code(by.dtype),
            word: element as u32,
            element: element as u32,
            depth: 0,
            reduction: self.reduction as u32,
            pad: 0,
        };
        let threads = match self.axis {
            Some(axis) => self.by_elements(cx, axis, &mut params)?,
            None => self.by_tuples(cx, &mut params)?,
        };
        cx.push(&self.function, spread(cx.device(), threads), &params)
    }
}

impl Scatter {
    /// ScatterElements' parameters, and the threads that have work.
    fn by_elements(&self, cx: &LaunchCx, axis: i64, params: &mut ScatterParams) -> Result<usize> {
        let (data, by) = (cx.required(0), cx.required(1));
        let axis = fact::axis(axis, data.shape.len()).expect("infer has checked the axis");
        params.dims[0] = data.shape[axis] as u64;
        params.stride = row_major(data.shape)[axis] as i64;
        params.walk = elements_walk(cx, data.shape, by.shape, axis)?;
        if self.reduction == Reduction::Replace {
            return Ok(by.len());
        }
        let strides = row_major(by.shape);
        let others = (0..by.shape.len()).filter(|&d| d != axis).map(|d| (by.shape[d], [strides[d]]));
        params.lines = Walk::new(others).expect("fewer dims than the walk has");
        params.length = by.shape[axis] as u64;
        params.line_stride = strides[axis] as i64;
        Ok(by.len() / by.shape[axis])
    }

    /// ScatterND's.
    fn by_tuples(&self, cx: &LaunchCx, params: &mut ScatterParams) -> Result<usize> {
        let (data, by) = (cx.required(0), cx.required(1));
        let (&depth, lead) = by.shape.split_last().expect("infer has checked the rank");
        if depth > MAX_RANK {
            return Err(cx.error("input 1 (indices)", depth, format_args!("tuples of at most {MAX_RANK}")));
        }
        params.dims.iter_mut().zip(&data.shape[..depth]).for_each(|(to, &dim)| *to = dim as u64);
        params.depth = depth as u32;
        let (rows, inner) = (lead.iter().product::<usize>(), data.shape[depth..].iter().product::<usize>());
        params.length = rows as u64;
        if self.reduction != Reduction::Replace {
            params.inner = inner as u64;
            return Ok(inner);
        }
        let bytes = inner * size(data.dtype);
        let word = word([bytes]);
        params.word = word as u32;
        params.inner = (bytes / word) as u64;
        params.n = (rows * bytes / word) as u64;
        Ok(rows * bytes / word)
    }
}
