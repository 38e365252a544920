//! Loops over the host's threads.

use abi::ParallelFor;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The host's pool and the number of pieces worth cutting work into.
#[derive(Clone, Copy)]
pub struct Par<'a> {
    pool: &'a dyn ParallelFor,
    width: usize,
}

impl<'a> Par<'a> {
    /// `width`: how many tasks to start at most, about the number of threads.
    pub fn new(pool: &'a dyn ParallelFor, width: usize) -> Self {
        Self { pool, width: width.max(1) }
    }

    /// Everything on the calling thread.
    pub fn serial() -> Self {
        Self { pool: &abi::Serial, width: 1 }
    }

    /// About the number of threads.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Calls `f(i)` for every `i < n`, each once; workers claim indices from a shared counter, so uneven
    /// tasks balance.
    pub fn for_each(&self, n: usize, f: impl Fn(usize) + Sync) {
        let workers = self.width.min(n);
        if workers <= 1 {
            return (0..n).for_each(f);
        }
        let next = AtomicUsize::new(0);
        self.pool.run(workers, &|_| {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= n {
                    return;
                }
                f(i);
            }
        });
    }

    /// Calls `f` with ranges of at least `grain` items (but the last) that cover `0..n`.
    pub fn ranges(&self, n: usize, grain: usize, f: impl Fn(Range<usize>) + Sync) {
        // Four pieces a worker: enough to balance, few enough to be cheap.
        let step = n.div_ceil(self.width * 4).max(grain).max(1);
        if n <= step || self.width == 1 {
            if n > 0 {
                f(0..n);
            }
            return;
        }
        self.for_each(n.div_ceil(step), |i| f(i * step..((i + 1) * step).min(n)));
    }

    /// Cuts `data` into pieces of `chunk` elements and calls `f(piece index, piece)` on each.
    pub fn chunks_mut<T: Send>(&self, data: &mut [T], chunk: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        let shared = SharedMut::new(data);
        let n = shared.len().div_ceil(chunk.max(1));
        self.for_each(n, |i| {
            let range = i * chunk..((i + 1) * chunk).min(shared.len());
            // SAFETY: the ranges of different `i` do not overlap, and each `i` is visited once.
            f(i, unsafe { shared.slice(range) });
        });
    }
}

/// A mutable slice that several tasks write disjoint parts of.
#[derive(Clone, Copy)]
pub struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    lives: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `slice`, whose caller promises disjoint ranges.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Takes the slice over for the loop's duration.
    pub fn new(data: &'a mut [T]) -> Self {
        Self { ptr: data.as_mut_ptr(), len: data.len(), lives: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first element.
    pub fn start(&self) -> *mut T {
        self.ptr
    }

    /// A part of the slice. Panics when out of range.
    ///
    /// # Safety
    /// No two live borrows may overlap.
    #[allow(clippy::mut_from_ref)] // the point of the type; disjointness is the caller's promise
    pub unsafe fn slice(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} is not within 0..{}", self.len);
        // SAFETY: in bounds (checked), unique by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }
}
