//! What a CPU kernel sees when it runs.

use crate::op::NodeLabel;
use crate::par::Par;
use abi::tensor::Element;
use abi::{DType, Error, Result};
use std::fmt;
use std::marker::PhantomData;

/// A node made ready to run: attributes parsed, weights packed. Immutable, shared by concurrent Runs.
pub trait Kernel: Send + Sync {
    /// Scratch bytes that `run` needs for these shapes.
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let _ = shapes;
        0
    }

    /// Computes the outputs. Shapes were checked by the op's `infer`; values (indices, lengths) were not.
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()>;
}

/// The shapes and types of a node's inputs and outputs in one plan instance.
pub struct Shapes<'a> {
    /// By input slot; `None` where absent.
    pub inputs: &'a [Option<(DType, &'a [usize])>],
    /// By output slot; `None` where absent.
    pub outputs: &'a [Option<(DType, &'a [usize])>],
}

impl<'a> Shapes<'a> {
    /// Input `slot`'s shape; empty when absent.
    pub fn input(&self, slot: usize) -> &'a [usize] {
        self.inputs.get(slot).copied().flatten().map_or(&[], |(_, s)| s)
    }

    /// Output `slot`'s shape; empty when absent.
    pub fn output(&self, slot: usize) -> &'a [usize] {
        self.outputs.get(slot).copied().flatten().map_or(&[], |(_, s)| s)
    }
}

/// A tensor that a kernel reads.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    dtype: DType,
    shape: &'a [usize],
    ptr: *const u8,
    bytes: usize,
    lives: PhantomData<&'a [u8]>,
}

// SAFETY: a shared borrow of a byte range, as `&[u8]` is.
unsafe impl Send for Tensor<'_> {}
// SAFETY: as above.
unsafe impl Sync for Tensor<'_> {}

impl<'a> Tensor<'a> {
    /// # Safety
    /// `ptr` must be valid for reads of the bytes that `shape` of `dtype` takes for `'a`, aligned for the type (and not
    /// written meanwhile but through an output that the op declares as in place).
    pub unsafe fn from_raw(dtype: DType, shape: &'a [usize], ptr: *const u8) -> Self {
        let bytes = dtype.bytes(shape.iter().product()).unwrap_or(0);
        Self { dtype, shape, ptr, bytes, lives: PhantomData }
    }

    /// A view of bytes; `None` when the sizes disagree.
    pub fn from_bytes(dtype: DType, shape: &'a [usize], data: &'a [u8]) -> Option<Self> {
        let bytes = dtype.bytes(shape.iter().product())?;
        (bytes == data.len()).then_some(Self { dtype, shape, ptr: data.as_ptr(), bytes, lives: PhantomData })
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first byte, for comparing addresses.
    pub fn ptr(&self) -> *const u8 {
        self.ptr
    }

    /// The raw bytes.
    pub fn bytes(&self) -> &'a [u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: promised to `from_raw`.
        unsafe { std::slice::from_raw_parts(self.ptr, self.bytes) }
    }

    /// The elements. Panics when the tensor holds another type: `claim` has checked it.
    pub fn slice<T: Element>(&self) -> &'a [T] {
        assert_eq!(self.dtype, T::DTYPE, "the claim checked the type");
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: promised to `from_raw`; `T` is plain data.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.bytes / size_of::<T>()) }
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

/// A tensor that a kernel writes whole.
pub struct TensorMut<'a> {
    dtype: DType,
    shape: &'a [usize],
    ptr: *mut u8,
    bytes: usize,
    lives: PhantomData<&'a mut [u8]>,
}

// SAFETY: a uniquely borrowed byte range, as `&mut [u8]` is.
unsafe impl Send for TensorMut<'_> {}

