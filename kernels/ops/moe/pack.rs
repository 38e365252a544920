//! Experts' weights in device memory: one expert's fragments after the other's, as `experts.cuh` reads them.
//!
//! A gate and what it gates are one matrix there, whose tiles hold eight features of both. N, K, tile and chunk are those of
//! `quant::fragments`.

use super::experts::{Expert, Experts, float_at};
use super::problem::{Format, Gate, Matrix};
use crate::cuda::{DevPtr, Weights};
use crate::quant::fragments::{CHUNK, Shape, TILE, pack_elements, pack_rows};
use crate::quant::nbits::ZeroPoint;
use abi::tensor::AlignedBytes;
use abi::{DType, Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// What the kernels tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Codes {
    /// Integers with scales of the activations' type, bits each.
    Int(usize),
    /// Integers of 8 bits with float scales, for 16-bit activations.
    Wide8,
    MxFp4,
    NvFp4,
    /// E4M3 with float scales.
    Fp8,
    /// Elements of the activations' type.
    Dense,
}

impl Codes {
    /// The part of a kernel's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int(2) => "int2",
            Self::Int(4) => "int4",
            Self::Int(_) => "int8",
            Self::Wide8 => "wide8",
            Self::MxFp4 => "mxfp4",
            Self::NvFp4 => "nvfp4",
            Self::Fp8 => "fp8",
            Self::Dense => "dense",
        }
    }
}

/// How a projection, or a gate and what it gates, lies in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub codes: Codes,
    /// Features of the output.
    pub outputs: usize,
    /// Columns, padding excluded.
    pub k: usize,
    /// How rows go together.
    gate: Gate,
    /// Padding included.
    shape: Shape,
    /// Columns that share a scale; 0: all.
    pub block: usize,
    /// Whether integer zero points are stored.
    pub zeros: bool,
    /// Bytes of a scale.
    scale: usize,
    /// Blocks of a row whose scales lie together.
    pub together: usize,
}

/// Padding of K that may be worth it, in thousandths.
const PADDING: usize = 40;

impl Form {
    /// For `matrices` (a second one is what the first gates) of activations of type `dtype`.
    pub fn of(dtype: DType, gate: Gate, matrices: &[&Matrix], outputs: usize) -> Self {
        let k = matrices[0].k;
        let (codes, block, zeros) = match matrices[0].format {
            Format::Dense(_) => (Codes::Dense, 0, false),
            Format::Fp4 { block: 32 } => (Codes::MxFp4, 32, false),
            Format::Fp4 { block } => (Codes::NvFp4, block, false),
            Format::Fp8 { block } if block == 0 || block >= k => (Codes::Fp8, 0, false),
            Format::Fp8 { block } => (Codes::Fp8, 1 << block.trailing_zeros(), false),
            Format::Int(layout) => {
                let layouts =
                    || matrices.iter().filter_map(|m| if let Format::Int(l) = m.format { Some(l) } else { None });
                let bits = layouts().map(|l| l.bits).max().unwrap_or(layout.bits);
                let zeros = layouts().any(|l| l.zero_point == ZeroPoint::Bytes);
                let own = dtype == DType::F32 || layouts().all(|l| l.scale == dtype);
                (if own { Codes::Int(bits) } else { Codes::Wide8 }, layout.block, zeros)
            }
        };
        let bits = match codes {
            Codes::Int(bits) => bits,
            Codes::Wide8 | Codes::Fp8 => 8,
            Codes::MxFp4 | Codes::NvFp4 => 4,
            Codes::Dense => {
                if dtype == DType::F32 {
                    32
                } else {
                    16
                }
            }
        };
        let scale = match codes {
            Codes::Int(_) if dtype != DType::F32 => 2,
            Codes::Int(_) | Codes::Wide8 | Codes::Fp8 => 4,
            Codes::MxFp4 | Codes::NvFp4 => 1,
            Codes::Dense => 0,
        };
        // Whole groups of two chunks are what the leanest kernels take.
        let chunks = k.div_ceil(CHUNK);
        let even = chunks.next_multiple_of(2);
        let lean = matches!(codes, Codes::Int(4) | Codes::MxFp4) && scale < 4;
        let chunks = if lean && (even - chunks) * 1000 <= chunks * PADDING { even } else { chunks };
        let together =
            if bits == 4 && chunks.is_multiple_of(2) && (block == 32 || block == 64) { 128 / block } else { 1 };
        let n = if gate == Gate::None { outputs } else { outputs.next_multiple_of(TILE / 2) * 2 };
        let shape = Shape { n, k: if chunks * CHUNK > k { chunks * CHUNK } else { k }, bits };
        Self { codes, outputs, k, gate, shape, block, zeros, scale, together }
    }

    /// Whether a gate goes with each feature.
    pub fn paired(&self) -> bool {
        self.gate != Gate::None
    }

