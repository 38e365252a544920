//! AVX-512 with VNNI: one register a vector.

use super::Simd;
use std::arch::x86_64::*;

/// The AVX-512 VNNI tier.
#[derive(Clone, Copy)]
pub struct Avx512;

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

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;

    const ROWS: usize = 12;

    intrinsics! {
        fn splat(v: f32) -> __m512 = _mm512_set1_ps(v);
        fn load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        fn store(p: *mut f32, v: __m512) = _mm512_storeu_ps(p, v);
        fn load_f16(p: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        fn store_f16(p: *mut u16, v: __m512) =
            _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
        fn load_bf16(p: *const u16) -> __m512 = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))));
        fn store_bf16(p: *mut u16, v: __m512) = {
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
            let quiet = _mm512_or_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let both = _mm512_mask_mov_epi32(rounded, nan, quiet);
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(both))
        };
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn abs(a: __m512) -> __m512 = _mm512_abs_ps(a);
        fn reduce_add(a: __m512) -> f32 = _mm512_reduce_add_ps(a);
        fn reduce_max(a: __m512) -> f32 = _mm512_reduce_max_ps(a);
        fn splat_i(v: i32) -> __m512i = _mm512_set1_epi32(v);
        fn load_i(p: *const u8) -> __m512i = _mm512_loadu_si512(p.cast());
        fn load_u8(p: *const u8) -> __m512i = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
        fn and(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        fn shr(a: __m512i, n: u32) -> __m512i = _mm512_srl_epi32(a, _mm_cvtsi32_si128(n as i32));
        fn add_i(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        fn dot<const BITS>(acc: __m512i, w: __m512i, a: __m512i) -> __m512i = _mm512_dpbusd_epi32(acc, w, a);
        fn to_f(a: __m512i) -> __m512 = _mm512_cvtepi32_ps(a);
        fn low_to_f<const BITS>(a: __m512i) -> __m512 = {
            // A table lookup reads the low four bits of each lane, and masks them for free.
            match BITS {
                2 => _mm512_permutexvar_ps(a, _mm512_setr_ps(
                    0., 1., 2., 3., 0., 1., 2., 3., 0., 1., 2., 3., 0., 1., 2., 3.)),
                4 => _mm512_permutexvar_ps(a, _mm512_setr_ps(
                    0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.)),
                _ => _mm512_cvtepi32_ps(_mm512_and_si512(a, _mm512_set1_epi32((1 << BITS) - 1))),
            }
        };
        fn e2m1_to_f(a: __m512i) -> __m512 = _mm512_permutexvar_ps(a, _mm512_loadu_ps(super::E2M1.as_ptr()));
        fn load_e4m3(p: *const u8) -> __m512 =
            _mm512_mul_ps(_mm512_cvtph_ps(super::avx2::e4m3_halves(p)), _mm512_set1_ps(256.0));
        fn round(a: __m512) -> __m512i = _mm512_cvtps_epi32(a);
        fn store_i8(p: *mut i8, v: __m512i) = _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v));
        fn reduce_add_i(a: __m512i) -> i32 = _mm512_reduce_add_epi32(a);
        fn prefetch(p: *const u8) = _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
}
