//! The CPU kernel. Rows are few (one a token), so the data stays as the model stores it: only the pages of the rows that
//! are read ever come to memory.

use super::{DATA, INDICES, SCALES, ZERO_POINTS};
use crate::cpu::float::Float;
use crate::fact;
use crate::kernel::{Kernel, RunCx, Tensor};
use crate::par::SharedMut;
use crate::quant::nbits::Packed;
use crate::with_float;
use abi::{DType, Error, Result};
use std::sync::Arc;

/// The node's attributes.
pub struct Gather {
    pub bits: usize,
    pub block: usize,
    pub gather_axis: i64,
    pub quantize_axis: i64,
}

/// A run's data: `[outer, along the quantised axis, inner]` values.
struct Source<'a> {
    data: &'a [u8],
    bits: usize,
    /// Whether values are two's complement.
    signed: bool,
    /// Values along the quantised axis, and how many of them share a scale.
    along: usize,
    block: usize,
    inner: usize,
    zero_points: Option<&'a [u8]>,
    /// Zero points that one row of blocks takes, padding included.
    zero_row: usize,
    default_zero: i32,
}

impl Source<'_> {
    #[inline(always)]
    fn bits_at(&self, bytes: &[u8], index: usize) -> i32 {
        let bit = index * self.bits;
        let v = i32::from(bytes[bit / 8] >> (bit % 8)) & ((1 << self.bits) - 1);
        if self.signed && v >> (self.bits - 1) == 1 { v - (1 << self.bits) } else { v }
    }

    /// Where the scale of the value at `index` lies.
    fn scale_index(&self, index: usize) -> usize {
        let (rest, inner) = (index / self.inner, index % self.inner);
        let (outer, along) = (rest / self.along, rest % self.along);
        (outer * self.along.div_ceil(self.block) + along / self.block) * self.inner + inner
    }

    /// The zero point that goes with the scale at `index`.
    fn zero(&self, index: usize) -> i32 {
        let blocks = self.along.div_ceil(self.block);
        match self.zero_points {
            None => self.default_zero,
            // Rows of packed uint8 zero points end on whole bytes; only the last axis is packed so.
            Some(bytes) => self.bits_at(bytes, index / blocks * self.zero_row + index % blocks),
        }
    }

    /// Dequantises the values from `from` on.
    fn decode<T: Float>(&self, scales: &[T], from: usize, out: &mut [T]) {
        let mut at = 0;
        while at < out.len() {
            let index = from + at;
            let scale_index = self.scale_index(index);
            let (scale, zero) = (scales[scale_index].to_f32(), self.zero(scale_index));
            // Along the innermost axis a scale lasts to the end of its block or of the axis.
            let run = if self.inner == 1 {
                let along = index % self.along;
                (self.block - along % self.block).min(self.along - along)
            } else {
                1
            };
            let end = (at + run).min(out.len());
            for (i, out) in out[at..end].iter_mut().enumerate() {
                *out = T::from_f32((self.bits_at(self.data, index + i) - zero) as f32 * scale);
            }
            at = end;
        }
    }
}

/// Indices of either type.
enum Indices<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl<'a> Indices<'a> {
    fn of(t: &Tensor<'a>) -> Self {
        match t.dtype() {
            DType::I32 => Self::I32(t.slice()),
            _ => Self::I64(t.slice()),
        }
    }

    /// Index `i` into an axis of `size`, counted from the end where negative; `None` when out of range.
    fn within(&self, i: usize, size: usize) -> Option<usize> {
        let got = match self {
            Self::I32(v) => v[i].into(),
            Self::I64(v) => v[i],
        };
        let at = if got < 0 { got.checked_add(size as i64)? } else { got };
        usize::try_from(at).ok().filter(|at| *at < size)
    }
}

/// Slices that one task gathers at the least, in values.
const GRAIN: usize = 1 << 14;

impl Gather {
    fn source<'a>(&self, data: &Tensor<'a>, zero_points: Option<Tensor<'a>>, shape: &[usize]) -> Option<Source<'a>> {
        let axis = fact::axis(self.quantize_axis, shape.len())?;
        let packed = data.dtype() == DType::U8;
        let bits = if packed { self.bits } else { 4 };
        let blocks = shape[axis].div_ceil(self.block);
        Some(Source {
            data: data.bytes(),
            bits,
            signed: data.dtype() == DType::I4,
            along: shape[axis],
            block: self.block,
            inner: shape[axis + 1..].iter().product(),
            zero_points: zero_points.map(|t| t.bytes()),
            zero_row: if packed { (blocks * bits).div_ceil(8) * 8 / bits } else { blocks },
            default_zero: if packed { 1 << (bits - 1) } else { 0 },
        })
    }
}

/// Gathers rows of a matrix that a MatMulNBits has packed: an embedding that is also the head.
pub struct GatherPacked {
    pub packed: Arc<Packed>,
}

impl Kernel for GatherPacked {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let indices = Indices::of(&cx.required(INDICES));
        let Some(out) = cx.output(0) else { return Ok(()) };
        let w = self.packed.view();
        let (rows, k) = (w.layout.n, w.layout.k);
        with_float!(out.dtype(), T => {
            let slices = SharedMut::new(out.into_slice::<T>());
            cx.par.ranges(slices.len() / k, GRAIN.div_ceil(k), |range| {
                for i in range {
                    // SAFETY: each slice is visited once.
                    let out = unsafe { slices.slice(i * k..(i + 1) * k) };
                    match indices.within(i, rows) {
                        Some(row) => w.decode_column(row, out),
                        None => out.fill(T::from_f32(0.0)),
                    }
                }
            });
        });
        Ok(())
    }
}

impl Kernel for Gather {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (data, indices, scales) = (cx.required(DATA), cx.required(INDICES), cx.required(SCALES));
        let Some(out) = cx.output(0) else { return Ok(()) };
        if out.is_empty() {
            return Ok(());
        }
        let mut shape = data.shape().to_vec();
        if data.dtype() == DType::U8 {
            *shape.last_mut().expect("infer checked the rank") *= 8 / self.bits;
        }
        let axis = fact::axis(self.gather_axis, shape.len());
        let (Some(axis), Some(source)) = (axis, self.source(&data, cx.input(ZERO_POINTS), &shape)) else {
            return Err(Error::Internal("an axis passed the shape check".into()));
        };
        let size = shape[axis];
        let inner: usize = shape[axis + 1..].iter().product();
        let count = indices.len();
        let indices = Indices::of(&indices);
        with_float!(scales.dtype(), T => {
            let (scales, slices) = (scales.slice::<T>(), SharedMut::new(out.into_slice::<T>()));
            let total = slices.len() / inner;
            cx.par.ranges(total, GRAIN.div_ceil(inner), |range| {
                for i in range {
                    // SAFETY: each slice is visited once.
                    let out = unsafe { slices.slice(i * inner..(i + 1) * inner) };
                    match indices.within(i % count, size) {
                        Some(at) => source.decode(scales, (i / count * size + at) * inner, out),
                        None => out.fill(T::from_f32(0.0)),
                    }
                }
            });
        });
        Ok(())
    }
}
