//! Movement on CUDA devices: strided views, tiled transposes, pieces of rows, fills.

use crate::cuda::number::size;
use crate::cuda::walk::{Walk, spread, word};
use crate::cuda::{DevPtr, Device, LaunchCx, linear};
use crate::kernel_params;
use abi::Result;
use abi::cuda::Function;
use smallvec::SmallVec;

const IMAGE: &str = "movement";
/// Dims of a view: Tile reads every dim twice.
const DIMS: usize = 16;
/// Either side of a transposed matrix from which on it goes by tiles.
const TILED: usize = 16;

kernel_params! {
    /// As in `cuda.cu`.
    struct StridedParams { x: DevPtr, y: DevPtr, units: u64, walk: Walk<1, DIMS>, word: u32, element: u32 }
}
kernel_params! {
    /// As in `cuda.cu`.
    struct TransposeParams {
        x: DevPtr, y: DevPtr, rows: u64, columns: u64, x_stride: u64, y_stride: u64, batch: Walk<2, DIMS>,
    }
}

/// Fills output 0 with input 0 read through a view.
pub(crate) struct Views {
    strided: Function,
    /// For elements of 1, 2, 4 and 8 bytes.
    transpose: [Function; 4],
}

/// Lengths and strides in elements, outermost first.
type Dims = SmallVec<[(usize, isize); DIMS]>;

impl Views {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let transpose = |bits| device.function(IMAGE, &format!("transpose_{bits}"));
        Ok(Self {
            strided: device.function(IMAGE, "strided")?,
            transpose: [transpose(8)?, transpose(16)?, transpose(32)?, transpose(64)?],
        })
    }

    /// The view starts at element `offset`; `dims` are lengths and strides in elements, outermost first.
    pub(crate) fn launch(
        &self,
        cx: &mut LaunchCx<'_>,
        offset: usize,
        dims: impl IntoIterator<Item = (usize, isize)>,
    ) -> Result<()> {
        let (data, Some(out)) = (cx.required(0), cx.output(0)) else { return Ok(()) };
        if out.is_empty() {
            return Ok(());
        }
        let dims = merged(dims);
        let x = data.ptr.plus(offset * size(data.dtype));
        match Matrix::of(&dims) {
            Some(matrix) => self.tiles(cx, x, out.ptr, &matrix),
            None => self.runs(cx, x, (out.ptr, out.len()), offset, dims),
        }
    }

    fn runs(
        &self,
        cx: &mut LaunchCx<'_>,
        x: DevPtr,
        (y, n): (DevPtr, usize),
        offset: usize,
        mut dims: Dims,
    ) -> Result<()> {
        let element = size(cx.required(0).dtype);
        dims.iter_mut().for_each(|(_, stride)| *stride *= element as isize);
        let mut unit = element;
        if let Some(((inner, stride), outer)) = dims.split_last_mut().filter(|((_, s), _)| *s == element as isize) {
            let steps = outer.iter().map(|&(_, stride)| stride.unsigned_abs());
            unit = word(steps.chain([*inner * element, offset * element]));
            (*inner, *stride) = (*inner * element / unit, unit as isize);
        }
        let walk = Walk::new(dims.into_iter().map(|(dim, stride)| (dim, [stride])));
        let walk = walk.ok_or_else(|| cx.error("input 0", "a view of more dims", format_args!("at most {DIMS}")))?;
        let units = n * element / unit;
        let (word, element) = (unit as u32, element as u32);
        let params = StridedParams { x, y, units: units as u64, walk, word, element };
        cx.push(&self.strided, spread(cx.device(), units), &params)
    }

    fn tiles(&self, cx: &mut LaunchCx<'_>, x: DevPtr, y: DevPtr, matrix: &Matrix) -> Result<()> {
        let element = size(cx.required(0).dtype);
        let tile = if element <= 2 { 64 } else { 32 };
        let batch = Walk::new(matrix.batch.iter().copied());
        let batch = batch.ok_or_else(|| cx.error("input 0", "a view of more dims", format_args!("at most {DIMS}")))?;
        let count: usize = matrix.batch.iter().map(|(dim, _)| dim).product();
        let params = TransposeParams {
            x,
            y,
            rows: matrix.rows as u64,
            columns: matrix.columns as u64,
            x_stride: matrix.x_stride as u64,
            y_stride: matrix.y_stride as u64,
            batch,
        };
        let blocks = count * matrix.rows.div_ceil(tile) * matrix.columns.div_ceil(tile);
        cx.push(&self.transpose[element.ilog2() as usize], linear(blocks, 256), &params)
    }
}

