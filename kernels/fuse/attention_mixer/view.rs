//! Tensors as strided views of others.

use smallvec::SmallVec;

/// Lengths and strides in elements, outermost first.
pub(super) type Dims = SmallVec<[(usize, usize); 8]>;

/// Elements of a tensor in an order: that of `dims`, whatever shape they are said to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct View {
    /// Of the first element.
    pub offset: usize,
    dims: Dims,
    shape: SmallVec<[usize; 8]>,
}

impl View {
    /// All of a tensor.
    pub fn whole(shape: &[usize]) -> Self {
        let mut stride = 1;
        let mut dims: Dims = shape.iter().map(|&n| (n, 0)).collect();
        for (n, to) in dims.iter_mut().rev() {
            *to = stride;
            stride *= *n;
        }
        Self { offset: 0, dims, shape: shape.into() }
    }

    /// The same elements in another shape.
    pub fn reshaped(self, shape: &[usize]) -> Option<Self> {
        let same = shape.iter().product::<usize>() == self.shape.iter().product::<usize>();
        same.then(|| Self { shape: shape.into(), ..self })
    }

    /// The elements `start..start + len` along `axis`; `None` where strides cannot say that.
    pub fn piece(self, axis: usize, start: usize, len: usize) -> Option<Self> {
        let mut dims = self.strided(&self.shape)?;
        let (n, stride) = dims.get_mut(axis)?;
        if start + len > *n {
            return None;
        }
        let offset = self.offset + start * *stride;
        *n = len;
        let shape = dims.iter().map(|dim| dim.0).collect();
        Some(Self { offset, dims, shape })
    }

    /// Strides for this shape; `None` where there are none.
    pub fn strided(&self, shape: &[usize]) -> Option<Dims> {
        let all: usize = shape.iter().product();
        if all == 0 || all != self.dims.iter().map(|d| d.0).product::<usize>() {
            return None;
        }
        // Neighbours that walk on evenly are one.
        let mut runs = Dims::new();
        for &(n, stride) in self.dims.iter().filter(|d| d.0 != 1) {
            match runs.last_mut() {
                Some(last) if last.1 == n * stride => *last = (last.0 * n, stride),
                _ => runs.push((n, stride)),
            }
        }
        let mut dims: Dims = shape.iter().map(|&n| (n, 0)).collect();
        let mut run = (1, 0);
        for (n, to) in dims.iter_mut().rev().filter(|d| d.0 != 1) {
            if run.0 == 1 {
                run = runs.pop()?;
            }
            if run.0 % *n != 0 {
                return None;
            }
            *to = run.1;
            run = (run.0 / *n, run.1 * *n);
        }
        Some(dims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element's place, in order.
    fn places(offset: usize, dims: &Dims) -> Vec<usize> {
        dims.iter().fold(vec![offset], |places, &(n, stride)| {
            places.iter().flat_map(|&at| (0..n).map(move |i| at + i * stride)).collect()
        })
    }

    #[test]
    fn pieces_of_pieces_keep_their_places() {
        // [B, 1, K + N * 2 H] as [B, 1, N, 2 H], the second half of each head, then [B, N * H] and back.
        let all = View::whole(&[3, 1, 5 + 4 * 6]);
        let heads = all.clone().piece(2, 5, 24).and_then(|v| v.reshaped(&[3, 1, 4, 6])).expect("a view");
        let gate = heads.piece(3, 3, 3).and_then(|v| v.reshaped(&[3, 12])).expect("a view");
        let expected: Vec<_> =
            (0..3).flat_map(|b| (0..4).flat_map(move |n| (0..3).map(move |d| b * 29 + 5 + n * 6 + 3 + d))).collect();
        assert_eq!(gate.strided(&[3, 12]), None, "heads are not neighbours");
        assert_eq!(gate.clone().piece(1, 0, 3), None, "heads are not neighbours");
        assert_eq!(places(gate.offset, &gate.strided(&[3, 4, 1, 3]).expect("strides")), expected);
        assert_eq!(gate.strided(&[3, 4, 4]), None, "another number of elements");
        assert_eq!(gate.reshaped(&[3, 4, 4]), None, "another number of elements");
        assert_eq!(all.piece(2, 5, 25), None);
    }

    #[test]
    fn every_shape_of_a_whole_tensor() {
        for shape in [vec![2, 3, 4], vec![6, 1, 4], vec![24], vec![1, 4, 1, 6], vec![3, 8]] {
            let dims = View::whole(&[2, 12]).strided(&shape).expect("strides");
            assert_eq!(places(0, &dims), (0..24).collect::<Vec<_>>());
        }
    }
}
