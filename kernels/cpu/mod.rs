//! What CPU kernels share: float formats, SIMD.

pub mod attention;
pub mod convert;
pub mod float;
pub mod isa;
pub mod math;
pub mod rotary;
