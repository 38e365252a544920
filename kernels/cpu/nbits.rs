//! Products with a block-quantised right operand ([`crate::quant::nbits`]).
//!
//! Two ways: int8 dot products with rows quantised block by block (accuracy level 4), and f32 arithmetic (levels 0 to
//! 3). Both read each weight once for a group of rows and fold scales in once a block.

#![allow(clippy::needless_range_loop)] // one row number indexes registers and memory alike, and is unrolled

use crate::cpu::rows::{Groups, MAX_GROUP};
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::sink::Sink;
use crate::quant::nbits::{View, ZeroPoint};
use abi::DType;
use std::ops::Range;

/// Rows in the form that a kernel reads, in groups, starting at row 0.
#[derive(Clone, Copy)]
pub struct Left {
    /// int8 kernel: quantised bytes, four neighbours in k of each row of a group side by side. f32 kernel: f32, each
    /// k's rows side by side. Padded K a row.
    pub a: *const u8,
    /// int8 kernel: a scale for each block and row of a group; unused by the f32 kernel.
    pub scales: *const f32,
    /// A correction for each block and row of a group: see [`crate::cpu::rows::quantizer`]; the f32 kernel reads
    /// `-sum(a)` as f32.
    pub fixes: *const i32,
}

// SAFETY: only read.
unsafe impl Send for Left {}
// SAFETY: only read.
unsafe impl Sync for Left {}

/// A part of a product: some rows times some panels.
pub struct Part<'a> {
    /// The rows.
    pub left: Left,
    /// The rows to compute.
    pub rows: Range<usize>,
    /// The weights.
    pub w: View<'a>,
    /// The panels to compute.
    pub panels: Range<usize>,
    /// The output.
    pub out: &'a Sink<'a>,
}

/// A panel's three parts.
#[derive(Clone, Copy)]
struct Panel {
    scales: *const u8,
    zero_points: *const u8,
    weights: *const u8,
}

impl Panel {
    fn of(w: &View<'_>, panel: usize) -> Self {
        let bytes = w.panel(panel);
        Self {
            scales: bytes.as_ptr(),
            zero_points: bytes[w.layout.zero_points_at()..].as_ptr(),
            weights: bytes[w.layout.weights_at()..].as_ptr(),
        }
    }
}

/// 16 floats of `dtype`, the `index`-th such group.
#[inline(always)]
unsafe fn floats<S: Simd>(dtype: DType, p: *const u8, index: usize) -> S::F {
    // SAFETY: the array holds that group.
    unsafe {
        match dtype {
            DType::F32 => S::load(p.cast::<f32>().add(index * LANES)),
            DType::F16 => S::load_f16(p.cast::<u16>().add(index * LANES)),
            _ => S::load_bf16(p.cast::<u16>().add(index * LANES)),
        }
    }
}

/// How far ahead weights are asked for: past the reach of the hardware's own prefetcher at a page's end.
const AHEAD: usize = 2048;

/// The zero points of block `b`, where they are not the default.
#[inline(always)]
unsafe fn zero_points<S: Simd>(w: &View<'_>, panel: Panel, b: usize) -> S::F {
    // SAFETY: the layout says how much the panel holds.
    unsafe {
        match w.layout.zero_point {
            ZeroPoint::Bytes => S::to_f(S::load_u8(panel.zero_points.add(b * LANES))),
            _ => floats::<S>(w.layout.scale, panel.zero_points, b),
        }
    }
}

// The tiles below keep their sums in registers only while every loop over rows is unrolled: its body must stay small and
// free of branches, and nothing may index the sums by a variable. So a tile ends in a buffer, which the sink reads.