impl<'a> TensorMut<'a> {
    /// # Safety
    /// As [`Tensor::from_raw`], for writes, and nobody else reads or writes the bytes for `'a`.
    pub unsafe fn from_raw(dtype: DType, shape: &'a [usize], ptr: *mut u8) -> Self {
        let bytes = dtype.bytes(shape.iter().product()).unwrap_or(0);
        Self { dtype, shape, ptr, bytes, lives: PhantomData }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first byte, for comparing addresses.
    pub fn ptr(&self) -> *const u8 {
        self.ptr
    }

    /// The raw bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: promised to `from_raw`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.bytes) }
    }

    /// The elements. Panics when the tensor holds another type: `infer` has set it.
    pub fn slice<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.dtype, T::DTYPE, "infer set the type");
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: promised to `from_raw`; `T` is plain data.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), self.bytes / size_of::<T>()) }
    }

    /// The elements, borrowed for as long as the run lasts.
    pub fn into_slice<T: Element>(self) -> &'a mut [T] {
        assert_eq!(self.dtype, T::DTYPE, "infer set the type");
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: promised to `from_raw`; `self` is consumed, so the borrow stays unique.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), self.bytes / size_of::<T>()) }
    }
}

/// One node's Run: its tensors, scratch and threads.
pub struct RunCx<'a> {
    /// By input slot; `None` where absent.
    pub inputs: &'a [Option<Tensor<'a>>],
    /// By output slot; `None` where absent or taken.
    pub outputs: &'a mut [Option<TensorMut<'a>>],
    /// As many bytes as `scratch_bytes` asked for, 64-byte aligned, contents arbitrary.
    pub scratch: &'a mut [u8],
    /// The host's threads.
    pub par: Par<'a>,
    /// For messages.
    pub label: &'a NodeLabel,
}

impl<'a> RunCx<'a> {
    /// Input `slot`; `None` when absent.
    pub fn input(&self, slot: usize) -> Option<Tensor<'a>> {
        self.inputs.get(slot).copied().flatten()
    }

    /// A required input. Panics when absent: `claim` has checked it.
    pub fn required(&self, slot: usize) -> Tensor<'a> {
        self.input(slot).expect("the claim checked that required inputs are present")
    }

    /// Takes output `slot`; `None` when nobody reads it. Each output can be taken once.
    pub fn output(&mut self, slot: usize) -> Option<TensorMut<'a>> {
        self.outputs.get_mut(slot)?.take()
    }

    /// Takes the scratch buffer.
    pub fn take_scratch(&mut self) -> &'a mut [u8] {
        std::mem::take(&mut self.scratch)
    }

    /// An [`Error::Node`] for this node.
    pub fn error(&self, slot: impl fmt::Display, got: impl fmt::Display, expected: impl fmt::Display) -> Error {
        self.label.error(slot, got, expected)
    }
}

/// Carves typed pieces off a scratch buffer, each 64-byte aligned.
pub struct Carver<'a>(&'a mut [u8]);

impl<'a> Carver<'a> {
    /// Starts with the whole buffer.
    pub fn new(scratch: &'a mut [u8]) -> Self {
        Self(scratch)
    }

    /// What is left.
    pub fn rest(self) -> &'a mut [u8] {
        self.0
    }

    /// Bytes that a piece of `n` elements of `T` takes in the buffer.
    pub const fn size<T>(n: usize) -> usize {
        (n * size_of::<T>()).next_multiple_of(64)
    }

    /// The next `n` elements, contents arbitrary. Panics when `scratch_bytes` asked for too little.
    pub fn take<T: Element>(&mut self, n: usize) -> &'a mut [T] {
        let (piece, rest) = std::mem::take(&mut self.0).split_at_mut(Self::size::<T>(n));
        self.0 = rest;
        assert_eq!(piece.as_ptr() as usize % align_of::<T>(), 0, "scratch is 64-byte aligned");
        // SAFETY: aligned, large enough, uniquely borrowed, and `T` is plain data.
        unsafe { std::slice::from_raw_parts_mut(piece.as_mut_ptr().cast(), n) }
    }
}
