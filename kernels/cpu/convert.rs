//! Tensors of any float format, read and written as f32.

use super::float::Float;
use crate::kernel::{Carver, Tensor, TensorMut};
use crate::par::{Par, SharedMut};
use abi::DType;
use half::{bf16, f16};
use std::ops::Range;

/// The elements of a tensor whose type the claim limited to f32, f16 and bf16.
#[derive(Clone, Copy)]
pub enum Floats<'a> {
    /// float
    F32(&'a [f32]),
    /// float16
    F16(&'a [f16]),
    /// bfloat16
    BF16(&'a [bf16]),
}

impl<'a> Floats<'a> {
    /// The tensor's elements. Panics for other types.
    pub fn of(tensor: Tensor<'a>) -> Self {
        match tensor.dtype() {
            DType::F32 => Self::F32(tensor.slice()),
            DType::F16 => Self::F16(tensor.slice()),
            DType::BF16 => Self::BF16(tensor.slice()),
            other => unreachable!("the claim admits only float, float16 and bfloat16, not {other}"),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::F16(all) => all.len(),
            Self::BF16(all) => all.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Widens a part; lengths must agree.
    #[inline]
    pub fn read(&self, part: Range<usize>, to: &mut [f32]) {
        match self {
            Self::F32(all) => f32::widen(&all[part], to),
            Self::F16(all) => f16::widen(&all[part], to),
            Self::BF16(all) => bf16::widen(&all[part], to),
        }
    }

    /// One element.
    #[inline]
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Self::F32(all) => all[i],
            Self::F16(all) => all[i].to_f32(),
            Self::BF16(all) => all[i].to_f32(),
        }
    }
}

/// The elements of an output, of which several tasks write disjoint parts.
#[derive(Clone, Copy)]
pub enum FloatsMut<'a> {
    /// float
    F32(SharedMut<'a, f32>),
    /// float16
    F16(SharedMut<'a, f16>),
    /// bfloat16
    BF16(SharedMut<'a, bf16>),
}

impl<'a> FloatsMut<'a> {
    /// The tensor's elements. Panics for types other than f32, f16 and bf16.
    pub fn of(tensor: TensorMut<'a>) -> Self {
        match tensor.dtype() {
            DType::F32 => Self::F32(SharedMut::new(tensor.into_slice())),
            DType::F16 => Self::F16(SharedMut::new(tensor.into_slice())),
            DType::BF16 => Self::BF16(SharedMut::new(tensor.into_slice())),
            other => unreachable!("the claim admits only float, float16 and bfloat16, not {other}"),
        }
    }

    /// Rounds into a part; lengths must agree.
    ///
    /// # Safety
    /// No other part that is written or borrowed meanwhile may overlap it.
    #[inline]
    pub unsafe fn write(&self, part: Range<usize>, from: &[f32]) {
        // SAFETY: the caller's promise, in each arm.
        unsafe {
            match self {
                Self::F32(all) => f32::narrow(from, all.slice(part)),
                Self::F16(all) => f16::narrow(from, all.slice(part)),
                Self::BF16(all) => bf16::narrow(from, all.slice(part)),
            }
        }
    }
}

/// Elements below which a conversion is not worth another thread.
const GRAIN: usize = 16 * 1024;

/// Bytes of scratch that [`widened`] takes for `len` elements of a type that is f32 or not.
pub fn widened_bytes(is_f32: bool, len: usize) -> usize {
    if is_f32 { 0 } else { Carver::size::<f32>(len) }
}

/// `from` as f32: itself, or widened into scratch.
pub fn widened<'a>(par: Par<'_>, from: Tensor<'a>, carver: &mut Carver<'a>) -> &'a [f32] {
    let from = match Floats::of(from) {
        Floats::F32(same) => return same,
        half => half,
    };
    let to = carver.take::<f32>(from.len());
    let shared = SharedMut::new(&mut *to);
    par.ranges(from.len(), GRAIN, |range| {
        // SAFETY: `ranges` gives disjoint ranges.
        from.read(range.clone(), unsafe { shared.slice(range) });
    });
    to
}

/// Rounds `from` to `to`; lengths must agree.
pub fn narrowed(par: Par<'_>, from: &[f32], to: TensorMut<'_>) {
    let to = FloatsMut::of(to);
    par.ranges(from.len(), GRAIN, |range| {
        // SAFETY: `ranges` gives disjoint ranges.
        unsafe { to.write(range.clone(), &from[range]) };
    });
}

/// `to[i] = f(i, from[i])` in f32, where each call takes some tens of nanoseconds.
pub fn map(par: Par<'_>, from: Floats<'_>, to: FloatsMut<'_>, f: impl Fn(usize, f32) -> f32 + Sync) {
    const CHUNK: usize = 256;
    par.ranges(from.len(), 8 * CHUNK, |range| {
        let mut buffer = [0f32; CHUNK];
        for start in range.clone().step_by(CHUNK) {
            let part = start..(start + CHUNK).min(range.end);
            let values = &mut buffer[..part.len()];
            from.read(part.clone(), values);
            for (i, value) in part.clone().zip(values.iter_mut()) {
                *value = f(i, *value);
            }
            // SAFETY: `ranges` gives disjoint ranges.
            unsafe { to.write(part, values) };
        }
    });
}
