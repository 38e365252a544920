//! Streams and the notifications between them.

use super::status::caught_or;
use super::{Api, MemoryDevice, sys};
use crate::error::{Error, Result};
use std::any::Any;
use std::ffi::c_void;
use std::marker::PhantomData;

/// A device's queue of work. ORT makes one a thread, at the thread's first Run, and may drop it on another thread.
pub trait Stream: Any + Send + Sync {
    /// The handle that kernels and other libraries use, e.g. a `CUstream`.
    fn handle(&self) -> *mut c_void;

    /// A point in this stream that others can wait for.
    ///
    /// # Errors
    /// Fail the Run.
    fn notification(&self) -> Result<Box<dyn Notification>>;

    /// Waits for all work in the stream: the end of a Run whose caller wants results.
    ///
    /// # Errors
    /// Fail the Run.
    fn flush(&self) -> Result<()>;

    /// The end of a Run, before [`Self::flush`]; neither is called when the caller chose not to synchronise.
    ///
    /// # Errors
    /// Fail the Run.
    fn run_end(&self) -> Result<()> {
        Ok(())
    }
}

/// A point in a stream.
pub trait Notification: Send + Sync {
    /// Records the point: all work in the stream so far.
    ///
    /// # Errors
    /// Fail the Run.
    fn activate(&self) -> Result<()>;

    /// Lets `consumer`'s later work wait for the point, without the host waiting. Without a consumer the host waits.
    ///
    /// # Errors
    /// Fail the Run.
    fn wait_on_device(&self, consumer: Option<StreamRef<'_>>) -> Result<()>;

    /// Lets the host wait for the point.
    ///
    /// # Errors
    /// Fail the Run.
    fn wait_on_host(&self) -> Result<()>;
}

/// Makes streams.
pub trait StreamSource: Send + Sync {
    /// A stream on this device.
    ///
    /// # Errors
    /// Fail the Run that first needs the stream.
    fn create_stream(&self, device: MemoryDevice) -> Result<Box<dyn Stream>>;
}

/// A stream that ORT passed in, of this EP or of another.
#[derive(Clone, Copy)]
pub struct StreamRef<'a> {
    api: Api,
    /// Null where ORT tells no more than the handle.
    raw: *mut sys::OrtSyncStream,
    handle: *mut c_void,
    call: PhantomData<&'a ()>,
}

impl<'a> StreamRef<'a> {
    /// # Safety
    /// `raw` is null or a stream that is live for `'a`.
    pub(crate) unsafe fn new(api: Api, raw: *mut sys::OrtSyncStream) -> Option<Self> {
        (!raw.is_null()).then_some(Self { api, raw, handle: std::ptr::null_mut(), call: PhantomData })
    }

    /// The stream of a handle that is null or lives for `'a`.
    pub(crate) fn of_handle(api: Api, handle: *mut c_void) -> Option<Self> {
        (!handle.is_null()).then_some(Self { api, raw: std::ptr::null_mut(), handle, call: PhantomData })
    }

    /// The stream's handle.
    pub fn handle(&self) -> *mut c_void {
        if self.raw.is_null() {
            return self.handle;
        }
        // SAFETY: the stream is live.
        unsafe { ((*self.api.ort()).SyncStream_GetHandle)(self.raw) }
    }

    /// The stream itself, if it is a `T` of this library. `None` in a kernel, where ORT tells the handle alone.
    pub fn downcast<T: Stream>(&self) -> Option<&'a T> {
        if self.raw.is_null() {
            return None;
        }
        // SAFETY: the stream is live. Only this library's streams have this library's `Release`.
        let stream: &'a dyn Any = unsafe {
            let object = ((*self.api.ep()).SyncStream_GetImpl)(self.raw);
            let ours: unsafe extern "system" fn(*mut sys::OrtSyncStreamImpl) = release_stream;
            let is_ours =
                !object.is_null() && (*object).Release.is_some_and(|release| std::ptr::fn_addr_eq(release, ours));
            if !is_ours {
                return None;
            }
            &*(*object.cast::<StreamObject>()).stream
        };
        stream.downcast_ref()
    }
}

/// What ORT holds as an `OrtSyncStreamImpl`.
#[repr(C)]
struct StreamObject {
    c: sys::OrtSyncStreamImpl,
    api: Api,
    stream: Box<dyn Stream>,
}

/// What ORT holds as an `OrtSyncNotificationImpl`.
#[repr(C)]
struct NotificationObject {
    c: sys::OrtSyncNotificationImpl,
    api: Api,
    notification: Box<dyn Notification>,
}

