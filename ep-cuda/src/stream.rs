//! ORT's streams and notifications over the driver's streams and events.

use crate::gpu::{Core, Gpu, Queue};
use crate::timeline::StreamKey;
use abi::cuda::{Event, Stream};
use abi::ort::{MemoryDevice, Notification, Stream as OrtStream, StreamRef, StreamSource};
use abi::{Error, Result};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// Makes streams.
pub struct Streams {
    /// The GPUs by the driver's number.
    pub gpus: &'static [Arc<Gpu>],
    /// The address of the stream that the user wants all work on.
    pub user_stream: Option<usize>,
}

impl StreamSource for Streams {
    fn create_stream(&self, device: MemoryDevice) -> Result<Box<dyn OrtStream>> {
        let gpu = self.gpus.get(device.device_id as usize);
        let core = gpu.ok_or_else(|| Error::Internal(format!("ORT asks for a stream on {device:?}")))?.open()?;
        let queue = match self.user_stream {
            None => Queue { stream: Stream::new(core.context())?, foreign: false },
            Some(handle) => {
                let handle = std::ptr::with_exposed_provenance_mut(handle);
                // SAFETY: who gives the option `user_compute_stream` promises a stream of the device that outlives the
                // session, and so this stream.
                Queue { stream: unsafe { Stream::from_raw(core.context(), handle) }, foreign: true }
            }
        };
        let key = core.timeline().add(queue.stream.handle().addr(), Arc::new(queue.clone()));
        Ok(Box::new(CudaStream { core, queue, key }))
    }
}

/// A stream as ORT sees it.
pub struct CudaStream {
    core: Arc<Core>,
    queue: Queue,
    key: StreamKey,
}

impl OrtStream for CudaStream {
    fn handle(&self) -> *mut c_void {
        self.queue.stream.handle()
    }

    fn notification(&self) -> Result<Box<dyn Notification>> {
        let event = Event::new(self.core.context())?;
        Ok(Box::new(CudaPoint { core: self.core.clone(), queue: self.queue.clone(), event, active: Mutex::new(false) }))
    }

    fn flush(&self) -> Result<()> {
        self.queue.stream.synchronize()
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // The pools take the stream's work for done from here on. A foreign stream may be gone already, the context is
        // not. At the process's end the driver may be gone too; then nothing is left to wait for.
        let _ = if self.queue.foreign { self.core.context().synchronize() } else { self.queue.stream.synchronize() };
        self.core.timeline().remove(self.key);
    }
}

/// A notification.
struct CudaPoint {
    core: Arc<Core>,
    queue: Queue,
    event: Event,
    active: Mutex<bool>,
}

impl CudaPoint {
    fn event(&self) -> Result<&Event> {
        let active = *self.active.lock().unwrap_or_else(PoisonError::into_inner);
        active.then_some(&self.event).ok_or_else(|| Error::Internal("a notification is waited for too early".into()))
    }
}

impl Notification for CudaPoint {
    fn activate(&self) -> Result<()> {
        self.event.record(&self.queue.stream)?;
        *self.active.lock().unwrap_or_else(PoisonError::into_inner) = true;
        Ok(())
    }

    fn wait_on_device(&self, consumer: Option<StreamRef<'_>>) -> Result<()> {
        let event = self.event()?;
        let ours = consumer.and_then(|stream| stream.downcast::<CudaStream>().map(|stream| stream.queue.clone()));
        let known = || consumer.and_then(|stream| self.core.find(stream)).map(|(_, queue)| (*queue).clone());
        match ours.or_else(known) {
            Some(consumer) => consumer.stream.wait(event),
            // A CPU node, or a stream that is none of the driver's.
            None => event.synchronize(),
        }
    }

    fn wait_on_host(&self) -> Result<()> {
        self.event()?.synchronize()
    }
}
