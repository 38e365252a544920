//! One Run of a fused node: its inputs, outputs, threads and stream.

use super::factory::lock;
use super::status::{ort, slice_from};
use super::{Api, DeviceKind, Level, Logger, MemoryDevice, sys};
use crate::error::{Error, Result};
use crate::parallel::ParallelFor;
use crate::tensor::DType;
use std::any::Any;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// What a Run works on. Inputs and outputs are numbered as in the compiled [`crate::Graph`]'s lists.
///
/// Addresses are raw: ORT may bind one buffer as an input and as an output (shared KV and state buffers), and
/// buffers may be in device memory.
pub struct Context<'a> {
    api: Api,
    raw: *mut sys::OrtKernelContext,
    binding: &'a Binding,
}

/// Where ORT puts the graph's inputs and outputs: indices into the fused node's, which come in an order of their own.
#[derive(Debug, Default)]
pub(crate) struct Binding {
    pub(crate) inputs: Vec<usize>,
    pub(crate) outputs: Vec<usize>,
}

// SAFETY: tasks on other threads may call `run` and read inputs; ORT's kernel context allows both.
unsafe impl Sync for Context<'_> {}

/// An input tensor of this Run.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// The element type.
    pub dtype: DType,
    /// The dimensions.
    pub shape: &'a [usize],
    /// The first byte, perhaps in device memory; may be null when the tensor is empty.
    pub data: *const u8,
    value: *const sys::OrtValue,
    api: Api,
}

/// An output tensor of this Run, allocated.
#[derive(Clone, Copy)]
pub struct Output<'a> {
    /// The element type.
    pub dtype: DType,
    /// The first byte, perhaps in device memory; may be null when the tensor is empty.
    pub data: *mut u8,
    /// Number of bytes.
    pub len: usize,
    value: *const sys::OrtValue,
    api: Api,
    run: PhantomData<&'a ()>,
}

impl<'a> Context<'a> {
    /// # Safety
    /// `raw` is the kernel context of a Compute that outlives the result, and of the fused node that `binding` was
    /// made for.
    pub(crate) unsafe fn new(api: Api, raw: *mut sys::OrtKernelContext, binding: &'a Binding) -> Self {
        Self { api, raw, binding }
    }

    /// Number of inputs.
    pub fn input_count(&self) -> usize {
        self.binding.inputs.len()
    }

    /// Number of outputs.
    pub fn output_count(&self) -> usize {
        self.binding.outputs.len()
    }

    /// The `index`-th of the graph's inputs.
    ///
    /// # Errors
    /// When `index` is out of range or the input is no tensor of a known type.
    pub fn input(&self, index: usize) -> Result<Input<'a>> {
        let slot = *self.binding.inputs.get(index).ok_or_else(|| no_such("input", index))?;
        let mut value = std::ptr::null();
        let mut data = std::ptr::null();
        // SAFETY: the context is live, the index is one of the fused node's, and inputs live as long as the Run.
        let (dtype, shape) = unsafe {
            ort!(self.api, KernelContext_GetInput(self.raw, slot, &raw mut value))?;
            if value.is_null() {
                return Err(Error::Internal(format!("ORT passed no value for input {index}")));
            }
            let (dtype, shape) = type_and_shape(self.api, value)?;
            ort!(self.api, GetTensorData(value, &raw mut data))?;
            (dtype, shape)
        };
        Ok(Input { dtype, shape, data: data.cast(), value, api: self.api })
    }

    /// The `index`-th of the graph's outputs, allocated with this shape, or the caller's own buffer where one is bound.
    ///
    /// # Errors
    /// When `index` is out of range, memory is short, or the bound buffer has another shape.
    pub fn output(&self, index: usize, shape: &[usize]) -> Result<Output<'a>> {
        let slot = *self.binding.outputs.get(index).ok_or_else(|| no_such("output", index))?;
        let mut value = std::ptr::null_mut();
        let mut data = std::ptr::null_mut();
        if shape.iter().any(|&d| d > i64::MAX as usize) {
            return Err(Error::Internal(format!("output {index} has the impossible shape {shape:?}")));
        }
        // SAFETY: the context is live, the index is one of the fused node's, and outputs live as long as the Run;
        // `usize` and `i64` have one layout and every dimension is in both ranges.
        unsafe {
            let dims = shape.as_ptr().cast::<i64>();
            ort!(self.api, KernelContext_GetOutput(self.raw, slot, dims, shape.len(), &raw mut value))?;
            if value.is_null() {
                return Err(Error::Internal(format!("ORT gave no value for output {index}")));
            }
            let (dtype, got) = type_and_shape(self.api, value)?;
            ort!(self.api, GetTensorMutableData(value, &raw mut data))?;
            let elements = got.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
            let len = elements.and_then(|n| dtype.bytes(n));
            let len = len.ok_or_else(|| Error::Internal(format!("output {index} is no plain tensor")))?;
            Ok(Output { dtype, data: data.cast(), len, value, api: self.api, run: PhantomData })
        }
    }

    /// The handle of the stream to work on, e.g. a `CUstream`; null without streams.
    pub fn stream_handle(&self) -> *mut c_void {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context is live and the out pointer ours. On failure the handle stays null.
        let _ = unsafe { ort!(self.api, KernelContext_GetGPUComputeStream(self.raw, &raw mut handle)) };
        handle
    }

    /// Writes to the session's log.
    pub fn log(&self, level: Level, message: std::fmt::Arguments<'_>) {
        let mut logger = std::ptr::null();
        // SAFETY: the context is live, and its logger lives as long.
        unsafe {
            if ort!(self.api, KernelContext_GetLogger(self.raw, &raw mut logger)).is_ok() {
                Logger::new(self.api, logger).log(level, message);
            }
        }
    }
}

