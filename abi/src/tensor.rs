//! Element types and owned host tensors.

use std::fmt;
use std::sync::Arc;

/// An ONNX tensor element type.
///
/// `I4`, `U4`, `I2`, `U2` and `F4E2M1` are packed, low bits first, so a tensor of `n` elements takes
/// `ceil(n * bits / 8)` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // the names are ONNX's own
pub enum DType {
    F32,
    F64,
    F16,
    BF16,
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    Bool,
    String,
    I4,
    U4,
    I2,
    U2,
    F4E2M1,
    F8E4M3FN,
    F8E4M3FNUZ,
    F8E5M2,
    F8E5M2FNUZ,
    F8E8M0,
    C64,
    C128,
}

impl DType {
    /// From `ONNXTensorElementDataType`, whose newest numbers are not those of [`Self::from_onnx`].
    pub fn from_ort(code: i32) -> Option<Self> {
        match code {
            24 => Some(Self::U2),
            25 => Some(Self::I2),
            26 => Some(Self::F8E8M0),
            code => Self::from_onnx(code),
        }
    }

    /// From `TensorProto.DataType`.
    pub fn from_onnx(code: i32) -> Option<Self> {
        Some(match code {
            1 => Self::F32,
            2 => Self::U8,
            3 => Self::I8,
            4 => Self::U16,
            5 => Self::I16,
            6 => Self::I32,
            7 => Self::I64,
            8 => Self::String,
            9 => Self::Bool,
            10 => Self::F16,
            11 => Self::F64,
            12 => Self::U32,
            13 => Self::U64,
            14 => Self::C64,
            15 => Self::C128,
            16 => Self::BF16,
            17 => Self::F8E4M3FN,
            18 => Self::F8E4M3FNUZ,
            19 => Self::F8E5M2,
            20 => Self::F8E5M2FNUZ,
            21 => Self::U4,
            22 => Self::I4,
            23 => Self::F4E2M1,
            24 => Self::F8E8M0,
            25 => Self::U2,
            26 => Self::I2,
            _ => return None,
        })
    }

    /// Bits an element takes; `None` for strings.
    pub fn bits(self) -> Option<usize> {
        Some(match self {
            Self::I2 | Self::U2 => 2,
            Self::I4 | Self::U4 | Self::F4E2M1 => 4,
            Self::I8
            | Self::U8
            | Self::Bool
            | Self::F8E4M3FN
            | Self::F8E4M3FNUZ
            | Self::F8E5M2
            | Self::F8E5M2FNUZ
            | Self::F8E8M0 => 8,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 16,
            Self::F32 | Self::I32 | Self::U32 => 32,
            Self::F64 | Self::I64 | Self::U64 | Self::C64 => 64,
            Self::C128 => 128,
            Self::String => return None,
        })
    }

    /// Bytes that `elements` elements take; `None` for strings or on overflow.
    pub fn bytes(self, elements: usize) -> Option<usize> {
        Some(elements.checked_mul(self.bits()?)?.div_ceil(8))
    }

    /// f32, f16 or bf16: the types that kernels compute in.
    pub fn is_compute_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "float",
            Self::F64 => "double",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::I8 => "int8",
            Self::U8 => "uint8",
            Self::I16 => "int16",
            Self::U16 => "uint16",
            Self::I32 => "int32",
            Self::U32 => "uint32",
            Self::I64 => "int64",
            Self::U64 => "uint64",
            Self::Bool => "bool",
            Self::String => "string",
            Self::I4 => "int4",
            Self::U4 => "uint4",
            Self::I2 => "int2",
            Self::U2 => "uint2",
            Self::F4E2M1 => "float4e2m1",
            Self::F8E4M3FN => "float8e4m3fn",
            Self::F8E4M3FNUZ => "float8e4m3fnuz",
            Self::F8E5M2 => "float8e5m2",
            Self::F8E5M2FNUZ => "float8e5m2fnuz",
            Self::F8E8M0 => "float8e8m0",
            Self::C64 => "complex64",
            Self::C128 => "complex128",
        })
    }
}

