//! A CUDA device as kernels see it: its limits, its functions, memory for weights.

use super::{Bases, DevPtr, Launch, images};
use abi::cuda::{Context, DeviceInfo, Function, LaunchShape, Library, Stream, launch};
use abi::{Error, Result};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Hands out device memory; counts it where a session bounds it.
pub trait DeviceMemory: Send + Sync {
    /// `bytes`, more than 0, aligned to 256, that live until [`Self::free`].
    ///
    /// # Errors
    /// When memory is short.
    fn alloc(&self, bytes: usize) -> Result<u64>;

    /// Takes back what [`Self::alloc`] gave; work that uses it has ended.
    fn free(&self, address: u64, bytes: usize);
}

/// A device with its loaded kernels.
pub struct Device {
    context: Arc<Context>,
    memory: Arc<dyn DeviceMemory>,
    limits: Limits,
    libraries: Mutex<HashMap<&'static str, Arc<Library>>>,
    /// For work at Compile.
    setup: OnceLock<Stream>,
}

/// What a session allows of a device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// Dynamic shared memory that a block may ask for, in bytes; 0 for the device's own limit.
    pub shared: u32,
    /// Whether kernels may start before their predecessors have ended.
    pub overlap: bool,
}

impl Device {
    /// The device of `context`.
    pub fn new(context: Arc<Context>, memory: Arc<dyn DeviceMemory>, limits: Limits) -> Self {
        let own = context.info().shared_limit;
        let shared = if limits.shared == 0 { own } else { own.min(limits.shared) };
        Self {
            context,
            memory,
            limits: Limits { shared, ..limits },
            libraries: Mutex::default(),
            setup: OnceLock::new(),
        }
    }

    /// What the driver says of it.
    pub fn info(&self) -> &DeviceInfo {
        self.context.info()
    }

    /// The context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Dynamic shared memory that a block may ask for, in bytes.
    pub fn shared_limit(&self) -> u32 {
        self.limits.shared
    }

    /// Whether kernels may start before their predecessors have ended.
    pub fn overlap(&self) -> bool {
        self.limits.overlap
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.context.info().multiprocessors
    }

    /// Kernel `name` of the image `image` (the folder of its `.cu`, with `_` for `/`). Loads the image at first use.
    ///
    /// # Errors
    /// When the driver refuses the image, or the name is not there.
    pub fn function(&self, image: &str, name: &str) -> Result<Function> {
        let (image, bytes) = images::find(image)
            .ok_or_else(|| Error::Internal(format!("this build has no CUDA kernels of '{image}' (feature `cuda`)")))?;
        let mut libraries = self.libraries.lock().unwrap_or_else(PoisonError::into_inner);
        let library = match libraries.get(image) {
            Some(library) => library.clone(),
            None => {
                let library = Library::load(&self.context, bytes)?;
                libraries.insert(image, library.clone());
                library
            }
        };
        drop(libraries);
        library.function(name)
    }

    /// Uninitialised memory.
    ///
    /// # Errors
    /// When memory is short.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer> {
        let address = if bytes == 0 { 0 } else { self.memory.alloc(bytes)? };
        Ok(Buffer { address, bytes, memory: self.memory.clone() })
    }

    /// A copy of `bytes` in device memory.
    ///
    /// # Errors
    /// When memory is short or the copy fails.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.alloc(bytes.len())?;
        if !bytes.is_empty() {
            self.context.copy_to_device(buffer.address, bytes)?;
        }
        Ok(buffer)
    }
}

/// Page-locked host memory that frees itself, which the device copies from while the host goes on.
pub struct Pinned {
    start: NonNull<u8>,
    bytes: usize,
    context: Arc<Context>,
}

// SAFETY: plain memory; who writes it sees to it that nobody else touches the bytes.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Uninitialised memory.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new(device: &Device, bytes: usize) -> Result<Self> {
        Ok(Self { start: device.context.alloc_pinned(bytes)?, bytes, context: device.context.clone() })
    }

    /// The byte at `offset`, behind which there are `bytes` more. Panics when there are not.
    pub fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "a place in page-locked memory");
        // SAFETY: in bounds.
        unsafe { self.start.add(offset) }.as_ptr()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.free_pinned(self.start);
    }
}

/// Bytes of a [`Window`].
const WINDOW: usize = 16 << 20;

/// Device memory through which a constant passes in parts, on its way into another layout.
pub struct Window<'a> {
    device: &'a Device,
    buffer: Buffer,
    taken: usize,
}

impl<'a> Window<'a> {
    /// A window for up to `parts` parts that take `bytes` bytes each, and how many of them go through at once.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new(device: &'a Device, parts: usize, bytes: usize) -> Result<(Self, usize)> {
        let at_once = (WINDOW / bytes.max(1)).clamp(1, parts.max(1));
        // A few pieces, each aligned.
        let buffer = device.alloc(at_once * bytes + 4 * Self::ALIGN)?;
        Ok((Self { device, buffer, taken: 0 }, at_once))
    }

    const ALIGN: usize = 256;

    /// Brings a piece of a part to the device; null when it is empty.
    ///
    /// # Errors
    /// When the copy fails.
    pub fn put(&mut self, piece: &[u8]) -> Result<DevPtr> {
        if piece.is_empty() {
            return Ok(DevPtr::NULL);
        }
        let at = self.buffer.address() + self.taken as u64;
        self.taken += piece.len().next_multiple_of(Self::ALIGN);
        assert!(self.taken <= self.buffer.len(), "a part of a constant is larger than its window");
        self.device.context.copy_to_device(at, piece)?;
        Ok(DevPtr::absolute(at))
    }

    /// Runs `launches`, which read what is in the window, and empties it.
    ///
    /// # Errors
    /// When the driver refuses, or a kernel fails.
    ///
    /// # Safety
    /// The launches' addresses are absolute and valid.
    pub unsafe fn take(&mut self, launches: &[Launch]) -> Result<()> {
        let stream = match self.device.setup.get() {
            Some(stream) => stream,
            None => {
                let made = Stream::new(&self.device.context)?;
                self.device.setup.get_or_init(|| made)
            }
        };
        for l in launches {
            let shape = LaunchShape { overlap: false, ..l.shape };
            let params = l.bind(&Bases { workspace: 0, inputs: &[], outputs: &[] });
            // SAFETY: the kernel takes this struct; the addresses are as the caller promises.
            unsafe { launch(stream, &l.function, &shape, &params)? };
        }
        self.taken = 0;
        stream.synchronize()
    }
}

/// Device memory that frees itself.
pub struct Buffer {
    address: u64,
    bytes: usize,
    memory: Arc<dyn DeviceMemory>,
}

impl Buffer {
    /// Its address; null when empty.
    pub fn ptr(&self) -> super::DevPtr {
        super::DevPtr::absolute(self.address)
    }

    /// Its raw address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.memory.free(self.address, self.bytes);
        }
    }
}
