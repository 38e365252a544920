//! Strided walks as kernel parameters.

use super::{Device, Field, linear};
use crate::fact::Fact;
use crate::op::{Decline, NodeCx};
use abi::cuda::LaunchShape;
use smallvec::SmallVec;

/// The highest rank of a tensor that strided device kernels take.
pub const MAX_RANK: usize = 8;

/// Declines inputs of more than [`MAX_RANK`] dims.
pub fn claim_rank(cx: &NodeCx) -> Result<(), Decline> {
    for slot in 0..cx.inputs_len() {
        let rank = cx.input(slot).and_then(Fact::rank).unwrap_or(0);
        if rank > MAX_RANK {
            let expected = format!("at most {MAX_RANK} on CUDA devices");
            return Err(cx.decline(format_args!("input {slot}"), format_args!("rank {rank}"), expected));
        }
    }
    Ok(())
}

/// Threads of a block of the kernels that [`spread`] launches.
pub const THREADS: usize = 256;

/// A launch whose threads, with loops around them, cover `units` units: no more blocks than keep the device busy.
pub fn spread(device: &Device, units: usize) -> LaunchShape {
    let most = device.multiprocessors() as usize * 32;
    linear(units.div_ceil(THREADS).min(most), THREADS as u32)
}

/// The order in which `K` operands are walked, each with a stride a dim: `Walk` of `walk.cuh`. Dims of 1 are dropped,
/// and neighbours that all operands walk on evenly are merged.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Walk<const K: usize, const D: usize = MAX_RANK> {
    dims: [u64; D],
    strides: [[i64; D]; K],
    rank: u32,
    pad: u32,
}

// SAFETY: 64-bit numbers, then two of 32 bits: no padding.
unsafe impl<const K: usize, const D: usize> Field for Walk<K, D> {}

impl<const K: usize, const D: usize> Walk<K, D> {
    /// `dims` are lengths with a stride for each operand, outermost first; `None` when more than `D` are left.
    pub fn new(dims: impl IntoIterator<Item = (usize, [isize; K])>) -> Option<Self> {
        let mut merged: SmallVec<[(usize, [isize; K]); 16]> = SmallVec::new();
        for (dim, strides) in dims {
            if dim == 1 {
                continue;
            }
            let on_evenly = |last: &[isize; K]| (0..K).all(|k| last[k] == (dim as isize).wrapping_mul(strides[k]));
            match merged.last_mut() {
                Some(last) if on_evenly(&last.1) => *last = (last.0.wrapping_mul(dim), strides),
                _ => merged.push((dim, strides)),
            }
        }
        if merged.is_empty() {
            merged.push((1, [0; K]));
        }
        let mut walk = Self { dims: [1; D], strides: [[0; D]; K], rank: merged.len() as u32, pad: 0 };
        if merged.len() > D {
            return None;
        }
        for (d, (dim, strides)) in merged.into_iter().enumerate() {
            walk.dims[d] = dim as u64;
            for (of, stride) in walk.strides.iter_mut().zip(strides) {
                of[d] = stride as i64;
            }
        }
        Some(walk)
    }

    /// Operands of these shapes that broadcast to `out`.
    pub fn broadcast(shapes: [&[usize]; K], out: &[usize]) -> Option<Self> {
        let strides = shapes.map(|shape| broadcast_strides(shape, out.len()));
        Self::new(out.iter().enumerate().map(|(d, &dim)| (dim, std::array::from_fn(|k| strides[k][d]))))
    }

    /// Length and strides of the innermost dim.
    pub fn inner(&self) -> (usize, [isize; K]) {
        let last = self.rank as usize - 1;
        (self.dims[last] as usize, self.strides.map(|s| s[last] as isize))
    }

    /// The dims that are left.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Whether every dim's step is a multiple of `n` elements.
    pub fn has_multiples(&self, n: usize) -> bool {
        self.strides.iter().all(|s| s[..self.rank()].iter().all(|s| s % n as i64 == 0))
    }

