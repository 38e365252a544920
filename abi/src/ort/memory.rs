//! Device memory: allocators and copies.

use super::context::{memory_of, type_and_shape};
use super::factory::FactoryState;
use super::status::{caught, caught_or, ort, slice_from};
use super::stream::StreamRef;
use super::{Api, Level, MemoryDevice, sys};
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// Hands out memory of one device. ORT adds no pool: allocation happens in every Run, so pool here.
pub trait Allocator: Send + Sync {
    /// `size` bytes, more than 0, for work on `stream` if there is one.
    ///
    /// # Errors
    /// When memory is short; the message goes to the log, since ORT's allocators answer null.
    fn alloc(&self, size: usize, stream: Option<StreamRef<'_>>) -> Result<NonNull<u8>>;

    /// Memory that lives as long as the session, so better not from a pool.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    fn reserve(&self, size: usize) -> Result<NonNull<u8>> {
        self.alloc(size, None)
    }

    /// Takes back what this allocator handed out.
    fn free(&self, ptr: NonNull<u8>);

    /// Figures by name, as ORT shows them.
    fn stats(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Gives unused memory back to the device.
    ///
    /// # Errors
    /// Reach the caller.
    fn shrink(&self) -> Result<()> {
        Ok(())
    }
}

/// Makes allocators.
pub trait AllocatorSource: Send + Sync {
    /// An allocator of this memory, one of those that the factory's devices list.
    ///
    /// # Errors
    /// Fail the registration or the session.
    fn create_allocator(&self, memory: MemoryDevice) -> Result<Box<dyn Allocator>>;
}

/// Copies tensors between memories.
pub trait DataTransfer: Send + Sync {
    /// Whether this can copy from `src` to `dst`. Answer no for a pair that does not concern the EP.
    fn can_copy(&self, src: MemoryDevice, dst: MemoryDevice) -> bool;

    /// Makes the copies, in order where they share a stream. A copy without a stream is done on return.
    ///
    /// # Errors
    /// Fail the session or the Run. An item may be an error too, which the copy passes on.
    fn copy(&self, copies: &mut dyn Iterator<Item = Result<TensorCopy<'_>>>) -> Result<()>;
}

/// One tensor to copy.
pub struct TensorCopy<'a> {
    /// The first byte to read.
    pub src: *const u8,
    /// The first byte to write.
    pub dst: *mut u8,
    /// Number of bytes; both tensors are this long.
    pub len: usize,
    /// Where `src` is.
    pub src_memory: MemoryDevice,
    /// Where `dst` is.
    pub dst_memory: MemoryDevice,
    /// The stream to work on; without one the copy is synchronous.
    pub stream: Option<StreamRef<'a>>,
}

/// What ORT holds as an `OrtAllocator`.
#[repr(C)]
struct AllocatorObject {
    c: sys::OrtAllocator,
    info: *const sys::OrtMemoryInfo,
    allocator: Box<dyn Allocator>,
    factory: Arc<FactoryState>,
}

impl AllocatorObject {
    /// # Safety
    /// `this` was made by [`create_allocator`] and is live for `'a`.
    unsafe fn get<'a>(this: *const sys::OrtAllocator) -> &'a Self {
        // SAFETY: the caller vouches for it, and nothing borrows the object mutably.
        unsafe { &*this.cast() }
    }

