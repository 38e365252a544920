//! The left operand: rows gathered into groups that share one pass over the right operand.
//!
//! M rows are cut into groups of as many rows as a tile has (see [`Groups`]); a group of R rows stores, for each k,
//! its R values side by side, so that a kernel reads it through one pointer. A group that begins at row r begins at
//! element `r * K`.

use crate::cpu::float::Float;
use crate::cpu::simd::{LANES, Simd};
use crate::par::SharedMut;
use crate::quant::nbits::ZeroPoint;
use crate::settings::Tier;
use abi::DType;
use half::{bf16, f16};
use std::ops::Range;

/// Row groups `(first row, rows)` that cover a range; the range must begin at a multiple of `max`.
#[derive(Clone)]
pub struct Groups {
    row: usize,
    end: usize,
    max: usize,
}

impl Groups {
    /// Groups of at most `max` rows: 12, 4 or 1.
    pub fn new(rows: Range<usize>, max: usize) -> Self {
        Self { row: rows.start, end: rows.end, max }
    }
}

impl Iterator for Groups {
    type Item = (usize, usize);

    #[inline(always)]
    fn next(&mut self) -> Option<(usize, usize)> {
        let (row, left) = (self.row, self.end - self.row);
        let size = match left {
            0 => return None,
            _ if left >= self.max => self.max,
            4.. => 4.min(self.max),
            2.. if self.max >= 12 => 2,
            _ => 1,
        };
        self.row += size;
        Some((row, size))
    }
}

/// Rows of any tier's largest group.
pub const MAX_GROUP: usize = 12;

/// Rows of a tier's largest group.
pub fn max_group(tier: Tier) -> usize {
    match tier {
        Tier::Scalar => 1,
        Tier::Avx2 => 4,
        Tier::Avx512Vnni => 12,
    }
}

/// Runs `$body` with the constant `$R` naming a group's size.
#[macro_export]
macro_rules! with_rows {
    ($S:ident, $rows:expr, $R:ident => $body:expr) => {
        match $rows {
            12 if $S::ROWS >= 12 => {
                const $R: usize = 12;
                $body
            }
            4 if $S::ROWS >= 4 => {
                const $R: usize = 4;
                $body
            }
            2 if $S::ROWS >= 12 => {
                const $R: usize = 2;
                $body
            }
            _ => {
                const $R: usize = 1;
                $body
            }
        }
    };
}

/// A left operand as it lies in memory.
#[derive(Clone, Copy)]
pub struct Strided<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// Elements from one row to the next.
    pub row: usize,
    /// Elements from one column to the next.
    pub column: usize,
}

/// Gathers rows of `a` (K columns) into f32 groups, padded with zeros to `padded_k` values a row. `out` starts at row 0.
///
/// # Safety
/// Nobody else touches the groups' memory.
pub unsafe fn gather<T: Float>(
    a: Strided<'_, T>,
    (k, padded_k): (usize, usize),
    groups: Groups,
    out: SharedMut<'_, f32>,
) {
    for (row, size) in groups.take_while(|_| padded_k > 0) {
        // SAFETY: the caller's promise.
        let out = unsafe { out.slice(row * padded_k..(row + size) * padded_k) };
        for r in 0..size {
            let from = &a.data[(row + r) * a.row..];
            if size == 1 && a.column == 1 {
                T::widen(&from[..k], &mut out[..k]);
            } else {
                for (i, out) in out[r..].iter_mut().step_by(size).take(k).enumerate() {
                    *out = from[i * a.column].to_f32();
                }
            }
        }
        out[k * size..].fill(0.0);
    }
}

/// Minus the sum of each row of a group's block, rows side by side.
pub fn negative_sums(block: &[f32], out: &mut [f32]) {
    if let [out] = out {
        // Sixteen partial sums: one alone would wait for itself.
        let mut lanes = [0f32; LANES];
        for chunk in block.chunks_exact(LANES) {
            lanes.iter_mut().zip(chunk).for_each(|(lane, v)| *lane += v);
        }
        *out = -lanes.iter().sum::<f32>();
        return;
    }
    out.fill(0.0);
    for k in block.chunks_exact(out.len()) {
        out.iter_mut().zip(k).for_each(|(out, v)| *out -= v);
    }
}

