//! Attention on CUDA devices: which of the kernels of `flash.cu`, `mma.cu` and `decode.cu` takes a problem, and its launches.
//! GroupQueryAttention and Attention share it. Dims as in `cuda/attention.cuh`.

use crate::cuda::{DevPtr, Device, LaunchCx, linear, suffix};
use crate::kernel_params;
use abi::cuda::Function;
use abi::{DType, Result};
use std::sync::OnceLock;

kernel_params! {
    /// As in `attention.cuh`.
    struct AttentionParams {
        q: DevPtr, k: DevPtr, v: DevPtr, out: DevPtr, mask: DevPtr, sink: DevPtr, partial: DevPtr,
        length_data: DevPtr, total: DevPtr, lengths: [u32; 8],
        strides: [[i64; 3]; 5],
        batch: u32, heads: u32, kv_heads: u32, dim: u32, v_dim: u32,
        left: i32, right: i32,
        mask_kind: u32, mask_columns: u32, has_sink: u32, splits: u32, granule: u32, row_tiles: u32, tile_rows: u32,
        scale: f32, softcap: f32,
    }
}

/// Rows of a tensor: where element `[b, head, row, 0]` is.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub ptr: DevPtr,
    /// Elements between batch entries, heads and rows.
    pub strides: [usize; 3],
}

/// How far the keys of a batch entry reach.
#[derive(Clone, Copy)]
pub(crate) struct Lengths {
    /// Read on the device; null: all keys are there.
    pub data: DevPtr,
    pub total: DevPtr,
    /// `Lengths` of `attention.cuh`, from `kind` on.
    pub sizes: [u32; 8],
}

impl Lengths {
    /// `past` rows and then one for each query row.
    pub fn all(rows: usize, keys: usize, past: usize) -> Self {
        let sizes = [0, rows as u32, 0, keys as u32, past as u32, 0, 0, 0];
        Self { data: DevPtr::NULL, total: DevPtr::NULL, sizes }
    }

    /// As many as `data` (i64) says; the query rows are the last of them.
    pub fn counted(data: DevPtr, rows: usize, keys: usize) -> Self {
        let sizes = [2, rows as u32, 0, keys as u32, 0, 0, 0, 0];
        Self { data, total: DevPtr::NULL, sizes }
    }
}

/// What is added to scores, or hides keys.
#[derive(Clone, Copy)]
pub(crate) struct Mask {
    pub ptr: DevPtr,
    /// Elements between batch entries, heads and rows; 0 where broadcast.
    pub strides: [usize; 3],
    pub boolean: bool,
    /// Keys it speaks of; later ones are hidden. `None`: one value for all keys.
    pub columns: Option<usize>,
}

/// One attention.
#[derive(Clone, Copy)]
pub(crate) struct Problem {
    pub q: Rows,
    pub k: Rows,
    pub v: Rows,
    pub out: Rows,
    pub lengths: Lengths,
    pub mask: Option<Mask>,
    /// One more logit by query head in the denominator; null: 0.
    pub sink: Option<DevPtr>,
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// S.
    pub rows: usize,
    /// T.
    pub keys: usize,
    /// H.
    pub dim: usize,
    /// W.
    pub v_dim: usize,
    /// Keys before and behind a row's own that it sees.
    pub left: Option<usize>,
    pub right: Option<usize>,
    pub scale: f32,
    pub softcap: f32,
}

/// A kernel that is looked up when first needed.
struct Lazy {
    image: &'static str,
    name: String,
    found: OnceLock<Function>,
}

impl Lazy {
    fn new(image: &'static str, name: String) -> Self {
        Self { image, name, found: OnceLock::new() }
    }

    fn get(&self, device: &Device) -> Result<&Function> {
        if let Some(found) = self.found.get() {
            return Ok(found);
        }
        let function = device.function(self.image, &self.name)?;
        Ok(self.found.get_or_init(|| function))
    }
}

/// Greatest head size that any kernel takes.
pub(crate) const MOST_DIM: usize = 512;
/// The most parts that `join_parts` joins.
const MOST_SPLITS: usize = 1024;

