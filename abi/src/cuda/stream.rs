//! Streams and events.

use super::{Context, check};
use crate::Result;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// A queue of work on a device. Clones share it.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    handle: sys::CUstream,
    owned: bool,
}

// SAFETY: a stream may be used from any thread; the driver locks.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Stream {
    /// A new stream that does not wait for the default stream.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let _current = context.enter()?;
        let mut handle = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the driver writes one handle.
        unsafe { call!(cuStreamCreate(&mut handle, flags)) }?;
        Ok(Self(Arc::new(Inner { context: context.clone(), handle, owned: true })))
    }

    /// Somebody else's stream, which is neither waited for nor destroyed on drop.
    ///
    /// # Safety
    /// `handle` is a stream of that context (null: the default stream) and lives as long as this and its clones.
    pub unsafe fn from_raw(context: &Arc<Context>, handle: *mut c_void) -> Self {
        Self(Arc::new(Inner { context: context.clone(), handle: handle.cast(), owned: false }))
    }

    /// The `CUstream`.
    pub fn handle(&self) -> *mut c_void {
        self.0.handle.cast()
    }

    /// The context that it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    /// Waits for all work on it.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.0.context.enter()?;
        // SAFETY: the stream is alive.
        unsafe { call!(cuStreamSynchronize(self.0.handle)) }
    }

    /// Whether work on it is being recorded into somebody's graph instead of run.
    pub fn is_capturing(&self) -> Result<bool> {
        let _current = self.0.context.enter()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; the driver writes one value.
        unsafe { call!(cuStreamIsCapturing(self.0.handle, &mut status)) }?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Queues a copy; both addresses may be of any device's or of page-locked host memory.
    ///
    /// # Safety
    /// `bytes` bytes are valid at both addresses, and unused by others, until the copy has run.
    pub unsafe fn copy(&self, dst: u64, src: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.0.context.enter()?;
        // SAFETY: as the caller promises; the stream is alive.
        unsafe { call!(cuMemcpyAsync(dst, src, bytes, self.0.handle)) }
    }

    /// Queues a copy from host memory. Pageable memory has been read when this returns.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    pub unsafe fn copy_to_device(&self, dst: u64, src: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.0.context.enter()?;
        // SAFETY: as the caller promises; the stream is alive.
        unsafe { call!(cuMemcpyHtoDAsync_v2(dst, src.cast::<c_void>(), bytes, self.0.handle)) }
    }

    /// Queues a copy to host memory. To pageable memory, this returns when the copy has been done.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    pub unsafe fn copy_to_host(&self, dst: *mut u8, src: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.0.context.enter()?;
        // SAFETY: as the caller promises; the stream is alive.
        unsafe { call!(cuMemcpyDtoHAsync_v2(dst.cast::<c_void>(), src, bytes, self.0.handle)) }
    }

    /// Queues filling device memory with one byte's value.
    ///
    /// # Safety
    /// `bytes` bytes are valid at `dst`, and unused by others, until it has run.
    pub unsafe fn memset(&self, dst: u64, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.0.context.enter()?;
        // SAFETY: as the caller promises; the stream is alive.
        unsafe { call!(cuMemsetD8Async(dst, value, bytes, self.0.handle)) }
    }

    /// Lets work queued from here on wait for `event`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _current = self.0.context.enter()?;
        // SAFETY: both are alive, and an event that is destroyed later is kept by the driver until it has passed.
        unsafe { call!(cuStreamWaitEvent(self.0.handle, event.handle, 0)) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if let Ok(_current) = self.context.enter() {
            // SAFETY: the stream is ours; a driver that shut down answers errors.
            unsafe {
                let _ = sys::cuStreamSynchronize(self.handle);
                let _ = sys::cuStreamDestroy_v2(self.handle);
            }
        }
    }
}

/// A point in a stream's work.
pub struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: an event may be used from any thread; the driver locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that takes no time stamps, which is cheaper.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        Self::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event for [`elapsed_ms`](Self::elapsed_ms).
    pub fn with_timing(context: &Arc<Context>) -> Result<Self> {
        Self::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Self> {
        let _current = context.enter()?;
        let mut handle = null_mut();
        // SAFETY: the context is current; the driver writes one handle.
        unsafe { call!(cuEventCreate(&mut handle, flags as u32)) }?;
        Ok(Self { context: context.clone(), handle })
    }

    /// The `CUevent`.
    pub fn handle(&self) -> *mut c_void {
        self.handle.cast()
    }

    /// Moves it behind the work queued on `stream` so far.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: both are alive.
        unsafe { call!(cuEventRecord(self.handle, stream.0.handle)) }
    }

    /// Whether the work in front of it is done; true where it was never recorded.
    pub fn query(&self) -> Result<bool> {
        let _current = self.context.enter()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.handle) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Waits for the work in front of it.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the event is alive.
        unsafe { call!(cuEventSynchronize(self.handle)) }
    }

    /// Milliseconds from `since` to this one, both made by [`with_timing`](Self::with_timing) and passed.
    pub fn elapsed_ms(&self, since: &Event) -> Result<f32> {
        let _current = self.context.enter()?;
        let mut elapsed = 0.0;
        // SAFETY: both events are alive; the driver writes one float.
        unsafe { call!(cuEventElapsedTime_v2(&mut elapsed, since.handle, self.handle)) }?;
        Ok(elapsed)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: the event is ours; a driver that shut down answers an error.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
