//! AVX2 with FMA and F16C: two registers a vector.

use super::Simd;
use std::arch::x86_64::*;

/// The AVX2 tier.
#[derive(Clone, Copy)]
pub struct Avx2;

type F = [__m256; 2];
type I = [__m256i; 2];

/// Methods whose bodies are intrinsics.
macro_rules! intrinsics {
    ($(fn $name:ident $(<const $c:ident>)? ($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name $(<const $c: usize>)? ($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: the trait's contract: the processor has the instructions, pointers are valid.
            unsafe { $body }
        }
    )*};
}

/// Eight f32 as bfloat16 bits in 32-bit lanes.
#[inline(always)]
unsafe fn bf16_bits(v: __m256) -> __m256i {
    // SAFETY: the caller's processor has AVX2.
    unsafe {
        let bits = _mm256_castps_si256(v);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
        let quiet = _mm256_or_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }
}

/// Per lane, the dot product of four bytes of `w`, at most 128, and four signed bytes of `a`.
#[inline(always)]
unsafe fn dot_small(w: __m256i, a: __m256i) -> __m256i {
    // SAFETY: the caller's processor has AVX2. A pair's sum is below 2^15: nothing saturates.
    unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)) }
}

/// 16 float8e4m3fn as float16 of a 256th of their value.
#[inline(always)]
pub(super) unsafe fn e4m3_halves(p: *const u8) -> __m256i {
    // SAFETY: the caller's processor has AVX2, and `p` is valid for 16 bytes.
    unsafe {
        let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
        let ones = _mm256_set1_epi16(0x7f);
        let magnitude = _mm256_and_si256(codes, ones);
        let nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, ones), _mm256_set1_epi16(0x7e00));
        let sign = _mm256_and_si256(_mm256_slli_epi16::<8>(codes), _mm256_set1_epi16(i16::MIN));
        _mm256_or_si256(_mm256_or_si256(sign, nan), _mm256_slli_epi16::<7>(magnitude))
    }
}

impl Simd for Avx2 {
    type F = F;
    type I = I;

    const ROWS: usize = 4;

    intrinsics! {
        fn splat(v: f32) -> F = [_mm256_set1_ps(v); 2];
        fn load(p: *const f32) -> F = [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))];
        fn store(p: *mut f32, v: F) = {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1])
        };
        fn load_f16(p: *const u16) -> F =
            [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))];
        fn store_f16(p: *mut u16, v: F) = {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]))
        };
        fn load_bf16(p: *const u16) -> F = {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high))]
        };
        fn store_bf16(p: *mut u16, v: F) = {
            let packed = _mm256_packus_epi32(bf16_bits(v[0]), bf16_bits(v[1]));
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed))
        };
        fn add(a: F, b: F) -> F = [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])];
        fn sub(a: F, b: F) -> F = [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])];
        fn mul(a: F, b: F) -> F = [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])];
        fn fma(a: F, b: F, c: F) -> F = [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])];
        fn max(a: F, b: F) -> F = [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])];
        fn abs(a: F) -> F = {
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
        };
        fn reduce_add(a: F) -> f32 = {
            let eight = _mm256_add_ps(a[0], a[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        };
        fn reduce_max(a: F) -> f32 = {
            let eight = _mm256_max_ps(a[0], a[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        };
        fn splat_i(v: i32) -> I = [_mm256_set1_epi32(v); 2];
        fn load_i(p: *const u8) -> I = [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())];
        fn load_u8(p: *const u8) -> I =
            [_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())), _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast()))];
        fn and(a: I, b: I) -> I = [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])];
        fn shr(a: I, n: u32) -> I = {
            let n = _mm_cvtsi32_si128(n as i32);
            [_mm256_srl_epi32(a[0], n), _mm256_srl_epi32(a[1], n)]
        };
        fn add_i(a: I, b: I) -> I = [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])];
        fn dot<const BITS>(acc: I, w: I, a: I) -> I = {
            if BITS < 8 {
                [_mm256_add_epi32(acc[0], dot_small(w[0], a[0])), _mm256_add_epi32(acc[1], dot_small(w[1], a[1]))]
            } else {
                // Pairs of whole bytes could saturate: nibbles cannot.
                let low = _mm256_set1_epi8(15);
                let mut out = acc;
                for (i, out) in out.iter_mut().enumerate() {
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(w[i]), low);
                    let high = _mm256_slli_epi32::<4>(dot_small(high, a[i]));
                    let sum = _mm256_add_epi32(high, dot_small(_mm256_and_si256(w[i], low), a[i]));
                    *out = _mm256_add_epi32(*out, sum);
                }
                out
            }
        };
        fn to_f(a: I) -> F = [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])];
        fn low_to_f<const BITS>(a: I) -> F = {
            let mask = _mm256_set1_epi32((1 << BITS) - 1);
            [_mm256_cvtepi32_ps(_mm256_and_si256(a[0], mask)), _mm256_cvtepi32_ps(_mm256_and_si256(a[1], mask))]
        };
        fn e2m1_to_f(a: I) -> F = {
            // The lookup reads three bits; the fourth is the sign.
            let table = _mm256_loadu_ps(super::E2M1.as_ptr());
            let sign = _mm256_set1_epi32(i32::MIN);
            let mut out = [_mm256_setzero_ps(); 2];
            for (out, a) in out.iter_mut().zip(a) {
                let sign = _mm256_and_si256(_mm256_slli_epi32::<28>(a), sign);
                *out = _mm256_or_ps(_mm256_permutevar8x32_ps(table, a), _mm256_castsi256_ps(sign));
            }
            out
        };
        fn load_e4m3(p: *const u8) -> F = {
            let halves = e4m3_halves(p);
            let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
            let factor = _mm256_set1_ps(256.0);
            [_mm256_mul_ps(_mm256_cvtph_ps(low), factor), _mm256_mul_ps(_mm256_cvtph_ps(high), factor)]
        };
        fn round(a: F) -> I = [_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1])];
        fn store_i8(p: *mut i8, v: I) = {
            // Keep the low byte of each lane, as the contract says, rather than saturate.
            let pick = _mm256_setr_epi8(
                0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
            let join = _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0);
            for (i, &half) in v.iter().enumerate() {
                let low = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(half, pick), join);
                _mm_storel_epi64(p.add(8 * i).cast(), _mm256_castsi256_si128(low));
            }
        };
        fn reduce_add_i(a: I) -> i32 = {
            let eight = _mm256_add_epi32(a[0], a[1]);
            let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b00_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
        };
        fn prefetch(p: *const u8) = _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
}
