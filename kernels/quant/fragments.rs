//! Matrices in the order in which a GPU's warps multiply them: one layout for 2-, 4-, 8- and 16-bit weights.
//!
//! N: rows of the matrix (output features), K: columns (input features). A tile is 16 rows, a chunk 64 columns, a unit 32
//! columns; a fragment is a 16 x 16 operand of one tensor core instruction. Lane `4 g + q` of a warp has of fragment `f` of
//! unit `u` rows `g` and `g + 8` at the four columns from `32 u + 8 q + 4 f` on. A lane's bytes of a chunk (its four fragments)
//! lie in vectors of 16 bytes (8 where weights have 2 bits), lane after lane; chunks of a tile follow each other, then tiles.
//! `kernels/cuda/fragments.cuh` reads this; most matrices are packed on the device.
//!
//! Behind the weights, each part on a 256-byte boundary: scales `[tile][block][g]` as pairs (row g, row g + 8), and zero
//! points in the same order: pairs of floats; a byte with row g's in the low four bits; or, for 8 bits, pairs of bytes.
//! What lies past N or K is zero.

use super::nbits::{Layout, ZeroPoint};

/// Rows of a tile.
pub const TILE: usize = 16;
/// Columns of a chunk.
pub const CHUNK: usize = 64;
const LANES: usize = 32;

/// The sizes of a matrix in fragments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// Bits a weight.
    pub bits: usize,
}

impl Shape {
    /// Tiles along N.
    pub fn tiles(&self) -> usize {
        self.n.div_ceil(TILE)
    }

    /// Chunks along K.
    pub fn chunks(&self) -> usize {
        self.k.div_ceil(CHUNK)
    }

    /// Bytes of one chunk of a tile.
    pub fn chunk_bytes(&self) -> usize {
        TILE * CHUNK * self.bits / 8
    }

    /// Bytes of the weights.
    pub fn bytes(&self) -> usize {
        self.tiles() * self.chunks() * self.chunk_bytes()
    }
}

/// Where the parts of a quantised matrix lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// The weights' sizes.
    pub shape: Shape,
    /// Blocks of a row, those of padding included.
    pub blocks: usize,
    /// Where the scales begin.
    pub scales_at: usize,
    /// Where the zero points begin.
    pub zeros_at: usize,
    /// Bytes of everything.
    pub bytes: usize,
}

/// The parts of a matrix of `layout`.
pub fn parts(layout: &Layout) -> Parts {
    let shape = Shape { n: layout.n, k: layout.k, bits: layout.bits };
    let blocks = (shape.chunks() * CHUNK).div_ceil(layout.block);
    let pairs = shape.tiles() * blocks * 8;
    let zero_bytes = match layout.zero_point {
        ZeroPoint::Default => 0,
        ZeroPoint::Bytes if layout.bits == 8 => 2,
        ZeroPoint::Bytes => 1,
        ZeroPoint::Float => 2 * layout.scale_bytes(),
    };
    let scales_at = shape.bytes().next_multiple_of(256);
    let zeros_at = (scales_at + pairs * 2 * layout.scale_bytes()).next_multiple_of(256);
    Parts { shape, blocks, scales_at, zeros_at, bytes: zeros_at + pairs * zero_bytes }
}

