//! How products of many rows are cut up among blocks: the tiles that GEMM kernels make, and the choice between them.
//!
//! M: rows of the output, N: its columns, K: what is summed up, in chunks of 64.

use super::Device;
use abi::Result;
use abi::cuda::{Function, LaunchShape};

/// A GEMM kernel's tile: its size, and what it takes.
struct Tile {
    /// As in the kernel's name.
    name: &'static str,
    rows: usize,
    columns: usize,
    threads: u32,
    /// Stages of quantised weights, and bytes of a column's scales and zero points in each.
    quantised: (usize, usize),
    /// Blocks that a multiprocessor holds.
    resident: usize,
    /// Microseconds that a chunk takes, and how many more for each block on the multiprocessor (timed on an H200).
    chunk: f32,
    each: f32,
}

/// `gemm.cuh`, for any device.
static TILES: [Tile; 2] =
    [Tile { name: "large", rows: 128, columns: 128, resident: 2, chunk: 2.1, each: 0.4, ..SMALL }, SMALL];
const SMALL: Tile =
    Tile { name: "small", rows: 64, columns: 64, threads: 128, quantised: (3, 0), resident: 3, chunk: 1.0, each: 0.13 };

/// `wgemm.cuh`, for Hopper.
static HOPPER_TILES: [Tile; 3] = [
    Tile { name: "large", rows: 128, columns: 256, threads: 256, resident: 1, chunk: 0.0, each: 1.0, ..HOPPER_SMALL },
    Tile { name: "medium", rows: 64, columns: 256, threads: 256, resident: 1, chunk: 0.0, each: 0.78, ..HOPPER_SMALL },
    HOPPER_SMALL,
];
const HOPPER_SMALL: Tile = Tile { quantised: (4, 16), resident: 4, chunk: 0.3, each: 0.2, ..SMALL };

impl Tile {
    /// Dynamic shared memory of a block.
    fn shared(&self, bits: usize) -> u32 {
        const STAGES: usize = 3;
        let (stages, scales) = if bits < 16 { self.quantised } else { (STAGES, 0) };
        let stages = STAGES * self.rows * 128 + stages * self.columns * (8 * bits + scales);
        // At the end the output takes the stages' place.
        stages.max(self.rows * (self.columns + 8) * 2) as u32
    }

    fn blocks(&self, [m, n]: [usize; 2]) -> usize {
        m.div_ceil(self.rows) * n.div_ceil(self.columns)
    }

    /// Microseconds that `blocks` of `chunks` each take.
    fn time(&self, blocks: usize, chunks: usize, sms: usize) -> f32 {
        /// Before a block's first product and behind its last one.
        const ENDS: f32 = 2.5;
        let round = |held: usize| ENDS + chunks as f32 * (self.chunk + self.each * held as f32);
        let slots = sms * self.resident;
        let rest = (blocks % slots).div_ceil(sms);
        (blocks / slots) as f32 * round(self.resident) + if rest > 0 { round(rest) } else { 0.0 }
    }
}

/// Microseconds that it takes to add up `parts` of an output.
fn adding([m, n]: [usize; 2], parts: usize) -> f32 {
    const LAUNCH: f32 = 2.0;
    /// Bytes a microsecond, to L2 and back.
    const TRAFFIC: f32 = 2.8e6;
    if parts > 1 { LAUNCH + (m * n * parts * size_of::<f32>()) as f32 / TRAFFIC } else { 0.0 }
}

/// The fastest of `tiles` for `batch` products of `size` (M, N), and the parts of K that its blocks share, none of them empty.
fn choose(tiles: &[&Tile], size: [usize; 2], chunks: usize, batch: usize, sms: usize) -> (usize, usize) {
    /// Fewer chunks do not fill a pipeline.
    const FEWEST: usize = 4;
    let most = if batch == 1 { (chunks / FEWEST).max(1) } else { 1 };
    let mut best = (f32::INFINITY, (0, 1));
    for (i, tile) in tiles.iter().enumerate() {
        for parts in 1..=most {
            let each = chunks.div_ceil(parts);
            if parts > 1 && chunks.div_ceil(each) < parts {
                continue;
            }
            let time = tile.time(tile.blocks(size) * batch * parts, each, sms) + adding(size, parts);
            if time < best.0 {
                best = (time, (i, parts));
            }
        }
    }
    best.1
}

