//! Ops that move elements without looking at them: Transpose, Expand, Tile, Slice, Concat, Split.

pub mod concat;
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
        let data = words::<W>(&data);
        let out = words_mut::<W>(&mut out);
        let n = out.len();
        let shared = SharedMut::new(out);
        cx.par.ranges(n, COPY / size_of::<W>(), |range| {
            // SAFETY: the ranges of one loop do not overlap.
            let out = unsafe { shared.slice(range.clone()) };
            view.gather(data, range, out);
        });
    });
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
