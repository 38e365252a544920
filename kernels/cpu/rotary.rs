//! Rotary position embedding of one head's row: the rotation that RotaryEmbedding, MRotaryEmbedding and
//! GroupQueryAttention share.

use crate::cpu::float::Float;

/// Which elements of a row form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// `(i, i + n / 2)`: the halves of the rotated part.
    Halves,
    /// `(2 i, 2 i + 1)`.
    Interleaved,
}

impl Pairs {
    /// From the attribute `interleaved`.
    pub fn from_attribute(interleaved: i64) -> Self {
        if interleaved == 0 { Self::Halves } else { Self::Interleaved }
    }
}

/// Rotates the first `2 * cos.len()` elements of `row` in place: `(a, b)` becomes `(a cos - b sin, a sin + b cos)`.
/// `sin` is as long as `cos`.
pub fn rotate<T: Float>(row: &mut [f32], cos: &[T], sin: &[T], pairs: Pairs) {
    let angles = cos.iter().zip(sin).map(|(c, s)| (c.to_f32(), s.to_f32()));
    match pairs {
        Pairs::Halves => {
            let (low, high) = row[..2 * cos.len()].split_at_mut(cos.len());
            for ((a, b), (c, s)) in low.iter_mut().zip(high).zip(angles) {
                (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
            }
        }
        Pairs::Interleaved => {
            for (pair, (c, s)) in row[..2 * cos.len()].chunks_exact_mut(2).zip(angles) {
                (pair[0], pair[1]) = (pair[0] * c - pair[1] * s, pair[0] * s + pair[1] * c);
            }
        }
    }
}