    /// `body`'s pointer, or null and a log line.
    fn pointer(&self, size: usize, body: impl FnOnce() -> Result<NonNull<u8>>) -> *mut c_void {
        if size == 0 {
            return std::ptr::null_mut();
        }
        match caught("Alloc", body) {
            Ok(ptr) => ptr.as_ptr().cast(),
            Err(error) => {
                self.factory.logger().log(Level::Error, format_args!("{error}"));
                std::ptr::null_mut()
            }
        }
    }
}

/// Answers a `CreateAllocator` callback.
///
/// # Safety
/// `info` is a live memory info and `out` may be written.
pub(crate) unsafe fn create_allocator(
    factory: &Arc<FactoryState>,
    source: Option<&dyn AllocatorSource>,
    info: *const sys::OrtMemoryInfo,
    out: *mut *mut sys::OrtAllocator,
) -> Result<()> {
    let api = factory.api();
    let source = source.ok_or_else(|| Error::Internal("ORT asks for an allocator of an EP without memory".into()))?;
    // SAFETY: the caller vouches for `info`.
    let memory = unsafe { MemoryDevice::read(api, ((*api.ep()).MemoryInfo_GetMemoryDevice)(info)) };
    let allocator = source.create_allocator(memory)?;
    let c = sys::OrtAllocator {
        version: sys::COMPILED,
        Alloc: Some(alloc),
        Free: Some(free),
        Info: Some(allocator_info),
        Reserve: Some(reserve),
        GetStats: Some(get_stats),
        AllocOnStream: Some(alloc_on_stream),
        Shrink: Some(shrink),
    };
    // ORT's own info may go before the allocator does; ours lives as long as the factory's state.
    let info = factory.memory_info(memory).unwrap_or(info);
    let object = AllocatorObject { c, info, allocator, factory: factory.clone() };
    // SAFETY: the caller vouches for `out`.
    unsafe { out.write(Box::into_raw(Box::new(object)).cast()) };
    Ok(())
}

/// Answers a `ReleaseAllocator` callback.
///
/// # Safety
/// `this` is null or was made by [`create_allocator`], and is released once.
pub(crate) unsafe fn release_allocator(this: *mut sys::OrtAllocator) {
    if !this.is_null() {
        // SAFETY: the caller vouches for it.
        let object = unsafe { Box::from_raw(this.cast::<AllocatorObject>()) };
        caught_or((), || drop(object));
    }
}

// Every callback below: ORT passes the object that it got from `create_allocator` or `create_data_transfer`, and
// arguments that live as long as the call.

unsafe extern "system" fn alloc(this: *mut sys::OrtAllocator, size: usize) -> *mut c_void {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { AllocatorObject::get(this) };
    object.pointer(size, || object.allocator.alloc(size, None))
}

unsafe extern "system" fn alloc_on_stream(
    this: *mut sys::OrtAllocator,
    size: usize,
    stream: *mut sys::OrtSyncStream,
) -> *mut c_void {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { AllocatorObject::get(this) };
    // SAFETY: as above.
    let stream = unsafe { StreamRef::new(object.factory.api(), stream) };
    object.pointer(size, || object.allocator.alloc(size, stream))
}

unsafe extern "system" fn reserve(this: *const sys::OrtAllocator, size: usize) -> *mut c_void {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { AllocatorObject::get(this) };
    object.pointer(size, || object.allocator.reserve(size))
}

unsafe extern "system" fn free(this: *mut sys::OrtAllocator, ptr: *mut c_void) {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { AllocatorObject::get(this) };
    if let Some(ptr) = NonNull::new(ptr.cast()) {
        caught_or((), || object.allocator.free(ptr));
    }
}

unsafe extern "system" fn allocator_info(this: *const sys::OrtAllocator) -> *const sys::OrtMemoryInfo {
    // SAFETY: ORT's contract, see above.
    unsafe { AllocatorObject::get(this) }.info
}

unsafe extern "system" fn get_stats(
    this: *const sys::OrtAllocator,
    out: *mut *mut sys::OrtKeyValuePairs,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { AllocatorObject::get(this) };
    let api = object.factory.api();
    api.guard("GetStats", || {
        let pairs = super::device::OwnedPairs::new(api, &object.allocator.stats());
        // SAFETY: as above; ORT releases the pairs.
        unsafe { out.write(pairs.into_raw()) };
        Ok(())
    })
}

unsafe extern "system" fn shrink(this: *mut sys::OrtAllocator) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { AllocatorObject::get(this) };
    object.factory.api().guard("Shrink", || object.allocator.shrink())
}

