//! What the host does in the midst of a Run, where tensors' contents decide it.

use super::{Bases, DevPtr, Device, LaunchCx};
use crate::op::NodeLabel;
use abi::cuda::{Event, Stream, launch};
use abi::{Error, Result};

/// The host's part of a node. A program with such a step runs launch by launch, never as a CUDA graph.
pub trait HostStep: Send + Sync {
    /// Does it; all work before it is queued on the stream.
    ///
    /// # Errors
    /// When the driver refuses, or memory is short.
    fn run(&self, cx: &HostCx<'_>) -> Result<Fetched>;
}

/// What a Run found and did not find in device memory of weights that page-locked memory holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Experts that were there.
    pub hits: u64,
    /// Experts that were not.
    pub misses: u64,
    /// Bytes fetched for the latter.
    pub bytes: u64,
}

/// A Run at a [`HostStep`].
pub struct HostCx<'a> {
    device: &'a Device,
    stream: &'a Stream,
    bases: Bases<'a>,
}

impl<'a> HostCx<'a> {
    /// A Run of these addresses.
    ///
    /// # Safety
    /// They stay valid, for all that the program's steps are made for, until the stream's work is done.
    pub unsafe fn new(device: &'a Device, stream: &'a Stream, bases: Bases<'a>) -> Self {
        Self { device, stream, bases }
    }

    /// The device.
    pub fn device(&self) -> &'a Device {
        self.device
    }

    /// Waits for the work so far, and reads `count` numbers that it left at `from`.
    ///
    /// # Errors
    /// When the work or the copy fails.
    pub fn read(&self, from: DevPtr, count: usize) -> Result<Vec<u32>> {
        let mut numbers = vec![0u32; count];
        // SAFETY: the node's launches left as many numbers there; they are waited for before the vector is touched.
        unsafe { self.stream.copy_to_host(numbers.as_mut_ptr().cast(), from.bind(&self.bases), 4 * count)? };
        self.stream.synchronize()?;
        Ok(numbers)
    }

    /// Queues a copy of `numbers` to `to`.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// There is room for them, in the node's own scratch.
    pub unsafe fn write(&self, to: DevPtr, numbers: &[u32]) -> Result<()> {
        // SAFETY: pageable memory has been read when the call returns; the rest is the caller's promise.
        unsafe { self.stream.copy_to_device(to.bind(&self.bases), numbers.as_ptr().cast(), 4 * numbers.len()) }
    }

    /// Queues a copy of `bytes` bytes of page-locked memory to `to`.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// Both sides have that many bytes, live until the copy is done, and nobody writes them meanwhile but by this stream.
    pub unsafe fn fetch(&self, to: DevPtr, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.stream.copy_to_device(to.bind(&self.bases), from, bytes) }
    }

    /// Queues the launches that `write` writes down.
    ///
    /// # Errors
    /// As [`LaunchCx::push`], or when the driver refuses.
    pub fn launch(&self, label: &NodeLabel, write: impl FnOnce(&mut LaunchCx<'_>) -> Result<()>) -> Result<()> {
        let mut cx = LaunchCx::new(self.device, label, 0);
        write(&mut cx)?;
        if cx.scratch_bytes > 0 {
            return Err(Error::Internal(format!("{label}: the workspace is sealed while a Run is under way")));
        }
        for l in &cx.launches {
            // SAFETY: the kernels take their own parameter structs; the addresses are valid (`new`).
            unsafe { launch(self.stream, &l.function, &l.shape, &l.bind(&self.bases))? };
        }
        Ok(())
    }

    /// Lets what is queued from here on wait for `event`, of whatever stream.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.stream.wait(event)
    }

    /// Moves `event` behind all that is queued.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn record(&self, event: &Event) -> Result<()> {
        event.record(self.stream)
    }
}
