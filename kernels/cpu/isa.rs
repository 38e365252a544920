//! One loop, compiled once for every instruction set.
//!
//! A [`Job`]'s `run` and everything it calls is `#[inline(always)]`, so that the loop is compiled inside a
//! function that has the tier's target features, and LLVM vectorises it with them.

use crate::settings::Tier;

/// What portable code must know of the instruction set that it is compiled for, and the few vector operations
/// that kernels with a fixed register layout spell out.
pub trait Isa: Copy {
    /// f32 lanes of a vector.
    const LANES: usize;
    /// Whether a fused multiply-add is one instruction (without, `f32::mul_add` is a library call).
    const FMA: bool;
    /// A vector of `LANES` f32.
    type V: Copy;

    /// `a * b + c`.
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        if Self::FMA { a.mul_add(b, c) } else { a * b + c }
    }

    /// Every lane `x`.
    fn splat(x: f32) -> Self::V;
    /// Reads `LANES` f32.
    ///
    /// # Safety
    /// `from` must be valid for that read; no alignment is needed.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Writes `LANES` f32.
    ///
    /// # Safety
    /// `to` must be valid for that write; no alignment is needed.
    unsafe fn store(to: *mut f32, v: Self::V);
    /// Lane-wise `a + b`.
    fn add(a: Self::V, b: Self::V) -> Self::V;
    /// Lane-wise `a - b`.
    fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// Lane-wise `a * b`.
    fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// Lane-wise `a * b + c`.
    fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
}

/// What every target has.
#[derive(Clone, Copy)]
pub struct Portable;

impl Isa for Portable {
    const LANES: usize = 4;
    const FMA: bool = false;
    type V = [f32; 4];

    #[inline(always)]
    fn splat(x: f32) -> Self::V {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(v) }
    }
    #[inline(always)]
    fn add(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! x86 {
    ($(#[$doc:meta])* $name:ident, $lanes:literal, $v:ident,
     $splat:ident $load:ident $store:ident $add:ident $sub:ident $mul:ident $fma:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        struct $name;

        impl Isa for $name {
            const LANES: usize = $lanes;
            const FMA: bool = true;
            type V = std::arch::x86_64::$v;

            #[inline(always)]
            fn splat(x: f32) -> Self::V {
                // SAFETY: `dispatch` names this type only where the processor has its features.
                unsafe { std::arch::x86_64::$splat(x) }
            }
            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self::V {
                // SAFETY: as `splat`; the read is the caller's promise.
                unsafe { std::arch::x86_64::$load(from) }
            }
            #[inline(always)]
            unsafe fn store(to: *mut f32, v: Self::V) {
                // SAFETY: as `splat`; the write is the caller's promise.
                unsafe { std::arch::x86_64::$store(to, v) }
            }
            #[inline(always)]
            fn add(a: Self::V, b: Self::V) -> Self::V {
                // SAFETY: as `splat`.
                unsafe { std::arch::x86_64::$add(a, b) }
            }
            #[inline(always)]
            fn sub(a: Self::V, b: Self::V) -> Self::V {
                // SAFETY: as `splat`.
                unsafe { std::arch::x86_64::$sub(a, b) }
            }
            #[inline(always)]
            fn mul(a: Self::V, b: Self::V) -> Self::V {
                // SAFETY: as `splat`.
                unsafe { std::arch::x86_64::$mul(a, b) }
            }
            #[inline(always)]
            fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
                // SAFETY: as `splat`.
                unsafe { std::arch::x86_64::$fma(a, b, c) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
x86!(
    /// AVX2 with FMA and F16C. Only [`dispatch`] may name it.
    Avx2, 8, __m256,
    _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_add_ps _mm256_sub_ps _mm256_mul_ps _mm256_fmadd_ps
);
#[cfg(target_arch = "x86_64")]
x86!(
    /// AVX-512. Only [`dispatch`] may name it.
    Avx512, 16, __m512,
    _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_add_ps _mm512_sub_ps _mm512_mul_ps _mm512_fmadd_ps
);

/// A piece of work to be compiled for each tier.
pub trait Job {
    /// What it gives.
    type Out;
    /// Does it. Must be `#[inline(always)]`.
    fn run<I: Isa>(self) -> Self::Out;
}

/// Runs `job` with the instructions of `tier`, which must be available on this processor.
pub fn dispatch<J: Job>(tier: Tier, job: J) -> J::Out {
    #[cfg(target_arch = "x86_64")]
    {
        match tier {
            Tier::Scalar => job.run::<Portable>(),
            // SAFETY: settings admit only tiers whose features the processor has.
            Tier::Avx2 => unsafe { avx2(job) },
            // SAFETY: as above.
            Tier::Avx512Vnni => unsafe { avx512(job) },
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = tier;
        job.run::<Portable>()
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<J: Job>(job: J) -> J::Out {
    job.run::<Avx2>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn avx512<J: Job>(job: J) -> J::Out {
    job.run::<Avx512>()
}

/// Independent partial sums of a long reduction: enough for four vectors of the widest tier, so that the
/// additions do not wait for each other.
pub const PARTIALS: usize = 64;

/// Adds up partial sums, pairwise.
#[inline(always)]
pub fn fold(mut sums: [f32; PARTIALS]) -> f32 {
    let mut n = PARTIALS;
    while n > 1 {
        n /= 2;
        for i in 0..n {
            sums[i] += sums[i + n];
        }
    }
    sums[0]
}

/// `sum a[i] * b[i]` over the shorter length.
#[inline(always)]
pub fn dot<I: Isa>(a: &[f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len());
    // Four sums, so that the additions do not wait for each other.
    let mut sums = [I::splat(0.0); 4];
    let step = 4 * I::LANES;
    let whole = n / step * step;
    for i in (0..whole).step_by(step) {
        for (r, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `i + step` is at most the shorter length.
            let (a, b) =
                unsafe { (I::load(a.as_ptr().add(i + r * I::LANES)), I::load(b.as_ptr().add(i + r * I::LANES))) };
            *sum = I::mul_add(a, b, *sum);
        }
    }
    let mut rest = 0f32;
    for (a, b) in a[whole..n].iter().zip(&b[whole..n]) {
        rest = I::fma(*a, *b, rest);
    }
    add_lanes::<I>(I::add(I::add(sums[0], sums[1]), I::add(sums[2], sums[3]))) + rest
}

/// The sum of a vector's lanes, pairwise.
#[inline(always)]
fn add_lanes<I: Isa>(v: I::V) -> f32 {
    let mut lanes = [0f32; 16];
    // SAFETY: no vector here has more than 16 lanes.
    unsafe { I::store(lanes.as_mut_ptr(), v) };
    let mut n = I::LANES;
    while n > 1 {
        n /= 2;
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
    }
    lanes[0]
}
