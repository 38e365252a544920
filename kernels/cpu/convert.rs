//! Conversions of whole tensors, spread over the threads.

use super::float::Float;
use crate::kernel::{Carver, Tensor};
use crate::par::{Par, SharedMut};

/// Elements below which a conversion is not worth another thread.
const GRAIN: usize = 16 * 1024;

/// Bytes of scratch that [`widened`] takes for `len` elements of a type that is f32 or not.
pub fn widened_bytes(is_f32: bool, len: usize) -> usize {
    if is_f32 { 0 } else { Carver::size::<f32>(len) }
}

/// `from` as f32: itself, or widened into scratch.
pub fn widened<'a, T: Float>(par: Par<'_>, from: Tensor<'a>, carver: &mut Carver<'a>) -> &'a [f32] {
    let from = from.slice::<T>();
    if let Some(same) = T::as_f32s(from) {
        return same;
    }
    let to = carver.take::<f32>(from.len());
    let shared = SharedMut::new(&mut *to);
    par.ranges(from.len(), GRAIN, |range| {
        // SAFETY: `ranges` gives disjoint ranges.
        T::widen(&from[range.clone()], unsafe { shared.slice(range) });
    });
    to
}

/// Rounds `from` to `to`; lengths must agree.
pub fn narrowed<T: Float>(par: Par<'_>, from: &[f32], to: &mut [T]) {
    let shared = SharedMut::new(to);
    par.ranges(from.len(), GRAIN, |range| {
        // SAFETY: `ranges` gives disjoint ranges.
        T::narrow(&from[range.clone()], unsafe { shared.slice(range) });
    });
}
