//! Where recurrent states lie in memory.

use super::recurrence::{At, State};
use crate::cpu::float::Float;
use abi::DType;

/// States [sequence, head, D, E] of any float format, as LinearAttention has them.
pub struct KMajor<S> {
    /// Past states; `None`: zeros.
    pub from: Option<*const S>,
    /// Present states, perhaps the past ones' own buffer; `None`: nobody reads them.
    pub to: Option<*mut S>,
    /// Heads of a sequence.
    pub heads: usize,
    /// D.
    pub dk: usize,
    /// E.
    pub dv: usize,
}

// SAFETY: tasks read and write distinct heads or columns.
unsafe impl<S> Sync for KMajor<S> {}

impl<S> KMajor<S> {
    fn head(&self, at: &At) -> usize {
        (at.sequence * self.heads + at.head) * self.dk * self.dv
    }
}

impl<S: Float> State for KMajor<S> {
    fn load(&self, at: &At, block: &mut [f32], width: usize) {
        let Some(from) = self.from else {
            return block.fill(0.0);
        };
        let columns = at.columns.len();
        for (i, row) in block.chunks_exact_mut(width).enumerate() {
            let start = self.head(at) + i * self.dv + at.columns.start;
            // SAFETY: in the past state, whose shape `infer` has checked; nobody else writes these columns.
            let from = unsafe { std::slice::from_raw_parts(from.add(start), columns) };
            S::widen(from, &mut row[..columns]);
            row[columns..].fill(0.0);
        }
    }

    fn store(&self, at: &At, block: &[f32], width: usize) {
        let Some(to) = self.to else { return };
        let columns = at.columns.len();
        for (i, row) in block.chunks_exact(width).enumerate() {
            let start = self.head(at) + i * self.dv + at.columns.start;
            // SAFETY: as in `load`; nobody else reads or writes these columns.
            let to = unsafe { std::slice::from_raw_parts_mut(to.add(start), columns) };
            S::narrow(&row[..columns], to);
        }
    }

    fn direct(&self, at: &At) -> Option<(*const f32, *mut f32)> {
        if S::DTYPE != DType::F32 {
            return None;
        }
        let (from, to, head) = (self.from?, self.to?, self.head(at));
        // SAFETY: within the states, as in `load`.
        unsafe { Some((from.add(head).cast(), to.add(head).cast())) }
    }
    fn transposed(&self, _: &At) -> Option<(*const f32, *mut f32)> {
        None
    }
}

/// States [sequence, head, E, D] of f32, as GatedDeltaNet has them.
pub struct VMajor {
    /// Initial states; `None`: zeros.
    pub from: Option<*const f32>,
    /// Final states, perhaps the initial ones' own buffer; `None`: nobody reads them.
    pub to: Option<*mut f32>,
    /// Heads of a sequence.
    pub heads: usize,
    /// D.
    pub dk: usize,
    /// E.
    pub dv: usize,
}

// SAFETY: tasks read and write distinct heads or columns.
unsafe impl Sync for VMajor {}

impl VMajor {
    fn head(&self, at: &At) -> usize {
        (at.sequence * self.heads + at.head) * self.dk * self.dv
    }
}

impl State for VMajor {
    fn load(&self, at: &At, block: &mut [f32], width: usize) {
        let Some(from) = self.from else {
            return block.fill(0.0);
        };
        for (j, column) in at.columns.clone().enumerate() {
            let start = self.head(at) + column * self.dk;
            // SAFETY: in the initial state, whose shape `infer` has checked; nobody else writes these columns.
            let from = unsafe { std::slice::from_raw_parts(from.add(start), self.dk) };
            for (row, from) in block.chunks_exact_mut(width).zip(from) {
                row[j] = *from;
            }
        }
        for row in block.chunks_exact_mut(width) {
            row[at.columns.len()..].fill(0.0);
        }
    }

    fn store(&self, at: &At, block: &[f32], width: usize) {
        let Some(to) = self.to else { return };
        for (j, column) in at.columns.clone().enumerate() {
            let start = self.head(at) + column * self.dk;
            // SAFETY: as in `load`; nobody else reads or writes these columns.
            let to = unsafe { std::slice::from_raw_parts_mut(to.add(start), self.dk) };
            for (to, row) in to.iter_mut().zip(block.chunks_exact(width)) {
                *to = row[j];
            }
        }
    }

    fn direct(&self, _: &At) -> Option<(*const f32, *mut f32)> {
        None
    }

    fn transposed(&self, at: &At) -> Option<(*const f32, *mut f32)> {
        let (from, to, head) = (self.from?, self.to?, self.head(at));
        // SAFETY: within the states, as in `load`.
        unsafe { Some((from.add(head), to.add(head))) }
    }
}
