//! The one way kernels use threads: somebody else's pool.

/// A fork-join loop over a pool that the host owns.
pub trait ParallelFor: Sync {
    /// Calls `task(0)` to `task(total - 1)`, each once, on any threads, and returns when all are done.
    fn run(&self, total: usize, task: &(dyn Fn(usize) + Sync));
}

/// Runs every task on the calling thread.
pub struct Serial;

impl ParallelFor for Serial {
    fn run(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..total).for_each(task);
    }
}