/// What ORT holds as an `OrtDataTransferImpl`.
#[repr(C)]
struct TransferObject {
    c: sys::OrtDataTransferImpl,
    api: Api,
    transfer: Arc<dyn DataTransfer>,
}

/// An `OrtDataTransferImpl` that ORT owns.
pub(crate) fn create_data_transfer(api: Api, transfer: Arc<dyn DataTransfer>) -> *mut sys::OrtDataTransferImpl {
    let c = sys::OrtDataTransferImpl {
        ort_version_supported: sys::COMPILED,
        Release: Some(release_transfer),
        CanCopy: Some(can_copy),
        CopyTensors: Some(copy_tensors),
    };
    Box::into_raw(Box::new(TransferObject { c, api, transfer })).cast()
}

unsafe extern "system" fn release_transfer(this: *mut sys::OrtDataTransferImpl) {
    // SAFETY: ORT's contract, see above; released once.
    let object = unsafe { Box::from_raw(this.cast::<TransferObject>()) };
    caught_or((), || drop(object));
}

unsafe extern "system" fn can_copy(
    this: *const sys::OrtDataTransferImpl,
    src: *const sys::OrtMemoryDevice,
    dst: *const sys::OrtMemoryDevice,
) -> bool {
    // SAFETY: ORT's contract, see above.
    let (object, src, dst) = unsafe {
        let object = &*this.cast::<TransferObject>();
        (object, MemoryDevice::read(object.api, src), MemoryDevice::read(object.api, dst))
    };
    caught_or(false, || object.transfer.can_copy(src, dst))
}

unsafe extern "system" fn copy_tensors(
    this: *mut sys::OrtDataTransferImpl,
    src: *const *const sys::OrtValue,
    dst: *mut *mut sys::OrtValue,
    streams: *mut *mut sys::OrtSyncStream,
    count: usize,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { &*this.cast::<TransferObject>() };
    object.api.guard("CopyTensors", || {
        // SAFETY: each array has `count` entries, and `streams` may be null as a whole.
        let (src, dst, streams) = unsafe {
            let streams = if streams.is_null() { &[] } else { slice_from(streams, count) };
            (slice_from(src, count), slice_from(dst.cast_const(), count), streams)
        };
        let mut copies = src.iter().zip(dst).enumerate().map(|(i, (&src, &dst))| {
            let stream = streams.get(i).copied().unwrap_or(std::ptr::null_mut());
            // SAFETY: the values and the stream live as long as the call.
            unsafe { tensor_copy(object.api, src, dst, StreamRef::new(object.api, stream)) }
        });
        object.transfer.copy(&mut copies)
    })
}

/// # Safety
/// `src` and `dst` are live values for `'a`.
pub(super) unsafe fn tensor_copy<'a>(
    api: Api,
    src: *const sys::OrtValue,
    dst: *mut sys::OrtValue,
    stream: Option<StreamRef<'a>>,
) -> Result<TensorCopy<'a>> {
    let bytes = |value| {
        // SAFETY: the caller vouches for the value.
        let (dtype, shape) = unsafe { type_and_shape(api, value) }?;
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let len = elements.and_then(|n| dtype.bytes(n));
        len.ok_or_else(|| Error::Internal(format!("a {dtype} tensor of shape {shape:?} cannot be copied")))
    };
    let len = bytes(src)?;
    let room = bytes(dst)?;
    if len != room {
        return Err(Error::Internal(format!("a copy of {len} bytes into a tensor of {room}")));
    }
    let (mut from, mut to) = (std::ptr::null(), std::ptr::null_mut());
    // SAFETY: the caller vouches for the values.
    unsafe {
        ort!(api, GetTensorData(src, &raw mut from))?;
        ort!(api, GetTensorMutableData(dst, &raw mut to))?;
        Ok(TensorCopy {
            src: from.cast(),
            dst: to.cast(),
            len,
            src_memory: memory_of(api, src),
            dst_memory: memory_of(api, dst),
            stream,
        })
    }
}
