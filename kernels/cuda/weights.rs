//! Parameter fields of the products: matrices in fragments and batches, as `fragments.cuh` and `batch.cuh` have them.

use super::{DevPtr, Field};
use crate::quant::fragments::{self, Shape, TILE};
use crate::quant::nbits::{Layout, ZeroPoint};
use std::ops::Range;

/// A matrix in fragments.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Weights {
    data: DevPtr,
    scales: DevPtr,
    zeros: DevPtr,
    n: u32,
    k: u32,
    tiles: u32,
    chunks: u32,
    blocks: u32,
    block_shift: u32,
    zero_kind: u32,
    pad: u32,
}

// SAFETY: three addresses, then eight 32-bit numbers: no padding.
unsafe impl Field for Weights {
    const POINTERS: &'static [u16] = &[0, 8, 16];
}

impl Weights {
    /// A matrix of `layout` whose parts begin at `data`.
    pub fn quantised(layout: &Layout, data: DevPtr) -> Self {
        let parts = fragments::parts(layout);
        let zero_kind = match layout.zero_point {
            ZeroPoint::Default => 0,
            ZeroPoint::Bytes => 1,
            ZeroPoint::Float => 2,
        };
        Self {
            scales: data.plus(parts.scales_at),
            zeros: if zero_kind == 0 { DevPtr::NULL } else { data.plus(parts.zeros_at) },
            blocks: parts.blocks as u32,
            block_shift: layout.block.trailing_zeros(),
            zero_kind,
            ..Self::halves(&parts.shape, data)
        }
    }

    /// Some of the tiles of a matrix of `layout` whose parts begin at `data`, as a matrix of its own.
    pub fn tiles_of(layout: &Layout, data: DevPtr, tiles: Range<usize>) -> Self {
        let (whole, parts) = (Self::quantised(layout, data), fragments::parts(layout));
        let before = tiles.start * parts.blocks * 8;
        let zeros = (parts.bytes - parts.zeros_at) / parts.shape.tiles().max(1) * tiles.start;
        Self {
            data: whole.data.plus(tiles.start * parts.shape.chunks() * parts.shape.chunk_bytes()),
            scales: whole.scales.plus(before * 2 * layout.scale_bytes()),
            zeros: whole.zeros.plus(zeros),
            n: (layout.n.min(tiles.end * TILE) - tiles.start * TILE) as u32,
            tiles: tiles.len() as u32,
            ..whole
        }
    }

    /// A matrix of 16-bit floats at `data`.
    pub fn halves(shape: &Shape, data: DevPtr) -> Self {
        Self {
            data,
            scales: DevPtr::NULL,
            zeros: DevPtr::NULL,
            n: shape.n as u32,
            k: shape.k as u32,
            tiles: shape.tiles() as u32,
            chunks: shape.chunks() as u32,
            blocks: 0,
            block_shift: 0,
            zero_kind: 0,
            pad: 0,
        }
    }

    /// The same with `k` columns, no more than there are, and scales of blocks of `1 << block_shift` columns, `blocks` a row;
    /// `zeros`: bytes, or null.
    pub fn with_blocks(self, k: usize, blocks: usize, block_shift: u32, [scales, zeros]: [DevPtr; 2]) -> Self {
        let zero_kind = if zeros.is_null() { 0 } else { 1 };
        Self { k: k as u32, blocks: blocks as u32, block_shift, scales, zeros, zero_kind, ..self }
    }

    /// The same rows without a column: every product is zero.
    pub fn without_columns(self) -> Self {
        Self { chunks: 0, ..self }
    }

    /// Addresses of weights, scales and zero points.
    pub fn addresses(&self) -> [DevPtr; 3] {
        [self.data, self.scales, self.zeros]
    }

    /// The 16-bit matrix `bytes` further on.
    pub fn plus(self, bytes: usize) -> Self {
        Self { data: self.data.plus(bytes), ..self }
    }

    /// Rows (output features).
    pub fn n(&self) -> usize {
        self.n as usize
    }

    /// Columns (input features).
    pub fn k(&self) -> usize {
        self.k as usize
    }

    /// Tiles along N.
    pub fn tiles(&self) -> usize {
        self.tiles as usize
    }

    /// Chunks along K.
    pub fn chunks(&self) -> usize {
        self.chunks as usize
    }
}

/// Dims that the batch of a product may have.
pub const BATCH_RANK: usize = 6;

/// A batch whose operands broadcast.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Batch {
    /// Elements of a left operand.
    pub x_matrix: u64,
    /// Number of dims.
    pub rank: u32,
    /// The product that the grid's first layer makes.
    pub first: u32,
    /// The output's batch dims.
    pub dims: [u32; BATCH_RANK],
    /// Left matrices from one index of each dim to the next.
    pub x: [u32; BATCH_RANK],
    /// Right matrices, likewise.
    pub w: [u32; BATCH_RANK],
}

// SAFETY: a 64-bit number, then twenty 32-bit ones: no padding.
unsafe impl Field for Batch {}

impl Batch {
    /// One product alone.
    pub const ONE: Self =
        Self { x_matrix: 0, rank: 0, first: 0, dims: [1; BATCH_RANK], x: [0; BATCH_RANK], w: [0; BATCH_RANK] };
}
