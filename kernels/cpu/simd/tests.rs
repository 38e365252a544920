//! Every tier against the scalar one.

use super::scalar::Scalar;
use super::{LANES, Simd};
use crate::settings::Tier;

/// A small generator, so that runs differ by seed only.
pub struct Rng(pub u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// What every operation makes of the same inputs, as bits.
#[inline(always)]
unsafe fn ops<S: Simd>(x: &[f32; 32], b: &[u8; 129], out: &mut Vec<u64>) {
    let mut f = [0f32; LANES];
    let mut h = [0u16; LANES];
    let mut c = [0i8; LANES];
    // SAFETY: the caller chose a tier that the processor has; all arrays hold what is read and written.
    unsafe {
        let (p, q) = (S::load(x.as_ptr()), S::load(x.as_ptr().add(16)));
        let (w, a) = (S::load_i(b.as_ptr()), S::load_i(b.as_ptr().add(65)));
        let half = b.as_ptr().add(1).cast::<u16>();
        let mut aligned = [0u16; LANES];
        std::ptr::copy_nonoverlapping(half.cast::<u8>(), aligned.as_mut_ptr().cast(), 32);
        let small = S::and(w, S::splat_i(0x0f0f_0f0f));
        let tiny = S::and(w, S::splat_i(0x0303_0303));
        for v in [
            S::add(p, q),
            S::sub(p, q),
            S::mul(p, q),
            S::max(p, q),
            S::abs(p),
            S::load_f16(aligned.as_ptr()),
            S::load_bf16(aligned.as_ptr()),
            S::splat(x[3]),
            S::to_f(w),
            S::low_to_f::<2>(S::shr(w, 6)),
            S::low_to_f::<4>(S::shr(w, 28)),
            S::low_to_f::<8>(S::shr(w, 8)),
            S::e2m1_to_f(S::shr(w, 12)),
            S::load_e4m3(b.as_ptr().add(7)),
            S::to_f(S::dot::<4>(w, small, a)),
            S::to_f(S::dot::<2>(w, tiny, a)),
            S::to_f(S::dot::<8>(a, w, a)),
            S::to_f(S::add_i(w, a)),
            S::to_f(S::load_u8(b.as_ptr().add(3))),
            S::to_f(S::round(p)),
        ] {
            S::store(f.as_mut_ptr(), v);
            out.extend(f.iter().map(|v| if v.is_nan() { 1 } else { u64::from(v.to_bits()) }));
        }
        S::store_f16(h.as_mut_ptr(), p);
        out.extend(h.map(u64::from));
        S::store_bf16(h.as_mut_ptr(), S::mul(p, S::splat(1.234)));
        out.extend(h.map(u64::from));
        S::store_i8(c.as_mut_ptr(), w);
        out.extend(c.map(|v| v as u64));
        out.push(u64::from(S::reduce_max(p).to_bits()));
        out.push(S::reduce_add_i(w) as u64);
    }
}

unsafe fn kernel<S: Simd>(x: &[f32; 32], b: &[u8; 129], out: &mut Vec<u64>) {
    // SAFETY: passed on.
    unsafe { ops::<S>(x, b, out) }
}

crate::tiered! { fn run(x: &[f32; 32], b: &[u8; 129], out: &mut Vec<u64>) = kernel; }

#[test]
fn tiers_agree_with_scalar() {
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    for _ in 0..200 {
        let x: [f32; 32] = std::array::from_fn(|_| (rng.next() % 20001) as f32 / 100.0 - 100.0);
        let b: [u8; 129] = std::array::from_fn(|_| rng.next() as u8);
        let mut expected = Vec::new();
        // SAFETY: scalar code runs everywhere.
        unsafe { ops::<Scalar>(&x, &b, &mut expected) };
        for tier in Tier::ALL.into_iter().filter(|t| t.is_available()) {
            let mut got = Vec::new();
            // SAFETY: the tier is available.
            unsafe { run(tier)(&x, &b, &mut got) };
            assert_eq!(got, expected, "{tier}");
        }
    }
}

#[test]
fn every_small_float_has_its_value() {
    for code in 0..=255u8 {
        let want = match (code >> 3 & 15, f64::from(code & 7)) {
            (15, 7.0) => f64::NAN,
            (0, m) => m / 8.0 * 2f64.powi(-6),
            (e, m) => (1.0 + m / 8.0) * 2f64.powi(i32::from(e) - 7),
        };
        let want = if code & 0x80 == 0 { want } else { -want };
        let got = f64::from(super::e4m3(code));
        assert!(got == want || (got.is_nan() && want.is_nan()), "{code}: {got}, not {want}");
    }
}