/// Without dims of 1, and with neighbours that walk on evenly made one.
fn merged(dims: impl IntoIterator<Item = (usize, isize)>) -> Dims {
    let mut merged = Dims::new();
    for (dim, stride) in dims.into_iter().filter(|&(dim, _)| dim != 1) {
        match merged.last_mut() {
            Some(last) if last.1 == dim as isize * stride => *last = (last.0 * dim, stride),
            _ => merged.push((dim, stride)),
        }
    }
    merged
}

/// A view whose runs in the input lie along another dim than the innermost.
struct Matrix {
    rows: usize,
    columns: usize,
    x_stride: usize,
    y_stride: usize,
    /// The other dims, with strides in input and output.
    batch: SmallVec<[(usize, [isize; 2]); DIMS]>,
}

impl Matrix {
    fn of(dims: &Dims) -> Option<Self> {
        let &(columns, x_stride) = dims.last()?;
        let x_stride = usize::try_from(x_stride).ok().filter(|&s| s > 1)?;
        let at = dims.iter().position(|&(dim, stride)| stride == 1 && dim >= TILED)?;
        let rows = dims[at].0;
        if columns < TILED || at + 1 == dims.len() {
            return None;
        }
        let inside = |d: usize| dims[d + 1..].iter().map(|&(dim, _)| dim).product::<usize>();
        let others = (0..dims.len() - 1).filter(|&d| d != at);
        let batch = others.map(|d| (dims[d].0, [dims[d].1, inside(d) as isize])).collect();
        Some(Self { rows, columns, x_stride, y_stride: inside(at), batch })
    }
}

/// Pieces that one launch takes.
const PIECES: usize = 16;

kernel_params! {
    /// As in `cuda.cu`.
    struct PiecesParams {
        whole: DevPtr, pieces: [DevPtr; PIECES], ends: [u64; PIECES], units: u64, row_units: u64, row_bytes: u64,
        word: u32, element: u32, split: u32, pad: u32,
    }
}

/// Rows of a whole, cut into pieces or put together from them.
pub(crate) struct Pieces {
    function: Function,
}

impl Pieces {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self { function: device.function(IMAGE, "pieces")? })
    }

    /// `pieces` are addresses (null: nobody reads it) and bytes a row, in order; `element` is an element's bytes.
    pub(crate) fn launch(
        &self,
        cx: &mut LaunchCx<'_>,
        (whole, rows): (DevPtr, usize),
        pieces: &[(DevPtr, usize)],
        (element, split): (usize, bool),
    ) -> Result<()> {
        let row: usize = pieces.iter().map(|(_, len)| len).sum();
        let mut start = 0;
        for part in pieces.chunks(PIECES) {
            let (mut addresses, mut ends, mut end) = ([DevPtr::NULL; PIECES], [0; PIECES], 0);
            for (i, &(address, len)) in part.iter().enumerate() {
                end += len;
                (addresses[i], ends[i]) = (address, end as u64);
            }
            let word = word(part.iter().map(|&(_, len)| len).chain([start, row])).max(element);
            let params = PiecesParams {
                whole: whole.plus(start),
                pieces: addresses,
                ends,
                units: (rows * end / word) as u64,
                row_units: (end / word) as u64,
                row_bytes: row as u64,
                word: word as u32,
                element: element as u32,
                split: split.into(),
                pad: 0,
            };
            cx.push(&self.function, spread(cx.device(), rows * end / word), &params)?;
            start += end;
        }
        Ok(())
    }
}

kernel_params! {
    /// As in `cuda.cu`.
    struct FillParams { y: DevPtr, bytes: u64, pattern: [u64; 2] }
}

/// One element over and over.
pub(crate) struct Fill {
    function: Function,
    pattern: [u64; 2],
}

impl Fill {
    /// `element` has 1, 2, 4 or 8 bytes.
    pub(crate) fn new(device: &Device, element: &[u8]) -> Result<Self> {
        let mut bytes = [0; 8];
        bytes.chunks_exact_mut(element.len()).for_each(|piece| piece.copy_from_slice(element));
        Ok(Self { function: device.function(IMAGE, "fill")?, pattern: [u64::from_ne_bytes(bytes); 2] })
    }

    pub(crate) fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let Some(out) = cx.output(0) else { return Ok(()) };
        let params = FillParams { y: out.ptr, bytes: out.bytes() as u64, pattern: self.pattern };
        cx.push(&self.function, spread(cx.device(), out.bytes().div_ceil(16)), &params)
    }
}
