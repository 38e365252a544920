//! Block-quantised matrices of 2, 4 or 8 bits in panels of 16 columns: what MatMulNBits kernels stream.
//!
//! K: input features, N: output features. B arrives as ONNX stores it: for each column n, blocks along K, low bits
//! first. Packed, a panel holds 16 columns: first every block's 16 scales, then every block's 16 zero points (if
//! any), then every block's weights, each part on a 64-byte boundary. Weights come in vectors of 64 bytes, 4 for each
//! column: byte i of column c in vector v holds, at bits `bits * j`, the value at
//! `k = 4 * (v * 8 / bits + j) + i`, so that four neighbours in k make one 32-bit lane of an int8 dot product.
//!
//! Scales stay in the type they arrived in; columns past N are zero.

use crate::cpu::float::Float;
use crate::cpu::simd::LANES;
use abi::tensor::AlignedBytes;
use abi::{DType, Error, Result};
use half::{bf16, f16};

/// Where a matrix's zero points come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ZeroPoint {
    /// `2^(bits - 1)` everywhere.
    Default,
    /// One byte a block and column (packed `bits` wide in the model).
    Bytes,
    /// One float a block and column, of the scales' type.
    Float,
}

/// The shape of a packed matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Columns.
    pub n: usize,
    /// Rows, padding excluded.
    pub k: usize,
    /// Bits a weight: 2, 4 or 8.
    pub bits: usize,
    /// Weights a block: a power of two, 16 or more.
    pub block: usize,
    /// Type of scales and float zero points: float, float16 or bfloat16.
    pub scale: DType,
    /// The zero points' kind.
    pub zero_point: ZeroPoint,
}

/// The constants of one matrix as the model stores them.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// `[N, blocks, block * bits / 8]`.
    pub b: &'a [u8],
    /// `[N, blocks]` of the layout's scale type.
    pub scales: &'a [u8],
    /// Nothing, packed bytes `[N, ceil(blocks * bits / 8)]`, or floats `[N, blocks]`, by the layout's kind.
    pub zero_points: &'a [u8],
}

impl Layout {
    /// Blocks along K, the last one maybe partial.
    pub fn blocks(&self) -> usize {
        self.k.div_ceil(self.block)
    }

    /// K rounded up to whole blocks.
    pub fn padded_k(&self) -> usize {
        self.blocks() * self.block
    }

