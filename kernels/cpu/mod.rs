//! What CPU kernels share: number formats, strided views, math, SIMD.
//! What CPU kernels share: float formats, SIMD, matrix products.

pub mod arithmetic;
pub mod attention;
pub mod convert;
pub mod dense;
pub mod e4m3;
pub mod float;
pub mod isa;
pub mod map;
pub mod math;
pub mod nbits;
pub mod number;
pub mod rotary;
pub mod rows;
pub mod simd;
pub mod sink;
pub mod split;
pub mod view;
pub mod wide;
