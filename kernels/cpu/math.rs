//! Elementary functions in f32, written so that loops over them vectorise.

/// e to the `x`, within 2 ulp; overflows to infinity, underflows to 0 below the smallest normal number.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Cody and Waite: x = n ln 2 + r with |r| <= ln 2 / 2, in two steps so that n ln 2 is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // 1.5 * 2^23: adding it leaves a rounded integer in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.336_54, 88.722_83);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    // Cephes expf's minimax polynomial of (e^r - 1 - r) / r^2.
    let mut p = 1.987_569_1e-4f32;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_6e-1;
    p = p * r + 0.5;
    let e = p * r * r + r + 1.0;
    // 2^n in two factors, since n = 128 has no f32 of its own.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    let scaled = e * power(half) * power(n - half);
    let low = if x < -87.336_54 { 0.0 } else { scaled };
    if x > 88.722_83 { f32::INFINITY } else { low }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `ln(1 + e^x)`, without overflow.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// tanh x: a polynomial near zero (Cephes' tanhf), by e^2x elsewhere.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let s = x * x;
    let p = -5.704_988_7e-3 * s + 2.063_909e-2;
    let p = p * s - 5.373_971_6e-2;
    let p = p * s + 1.333_144_2e-1;
    let p = p * s - 3.333_328e-1;
    let near = p * s * x + x;
    let far = (1.0 - 2.0 / (exp(2.0 * a) + 1.0)).copysign(x);
    if a < 0.625 { near } else { far }
}

/// erf x: odd polynomial over even polynomial on [-4, 4], beyond which it is 1 in f32.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let c = if x > 4.0 { 4.0 } else { x };
    let c = if c < -4.0 { -4.0 } else { c };
    let s = c * c;
    let p = -2.726_142_3e-10 * s + 2.770_681_4e-8;
    let p = p * s - 2.101_024e-6;
    let p = p * s - 5.692_506_4e-5;
    let p = p * s - 7.349_906_5e-4;
    let p = p * s - 2.954_6e-3;
    let p = p * s - 1.609_603_3e-2;
    let q = -1.456_607_2e-5 * s - 2.133_740_6e-4;
    let q = q * s - 1.682_827e-3;
    let q = q * s - 7.373_329e-3;
    let q = q * s - 1.426_473_9e-2;
    c * p / q
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        for i in -870_000..=887_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            let got = f64::from(exp(x));
            assert!((got - want).abs() <= want * 2.4e-7, "exp({x}) = {got}, not {want}");
        }
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(silu(f32::INFINITY), f32::INFINITY);
        assert_eq!(sigmoid(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn softplus_has_both_tails() {
        for x in [-80f32, -20.0, -1.0, 0.0, 1.0, 20.0, 80.0] {
            let want = f64::from(x).exp().ln_1p();
            assert!((f64::from(softplus(x)) - want).abs() <= want * 3e-7, "softplus({x})");
        }
    }

    fn ulps(got: f32, want: f64) -> f64 {
        let rounded = want as f32;
        let next = f32::from_bits(rounded.abs().to_bits() + 1);
        let ulp = f64::from(next) - f64::from(rounded.abs());
        ((f64::from(got) - want) / ulp).abs()
    }

    #[test]
    fn tanh_is_within_three_ulps() {
        let mut worst = 0f64;
        for i in -200_000..200_000 {
            let x = i as f32 * 1e-4;
            if x != 0.0 {
                worst = worst.max(ulps(tanh(x), f64::from(x).tanh()));
            }
        }
        assert!(worst < 3.0, "{worst}");
        assert_eq!(tanh(f32::INFINITY), 1.0);
        assert_eq!(tanh(-100.0), -1.0);
        assert!(tanh(f32::NAN).is_nan());
    }
}
