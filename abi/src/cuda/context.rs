//! A device's primary context, its memory, and copies that wait.

use super::{DeviceInfo, driver, is_out_of_memory};
use crate::{Error, Result};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// A device's primary context, retained as long as this lives. Other CUDA users of the process (a training
/// framework, another EP) share it, so addresses can be passed between them.
pub struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
    /// Carries the copies that wait, so that they wait for no other stream's work.
    transfers: sys::CUstream,
    info: DeviceInfo,
}

// SAFETY: contexts and streams may be used from any thread; the driver locks.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Keeps a context current on this thread. Such guards end in the reverse order of their making.
pub struct Current<'a> {
    pushed: bool,
    /// Bound to the thread, hence the pointer.
    _context: PhantomData<(&'a Context, *const ())>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = null_mut();
            // SAFETY: takes back what `enter` pushed on this thread; a driver that shut down answers an error.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

impl Context {
    /// Retains the primary context of device `ordinal`.
    pub fn new(ordinal: u32) -> Result<Arc<Self>> {
        driver()?;
        let (device, info) = DeviceInfo::read(ordinal)?;
        let mut handle = null_mut();
        // SAFETY: `device` is the driver's own; it writes one handle.
        unsafe { call!(cuDevicePrimaryCtxRetain(&mut handle, device)) }?;
        let mut context = Self { device, handle, transfers: null_mut(), info };
        let mut transfers = null_mut();
        let current = context.enter()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the driver writes one handle.
        unsafe { call!(cuStreamCreate(&mut transfers, flags)) }?;
        drop(current);
        context.transfers = transfers;
        Ok(Arc::new(context))
    }

    /// What the device is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub(super) fn handle(&self) -> sys::CUcontext {
        self.handle
    }

    /// Makes the context current on this thread until the guard ends; next to free where it is already.
    pub fn enter(&self) -> Result<Current<'_>> {
        let mut current = null_mut();
        // SAFETY: the driver is initialised; it writes one handle.
        unsafe { call!(cuCtxGetCurrent(&mut current)) }?;
        let pushed = current != self.handle;
        if pushed {
            // SAFETY: the context is retained.
            unsafe { call!(cuCtxPushCurrent_v2(self.handle)) }?;
        }
        Ok(Current { pushed, _context: PhantomData })
    }

    /// Bytes free and bytes in all on the device, other processes' use counted.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; the driver writes two sizes.
        unsafe { call!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free, total))
    }

    /// Waits for all work of the context.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: the context is current.
        unsafe { call!(cuCtxSynchronize()) }
    }

    /// Device memory, aligned to 256 bytes; never null, also for no bytes.
    pub fn alloc(&self, bytes: usize) -> Result<u64> {
        let _current = self.enter()?;
        let mut ptr = 0;
        // SAFETY: the context is current; the driver writes one address.
        match unsafe { call!(cuMemAlloc_v2(&mut ptr, bytes.max(1))) } {
            Ok(()) => Ok(ptr),
            Err(e) if is_out_of_memory(&e) => {
                let (free, total) = self.memory()?;
                let purpose = format!("a buffer on GPU {} ({})", self.info.ordinal, self.info.name);
                Err(Error::DeviceMemory { asked: bytes, used: total - free.min(total), free, limit: total, purpose })
            }
            Err(e) => Err(e),
        }
    }

    /// Gives back what [`alloc`](Self::alloc) gave. Waits for work that is under way on the device.
    pub fn free(&self, ptr: u64) {
        if let Ok(_current) = self.enter() {
            // SAFETY: the driver refuses an address that is not the start of an allocation.
            let _ = unsafe { sys::cuMemFree_v2(ptr) };
        }
    }

    /// Page-locked host memory, which every device copies at full speed and asynchronously. Contents are undefined.
    pub fn alloc_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        let _current = self.enter()?;
        let mut ptr = null_mut();
        // SAFETY: the context is current; the driver writes one pointer.
        let got = unsafe { call!(cuMemHostAlloc(&mut ptr, bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE)) };
        match got {
            Ok(()) => NonNull::new(ptr.cast())
                .ok_or_else(|| Error::Internal("cuMemHostAlloc succeeded with a null pointer".into())),
            Err(e) if is_out_of_memory(&e) => {
                Err(Error::Memory { asked: bytes, purpose: "page-locked host memory".into() })
            }
            Err(e) => Err(e),
        }
    }

    /// Gives back what [`alloc_pinned`](Self::alloc_pinned) gave; nobody may use it any more.
    pub fn free_pinned(&self, ptr: NonNull<u8>) {
        if let Ok(_current) = self.enter() {
            // SAFETY: the driver refuses a pointer that it did not give out.
            let _ = unsafe { sys::cuMemFreeHost(ptr.as_ptr().cast()) };
        }
    }

    /// Copies to the device and waits for that. Work on other streams is not waited for: whatever still uses the
    /// bytes at `dst` must have ended.
    pub fn copy_to_device(&self, dst: u64, src: &[u8]) -> Result<()> {
        self.transfer(src.len(), |stream| {
            // SAFETY: `src` is borrowed until the copy has been waited for; the driver checks `dst`.
            unsafe { call!(cuMemcpyHtoDAsync_v2(dst, src.as_ptr().cast::<c_void>(), src.len(), stream)) }
        })
    }

    /// Copies from the device and waits for that. Work on other streams is not waited for: what wrote the bytes at
    /// `src` must have ended.
    pub fn copy_to_host(&self, dst: &mut [u8], src: u64) -> Result<()> {
        self.transfer(dst.len(), |stream| {
            // SAFETY: `dst` is borrowed until the copy has been waited for; the driver checks `src`.
            unsafe { call!(cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast::<c_void>(), src, dst.len(), stream)) }
        })
    }

    /// Fills device memory and waits for that, under the terms of [`copy_to_device`](Self::copy_to_device).
    pub fn memset(&self, dst: u64, value: u8, bytes: usize) -> Result<()> {
        self.transfer(bytes, |stream| {
            // SAFETY: the driver checks the range.
            unsafe { call!(cuMemsetD8Async(dst, value, bytes, stream)) }
        })
    }

    /// Starts a copy of `bytes` bytes on the stream of copies, then waits for it.
    fn transfer(&self, bytes: usize, start: impl FnOnce(sys::CUstream) -> Result<()>) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.enter()?;
        start(self.transfers)?;
        // SAFETY: the stream lives as long as the context.
        unsafe { call!(cuStreamSynchronize(self.transfers)) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let (false, Ok(_current)) = (self.transfers.is_null(), self.enter()) {
            // SAFETY: nobody else has the stream.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.transfers) };
        }
        // SAFETY: gives back what `new` retained; a driver that shut down answers an error.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Device memory that is freed on drop.
pub struct DeviceBuffer {
    context: Arc<Context>,
    ptr: u64,
    len: usize,
}

impl DeviceBuffer {
    /// `bytes` bytes with undefined contents.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        Ok(Self { ptr: context.alloc(bytes)?, len: bytes, context: context.clone() })
    }

    /// A copy of `bytes` on the device.
    pub fn from_host(context: &Arc<Context>, bytes: &[u8]) -> Result<Self> {
        let buffer = Self::new(context, bytes.len())?;
        context.copy_to_device(buffer.ptr, bytes)?;
        Ok(buffer)
    }

    /// The device address.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it was made for no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.context.free(self.ptr);
    }
}
