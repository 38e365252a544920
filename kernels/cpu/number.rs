//! Every number format that ONNX ops of the standard domain hold, and the type each is computed in.

use crate::cpu::float::Float;
use abi::tensor::Element;
use abi::{DType, HostTensor};
use half::{bf16, f16};

/// An ONNX `bool`: one byte, 0 or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bool(pub u8);

impl Bool {
    /// Whether it is true.
    #[inline(always)]
    pub fn is_true(self) -> bool {
        self.0 != 0
    }
}

impl From<bool> for Bool {
    #[inline(always)]
    fn from(v: bool) -> Self {
        Self(v as u8)
    }
}

// SAFETY: one byte, any pattern is valid (0 is false, the rest is true).
unsafe impl Element for Bool {
    const DTYPE: DType = DType::Bool;
}

/// A stored number and the type `C` that it is computed in: f32 for the half floats, itself otherwise.
pub trait Stored: Element + Default {
    /// The type of the computation.
    type C: Stored<C = Self::C>;
    /// Whether loops over `Self` are compiled for every SIMD tier; the rest run as portable code.
    const SIMD: bool = false;
    /// To the type of the computation; exact.
    fn load(self) -> Self::C;
    /// From the type of the computation; rounds to nearest even.
    fn store(c: Self::C) -> Self;
    /// [`Self::load`] of a slice; lengths must agree.
    fn load_slice(from: &[Self], to: &mut [Self::C]);
    /// [`Self::store`] of a slice; lengths must agree.
    fn store_slice(from: &[Self::C], to: &mut [Self]);
    /// The slice itself when `Self` is `C`: saves a copy.
    fn as_computed(slice: &[Self]) -> Option<&[Self::C]>;
    /// As [`Self::as_computed`], writable.
    fn as_computed_mut(slice: &mut [Self]) -> Option<&mut [Self::C]>;
}

macro_rules! stored_as_itself {
    ($($t:ty)*, $simd:literal) => {$(
        impl Stored for $t {
            type C = $t;
            const SIMD: bool = $simd;
            #[inline(always)]
            fn load(self) -> Self {
                self
            }
            #[inline(always)]
            fn store(c: Self) -> Self {
                c
            }
            fn load_slice(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
            fn store_slice(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn as_computed(slice: &[Self]) -> Option<&[Self]> {
                Some(slice)
            }
            #[inline(always)]
            fn as_computed_mut(slice: &mut [Self]) -> Option<&mut [Self]> {
                Some(slice)
            }
        }
    )*};
}
stored_as_itself!(f32, true);
stored_as_itself!(f64 i8 u8 i16 u16 i32 u32 i64 u64 Bool, false);

macro_rules! stored_as_f32 {
    ($($t:ty)*) => {$(
        impl Stored for $t {
            type C = f32;
            #[inline(always)]
            fn load(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn store(c: f32) -> Self {
                <$t>::from_f32(c)
            }
            fn load_slice(from: &[Self], to: &mut [f32]) {
                Float::widen(from, to);
            }
            fn store_slice(from: &[f32], to: &mut [Self]) {
                Float::narrow(from, to);
            }
            #[inline(always)]
            fn as_computed(_: &[Self]) -> Option<&[f32]> {
                None
            }
            #[inline(always)]
            fn as_computed_mut(_: &mut [Self]) -> Option<&mut [f32]> {
                None
            }
        }
    )*};
}
stored_as_f32!(f16 bf16);

/// The float formats.
pub const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16, DType::F64];

/// The integer formats of whole bytes.
pub const INTS: &[DType] =
    &[DType::I64, DType::I32, DType::U8, DType::I8, DType::U16, DType::I16, DType::U32, DType::U64];

/// Every number format that is computed with.
pub const NUMBERS: &[DType] = &[
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::F64,
    DType::I64,
    DType::I32,
    DType::U8,
    DType::I8,
    DType::U16,
    DType::I16,
    DType::U32,
    DType::U64,
];

/// [`NUMBERS`] and bool.
pub const ANY: &[DType] = &[
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::F64,
    DType::I64,
    DType::I32,
    DType::U8,
    DType::I8,
    DType::U16,
    DType::I16,
    DType::U32,
    DType::U64,
    DType::Bool,
];

/// Every type of whole bytes whose elements can be moved about.
pub const MOVABLE: &[DType] = &[
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::F64,
    DType::I64,
    DType::I32,
    DType::U8,
    DType::I8,
    DType::U16,
    DType::I16,
    DType::U32,
    DType::U64,
    DType::Bool,
    DType::F8E4M3FN,
    DType::F8E4M3FNUZ,
    DType::F8E5M2,
    DType::F8E5M2FNUZ,
    DType::F8E8M0,
    DType::C64,
];

/// Runs `$body` with `$T` naming the Rust type of a `DType` of [`NUMBERS`]; `$other` for the rest.
#[macro_export]
macro_rules! with_number {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::with_number!(@match $dtype, $T => $body,
            F32 f32, F64 f64, F16 ::half::f16, BF16 ::half::bf16, I8 i8, U8 u8, I16 i16, U16 u16, I32 i32,
            U32 u32, I64 i64, U64 u64)
    };
    (@match $dtype:expr, $T:ident => $body:expr, $($d:ident $t:ty),*) => {
        match $dtype {
            $(::abi::DType::$d => {
                type $T = $t;
                $body
            })*
            other => unreachable!("the claim admits only numbers, not {other}"),
        }
    };
}

/// [`with_number!`] and bool.
#[macro_export]
macro_rules! with_any {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::with_number!(@match $dtype, $T => $body,
            F32 f32, F64 f64, F16 ::half::f16, BF16 ::half::bf16, I8 i8, U8 u8, I16 i16, U16 u16, I32 i32,
            U32 u32, I64 i64, U64 u64, Bool $crate::cpu::number::Bool)
    };
}