/// The GEMM kernels for one type of activations and one kind of weights.
pub(super) struct GemmKernels {
    kernels: Vec<(&'static Tile, Function)>,
    bits: usize,
}

impl GemmKernels {
    /// The kernels that suit the device. `find(true, name)` finds one for Hopper, `find(false, name)` one for any device.
    ///
    /// # Errors
    /// As `find`.
    pub fn new(device: &Device, bits: usize, find: impl Fn(bool, &str) -> Result<Function>) -> Result<Self> {
        let hopper = device.info().capability.0 == 9;
        let tiles: &'static [Tile] = if hopper { &HOPPER_TILES } else { &TILES };
        // The last one is the smallest.
        let fitting = tiles.iter().filter(|tile| tile.shared(bits) <= device.shared_limit());
        let fitting = if fitting.clone().count() > 0 { fitting.collect() } else { vec![&tiles[tiles.len() - 1]] };
        let kernels = fitting.into_iter().map(|tile| Ok((tile, find(hopper, tile.name)?))).collect::<Result<_>>()?;
        Ok(Self { kernels, bits })
    }

    /// The kernel for `batch` products of `size` (M, N), and its grid: tiles, parts of K, batch.
    pub fn choose(&self, size: [usize; 2], chunks: usize, batch: usize, sms: usize) -> (&Function, LaunchShape) {
        let tiles: Vec<&Tile> = self.kernels.iter().map(|(tile, _)| *tile).collect();
        let (i, parts) = choose(&tiles, size, chunks, batch, sms);
        let (tile, function) = &self.kernels[i];
        let grid = [tile.blocks(size) as u32, parts as u32, batch as u32];
        (function, LaunchShape { grid, block: [tile.threads, 1, 1], shared: tile.shared(self.bits), overlap: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMS: usize = 132;

    fn chosen(size: [usize; 2], k: usize, batch: usize) -> (&'static str, usize) {
        let tiles: Vec<&Tile> = HOPPER_TILES.iter().collect();
        let (i, parts) = choose(&tiles, size, k.div_ceil(64), batch, SMS);
        (tiles[i].name, parts)
    }

    #[test]
    fn many_tiles_are_large_and_whole() {
        assert_eq!(chosen([4096, 8224], 1024, 1), ("large", 1));
        assert_eq!(chosen([4096, 4096], 12288, 1), ("large", 1));
        assert_eq!(chosen([4096, 1024], 2048, 1), ("large", 1));
    }

    #[test]
    fn few_tiles_share_out_k() {
        assert_eq!(chosen([1024, 1024], 3584, 1), ("large", 4));
        assert_eq!(chosen([64, 12288], 4096, 1), ("medium", 2));
        assert_eq!(chosen([64, 4096], 12288, 1), ("medium", 8));
        assert_eq!(chosen([64, 64], 128, 1), ("small", 1));
        assert_eq!(chosen([64, 1024], 4096, 300).1, 1, "a batch has blocks enough, and one output each");
    }

    #[test]
    fn no_part_is_empty() {
        for chunks in 0..200 {
            for sms in [1, 30, SMS] {
                let (_, parts) = choose(&[&TILES[0], &TILES[1]], [70, 300], chunks, 1, sms);
                let each = chunks.div_ceil(parts);
                assert!(parts == 1 || (parts - 1) * each < chunks, "{chunks} in {parts}");
            }
        }
    }

    #[test]
    fn stages_are_as_in_the_kernels() {
        let [large, medium, small] = &HOPPER_TILES;
        assert_eq!([large.shared(4), medium.shared(4), small.shared(4)], [98304, 73728, 36864]);
        assert_eq!([large.shared(16), medium.shared(16), small.shared(16)], [147456, 122880, 49152]);
        assert_eq!([TILES[0].shared(4), TILES[1].shared(16)], [61440, 49152]);
    }
}
