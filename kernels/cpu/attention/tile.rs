//! The three inner loops of attention over one tile: scores, online softmax, weighted sum of values.

use super::simd::Simd;
use crate::settings::Tier;
use std::ops::Range;

/// Keys a tile holds.
pub(super) const KEYS: usize = 64;
/// Row lengths in tiles are multiples of this, so that no inner loop has a tail.
pub(super) const PAD: usize = 16;

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
}

/// What happens to one row's raw scores before softmax: bias and soft cap, over the visible keys.
pub(super) type Adjust<'a> = &'a dyn Fn(usize, &mut [f32]) -> Range<usize>;

/// Adds one tile of keys to the running sums. `adjust(row, scores)` changes the row's `keys` scores in place
/// and returns which of them are visible.
///
/// # Safety
/// The pointers of `tile` are valid for the sizes given there and the tier is available.
pub(super) unsafe fn run(tier: Tier, tile: &Tile, adjust: Adjust<'_>) {
    // SAFETY: the caller's promise; each arm runs on its own tier only.
    unsafe {
        match tier {
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Vnni => run_avx512(tile, adjust),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 => run_avx2(tile, adjust),
            _ => generic::<super::simd::Scalar>(tile, adjust),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
unsafe fn run_avx512(tile: &Tile, adjust: Adjust<'_>) {
    // SAFETY: the features are enabled here; pointers by the caller's promise.
    unsafe { generic::<super::simd::Avx512>(tile, adjust) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2(tile: &Tile, adjust: Adjust<'_>) {
    // SAFETY: the features are enabled here; pointers by the caller's promise.
    unsafe { generic::<super::simd::Avx2>(tile, adjust) }
}

#[inline(always)]
unsafe fn generic<S: Simd>(t: &Tile, adjust: Adjust<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        scores::<S>(t);
        for row in 0..t.rows {
            let scores = std::slice::from_raw_parts_mut(t.scores.add(row * KEYS), KEYS);
            let visible = adjust(row, &mut scores[..t.keys]);
            scores[..visible.start].fill(f32::NEG_INFINITY);
            scores[visible.end..].fill(f32::NEG_INFINITY);
            softmax_row::<S>(t, row);
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

/// `scores[r][c] = q[r] . k[c]`.
#[inline(always)]
unsafe fn scores<S: Simd>(t: &Tile) {
    // SAFETY: the caller's promise: rows and keys stay within the tile.
    unsafe {
        let mut row = 0;
        while row + 4 <= t.rows {
            score_rows::<S, 4>(t, row);
            row += 4;
        }
        while row < t.rows {
            score_rows::<S, 1>(t, row);
            row += 1;
        }
    }
}

#[inline(always)]
unsafe fn score_rows<S: Simd, const R: usize>(t: &Tile, row: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut key = 0;
        if S::SCORE_KEYS == 4 {
            while key + 4 <= t.keys {
                score_block::<S, R, 4>(t, row, key);
                key += 4;
            }
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
            h += S::LANES;
        }
        for (r, acc) in acc.iter().enumerate() {
            for (c, acc) in acc.iter().enumerate() {
                *t.scores.add((row + r) * KEYS + key + c) = S::sum(*acc);
            }
        }
    }
}

/// Turns a row of scores into weights relative to the new maximum, and rescales what was summed before.
#[inline(always)]
unsafe fn softmax_row<S: Simd>(t: &Tile, row: usize) {
    // SAFETY: the caller's promise; a row of scores has KEYS elements, all set.
    unsafe {
        let scores = t.scores.add(row * KEYS);
        let mut top = S::splat(f32::NEG_INFINITY);
        let mut i = 0;
        while i < KEYS {
            top = S::max(S::load(scores.add(i)), top);
            i += S::LANES;
        }
        let (old, new) = (*t.top.add(row), S::top(top));
        let new = if new > old { new } else { old };
        if new == f32::NEG_INFINITY {
            let scores = std::slice::from_raw_parts_mut(scores, KEYS);
            // The maximum passes over NaN; a row of nothing else must still show it.
            if scores.iter().any(|v| v.is_nan()) {
                *t.sum.add(row) = f32::NAN;
            }
            scores.fill(0.0);
            return;
        }
        let base = S::splat(new);
        let mut sum = S::splat(0.0);
        let mut i = 0;
        while i < KEYS {
            let weight = S::exp(S::sub(S::load(scores.add(i)), base));
            S::store(scores.add(i), weight);
            sum = S::add(sum, weight);
            i += S::LANES;
        }
        let sum = S::sum(sum);
        if old == new {
            *t.sum.add(row) += sum;
            return;
        }
        let shrink = (old - new).exp();
        *t.sum.add(row) = *t.sum.add(row) * shrink + sum;
        *t.top.add(row) = new;
        let (acc, shrink) = (t.acc.add(row * t.v_dim), S::splat(shrink));
        let mut h = 0;
        while h < t.v_dim {
            S::store(acc.add(h), S::mul(S::load(acc.add(h)), shrink));
            h += S::LANES;
        }
    }
}

/// `acc[r] += sum over keys of weight[r][key] * v[key]`.
#[inline(always)]
unsafe fn weigh<S: Simd, const R: usize>(t: &Tile, row: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut h = 0;
        while h + 4 * S::LANES <= t.v_dim {
            weigh_block::<S, R, 4>(t, row, h);
            h += 4 * S::LANES;
        }
        while h < t.v_dim {
            weigh_block::<S, R, 1>(t, row, h);
            h += S::LANES;
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
                *acc = S::load(t.acc.add((row + r) * t.v_dim + h + n * S::LANES));
            }
        }
        for key in 0..t.keys {
            let v = t.v.add(key * t.v_stride + h);
            let mut vv = [S::splat(0.0); N];
            for (n, vv) in vv.iter_mut().enumerate() {
                *vv = S::load(v.add(n * S::LANES));
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
                S::store(t.acc.add((row + r) * t.v_dim + h + n * S::LANES), *acc);
            }
        }
    }
}
