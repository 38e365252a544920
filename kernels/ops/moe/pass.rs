//! One pass over some tokens, whose rows (one a token and choice) are sorted by expert.

use super::product::{Active, Group, Part};
use super::route::Plan;
use crate::cpu::nbits::Left;
use crate::cpu::rows::{Groups, max_group};
use crate::cpu::simd::LANES;
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows of an expert that one task lays out: a multiple of every tier's group.
pub(super) const CHUNK_ROWS: usize = 24;

/// Rows of an expert that are multiplied at once in FC2: a multiple of every tier's group.
pub(super) const TILE_ROWS: usize = 1008;

/// Panels of FC2 that are multiplied at once.
const TILE_PANELS: usize = 4;

/// Least cost of a task, in bytes of weights: as [`crate::cpu::split`] has it.
const TASK_BYTES: usize = 1 << 16;

/// Values that one thread lays out sooner than it wakes another.
const ALONE: usize = 1 << 15;

/// The rows of a pass and how they are shared out.
pub(super) struct Pass<'a> {
    pub par: Par<'a>,
    pub tier: Tier,
    pub workers: usize,
    pub plan: Plan<'a>,
    /// Experts that have rows.
    pub active: &'a [u32],
    /// Where chunks of rows begin, and the last one's end.
    pub chunks: &'a [u32],
    /// A piece for each worker.
    pub buffers: SharedMut<'a, f32>,
    pub buffer: usize,
}

/// A left operand.
pub(super) struct Lefts<'a> {
    pub a: &'a mut [u8],
    pub scales: &'a mut [f32],
    pub fixes: &'a mut [f32],
}

impl<'a> Plan<'a> {
    /// Writes which experts have rows, and where chunks of at most [`CHUNK_ROWS`] begin, the end included.
    pub fn list<'b>(&self, active: &'b mut [u32], chunks: &'b mut [u32]) -> (&'b [u32], &'b [u32]) {
        let (mut experts, mut count) = (0, 0);
        for e in (0..active.len()).filter(|&e| !self.of(e).is_empty()) {
            active[experts] = e as u32;
            experts += 1;
            for start in self.of(e).step_by(CHUNK_ROWS) {
                chunks[count] = start as u32;
                count += 1;
            }
        }
        chunks[count] = self.rows.len() as u32;
        (&active[..experts], &chunks[..=count])
    }
}

