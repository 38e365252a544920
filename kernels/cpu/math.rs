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
}
