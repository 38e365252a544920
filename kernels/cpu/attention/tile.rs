//! The three inner loops of attention over one tile: scores, online softmax, weighted sum of values.

use crate::cpu::math;
use crate::cpu::simd::{LANES, Simd};
use crate::settings::Tier;
use std::ops::Range;

/// Keys a tile holds.
pub(super) const KEYS: usize = 64;
/// Row lengths in tiles are multiples of this, so that no inner loop has a tail.
pub(super) const PAD: usize = LANES;

/// One tile's operands; rows of `q` and `k` have `dim` elements, those of `v` and `acc` `v_dim`, both multiples of [`PAD`].
pub(super) struct Tile {
    pub q: *const f32,
    pub k: *const f32,
    pub k_stride: usize,
    pub v: *const f32,
    pub v_stride: usize,
    /// `[rows, KEYS]`.
    pub scores: *mut f32,
    /// `[rows, v_dim]`.
    pub acc: *mut f32,
    /// Greatest score seen, by row.
    pub top: *mut f32,
    /// Sum of exponentials relative to `top`, by row.
    pub sum: *mut f32,
    pub rows: usize,
    pub keys: usize,
    pub dim: usize,
    pub v_dim: usize,
    /// Bounds the scores when positive.
    pub softcap: f32,
}

/// Adds the bias to one row's scores, `adjust(row, scores)`, and says which of its keys are visible.
pub(super) type Adjust<'a> = &'a dyn Fn(usize, &mut [f32]) -> Range<usize>;

/// Adds one tile of keys to the running sums.
///
/// # Safety
/// The pointers of `tile` are valid for the sizes given there and the tier is available.
pub(super) unsafe fn run(tier: Tier, tile: &Tile, adjust: Adjust<'_>) {
    // SAFETY: the caller's promise.
    unsafe { instance(tier)(tile, adjust) }
}

crate::tiered! {
    fn instance(tile: &Tile, adjust: Adjust<'_>) = generic;
}

#[inline(always)]
unsafe fn generic<S: Simd>(t: &Tile, adjust: Adjust<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        scores::<S>(t);
        for row in 0..t.rows {
            let scores = &mut *t.scores.add(row * KEYS).cast::<[f32; KEYS]>();
            if t.softcap > 0.0 {
                for score in scores.iter_mut() {
                    *score = t.softcap * math::tanh(*score / t.softcap);
                }
            }
            let visible = adjust(row, &mut scores[..t.keys]);
            scores[..visible.start].fill(f32::NEG_INFINITY);
            scores[visible.end..].fill(f32::NEG_INFINITY);
            softmax_row::<S>(t, row, scores);
        }
        let mut row = 0;
        while row + 4 <= t.rows {
            weigh::<S, 4>(t, row);
            row += 4;
        }
        while row < t.rows {
            weigh::<S, 1>(t, row);
            row += 1;
        }
    }
}

/// Whether the tier has 32 registers of 16 lanes; the others have 16 of at most 8.
const fn wide<S: Simd>() -> bool {
    S::ROWS > 8
}

/// `scores[r][c] = q[r] . k[c]`.
#[inline(always)]
unsafe fn scores<S: Simd>(t: &Tile) {
    // SAFETY: the caller's promise: rows and keys stay within the tile.
    unsafe {
        let mut row = 0;
        while wide::<S>() && row + 4 <= t.rows {
            score_rows::<S, 4>(t, row);
            row += 4;
        }
        while row + 2 <= t.rows {
            score_rows::<S, 2>(t, row);
            row += 2;
        }
        if row < t.rows {
            score_rows::<S, 1>(t, row);
        }
    }
}

#[inline(always)]
unsafe fn score_rows<S: Simd, const R: usize>(t: &Tile, row: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut key = 0;
        while wide::<S>() && key + 4 <= t.keys {
            score_block::<S, R, 4>(t, row, key);
            key += 4;
        }
        while key + 2 <= t.keys {
            score_block::<S, R, 2>(t, row, key);
            key += 2;
        }
        if key < t.keys {
            score_block::<S, R, 1>(t, row, key);
        }
    }
}

