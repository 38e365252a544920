//! MatMul, FusedMatMul and Gemm on CUDA devices. 16-bit operands: the right one goes into fragments, at Compile where it
//! is constant, and tensor cores multiply; float ones are multiplied in float, others plainly.

use super::cpu::addend_strides;
use super::problem::{Problem, Spec};
use super::{A, B, C};
use crate::build::BuildCx;
use crate::cuda::{
    Batch, Buffer, ConstantProduct, DevPtr, Device, DeviceKernel, Launch, LaunchCx, ProductKernels, ProductParams,
    Weights, Window, linear, suffix,
};
use crate::kernel_params;
use crate::quant::fragments::{CHUNK, Shape, TILE};
use crate::weights::Constant;
use abi::cuda::{Function, LaunchShape};
use abi::{DType, Error, Result};
use std::sync::Arc;

/// Parses the node and packs a constant B.
pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let spec = super::spec(cx);
    let dtype = cx.required(A)?.dtype;
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return Ok(Box::new(Strided::new(spec, dtype, device)?));
    }
    let packed = match cx.constant(B)? {
        Some(_) => {
            let layout = format!("cuda fragments {dtype} trans {}", spec.trans_b);
            Some(cx.pack(&[B], &layout, |c| pack(&spec, &c[0], device))?)
        }
        None => None,
    };
    let find = |name: &str| device.function("matmul", name);
    Ok(Box::new(Halves {
        spec,
        dtype,
        packed,
        kernels: ProductKernels::halves(device, suffix(dtype))?,
        make_fragments: find("make_fragments_2")?,
        turn_rows: find("turn_rows_2")?,
    }))
}

/// A constant right operand: the fragments of each of its matrices.
struct Packed {
    buffer: Buffer,
    shape: Vec<usize>,
}

/// The right operand alone, as A of one row would take it.
fn alone<'a>(spec: &Spec, shape: &'a [usize]) -> (Problem<'a>, usize) {
    const ONE: &[usize] = &[1, 1];
    let p = Problem::new(&Spec { trans_a: false, ..*spec }, ONE, shape, ONE);
    (p, super::cpu::b_rows(spec, shape))
}

/// Packs a constant B, on the device.
fn pack(spec: &Spec, constant: &Option<Constant>, device: &Device) -> Result<Packed> {
    let wrong = || Error::Internal("a constant B changed its type after the claim".into());
    let constant = constant.as_ref().ok_or_else(wrong)?;
    let shape = constant.shape();
    let (p, k) = alone(spec, shape);
    let matrices: usize = shape[..shape.len().saturating_sub(2)].iter().product();
    let size = Shape { n: p.n, k, bits: 16 };
    let packed = Packed { buffer: device.alloc(size.bytes() * matrices)?, shape: shape.to_vec() };
    if packed.buffer.is_empty() {
        return Ok(packed);
    }
    let make_fragments = device.function("matmul", "make_fragments_2")?;
    // The file's rows are N long, or K long: so many of them make tiles, or chunks.
    let by_chunks = p.b.column == 1;
    let (rows, row, step) = if by_chunks { (k, p.n, CHUNK) } else { (p.n, k, TILE) };
    let (mut window, at_once) = Window::new(device, rows.div_ceil(step), step * row * 2)?;
    for matrix in 0..matrices {
        let bytes = &constant.bytes()[matrix * k * p.n * 2..][..k * p.n * 2];
        for (i, part) in bytes.chunks(at_once * step * row * 2).enumerate() {
            let (first, count) = (i * at_once, part.len() / (row * 2));
            let (before, n, k) = match by_chunks {
                true => (first * size.chunk_bytes(), p.n, count),
                false => (first * size.chunks() * size.chunk_bytes(), count, k),
            };
            let params = FragmentsParams {
                to: packed.buffer.ptr().plus(matrix * size.bytes() + before),
                row_chunks: size.chunks() as u32,
                ..FragmentsParams::new(window.put(part)?, &p, Shape { n, k, bits: 16 })
            };
            // SAFETY: the source is in the window, and the fragments are within `packed`.
            unsafe { window.take(&[Launch::new(&make_fragments, params.shape(), &params)])? };
            constant.forget_pages();
        }
    }
    Ok(packed)
}

/// float16 and bfloat16.
struct Halves {
    spec: Spec,
    dtype: DType,
    packed: Option<Arc<Packed>>,
    kernels: ProductKernels,
    make_fragments: Function,
    turn_rows: Function,
}

