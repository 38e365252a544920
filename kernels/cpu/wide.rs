//! The three types that hold every number: f64, i64 and u64. Work that is not worth a loop for every type reads and
//! writes through them, block by block.

use crate::cpu::arithmetic::Number;
use crate::cpu::map::{BLOCK, Task, vectorize};
use crate::cpu::number::{Bool, Stored};
use crate::settings::Tier;
use crate::with_any;
use abi::DType;
use abi::tensor::Element;

/// f64, i64 or u64.
pub trait Wide: Number {
    /// How to read and write tensors of a type of [`crate::cpu::number::ANY`].
    fn access(dtype: DType) -> (Load<Self>, Store<Self>);
}

macro_rules! wide {
    ($($wide:ident)*) => {$(
        impl Wide for $wide {
            fn access(dtype: DType) -> (Load<Self>, Store<Self>) {
                with_any!(dtype, T => (load::<T, Self>, store::<T, Self>))
            }
        }
    )*};
}
wide!(f64 i64 u64);

/// Runs `$body` with `$W` naming the wide type that holds a `DType` of [`crate::cpu::number::ANY`] exactly.
#[macro_export]
macro_rules! with_wide {
    ($dtype:expr, $W:ident => $body:expr) => {
        match $dtype {
            ::abi::DType::I8 | ::abi::DType::I16 | ::abi::DType::I32 | ::abi::DType::I64 => {
                type $W = i64;
                $body
            }
            ::abi::DType::U8 | ::abi::DType::U16 | ::abi::DType::U32 | ::abi::DType::U64 | ::abi::DType::Bool => {
                type $W = u64;
                $body
            }
            _ => {
                type $W = f64;
                $body
            }
        }
    };
}

/// To a wide type: exact for the one that [`with_wide!`](crate::with_wide) chooses.
pub trait Widen<W>: Copy {
    /// Converts one number.
    fn widen(self) -> W;
}

/// From a wide type. Floats round to nearest even; integers keep the low bits, and a float that does not fit becomes
/// what x86's conversions (and so ORT on it) make of it: the lowest i32 or i64, of which narrower types keep the low bits.
pub trait Narrow<W>: Copy {
    /// Converts one number.
    fn narrow(wide: W) -> Self;
}

macro_rules! widen_as {
    ($($t:ident)*) => {$(
        widen_as!(@to $t: f64 i64 u64);
    )*};
    (@to $t:ident: $($wide:ident)*) => {$(
        impl Widen<$wide> for $t {
            #[inline(always)]
            fn widen(self) -> $wide {
                self as $wide
            }
        }
    )*};
}
widen_as!(f32 f64 i8 i16 i32 i64 u8 u16 u32 u64);

macro_rules! narrow_as {
    ($wide:ident: $($t:ident)*) => {$(
        impl Narrow<$wide> for $t {
            #[inline(always)]
            fn narrow(wide: $wide) -> Self {
                wide as $t
            }
        }
    )*};
}
narrow_as!(i64: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64);
narrow_as!(u64: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64);
narrow_as!(f64: f32 f64);

impl Narrow<f64> for i32 {
    #[inline(always)]
    fn narrow(wide: f64) -> Self {
        // Truncation brings everything above -2^31 - 1 in.
        if wide > -2_147_483_649.0 && wide < 2_147_483_648.0 { wide as i32 } else { i32::MIN }
    }
}

impl Narrow<f64> for i64 {
    #[inline(always)]
    fn narrow(wide: f64) -> Self {
        if (-TWO_63..TWO_63).contains(&wide) { wide as i64 } else { i64::MIN }
    }
}

const TWO_63: f64 = 9_223_372_036_854_775_808.0;

impl Narrow<f64> for u64 {
    #[inline(always)]
    fn narrow(wide: f64) -> Self {
        if wide >= TWO_63 { i64::narrow(wide - TWO_63) as u64 ^ (1 << 63) } else { i64::narrow(wide) as u64 }
    }
}