/// The attention kernels of one type.
pub(crate) struct Flash {
    dtype: DType,
    kernels: Vec<(Variant, Lazy)>,
    join: Lazy,
}

/// A kernel's bounds and geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Variant {
    family: Family,
    /// Greatest H and W.
    most: usize,
    /// H and W are multiples of this.
    multiple: usize,
    /// Rows a tile.
    tile_rows: usize,
    /// Keys that a block takes in one step.
    granule: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    /// Few rows.
    Decode,
    /// Half types, on tensor cores.
    Mma,
    /// Any.
    Flash,
}

impl Variant {
    /// Dynamic shared memory, in bytes.
    fn shared(&self, dim: usize) -> usize {
        match self.family {
            Family::Decode => 0,
            Family::Mma => 2 * (self.tile_rows + 2 * self.granule) * self.most,
            Family::Flash => 4 * (self.tile_rows * dim.next_multiple_of(64) + 32 * 68 + self.tile_rows * 32),
        }
    }
}

impl Flash {
    /// The kernels for tensors of `dtype`: f32, f16 or bf16.
    pub fn new(dtype: DType) -> Self {
        let mut kernels = Vec::new();
        let t = suffix(dtype);
        let vector = if dtype == DType::F32 { 4 } else { 8 };
        let decode: &[[usize; 3]] = match dtype {
            DType::F32 => &[[4, 32, 1], [4, 32, 2], [4, 32, 4]],
            _ => &[[4, 8, 1], [8, 8, 1], [4, 16, 1], [8, 16, 1], [4, 32, 1], [8, 32, 1], [4, 32, 2]],
        };
        for &[rows, lanes, vectors] in decode {
            let keys = if vectors == 1 && rows <= 4 { 8 } else { 4 };
            let variant = Variant {
                family: Family::Decode,
                most: lanes * vectors * vector,
                multiple: vector,
                tile_rows: rows,
                granule: 4 * 32 / lanes * keys,
            };
            kernels.push((variant, Lazy::new("attention_decode", format!("decode_{t}_{rows}_{lanes}_{vectors}"))));
        }
        for most in [64, 128, 256].into_iter().filter(|_| dtype != DType::F32) {
            let variant = Variant { family: Family::Mma, most, multiple: 8, tile_rows: 64, granule: 64 };
            kernels.push((variant, Lazy::new("attention_mma", format!("attend_{t}_{most}"))));
        }
        for (most, tile_rows) in [(128, 32), (256, 32), (512, 16)] {
            let variant = Variant { family: Family::Flash, most, multiple: 1, tile_rows, granule: 32 };
            kernels.push((variant, Lazy::new("attention_flash", format!("flash_{t}_{most}"))));
        }
        Self { dtype, kernels, join: Lazy::new("attention_decode", format!("join_parts_{t}")) }
    }

    /// The kernel that takes it: the first of its family that is large enough.
    fn choose(&self, p: &Problem, shared_limit: usize) -> Option<&(Variant, Lazy)> {
        let rows = p.rows * (p.heads / p.kv_heads);
        let fits = |v: &Variant| {
            p.dim.max(p.v_dim) <= v.most
                && p.dim.is_multiple_of(v.multiple)
                && p.v_dim.is_multiple_of(v.multiple)
                && v.shared(p.dim) <= shared_limit
        };
        let first = |family: Family, wanted: &dyn Fn(&Variant) -> bool| {
            self.kernels.iter().find(|(v, _)| v.family == family && fits(v) && wanted(v))
        };
        if rows <= 16 {
            // Rows that share what is read, where a tile holds them all.
            let decode = first(Family::Decode, &|v| rows <= v.tile_rows);
            if let Some(found) = decode.or_else(|| first(Family::Decode, &|v| v.tile_rows == 8)) {
                return Some(found);
            }
            if let Some(found) = first(Family::Decode, &|_| true) {
                return Some(found);
            }
        }
        first(Family::Mma, &|_| true).or_else(|| first(Family::Flash, &|_| true))
    }