/// One group's rows times one panel in int8, into `out` (16 f32 a row).
#[inline(always)]
unsafe fn tile_int8<S: Simd, const BITS: usize, const R: usize>(
    w: &View<'_>,
    panel: Panel,
    left: &Left,
    out: *mut f32,
) {
    let l = &w.layout;
    // SAFETY: the layout says how much the panel holds; the left side holds padded K bytes and a scale and a correction
    // a block for each of R rows.
    unsafe {
        let mask = S::splat_i((0x0101_0101u32 * ((1 << BITS) - 1)) as i32);
        let mut sums = [S::splat(0.0); R];
        let (mut weights, mut a) = (panel.weights, left.a.cast::<i32>());
        let (mut scales, mut fixes) = (left.scales, left.fixes);
        let default = l.zero_point == ZeroPoint::Default;
        for b in 0..l.blocks() {
            let mut acc = [S::splat_i(0); R];
            // One row alone would wait for its own sums: two of them take turns.
            let mut odd = S::splat_i(0);
            if default {
                for r in 0..R {
                    acc[r] = S::splat_i(*fixes.add(r));
                }
            }
            for _ in 0..l.vectors() {
                let packed = S::load_i(weights);
                if R == 1 {
                    S::prefetch(weights.wrapping_add(AHEAD));
                }
                for j in 0..8 / BITS {
                    let w = if BITS == 8 { packed } else { S::and(S::shr(packed, (BITS * j) as u32), mask) };
                    if R == 1 && j % 2 == 1 {
                        odd = S::dot::<BITS>(odd, w, S::splat_i(*a.add(j)));
                    } else {
                        for r in 0..R {
                            acc[r] = S::dot::<BITS>(acc[r], w, S::splat_i(*a.add(j * R + r)));
                        }
                    }
                }
                weights = weights.add(64);
                a = a.add(8 / BITS * R);
            }
            if R == 1 {
                acc[0] = S::add_i(acc[0], odd);
            }
            let scale = floats::<S>(l.scale, panel.scales, b);
            if default {
                for r in 0..R {
                    let scale = S::mul(scale, S::splat(*scales.add(r)));
                    sums[r] = S::fma(S::to_f(acc[r]), scale, sums[r]);
                }
            } else {
                let zero = zero_points::<S>(w, panel, b);
                for r in 0..R {
                    let fix = f32::from_bits(*fixes.add(r) as u32);
                    let dot = S::fma(zero, S::splat(fix), S::to_f(acc[r]));
                    let scale = S::mul(scale, S::splat(*scales.add(r)));
                    sums[r] = S::fma(dot, scale, sums[r]);
                }
            }
            (scales, fixes) = (scales.add(R), fixes.add(R));
        }
        for r in 0..R {
            S::store(out.add(r * LANES), sums[r]);
        }
    }
}

/// How the bits of a weight make a number.
trait Code {
    const BITS: usize;
    /// The default zero point.
    const ZERO: f32;
    /// The low bits of each lane.
    unsafe fn to_f<S: Simd>(a: S::I) -> S::F;
}

/// An unsigned integer.
struct Int<const BITS: usize>;

impl<const N: usize> Code for Int<N> {
    const BITS: usize = N;
    const ZERO: f32 = (1u32 << (N - 1)) as f32;
    #[inline(always)]
    unsafe fn to_f<S: Simd>(a: S::I) -> S::F {
        // SAFETY: passed on.
        unsafe { S::low_to_f::<N>(a) }
    }
}

/// A float4e2m1.
struct E2m1;

impl Code for E2m1 {
    const BITS: usize = 4;
    const ZERO: f32 = 0.0;
    #[inline(always)]
    unsafe fn to_f<S: Simd>(a: S::I) -> S::F {
        // SAFETY: passed on.
        unsafe { S::e2m1_to_f(a) }
    }
}

/// One group's rows times one panel in f32, into `out` (16 f32 a row).
#[inline(always)]
unsafe fn tile_f32<S: Simd, C: Code, const R: usize>(w: &View<'_>, panel: Panel, left: &Left, out: *mut f32) {
    let l = &w.layout;
    // SAFETY: as in `tile_int8`, with f32 rows.
    unsafe {
        let default = S::splat(C::ZERO);
        let mut sums = [S::splat(0.0); R];
        let (mut weights, mut a, mut fixes) = (panel.weights, left.a.cast::<f32>(), left.fixes);
        for b in 0..l.blocks() {
            let zero = match l.zero_point {
                ZeroPoint::Default => default,
                _ => zero_points::<S>(w, panel, b),
            };
            let mut acc = [S::splat(0.0); R];
            let mut odd = S::splat(0.0);
            for r in 0..R {
                acc[r] = S::mul(zero, S::splat(f32::from_bits(*fixes.add(r) as u32)));
            }
            for _ in 0..l.vectors() {
                let packed = S::load_i(weights);
                if R == 1 {
                    S::prefetch(weights.wrapping_add(AHEAD));
                }
                for j in 0..8 / C::BITS {
                    for i in 0..4 {
                        let w = C::to_f::<S>(S::shr(packed, (8 * i + C::BITS * j) as u32));
                        if R == 1 && i % 2 == 1 {
                            odd = S::fma(S::splat(*a.add(4 * j + i)), w, odd);
                        } else {
                            for r in 0..R {
                                acc[r] = S::fma(S::splat(*a.add((4 * j + i) * R + r)), w, acc[r]);
                            }
                        }
                    }
                }
                weights = weights.add(64);
                a = a.add(32 / C::BITS * R);
            }
            if R == 1 {
                acc[0] = S::add(acc[0], odd);
            }
            let scale = floats::<S>(l.scale, panel.scales, b);
            for r in 0..R {
                sums[r] = S::fma(acc[r], scale, sums[r]);
            }
            fixes = fixes.add(R);
        }
        for r in 0..R {
            S::store(out.add(r * LANES), sums[r]);
        }
    }
}

