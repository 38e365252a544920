//! Sixteen lanes of f32 or i32: the narrow interface that SIMD kernels are written against, once for all tiers.
//!
//! A kernel is a generic `#[inline(always)] unsafe fn kernel<S: Simd>(..)`; [`tiered!`](crate::tiered) wraps it in one
//! `#[target_feature]` function a tier and picks one by [`Tier`](crate::settings::Tier). Every lane count is 16
//! whatever the register width, so packed layouts do not depend on the tier.
//!
//! Kernels must not hand intrinsics to closures: a closure that is not inlined loses the target features.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod scalar;
#[cfg(test)]
mod tests;

/// Lanes of every vector.
pub const LANES: usize = 16;

/// The values of float4e2m1, by code.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The value of a float8e4m3fn: no infinities, all ones are NaN.
pub fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3) & 15, f32::from(code & 7));
    let value = match exponent {
        _ if code & 0x7f == 0x7f => f32::NAN,
        0 => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(i32::from(exponent) - 7),
    };
    if code & 0x80 == 0 { value } else { -value }
}

/// One instruction set.
///
/// # Safety
/// Every method may only be called where the processor has the tier's instructions; pointers must be valid for
/// 16 elements of their type (64 bytes for `load_i`), at any alignment.
#[allow(clippy::missing_safety_doc)] // stated once above, for all methods
pub trait Simd: Copy + Send + Sync + 'static {
    /// 16 f32.
    type F: Copy;
    /// 16 i32, or 64 bytes.
    type I: Copy;

    /// Rows of a matrix-product tile that fit the registers with one vector of columns.
    const ROWS: usize;

    /// `v` in every lane.
    unsafe fn splat(v: f32) -> Self::F;
    /// Reads 16 f32.
    unsafe fn load(p: *const f32) -> Self::F;
    /// Writes 16 f32.
    unsafe fn store(p: *mut f32, v: Self::F);
    /// Reads and widens 16 float16.
    unsafe fn load_f16(p: *const u16) -> Self::F;
    /// Rounds (to nearest even) and writes 16 float16.
    unsafe fn store_f16(p: *mut u16, v: Self::F);
    /// Reads and widens 16 bfloat16.
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    /// Rounds (to nearest even) and writes 16 bfloat16; NaN stays NaN.
    unsafe fn store_bf16(p: *mut u16, v: Self::F);
    /// `a + b`.
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the tier has it.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The greater of each lane.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// Absolute values.
    unsafe fn abs(a: Self::F) -> Self::F;
    /// The sum of the lanes.
    unsafe fn reduce_add(a: Self::F) -> f32;
    /// The greatest lane.
    unsafe fn reduce_max(a: Self::F) -> f32;

    /// `v` in every lane.
    unsafe fn splat_i(v: i32) -> Self::I;
    /// Reads 64 bytes.
    unsafe fn load_i(p: *const u8) -> Self::I;
    /// Reads 16 bytes and widens them, unsigned.
    unsafe fn load_u8(p: *const u8) -> Self::I;
    /// `a & b`.
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    /// Each lane shifted right by `n` (below 32), zeros in.
    unsafe fn shr(a: Self::I, n: u32) -> Self::I;
    /// `a + b`.
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    /// Per lane, `acc` plus the dot product of four unsigned bytes of `w`, each below `2^BITS`, and four signed bytes
    /// of `a`. Exact.
    unsafe fn dot<const BITS: usize>(acc: Self::I, w: Self::I, a: Self::I) -> Self::I;
    /// Lanes as f32.
    unsafe fn to_f(a: Self::I) -> Self::F;
    /// The low `BITS` bits of each lane, unsigned, as f32.
    unsafe fn low_to_f<const BITS: usize>(a: Self::I) -> Self::F;
    /// The low four bits of each lane, a float4e2m1, as f32.
    unsafe fn e2m1_to_f(a: Self::I) -> Self::F;
    /// Reads and widens 16 float8e4m3fn.
    unsafe fn load_e4m3(p: *const u8) -> Self::F;
    /// Rounds to nearest even.
    unsafe fn round(a: Self::F) -> Self::I;
    /// Writes the low byte of each lane.
    unsafe fn store_i8(p: *mut i8, v: Self::I);
    /// The sum of the lanes.
    unsafe fn reduce_add_i(a: Self::I) -> i32;
    /// Asks for the cache line at `p`; any address is allowed.
    unsafe fn prefetch(p: *const u8);
}

/// Declares `fn $name(tier) -> unsafe fn(args)`, which picks the instance of a generic kernel.
#[macro_export]
macro_rules! tiered {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $generic:ident;) => {
        $(#[$doc])*
        $vis fn $name(tier: $crate::settings::Tier) -> unsafe fn($($ty),*) {
            unsafe fn scalar($($arg: $ty),*) {
                // SAFETY: the caller keeps the kernel's promises; scalar code runs everywhere.
                unsafe { $generic::<$crate::cpu::simd::scalar::Scalar>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: the caller keeps the kernel's promises and chose a tier that the processor has.
                unsafe { $generic::<$crate::cpu::simd::avx2::Avx2>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
            unsafe fn avx512vnni($($arg: $ty),*) {
                // SAFETY: as above.
                unsafe { $generic::<$crate::cpu::simd::avx512::Avx512>($($arg),*) }
            }
            match tier {
                $crate::settings::Tier::Scalar => scalar,
                #[cfg(target_arch = "x86_64")]
                $crate::settings::Tier::Avx2 => avx2,
                #[cfg(target_arch = "x86_64")]
                $crate::settings::Tier::Avx512Vnni => avx512vnni,
                #[cfg(not(target_arch = "x86_64"))]
                _ => scalar,
            }
        }
    };
}
