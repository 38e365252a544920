//! Norms on CUDA devices, one launch each: rows in registers where 16-byte accesses fit them, else rows read once for
//! each statistic.

use super::layer::is_row;
use crate::build::BuildCx;
use crate::cuda::{DevPtr, Device, DeviceKernel, DeviceTensor, LaunchCx, linear, suffix};
use crate::fact::{Fact, axis};
use crate::kernel_params;
use crate::op::{Decline, NodeCx};
use abi::cuda::Function;
use abi::{DType, Result};
use std::sync::Arc;

const MAX_DIMS: usize = 8;

kernel_params! {
    /// As in `cuda.cu`.
    struct NormParams {
        x: DevPtr,
        skip: DevPtr,
        skip_bias: DevPtr,
        scale: DevPtr,
        bias: DevPtr,
        gate: DevPtr,
        y: DevPtr,
        sum: DevPtr,
        mean: DevPtr,
        inverse: DevPtr,
        rows: u64,
        skip_rows: u64,
        n: u32,
        lanes: u32,
        kind: u32,
        dtype: u32,
        out_dtype: u32,
        activation: u32,
        epsilon: f32,
        dims: u32,
        shape: [u32; MAX_DIMS],
        scale_strides: [u32; MAX_DIMS],
        bias_strides: [u32; MAX_DIMS],
    }
}

kernel_params! {
    /// As in `cuda.cu`.
    struct LpParams { x: DevPtr, y: DevPtr, columns: u64, inner: u64, n: u64, kind: u32, pad: u32 }
}

/// As in `cuda.cu`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Rms,
    Layer,
    L1,
    L2,
}

/// As in `cuda.cu`: how a gate acts.
const SILU: u32 = 1;
const SIGMOID: u32 = 2;

/// The kernel's number of a float type.
fn code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        _ => 2,
    }
}

/// The kernels of one node, and what its attributes say.
struct Rows {
    kind: Kind,
    epsilon: f32,
    activation: u32,
    /// Rows in registers, one vector a thread.
    fast: Function,
    /// The same, up to [`LONG`] vectors a thread.
    long: Function,
    /// Any layout.
    any: Function,
}

/// What one launch reads and writes, besides X.
#[derive(Default)]
struct Around<'a> {
    skip: Option<DeviceTensor<'a>>,
    skip_bias: Option<DeviceTensor<'a>>,
    scale: Option<DeviceTensor<'a>>,
    bias: Option<DeviceTensor<'a>>,
    gate: Option<DeviceTensor<'a>>,
    y: Option<DeviceTensor<'a>>,
    sum: Option<DeviceTensor<'a>>,
    mean: DevPtr,
    inverse: DevPtr,
}

/// Threads of a block of rows in registers, at most.
const MOST_THREADS: usize = 512;
/// Vectors of a thread in the kernel for long rows.
const LONG: usize = 4;
/// Threads of a block of short rows.
const THREADS: usize = 128;
/// Threads of a block for a row of any layout.
const ANY_THREADS: usize = 256;
const WARP: usize = 32;

impl Rows {
    fn new(device: &Device, dtype: DType, kind: Kind, epsilon: f32) -> Result<Self> {
        let function = |name: &str| device.function("norm", name);
        let double = dtype == DType::F64;
        let suffix = if double { "f32" } else { suffix(dtype) };
        Ok(Self {
            kind,
            epsilon,
            activation: 0,
            fast: function(&format!("norm_{suffix}"))?,
            long: function(&format!("norm_long_{suffix}"))?,
            any: function(if double { "norm_f64" } else { "norm_any" })?,
        })
    }

