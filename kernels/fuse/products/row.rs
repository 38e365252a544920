//! The kernels for products of one row (`row.cu`): how blocks and warps share the work, and their parameters.
//!
//! A slice is 256 columns, a tile 16 outputs. A lot is the tiles of one product (gated: of two) that a block's warps take at
//! once; `along` warps share a tile's slices. An item is a warp's tile (gated: two) for one slice.

use super::{MOST, Segment};
use crate::cuda::{ConstantProduct, DevPtr, Device};
use crate::kernel_params;
use crate::quant::nbits::ZeroPoint;
use abi::Result;
use abi::cuda::{Function, LaunchShape};

/// Rows of a tile (`kTileRows`).
const TILE: usize = 16;
/// Columns of a slice (`kSlice`).
const SLICE: usize = 256;
/// Bytes of a tile's 4-bit weights for a slice (`kPieceBytes`), and of a warp's prepared slice of the row.
const PIECE: usize = 2048;
const PREPARED: usize = 1024;
/// Tiles of 16-bit weights are multiplied by quarters of slices (`kPieces`).
const PIECES: usize = 4;
/// No product's first lot.
const NONE: u32 = u32::MAX;

kernel_params! {
    /// As in `row.cu`.
    pub struct RowParams {
        pub x: DevPtr,
        pub skip: DevPtr,
        pub gamma: DevPtr,
        pub sum: DevPtr,
        k: u32,
        along: u32,
        along_reciprocal: u32,
        sets: u32,
        rounds: u32,
        per_lot: u32,
        lots: u32,
        blocks: u32,
        gated: u32,
        epsilon: f32,
        inverse_k: f32,
        pub hastens: u32,
        /// Each 4-bit product's first lot among those of all.
        first: [u32; MOST],
        pub(super) segments: [Segment; MOST],
    }
}

/// The kernel for one row of a cluster of products, with all that does not depend on a Run.
pub struct Row {
    pub function: Function,
    pub shape: LaunchShape,
    pub params: RowParams,
}

/// What is to be shared.
struct Work {
    /// Tiles of each 4-bit product; gated: of one of the pair.
    tiles: Vec<usize>,
    /// Tiles of 16-bit weights, in all.
    halves: usize,
    slices: usize,
    gated: bool,
    /// Bytes of a stage of a warp's ring.
    stage: usize,
    /// Whether a warp more makes the row's norm.
    norm: bool,
}

/// How blocks and warps share it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Split {
    along: usize,
    /// Of `along` warps.
    sets: usize,
    depth: usize,
    /// Slices that a warp takes of a tile.
    rounds: usize,
    lots: usize,
    /// Blocks that share the lots.
    blocks: usize,
}

impl Row {
    /// `kernel`: `lean_...`, whose twin this is. `norm`: the norm's epsilon. `None` when no such kernel takes the products.
    ///
    /// # Errors
    /// When this build has no such kernel.
    pub fn new(
        device: &Device,
        kernel: &str,
        products: &[ConstantProduct],
        norm: Option<f32>,
        gated: bool,
    ) -> Result<Option<Self>> {
        let Some(kind) = kernel.strip_prefix("lean_") else { return Ok(None) };
        let Some(work) = Work::of(products, norm.is_some(), gated) else { return Ok(None) };
        let (sms, limit) = (device.multiprocessors() as usize, device.shared_limit() as usize);
        let Some(split) = Split::best(&work, sms, limit) else { return Ok(None) };
        let k = products[0].weights.k();
        let way = if gated { "row_gated" } else { "row" };
        let depth = if split.depth == 1 { "once" } else { "ring" };
        let function = device.function("fuse_products_row", &format!("{way}_{depth}_{kind}"))?;
        let mut params = RowParams {
            x: DevPtr::NULL,
            skip: DevPtr::NULL,
            gamma: DevPtr::NULL,
            sum: DevPtr::NULL,
            k: k as u32,
            along: split.along as u32,
            along_reciprocal: (65536 / split.along + 1) as u32,
            sets: split.sets as u32,
            rounds: split.rounds as u32,
            per_lot: split.sets as u32,
            lots: split.lots as u32,
            blocks: split.blocks as u32,
            gated: u32::from(gated),
            epsilon: norm.unwrap_or(0.0),
            inverse_k: 1.0 / k as f32,
            hastens: 0,
            first: [NONE; MOST],
            segments: [Segment::default(); MOST],
        };
        let mut lots = 0;
        for (i, product) in products.iter().enumerate() {
            params.segments[i] = Segment::of(product);
            if product.layout.is_some() && !(gated && i > 0) {
                params.first[i] = lots;
                lots += params.segments[i].tiles.div_ceil(split.sets as u32);
            }
        }
        let threads = 32 * (split.workers() + usize::from(work.norm));
        let shape = LaunchShape {
            grid: [(split.blocks + work.halves) as u32, 1, 1],
            block: [threads as u32, 1, 1],
            shared: split.shared(&work) as u32,
            overlap: true,
        };
        Ok(Some(Self { function, shape, params }))
    }
}