macro_rules! product {
    ($name:ident<$($bound:ident)+: $kind:ident>, $code:ident, $tile:ident, $bytes:expr) => {
        #[inline(always)]
        unsafe fn $name<S: Simd, $($bound)+: $kind>(part: &Part<'_>) {
            let l = &part.w.layout;
            for panel in part.panels.clone() {
                let at = Panel::of(&part.w, panel);
                for (row, size) in Groups::new(part.rows.clone(), S::ROWS) {
                    // SAFETY: the part's promises.
                    unsafe {
                        let left = Left {
                            a: part.left.a.add(row * l.padded_k() * $bytes),
                            scales: part.left.scales.wrapping_add(row * l.blocks()),
                            fixes: part.left.fixes.add(row * l.blocks()),
                        };
                        let mut tile = [0f32; MAX_GROUP * LANES];
                        let out = tile.as_mut_ptr();
                        $crate::with_rows!(S, size, R => $tile::<S, $code, R>(&part.w, at, &left, out));
                        for r in 0..size {
                            part.out.store::<S>(row + r, panel * LANES, S::load(out.add(r * LANES)));
                        }
                    }
                }
            }
        }
    };
}
product!(int8_bits<const BITS: usize>, BITS, tile_int8, 1);
product!(float_code<C: Code>, C, tile_f32, 4);

#[inline(always)]
unsafe fn int8<S: Simd>(part: &Part<'_>) {
    // SAFETY: the part's promises.
    unsafe {
        match part.w.layout.bits {
            2 => int8_bits::<S, 2>(part),
            4 => int8_bits::<S, 4>(part),
            _ => int8_bits::<S, 8>(part),
        }
    }
}

#[inline(always)]
unsafe fn float<S: Simd>(part: &Part<'_>) {
    // SAFETY: the part's promises.
    unsafe {
        match part.w.layout.bits {
            2 => float_code::<S, Int<2>>(part),
            4 => float_code::<S, Int<4>>(part),
            _ => float_code::<S, Int<8>>(part),
        }
    }
}

#[inline(always)]
unsafe fn e2m1<S: Simd>(part: &Part<'_>) {
    // SAFETY: the part's promises.
    unsafe { float_code::<S, E2m1>(part) }
}

crate::tiered! {
    /// The int8 kernel of a tier. Its caller promises that the pointers hold what [`Part`] says and that parts that
    /// run at once do not overlap in the output.
    pub fn int8_kernel(part: &Part<'_>) = int8;
}

crate::tiered! {
    /// The f32 kernel of a tier, under the same promises.
    pub fn f32_kernel(part: &Part<'_>) = float;
}

crate::tiered! {
    /// The f32 kernel of a tier for weights whose four bits are a float4e2m1, under the same promises.
    pub fn e2m1_kernel(part: &Part<'_>) = e2m1;
}

/// Panel `panel` of `w` as f32, for [`crate::cpu::dense`].
pub struct Decode<'a> {
    /// The weights.
    pub w: View<'a>,
    /// Which panel.
    pub panel: usize,
    /// Padded K vectors of 16.
    pub out: *mut f32,
}

#[inline(always)]
unsafe fn decode_code<S: Simd, C: Code>(to: &Decode<'_>) {
    let l = &to.w.layout;
    let panel = Panel::of(&to.w, to.panel);
    let (mut weights, mut out) = (panel.weights, to.out);
    for b in 0..l.blocks() {
        // SAFETY: the layout says how much the panel holds; `out` holds padded K vectors.
        unsafe {
            let scale = floats::<S>(l.scale, panel.scales, b);
            let zero = match l.zero_point {
                ZeroPoint::Default => S::splat(C::ZERO),
                _ => zero_points::<S>(&to.w, panel, b),
            };
            for _ in 0..l.vectors() {
                let packed = S::load_i(weights);
                for j in 0..8 / C::BITS {
                    for i in 0..4 {
                        let w = C::to_f::<S>(S::shr(packed, (8 * i + C::BITS * j) as u32));
                        S::store(out.add((4 * j + i) * LANES), S::mul(S::sub(w, zero), scale));
                    }
                }
                weights = weights.add(64);
                out = out.add(32 / C::BITS * LANES);
            }
        }
    }
}

#[inline(always)]
unsafe fn decode<S: Simd>(to: &Decode<'_>) {
    // SAFETY: the caller's promises.
    unsafe {
        match to.w.layout.bits {
            2 => decode_code::<S, Int<2>>(to),
            4 => decode_code::<S, Int<4>>(to),
            _ => decode_code::<S, Int<8>>(to),
        }
    }
}

#[inline(always)]
unsafe fn decode_e2m1<S: Simd>(to: &Decode<'_>) {
    // SAFETY: the caller's promises.
    unsafe { decode_code::<S, E2m1>(to) }
}

crate::tiered! {
    /// The panel decoder of a tier. Its caller promises that `out` holds padded K vectors.
    pub fn decoder(to: &Decode<'_>) = decode;
}

crate::tiered! {
    /// The same for float4e2m1.
    pub fn e2m1_decoder(to: &Decode<'_>) = decode_e2m1;
}