/// Where one row's quantised form goes within its group.
pub struct QuantRow {
    /// K values.
    pub a: *const u8,
    /// Their type: float, float16 or bfloat16.
    pub dtype: DType,
    /// K.
    pub k: usize,
    /// Values a block.
    pub block: usize,
    /// The group's quantised bytes, at this row's first word.
    pub q: *mut i8,
    /// The group's scales, at this row's first.
    pub scales: *mut f32,
    /// The group's corrections, at this row's first.
    pub fixes: *mut i32,
    /// Rows in the group.
    pub rows: usize,
    /// What a correction is for.
    pub zero_point: ZeroPoint,
    /// The default zero point.
    pub default_zero: i32,
}

/// Reads a part of a row from element `at` on.
#[inline(always)]
unsafe fn widen<S: Simd>(row: &QuantRow, at: usize, out: &mut [f32]) {
    // SAFETY: the row holds these elements; vectors are read whole only where they lie in `out`.
    unsafe {
        if row.dtype == DType::F32 {
            let from = row.a.cast::<f32>().add(at);
            return std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len());
        }
        let from = row.a.cast::<u16>().add(at);
        let whole = out.len() / LANES * LANES;
        for i in (0..whole).step_by(LANES) {
            let v = match row.dtype {
                DType::F16 => S::load_f16(from.add(i)),
                _ => S::load_bf16(from.add(i)),
            };
            S::store(out.as_mut_ptr().add(i), v);
        }
        for (i, out) in out.iter_mut().enumerate().skip(whole) {
            *out = match row.dtype {
                DType::F16 => f16::from_bits(*from.add(i)).to_f32(),
                _ => bf16::from_bits(*from.add(i)).to_f32(),
            };
        }
    }
}

/// Quantises a row to int8 block by block: `scale = max |a| / 127`, `q = round(a / scale)`, as ORT's accuracy level 4.
///
/// A correction carries `-sum(q)` in the form that the product kernel folds in: times the default zero point, or, for
/// other zero points, as an f32.
#[inline(always)]
unsafe fn quantize<S: Simd>(row: &QuantRow) {
    let padded = row.k.next_multiple_of(row.block);
    for b in 0..padded / row.block {
        let at = b * row.block;
        let mut values = [0f32; 256];
        let used = row.block.min(row.k - at);
        // SAFETY: `a` holds K values; the group's memory holds padded K bytes a row, interleaved.
        unsafe {
            widen::<S>(row, at, &mut values[..used]);
            let mut top = S::splat(0.0);
            for i in (0..row.block).step_by(LANES) {
                top = S::max(top, S::abs(S::load(values.as_ptr().add(i))));
            }
            let top = S::reduce_max(top);
            let scale = top / 127.0;
            // ORT's own order of operations: values halfway between two steps then round as its do.
            let inverse = S::splat(if top > 0.0 { 127.0 / top } else { 0.0 });
            let mut sum = S::splat_i(0);
            for i in (0..row.block).step_by(LANES) {
                let q = S::round(S::mul(S::load(values.as_ptr().add(i)), inverse));
                sum = S::add_i(sum, q);
                let mut bytes = [0i8; LANES];
                S::store_i8(bytes.as_mut_ptr(), q);
                for w in 0..4 {
                    let word = bytes.as_ptr().add(4 * w).cast::<u32>().read_unaligned();
                    let to = row.q.cast::<u32>().add(((at + i) / 4 + w) * row.rows);
                    to.write_unaligned(word);
                }
            }
            // What no i8 holds (NaN, infinities, subnormal blocks) rounds to anything, but must not trap.
            let negative = S::reduce_add_i(sum).wrapping_neg();
            row.scales.add(b * row.rows).write(scale);
            row.fixes.add(b * row.rows).write(match row.zero_point {
                ZeroPoint::Default => negative.wrapping_mul(row.default_zero),
                ZeroPoint::Bytes | ZeroPoint::Float => (negative as f32).to_bits() as i32,
            });
        }
    }
}

crate::tiered! {
    /// The quantiser of a tier.
    pub fn quantizer(row: &QuantRow) = quantize;
}
