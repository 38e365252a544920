//! Vectors of f32 for the attention micro-kernels, one type an instruction set.

/// An instruction set's f32 vector.
///
/// # Safety
/// Every function is to be called only where the instruction set is available, inlined into a function that
/// enables it; pointers are valid for `LANES` elements.
pub(super) unsafe trait Simd: Copy + Send + Sync + 'static {
    /// The vector.
    type V: Copy;
    /// Elements a vector holds; divides 16.
    const LANES: usize;
    /// Keys that one block of the score kernel takes: as many as registers allow.
    const SCORE_KEYS: usize;

    unsafe fn splat(v: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The sum of all lanes.
    unsafe fn sum(v: Self::V) -> f32;
    /// The greatest lane.
    unsafe fn top(v: Self::V) -> f32;
    /// e to the power of each lane, which is at most 0; within 2 ulp.
    unsafe fn exp(v: Self::V) -> Self::V;
}

/// Portable Rust, one lane: the reference.
#[derive(Clone, Copy)]
pub(super) struct Scalar;

// SAFETY: needs no instruction set.
unsafe impl Simd for Scalar {
    type V = f32;
    const LANES: usize = 1;
    const SCORE_KEYS: usize = 2;

    #[inline(always)]
    unsafe fn splat(v: f32) -> f32 {
        v
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { *p }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: f32) {
        // SAFETY: the caller's promise.
        unsafe { *p = v }
    }
    #[inline(always)]
    unsafe fn add(a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    unsafe fn sub(a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    unsafe fn mul(a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    unsafe fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
    #[inline(always)]
    unsafe fn max(a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    unsafe fn sum(v: f32) -> f32 {
        v
    }
    #[inline(always)]
    unsafe fn top(v: f32) -> f32 {
        v
    }
    #[inline(always)]
    unsafe fn exp(v: f32) -> f32 {
        v.exp()
    }
}

/// Coefficients of the polynomial for e^r, |r| <= ln 2 / 2 (Cephes `expf`), highest power first.
#[cfg(target_arch = "x86_64")]
const EXP: [f32; 6] = [1.987_569_2e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
/// Below this e^x is not a normal number: the AVX2 form flushes it to 0.
#[cfg(target_arch = "x86_64")]
const EXP_LOW: f32 = -87.3;
/// Below this e^x rounds to 0 whatever it is; a finite bound keeps -inf out of the arithmetic.
#[cfg(target_arch = "x86_64")]
const EXP_ZERO: f32 = -110.0;
/// ln 2 in two parts, the first with trailing zero bits so that n times it is exact.
#[cfg(target_arch = "x86_64")]
const LN2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{EXP, EXP_LOW, EXP_ZERO, LN2, Simd};
    use std::arch::x86_64::*;

    /// AVX2 with FMA.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2;

    // SAFETY: the caller has checked for AVX2 and FMA (the trait's contract).
    unsafe impl Simd for Avx2 {
        type V = __m256;
        const LANES: usize = 8;
        const SCORE_KEYS: usize = 2;

        #[inline(always)]
        unsafe fn splat(v: f32) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe { _mm256_set1_ps(v) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe { _mm256_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut f32, v: __m256) {
            // SAFETY: the trait's contract.
            unsafe { _mm256_storeu_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn add(a: __m256, b: __m256) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe { _mm256_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: __m256, b: __m256) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe { _mm256_sub_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m256, b: __m256) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe { _mm256_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn max(a: __m256, b: __m256) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe { _mm256_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sum(v: __m256) -> f32 {
            // SAFETY: the trait's contract.
            unsafe {
                let x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
                let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
                _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
            }
        }
        #[inline(always)]
        unsafe fn top(v: __m256) -> f32 {
            // SAFETY: the trait's contract.
            unsafe {
                let x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
                let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
                _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
            }
        }
        #[inline(always)]
        unsafe fn exp(v: __m256) -> __m256 {
            // SAFETY: the trait's contract.
            unsafe {
                // The second operand comes out when either is NaN, so NaN survives.
                let x = _mm256_max_ps(_mm256_set1_ps(EXP_LOW), v);
                let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
                    x,
                    _mm256_set1_ps(std::f32::consts::LOG2_E),
                ));
                let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2[0]), x);
                let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2[1]), r);
                let mut p = _mm256_set1_ps(EXP[0]);
                for c in &EXP[1..] {
                    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(*c));
                }
                let one = _mm256_set1_ps(1.0);
                p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), one);
                let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
                let normal = _mm256_cmp_ps::<_CMP_NLT_UQ>(v, _mm256_set1_ps(EXP_LOW));
                _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), normal)
            }
        }
    }

    /// AVX-512 F.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512;

    // SAFETY: the caller has checked for AVX-512 F (the trait's contract).
    unsafe impl Simd for Avx512 {
        type V = __m512;
        const LANES: usize = 16;
        const SCORE_KEYS: usize = 4;

        #[inline(always)]
        unsafe fn splat(v: f32) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_set1_ps(v) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut f32, v: __m512) {
            // SAFETY: the trait's contract.
            unsafe { _mm512_storeu_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: __m512, b: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m512, b: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn max(a: __m512, b: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sum(v: __m512) -> f32 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_reduce_add_ps(v) }
        }
        #[inline(always)]
        unsafe fn top(v: __m512) -> f32 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_reduce_max_ps(v) }
        }
        #[inline(always)]
        unsafe fn exp(v: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe {
                // The second operand comes out when either is NaN, so NaN survives.
                let x = _mm512_max_ps(_mm512_set1_ps(EXP_ZERO), v);
                let n = _mm512_roundscale_ps::<0>(_mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E)));
                let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2[0]), x);
                let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2[1]), r);
                let mut p = _mm512_set1_ps(EXP[0]);
                for c in &EXP[1..] {
                    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
                }
                let one = _mm512_set1_ps(1.0);
                p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), one);
                _mm512_scalef_ps(p, n)
            }
        }
    }
}
