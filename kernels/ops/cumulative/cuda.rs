//! CumSum and CumProd on CUDA devices: a warp a contiguous row, else a thread a row.

use crate::build::BuildCx;
use crate::cpu::number::INTS;
use crate::cuda::number::code;
use crate::cuda::walk::{MAX_RANK, spread};
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx};
use crate::fact;
use crate::kernel_params;
use abi::cuda::Function;
use abi::{DType, Result};
use std::sync::Arc;

kernel_params! {
    /// As in `cuda.cu`.
    struct CumulativeParams {
        x: DevPtr, axis: DevPtr, y: DevPtr, n: u64, length: u64, inner: u64, dims: [u64; MAX_RANK],
        rank: u32, axis_type: u32, dtype: u32, product: u32, exclusive: u32, reverse: u32,
    }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>, product: bool) -> Result<Box<dyn DeviceKernel>> {
    let kind = match cx.required(0)?.dtype {
        DType::F64 => "double",
        dtype if INTS.contains(&dtype) => "integer",
        _ => "float",
    };
    let function = |by| device.function("cumulative", &format!("{by}_{kind}"));
    Ok(Box::new(Cumulative {
        rows: function("rows")?,
        columns: function("columns")?,
        product,
        exclusive: cx.int("exclusive", 0) != 0,
        reverse: cx.int("reverse", 0) != 0,
    }))
}

struct Cumulative {
    rows: Function,
    columns: Function,
    product: bool,
    exclusive: bool,
    reverse: bool,
}

impl DeviceKernel for Cumulative {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (x, axis) = (cx.required(0), cx.required(1));
        let Some(y) = cx.output(0).filter(|y| !y.is_empty()) else { return Ok(()) };
        let rank = x.shape.len();
        if rank > MAX_RANK {
            return Err(cx.error("input 0 (x)", format_args!("rank {rank}"), format_args!("at most {MAX_RANK}")));
        }
        let mut params = CumulativeParams {
            x: x.ptr,
            axis: axis.ptr,
            y: y.ptr,
            n: x.len() as u64,
            length: 1,
            inner: 1,
            dims: [1; MAX_RANK],
            rank: rank as u32,
            axis_type: code(axis.dtype),
            dtype: code(x.dtype),
            product: self.product.into(),
            exclusive: self.exclusive.into(),
            reverse: self.reverse.into(),
        };
        params.dims.iter_mut().zip(x.shape).for_each(|(to, &dim)| *to = dim as u64);
        let Some(asked) = axis.ints().map(|v| v[0]) else {
            // Known on the device only: as many threads as the most rows that an axis may leave.
            return cx.push(&self.columns, spread(cx.device(), x.len()), &params);
        };
        let Some(axis) = fact::axis(asked, rank) else {
            return Err(cx.error("input 1 (axis)", asked, format_args!("an axis of rank {rank}")));
        };
        let (length, inner) = (x.shape[axis], x.shape[axis + 1..].iter().product::<usize>());
        (params.axis, params.length, params.inner) = (DevPtr::NULL, length as u64, inner as u64);
        let rows = x.len() / length;
        if inner == 1 {
            cx.push(&self.rows, spread(cx.device(), rows * 32), &params)
        } else {
            cx.push(&self.columns, spread(cx.device(), rows), &params)
        }
    }
}
