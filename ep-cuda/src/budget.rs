//! How much device memory may be used.

use crate::counters::{Counter, add, subtract};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts a device's memory in use by this library, and keeps it under the limits of the live sessions.
#[derive(Debug, Default)]
pub struct Budget {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    used: usize,
    /// A limit a session.
    limits: Vec<usize>,
}

/// A session's limit, in force as long as this lives.
#[derive(Debug)]
pub struct Limit {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Budget {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts `bytes` more, if no limit forbids it.
    pub fn take(&self, bytes: usize) -> bool {
        let mut state = self.state();
        let limit = state.limits.iter().min().copied().unwrap_or(usize::MAX);
        match state.used.checked_add(bytes) {
            Some(used) if used <= limit => {
                state.used = used;
                add(Counter::BytesInUse, bytes as u64);
                true
            }
            _ => false,
        }
    }

    /// Counts `bytes` less.
    pub fn give(&self, bytes: usize) {
        let mut state = self.state();
        state.used = state.used.checked_sub(bytes).expect("no more is given back than was taken");
        subtract(Counter::BytesInUse, bytes as u64);
    }

    /// Bytes counted.
    pub fn used(&self) -> usize {
        self.state().used
    }

    /// The lowest limit.
    pub fn limit(&self) -> Option<usize> {
        self.state().limits.iter().min().copied()
    }

    /// Adds a limit; 0 is none.
    pub fn limited(self: &Arc<Self>, bytes: usize) -> Option<Limit> {
        (bytes > 0).then(|| {
            self.state().limits.push(bytes);
            Limit { budget: self.clone(), bytes }
        })
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        let mut state = self.budget.state();
        if let Some(i) = state.limits.iter().position(|&limit| limit == self.bytes) {
            state.limits.swap_remove(i);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_the_live_ones_counts() {
        let budget = Arc::new(Budget::default());
        assert!(budget.take(100));
        let high = budget.limited(1000);
        let low = budget.limited(150);
        assert!(budget.limited(0).is_none());
        assert!(!budget.take(51) && budget.take(50));
        drop(low);
        assert_eq!(budget.limit(), Some(1000));
        assert!(budget.take(850) && !budget.take(1) && !budget.take(usize::MAX));
        drop(high);
        assert!(budget.take(1));
        budget.give(1001);
        assert_eq!((budget.used(), budget.limit()), (0, None));
    }
}
