//! Strided views: how broadcasting, transposing, slicing and tiling read a tensor.

use std::ops::Range;

/// The highest rank of a tensor that the strided ops take.
pub const MAX_RANK: usize = 16;

/// Tile reads every dim twice (repeats, then the dim itself).
const MAX_DIMS: usize = 2 * MAX_RANK;

/// An order in which to read a buffer: a row-major walk over `dims` with a stride (in elements) each. Dims of 1
/// are dropped and neighbours that walk on evenly are merged, so that runs are as long as they can be.
#[derive(Clone)]
pub struct View {
    offset: isize,
    rank: usize,
    dims: [usize; MAX_DIMS],
    strides: [isize; MAX_DIMS],
    len: usize,
}

impl View {
    /// Starts at element `offset`; `dims` are (length, stride), outermost first. At most `2 * MAX_RANK` of them.
    pub fn new(offset: isize, dims: impl IntoIterator<Item = (usize, isize)>) -> Self {
        let mut view = Self { offset, rank: 0, dims: [1; MAX_DIMS], strides: [0; MAX_DIMS], len: 1 };
        for (dim, stride) in dims {
            // Only a tensor without elements can have dims whose product overflows.
            view.len = view.len.wrapping_mul(dim);
            if dim == 1 {
                continue;
            }
            if view.rank > 0 && view.strides[view.rank - 1] == (dim as isize).wrapping_mul(stride) {
                view.dims[view.rank - 1] = view.dims[view.rank - 1].wrapping_mul(dim);
                view.strides[view.rank - 1] = stride;
                continue;
            }
            view.dims[view.rank] = dim;
            view.strides[view.rank] = stride;
            view.rank += 1;
        }
        // A single element is a run of one.
        view.rank = view.rank.max(1);
        view
    }

    /// Reads a tensor of `shape` as if it had `out`'s shape, to which it broadcasts.
    pub fn broadcast(shape: &[usize], out: &[usize]) -> Self {
        let strides = Strides::of(shape);
        let lead = out.len() - shape.len();
        Self::new(
            0,
            out.iter().enumerate().map(|(i, &dim)| {
                let stride = match i.checked_sub(lead) {
                    Some(j) if shape[j] != 1 => strides.get(j),
                    _ => 0,
                };
                (dim, stride)
            }),
        )
    }

    /// Number of elements read.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is read.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether one element is read all the time.
    pub fn is_scalar(&self) -> bool {
        self.rank == 1 && self.strides[0] == 0
    }

    /// Length and stride of the innermost run.
    pub fn inner(&self) -> (usize, isize) {
        (self.dims[self.rank - 1], self.strides[self.rank - 1])
    }

    /// The merged dims (length, stride), outermost first.
    pub fn dims(&self) -> impl DoubleEndedIterator<Item = (usize, isize)> + ExactSizeIterator + '_ {
        (0..self.rank).map(|i| (self.dims[i], self.strides[i]))
    }

    /// The first element.
    pub fn offset(&self) -> isize {
        self.offset
    }

    /// Calls `f(offset, length)` for the runs that make up elements `range` of the walk, in order. Elements of
    /// a run are [`Self::inner`]'s stride apart.
    #[inline]
    pub fn runs(&self, range: Range<usize>, mut f: impl FnMut(usize, usize)) {
        if range.is_empty() {
            return;
        }
        let last = self.rank - 1;
        let (inner, stride) = (self.dims[last], self.strides[last]);
        let mut left = range.len();
        let mut at = [0usize; MAX_DIMS];
        let mut rest = range.start / inner;
        let mut within = range.start % inner;
        let mut offset = self.offset;
        for i in (0..last).rev() {
            at[i] = rest % self.dims[i];
            rest /= self.dims[i];
            offset += at[i] as isize * self.strides[i];
        }
        loop {
            let len = (inner - within).min(left);
            f((offset + within as isize * stride) as usize, len);
            left -= len;
            if left == 0 {
                return;
            }
            within = 0;
            for i in (0..last).rev() {
                at[i] += 1;
                offset += self.strides[i];
                if at[i] < self.dims[i] {
                    break;
                }
                offset -= at[i] as isize * self.strides[i];
                at[i] = 0;
            }
        }
    }

    /// Where elements `range` start, when they are neighbours in the buffer.
    #[inline]
    pub fn contiguous(&self, range: &Range<usize>) -> Option<usize> {
        let (inner, stride) = self.inner();
        if stride != 1 || range.is_empty() || range.start / inner != (range.end - 1) / inner {
            return None;
        }
        let mut start = 0;
        self.runs(range.start..range.start + 1, |offset, _| start = offset);
        Some(start)
    }

    /// Copies elements `range` of the walk over `data` to `out`.
    pub fn gather<T: Copy>(&self, data: &[T], range: Range<usize>, out: &mut [T]) {
        let (_, stride) = self.inner();
        let mut done = 0;
        self.runs(range, |offset, len| {
            let to = &mut out[done..done + len];
            done += len;
            match stride {
                1 => to.copy_from_slice(&data[offset..offset + len]),
                0 => to.fill(data[offset]),
                _ => {
                    let mut from = offset as isize;
                    for v in to {
                        *v = data[from as usize];
                        from += stride;
                    }
                }
            }
        });
    }
}

/// Row-major strides of a shape.
pub struct Strides {
    strides: [isize; MAX_RANK],
}

impl Strides {
    /// Of a shape of at most [`MAX_RANK`] dims.
    pub fn of(shape: &[usize]) -> Self {
        let mut strides = [0; MAX_RANK];
        let mut step = 1isize;
        for (i, &dim) in shape.iter().enumerate().rev() {
            strides[i] = step;
            step = step.saturating_mul(dim as isize);
        }
        Self { strides }
    }

    /// The stride of dim `i`.
    pub fn get(&self, i: usize) -> isize {
        self.strides[i]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn merges_what_walks_on_evenly() {
        let view = View::broadcast(&[2, 3, 4], &[2, 3, 4]);
        assert_eq!(view.inner(), (24, 1));
        let view = View::broadcast(&[4], &[2, 3, 4]);
        assert_eq!(view.dims().collect::<Vec<_>>(), [(6, 0), (4, 1)]);
        assert!(View::broadcast(&[1, 1], &[5, 7]).is_scalar());
        assert!(View::broadcast(&[], &[]).is_scalar());
        assert_eq!(View::broadcast(&[2, 0], &[2, 0]).len(), 0);
    }

    proptest! {
        #[test]
        fn gathers_any_range(dims in prop::collection::vec((1usize..4, -3isize..4), 0..5), cut in 0usize..200, len in 0usize..200) {
            let low: isize = dims.iter().map(|&(d, s)| (d as isize - 1) * s.min(0)).sum();
            let high: isize = dims.iter().map(|&(d, s)| (d as isize - 1) * s.max(0)).sum();
            let data: Vec<i32> = (0..(high - low + 1) as i32).collect();
            let view = View::new(-low, dims.iter().copied());
            let mut expected = vec![-low];
            for &(d, s) in &dims {
                expected = expected.iter().flat_map(|&o| (0..d as isize).map(move |i| o + i * s)).collect();
            }
            let start = cut.min(expected.len());
            let end = (start + len).min(expected.len());
            let mut out = vec![0; end - start];
            view.gather(&data, start..end, &mut out);
            let expected: Vec<i32> = expected[start..end].iter().map(|&o| o as i32).collect();
            prop_assert_eq!(out, expected);
        }
    }
}
