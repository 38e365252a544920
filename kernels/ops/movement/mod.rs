//! Ops that move elements without looking at them: Transpose, Expand, Tile, Slice, Concat, Split.

pub mod concat;
pub(crate) mod cuda;
pub mod slice;
pub mod split;
pub mod strided;

#[cfg(test)]
mod tests;

use crate::cpu::map::{words, words_mut};
use crate::cpu::view::View;
use crate::kernel::RunCx;
use crate::par::{Par, SharedMut};
use crate::with_word;
use abi::tensor::Element;

/// Bytes of copying that are worth a task.
pub(crate) const COPY: usize = 1 << 16;

/// Fills output 0 with input 0 read in `view`'s order.
pub(crate) fn gather_view(cx: &mut RunCx<'_>, view: &View) {
    let data = cx.required(0);
    let Some(mut out) = cx.output(0) else { return };
    if out.is_empty() {
        return;
    }
    with_word!(data.dtype(), W => {
        let (data, out) = (words::<W>(&data), words_mut::<W>(&mut out));
        match Strips::of(view) {
            Some(strips) => strips.copy(cx.par, data, out),
            None => copy_runs(cx.par, view, data, out),
        }
    });
}

fn copy_runs<W: Element>(par: Par<'_>, view: &View, data: &[W], out: &mut [W]) {
    let n = out.len();
    let shared = SharedMut::new(out);
    par.ranges(n, COPY / size_of::<W>(), |range| {
        // SAFETY: the ranges of one loop do not overlap.
        let out = unsafe { shared.slice(range.clone()) };
        view.gather(data, range, out);
    });
}

/// Output rows that are written side by side when a matrix is transposed: a cache line of input is then used whole.
const STRIP: usize = 16;

/// A view whose last two dims are a transposed matrix.
struct Strips {
    /// The dims before the matrix.
    outer: View,
    rows: usize,
    columns: usize,
    /// Elements of input from one column to the next; rows are neighbours.
    stride: usize,
}

impl Strips {
    fn of(view: &View) -> Option<Self> {
        let n = view.dims().len();
        let mut last = view.dims().skip(n.checked_sub(2)?);
        let ((rows, 1), (columns, stride)) = (last.next()?, last.next()?) else {
            return None;
        };
        Some(Self {
            outer: View::new(view.offset(), view.dims().take(n - 2)),
            rows,
            columns,
            stride: usize::try_from(stride).ok().filter(|&s| s > 1)?,
        })
    }

    fn copy<W: Element>(&self, par: Par<'_>, data: &[W], out: &mut [W]) {
        let per_matrix = self.rows.div_ceil(STRIP);
        let shared = SharedMut::new(out);
        let grain = (COPY / (STRIP * self.columns * size_of::<W>())).max(1);
        par.ranges(self.outer.len() * per_matrix, grain, |range| {
            for i in range {
                let (matrix, first) = (i / per_matrix, i % per_matrix * STRIP);
                let rows = (self.rows - first).min(STRIP);
                let mut base = 0;
                self.outer.runs(matrix..matrix + 1, |offset, _| base = offset + first);
                let start = (matrix * self.rows + first) * self.columns;
                // SAFETY: strips do not overlap, and each is written by one task.
                let out = unsafe { shared.slice(start..start + rows * self.columns) };
                for column in 0..self.columns {
                    let from = base + column * self.stride;
                    for (row, v) in data[from..from + rows].iter().enumerate() {
                        out[row * self.columns + column] = *v;
                    }
                }
            }
        });
    }
}

/// Rows of bytes that are copied from one buffer to another, evenly spaced in both.
pub(crate) struct Rows {
    /// Number of rows.
    pub count: usize,
    /// Bytes in a row.
    pub len: usize,
    /// First byte read, and bytes from one row to the next.
    pub from: (usize, usize),
    /// First byte written, and bytes from one row to the next, at least `len`.
    pub to: (usize, usize),
}

impl Rows {
    /// Copies them.
    pub fn copy(&self, par: Par<'_>, from: &[u8], to: &mut [u8]) {
        if self.len == 0 {
            return;
        }
        let pieces = self.len.div_ceil(COPY);
        let shared = SharedMut::new(to);
        let grain = (COPY / self.len.min(COPY)).max(1);
        par.ranges(self.count * pieces, grain, |range| {
            for i in range {
                let (row, start) = (i / pieces, i % pieces * COPY);
                let len = (self.len - start).min(COPY);
                let source = self.from.0 + row * self.from.1 + start;
                let target = self.to.0 + row * self.to.1 + start;
                // SAFETY: rows do not overlap, nor do the pieces of one.
                let target = unsafe { shared.slice(target..target + len) };
                target.copy_from_slice(&from[source..source + len]);
            }
        });
    }
}