macro_rules! narrow_float {
    ($($t:ident $via:ident;)*) => {$(
        impl Narrow<f64> for $t {
            #[inline(always)]
            fn narrow(wide: f64) -> Self {
                $via::narrow(wide) as $t
            }
        }
    )*};
}
narrow_float! {
    i8 i32;
    u8 i32;
    i16 i32;
    u16 i32;
    u32 i64;
}

macro_rules! widen_bool {
    ($($wide:ident)*) => {$(
        impl Widen<$wide> for Bool {
            #[inline(always)]
            fn widen(self) -> $wide {
                self.is_true() as u8 as $wide
            }
        }
        impl Narrow<$wide> for Bool {
            #[inline(always)]
            fn narrow(wide: $wide) -> Self {
                (wide != 0u8 as $wide).into()
            }
        }
    )*};
}
widen_bool!(f64 i64 u64);

/// Reads elements `start`, `start + stride`... of a tensor's bytes, at most [`BLOCK`], as `W`.
pub type Load<W> = fn(Tier, &[u8], usize, isize, &mut [W]);

/// Writes at most [`BLOCK`] elements to the bytes that hold them.
pub type Store<W> = fn(Tier, &[W], &mut [u8]);

/// [`Load`] of a tensor of `T`.
pub fn load<T: Stored<C: Widen<W>>, W: Stored>(tier: Tier, bytes: &[u8], start: usize, stride: isize, out: &mut [W]) {
    let data = typed::<T>(bytes);
    let mut block = [T::C::default(); BLOCK];
    let block = &mut block[..out.len()];
    let loaded = if stride == 1 {
        let raw = &data[start..start + out.len()];
        match T::as_computed(raw) {
            Some(raw) => raw,
            None => {
                T::load_slice(raw, block);
                block
            }
        }
    } else {
        for (i, x) in block.iter_mut().enumerate() {
            *x = data[(start as isize + i as isize * stride) as usize].load();
        }
        block
    };
    vectorize(tier, WidenAll(loaded, out));
}

/// [`Store`] to a tensor of `T`.
pub fn store<T: Stored<C: Narrow<W>>, W: Stored>(tier: Tier, from: &[W], bytes: &mut [u8]) {
    let out = typed_mut::<T>(bytes);
    let mut block = [T::C::default(); BLOCK];
    match T::as_computed_mut(out) {
        Some(out) => vectorize(tier, NarrowAll(from, out)),
        None => {
            let block = &mut block[..from.len()];
            vectorize(tier, NarrowAll(from, &mut *block));
            T::store_slice(block, out);
        }
    }
}

struct WidenAll<'a, C, W>(&'a [C], &'a mut [W]);

impl<C: Stored + Widen<W>, W> Task for WidenAll<'_, C, W> {
    const SIMD: bool = C::SIMD;
    #[inline(always)]
    fn run(self) {
        for (from, to) in self.0.iter().zip(self.1) {
            *to = from.widen();
        }
    }
}

struct NarrowAll<'a, W, C>(&'a [W], &'a mut [C]);

impl<W: Copy, C: Stored + Narrow<W>> Task for NarrowAll<'_, W, C> {
    const SIMD: bool = C::SIMD;
    #[inline(always)]
    fn run(self) {
        for (from, to) in self.0.iter().zip(self.1) {
            *to = C::narrow(*from);
        }
    }
}

/// The elements behind a tensor's bytes.
fn typed<T: Element>(bytes: &[u8]) -> &[T] {
    assert!((bytes.as_ptr() as usize).is_multiple_of(align_of::<T>()), "tensors are aligned for their type");
    // SAFETY: aligned (checked), and `T` is plain data; a rest of less than an element is left out.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// As [`typed`], writable.
fn typed_mut<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    assert!((bytes.as_ptr() as usize).is_multiple_of(align_of::<T>()), "tensors are aligned for their type");
    // SAFETY: as in `typed`, and the borrow of the bytes is unique.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) }
}
