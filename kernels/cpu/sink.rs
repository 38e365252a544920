//! Where a matrix product's tiles go: scaled, added to, rounded once and stored.

use crate::cpu::simd::{LANES, Simd};
use abi::DType;

/// A row-major output matrix of float, float16 or bfloat16, and what happens on the way into it:
/// `y = alpha * (A B) + addend`.
#[derive(Clone, Copy)]
pub struct Sink<'a> {
    /// The first element.
    pub ptr: *mut u8,
    /// The elements' type.
    pub dtype: DType,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Columns.
    pub n: usize,
    /// Factor of the product.
    pub alpha: f32,
    /// What is added.
    pub addend: Option<Addend<'a>>,
}

// SAFETY: the kernels that share a sink write disjoint tiles, as their callers promise.
unsafe impl Send for Sink<'_> {}
// SAFETY: as above.
unsafe impl Sync for Sink<'_> {}

/// A matrix that broadcasts over the output.
#[derive(Clone, Copy)]
pub struct Addend<'a> {
    /// The values.
    pub values: &'a [f32],
    /// Elements from one output row to the next: 0 broadcasts.
    pub row: usize,
    /// Elements from one output column to the next: 0 or 1.
    pub column: usize,
}

impl Sink<'_> {
    /// Stores 16 columns of row `row` from column `col` on (fewer at the matrix's edge).
    ///
    /// # Safety
    /// `row` and `col` lie in the matrix, whose memory is valid, and nobody else touches these elements.
    #[inline(always)]
    pub unsafe fn store<S: Simd>(&self, row: usize, col: usize, v: S::F) {
        let width = LANES.min(self.n - col);
        // SAFETY: the caller's promises; an edge goes through a buffer of 16.
        unsafe {
            let mut v = v;
            if self.alpha != 1.0 {
                v = S::mul(v, S::splat(self.alpha));
            }
            if let Some(addend) = &self.addend {
                v = S::add(v, addend.at::<S>(row, col, width));
            }
            let at = row * self.stride + col;
            match self.dtype {
                DType::F32 => {
                    let to = self.ptr.cast::<f32>().add(at);
                    if width == LANES {
                        S::store(to, v);
                    } else {
                        let mut buffer = [0f32; LANES];
                        S::store(buffer.as_mut_ptr(), v);
                        std::ptr::copy_nonoverlapping(buffer.as_ptr(), to, width);
                    }
                }
                half => {
                    let to = self.ptr.cast::<u16>().add(at);
                    let mut buffer = [0u16; LANES];
                    if half == DType::F16 {
                        S::store_f16(buffer.as_mut_ptr(), v);
                    } else {
                        S::store_bf16(buffer.as_mut_ptr(), v);
                    }
                    std::ptr::copy_nonoverlapping(buffer.as_ptr(), to, width);
                }
            }
        }
    }
}

impl Addend<'_> {
    #[inline(always)]
    unsafe fn at<S: Simd>(&self, row: usize, col: usize, width: usize) -> S::F {
        let from = &self.values[row * self.row + col * self.column..];
        // SAFETY: the slice above is checked; an edge is copied into a buffer of 16.
        unsafe {
            if self.column == 0 {
                S::splat(from[0])
            } else if width == LANES {
                S::load(from[..LANES].as_ptr())
            } else {
                let mut buffer = [0f32; LANES];
                buffer[..width].copy_from_slice(&from[..width]);
                S::load(buffer.as_ptr())
            }
        }
    }
}