    /// Whether the leanest kernels take this: 4 bits, whole groups of 128 columns, blocks that share one.
    pub fn lean(&self) -> bool {
        let codes = matches!(self.codes, Codes::Int(4) | Codes::MxFp4) && self.scale < 4;
        codes && self.shape.chunks().is_multiple_of(2) && matches!(self.block, 32 | 64 | 128)
    }

    /// Whether the kernels multiply with experts' factors; elsewhere scales hold them.
    pub fn has_globals(&self) -> bool {
        matches!(self.codes, Codes::MxFp4 | Codes::NvFp4)
    }

    /// Bits a weight.
    pub fn bits(&self) -> usize {
        self.shape.bits
    }

    /// Blocks of a row, those of padding included.
    fn blocks(&self) -> usize {
        if self.block == 0 { 1 } else { (self.shape.chunks() * CHUNK).div_ceil(self.block) }
    }

    /// Where an expert's scales, zero points and end are.
    fn places(&self) -> [usize; 3] {
        let pairs = self.shape.tiles() * self.blocks() * 8;
        let zero = match self.shape.bits {
            _ if !self.zeros => 0,
            8 => 2,
            _ => 1,
        };
        let scales = self.shape.bytes().next_multiple_of(256);
        let zeros = (scales + pairs * 2 * self.scale).next_multiple_of(256);
        [scales, zeros, (zeros + pairs * zero).next_multiple_of(256)]
    }

    /// Bytes of an expert.
    pub fn bytes(&self) -> usize {
        self.places()[2]
    }

    /// The first expert's weights, at `data`.
    pub fn weights(&self, data: DevPtr) -> Weights {
        let [scales, zeros, _] = self.places();
        let shift = if self.block == 0 { 31 } else { self.block.trailing_zeros() };
        let zeros = if self.zeros { data.plus(zeros) } else { DevPtr::NULL };
        Weights::halves(&self.shape, data).with_blocks(self.k, self.blocks(), shift, [data.plus(scales), zeros])
    }

    /// Which matrix, and which of its rows, packed row `at` is.
    fn row(&self, at: usize) -> Option<(usize, usize)> {
        let (tile, r) = (at / TILE, at % TILE);
        let (half, i) = match self.gate {
            Gate::None => (0, at),
            _ => (r / (TILE / 2), tile * (TILE / 2) + r % (TILE / 2)),
        };
        (i < self.outputs).then_some(match self.gate {
            Gate::None => (0, i),
            Gate::Interleaved => (0, 2 * i + half),
            Gate::Halves => (0, half * self.outputs + i),
            Gate::Separate => (half, i),
        })
    }

    /// Index of the pair of scales of `block` of row `g` (and `g + 8`) of a tile.
    fn pair(&self, tile: usize, block: usize, g: usize) -> usize {
        let inside = block % self.together;
        (tile * self.blocks() + block - inside) * 8 + g * self.together + inside
    }

