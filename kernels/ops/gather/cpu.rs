//! Kernels: indices are checked before anything is read through them.

use crate::cpu::map::{words, words_mut};
use crate::fact;
use crate::kernel::{Kernel, RunCx, Tensor};
use crate::op::NodeLabel;
use crate::ops::movement::COPY;
use crate::par::SharedMut;
use crate::with_word;
use abi::{DType, Error, Result};

/// Indices of int32 or int64.
#[derive(Clone, Copy)]
pub(crate) enum Indices<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl<'a> Indices<'a> {
    pub(crate) fn of(tensor: &Tensor<'a>) -> Self {
        match tensor.dtype() {
            DType::I32 => Self::I32(tensor.slice()),
            _ => Self::I64(tensor.slice()),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::I32(s) => s.len(),
            Self::I64(s) => s.len(),
        }
    }

    /// Index `i` as given.
    #[inline(always)]
    pub(crate) fn get(&self, i: usize) -> i64 {
        match self {
            Self::I32(s) => s[i].into(),
            Self::I64(s) => s[i],
        }
    }

    /// Index `i` of a dim in which [`Self::check`] has found all of them.
    #[inline(always)]
    pub(crate) fn wrapped(&self, i: usize, dim: usize) -> usize {
        let v = self.get(i);
        (if v < 0 { v + dim as i64 } else { v }) as usize
    }

    /// Errors unless all indices are of `-dim..dim`.
    pub(crate) fn check(&self, label: &NodeLabel, dim: usize) -> Result<()> {
        let range = -(dim as i64)..dim as i64;
        let bad = match self {
            Self::I32(s) => s.iter().map(|&v| v.into()).find(|v| !range.contains(v)),
            Self::I64(s) => s.iter().copied().find(|v| !range.contains(v)),
        };
        bad.map_or(Ok(()), |v| Err(out_of_range(label, v, dim)))
    }
}

/// The error for an index that a dim does not have.
pub(crate) fn out_of_range(label: &NodeLabel, index: i64, dim: usize) -> Error {
    label.error("input 1 (indices)", index, format_args!("-{dim} to {}", dim as i64 - 1))
}

/// Gather with its axis.
pub struct Gather(pub i64);

impl Kernel for Gather {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (data, by) = (cx.required(0), cx.required(1));
        let shape = data.shape();
        let axis = fact::axis(self.0, shape.len()).expect("infer has checked the axis");
        let indices = Indices::of(&by);
        indices.check(cx.label, shape[axis])?;
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        let (dim, count) = (shape[axis], by.len());
        let inner: usize = shape[axis + 1..].iter().product();
        with_word!(data.dtype(), W => {
            let data = words::<W>(&data);
            let out = words_mut::<W>(&mut out);
            let rows = out.len() / inner;
            let shared = SharedMut::new(out);
            let grain = COPY / (inner * size_of::<W>());
            cx.par.ranges(rows, grain, |range| {
                // SAFETY: the ranges of one loop do not overlap.
                let out = unsafe { shared.slice(range.start * inner..range.end * inner) };
                for (row, out) in range.zip(out.chunks_exact_mut(inner)) {
                    let from = (row / count * dim + indices.wrapped(row % count, dim)) * inner;
                    match out {
                        [out] => *out = data[from],
                        _ => out.copy_from_slice(&data[from..from + inner]),
                    }
                }
            });
        });
        Ok(())
    }
}

/// GatherElements with its axis.
pub struct GatherElements(pub i64);

impl Kernel for GatherElements {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (data, by) = (cx.required(0), cx.required(1));
        let shape = data.shape();
        let axis = fact::axis(self.0, shape.len()).expect("infer has checked the axis");
        let indices = Indices::of(&by);
        indices.check(cx.label, shape[axis])?;
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        with_word!(data.dtype(), W => {
            let data = words::<W>(&data);
            let out = words_mut::<W>(&mut out);
            let shared = SharedMut::new(out);
            cx.par.ranges(shared.len(), COPY / 8, |range| {
                // SAFETY: the ranges of one loop do not overlap.
                let out = unsafe { shared.slice(range.clone()) };
                for (i, out) in range.zip(out) {
                    *out = data[element(shape, by.shape(), axis, i, indices.wrapped(i, shape[axis]))];
                }
            });
        });
        Ok(())
    }
}

/// The offset in `shape` of position `i` of `by`'s walk, with `index` along `axis`.
pub(crate) fn element(shape: &[usize], by: &[usize], axis: usize, i: usize, index: usize) -> usize {
    let (mut rest, mut stride, mut offset) = (i, 1, 0);
    for (d, (&dim, &count)) in shape.iter().zip(by).enumerate().rev() {
        offset += stride * if d == axis { index } else { rest % count };
        rest /= count;
        stride *= dim;
    }
    offset
}

/// GatherND with its number of batch dims.
pub struct GatherNd(pub usize);

impl Kernel for GatherNd {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (data, by) = (cx.required(0), cx.required(1));
        let plan = NdPlan::new(data.shape(), by.shape(), self.0);
        let indices = by.slice::<i64>();
        plan.check(cx.label, indices)?;
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        with_word!(data.dtype(), W => {
            let data = words::<W>(&data);
            let inner = plan.inner;
            cx.par.chunks_mut(words_mut::<W>(&mut out), inner, |row, out| {
                let from = plan.offset(indices, row);
                out.copy_from_slice(&data[from..from + inner]);
            });
        });
        Ok(())
    }
}

/// How rows of indices address slices of a tensor, in GatherND and ScatterND.
pub(crate) struct NdPlan<'a> {
    /// The dims that an index tuple addresses.
    dims: &'a [usize],
    /// Elements of a slice.
    pub inner: usize,
    /// Index tuples.
    pub rows: usize,
    /// Index tuples in one batch.
    per_batch: usize,
    /// Elements in one batch.
    batch_len: usize,
}

impl<'a> NdPlan<'a> {
    pub(crate) fn new(shape: &'a [usize], by: &[usize], batch: usize) -> Self {
        let (&depth, lead) = by.split_last().expect("infer has checked the rank");
        Self {
            dims: &shape[batch..batch + depth],
            inner: shape[batch + depth..].iter().product(),
            rows: lead.iter().product(),
            per_batch: lead[batch..].iter().product(),
            batch_len: shape[batch..].iter().product(),
        }
    }

    /// Errors unless all indices are within their dims.
    pub(crate) fn check(&self, label: &NodeLabel, indices: &[i64]) -> Result<()> {
        for tuple in indices.chunks_exact(self.dims.len().max(1)) {
            for (&v, &dim) in tuple.iter().zip(self.dims) {
                if !(-(dim as i64)..dim as i64).contains(&v) {
                    return Err(out_of_range(label, v, dim));
                }
            }
        }
        Ok(())
    }

    /// The first element of the slice that tuple `row` addresses.
    pub(crate) fn offset(&self, indices: &[i64], row: usize) -> usize {
        let depth = self.dims.len();
        let tuple = &indices[row * depth..(row + 1) * depth];
        let within = tuple
            .iter()
            .zip(self.dims)
            .fold(0, |at, (&v, &dim)| at * dim + (if v < 0 { v + dim as i64 } else { v }) as usize);
        row / self.per_batch * self.batch_len + within * self.inner
    }
}
