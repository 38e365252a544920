//! The float formats that kernels compute in, by way of f32.

use abi::tensor::Element;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// f32, f16 or bf16.
pub trait Float: Element {
    /// Widens; exact.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(v: f32) -> Self;
    /// Widens a slice; lengths must agree.
    fn widen(from: &[Self], to: &mut [f32]);
    /// Rounds a slice; lengths must agree.
    fn narrow(from: &[f32], to: &mut [Self]);
    /// The slice itself when `Self` is f32: saves a copy.
    fn as_f32s(slice: &[Self]) -> Option<&[f32]>;
}

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(v: f32) -> Self {
        v
    }
    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
    fn as_f32s(slice: &[Self]) -> Option<&[f32]> {
        Some(slice)
    }
}

macro_rules! half_float {
    ($t:ty) => {
        impl Float for $t {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                <$t>::to_f32(self)
            }
            #[inline(always)]
            fn from_f32(v: f32) -> Self {
                <$t>::from_f32(v)
            }
            fn widen(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }
            fn narrow(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }
            fn as_f32s(_: &[Self]) -> Option<&[f32]> {
                None
            }
        }
    };
}
half_float!(f16);
half_float!(bf16);

/// Runs `$body` with `$T` naming the Rust type of a `DType` that the claim limited to f32, f16 and bf16.
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ::abi::DType::F32 => {
                type $T = f32;
                $body
            }
            ::abi::DType::F16 => {
                type $T = ::half::f16;
                $body
            }
            ::abi::DType::BF16 => {
                type $T = ::half::bf16;
                $body
            }
            other => unreachable!("the claim admits only float, float16 and bfloat16, not {other}"),
        }
    };
}