impl<'a> Input<'a> {
    /// Where the tensor is. Inputs shared with ORT's CPU nodes are in host memory, whatever device the EP has.
    pub fn memory(&self) -> MemoryDevice {
        // SAFETY: the value is live.
        unsafe { memory_of(self.api, self.value) }
    }

    /// The kind of device that owns the tensor's memory.
    pub fn device_kind(&self) -> DeviceKind {
        // SAFETY: the value is live.
        unsafe { kind_of(self.api, self.value) }
    }

    /// Number of bytes; 0 for strings.
    pub fn len(&self) -> usize {
        // ORT holds the tensor, so the product fits.
        self.dtype.bytes(self.shape.iter().product()).unwrap_or(0)
    }

    /// Whether the tensor holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, for a tensor that the host can read.
    ///
    /// # Safety
    /// The tensor is in memory that the host can read, and nothing writes it while the slice lives - mind outputs that
    /// share the buffer.
    pub unsafe fn bytes(&self) -> &'a [u8] {
        // SAFETY: the caller vouches for access; ORT for the size.
        unsafe { slice_from(self.data, self.len()) }
    }
}

impl Output<'_> {
    /// Where the tensor is.
    pub fn memory(&self) -> MemoryDevice {
        // SAFETY: the value is live.
        unsafe { memory_of(self.api, self.value) }
    }

    /// The kind of device that owns the tensor's memory.
    pub fn device_kind(&self) -> DeviceKind {
        // SAFETY: the value is live.
        unsafe { kind_of(self.api, self.value) }
    }
}

impl ParallelFor for Context<'_> {
    /// Runs on the session's intra-op threads. A task's panic is raised again here when all tasks are done.
    fn run(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
        if total <= 1 {
            return (0..total).for_each(task);
        }
        let shared = Shared { task, failed: AtomicBool::new(false), panic: Mutex::new(None) };
        let arg = (&raw const shared).cast_mut().cast::<c_void>();
        // SAFETY: ORT returns when all tasks are done, so `shared` outlives them. `num_batch` 0 schedules each task
        // by itself: whoever is free takes the next.
        let done = unsafe { ort!(self.api, KernelContext_ParallelFor(self.raw, run_task, total, 0, arg)) };
        if let Some(payload) = shared.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(payload);
        }
        if let Err(error) = done {
            panic!("{error}");
        }
    }
}

/// A parallel loop's task and what came of it.
struct Shared<'t> {
    task: &'t (dyn Fn(usize) + Sync),
    failed: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

unsafe extern "C" fn run_task(arg: *mut c_void, index: usize) {
    // SAFETY: `arg` is the `Shared` of `ParallelFor::run`, which waits for this call.
    let shared = unsafe { &*arg.cast::<Shared<'_>>() };
    if shared.failed.load(Ordering::Relaxed) {
        return;
    }
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (shared.task)(index))) {
        shared.failed.store(true, Ordering::Relaxed);
        lock(&shared.panic).get_or_insert(payload);
    }
}

/// A tensor's element type and dimensions, without an allocation.
///
/// # Safety
/// `value` is live for `'a`.
pub(crate) unsafe fn type_and_shape<'a>(api: Api, value: *const sys::OrtValue) -> Result<(DType, &'a [usize])> {
    // An integer, since a newer runtime may know more types than the enum.
    let mut code = 0i32;
    let (mut dims, mut rank) = (std::ptr::null(), 0usize);
    // SAFETY: the caller vouches for `value`, which owns the dimensions.
    let dims: &[i64] = unsafe {
        let out = (&raw mut code).cast();
        ort!(api, GetTensorElementTypeAndShapeDataReference(value, out, &raw mut dims, &raw mut rank))?;
        slice_from(dims, rank)
    };
    let dtype = DType::from_ort(code)
        .ok_or_else(|| Error::Internal(format!("a tensor has the unknown element type {code}")))?;
    if dims.iter().any(|&d| d < 0) {
        return Err(Error::Internal(format!("a tensor has the impossible shape {dims:?}")));
    }
    // SAFETY: `i64` and `usize` have one layout, and every dimension is in both ranges.
    Ok((dtype, unsafe { slice_from(dims.as_ptr().cast(), rank) }))
}

/// # Safety
/// `value` is live.
pub(crate) unsafe fn memory_of(api: Api, value: *const sys::OrtValue) -> MemoryDevice {
    // SAFETY: the caller vouches for `value`, which owns its memory device.
    unsafe { MemoryDevice::read(api, ((*api.ep()).Value_GetMemoryDevice)(value)) }
}

/// # Safety
/// `value` is live.
unsafe fn kind_of(api: Api, value: *const sys::OrtValue) -> DeviceKind {
    // SAFETY: the caller vouches for `value`, which owns its memory device.
    unsafe { DeviceKind::read(api, ((*api.ep()).Value_GetMemoryDevice)(value)) }
}

fn no_such(what: &str, index: usize) -> Error {
    Error::Internal(format!("the fused node has no {what} {index}"))
}
