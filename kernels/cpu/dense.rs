//! Products with an unquantised right operand, 16 columns (a panel) at a time.
//!
//! A packed panel stores, for each k, its 16 columns' values side by side (zeros past N), so a matrix is read once, in
//! order. A row-major matrix is read in place as panels whose rows are far apart.

#![allow(clippy::needless_range_loop)] // one row number indexes registers and memory alike, and is unrolled

use crate::cpu::rows::{Groups, MAX_GROUP};
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::sink::Sink;
use abi::DType;
use abi::tensor::Element;
use std::ops::Range;

/// A right operand.
#[derive(Clone, Copy)]
pub struct Panels {
    /// The first panel.
    pub ptr: *const u8,
    /// float, float16 or bfloat16.
    pub dtype: DType,
    /// Rows.
    pub k: usize,
    /// Bytes from one row of a panel to the next.
    pub row: usize,
    /// Bytes from one panel to the next.
    pub panel: usize,
}

// SAFETY: only read.
unsafe impl Send for Panels {}
// SAFETY: only read.
unsafe impl Sync for Panels {}

impl Panels {
    /// Panels packed one after the other from `ptr` on.
    pub fn packed(ptr: *const u8, dtype: DType, k: usize) -> Self {
        let row = LANES * element_bytes(dtype);
        Self { ptr, dtype, k, row, panel: row * k }
    }

    /// A row-major matrix of `n` columns read in place; its last `n % 16` columns are out of reach.
    pub fn in_place(ptr: *const u8, dtype: DType, k: usize, n: usize) -> Self {
        let size = element_bytes(dtype);
        Self { ptr, dtype, k, row: n * size, panel: LANES * size }
    }
}

/// Bytes of a float, float16 or bfloat16.
pub fn element_bytes(dtype: DType) -> usize {
    if dtype == DType::F32 { 4 } else { 2 }
}

/// Packs panel `panel` of a K x N matrix, where element (k, n) lies at `k * row + n * column`, into 16 K elements.
pub fn pack_panel<T: Element>(
    b: &[T],
    (row, column): (usize, usize),
    (k, n): (usize, usize),
    panel: usize,
    zero: T,
    out: &mut [T],
) {
    let first = panel * LANES;
    let width = LANES.min(n - first);
    for (i, out) in out[..k * LANES].chunks_exact_mut(LANES).enumerate() {
        let from = &b[i * row + first * column..];
        if column == 1 {
            out[..width].copy_from_slice(&from[..width]);
        } else {
            let values = from.iter().step_by(column);
            out[..width].iter_mut().zip(values).for_each(|(o, v)| *o = *v);
        }
        out[width..].fill(zero);
    }
}

/// A part of a product: some rows times some panels.
pub struct Part<'a> {
    /// The rows, gathered into groups (see [`crate::cpu::rows`]); starts at row 0.
    pub a: *const f32,
    /// Values a row takes in `a`.
    pub a_stride: usize,
    /// The rows to compute.
    pub rows: Range<usize>,
    /// The right operand. Panel 0 holds the columns `first_panel * 16..`.
    pub b: Panels,
    /// Number of the right operand's first panel in the output.
    pub first_panel: usize,
    /// The panels to compute, by number in the output.
    pub panels: Range<usize>,
    /// The output.
    pub out: &'a Sink<'a>,
}

/// One element format of the right operand.
trait Format {
    unsafe fn load<S: Simd>(p: *const u8) -> S::F;
}

struct F32;
struct F16;
struct Bf16;

impl Format for F32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load(p.cast()) }
    }
}

impl Format for F16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load_f16(p.cast()) }
    }
}

impl Format for Bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load_bf16(p.cast()) }
    }
}

/// One group's rows times one panel, into `out` (16 f32 a row). Loops over rows must stay free of branches: see
/// [`crate::cpu::nbits`].
#[inline(always)]
unsafe fn tile<S: Simd, E: Format, const R: usize>(
    a: *const f32,
    b: *const u8,
    (k, stride): (usize, usize),
    out: *mut f32,
) {
    // SAFETY: `a` holds K values for each of R rows, `b` holds K vectors, `stride` bytes apart.
    unsafe {
        let mut acc = [S::splat(0.0); R];
        let mut i = 0;
        if R == 1 {
            // One row alone would wait for its own sums: four of them take turns.
            let mut more = [S::splat(0.0); 3];
            while i + 4 <= k {
                acc[0] = S::fma(S::splat(*a.add(i)), E::load::<S>(b.add(i * stride)), acc[0]);
                for u in 0..3 {
                    let w = E::load::<S>(b.add((i + u + 1) * stride));
                    more[u] = S::fma(S::splat(*a.add(i + u + 1)), w, more[u]);
                }
                i += 4;
            }
            acc[0] = S::add(S::add(acc[0], more[0]), S::add(more[1], more[2]));
        }
        while i < k {
            let w = E::load::<S>(b.add(i * stride));
            for r in 0..R {
                acc[r] = S::fma(S::splat(*a.add(i * R + r)), w, acc[r]);
            }
            i += 1;
        }
        for r in 0..R {
            S::store(out.add(r * LANES), acc[r]);
        }
    }
}

#[inline(always)]
unsafe fn run<S: Simd, E: Format>(part: &Part<'_>) {
    for panel in part.panels.clone() {
        // SAFETY: the part's promises.
        unsafe {
            let b = part.b.ptr.add((panel - part.first_panel) * part.b.panel);
            for (row, size) in Groups::new(part.rows.clone(), S::ROWS) {
                let a = part.a.add(row * part.a_stride);
                let mut tile = [0f32; MAX_GROUP * LANES];
                let out = tile.as_mut_ptr();
                crate::with_rows!(S, size, R => self::tile::<S, E, R>(a, b, (part.b.k, part.b.row), out));
                for r in 0..size {
                    part.out.store::<S>(row + r, panel * LANES, S::load(out.add(r * LANES)));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn product<S: Simd>(part: &Part<'_>) {
    // SAFETY: the part's promises.
    unsafe {
        match part.b.dtype {
            DType::F16 => run::<S, F16>(part),
            DType::BF16 => run::<S, Bf16>(part),
            _ => run::<S, F32>(part),
        }
    }
}

crate::tiered! {
    /// The product kernel of a tier. Its caller promises that the pointers hold what [`Part`] says and that parts
    /// that run at once do not overlap in the output.
    pub fn kernel(part: &Part<'_>) = product;
}