impl Pass<'_> {
    /// Columns of the tile of [`Self::sum`].
    pub const TILE_COLUMNS: usize = TILE_PANELS * LANES;

    /// Lays out what `w` reads; `row(at, values)` gives row `at` of the sorted rows.
    pub fn prepare(&self, w: &Active<'_>, row: impl Fn(usize, &mut [f32]) + Sync, out: &mut Lefts<'_>) {
        let (form, k) = (w.form, w.matrix.k);
        let (bytes, blocks) = (form.row_bytes(), form.blocks());
        let (a, scales, fixes) =
            (SharedMut::new(&mut *out.a), SharedMut::new(&mut *out.scales), SharedMut::new(&mut *out.fixes));
        let chunk = |i: usize, values: &mut [f32]| {
            let (first, end) = (self.chunks[i] as usize, self.chunks[i + 1] as usize);
            for (at, size) in Groups::new(0..end - first, max_group(self.tier)) {
                let rows = first + at..first + at + size;
                let part = |each: usize| rows.start * each..rows.end * each;
                // SAFETY: groups do not overlap, and each is visited by one task.
                let mut group = unsafe {
                    let (a, scales) = (a.slice(part(bytes)), scales.slice(part(blocks)));
                    Group { size, a, scales, fixes: fixes.slice(part(blocks)) }
                };
                for (r, at) in rows.clone().enumerate() {
                    row(at, &mut values[..k]);
                    form.put(self.tier, &values[..k], r, &mut group);
                }
                form.finish(&mut group);
            }
        };
        let count = self.chunks.len() - 1;
        if self.plan.rows.len() * k <= ALONE {
            // SAFETY: one thread.
            let values = unsafe { self.buffers.slice(0..self.buffer) };
            return (0..count).for_each(|i| chunk(i, values));
        }
        self.workers(count, |_, i, values| chunk(i, values));
    }

    /// The left operand of expert `e`.
    fn left(&self, w: &Active<'_>, from: &Lefts<'_>, e: usize) -> Left {
        let (start, blocks) = (self.plan.of(e).start, w.form.blocks());
        Left {
            a: from.a[start * w.form.row_bytes()..].as_ptr(),
            scales: from.scales[start * blocks..].as_ptr(),
            fixes: from.fixes[start * blocks..].as_ptr().cast(),
        }
    }

    /// A first projection of every row.
    pub fn project(&self, w: &Active<'_>, left: &Lefts<'_>, out: &mut [f32]) {
        let n = w.matrix.n;
        let out = SharedMut::new(out);
        let each = (TASK_BYTES / w.panel_bytes()).clamp(1, w.panels());
        let chunks = w.panels().div_ceil(each);
        self.workers(self.active.len() * chunks, |_, task, buffer| {
            let (expert, chunk) = (self.active[task / chunks] as usize, task % chunks);
            let rows = self.plan.of(expert);
            let part = Part {
                expert,
                left: self.left(w, left, expert),
                rows: 0..rows.len(),
                panels: chunk * each..((chunk + 1) * each).min(w.panels()),
                // SAFETY: the rows lie within the buffer.
                out: unsafe { out.start().add(rows.start * n) },
                stride: n,
                buffer,
            };
            // SAFETY: the rows were laid out; tasks write disjoint tiles.
            unsafe { w.multiply(part) };
        });
    }

    /// The second projection, each row weighed and added to its token's sum. A task owns panels of all tokens.
    pub fn sum(
        &self,
        w: &Active<'_>,
        left: &Lefts<'_>,
        (weights, top): (&[f32], usize),
        tiles: SharedMut<'_, f32>,
        sums: SharedMut<'_, f32>,
    ) {
        let (n, size) = (w.matrix.n, tiles.len() / self.workers);
        self.workers(w.panels().div_ceil(TILE_PANELS), |worker, task, buffer| {
            // SAFETY: a worker's piece is its own.
            let tile = unsafe { tiles.slice(worker * size..(worker + 1) * size) };
            let panels = task * TILE_PANELS..((task + 1) * TILE_PANELS).min(w.panels());
            let columns = panels.start * LANES..(panels.end * LANES).min(n);
            for &e in self.active {
                let expert = e as usize;
                let rows = self.plan.of(expert);
                for first in (0..rows.len()).step_by(TILE_ROWS) {
                    let part = first..(first + TILE_ROWS).min(rows.len());
                    // The product counts rows and columns from the matrix's first.
                    let out = tile.as_mut_ptr().wrapping_sub(first * Self::TILE_COLUMNS + columns.start);
                    let (left, stride) = (self.left(w, left, expert), Self::TILE_COLUMNS);
                    let (of, panels, buffer) = (part.clone(), panels.clone(), &mut *buffer);
                    // SAFETY: the rows were laid out; the tile holds these rows and columns.
                    unsafe { w.multiply(Part { expert, left, rows: of, panels, out, stride, buffer }) };
                    let pairs = &self.plan.rows[rows.start + part.start..rows.start + part.end];
                    for (pair, values) in pairs.iter().zip(tile.chunks_exact(Self::TILE_COLUMNS)) {
                        let (token, weight) = (*pair as usize / top, weights[*pair as usize]);
                        // SAFETY: the columns belong to this task.
                        let sums = unsafe { sums.slice(token * n + columns.start..token * n + columns.end) };
                        sums.iter_mut().zip(values).for_each(|(sum, v)| *sum += weight * v);
                    }
                }
            }
        });
    }

    /// Calls `f(worker, task, buffer)` for every task; a worker and its buffer belong to one thread at a time.
    fn workers(&self, n: usize, f: impl Fn(usize, usize, &mut [f32]) + Sync) {
        let next = AtomicUsize::new(0);
        self.par.for_each(self.workers.min(n), |worker| {
            // SAFETY: a worker's piece is its own.
            let buffer = unsafe { self.buffers.slice(worker * self.buffer..(worker + 1) * self.buffer) };
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= n {
                    return;
                }
                f(worker, task, buffer);
            }
        });
    }
}
