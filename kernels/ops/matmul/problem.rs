//! A product's dims and strides, from its attributes and the run's shapes.

use crate::cuda::{BATCH_RANK, Batch};

/// Most dims an operand may have.
pub const MAX_RANK: usize = 16;

/// What the attributes say: `alpha * op(A) op(B) + beta * C`.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    /// A's last two dims are swapped.
    pub trans_a: bool,
    /// B's last two dims are swapped.
    pub trans_b: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of C.
    pub beta: f32,
}

/// Where the elements of a matrix lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// Elements from one row to the next.
    pub row: usize,
    /// Elements from one column to the next.
    pub column: usize,
}

/// One run: `batch` products of M x K and K x N.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a> {
    pub batch: usize,
    pub m: usize,
    pub k: usize,
    pub n: usize,
    pub a: Strides,
    pub b: Strides,
    batch_a: &'a [usize],
    batch_b: &'a [usize],
    batch_out: &'a [usize],
}

/// Rows, columns and strides of an operand's last two dims.
fn matrix(shape: &[usize], trans: bool, is_a: bool) -> (usize, usize, Strides) {
    let (rows, columns) = match *shape {
        [k] if is_a => (1, k),
        [k] => (k, 1),
        [.., rows, columns] => (rows, columns),
        [] => (1, 1),
    };
    if trans && shape.len() > 1 {
        let strides = Strides { row: 1, column: columns };
        (columns, rows, strides)
    } else {
        let strides = Strides { row: columns, column: 1 };
        (rows, columns, strides)
    }
}

impl<'a> Problem<'a> {
    /// From shapes that `infer` has checked.
    pub fn new(spec: &Spec, a: &'a [usize], b: &'a [usize], out: &'a [usize]) -> Self {
        let lead = |shape: &'a [usize]| &shape[..shape.len().saturating_sub(2)];
        let matrix_dims = usize::from(a.len() > 1) + usize::from(b.len() > 1);
        let (m, k, a_strides) = matrix(a, spec.trans_a, true);
        let (_, n, b_strides) = matrix(b, spec.trans_b, false);
        let batch_out = &out[..out.len().saturating_sub(matrix_dims)];
        let mut problem = Self {
            batch: batch_out.iter().product(),
            m,
            k,
            n,
            a: a_strides,
            b: b_strides,
            batch_a: lead(a),
            batch_b: lead(b),
            batch_out,
        };
        // One matrix B for all of A's: they are one tall matrix.
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        if !spec.trans_a && count(problem.batch_b) == 1 && count(problem.batch_a) == problem.batch {
            problem.m *= problem.batch;
            problem.batch = 1;
        }
        problem
    }

    /// Which of A's and B's matrices product `i` takes.
    pub fn operands(&self, i: usize) -> (usize, usize) {
        (broadcast_index(self.batch_a, self.batch_out, i), broadcast_index(self.batch_b, self.batch_out, i))
    }

    /// The same for a CUDA kernel; `None` when the dims do not fold into as many as it takes.
    pub fn cuda_batch(&self) -> Option<Batch> {
        let mut batch = Batch { x_matrix: (self.m * self.k) as u64, ..Batch::ONE };
        if self.batch == 1 {
            return Some(batch);
        }
        let (mut x_stride, mut w_stride) = (1, 1);
        // Outermost last.
        let mut folded: Vec<[usize; 3]> = Vec::new();
        for (back, &size) in self.batch_out.iter().rev().enumerate() {
            let step = |dims: &[usize], stride: &mut usize| {
                let dim = dims.len().checked_sub(back + 1).map_or(1, |axis| dims[axis]);
                let step = if dim == 1 { 0 } else { *stride };
                *stride *= dim;
                step
            };
            let (x, w) = (step(self.batch_a, &mut x_stride), step(self.batch_b, &mut w_stride));
            match folded.last_mut() {
                _ if size == 1 => {}
                Some([inner, inner_x, inner_w]) if x == *inner * *inner_x && w == *inner * *inner_w => *inner *= size,
                _ => folded.push([size, x, w]),
            }
        }
        batch.rank = folded.len() as u32;
        for (i, [size, x, w]) in folded.into_iter().rev().enumerate() {
            *batch.dims.get_mut(i)? = size as u32;
            (batch.x[i], batch.w[i]) = (x as u32, w as u32);
        }
        (batch.rank as usize <= BATCH_RANK).then_some(batch)
    }
}

/// The index into an array of `dims` that element `i` of an array of `out` dims broadcasts from.
fn broadcast_index(dims: &[usize], out: &[usize], mut i: usize) -> usize {
    let (mut index, mut stride) = (0, 1);
    for (back, size) in out.iter().rev().enumerate() {
        let at = i % size;
        i /= size;
        let Some(axis) = dims.len().checked_sub(back + 1) else {
            break;
        };
        if dims[axis] != 1 {
            index += at * stride;
        }
        stride *= dims[axis];
    }
    index
}
