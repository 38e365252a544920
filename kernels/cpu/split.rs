//! How a product is cut into tasks.

use crate::cpu::rows::max_group;
use crate::par::Par;
use crate::settings::Tier;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of left operand that a task keeps coming back to: well within a core's L2.
const ROWS_BYTES: usize = 1 << 19;
/// Least cost of a task, in bytes streamed or 16 multiply-adds: some 10 microseconds, several times what waking a thread costs.
const TASK_COST: usize = 1 << 16;

/// Most cost of a task: the threads end together, however large the matrix.
const MAX_TASK_COST: usize = 1 << 19;

/// A grid of tasks: chunks of rows times chunks of panels.
pub struct Split {
    m: usize,
    panels: usize,
    row_chunk: usize,
    panel_chunk: usize,
    workers: usize,
}

impl Split {
    /// Cuts `m` rows of `row_bytes` times `panels` panels of `panel_bytes` for `par`.
    pub fn new(
        par: &Par<'_>,
        tier: Tier,
        (m, row_bytes): (usize, usize),
        (panels, panel_bytes): (usize, usize),
    ) -> Self {
        let group = max_group(tier);
        let pieces = par.width() * 4;
        let whole = |rows: usize| rows.next_multiple_of(group).max(group);
        let mut row_chunk = whole(m.min(ROWS_BYTES / row_bytes.max(1)));
        if panels < pieces {
            // Too few panels for all threads: cut rows too.
            row_chunk = row_chunk.min(whole(m.div_ceil(pieces.div_ceil(panels.max(1)))));
        }
        let panel_cost = panel_bytes.max(row_chunk.min(m) * row_bytes / 2).max(1);
        let most = MAX_TASK_COST / panel_cost;
        let panel_chunk = panels.div_ceil(pieces).min(most).max(TASK_COST / panel_cost).max(1);
        Self { m, panels, row_chunk, panel_chunk, workers: par.width() }
    }

    /// Lets at most `workers` tasks run at once.
    pub fn with_workers(mut self, workers: usize) -> Self {
        self.workers = self.workers.min(workers);
        self
    }

    /// Calls `f(worker, rows, panels)` for every task; `worker` is below the number of workers and
    /// belongs to one thread at a time.
    pub fn run(&self, par: &Par<'_>, f: impl Fn(usize, Range<usize>, Range<usize>) + Sync) {
        let across = self.panels.div_ceil(self.panel_chunk);
        let tasks = across * self.m.div_ceil(self.row_chunk);
        let next = AtomicUsize::new(0);
        par.for_each(self.workers.min(tasks), |worker| {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    return;
                }
                let (row, panel) = (task / across * self.row_chunk, task % across * self.panel_chunk);
                let rows = row..(row + self.row_chunk).min(self.m);
                f(worker, rows, panel..(panel + self.panel_chunk).min(self.panels));
            }
        });
    }
}