/// A Rust type that holds one element of a [`DType`] whole.
///
/// # Safety
/// Every bit pattern of `DTYPE`'s size must be a valid `Self` (so `bool` tensors are read as `u8`).
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The ONNX type that `Self` stores.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        // SAFETY: a plain number type, valid for every bit pattern.
        unsafe impl Element for $t { const DTYPE: DType = DType::$d; }
    )*};
}
elements!(f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => BF16, i8 => I8, u8 => U8, i16 => I16,
    u16 => U16, i32 => I32, u32 => U32, i64 => I64, u64 => U64);

/// A tensor in host memory that owns its bytes, 64-byte aligned.
#[derive(Clone)]
pub struct HostTensor {
    dtype: DType,
    shape: Arc<[usize]>,
    data: Arc<AlignedBytes>,
}

impl HostTensor {
    /// A tensor of `shape` whose bytes are copied from `bytes`; `None` when the sizes disagree.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> Option<Self> {
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        (dtype.bytes(elements)? == bytes.len()).then(|| {
            let mut data = AlignedBytes::zeroed(bytes.len());
            data.as_mut_slice().copy_from_slice(bytes);
            Self { dtype, shape: shape.into(), data: Arc::new(data) }
        })
    }

    /// A tensor of `shape` that takes over `data`; `None` when the sizes disagree.
    pub fn from_aligned(dtype: DType, shape: &[usize], data: AlignedBytes) -> Option<Self> {
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        (dtype.bytes(elements)? == data.len()).then(|| Self { dtype, shape: shape.into(), data: Arc::new(data) })
    }

    /// A tensor of typed elements; panics when `shape` does not hold `values.len()` elements.
    pub fn new<T: Element>(shape: &[usize], values: &[T]) -> Self {
        // SAFETY: `T` is plain data, so its bytes may be read.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
        Self::from_bytes(T::DTYPE, shape, bytes).expect("the shape holds exactly the values")
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The raw bytes.
    pub fn bytes(&self) -> &[u8] {
        self.data.as_slice()
    }

    /// The elements, or `None` when the tensor holds another type.
    pub fn as_slice<T: Element>(&self) -> Option<&[T]> {
        (self.dtype == T::DTYPE).then(|| {
            // SAFETY: the buffer is 64-byte aligned and holds `len / size` elements of `T`.
            unsafe { std::slice::from_raw_parts(self.bytes().as_ptr().cast(), self.bytes().len() / size_of::<T>()) }
        })
    }

    /// The elements of an int32 or int64 tensor as `i64`; `None` for other types.
    pub fn to_i64s(&self) -> Option<Vec<i64>> {
        match self.dtype {
            DType::I64 => self.as_slice::<i64>().map(<[i64]>::to_vec),
            DType::I32 => self.as_slice::<i32>().map(|s| s.iter().map(|&v| v.into()).collect()),
            _ => None,
        }
    }
}

impl fmt::Debug for HostTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

/// A 64-byte aligned heap buffer (one cache line, one AVX-512 vector).
pub struct AlignedBytes {
    ptr: std::ptr::NonNull<u8>,
    len: usize,
}

impl AlignedBytes {
    const ALIGN: usize = 64;

    /// `len` zero bytes. Aborts like `Vec` when memory cannot be had; see [`Self::try_zeroed`].
    pub fn zeroed(len: usize) -> Self {
        match Self::try_zeroed(len) {
            Some(bytes) => bytes,
            None => std::alloc::handle_alloc_error(Self::layout(len)),
        }
    }

    /// `len` zero bytes, or `None` when memory cannot be had.
    pub fn try_zeroed(len: usize) -> Option<Self> {
        if len > isize::MAX as usize - Self::ALIGN {
            return None;
        }
        if len == 0 {
            // A dangling but aligned pointer is a valid empty slice.
            let ptr = std::ptr::NonNull::new(Self::ALIGN as *mut u8)?;
            return Some(Self { ptr, len });
        }
        // SAFETY: the layout has a non-zero size.
        let ptr = unsafe { std::alloc::alloc_zeroed(Self::layout(len)) };
        std::ptr::NonNull::new(ptr).map(|ptr| Self { ptr, len })
    }

    fn layout(len: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len, Self::ALIGN).expect("try_zeroed bounds the size")
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len` initialised bytes for as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The bytes, writable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated in `try_zeroed` with the same layout.
            unsafe { std::alloc::dealloc(self.ptr.as_ptr(), Self::layout(self.len)) }
        }
    }
}

// SAFETY: a uniquely owned heap buffer of plain bytes.
unsafe impl Send for AlignedBytes {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBytes {}