kernel_params! {
    /// As in `cuda.cu`.
    struct FragmentsParams {
        from: DevPtr,
        to: DevPtr,
        matrix: u64,
        row: u64,
        column: u64,
        n: u32,
        k: u32,
        tiles: u32,
        chunks: u32,
        matrices: u32,
        row_chunks: u32,
    }
}

impl FragmentsParams {
    /// One matrix of that shape, whose elements lie as those of `p`'s right operand.
    fn new(from: DevPtr, p: &Problem<'_>, shape: Shape) -> Self {
        Self {
            from,
            to: DevPtr::NULL,
            matrix: 0,
            row: p.b.column as u64,
            column: p.b.row as u64,
            n: shape.n as u32,
            k: shape.k as u32,
            tiles: shape.tiles() as u32,
            chunks: shape.chunks() as u32,
            matrices: 1,
            row_chunks: shape.chunks() as u32,
        }
    }

    /// A thread for each fragment of a lane.
    fn shape(&self) -> LaunchShape {
        threads(self.tiles as usize * self.chunks as usize * self.matrices as usize * 128)
    }
}

kernel_params! {
    /// As in `cuda.cu`.
    struct RowsParams { from: DevPtr, to: DevPtr, row: u64, column: u64, total: u64, rows: u32, columns: u32 }
}

const THREADS: usize = 256;

/// A launch of at least `threads` threads.
fn threads(threads: usize) -> LaunchShape {
    linear(threads.div_ceil(THREADS), THREADS as u32)
}

impl DeviceKernel for Halves {
    fn product(&self) -> Option<ConstantProduct> {
        let packed = self.packed.as_ref().filter(|packed| packed.shape.len() == 2)?;
        let (p, k) = alone(&self.spec, &packed.shape);
        let plain = !self.spec.trans_a && self.spec.alpha == 1.0;
        plain.then(|| ConstantProduct {
            weights: Weights::halves(&Shape { n: p.n, k, bits: 16 }, packed.buffer.ptr()),
            layout: None,
            dtype: self.dtype,
            bias: None,
        })
    }

    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (a, b) = (cx.required(A), cx.input(B));
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let b_shape = self.packed.as_ref().map_or_else(|| b.map_or(&[][..], |b| b.shape), |packed| &packed.shape);
        let p = Problem::new(&self.spec, a.shape, b_shape, out.shape);
        let size = Shape { n: p.n, k: p.k, bits: 16 };
        let w = match &self.packed {
            Some(packed) => Weights::halves(&size, packed.buffer.ptr()),
            None => self.fragments(cx, &p, b_shape)?,
        };
        let x = if self.spec.trans_a && a.shape.len() > 1 { self.turned(cx, &p)? } else { a.ptr };
        let (c, (c_row, c_column)) = addend(cx);
        for Layer { batch, count, before } in layers(&p) {
            let (x, w) = (x.plus(before[0] * p.m * p.k * 2), w.plus(before[1] * size.bytes()));
            let params = ProductParams {
                c,
                batch,
                c_row,
                c_column,
                alpha: self.spec.alpha,
                beta: self.spec.beta,
                ..ProductParams::new(x, w, out.ptr.plus(before[2] * p.m * p.n * 2), p.m)
            };
            self.kernels.push(cx, &params, count, self.packed.is_some())?;
        }
        Ok(())
    }
}

/// C and the elements from one of its rows and columns to the next.
fn addend(cx: &LaunchCx<'_>) -> (DevPtr, (u32, u32)) {
    cx.input(C).map_or((DevPtr::NULL, (0, 0)), |c| {
        let (row, column) = addend_strides(c.shape);
        (c.ptr, (row as u32, column as u32))
    })
}

/// Some products of a problem, for one launch.
struct Layer {
    batch: Batch,
    count: usize,
    /// Matrices of A, of B and of the output in front of theirs.
    before: [usize; 3],
}

/// As few as the grid's depth allows; each product its own where the batch's dims broadcast in too many ways to fold.
fn layers(p: &Problem<'_>) -> Vec<Layer> {
    const DEPTH: usize = 65535;
    let Some(batch) = p.cuda_batch() else {
        let alone = |i| {
            let (a, b) = p.operands(i);
            Layer { batch: Batch::ONE, count: 1, before: [a, b, i] }
        };
        return (0..p.batch).map(alone).collect();
    };
    let from = |first: usize| {
        let mut batch = batch;
        batch.first = first as u32;
        Layer { batch, count: DEPTH.min(p.batch - first), before: [0; 3] }
    };
    (0..p.batch).step_by(DEPTH).map(from).collect()
}