    /// Panels along N, the last one maybe partial.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(LANES)
    }

    /// Vectors of 64 bytes a block has in a panel.
    pub fn vectors(&self) -> usize {
        self.block * self.bits / 32
    }

    /// Bytes of a block's weights in one column.
    pub fn blob(&self) -> usize {
        self.block * self.bits / 8
    }

    /// Bytes of a scale.
    pub fn scale_bytes(&self) -> usize {
        if self.scale == DType::F32 { 4 } else { 2 }
    }

    /// Bytes of a block's 16 zero points in a panel.
    pub fn zero_point_stride(&self) -> usize {
        match self.zero_point {
            ZeroPoint::Default => 0,
            ZeroPoint::Bytes => LANES,
            ZeroPoint::Float => LANES * self.scale_bytes(),
        }
    }

    /// Where a panel's zero points begin.
    pub fn zero_points_at(&self) -> usize {
        (self.blocks() * LANES * self.scale_bytes()).next_multiple_of(64)
    }

    /// Where a panel's weights begin.
    pub fn weights_at(&self) -> usize {
        self.zero_points_at() + (self.blocks() * self.zero_point_stride()).next_multiple_of(64)
    }

    /// Bytes of a panel.
    pub fn panel_bytes(&self) -> usize {
        self.weights_at() + self.blocks() * self.vectors() * 64
    }

    /// Bytes of the packed matrix; `None` when they overflow.
    pub fn bytes(&self) -> Option<usize> {
        self.panel_bytes().checked_mul(self.panels())
    }

    /// Bytes that B, the scales and the zero points take in the model.
    pub fn source_bytes(&self) -> (usize, usize, usize) {
        let zero_points = match self.zero_point {
            ZeroPoint::Default => 0,
            ZeroPoint::Bytes => (self.blocks() * self.bits).div_ceil(8),
            ZeroPoint::Float => self.blocks() * self.scale_bytes(),
        };
        let blocks = self.n * self.blocks();
        (blocks * self.blob(), blocks * self.scale_bytes(), self.n * zero_points)
    }

    /// Packs panel `panel` into `out` ([`Self::panel_bytes`], every byte is written).
    pub fn pack_panel(&self, panel: usize, from: &Source<'_>, out: &mut [u8]) {
        let columns = LANES.min(self.n - panel * LANES);
        let (head, weights) = out[..self.panel_bytes()].split_at_mut(self.weights_at());
        head.fill(0);
        if columns < LANES {
            weights.fill(0);
        }
        for c in 0..columns {
            let n = panel * LANES + c;
            self.pack_column(c, n, from, head);
            let b = &from.b[n * self.blocks() * self.blob()..][..self.blocks() * self.blob()];
            for (v, word) in b.chunks_exact(4).enumerate() {
                let word = [word[0], word[1], word[2], word[3]];
                weights[v * 64 + c * 4..][..4].copy_from_slice(&shuffle(self.bits, word));
            }
        }
    }

    /// Packs the scales and zero points of column `n`, which is column `c` of its panel.
    fn pack_column(&self, c: usize, n: usize, from: &Source<'_>, head: &mut [u8]) {
        let (blocks, size) = (self.blocks(), self.scale_bytes());
        for b in 0..blocks {
            let at = (n * blocks + b) * size;
            head[(b * LANES + c) * size..][..size].copy_from_slice(&from.scales[at..at + size]);
        }
        let zero_points = self.zero_points_at();
        match self.zero_point {
            ZeroPoint::Default => {}
            ZeroPoint::Bytes => {
                let row = (blocks * self.bits).div_ceil(8);
                let row = &from.zero_points[n * row..][..row];
                for b in 0..blocks {
                    let bit = b * self.bits;
                    let mask = (1u16 << self.bits) as u8;
                    head[zero_points + b * LANES + c] = (row[bit / 8] >> (bit % 8)) & mask.wrapping_sub(1);
                }
            }
            ZeroPoint::Float => {
                for b in 0..blocks {
                    let at = (n * blocks + b) * size;
                    let zp = &from.zero_points[at..at + size];
                    head[zero_points + (b * LANES + c) * size..][..size].copy_from_slice(zp);
                }
            }
        }
    }

    /// Packs a whole matrix into memory of its own. `done` is called now and then: the source's pages read so far may
    /// go, so that no matrix is in memory twice.
    pub fn pack(&self, from: &Source<'_>, done: impl Fn()) -> Result<Packed> {
        let asked = self.bytes().unwrap_or(usize::MAX);
        let mut bytes =
            AlignedBytes::try_zeroed(asked).ok_or_else(|| Error::Memory { asked, purpose: "packed weights".into() })?;
        let panels = bytes.as_mut_slice().chunks_exact_mut(self.panel_bytes().max(1));
        for (panel, out) in panels.enumerate() {
            self.pack_panel(panel, from, out);
            if panel % (DONE_BYTES / self.panel_bytes().max(1) + 1) == 0 {
                done();
            }
        }
        Ok(Packed { layout: *self, bytes })
    }
}

/// Whether float scales lose nothing as float16.
pub fn fit_half(scales: &[f32]) -> bool {
    scales.iter().all(|scale| f16::from_f32(*scale).to_f32().to_bits() == scale.to_bits())
}

/// The bytes of float scales as those of float16 scales.
pub fn halved(scales: &[u8]) -> Vec<u8> {
    let (scales, _) = scales.as_chunks::<4>();
    scales.iter().flat_map(|&scale| f16::from_f32(f32::from_le_bytes(scale)).to_le_bytes()).collect()
}

