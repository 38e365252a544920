//! Products with an unquantised right operand in panels of 16 columns.
//!
//! A panel stores, for each k, its 16 columns' values side by side (zeros past N), so a matrix is read once, in order.

use crate::cpu::rows::Groups;
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::sink::Sink;
use abi::DType;
use std::ops::Range;

/// A packed right operand.
#[derive(Clone, Copy)]
pub struct Panels {
    /// The first panel.
    pub ptr: *const u8,
    /// float, float16 or bfloat16.
    pub dtype: DType,
    /// Rows.
    pub k: usize,
}

// SAFETY: only read.
unsafe impl Send for Panels {}
// SAFETY: only read.
unsafe impl Sync for Panels {}

impl Panels {
    /// Bytes of a panel.
    pub fn panel_bytes(dtype: DType, k: usize) -> usize {
        k * LANES * if dtype == DType::F32 { 4 } else { 2 }
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
    const BYTES: usize;
    unsafe fn load<S: Simd>(p: *const u8) -> S::F;
}

struct F32;
struct F16;
struct Bf16;

impl Format for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load(p.cast()) }
    }
}

impl Format for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load_f16(p.cast()) }
    }
}

impl Format for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: passed on.
        unsafe { S::load_bf16(p.cast()) }
    }
}

/// One group's rows times one panel.
#[inline(always)]
unsafe fn tile<S: Simd, E: Format, const R: usize>(a: *const f32, b: *const u8, k: usize) -> [S::F; R] {
    // SAFETY: `a` holds K values for each of R rows, `b` holds K vectors.
    unsafe {
        let mut acc = [[S::splat(0.0); 4]; R];
        // One row alone would wait for its own sums: four of them take turns.
        let turns = if R == 1 { 4 } else { 1 };
        let whole = k / turns * turns;
        let mut i = 0;
        while i < whole {
            for u in 0..turns {
                let w = E::load::<S>(b.add((i + u) * LANES * E::BYTES));
                for r in 0..R {
                    acc[r][u] = S::fma(S::splat(*a.add((i + u) * R + r)), w, acc[r][u]);
                }
            }
            i += turns;
        }
        while i < k {
            let w = E::load::<S>(b.add(i * LANES * E::BYTES));
            for r in 0..R {
                acc[r][0] = S::fma(S::splat(*a.add(i * R + r)), w, acc[r][0]);
            }
            i += 1;
        }
        let mut out = [S::splat(0.0); R];
        for r in 0..R {
            out[r] = acc[r][0];
            for u in 1..turns {
                out[r] = S::add(out[r], acc[r][u]);
            }
        }
        out
    }
}

#[inline(always)]
unsafe fn run<S: Simd, E: Format>(part: &Part<'_>) {
    let stride = part.b.k * LANES * E::BYTES;
    for panel in part.panels.clone() {
        // SAFETY: the part's promises.
        unsafe {
            let b = part.b.ptr.add((panel - part.first_panel) * stride);
            for (row, size) in Groups::new(part.rows.clone(), S::ROWS) {
                let a = part.a.add(row * part.a_stride);
                crate::with_rows!(S, size, R => {
                    let tile = tile::<S, E, R>(a, b, part.b.k);
                    for r in 0..R {
                        part.out.store::<S>(row + r, panel * LANES, tile[r]);
                    }
                });
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
