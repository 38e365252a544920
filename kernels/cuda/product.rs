//! Products with weights in fragments: their parameters, the choice of kernel, the launch. Any op that multiplies by a
//! matrix of weights uses this.

use super::tiles::GemmKernels;
use super::{Batch, DevPtr, Device, LaunchCx, Weights, linear, suffix};
use crate::kernel_params;
use crate::quant::nbits::{Layout, ZeroPoint};
use abi::cuda::{Function, LaunchShape};
use abi::{DType, Result};

/// A product by constant weights, for kernels that make several products at once: `y = x w^T + c`.
#[derive(Clone, Copy)]
pub struct ConstantProduct {
    /// The weights.
    pub weights: Weights,
    /// How they are quantised; `None` for 16-bit floats.
    pub layout: Option<Layout>,
    /// The type of x, c and y.
    pub dtype: DType,
    /// The node's input slot of c, one value a column.
    pub bias: Option<usize>,
}

kernel_params! {
    /// As in `product.cuh`.
    pub struct ProductParams {
        /// The left operand: rows of K elements.
        pub x: DevPtr,
        /// What is added, or null.
        pub c: DevPtr,
        /// The output, `[batch, M, N]`.
        pub y: DevPtr,
        /// The right operand.
        pub w: Weights,
        /// What repeats; only 16-bit weights have more than one.
        pub batch: Batch,
        /// Elements from one row of `x` to the next.
        pub x_row: u64,
        /// Rows.
        pub m: u32,
        /// Elements of `c` from one row to the next.
        pub c_row: u32,
        /// Elements of `c` from one column to the next.
        pub c_column: u32,
        /// Factor of the product.
        pub alpha: f32,
        /// Factor of `c`.
        pub beta: f32,
        /// Nothing.
        pub pad: u32,
    }
}

impl ProductParams {
    /// `y = x w^T` with rows of `x` side by side.
    pub fn new(x: DevPtr, w: Weights, y: DevPtr, m: usize) -> Self {
        let x_row = w.k() as u64;
        let (c, batch) = (DevPtr::NULL, Batch::ONE);
        Self { x, c, y, w, batch, x_row, m: m as u32, c_row: 0, c_column: 0, alpha: 1.0, beta: 1.0, pad: 0 }
    }

    /// Adds one value a column.
    pub fn with_bias(self, bias: DevPtr) -> Self {
        Self { c: bias, c_row: 0, c_column: 1, ..self }
    }
}

kernel_params! {
    /// As in `parts.cu`.
    struct PartsParams {
        parts: DevPtr,
        c: DevPtr,
        y: DevPtr,
        count: u32,
        m: u32,
        n: u32,
        c_row: u32,
        c_column: u32,
        alpha: f32,
        beta: f32,
        pad: u32,
    }
}

/// Rows that the GEMV kernels take: past these, GEMM kernels win.
const GEMV_ROWS: usize = 16;
/// Rows that one block of a GEMV takes (`kGemvRows`).
const GEMV_STEP: usize = 8;
/// Warps that a block of a GEMV may have (`kGemvWarps`).
const GEMV_WARPS: usize = 16;

/// The kernels for one type of activations and one kind of weights.
pub struct ProductKernels {
    gemv: Function,
    /// The GEMV for whole groups of two chunks.
    lean: Option<Function>,
    gemm: GemmKernels,
    /// Adds up the parts of K.
    parts: Function,
    bits: usize,
}

impl ProductKernels {
    /// Finds the kernels for quantised weights and activations of the scales' type.
    ///
    /// # Errors
    /// When this build has no such kernels.
    pub fn quantised(device: &Device, layout: &Layout) -> Result<Self> {
        let (bits, block, suffix) = (layout.bits, layout.block, suffix(layout.scale));
        // A tensor core adds up over 32 columns, which a block of 16 does not share; a 16-bit float does not hold the sum of
        // an integer and any float zero point.
        let after = block >= 32 && layout.zero_point != ZeroPoint::Float;
        let way = if after { "after" } else { "before" };
        let zeros = if layout.zero_point == ZeroPoint::Bytes { "bytes" } else { "plain" };
        let lean = after && bits == 4 && block <= 128;
        let gemm = |hopper: bool, size: &str| {
            let kind = if hopper { "wgemm" } else { "gemm" };
            device.function(&format!("matmul_nbits_{kind}"), &format!("{kind}_{bits}_{size}_{suffix}"))
        };
        let lean = lean.then(|| device.function("matmul_nbits_gemv4", &format!("gemv4_{block}_{zeros}_{suffix}")));
        Ok(Self {
            gemv: device.function("matmul_nbits_gemv", &format!("gemv_{bits}_{way}_{suffix}"))?,
            lean: lean.transpose()?,
            gemm: GemmKernels::new(device, bits, gemm)?,
            parts: device.function("cuda_parts", &format!("add_parts_{suffix}"))?,
            bits,
        })
    }

