//! One projection's weights as the model stores them, and how to undo what is special about their storage.

use super::problem::{Format, Matrix, Stored};
use crate::cpu::simd::{E2M1, e4m3};
use crate::quant::nbits::{Layout, ZeroPoint};
use abi::{DType, Error, Result};
use half::{bf16, f16};

/// A projection's tensors, of all experts.
#[derive(Clone, Copy)]
pub(super) struct Raw<'a> {
    pub weights: &'a [u8],
    pub scales: &'a [u8],
    /// Type of the scales.
    pub scale: DType,
    pub zero_points: &'a [u8],
    /// A factor an expert, or none.
    pub global: &'a [f32],
}

/// Bytes of one expert's weights, scales and zero points in the form that [`Format`] names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub weights: usize,
    pub scales: usize,
    pub zero_points: usize,
}

impl Sizes {
    /// Of all three.
    pub fn total(&self) -> usize {
        self.weights + self.scales + self.zero_points
    }
}

impl Matrix {
    /// See [`Sizes`].
    pub fn sizes(&self) -> Sizes {
        let (n, k) = (self.n, self.k);
        let (weights, scales, zero_points) = match self.format {
            Format::Dense(dtype) => (n * k * if dtype == DType::F32 { 4 } else { 2 }, 0, 0),
            Format::Int(layout) => layout.source_bytes(),
            Format::Fp4 { block } => (n * k / 2, n * (k / block) * 2, 0),
            Format::Fp8 { block: 0 } => (n * k, 0, 0),
            Format::Fp8 { block } => (n * k, n.div_ceil(block) * k.div_ceil(block) * 4, 0),
        };
        Sizes { weights, scales, zero_points }
    }
}

/// A projection of all experts.
#[derive(Clone, Copy)]
pub(super) struct Experts<'a> {
    pub matrix: &'a Matrix,
    raw: Raw<'a>,
    experts: usize,
}

impl<'a> Experts<'a> {
    /// Errors when the tensors do not hold what the shapes say.
    pub fn new(matrix: &'a Matrix, experts: usize, raw: Raw<'a>) -> Result<Self> {
        let this = Self { matrix, raw, experts };
        let weights = match matrix.stored {
            Stored::Blocks { bits, .. } => matrix.n * (matrix.k * bits).div_ceil(8),
            _ => matrix.sizes().weights,
        };
        if weights * experts != raw.weights.len() {
            let (got, name) = (raw.weights.len(), matrix.slots.name);
            return Err(Error::Internal(format!("{got} bytes of {name} weights passed the shape check of {matrix:?}")));
        }
        Ok(this)
    }

    /// E.
    pub fn count(&self) -> usize {
        self.experts
    }

    /// Expert `e` in the form that [`Format`] names, written to `room` ([`Sizes::total`] bytes).
    pub fn expert<'b>(&'b self, e: usize, room: &'b mut [u8]) -> Expert<'b> {
        let sizes = self.matrix.sizes();
        let (weights, rest) = room.split_at_mut(sizes.weights);
        let (scales, zero_points) = rest.split_at_mut(sizes.scales);
        self.fill(e, weights, scales, zero_points);
        let global = self.raw.global.get(e).copied().unwrap_or(1.0);
        Expert { matrix: self.matrix, weights, scales, zero_points, global }
    }