/// [`with_number!`] for float, double and the half floats.
#[macro_export]
macro_rules! with_real {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::with_number!(@match $dtype, $T => $body,
            F32 f32, F64 f64, F16 ::half::f16, BF16 ::half::bf16)
    };
}

/// [`with_number!`] for the integers.
#[macro_export]
macro_rules! with_integer {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::with_number!(@match $dtype, $T => $body,
            I8 i8, U8 u8, I16 i16, U16 u16, I32 i32, U32 u32, I64 i64, U64 u64)
    };
}

/// The numbers of a host tensor as f64; `None` for types that are not in [`ANY`].
pub fn to_f64s(tensor: &HostTensor) -> Option<Vec<f64>> {
    fn all<T: Element>(tensor: &HostTensor, f: impl Fn(T) -> f64) -> Option<Vec<f64>> {
        Some(tensor.as_slice::<T>()?.iter().map(|&v| f(v)).collect())
    }
    match tensor.dtype() {
        DType::F32 => all::<f32>(tensor, f64::from),
        DType::F64 => all::<f64>(tensor, |v| v),
        DType::F16 => all::<f16>(tensor, f64::from),
        DType::BF16 => all::<bf16>(tensor, f64::from),
        DType::I8 => all::<i8>(tensor, f64::from),
        DType::U8 => all::<u8>(tensor, f64::from),
        DType::I16 => all::<i16>(tensor, f64::from),
        DType::U16 => all::<u16>(tensor, f64::from),
        DType::I32 => all::<i32>(tensor, f64::from),
        DType::U32 => all::<u32>(tensor, f64::from),
        DType::I64 => all::<i64>(tensor, |v| v as f64),
        DType::U64 => all::<u64>(tensor, |v| v as f64),
        DType::Bool => all::<Bool>(tensor, |v| f64::from(v.is_true() as u8)),
        _ => None,
    }
}
