//! Arithmetic and functions on the types of computation, written so that LLVM vectorises loops over them.

use crate::cpu::math;
use crate::cpu::number::Stored;

/// What every number can do. Integers wrap.
#[allow(missing_docs)] // the names say it
pub trait Number: Stored<C = Self> + PartialOrd {
    const ZERO: Self;
    const ONE: Self;
    /// The least value: negative infinity for floats.
    const LOWEST: Self;
    /// The greatest value: infinity for floats.
    const HIGHEST: Self;
    /// Whether a zero divisor is an error.
    const EXACT: bool;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Integers truncate; the divisor must not be zero (see [`Self::EXACT`]).
    fn div(self, other: Self) -> Self;
    /// The remainder with the divisor's sign.
    fn modulo(self, other: Self) -> Self;
    /// The remainder with the dividend's sign, C's `fmod` and `%`.
    fn rem(self, other: Self) -> Self;
    fn neg(self) -> Self;
    fn abs(self) -> Self;
    /// -1, 0 or 1.
    fn sign(self) -> Self;
    fn is_nan(self) -> bool;
    fn to_f64(self) -> f64;
    /// A number of the same order; NaN is above all, and the zeros are equal.
    fn order(self) -> u64;
    /// Rounds floats; integers truncate and saturate.
    fn of_f64(v: f64) -> Self;
    fn pow(self, exponent: f64) -> Self;
    /// For a whole, non-negative exponent: exact (wrapping) for integers.
    fn powi(self, exponent: u64) -> Self;
    /// The larger; NaN when either is.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other || self.is_nan() { self } else { other }
    }
    /// The smaller; NaN when either is.
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        if self < other || self.is_nan() { self } else { other }
    }
}

macro_rules! integer_number {
    ($($t:ty, |$x:ident| $abs:expr, $sign:expr, $modulo:expr;)*) => {$(
        impl Number for $t {
            const ZERO: Self = 0;
            const ONE: Self = 1;
            const LOWEST: Self = Self::MIN;
            const HIGHEST: Self = Self::MAX;
            const EXACT: bool = true;
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                self.wrapping_div(other)
            }
            #[inline(always)]
            fn modulo(self, other: Self) -> Self {
                let modulo: fn(Self, Self) -> Self = $modulo;
                modulo(self, other)
            }
            #[inline(always)]
            fn rem(self, other: Self) -> Self {
                self.wrapping_rem(other)
            }
            #[inline(always)]
            fn neg(self) -> Self {
                self.wrapping_neg()
            }
            #[inline(always)]
            fn abs(self) -> Self {
                let $x = self;
                $abs
            }
            #[inline(always)]
            fn sign(self) -> Self {
                let $x = self;
                $sign
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                false
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn order(self) -> u64 {
                // Signed types move up by half of their range; unsigned ones have no value below 0.
                (self as u64).wrapping_add(if Self::MIN == 0 { 0 } else { 1 << 63 })
            }
            #[inline(always)]
            fn of_f64(v: f64) -> Self {
                v as Self
            }
            #[inline(always)]
            fn pow(self, exponent: f64) -> Self {
                (self as f64).powf(exponent) as Self
            }
            #[inline(always)]
            fn powi(self, exponent: u64) -> Self {
                let (mut base, mut left, mut result) = (self, exponent, Self::ONE);
                while left > 0 {
                    if left & 1 == 1 {
                        result = result.wrapping_mul(base);
                    }
                    base = base.wrapping_mul(base);
                    left >>= 1;
                }
                result
            }
        }
    )*};
}
integer_number! {
    i8, |x| x.wrapping_abs(), x.signum(), floored;
    i16, |x| x.wrapping_abs(), x.signum(), floored;
    i32, |x| x.wrapping_abs(), x.signum(), floored;
    i64, |x| x.wrapping_abs(), x.signum(), floored;
    u8, |x| x, (x > 0) as Self, |a, b| a % b;
    u16, |x| x, (x > 0) as Self, |a, b| a % b;
    u32, |x| x, (x > 0) as Self, |a, b| a % b;
    u64, |x| x, (x > 0) as Self, |a, b| a % b;
}