    /// Writes down the launches of one attention.
    ///
    /// # Errors
    /// When the head size is beyond every kernel.
    pub fn launch(&self, cx: &mut LaunchCx<'_>, p: &Problem) -> Result<()> {
        if p.batch * p.heads * p.rows * p.v_dim == 0 {
            return Ok(());
        }
        let device = cx.device();
        let Some((variant, kernel)) = self.choose(p, device.shared_limit() as usize) else {
            let got = p.dim.max(p.v_dim);
            return Err(cx.error("the head size", got, format_args!("at most {MOST_DIM} on a CUDA device")));
        };
        let group = p.heads / p.kv_heads;
        let row_tiles = (p.rows * group).div_ceil(variant.tile_rows);
        let blocks = row_tiles * p.batch * p.kv_heads;
        let splits = splits(variant, blocks, p.keys, device.multiprocessors() as usize);
        let partial = match splits {
            1 => DevPtr::NULL,
            n => cx.scratch(4 * p.batch * p.heads * p.rows * n * (p.v_dim + 2)),
        };
        let params = params(p, variant, row_tiles, splits, partial);
        let mut shape = linear(blocks * splits, 128);
        shape.shared = variant.shared(p.dim) as u32;
        cx.push(kernel.get(device)?, shape, &params)?;
        if splits > 1 {
            let threads = (p.v_dim.next_multiple_of(32) as u32).clamp(64, 256);
            cx.push(self.join.get(device)?, linear(p.batch * p.heads * p.rows, threads), &params)?;
        }
        Ok(())
    }

    /// Writes down the launch of `kernel`, which stores the scores `[B, N, S, T]` to `out` as they are at `stage`.
    pub fn launch_scores(cx: &mut LaunchCx<'_>, kernel: &Function, p: &Problem, out: DevPtr, stage: u32) -> Result<()> {
        let none = Variant { family: Family::Flash, most: 0, multiple: 1, tile_rows: 1, granule: 1 };
        let params = AttentionParams { out, granule: stage, ..params(p, &none, p.rows, 1, DevPtr::NULL) };
        cx.push(kernel, linear(if p.keys == 0 { 0 } else { p.batch * p.heads * p.rows }, 128), &params)
    }

    /// The type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// Parts to cut the keys into: only where rows alone leave the device idle. The device cuts what there is of the keys.
fn splits(variant: &Variant, blocks: usize, keys: usize, multiprocessors: usize) -> usize {
    let (wanted, least) = match variant.family {
        Family::Decode => (2 * multiprocessors, variant.granule),
        Family::Mma | Family::Flash => (multiprocessors, 256),
    };
    (wanted / blocks.max(1)).min(keys.div_ceil(least)).clamp(1, MOST_SPLITS)
}

fn params(p: &Problem, variant: &Variant, row_tiles: usize, splits: usize, partial: DevPtr) -> AttentionParams {
    let strides = |strides: [usize; 3]| strides.map(|n| n as i64);
    let side = |keys: Option<usize>| keys.map_or(-1, |n| n.min(1 << 30) as i32);
    AttentionParams {
        q: p.q.ptr,
        k: p.k.ptr,
        v: p.v.ptr,
        out: p.out.ptr,
        mask: p.mask.map_or(DevPtr::NULL, |m| m.ptr),
        sink: p.sink.unwrap_or(DevPtr::NULL),
        partial,
        length_data: p.lengths.data,
        total: p.lengths.total,
        lengths: p.lengths.sizes,
        strides: [
            strides(p.q.strides),
            strides(p.k.strides),
            strides(p.v.strides),
            strides(p.out.strides),
            strides(p.mask.map_or([0; 3], |m| m.strides)),
        ],
        batch: p.batch as u32,
        heads: p.heads as u32,
        kv_heads: p.kv_heads as u32,
        dim: p.dim as u32,
        v_dim: p.v_dim as u32,
        left: side(p.left),
        right: side(p.right),
        mask_kind: p.mask.map_or(0, |m| 1 + u32::from(m.boolean)),
        mask_columns: p.mask.and_then(|m| m.columns).map_or(u32::MAX, |n| n as u32),
        has_sink: u32::from(p.sink.is_some()),
        splits: splits as u32,
        granule: variant.granule as u32,
        row_tiles: row_tiles as u32,
        tile_rows: variant.tile_rows as u32,
        scale: p.scale,
        softcap: p.softcap,
    }
}
