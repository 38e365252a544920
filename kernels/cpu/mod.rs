//! What CPU kernels share: number formats, strided views, math, SIMD.

pub mod arithmetic;
pub mod attention;
pub mod convert;
pub mod float;
pub mod isa;
pub mod map;
pub mod math;
pub mod number;
pub mod rotary;
pub mod view;
pub mod simd;