impl Work {
    /// `None` when the kernels cannot.
    fn of(products: &[ConstantProduct], norm: bool, gated: bool) -> Option<Self> {
        let k = products[0].weights.k();
        let layout = products.iter().find_map(|p| p.layout)?;
        let bytes = layout.zero_point == ZeroPoint::Bytes;
        // Zero points are copied 16 bytes at a time: two blocks.
        if bytes && !k.is_multiple_of(2 * layout.block) {
            return None;
        }
        let unlike = products[0].weights.n() != products[products.len() - 1].weights.n();
        if gated && (unlike || products.iter().any(|p| p.layout.is_none())) {
            return None;
        }
        let own = if gated { 1 } else { products.len() };
        let of = |packed: bool| products[..own].iter().filter(move |p| p.layout.is_some() == packed);
        let blocks = SLICE / layout.block;
        Some(Self {
            tiles: of(true).map(|p| p.weights.tiles()).collect(),
            halves: of(false).map(|p| p.weights.tiles()).sum(),
            slices: k.div_ceil(SLICE),
            gated,
            stage: (1 + usize::from(gated)) * (PIECE + blocks * 32 + if bytes { blocks * 8 } else { 0 }),
            norm,
        })
    }
}

impl Split {
    /// The cheapest by [`Self::cycles`] of those that fit `limit` bytes of shared memory.
    fn best(work: &Work, sms: usize, limit: usize) -> Option<Self> {
        // Items of a warp that are under way at once, where it has several, as in `row.cu`.
        let (warps, ring) = if work.gated { (8, 4) } else { (16, 2) };
        let mut best: Option<(f64, Self)> = None;
        for along in 1..=warps.min(work.slices) {
            let ways = |sets| [(sets, 1, 1), (sets, ring, 1), (sets, ring, 2), (sets, ring, 8), (sets, ring, 64)];
            for (sets, depth, held) in (1..=warps / along).flat_map(ways) {
                let Some(split) = Self::new(work, along, sets, depth, sms * held) else { continue };
                // A multiprocessor holds two blocks; more follow each other.
                let beside = held.min(2);
                let threads = along * sets * beside <= 16;
                if !threads || beside * (split.shared(work) + 1024) > limit {
                    continue;
                }
                let cycles = split.cycles(work, sms);
                if best.is_none_or(|(least, _)| cycles < least) {
                    best = Some((cycles, split));
                }
            }
        }
        best.map(|(_, split)| split)
    }

    /// With as many blocks, `most` of them, as make the fewest rounds over the lots. `None` for warps of several items at
    /// depth 1.
    fn new(work: &Work, along: usize, sets: usize, depth: usize, most: usize) -> Option<Self> {
        let lots: usize = work.tiles.iter().map(|n| n.div_ceil(sets)).sum();
        let rounds = work.slices.div_ceil(along);
        let turns = lots.div_ceil(most);
        if depth == 1 && (rounds > 1 || turns > 1 || (work.halves > 0 && sets < PIECES)) {
            return None;
        }
        Some(Self { along, sets, depth, rounds, lots, blocks: lots.div_ceil(turns.max(1)) })
    }