/// The remainder with the divisor's sign, of numbers that have one.
#[inline(always)]
fn floored<T: Number>(a: T, b: T) -> T {
    let rem = a.rem(b);
    let differs = rem != T::ZERO && (rem < T::ZERO) != (b < T::ZERO);
    if differs { rem.add(b) } else { rem }
}

macro_rules! float_number {
    ($t:ident) => {
        impl Number for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const LOWEST: Self = Self::NEG_INFINITY;
            const HIGHEST: Self = Self::INFINITY;
            const EXACT: bool = false;
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self - other
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                self / other
            }
            #[inline(always)]
            fn modulo(self, other: Self) -> Self {
                floored(self, other)
            }
            #[inline(always)]
            fn rem(self, other: Self) -> Self {
                self % other
            }
            #[inline(always)]
            fn neg(self) -> Self {
                -self
            }
            #[inline(always)]
            fn abs(self) -> Self {
                <$t>::abs(self)
            }
            #[inline(always)]
            fn sign(self) -> Self {
                if self > 0.0 {
                    1.0
                } else if self < 0.0 {
                    -1.0
                } else {
                    // Zero and NaN stay.
                    self
                }
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                self != self
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self.into()
            }
            #[inline(always)]
            fn order(self) -> u64 {
                if self.is_nan() {
                    return u64::MAX;
                }
                // Adding 0 makes -0 the zero that +0 is.
                let bits = (f64::from(self) + 0.0).to_bits();
                if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
            }
            #[inline(always)]
            fn of_f64(v: f64) -> Self {
                v as Self
            }
            #[inline(always)]
            fn pow(self, exponent: f64) -> Self {
                self.powf(exponent as Self)
            }
            #[inline(always)]
            fn powi(self, exponent: u64) -> Self {
                match exponent {
                    1 => self,
                    2 => self * self,
                    3 => self * self * self,
                    _ => self.powf(exponent as Self),
                }
            }
        }
    };
}
float_number!(f32);
float_number!(f64);

/// Whole numbers as bit strings.
#[allow(missing_docs)] // the names say it
pub trait Bits: Number {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
    fn not(self) -> Self;
    /// 0 when `by` is as wide as the type.
    fn shift_left(self, by: Self) -> Self;
    /// As [`Self::shift_left`]; keeps the sign.
    fn shift_right(self, by: Self) -> Self;
}

macro_rules! bits {
    ($($t:ty)*) => {$(
        impl Bits for $t {
            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }
            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }
            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
            #[inline(always)]
            fn not(self) -> Self {
                !self
            }
            #[inline(always)]
            fn shift_left(self, by: Self) -> Self {
                u32::try_from(by).ok().and_then(|by| self.checked_shl(by)).unwrap_or(0)
            }
            #[inline(always)]
            fn shift_right(self, by: Self) -> Self {
                let most = Self::BITS - 1;
                let far = self >> most >> 1u32.min(most);
                u32::try_from(by).ok().and_then(|by| self.checked_shr(by)).unwrap_or(far)
            }
        }
    )*};
}
bits!(i8 u8 i16 u16 i32 u32 i64 u64);

/// f32 and f64: what ONNX's functions are computed in.
#[allow(missing_docs)] // the names say it
pub trait Real: Number {
    fn exp(self) -> Self;
    fn exp_m1(self) -> Self;
    fn ln(self) -> Self;
    fn ln_1p(self) -> Self;
    fn sqrt(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;
    fn floor(self) -> Self;
    fn ceil(self) -> Self;
    /// Halves to even.
    fn round(self) -> Self;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    fn tan(self) -> Self;
    fn asin(self) -> Self;
    fn acos(self) -> Self;
    fn atan(self) -> Self;
    fn sinh(self) -> Self;
    fn cosh(self) -> Self;
    fn asinh(self) -> Self;
    fn acosh(self) -> Self;
    fn atanh(self) -> Self;
    /// 1 / (1 + e^-x).
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE.div(Self::ONE.add(self.neg().exp()))
    }
    /// ln(1 + e^x) without overflow.
    #[inline(always)]
    fn softplus(self) -> Self {
        let linear = if self > Self::ZERO || self.is_nan() { self } else { Self::ZERO };
        linear.add(self.abs().neg().exp().ln_1p())
    }
}