    /// Expert `e`'s part of one of the tensors.
    fn part<'b>(&self, all: &'b [u8], e: usize) -> &'b [u8] {
        let size = all.len() / self.experts;
        &all[e * size..][..size]
    }

    /// Writes expert `e` in the form that [`Format`] names; the pieces have [`Matrix::sizes`] bytes.
    pub fn fill(&self, e: usize, weights: &mut [u8], scales: &mut [u8], zero_points: &mut [u8]) {
        let from = self.part(self.raw.weights, e);
        let raw_scales = self.part(self.raw.scales, e);
        match (self.matrix.format, self.matrix.stored) {
            (Format::Int(layout), Stored::Blocks { bits, block, zero_rows }) => {
                let row = (layout.k * bits).div_ceil(8);
                let padded = layout.blocks() * layout.blob();
                for (from, to) in from.chunks_exact(row).zip(weights.chunks_exact_mut(padded)) {
                    widen_row(bits, layout.k, from, to);
                }
                let source = IntSource { bits, block, zero_rows };
                source.fill(&layout, raw_scales, self.part(self.raw.zero_points, e), scales, zero_points);
            }
            (Format::Int(layout), Stored::Cutlass { bits, block, zero_rows }) => {
                let (_, row) = (weights.fill(0), layout.blocks() * layout.blob());
                unpack_cutlass(bits, (layout.n, layout.k), row, from, weights);
                let source = IntSource { bits, block, zero_rows };
                source.fill(&layout, raw_scales, self.part(self.raw.zero_points, e), scales, zero_points);
            }
            (Format::Fp4 { .. }, stored) => {
                match stored {
                    Stored::Columns => transpose_nibbles(self.matrix.n, self.matrix.k, from, weights),
                    _ => weights.copy_from_slice(from),
                }
                for (to, from) in scales.chunks_exact_mut(2).zip(raw_scales) {
                    let value = if self.raw.scale == DType::F8E8M0 { e8m0(*from) } else { e4m3(*from) };
                    to.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
                }
            }
            (Format::Fp8 { block }, _) => {
                weights.copy_from_slice(from);
                if block > 0 {
                    for (i, to) in scales.chunks_exact_mut(4).enumerate() {
                        to.copy_from_slice(&float_at(self.raw.scale, raw_scales, i).to_le_bytes());
                    }
                }
            }
            _ => weights.copy_from_slice(from),
        }
    }
}

/// Copies a row of codes; three bits become four, moved so that their default zero point does too. What is past K is
/// zero.
fn widen_row(bits: usize, k: usize, from: &[u8], to: &mut [u8]) {
    if bits != 3 {
        to[..from.len()].copy_from_slice(from);
        to[from.len()..].fill(0);
        return;
    }
    to.fill(0);
    for i in 0..k {
        to[i / 2] |= (code(3, from, i) + 4) << (4 * (i % 2));
    }
}

/// Code `i` of a bit stream, low bits first.
fn code(bits: usize, from: &[u8], i: usize) -> u8 {
    let bit = i * bits;
    let word = u16::from(from[bit / 8]) | u16::from(from.get(bit / 8 + 1).copied().unwrap_or(0)) << 8;
    (word >> (bit % 8)) as u8 & (0xff >> (8 - bits))
}

/// How integer scales and zero points arrive.
struct IntSource {
    bits: usize,
    block: usize,
    zero_rows: bool,
}

impl IntSource {
    /// Repeats what a block of the model covers for each block of the layout.
    fn fill(&self, l: &Layout, scales: &[u8], points: &[u8], to: &mut [u8], to_points: &mut [u8]) {
        let given = if self.block == 0 { 1 } else { l.k.div_ceil(self.block) };
        let of = |block: usize| (block * l.block).checked_div(self.block).unwrap_or(0);
        let (blocks, size) = (l.blocks(), l.scale_bytes());
        for n in 0..l.n {
            for b in 0..blocks {
                let from = (n * given + of(b)) * size;
                to[(n * blocks + b) * size..][..size].copy_from_slice(&scales[from..from + size]);
            }
        }
        if l.zero_point != ZeroPoint::Bytes {
            return;
        }
        to_points.fill(0);
        let (row, out_row) = ((given * self.bits).div_ceil(8), (blocks * l.bits).div_ceil(8));
        for n in 0..l.n {
            let out = &mut to_points[n * out_row..][..out_row];
            for b in 0..blocks {
                let point = match self.zero_rows {
                    true => code(self.bits, points, n),
                    false => code(self.bits, &points[n * row..][..row], of(b)),
                };
                let point = if self.bits == 3 { point + 4 } else { point };
                out[b * l.bits / 8] |= point << (b * l.bits % 8);
            }
        }
    }
}

