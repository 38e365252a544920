//! What CPU kernels share: float formats, SIMD.

pub mod attention;
pub mod float;
pub mod rotary;
