//! ORT's allocators over the pools.

use crate::gpu::Gpu;
use crate::pool::Stats;
use abi::ort::{Allocator, AllocatorSource, DeviceKind, MemoryDevice, MemoryInfo, MemoryKind, StreamRef};
use abi::{Error, Result};
use std::ptr::NonNull;
use std::sync::Arc;

/// NVIDIA's PCI vendor id, by which ORT and its callers name this memory.
pub const VENDOR: u32 = 0x10DE;

/// One of a GPU's memories.
pub fn place(ordinal: u32, memory: MemoryKind) -> MemoryDevice {
    MemoryDevice { kind: DeviceKind::Gpu, memory, vendor_id: VENDOR, device_id: ordinal }
}

/// The memories of a GPU that tensors can be in.
pub fn memories(ordinal: u32) -> Vec<MemoryInfo> {
    let memory = [("NxrtCuda", MemoryKind::Default), ("NxrtCudaPinned", MemoryKind::HostAccessible)];
    let info = |(name, kind): (&str, _)| MemoryInfo { name: name.into(), device: place(ordinal, kind), alignment: 0 };
    memory.map(info).into()
}

/// Makes the allocators of these GPUs.
pub struct Allocators(pub &'static [Arc<Gpu>]);

impl AllocatorSource for Allocators {
    fn create_allocator(&self, memory: MemoryDevice) -> Result<Box<dyn Allocator>> {
        let gpu = self.0.get(memory.device_id as usize).filter(|_| memory.vendor_id == VENDOR);
        match (gpu.cloned(), memory.memory) {
            (Some(gpu), MemoryKind::Default) => Ok(Box::new(DeviceAllocator(gpu))),
            (Some(gpu), MemoryKind::HostAccessible) => Ok(Box::new(PinnedAllocator(gpu))),
            _ => Err(Error::Internal(format!("ORT asks for an allocator of {memory:?}"))),
        }
    }
}

fn pointer(address: usize) -> Result<NonNull<u8>> {
    let pointer = NonNull::new(std::ptr::with_exposed_provenance_mut(address));
    pointer.ok_or_else(|| Error::Internal("the driver gave memory at the address 0".into()))
}

/// A GPU's own memory.
struct DeviceAllocator(Arc<Gpu>);

impl Allocator for DeviceAllocator {
    fn alloc(&self, size: usize, stream: Option<StreamRef<'_>>) -> Result<NonNull<u8>> {
        let core = self.0.open()?;
        let stream = stream.and_then(|stream| core.find(stream)).map(|(key, _)| key);
        pointer(core.device_pool().alloc(size, stream).ok_or_else(|| core.shortage(size, "a tensor"))?)
    }

    fn reserve(&self, size: usize) -> Result<NonNull<u8>> {
        let core = self.0.open()?;
        pointer(core.device_pool().reserve(size).ok_or_else(|| core.shortage(size, "an initializer"))?)
    }

    fn free(&self, ptr: NonNull<u8>) {
        if let Ok(core) = self.0.open() {
            core.device_pool().free(ptr.addr().get());
        }
    }

    fn stats(&self) -> Vec<(String, String)> {
        let stats = self.0.open().map(|core| core.device_pool().stats()).unwrap_or_default();
        // -1 is how ORT says that there is none.
        let limit = self.0.budget().limit().map_or_else(|| "-1".into(), |limit| limit.to_string());
        figures(stats, limit)
    }

    fn shrink(&self) -> Result<()> {
        self.0.open()?.device_pool().shrink();
        Ok(())
    }
}

/// Page-locked host memory, under the GPU's name.
struct PinnedAllocator(Arc<Gpu>);

impl Allocator for PinnedAllocator {
    fn alloc(&self, size: usize, _stream: Option<StreamRef<'_>>) -> Result<NonNull<u8>> {
        let core = self.0.open()?;
        pointer(core.pinned_pool().alloc(size, None).ok_or_else(|| core.pinned_shortage(size))?)
    }

    fn free(&self, ptr: NonNull<u8>) {
        if let Ok(core) = self.0.open() {
            core.pinned_pool().free(ptr.addr().get());
        }
    }

    fn stats(&self) -> Vec<(String, String)> {
        let stats = self.0.open().map(|core| core.pinned_pool().stats()).unwrap_or_default();
        figures(stats, "-1".into())
    }

    fn shrink(&self) -> Result<()> {
        self.0.open()?.pinned_pool().shrink();
        Ok(())
    }
}

/// The pool's figures by the names of ORT's arena.
fn figures(stats: Stats, limit: String) -> Vec<(String, String)> {
    let named = [
        ("NumAllocs", stats.allocs),
        ("NumReserves", stats.reserves),
        ("NumArenaExtensions", stats.extensions),
        ("NumArenaShrinkages", stats.shrinkages),
        ("InUse", stats.in_use),
        ("TotalAllocated", stats.held),
        ("MaxInUse", stats.max_in_use),
        ("MaxAllocSize", stats.largest),
    ];
    let figures = named.iter().map(|(name, value)| ((*name).into(), value.to_string()));
    std::iter::once(("Limit".into(), limit)).chain(figures).collect()
}