macro_rules! std_functions {
    ($t:ident: $($f:ident)*) => {$(
        #[inline(always)]
        fn $f(self) -> Self {
            $t::$f(self)
        }
    )*};
}

impl Real for f64 {
    std_functions!(f64: exp exp_m1 ln ln_1p sqrt tanh floor ceil sin cos tan asin acos atan sinh cosh asinh
        acosh atanh);
    fn erf(self) -> Self {
        erf_f64(self)
    }
    #[inline(always)]
    fn round(self) -> Self {
        self.round_ties_even()
    }
}

impl Real for f32 {
    std_functions!(f32: exp_m1 ln ln_1p sqrt floor ceil sin cos tan asin acos atan sinh cosh asinh acosh atanh);
    #[inline(always)]
    fn exp(self) -> Self {
        math::exp(self)
    }
    #[inline(always)]
    fn tanh(self) -> Self {
        math::tanh(self)
    }
    #[inline(always)]
    fn erf(self) -> Self {
        math::erf(self)
    }
    #[inline(always)]
    fn round(self) -> Self {
        self.round_ties_even()
    }
}

/// erf x: the all-positive series for small |x|, the continued fraction of erfc beyond.
pub fn erf_f64(x: f64) -> f64 {
    let a = x.abs();
    if a.is_nan() || a == 0.0 {
        return x;
    }
    if a > 6.0 {
        return 1f64.copysign(x);
    }
    let factor = (-a * a).exp() / std::f64::consts::PI.sqrt();
    let erf = if a < 2.5 {
        // erf x = 2/sqrt(pi) e^-x^2 sum of x (2x^2)^k / (1 * 3 * ... * (2k + 1))
        let (mut term, mut sum, mut k) = (a, a, 1.0);
        while term > sum * 1e-17 {
            term *= 2.0 * a * a / (2.0 * k + 1.0);
            sum += term;
            k += 1.0;
        }
        2.0 * factor * sum
    } else {
        // erfc x = e^-x^2 / sqrt(pi) / (x + (1/2) / (x + (2/2) / (x + (3/2) / ...)))
        let tail = (1..=60).rev().fold(a, |tail, k| a + f64::from(k) / 2.0 / tail);
        1.0 - factor / tail
    };
    erf.copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Abramowitz and Stegun, table 7.1, and mpmath for the last.
    #[test]
    fn erf_matches_tables() {
        for (x, want) in [
            (0.02, 0.022_564_574_691_844_94),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (1.5, 0.966_105_146_475_310_8),
            (2.0, 0.995_322_265_018_952_7),
            (3.0, 0.999_977_909_503_001_4),
        ] {
            assert!((erf_f64(x) - want).abs() < 1e-15, "{x}: {}", erf_f64(x));
            assert_eq!(erf_f64(-x), -erf_f64(x));
        }
        for i in -60_000..60_000 {
            let x = i as f32 * 1e-4;
            assert!((f64::from(math::erf(x)) - erf_f64(f64::from(x))).abs() < 5e-7, "{x}");
        }
        assert!(math::erf(f32::NAN).is_nan());
    }

    #[test]
    fn remainders_have_the_right_sign() {
        assert_eq!([(-7i32).modulo(3), 7.modulo(-3), (-7i32).rem(3), 7.rem(-3)], [2, -2, -1, 1]);
        assert_eq!([(-7f32).modulo(3.0), 7f32.modulo(-3.0)], [2.0, -2.0]);
        assert_eq!(i32::MIN.div(-1), i32::MIN);
    }
}