    /// Norms of `x`'s rows of `n` elements.
    fn push(&self, cx: &mut LaunchCx<'_>, x: &DeviceTensor<'_>, n: usize, around: &Around<'_>) -> Result<()> {
        if x.is_empty() {
            return Ok(());
        }
        let rows = x.len() / n;
        let out_dtype = around.scale.map_or(x.dtype, |scale| scale.dtype);
        let ptr = |tensor: Option<DeviceTensor<'_>>| tensor.map_or(DevPtr::NULL, |t| t.ptr);
        let is_row = |v: Option<DeviceTensor<'_>>| v.is_none_or(|v| is_row(v.shape, x.shape, n));
        let whole_rows = is_row(around.scale) && is_row(around.bias);
        let mut params = NormParams {
            x: x.ptr,
            skip: ptr(around.skip),
            skip_bias: ptr(around.skip_bias),
            scale: ptr(around.scale),
            bias: ptr(around.bias),
            gate: ptr(around.gate),
            y: ptr(around.y),
            sum: ptr(around.sum),
            mean: around.mean,
            inverse: around.inverse,
            rows: rows as u64,
            skip_rows: around.skip.map_or(0, |skip| (skip.len() / n) as u64),
            n: u32::try_from(n).map_err(|_| cx.error("input 0", n, "rows of less than 2^32 elements"))?,
            lanes: 0,
            kind: self.kind as u32,
            dtype: code(x.dtype),
            out_dtype: code(out_dtype),
            activation: self.activation,
            epsilon: self.epsilon,
            dims: 0,
            shape: [0; MAX_DIMS],
            scale_strides: [0; MAX_DIMS],
            bias_strides: [0; MAX_DIMS],
        };
        if !whole_rows {
            params.dims = x.shape.len() as u32;
            params.shape = padded(x.shape.iter().map(|&d| d as u32));
            params.scale_strides = around.scale.map_or([0; MAX_DIMS], |v| strides(v.shape, x.shape.len()));
            params.bias_strides = around.bias.map_or([0; MAX_DIMS], |v| strides(v.shape, x.shape.len()));
        }
        let width = 16 / x.dtype.bytes(1).unwrap_or(16);
        let vectors = n / width;
        let in_registers = whole_rows
            && x.dtype != DType::F64
            && out_dtype == x.dtype
            && n.is_multiple_of(width)
            && vectors <= MOST_THREADS * LONG;
        let (function, lanes, threads) = if !in_registers {
            let lanes = if n <= ANY_THREADS * 4 { WARP } else { ANY_THREADS };
            (&self.any, lanes, lanes.max(THREADS))
        } else if vectors <= WARP {
            (&self.fast, vectors.next_power_of_two(), THREADS)
        } else if vectors <= MOST_THREADS {
            let threads = vectors.next_multiple_of(WARP);
            (&self.fast, threads, threads)
        } else {
            let threads = vectors.div_ceil(LONG).next_multiple_of(WARP);
            (&self.long, threads, threads)
        };
        params.lanes = lanes as u32;
        let blocks = rows.div_ceil(threads / lanes);
        cx.push(function, linear(blocks, threads as u32), &params)
    }
}

fn padded(values: impl Iterator<Item = u32>) -> [u32; MAX_DIMS] {
    let mut all = [0; MAX_DIMS];
    all.iter_mut().zip(values).for_each(|(to, from)| *to = from);
    all
}

/// Element strides of `vector`, broadcast to `rank` dims.
fn strides(vector: &[usize], rank: usize) -> [u32; MAX_DIMS] {
    let mut all = [0; MAX_DIMS];
    let mut stride = 1;
    for (i, &dim) in vector.iter().enumerate().rev() {
        if dim != 1 {
            all[rank - vector.len() + i] = stride as u32;
        }
        stride *= dim;
    }
    all
}

/// Declines X of more dims than the kernels broadcast over.
pub(super) fn claim_layer(cx: &NodeCx) -> Result<(), Decline> {
    match cx.input(0).and_then(Fact::rank) {
        Some(rank) if rank > MAX_DIMS => {
            Err(cx.decline("input 0 (X)", format_args!("rank {rank}"), format_args!("at most {MAX_DIMS} on CUDA")))
        }
        _ => Ok(()),
    }
}

pub(super) fn build_layer(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let centred = cx.node().op_type == "LayerNormalization";
    let kind = if centred { Kind::Layer } else { Kind::Rms };
    let rows = Rows::new(device, cx.required(0)?.dtype, kind, cx.float("epsilon", 1e-5))?;
    Ok(Box::new(LayerNorm { rows, axis: cx.int("axis", -1) }))
}

