//! The cache that holds only the window (`sliding_window_cache`): which rows stay.

use crate::cpu::float::Float;

/// A cache of `capacity` rows that must hold the last `window` positions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    pub capacity: usize,
    pub window: usize,
}

impl Window {
    /// Rows held after `tokens` tokens: the schema's L(T). Eviction frees `capacity - window + 1` rows at once.
    pub fn resident(&self, tokens: usize) -> usize {
        if tokens <= self.capacity {
            return tokens;
        }
        let step = self.capacity - self.window + 1;
        tokens - step * (tokens - self.capacity).div_ceil(step)
    }

    /// Copies the rows that stay from `staged` (`[heads, rows, head]`) to the front of each head of `out`, zeros behind.
    /// `filled(i)`: rows that head `i` of `staged` holds, and its tokens.
    pub fn keep<T: Float>(
        &self,
        staged: &[T],
        rows: usize,
        out: &mut [T],
        head: usize,
        filled: impl Fn(usize) -> (usize, usize),
    ) {
        let chunk = self.capacity * head;
        if chunk == 0 {
            return;
        }
        for (i, to) in out.chunks_exact_mut(chunk).enumerate() {
            let (filled, tokens) = filled(i);
            // A ragged first prompt has padding rows behind its tokens.
            let end = filled.min(tokens);
            let keep = self.resident(tokens).min(end);
            let from = &staged[(i * rows + end - keep) * head..][..keep * head];
            to[..keep * head].copy_from_slice(from);
            to[keep * head..].fill(T::from_f32(0.0));
        }
    }
}