/// Answers a `CreateSyncStreamForDevice` callback.
///
/// # Safety
/// `device` is a live memory device and `out` may be written.
pub(crate) unsafe fn create_stream(
    api: Api,
    source: Option<&dyn StreamSource>,
    device: *const sys::OrtMemoryDevice,
    out: *mut *mut sys::OrtSyncStreamImpl,
) -> Result<()> {
    let source = source.ok_or_else(|| Error::Internal("ORT asks for a stream of an EP without streams".into()))?;
    // SAFETY: the caller vouches for `device`.
    let device = unsafe { MemoryDevice::read(api, device) };
    let stream = source.create_stream(device)?;
    let c = sys::OrtSyncStreamImpl {
        ort_version_supported: sys::COMPILED,
        Release: Some(release_stream),
        GetHandle: Some(get_handle),
        CreateNotification: Some(create_notification),
        Flush: Some(flush),
        OnSessionRunEnd: Some(on_session_run_end),
    };
    // SAFETY: the caller vouches for `out`.
    unsafe { out.write(Box::into_raw(Box::new(StreamObject { c, api, stream })).cast()) };
    Ok(())
}

// Every callback below: ORT passes the object that it got from `create_stream` or `create_notification`, and arguments
// that live as long as the call.

/// # Safety
/// ORT's contract, see above.
unsafe fn stream_of<'a>(this: *mut sys::OrtSyncStreamImpl) -> &'a StreamObject {
    // SAFETY: the caller vouches for it, and nothing borrows the object mutably.
    unsafe { &*this.cast() }
}

/// # Safety
/// ORT's contract, see above.
unsafe fn notification_of<'a>(this: *mut sys::OrtSyncNotificationImpl) -> &'a NotificationObject {
    // SAFETY: the caller vouches for it, and nothing borrows the object mutably.
    unsafe { &*this.cast() }
}

unsafe extern "system" fn release_stream(this: *mut sys::OrtSyncStreamImpl) {
    // SAFETY: ORT's contract, see above; released once.
    let object = unsafe { Box::from_raw(this.cast::<StreamObject>()) };
    caught_or((), || drop(object));
}

unsafe extern "system" fn get_handle(this: *mut sys::OrtSyncStreamImpl) -> *mut c_void {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { stream_of(this) };
    caught_or(std::ptr::null_mut(), || object.stream.handle())
}

unsafe extern "system" fn create_notification(
    this: *mut sys::OrtSyncStreamImpl,
    out: *mut *mut sys::OrtSyncNotificationImpl,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { stream_of(this) };
    object.api.guard("CreateNotification", || {
        let notification = object.stream.notification()?;
        let c = sys::OrtSyncNotificationImpl {
            ort_version_supported: sys::COMPILED,
            Release: Some(release_notification),
            Activate: Some(activate),
            WaitOnDevice: Some(wait_on_device),
            WaitOnHost: Some(wait_on_host),
        };
        let made = NotificationObject { c, api: object.api, notification };
        // SAFETY: ORT's contract, see above.
        unsafe { out.write(Box::into_raw(Box::new(made)).cast()) };
        Ok(())
    })
}

unsafe extern "system" fn flush(this: *mut sys::OrtSyncStreamImpl) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { stream_of(this) };
    object.api.guard("Flush", || object.stream.flush())
}

unsafe extern "system" fn on_session_run_end(this: *mut sys::OrtSyncStreamImpl) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { stream_of(this) };
    object.api.guard("OnSessionRunEnd", || object.stream.run_end())
}

unsafe extern "system" fn release_notification(this: *mut sys::OrtSyncNotificationImpl) {
    // SAFETY: ORT's contract, see above; released once.
    let object = unsafe { Box::from_raw(this.cast::<NotificationObject>()) };
    caught_or((), || drop(object));
}

unsafe extern "system" fn activate(this: *mut sys::OrtSyncNotificationImpl) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { notification_of(this) };
    object.api.guard("Activate", || object.notification.activate())
}

unsafe extern "system" fn wait_on_device(
    this: *mut sys::OrtSyncNotificationImpl,
    consumer: *mut sys::OrtSyncStream,
) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { notification_of(this) };
    // SAFETY: as above. The consumer is null when a CPU node waits.
    let consumer = unsafe { StreamRef::new(object.api, consumer) };
    object.api.guard("WaitOnDevice", || object.notification.wait_on_device(consumer))
}

unsafe extern "system" fn wait_on_host(this: *mut sys::OrtSyncNotificationImpl) -> sys::OrtStatusPtr {
    // SAFETY: ORT's contract, see above.
    let object = unsafe { notification_of(this) };
    object.api.guard("WaitOnHost", || object.notification.wait_on_host())
}