    /// Finds the kernels for 16-bit weights.
    ///
    /// # Errors
    /// When this build has no such kernels.
    pub fn halves(device: &Device, suffix: &str) -> Result<Self> {
        let gemm = |hopper: bool, size: &str| match hopper {
            true => device.function("matmul_wgemm", &format!("wgemm_{size}_{suffix}")),
            false => device.function("matmul_fragments", &format!("gemm_{size}_{suffix}")),
        };
        Ok(Self {
            gemv: device.function("matmul_fragments", &format!("gemv_{suffix}"))?,
            lean: None,
            gemm: GemmKernels::new(device, 16, gemm)?,
            parts: device.function("cuda_parts", &format!("add_parts_{suffix}"))?,
            bits: 16,
        })
    }

    /// Launches `batch` products. `constant`: nobody writes the weights while the plan runs.
    ///
    /// # Errors
    /// As [`LaunchCx::push`].
    pub fn push(&self, cx: &mut LaunchCx<'_>, params: &ProductParams, batch: usize, constant: bool) -> Result<()> {
        let (m, n) = (params.m as usize, params.w.n());
        if m <= GEMV_ROWS {
            let steps = m.div_ceil(GEMV_STEP);
            let (tiles, chunks, layers) = (params.w.tiles(), params.w.chunks(), [steps, batch]);
            let lean = self.lean.as_ref().filter(|_| chunks.is_multiple_of(2)).and_then(|lean| {
                let shared = staged_rows(m.min(GEMV_STEP), chunks);
                Some((lean, lean_shape(tiles, chunks / 2, layers, cx.device(), shared, RESIDENT)?))
            });
            let (function, shape) = lean.unwrap_or_else(|| {
                // A group of chunks is what a warp reads at once.
                let groups = if self.bits == 16 { chunks } else { chunks.div_ceil(2) };
                (&self.gemv, gemv_shape(tiles, groups, layers, cx.device(), 0))
            });
            // They read the first weights before they wait for the launches in front.
            return cx.push(function, LaunchShape { overlap: constant, ..shape }, params);
        }
        let sms = cx.device().multiprocessors() as usize;
        let (gemm, shape) = self.gemm.choose([m, n], params.w.chunks(), batch, sms);
        let parts = shape.grid[1] as usize;
        if parts == 1 {
            return cx.push(gemm, shape, params);
        }
        let sums = cx.scratch(parts * m * n * size_of::<f32>());
        cx.push(gemm, shape, &ProductParams { y: sums, ..*params })?;
        let ProductParams { c, y, c_row, c_column, alpha, beta, .. } = *params;
        let (count, rows) = (parts as u32, params.m);
        let add = PartsParams { parts: sums, c, y, count, m: rows, n: n as u32, c_row, c_column, alpha, beta, pad: 0 };
        cx.push(&self.parts, linear((m * n).div_ceil(256).min(8 * sms), 256), &add)
    }
}

/// Bytes of shared memory in which a GEMV adds up (`kGemvWarps`, `kGemvRows`, tiles of 16; twice).
const SUMS: u32 = 16 << 10;
/// Shared memory of a block past which too few are resident for the lean GEMV to be lean.
const LEAN_SHARED: u32 = 96 << 10;

/// Dynamic shared memory of a GEMV that stages its rows: as `staged_row_bytes` says, and a group of zeros.
pub fn staged_rows(rows: usize, chunks: usize) -> u32 {
    (rows * (chunks * 64 * 2 + 64) + 256) as u32
}

/// [`gemv_shape`] of a GEMV that stages its rows, and of which a multiprocessor holds `held` warps; `None` when the rows are
/// too many for it to be lean.
pub fn lean_shape(
    tiles: usize,
    groups: usize,
    layers: [usize; 2],
    device: &Device,
    shared: u32,
    held: usize,
) -> Option<LaunchShape> {
    let fits = shared + SUMS <= device.shared_limit().min(LEAN_SHARED);
    fits.then(|| resident_shape(tiles, groups, layers, device, shared, held))
}

/// The grid of a GEMV: blocks walk over the tiles along N (or other units of that work), their warps share the groups of
/// columns. `layers`: the grid's other dims; `shared`: dynamic shared memory.
pub fn gemv_shape(tiles: usize, groups: usize, layers: [usize; 2], device: &Device, shared: u32) -> LaunchShape {
    resident_shape(tiles, groups, layers, device, shared, RESIDENT)
}

/// Warps of 64 registers a thread that a multiprocessor holds.
const RESIDENT: usize = 32;

/// [`gemv_shape`] of a kernel of which a multiprocessor holds `held` warps.
fn resident_shape(
    tiles: usize,
    groups: usize,
    layers: [usize; 2],
    device: &Device,
    shared: u32,
    held: usize,
) -> LaunchShape {
    let sms = device.multiprocessors() as usize;
    let groups = groups.max(1);
    let layer_count = layers[0] * layers[1];
    // Few tiles: more warps share one, so that the device has enough loads under way.
    let most = if tiles * layer_count >= 2 * sms { GEMV_WARPS / 2 } else { GEMV_WARPS };
    let warps = groups.div_ceil(groups.div_ceil(most));
    let by_shared = device.shared_limit().max(SUMS + shared) / (SUMS + shared);
    let resident = sms * (held / warps).max(1).min(by_shared as usize);
    let rounds = tiles.div_ceil(resident.div_ceil(layer_count)).max(1);
    let grid = [tiles.div_ceil(rounds) as u32, layers[0] as u32, layers[1] as u32];
    LaunchShape { grid, block: [32 * warps as u32, 1, 1], shared, overlap: true }
}
