//! Panels of float8e4m3fn: for each k, the values of 16 columns side by side.

use crate::cpu::simd::{LANES, Simd};

/// A panel to be decoded to f32, for [`crate::cpu::dense`].
pub struct Decode<'a> {
    /// 16 K bytes.
    pub panel: &'a [u8],
    /// Values of k that share a scale.
    pub block: usize,
    /// 16 scales for each block of k, the last of which may be partial.
    pub scales: &'a [f32],
    /// K vectors of 16.
    pub out: &'a mut [f32],
}

#[inline(always)]
unsafe fn decode<S: Simd>(to: &mut Decode<'_>) {
    let blocks = to.panel.chunks(to.block * LANES).zip(to.out.chunks_mut(to.block * LANES));
    for ((from, out), scale) in blocks.zip(to.scales.chunks_exact(LANES)) {
        // SAFETY: all pieces are of 16.
        let scale = unsafe { S::load(scale.as_ptr()) };
        for (from, out) in from.chunks_exact(LANES).zip(out.chunks_exact_mut(LANES)) {
            // SAFETY: as above.
            unsafe { S::store(out.as_mut_ptr(), S::mul(S::load_e4m3(from.as_ptr()), scale)) };
        }
    }
}

crate::tiered! {
    /// The decoder of a tier, which the processor must have.
    pub fn decoder(to: &mut Decode<'_>) = decode;
}