    /// Whether `n` neighbours in the walk are always one element, or an aligned group, of each operand.
    pub fn has_vectors(&self, n: usize) -> bool {
        let (inner, strides) = self.inner();
        let outer = self.rank() - 1;
        let even = |k: usize| self.strides[k][..outer].iter().all(|s| s % n as i64 == 0);
        strides.iter().all(|s| (0..=1).contains(s))
            && (outer == 0 || (inner.is_multiple_of(n) && (0..K).all(|k| strides[k] == 0 || even(k))))
    }
}

/// Row-major strides of `shape` seen as a shape of `rank` dims that it broadcasts to.
pub fn broadcast_strides(shape: &[usize], rank: usize) -> SmallVec<[isize; 16]> {
    let mut strides = SmallVec::from_elem(0, rank);
    let lead = rank - shape.len();
    let mut stride = 1isize;
    for (d, &dim) in shape.iter().enumerate().rev() {
        strides[lead + d] = if dim == 1 { 0 } else { stride };
        stride = stride.wrapping_mul(dim as isize);
    }
    strides
}

/// Row-major strides of `shape`.
pub fn row_major(shape: &[usize]) -> SmallVec<[isize; 16]> {
    let mut strides = SmallVec::from_elem(1, shape.len());
    for d in (1..shape.len()).rev() {
        strides[d - 1] = isize::wrapping_mul(strides[d], shape[d] as isize);
    }
    strides
}

/// The most bytes, 16 at most and a power of two, that all of `amounts` (in bytes) are multiples of.
pub fn word(amounts: impl IntoIterator<Item = usize>) -> usize {
    amounts.into_iter().fold(16, |word, amount| if amount == 0 { word } else { word.min(1 << amount.trailing_zeros()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The offsets of every element, as `locate` of `walk.cuh` finds them.
    fn offsets<const K: usize>(walk: &Walk<K>, n: usize) -> Vec<[isize; K]> {
        let at = |mut i: usize| {
            let mut at = [0; K];
            for d in (0..walk.rank()).rev() {
                let (dim, q) = (walk.dims[d] as usize, if d == 0 { 0 } else { i / walk.dims[d] as usize });
                let r = if d == 0 { i } else { i % dim };
                (0..K).for_each(|k| at[k] += r as isize * walk.strides[k][d] as isize);
                i = q;
            }
            at
        };
        (0..n).map(at).collect()
    }

    proptest! {
        #[test]
        fn a_walk_visits_what_the_dims_say(dims in proptest::collection::vec((1usize..4, 0isize..5, -3isize..3), 0..6)) {
            let walk = Walk::<2>::new(dims.iter().map(|&(d, a, b)| (d, [a, b]))).unwrap();
            let mut expected = vec![[0, 0]];
            for &(d, a, b) in &dims {
                expected = expected.iter().flat_map(|&[x, y]| (0..d as isize).map(move |i| [x + i * a, y + i * b])).collect();
            }
            prop_assert_eq!(offsets(&walk, expected.len()), expected);
        }
    }

    #[test]
    fn broadcasting_merges_what_it_can() {
        let walk = Walk::<2>::broadcast([&[2, 3, 8], &[8]], &[2, 3, 8]).unwrap();
        assert_eq!((walk.rank(), walk.inner()), (2, (8, [1, 1])));
        assert!(walk.has_vectors(8) && !walk.has_vectors(16));
        let walk = Walk::<2>::broadcast([&[2, 3, 8], &[]], &[2, 3, 8]).unwrap();
        assert_eq!((walk.rank(), walk.inner()), (1, (48, [1, 0])));
        assert!(walk.has_vectors(16));
        let walk = Walk::<2>::broadcast([&[2, 3, 8], &[3, 1]], &[2, 3, 8]).unwrap();
        assert_eq!((walk.rank(), walk.inner()), (3, (8, [1, 0])));
        assert!(walk.has_vectors(8));
        assert!(Walk::<1, 2>::new([(2, [7]), (2, [5]), (2, [1])]).is_none());
    }

    #[test]
    fn words_divide_everything() {
        assert_eq!(word([64, 0, 48]), 16);
        assert_eq!(word([64, 24]), 8);
        assert_eq!(word([7]), 1);
    }
}