    fn workers(&self) -> usize {
        self.along * self.sets
    }

    /// Lots of a block.
    fn turns(&self) -> usize {
        self.lots.div_ceil(self.blocks.max(1))
    }

    /// Bytes of dynamic shared memory, as `row.cu` lays it out.
    fn shared(&self, work: &Work) -> usize {
        let rows = self.sets * (1 + usize::from(work.gated)) * TILE;
        let sums = self.turns() * rows * self.along.next_multiple_of(4);
        let halves = if work.halves > 0 { TILE * self.workers().next_multiple_of(4) } else { 0 };
        let slices = if self.rounds > 1 { self.workers() * self.rounds * PREPARED } else { 0 };
        self.workers() * self.depth * work.stage + 16 + sums.max(halves) * size_of::<f32>() + slices
    }

    /// Cycles of the busiest multiprocessor, roughly, as measured on an H200 (`BENCHMARKS.md`): what its warps issue, or
    /// what one of them waits for, item after item.
    fn cycles(&self, work: &Work, sms: usize) -> f64 {
        let (issued, waited) = if work.gated { (130.0, 1100.0) } else { (70.0, 750.0) };
        let items = (self.turns() * self.rounds) as f64;
        let held = self.blocks.div_ceil(sms) as f64;
        let issue = items * self.workers() as f64 * held * issued;
        // A warp's further slices of the row wait in shared memory; blocks past the second of a multiprocessor begin anew.
        let slices = (self.rounds - 1) as f64 * 600.0;
        let begins = (held - 2.0).max(0.0) * 1500.0;
        issue.max(items * waited) + slices + begins + if self.depth > 1 { 300.0 } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(tiles: &[usize], slices: usize, gated: bool) -> Work {
        Work { tiles: tiles.to_vec(), halves: 0, slices, gated, stage: 2304 * (1 + usize::from(gated)), norm: true }
    }

    #[test]
    fn small_products_are_one_item_a_warp() {
        let of = |tiles: &[usize], slices, gated| {
            let split = Split::best(&work(tiles, slices, gated), 132, 227 << 10).unwrap();
            (split.along, split.sets, split.depth)
        };
        assert_eq!(of(&[384, 128], 4, false), (4, 4, 1));
        assert_eq!(of(&[64], 8, false), (8, 1, 1));
        assert_eq!(of(&[64], 14, false), (14, 1, 1));
        assert_eq!(of(&[224], 4, true), (4, 2, 1));
    }

    #[test]
    fn large_products_stream_through_resident_blocks() {
        for (tiles, slices, gated) in
            [(15520, 4, false), (15520, 10, false), (768, 16, false), (256, 48, false), (768, 16, true)]
        {
            let split = Split::best(&work(&[tiles], slices, gated), 132, 227 << 10).unwrap();
            assert!(split.depth > 1 && split.blocks <= 2 * 132 && split.workers() >= 5, "{split:?}");
        }
    }

    #[test]
    fn all_work_is_shared_within_the_memory() {
        for (tiles, slices, gated) in [
            (vec![1], 1, false),
            (vec![15520], 4, false),
            (vec![15520], 16, false),
            (vec![256], 48, false),
            (vec![896], 16, true),
            (vec![1], 56, true),
        ] {
            let work = work(&tiles, slices, gated);
            for (sms, limit) in [(132, 227 << 10), (108, 163 << 10), (20, 99 << 10)] {
                let split = Split::best(&work, sms, limit).unwrap();
                assert!(split.shared(&work) <= limit, "{split:?}");
                assert!(
                    split.along * split.rounds >= slices && split.blocks * split.turns() >= split.lots,
                    "{split:?}"
                );
                assert!(split.lots * split.sets >= tiles.iter().sum() && split.workers() <= 16, "{split:?}");
            }
        }
    }
}