/// Packs weights of 2, 4 or 8 bits: `row(n)` are a row's bytes along K, low bits first; what is past its end is zero.
pub fn pack_rows<'a>(shape: &Shape, row: impl Fn(usize) -> &'a [u8], out: &mut [u8]) {
    let tile_bytes = shape.chunks() * shape.chunk_bytes();
    let word_bytes = (4 * shape.bits).min(16);
    // A lane's four columns of a fragment.
    let piece = shape.bits / 2;
    for (tile, out) in out.chunks_exact_mut(tile_bytes.max(1)).enumerate() {
        for g in 0..8 {
            let (low, high) = (row(tile * TILE + g), row(tile * TILE + g + 8));
            for (chunk, out) in out.chunks_exact_mut(shape.chunk_bytes()).enumerate() {
                for fragment in 0..4 {
                    for q in 0..4 {
                        let column = chunk * CHUNK + fragment / 2 * 32 + q * 8 + fragment % 2 * 4;
                        let at = column * shape.bits / 8;
                        let words = fragment_words(shape.bits, bytes_at(low, at, piece), bytes_at(high, at, piece));
                        // Where the lane's bytes of this fragment begin.
                        let mut byte = fragment * shape.bits;
                        let lane = 4 * g + q;
                        if shape.bits == 2 {
                            // Two fragments share a word: the even one has the low byte of each half.
                            byte = fragment / 2 * 4 + fragment % 2;
                            let to = lane * word_bytes + byte;
                            out[to] = words[0] as u8;
                            out[to + 2] = (words[0] >> 16) as u8;
                            continue;
                        }
                        let to = (byte / word_bytes * LANES + lane) * word_bytes + byte % word_bytes;
                        for (word, out) in words.iter().zip(out[to..to + shape.bits].chunks_exact_mut(4)) {
                            out.copy_from_slice(&word.to_le_bytes());
                        }
                    }
                }
            }
        }
    }
}

/// Packs whole elements of 16 or 32 bits: as [`pack_rows`]. Vectors of 16 bytes hold, of one fragment, both rows' columns in
/// pairs (16 bits), or one row's four columns, row g's vector first (32 bits).
pub fn pack_elements<'a>(shape: &Shape, row: impl Fn(usize) -> &'a [u8], out: &mut [u8]) {
    let tile_bytes = shape.chunks() * shape.chunk_bytes();
    let size = shape.bits / 8;
    // Where each pair of columns, or row of four, of rows g and g + 8 begins: a lane's vectors are LANES * 16 bytes apart.
    let (run, places) = match size {
        2 => (4, [[0, 8], [4, 12]]),
        _ => (8, [[0, 8], [LANES * 16, LANES * 16 + 8]]),
    };
    for (tile, out) in out.chunks_exact_mut(tile_bytes.max(1)).enumerate() {
        for (half, places) in places.iter().enumerate() {
            for g in 0..8 {
                let row = row(tile * TILE + g + 8 * half);
                // Two columns at a time.
                for (i, pair) in row.chunks(run).enumerate() {
                    let column = 2 * i;
                    let (fragment, q) = (column / 32 % 2 * 2 + column / 4 % 2, column / 8 % 4);
                    let first = column / CHUNK * shape.chunk_bytes() + fragment * LANES * 8 * size + (4 * g + q) * 16;
                    let at = first + places[column / 2 % 2];
                    out[at..at + pair.len()].copy_from_slice(pair);
                }
            }
        }
    }
}

/// `len` (1, 2 or 4) bytes at `at`, zeros past the end.
#[inline(always)]
fn bytes_at(row: &[u8], at: usize, len: usize) -> u32 {
    if at + 4 <= row.len() {
        let word = u32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]);
        return if len == 4 { word } else { word & ((1 << (8 * len)) - 1) };
    }
    (0..len).fold(0, |word, i| word | u32::from(row.get(at + i).copied().unwrap_or(0)) << (8 * i))
}

/// The words of one lane's fragment, from four columns of row g (`low`) and of row g + 8 (`high`). For 4 and 2 bits the low
/// half holds the columns 0 and 2 of both rows in turn, the high half columns 1 and 3.
#[inline(always)]
fn fragment_words(bits: usize, low: u32, high: u32) -> [u32; 2] {
    match bits {
        8 => [low & 0xffff | high << 16, low >> 16 | high & 0xffff_0000],
        4 => {
            let even = low & 0x0f0f | (high & 0x0f0f) << 4;
            let odd = (low >> 4) & 0x0f0f | high & 0xf0f0;
            [even | odd << 16, 0]
        }
        _ => {
            let even = low & 0x33 | (high & 0x33) << 2;
            let odd = (low >> 2) & 0x33 | high & 0xcc;
            [even | odd << 16, 0]
        }
    }
}
