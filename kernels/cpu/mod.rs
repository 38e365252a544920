//! What CPU kernels share: float formats, SIMD.

pub mod float;