impl Halves {
    /// Makes fragments of a B that arrives with the run.
    fn fragments(&self, cx: &mut LaunchCx<'_>, p: &Problem<'_>, shape: &[usize]) -> Result<Weights> {
        let size = Shape { n: p.n, k: p.k, bits: 16 };
        let matrices: usize = shape[..shape.len().saturating_sub(2)].iter().product();
        let to = cx.scratch(size.bytes() * matrices);
        let params = FragmentsParams {
            to,
            matrix: (p.k * p.n) as u64,
            matrices: matrices as u32,
            ..FragmentsParams::new(cx.input_ptr(B), p, size)
        };
        cx.push(&self.make_fragments, params.shape(), &params)?;
        Ok(Weights::halves(&size, to))
    }

    /// A with K innermost.
    fn turned(&self, cx: &mut LaunchCx<'_>, p: &Problem<'_>) -> Result<DevPtr> {
        let a = cx.required(A);
        let to = cx.scratch(a.bytes());
        let params = RowsParams {
            from: a.ptr,
            to,
            row: p.a.row as u64,
            column: p.a.column as u64,
            total: a.len() as u64,
            rows: p.m as u32,
            columns: p.k as u32,
        };
        cx.push(&self.turn_rows, threads(a.len()), &params)?;
        Ok(to)
    }
}

/// The other types, whose operands are read where they lie.
struct Strided {
    spec: Spec,
    kernels: Kernels,
}

enum Kernels {
    Float { gemm: Function, columns: Function, rows: Function },
    Exact(Function),
}

impl Strided {
    fn new(spec: Spec, dtype: DType, device: &Device) -> Result<Self> {
        let find = |name: &str| device.function("matmul", name);
        let kernels = match dtype {
            DType::F32 => Kernels::Float {
                gemm: find("gemm_f32")?,
                columns: find("gemv_columns_f32")?,
                rows: find("gemv_rows_f32")?,
            },
            DType::F64 => Kernels::Exact(find("product_f64")?),
            DType::I32 | DType::U32 => Kernels::Exact(find("product_4")?),
            _ => Kernels::Exact(find("product_8")?),
        };
        Ok(Self { spec, kernels })
    }
}

kernel_params! {
    /// As in `cuda.cu`.
    struct StridedParams {
        x: DevPtr,
        w: DevPtr,
        c: DevPtr,
        y: DevPtr,
        batch: Batch,
        w_matrix: u64,
        x_row: u64,
        x_column: u64,
        w_row: u64,
        w_column: u64,
        m: u32,
        n: u32,
        k: u32,
        c_row: u32,
        c_column: u32,
        alpha: f32,
        beta: f32,
        pad: u32,
    }
}

/// Rows up to which float products go row by row.
const GEMV_ROWS: usize = 8;

impl DeviceKernel for Strided {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (a, b) = (cx.required(A), cx.required(B));
        let Some(out) = cx.output(0).filter(|out| !out.is_empty()) else { return Ok(()) };
        let p = Problem::new(&self.spec, a.shape, b.shape, out.shape);
        let (c, (c_row, c_column)) = addend(cx);
        let bytes = |elements: usize| a.dtype.bytes(elements).unwrap_or(0);
        for Layer { batch, count, before } in layers(&p) {
            let params = StridedParams {
                x: a.ptr.plus(bytes(before[0] * p.m * p.k)),
                w: b.ptr.plus(bytes(before[1] * p.k * p.n)),
                c,
                y: out.ptr.plus(bytes(before[2] * p.m * p.n)),
                batch,
                w_matrix: (p.k * p.n) as u64,
                x_row: p.a.row as u64,
                x_column: p.a.column as u64,
                w_row: p.b.row as u64,
                w_column: p.b.column as u64,
                m: p.m as u32,
                n: p.n as u32,
                k: p.k as u32,
                c_row,
                c_column,
                alpha: self.spec.alpha,
                beta: self.spec.beta,
                pad: 0,
            };
            let (function, x, y) = match &self.kernels {
                Kernels::Exact(function) => (function, (p.m * p.n).div_ceil(THREADS), 1),
                Kernels::Float { gemm, .. } if p.m > GEMV_ROWS => (gemm, p.m.div_ceil(128) * p.n.div_ceil(64), 1),
                Kernels::Float { rows, .. } if p.b.row == 1 && p.n > 1 => (rows, p.n.div_ceil(8), p.m),
                Kernels::Float { columns, .. } => (columns, p.n.div_ceil(32), p.m),
            };
            let line = linear(x, THREADS as u32);
            cx.push(function, LaunchShape { grid: [line.grid[0], y as u32, count as u32], ..line }, &params)?;
        }
        Ok(())
    }
}