/// Packed bytes between two calls of `done` in [`Layout::pack`].
const DONE_BYTES: usize = 8 << 20;

/// Reorders one 32-bit word of weights from k order to the packed order; its own inverse for 8 bits and 2 bits.
fn shuffle(bits: usize, word: [u8; 4]) -> [u8; 4] {
    match bits {
        8 => word,
        4 => {
            // Nibbles n0..n7 become bytes n_i | n_{i + 4} << 4.
            let spread = |v: u32| {
                let v = (v | v << 8) & 0x00ff_00ff;
                (v | v << 4) & 0x0f0f_0f0f
            };
            let x = u32::from_le_bytes(word);
            (spread(x & 0xffff) | spread(x >> 16) << 4).to_le_bytes()
        }
        _ => {
            let mut out = [0; 4];
            for (i, out) in out.iter_mut().enumerate() {
                for (j, byte) in word.iter().enumerate() {
                    *out |= ((byte >> (2 * i)) & 3) << (2 * j);
                }
            }
            out
        }
    }
}

/// A packed matrix.
pub struct Packed {
    /// Its shape.
    pub layout: Layout,
    bytes: AlignedBytes,
}

impl Packed {
    /// The matrix.
    pub fn view(&self) -> View<'_> {
        View { layout: self.layout, bytes: self.bytes.as_slice() }
    }
}

/// A packed matrix in borrowed memory.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Its shape.
    pub layout: Layout,
    bytes: &'a [u8],
}

impl<'a> View<'a> {
    /// `None` when `bytes` does not hold the layout's bytes.
    pub fn new(layout: Layout, bytes: &'a [u8]) -> Option<Self> {
        (layout.bytes() == Some(bytes.len())).then_some(Self { layout, bytes })
    }

    /// Panel `panel`'s bytes.
    pub fn panel(&self, panel: usize) -> &'a [u8] {
        let size = self.layout.panel_bytes();
        &self.bytes[panel * size..][..size]
    }

    /// The scalar decode: column `n`, rounded to `T`, into `out` of K values.
    pub fn decode_column<T: Float>(&self, n: usize, out: &mut [T]) {
        let l = &self.layout;
        let (panel, c) = (self.panel(n / LANES), n % LANES);
        let (zero_points, weights) = (&panel[l.zero_points_at()..], &panel[l.weights_at()..]);
        let mask = 0xffu8 >> (8 - l.bits);
        for (b, out) in out[..l.k].chunks_mut(l.block).enumerate() {
            let at = b * LANES + c;
            let scale = float_at(l.scale, panel, at);
            let zero = match l.zero_point {
                ZeroPoint::Default => (1u32 << (l.bits - 1)) as f32,
                ZeroPoint::Bytes => f32::from(zero_points[at]),
                ZeroPoint::Float => float_at(l.scale, zero_points, at),
            };
            // A vector's word of this column holds 32 / bits neighbours in k, lowest bits first.
            for (v, out) in out.chunks_mut(32 / l.bits).enumerate() {
                let word = &weights[(b * l.vectors() + v) * 64 + c * 4..][..4];
                for (j, out) in out.chunks_mut(4).enumerate() {
                    for (byte, out) in word.iter().zip(out) {
                        let q = (byte >> (j * l.bits)) & mask;
                        *out = T::from_f32((f32::from(q) - zero) * scale);
                    }
                }
            }
        }
    }
}

/// Element `index` of an array of `dtype`.
fn float_at(dtype: DType, bytes: &[u8], index: usize) -> f32 {
    let two = |i: usize| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
    match dtype {
        DType::F16 => f16::from_bits(two(index)).to_f32(),
        DType::BF16 => bf16::from_bits(two(index)).to_f32(),
        _ => f32::from_bits(u32::from(two(2 * index)) | u32::from(two(2 * index + 1)) << 16),
    }
}
