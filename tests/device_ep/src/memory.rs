//! Allocators and copies.

use crate::arena::arena;
use crate::report::count;
use crate::stream::queue_of;
use abi::ort::{Allocator, AllocatorSource, DataTransfer, DeviceKind, MemoryDevice, MemoryKind, StreamRef, TensorCopy};
use abi::{Error, Result};
use std::alloc::Layout;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Mutex;

/// The vendor id that tests pass to `OrtDevice.make`.
pub const VENDOR: u32 = 0xBEEF;

/// One of the device's memories.
pub fn place(memory: MemoryKind) -> MemoryDevice {
    MemoryDevice { kind: DeviceKind::Gpu, memory, vendor_id: VENDOR, device_id: 0 }
}

/// Makes allocators; `fail` makes it refuse.
pub struct Source {
    pub fail: bool,
}

impl AllocatorSource for Source {
    fn create_allocator(&self, memory: MemoryDevice) -> Result<Box<dyn Allocator>> {
        if self.fail {
            return Err(Error::Internal("injected failure in CreateAllocator".into()));
        }
        match memory.memory {
            MemoryKind::Default => Ok(Box::new(DeviceAllocator)),
            _ => Ok(Box::new(PinnedAllocator::default())),
        }
    }
}

/// The arena's memory.
struct DeviceAllocator;

impl Allocator for DeviceAllocator {
    fn alloc(&self, size: usize, stream: Option<StreamRef<'_>>) -> Result<NonNull<u8>> {
        count(if stream.is_some() { "alloc_on_stream" } else { "alloc" });
        let purpose = || Error::Memory { asked: size, purpose: "a tensor on the emulated device".into() };
        arena().alloc(size).ok_or_else(purpose)
    }

    fn reserve(&self, size: usize) -> Result<NonNull<u8>> {
        count("reserve");
        let purpose = || Error::Memory { asked: size, purpose: "a weight on the emulated device".into() };
        arena().alloc(size).ok_or_else(purpose)
    }

    fn free(&self, ptr: NonNull<u8>) {
        count(if arena().free(ptr) { "free" } else { "bad_free" });
    }

    fn stats(&self) -> Vec<(String, String)> {
        vec![("NumAllocs".into(), arena().live().to_string())]
    }
}

/// Host memory under the device's name.
#[derive(Default)]
struct PinnedAllocator {
    layouts: Mutex<HashMap<usize, Layout>>,
}

impl Allocator for PinnedAllocator {
    fn alloc(&self, size: usize, _stream: Option<StreamRef<'_>>) -> Result<NonNull<u8>> {
        count("alloc_pinned");
        let short = || Error::Memory { asked: size, purpose: "a host-accessible tensor".into() };
        let layout = Layout::from_size_align(size, 64).map_err(|_| short())?;
        // SAFETY: callers never ask for 0 bytes.
        let ptr = NonNull::new(unsafe { std::alloc::alloc(layout) }).ok_or_else(short)?;
        self.layouts.lock().expect("no panic while locked").insert(ptr.addr().get(), layout);
        Ok(ptr)
    }

    fn free(&self, ptr: NonNull<u8>) {
        match self.layouts.lock().expect("no panic while locked").remove(&ptr.addr().get()) {
            // SAFETY: allocated above with this layout.
            Some(layout) => unsafe { std::alloc::dealloc(ptr.as_ptr(), layout) },
            None => count("bad_free"),
        }
    }
}

/// Copies between the host and the arena.
pub struct Transfer;

/// An address that may go to a stream's thread; streams order its uses.
struct Address(*mut u8);
// SAFETY: plain addresses; the arena checks those of the device, and whoever waits for the stream keeps the host's alive.
unsafe impl Send for Address {}

impl DataTransfer for Transfer {
    fn can_copy(&self, src: MemoryDevice, dst: MemoryDevice) -> bool {
        let ours = |place: MemoryDevice| place.kind == DeviceKind::Gpu && place.vendor_id == VENDOR;
        (ours(src) || ours(dst)) && (ours(src) || src.host_can_access()) && (ours(dst) || dst.host_can_access())
    }

    fn copy(&self, copies: &mut dyn Iterator<Item = Result<TensorCopy<'_>>>) -> Result<()> {
        for copy in copies {
            transfer(&copy?)?;
        }
        Ok(())
    }
}

fn transfer(copy: &TensorCopy<'_>) -> Result<()> {
    let len = copy.len;
    let queue = copy.stream.and_then(|stream| queue_of(stream.handle()));
    let timing = if queue.is_some() { "stream" } else { "sync" };
    let to = Address(copy.dst);
    let (from_host, to_host) = (copy.src_memory.host_can_access(), copy.dst_memory.host_can_access());
    let direction = match (from_host, to_host) {
        (true, true) => "h2h",
        (true, false) => "h2d",
        (false, true) => "d2h",
        (false, false) => "d2d",
    };
    count(&format!("copy_{direction}_{timing}"));
    let write = move |bytes: &[u8]| {
        let to = to;
        if to_host {
            // SAFETY: the caller's tensor has `len` bytes that the host can write.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.0, len) }
        } else {
            arena().write(to.0, bytes);
        }
    };
    if from_host {
        // Like a driver that stages pageable memory: the source is read before the call returns.
        let mut bytes = vec![0u8; len];
        // SAFETY: the caller's tensor has `len` bytes that the host can read.
        unsafe { std::ptr::copy_nonoverlapping(copy.src, bytes.as_mut_ptr(), len) };
        match queue {
            Some(queue) => queue.push(move || write(&bytes)),
            None => write(&bytes),
        }
    } else {
        let from = Address(copy.src.cast_mut());
        match queue {
            Some(queue) => queue.push(move || {
                let from = from;
                write(&arena().read(from.0, len));
            }),
            None => write(&arena().read(from.0, len)),
        }
    }
    Ok(())
}