#[inline(always)]
unsafe fn score_block<S: Simd, const R: usize, const C: usize>(t: &Tile, row: usize, key: usize) {
    // SAFETY: the caller's promise: R rows from `row` and C keys from `key` exist.
    unsafe {
        let q = t.q.add(row * t.dim);
        let k = t.k.add(key * t.k_stride);
        let mut acc = [[S::splat(0.0); C]; R];
        let mut h = 0;
        while h < t.dim {
            let mut kv = [S::splat(0.0); C];
            for (c, kv) in kv.iter_mut().enumerate() {
                *kv = S::load(k.add(c * t.k_stride + h));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let qv = S::load(q.add(r * t.dim + h));
                for (acc, kv) in acc.iter_mut().zip(kv) {
                    *acc = S::fma(qv, kv, *acc);
                }
            }
            h += LANES;
        }
        for (r, acc) in acc.iter().enumerate() {
            for (c, acc) in acc.iter().enumerate() {
                *t.scores.add((row + r) * KEYS + key + c) = S::reduce_add(*acc);
            }
        }
    }
}

/// Turns a row of scores into weights relative to the new maximum, and rescales what was summed before.
#[inline(always)]
unsafe fn softmax_row<S: Simd>(t: &Tile, row: usize, scores: &mut [f32; KEYS]) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut top = S::splat(f32::NEG_INFINITY);
        for i in (0..KEYS).step_by(LANES) {
            top = S::max(S::load(scores.as_ptr().add(i)), top);
        }
        let (old, new) = (*t.top.add(row), S::reduce_max(top));
        let new = if new > old { new } else { old };
        if new == f32::NEG_INFINITY {
            // The maximum passes over NaN; a row of nothing else must still show it.
            if scores.iter().any(|v| v.is_nan()) {
                *t.sum.add(row) = f32::NAN;
            }
            scores.fill(0.0);
            return;
        }
        let mut sums = [0f32; LANES];
        for chunk in scores.as_chunks_mut::<LANES>().0 {
            for (score, sum) in chunk.iter_mut().zip(&mut sums) {
                *score = math::exp(*score - new);
                *sum += *score;
            }
        }
        let sum: f32 = sums.iter().sum();
        if old == new {
            *t.sum.add(row) += sum;
            return;
        }
        let shrink = (old - new).exp();
        *t.sum.add(row) = *t.sum.add(row) * shrink + sum;
        *t.top.add(row) = new;
        let (acc, shrink) = (t.acc.add(row * t.v_dim), S::splat(shrink));
        for h in (0..t.v_dim).step_by(LANES) {
            S::store(acc.add(h), S::mul(S::load(acc.add(h)), shrink));
        }
    }
}

/// `acc[r] += sum over keys of weight[r][key] * v[key]`.
#[inline(always)]
unsafe fn weigh<S: Simd, const R: usize>(t: &Tile, row: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut h = 0;
        while wide::<S>() && h + 4 * LANES <= t.v_dim {
            weigh_block::<S, R, 4>(t, row, h);
            h += 4 * LANES;
        }
        while h < t.v_dim {
            weigh_block::<S, R, 1>(t, row, h);
            h += LANES;
        }
    }
}

#[inline(always)]
unsafe fn weigh_block<S: Simd, const R: usize, const N: usize>(t: &Tile, row: usize, h: usize) {
    // SAFETY: the caller's promise: R rows from `row`, N vectors from `h`.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; R];
        for (r, acc) in acc.iter_mut().enumerate() {
            for (n, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(t.acc.add((row + r) * t.v_dim + h + n * LANES));
            }
        }
        for key in 0..t.keys {
            let v = t.v.add(key * t.v_stride + h);
            let mut vv = [S::splat(0.0); N];
            for (n, vv) in vv.iter_mut().enumerate() {
                *vv = S::load(v.add(n * LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let weight = S::splat(*t.scores.add((row + r) * KEYS + key));
                for (acc, vv) in acc.iter_mut().zip(vv) {
                    *acc = S::fma(weight, vv, *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                S::store(t.acc.add((row + r) * t.v_dim + h + n * LANES), *acc);
            }
        }
    }
}
