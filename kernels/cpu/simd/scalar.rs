//! Portable Rust: the reference that the other tiers are tested against.

use super::{E2M1, LANES, Simd, e4m3};
use half::{bf16, f16};

/// The scalar tier.
#[derive(Clone, Copy)]
pub struct Scalar;

#[inline(always)]
fn map<A: Copy, B: Copy + Default>(a: [A; LANES], f: impl Fn(A) -> B) -> [B; LANES] {
    let mut out = [B::default(); LANES];
    for i in 0..LANES {
        out[i] = f(a[i]);
    }
    out
}

#[inline(always)]
fn zip<A: Copy, B: Copy + Default>(a: [A; LANES], b: [A; LANES], f: impl Fn(A, A) -> B) -> [B; LANES] {
    let mut out = [B::default(); LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[inline(always)]
unsafe fn read<T: Copy>(p: *const T) -> [T; LANES] {
    // SAFETY: valid for 16 elements by the trait's contract.
    unsafe { p.cast::<[T; LANES]>().read_unaligned() }
}

#[inline(always)]
unsafe fn write<T: Copy>(p: *mut T, v: [T; LANES]) {
    // SAFETY: valid for 16 elements by the trait's contract.
    unsafe { p.cast::<[T; LANES]>().write_unaligned(v) }
}

impl Simd for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];

    const ROWS: usize = 1;

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self::F {
        [v; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the trait's contract.
        unsafe { read(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::F) {
        // SAFETY: the trait's contract.
        unsafe { write(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        // SAFETY: the trait's contract.
        map(unsafe { read(p) }, |v| f16::from_bits(v).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: Self::F) {
        // SAFETY: the trait's contract.
        unsafe { write(p, map(v, |v| f16::from_f32(v).to_bits())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        // SAFETY: the trait's contract.
        map(unsafe { read(p) }, |v| bf16::from_bits(v).to_f32())
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::F) {
        // SAFETY: the trait's contract.
        unsafe { write(p, map(v, |v| bf16::from_f32(v).to_bits())) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // Two roundings: a fused one is a library call where the instruction may be missing.
        zip(zip(a, b, |a, b| a * b), c, |ab, c| ab + c)
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, f32::max)
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        map(a, f32::abs)
    }
    #[inline(always)]
    unsafe fn reduce_add(a: Self::F) -> f32 {
        a.iter().sum()
    }
    #[inline(always)]
    unsafe fn reduce_max(a: Self::F) -> f32 {
        a.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    unsafe fn splat_i(v: i32) -> Self::I {
        [v; LANES]
    }
    #[inline(always)]
    unsafe fn load_i(p: *const u8) -> Self::I {
        // SAFETY: the trait's contract: 64 bytes.
        unsafe { read(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::I {
        // SAFETY: the trait's contract.
        map(unsafe { read(p) }, i32::from)
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, |a, b| a & b)
    }
    #[inline(always)]
    unsafe fn shr(a: Self::I, n: u32) -> Self::I {
        map(a, |a| (a as u32 >> n) as i32)
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        zip(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn dot<const BITS: usize>(acc: Self::I, w: Self::I, a: Self::I) -> Self::I {
        let dots = zip(w, a, |w, a| {
            let (w, a) = (w.to_le_bytes(), a.to_le_bytes());
            (0..4).map(|i| i32::from(w[i]) * i32::from(a[i] as i8)).sum::<i32>()
        });
        zip(acc, dots, i32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn to_f(a: Self::I) -> Self::F {
        map(a, |a| a as f32)
    }
    #[inline(always)]
    unsafe fn low_to_f<const BITS: usize>(a: Self::I) -> Self::F {
        map(a, |a| (a & ((1 << BITS) - 1)) as f32)
    }
    #[inline(always)]
    unsafe fn e2m1_to_f(a: Self::I) -> Self::F {
        map(a, |a| E2M1[(a & 15) as usize])
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::F {
        // SAFETY: the trait's contract.
        map(unsafe { read(p) }, e4m3)
    }
    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::I {
        map(a, |a| a.round_ties_even() as i32)
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: Self::I) {
        // SAFETY: the trait's contract.
        unsafe { write(p, map(v, |v| v as i8)) }
    }
    #[inline(always)]
    unsafe fn reduce_add_i(a: Self::I) -> i32 {
        a.iter().fold(0, |sum, &v| sum.wrapping_add(v))
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}