    /// Packs one expert of each matrix.
    fn pack(&self, experts: &[Expert<'_>], out: &mut [u8]) {
        let [scales_at, zeros_at, _] = self.places();
        let (weights, rest) = out.split_at_mut(scales_at);
        let (scales, zeros) = rest.split_at_mut(zeros_at - scales_at);
        let widened: Vec<_> = experts.iter().map(|e| widened(e, self.shape.bits)).collect();
        let row = |at: usize| {
            let Some((which, n)) = self.row(at) else { return &[][..] };
            let weights = widened[which].as_deref().unwrap_or(experts[which].weights);
            let bytes = weights.len() / experts[which].matrix.n;
            &weights[n * bytes..(n + 1) * bytes]
        };
        let weights = &mut weights[..self.shape.bytes()];
        if self.codes == Codes::Dense {
            pack_elements(&self.shape, row, weights);
        } else {
            pack_rows(&self.shape, row, weights);
        }
        for at in 0..self.shape.tiles() * TILE {
            let Some((which, n)) = self.row(at) else { continue };
            let (tile, g, half) = (at / TILE, at % 8, at % TILE / 8);
            for block in 0..self.blocks() {
                let pair = self.pair(tile, block, g);
                if self.scale > 0 {
                    self.scale(&experts[which], n, block, &mut scales[(2 * pair + half) * self.scale..][..self.scale]);
                }
                if self.zeros {
                    let zero = zero_point(&experts[which], n, block, self.shape.bits);
                    match self.shape.bits {
                        8 => zeros[2 * pair + half] = zero,
                        _ if half == 0 => zeros[pair] = zeros[pair] & 0xf0 | zero,
                        _ => zeros[pair] = zeros[pair] & 0x0f | zero << 4,
                    }
                }
            }
        }
    }

    /// Writes the scale of `block` of row `n`; what is past K has none.
    fn scale(&self, from: &Expert<'_>, n: usize, block: usize, out: &mut [u8]) {
        let k = from.matrix.k;
        if block * self.block >= k {
            return out.fill(0);
        }
        match from.matrix.format {
            Format::Int(l) if self.scale == 2 => {
                out.copy_from_slice(&from.scales[(n * l.blocks() + block) * 2..][..2]);
            }
            Format::Int(l) => {
                let scale = float_at(l.scale, from.scales, n * l.blocks() + block) * from.global;
                out.copy_from_slice(&scale.to_le_bytes());
            }
            Format::Fp4 { block: size } => {
                let at = 2 * (n * (k / size) + block);
                let bits = u16::from_le_bytes([from.scales[at], from.scales[at + 1]]);
                out[0] = if self.codes == Codes::MxFp4 { (bits >> 7) as u8 } else { e4m3_byte(bits) };
            }
            Format::Fp8 { block: size } => {
                let first = block * self.block;
                let columns = if self.block == 0 { k } else { self.block.min(k - first) };
                let scale = match size {
                    0 => 1.0,
                    _ => float_at(DType::F32, from.scales, n / size * k.div_ceil(size) + first / size),
                };
                // The kernels' decoding has no NaN.
                let is_nan = from.weights[n * k + first..][..columns].iter().any(|code| code & 0x7f == 0x7f);
                let scale = if is_nan { f32::NAN } else { scale * from.global };
                out.copy_from_slice(&scale.to_le_bytes());
            }
            Format::Dense(_) => {}
        }
    }
}

/// The E4M3 byte whose value, not negative, `bits` of a bfloat16 is.
fn e4m3_byte(bits: u16) -> u8 {
    let value = f32::from_bits(u32::from(bits) << 16);
    if value.is_nan() {
        return 0x7f;
    }
    let sign = (bits >> 8) as u8 & 0x80;
    let magnitude = value.abs();
    if magnitude < 2f32.powi(-6) {
        return sign | (magnitude * 512.0) as u8;
    }
    // From bfloat16's exponent bias to E4M3's; three of seven bits of mantissa.
    sign | (((bits & 0x7fff) >> 4) - ((127 - 7) << 3)) as u8
}

/// How far codes move when they get `bits`, so that the default zero point stays the default.
fn shift(own: usize, bits: usize) -> u8 {
    ((1u32 << (bits - 1)) - (1u32 << (own - 1))) as u8
}

/// An expert's integers in `bits` each, where they have fewer: [N, K in whole blocks].
fn widened(from: &Expert<'_>, bits: usize) -> Option<Vec<u8>> {
    let Format::Int(l) = from.matrix.format else { return None };
    if l.bits == bits {
        return None;
    }
    let per_byte = 8 / l.bits;
    let mut out = vec![0u8; from.weights.len() * bits / l.bits];
    for i in 0..from.weights.len() * per_byte {
        let code = from.weights[i / per_byte] >> (i % per_byte * l.bits) & (0xff >> (8 - l.bits));
        out[i * bits / 8] |= (code + shift(l.bits, bits)) << (i * bits % 8);
    }
    Some(out)
}

/// The zero point of `block` of row `n`, for codes of `bits`.
fn zero_point(from: &Expert<'_>, n: usize, block: usize, bits: usize) -> u8 {
    let Format::Int(l) = from.matrix.format else { return 0 };
    if l.zero_point != ZeroPoint::Bytes || block >= l.blocks() {
        return 1 << (bits - 1);
    }
    let row = (l.blocks() * l.bits).div_ceil(8);
    let code = from.zero_points[n * row + block * l.bits / 8] >> (block * l.bits % 8) & (0xff >> (8 - l.bits));
    code + shift(l.bits, bits)
}

/// Packs all experts, one by one on a few threads, and hands `put` each with its number. `done` is called after each: what
/// the source's pages held may go.
///
/// # Errors
/// When memory is short, or `put` fails.
pub(super) fn each(
    form: &Form,
    from: &[Experts<'_>],
    put: impl Fn(usize, &[u8]) -> Result<()> + Sync,
    done: impl Fn() + Sync,
) -> Result<()> {
    /// Bytes that are worth a thread.
    const SHARE: usize = 32 << 20;
    let (experts, bytes) = (from[0].count(), form.bytes());
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    let work = || -> Result<()> {
        let memory = |asked: usize| {
            AlignedBytes::try_zeroed(asked).ok_or_else(|| Error::Memory { asked, purpose: "expert weights".into() })
        };
        let mut packed = memory(bytes)?;
        let mut sources = from.iter().map(|f| memory(f.matrix.sizes().total())).collect::<Result<Vec<_>>>()?;
        loop {
            let e = next.fetch_add(1, Ordering::Relaxed);
            if e >= experts {
                return Ok(());
            }
            let views: Vec<_> =
                from.iter().zip(&mut sources).map(|(f, room)| f.expert(e, room.as_mut_slice())).collect();
            form.pack(&views, packed.as_mut_slice());
            put(e, packed.as_slice())?;
            done();
        }
    };
    let threads =
        (experts * bytes / SHARE).clamp(1, std::thread::available_parallelism().map_or(1, usize::from).min(16));
    let report = || {
        if let Err(error) = work() {
            next.store(experts, Ordering::Relaxed);
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(report);
        }
        report();
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
