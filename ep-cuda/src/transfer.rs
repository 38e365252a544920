//! Copies between host and device, and between devices.

use crate::counters::{Counter, add as count};
use crate::gpu::{Core, Gpu, Queue};
use crate::memory::VENDOR;
use crate::staging::{Lane, Ring};
use abi::cuda::Event;
use abi::ort::{DataTransfer, DeviceKind, MemoryDevice, MemoryKind, TensorCopy};
use abi::{Error, Result};
use std::sync::Arc;

/// Copies of these GPUs' tensors.
pub struct Transfer(pub &'static [Arc<Gpu>]);

/// Whether a tensor is in one of our page-locked blocks.
fn is_pinned(place: MemoryDevice) -> bool {
    place.kind == DeviceKind::Gpu && place.vendor_id == VENDOR && place.memory == MemoryKind::HostAccessible
}

/// Which GPU a copy concerns: that of the side in device memory, else of a page-locked one.
fn device_of(copy: &TensorCopy<'_>) -> usize {
    let sides = [copy.src_memory, copy.dst_memory];
    let device = sides.iter().find(|side| !side.host_can_access()).or(sides.iter().find(|side| is_pinned(**side)));
    device.map_or(0, |side| side.device_id as usize)
}

impl Transfer {
    fn ours(&self, place: MemoryDevice) -> bool {
        let here = place.kind == DeviceKind::Gpu && place.vendor_id == VENDOR;
        here && !matches!(place.memory, MemoryKind::Other(_)) && (place.device_id as usize) < self.0.len()
    }

    fn open(&self, device: usize) -> Result<Arc<Core>> {
        let gpu = self.0.get(device);
        gpu.ok_or_else(|| Error::Internal(format!("a copy on GPU {device} of {}", self.0.len())))?.open()
    }

    /// By way of the host: not every pair of devices can reach each other's memory.
    fn between_devices(&self, copy: &TensorCopy<'_>) -> Result<()> {
        let mut bytes = vec![0u8; copy.len];
        let from = Batch::new(self.open(copy.src_memory.device_id as usize)?, None)?;
        from.lane.queue.stream.synchronize()?;
        from.lane.core.context().copy_to_host(&mut bytes, copy.src.addr() as u64)?;
        let to = Batch::new(self.open(copy.dst_memory.device_id as usize)?, None)?;
        to.lane.queue.stream.synchronize()?;
        to.lane.core.context().copy_to_device(copy.dst.addr() as u64, &bytes)
    }
}

impl DataTransfer for Transfer {
    fn can_copy(&self, src: MemoryDevice, dst: MemoryDevice) -> bool {
        let reaches = |place: MemoryDevice| self.ours(place) || place.host_can_access();
        reaches(src) && reaches(dst) && (self.ours(src) || self.ours(dst))
    }

    fn copy(&self, copies: &mut dyn Iterator<Item = Result<TensorCopy<'_>>>) -> Result<()> {
        let mut batch: Option<Batch> = None;
        for copy in copies {
            let copy = copy?;
            if copy.len == 0 {
                continue;
            }
            let [src, dst] = [copy.src_memory, copy.dst_memory];
            if !src.host_can_access() && !dst.host_can_access() && src.device_id != dst.device_id {
                batch.take().map_or(Ok(()), Batch::finish)?;
                self.between_devices(&copy)?;
                continue;
            }
            let core = self.open(device_of(&copy))?;
            let queue = copy.stream.and_then(|stream| core.find(stream)).map(|(_, queue)| queue);
            let mut fitting = match batch.take() {
                Some(batch) if batch.serves(&core, queue.as_deref()) => batch,
                other => {
                    other.map_or(Ok(()), Batch::finish)?;
                    Batch::new(core, queue)?
                }
            };
            fitting.add(&copy)?;
            batch = Some(fitting);
        }
        batch.map_or(Ok(()), Batch::finish)
    }
}

/// Copies on one stream.
struct Batch {
    lane: StreamLane,
    /// Whether the caller named no stream and expects the copies to be done.
    wait: bool,
    /// Lent, when there is need.
    ring: Option<Ring<Event>>,
}

impl Batch {
    fn new(core: Arc<Core>, queue: Option<Arc<Queue>>) -> Result<Self> {
        let wait = queue.is_none();
        let queue = queue.map_or_else(|| core.copies().clone(), |queue| (*queue).clone());
        if wait {
            // What is to be copied may still be in the making, on any stream.
            core.timeline().mark_all(|event| queue.stream.wait(event))?;
        }
        Ok(Self { lane: StreamLane { core, queue }, wait, ring: None })
    }

    /// Whether a copy on this stream, or without one, goes with this batch.
    fn serves(&self, core: &Arc<Core>, queue: Option<&Queue>) -> bool {
        let same = match queue {
            Some(queue) => !self.wait && queue.stream.handle() == self.lane.queue.stream.handle(),
            None => self.wait,
        };
        same && Arc::ptr_eq(core, &self.lane.core)
    }

    fn add(&mut self, copy: &TensorCopy<'_>) -> Result<()> {
        let Self { lane, ring, .. } = self;
        let (src, dst, len) = (copy.src, copy.dst, copy.len);
        let (src_address, dst_address) = (src.addr() as u64, dst.addr() as u64);
        let sides = (copy.src_memory.host_can_access(), copy.dst_memory.host_can_access());
        match sides {
            (true, false) => count(Counter::BytesToDevice, len as u64),
            (false, true) => count(Counter::BytesToHost, len as u64),
            _ => {}
        }
        // SAFETY: ORT's tensors have `len` bytes, and their users go by the stream. Page-locked tensors are of our pool,
        // which lets nobody have a freed block before the stream's work on it is done; pageable ones go through a ring,
        // and `finish` ends its batch before ORT gets to touch them.
        unsafe {
            match sides {
                (false, false) => lane.queue.stream.copy(dst_address, src_address, len),
                (true, false) if is_pinned(copy.src_memory) => lane.to_device(dst_address, src, len),
                (false, true) if is_pinned(copy.dst_memory) => lane.to_host(dst, src_address, len),
                (true, false) => borrow(lane, ring)?.upload(lane, dst_address, src, len),
                (false, true) => borrow(lane, ring)?.download(lane, dst, src_address, len),
                (true, true) => {
                    // Earlier copies may have to write the one or read the other.
                    ring.as_mut().map_or(Ok(()), |ring| ring.finish(lane))?;
                    lane.queue.stream.synchronize()?;
                    std::ptr::copy(src, dst, len);
                    Ok(())
                }
            }
        }
    }

    /// Ends the batch: what was downloaded has arrived.
    fn finish(self) -> Result<()> {
        let Self { lane, wait, ring } = self;
        if let Some(mut ring) = ring {
            ring.finish(&lane)?;
            lane.core.return_ring(ring);
        }
        if wait { lane.queue.stream.synchronize() } else { Ok(()) }
    }
}

fn borrow<'r>(lane: &StreamLane, ring: &'r mut Option<Ring<Event>>) -> Result<&'r mut Ring<Event>> {
    Ok(match ring {
        Some(ring) => ring,
        None => ring.insert(lane.core.borrow_ring()?),
    })
}

/// A stream of the driver.
struct StreamLane {
    core: Arc<Core>,
    queue: Queue,
}

impl Lane for StreamLane {
    type Mark = Event;

    unsafe fn to_device(&self, dst: u64, src: *const u8, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for both sides.
        unsafe { self.queue.stream.copy_to_device(dst, src, len) }
    }

    unsafe fn to_host(&self, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for both sides.
        unsafe { self.queue.stream.copy_to_host(dst, src, len) }
    }

    fn mark(&self, spare: Option<Event>) -> Result<Event> {
        let event = spare.map_or_else(|| Event::new(self.core.context()), Ok)?;
        event.record(&self.queue.stream)?;
        Ok(event)
    }

    fn wait(&self, mark: &Event) -> Result<()> {
        mark.synchronize()
    }
}
