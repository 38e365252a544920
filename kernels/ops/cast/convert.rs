//! Every pair of types. Floats that an integer type cannot hold become what x86's conversions (and so ORT on it) make
//! of them: the lowest i32 or i64, of which narrower types keep the low bits.

use crate::cpu::map::{BLOCK, Task, vectorize};
use crate::cpu::number::{Bool, Stored};
use crate::settings::Tier;

/// A conversion between types of computation.
pub trait Convert<R>: Copy {
    /// Converts one number.
    fn convert(self) -> R;
}

macro_rules! convert_as {
    ($($from:ident: $($to:ident)*;)*) => {$($(
        impl Convert<$to> for $from {
            #[inline(always)]
            fn convert(self) -> $to {
                self as $to
            }
        }
    )*)*};
}
convert_as! {
    i8: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    u8: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    i16: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    u16: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    i32: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    u32: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    i64: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    u64: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    f32: f32 f64;
    f64: f32 f64;
}

macro_rules! convert_float {
    ($($from:ident)*) => {$(
        impl Convert<i32> for $from {
            #[inline(always)]
            fn convert(self) -> i32 {
                // -(-2^31) is the first that does not fit; f32 holds both bounds exactly.
                if self >= i32::MIN as $from && self < -(i32::MIN as $from) { self as i32 } else { i32::MIN }
            }
        }
        impl Convert<i64> for $from {
            #[inline(always)]
            fn convert(self) -> i64 {
                if self >= i64::MIN as $from && self < -(i64::MIN as $from) { self as i64 } else { i64::MIN }
            }
        }
        impl Convert<u64> for $from {
            #[inline(always)]
            fn convert(self) -> u64 {
                let half = -(i64::MIN as $from);
                if self >= half {
                    let low: i64 = (self - half).convert();
                    low as u64 ^ (1 << 63)
                } else {
                    let low: i64 = self.convert();
                    low as u64
                }
            }
        }
        convert_float!(@narrow $from: i8 i32, u8 i32, i16 i32, u16 i32, u32 i64);
    )*};
    (@narrow $from:ident: $($to:ident $via:ident),*) => {$(
        impl Convert<$to> for $from {
            #[inline(always)]
            fn convert(self) -> $to {
                let wide: $via = self.convert();
                wide as $to
            }
        }
    )*};
}
convert_float!(f32 f64);

macro_rules! convert_bool {
    ($($t:ident)*) => {$(
        impl Convert<Bool> for $t {
            #[inline(always)]
            fn convert(self) -> Bool {
                (self != (0u8 as $t)).into()
            }
        }
        impl Convert<$t> for Bool {
            #[inline(always)]
            fn convert(self) -> $t {
                self.is_true() as u8 as $t
            }
        }
    )*};
}
convert_bool!(i8 u8 i16 u16 i32 u32 i64 u64 f32 f64);

impl Convert<Bool> for Bool {
    #[inline(always)]
    fn convert(self) -> Bool {
        self
    }
}

/// Converts a slice; lengths must agree.
pub fn convert<T: Stored<C: Convert<R::C>>, R: Stored>(tier: Tier, from: &[T], to: &mut [R]) {
    let (mut loaded, mut computed) = ([T::C::default(); BLOCK], [R::C::default(); BLOCK]);
    for (from, to) in from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
        let from = match T::as_computed(from) {
            Some(from) => from,
            None => {
                T::load_slice(from, &mut loaded[..from.len()]);
                &loaded[..from.len()]
            }
        };
        match R::as_computed_mut(to) {
            Some(to) => vectorize(tier, Each(from, to)),
            None => {
                let computed = &mut computed[..to.len()];
                vectorize(tier, Each(from, &mut *computed));
                R::store_slice(computed, to);
            }
        }
    }
}

struct Each<'a, A, B>(&'a [A], &'a mut [B]);

impl<A: Stored + Convert<B>, B: Stored> Task for Each<'_, A, B> {
    const SIMD: bool = A::SIMD && B::SIMD;
    #[inline(always)]
    fn run(self) {
        for (from, to) in self.0.iter().zip(self.1) {
            *to = from.convert();
        }
    }
}