struct LayerNorm {
    rows: Rows,
    axis: i64,
}

impl DeviceKernel for LayerNorm {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let x = cx.required(0);
        if x.shape.len() > MAX_DIMS {
            return Err(cx.error("input 0 (X)", format_args!("rank {}", x.shape.len()), "at most 8"));
        }
        let first = axis(self.axis, x.shape.len()).unwrap_or(0);
        let n = x.shape[first..].iter().product();
        let centred = self.rows.kind == Kind::Layer;
        let around = Around {
            scale: cx.input(1),
            bias: cx.input(2).filter(|_| centred),
            y: cx.output(0),
            mean: if centred { cx.output_ptr(1) } else { DevPtr::NULL },
            inverse: cx.output_ptr(if centred { 2 } else { 1 }),
            ..Around::default()
        };
        self.rows.push(cx, &x, n, &around)
    }
}

pub(super) fn build_skip(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let simplified = cx.node().op_type == "SkipSimplifiedLayerNormalization";
    let kind = if simplified { Kind::Rms } else { Kind::Layer };
    Ok(Box::new(SkipNorm(Rows::new(device, cx.required(0)?.dtype, kind, cx.float("epsilon", 1e-12))?)))
}

struct SkipNorm(Rows);

impl DeviceKernel for SkipNorm {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (x, gamma) = (cx.required(0), cx.required(2));
        let simplified = self.0.kind == Kind::Rms;
        let around = Around {
            skip: cx.input(1),
            skip_bias: cx.input(if simplified { 3 } else { 4 }),
            scale: Some(gamma),
            bias: cx.input(3).filter(|_| !simplified),
            y: cx.output(0),
            sum: cx.output(3),
            mean: cx.output_ptr(1),
            inverse: cx.output_ptr(2),
            ..Around::default()
        };
        self.0.push(cx, &x, gamma.len(), &around)
    }
}

pub(super) fn build_gated(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let mut rows = Rows::new(device, cx.required(0)?.dtype, Kind::Rms, cx.float("epsilon", 1e-5))?;
    rows.activation = if cx.string("activation", "silu") == "sigmoid" { SIGMOID } else { SILU };
    Ok(Box::new(GatedRmsNorm(rows)))
}

struct GatedRmsNorm(Rows);

impl DeviceKernel for GatedRmsNorm {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (x, scale) = (cx.required(0), cx.required(1));
        // The groups are rows of their own.
        let (rows, n) = (x.len() / scale.len().max(1), scale.len());
        let x = DeviceTensor { shape: &[rows, n], ..x };
        let around = Around { scale: Some(scale), gate: cx.input(2), y: cx.output(0), ..Around::default() };
        self.0.push(cx, &x, n, &around)
    }
}

pub(super) fn build_lp(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let dtype = cx.required(0)?.dtype;
    let kind = if cx.int("p", 2) == 1 { Kind::L1 } else { Kind::L2 };
    let columns = device.function("norm", &format!("lp_{}", suffix(dtype)))?;
    Ok(Box::new(LpNorm { rows: Rows::new(device, dtype, kind, 0.0)?, columns, axis: cx.int("axis", -1) }))
}

struct LpNorm {
    rows: Rows,
    columns: Function,
    axis: i64,
}

impl DeviceKernel for LpNorm {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let x = cx.required(0);
        if x.is_empty() {
            return Ok(());
        }
        let along = axis(self.axis, x.shape.len()).unwrap_or(0);
        let n = x.shape.get(along).copied().unwrap_or(1);
        if along + 1 == x.shape.len() {
            return self.rows.push(cx, &x, n, &Around { y: cx.output(0), ..Around::default() });
        }
        let columns = x.len() / n;
        let params = LpParams {
            x: x.ptr,
            y: cx.output_ptr(0),
            columns: columns as u64,
            inner: x.shape[along + 1..].iter().product::<usize>() as u64,
            n: n as u64,
            kind: self.rows.kind as u32,
            pad: 0,
        };
        cx.push(&self.columns, linear(columns.div_ceil(THREADS), THREADS as u32), &params)
    }
}