/// Undoes the layout that CUTLASS's mixed GEMM reads on sm_80, where codes lie in tiles of 64 in k and 4 (of 8 bits: 2)
/// columns n, k permuted for its matrix loads, and the codes of a 32-bit word in the order that unpacks fastest.
fn unpack_cutlass(bits: usize, (n, k): (usize, usize), row: usize, from: &[u8], to: &mut [u8]) {
    const TILE: usize = 64;
    let (across, per_word) = (16 / bits, 32 / bits);
    // Codes of a row of the matrix load: 8 lanes of pairs.
    let load = 128 / bits;
    for at in 0..n * k {
        let i = at % per_word;
        // Even places of a word come first.
        let place = at - i + if i < per_word / 2 { 2 * i } else { 2 * (i - per_word / 2) + 1 };
        let (tile, j) = (place / TILE, place % TILE);
        let (column, tile) = (tile % across, tile / across);
        let (along, block) = (tile % (k / TILE), tile / (k / TILE));
        let (r, base) = (j % load, along * TILE + j / load * load);
        let quarter = load / 4;
        let kk = base + (r % quarter) / 2 * 8 + r / quarter * 2 + r % 2;
        let out = (block * across + column) * row;
        match bits {
            4 => to[out + kk / 2] |= ((from[at / 2] >> (4 * (at % 2))) & 15) << (4 * (kk % 2)),
            _ => to[out + kk] = from[at],
        }
    }
}

/// [K, N / 2] to [N, K / 2].
fn transpose_nibbles(n: usize, k: usize, from: &[u8], to: &mut [u8]) {
    to.fill(0);
    for kk in 0..k {
        for nn in 0..n {
            let code = (from[(kk * n + nn) / 2] >> (4 * (nn % 2))) & 15;
            to[(nn * k + kk) / 2] |= code << (4 * (kk % 2));
        }
    }
}

/// One expert's projection in the form that [`Format`] names.
#[derive(Clone, Copy)]
pub(super) struct Expert<'a> {
    pub matrix: &'a Matrix,
    pub weights: &'a [u8],
    pub scales: &'a [u8],
    pub zero_points: &'a [u8],
    pub global: f32,
}

impl Expert<'_> {
    /// The scalar decode: row `n`, K values.
    pub fn decode_row(&self, n: usize, out: &mut [f32]) {
        let k = self.matrix.k;
        match self.matrix.format {
            Format::Dense(dtype) => {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = float_at(dtype, self.weights, n * k + i);
                }
            }
            Format::Int(layout) => self.decode_int(&layout, n, out),
            Format::Fp4 { block } => {
                for (i, out) in out.iter_mut().enumerate() {
                    let code = (self.weights[(n * k + i) / 2] >> (4 * (i % 2))) & 15;
                    let scale = float_at(DType::BF16, self.scales, n * (k / block) + i / block);
                    *out = E2M1[usize::from(code)] * (scale * self.global);
                }
            }
            Format::Fp8 { block } => {
                for (i, out) in out.iter_mut().enumerate() {
                    let scale = match block {
                        0 => 1.0,
                        _ => float_at(DType::F32, self.scales, n / block * k.div_ceil(block) + i / block),
                    };
                    *out = e4m3(self.weights[n * k + i]) * (scale * self.global);
                }
            }
        }
    }

    fn decode_int(&self, l: &Layout, n: usize, out: &mut [f32]) {
        let (row, blocks) = (l.blocks() * l.blob(), l.blocks());
        let zero_row = (blocks * l.bits).div_ceil(8);
        for (b, out) in out.chunks_mut(l.block).enumerate() {
            let scale = float_at(l.scale, self.scales, n * blocks + b) * self.global;
            let zero = match l.zero_point {
                ZeroPoint::Bytes => code(l.bits, &self.zero_points[n * zero_row..][..zero_row], b),
                _ => 1 << (l.bits - 1),
            };
            let codes = &self.weights[n * row + b * l.blob()..][..l.blob()];
            for (i, out) in out.iter_mut().enumerate() {
                *out = (f32::from(code(l.bits, codes, i)) - f32::from(zero)) * scale;
            }
        }
    }
}

/// Element `index` of an array of float, float16 or bfloat16.
pub(super) fn float_at(dtype: DType, bytes: &[u8], index: usize) -> f32 {
    let two = |i: usize| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
    match dtype {
        DType::F16 => f16::from_bits(two(index)).to_f32(),
        DType::BF16 => bf16::from_bits(two(index)).to_f32(),
        _ => f32::from_bits(u32::from(two(2 * index)) | u32::from(two(2 * index + 1)) << 16),
    }
}

/// A float8e8m0: a power of two; 255 is NaN.
fn e8m0(code: u8) -> f32 {
    if code == 255 { f32::NAN } else { 2f32.powi(i32::from(code) - 127) }
}
