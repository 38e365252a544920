//! The kernel for products of one row (`row.cu`): how a block's warps share the work, and its parameters.
//!
//! A lot is the tiles of one product that a block takes at once; `along` warps share a tile's groups of columns.

use super::{MOST, Segment};
use crate::cuda::{ConstantProduct, DevPtr, Device};
use crate::kernel_params;
use abi::Result;
use abi::cuda::{Function, LaunchShape};

/// Warps of a block at most: with 128 registers a thread, all that a multiprocessor holds.
const WARPS: usize = 16;
/// Rows of a tile (`kTileRows`).
const TILE: usize = 16;
/// Columns of a group (`kGroupColumns`).
const GROUP: usize = 128;

kernel_params! {
    /// As in `row.cu`.
    pub struct RowParams {
        pub x: DevPtr,
        pub skip: DevPtr,
        pub gamma: DevPtr,
        pub sum: DevPtr,
        lots: u32,
        count: u32,
        k: u32,
        groups: u32,
        along: u32,
        per_lot: u32,
        rounds: u32,
        norm: u32,
        gated: u32,
        epsilon: f32,
        inverse_k: f32,
        pad: u32,
        /// Each product's first lot among those of all.
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

/// How a block's warps share the work.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Split {
    /// Tiles a warp (gated: of both products together) and groups of each that it takes at once: 2 and 1, or 1 and 2.
    tiles: usize,
    along: usize,
    /// Warps that share no tile.
    sets: usize,
    grid: usize,
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
        let k = products[0].weights.k();
        let (tiles, groups) = (tiles(products, gated), k / GROUP);
        if gated && (products[0].weights.n() != products[1].weights.n() || products.iter().any(|p| p.layout.is_none()))
        {
            return Ok(None);
        }
        let split = Split::best(&tiles, groups, gated, device.multiprocessors() as usize);
        let per_lot = split.per_lot(gated);
        let pitch = split.along.next_multiple_of(4) + 4;
        let sums = 2 * per_lot * (1 + usize::from(gated)) * TILE * pitch * size_of::<f32>();
        let shared = (k * 2 + 64 + GROUP * 2 + sums) as u32;
        if shared + 1024 > device.shared_limit() {
            return Ok(None);
        }
        let way = if split.tiles == 2 { "wide" } else { "deep" };
        let function = device.function("fuse_products_row", &format!("row_{way}_{kind}"))?;
        let at_once = 3 - split.tiles;
        let mut params = RowParams {
            x: DevPtr::NULL,
            skip: DevPtr::NULL,
            gamma: DevPtr::NULL,
            sum: DevPtr::NULL,
            lots: 0,
            count: products.len() as u32,
            k: k as u32,
            groups: groups as u32,
            along: split.along as u32,
            per_lot: per_lot as u32,
            rounds: groups.div_ceil(split.along * at_once) as u32,
            norm: u32::from(norm.is_some()),
            gated: u32::from(gated),
            epsilon: norm.unwrap_or(0.0),
            inverse_k: 1.0 / k as f32,
            pad: 0,
            first: [0; MOST],
            segments: [Segment::default(); MOST],
        };
        for (i, product) in products.iter().enumerate() {
            params.segments[i] = Segment::of(product);
            if !(gated && i > 0) {
                params.first[i] = params.lots;
                params.lots += params.segments[i].tiles.div_ceil(per_lot as u32);
            }
        }
        let threads = (32 * split.along * split.sets) as u32;
        let shape = LaunchShape { grid: [split.grid as u32, 1, 1], block: [threads, 1, 1], shared, overlap: true };
        Ok(Some(Self { function, shape, params }))
    }
}

/// Tiles of each product that has lots of its own.
fn tiles(products: &[ConstantProduct], gated: bool) -> Vec<usize> {
    let own = if gated { 1 } else { products.len() };
    products[..own].iter().map(|p| p.weights.tiles()).collect()
}

impl Split {
    /// The cheapest by [`Self::cycles`].
    fn best(tiles: &[usize], groups: usize, gated: bool, sms: usize) -> Self {
        let ways = if gated { &[2][..] } else { &[2, 1] };
        let mut best: Option<(f64, Self)> = None;
        for &way in ways {
            for along in 1..=WARPS.min(groups) {
                for sets in 1..=WARPS / along {
                    let split = Self { tiles: way, along, sets, grid: 0 }.on(tiles, gated, sms);
                    let cycles = split.cycles(tiles, groups, gated);
                    if best.is_none_or(|(least, _)| cycles < least) {
                        best = Some((cycles, split));
                    }
                }
            }
        }
        // `groups` is one at least, so that there was a way.
        best.map_or(Self { tiles: 2, along: 1, sets: 1, grid: 1 }, |(_, split)| split)
    }

    fn per_lot(&self, gated: bool) -> usize {
        if gated { self.sets } else { self.sets * self.tiles }
    }

    fn lots(&self, tiles: &[usize], gated: bool) -> usize {
        tiles.iter().map(|n| n.div_ceil(self.per_lot(gated))).sum()
    }

    /// With as many blocks as make the fewest rounds over the lots, one a multiprocessor.
    fn on(self, tiles: &[usize], gated: bool, sms: usize) -> Self {
        let lots = self.lots(tiles, gated).max(1);
        let rounds = lots.div_ceil(sms);
        Self { grid: lots.div_ceil(rounds), ..self }
    }

    /// Cycles of the longest block, roughly, as measured on an H200: a warp's group of activations takes about 70
    /// instructions, its product with a tile 110, the end of a lot 400 cycles; four schedulers share the warps.
    fn cycles(&self, tiles: &[usize], groups: usize, gated: bool) -> f64 {
        let rounds = self.lots(tiles, gated).div_ceil(self.grid) as f64;
        let at_once = (3 - self.tiles) as f64;
        let mine = groups.div_ceil(self.along) as f64;
        // The one group of a warp that has no other stays loaded.
        let loads = if mine == 1.0 { 70.0 } else { 70.0 * mine * rounds };
        let warps = (self.along * self.sets) as f64;
        let work = (loads + rounds * mine * 110.0 * self.tiles as f64) * (warps / 4.0).max(1.0) / 0.85;
        // What is under way at once hides the memory's latency.
        work + rounds * 400.0 + rounds * mine / at_once * 300.0 / warps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warps_share_the_work() {
        // Tiles of 1024 columns: eight groups.
        let split = Split::best(&[384, 128, 1, 1], 8, false, 132);
        assert_eq!((split.tiles, split.along, split.sets), (2, 8, 2), "{split:?}");
        for (tiles, groups, gated) in
            [(vec![1], 1, false), (vec![64], 28, false), (vec![224], 8, true), (vec![15520], 8, false)]
        {
            let split = Split::best(&tiles, groups, gated, 132);
            assert!(split.along * split.sets <= WARPS && split.grid >= 1 && split.grid <= 132, "{split:?}");
            assert!(split.lots(&tiles, gated) * split.per_lot(gated) >= tiles.iter().sum(), "{split:?}");
        }
    }
}
