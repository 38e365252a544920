//! One GPU of this process: its context, memory and streams, shared by all sessions and registrations.

use crate::budget::Budget;
use crate::pool::{Kind, Pool, Source};
use crate::staging::{Ring, SLOT, SLOTS};
use crate::timeline::{Marks, StreamKey, Timeline};
use abi::cuda::{Context, DeviceInfo, Event, Stream};
use abi::ort::StreamRef;
use abi::{Error, Result};
use kernels::cuda::DeviceMemory;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A GPU that the driver lists. Nothing is done with it before somebody [opens](Self::open) it: a registration alone
/// must not take memory on the device.
pub struct Gpu {
    info: DeviceInfo,
    budget: Arc<Budget>,
    core: Mutex<Option<Arc<Core>>>,
}

/// A GPU in use.
pub struct Core {
    context: Arc<Context>,
    timeline: Arc<Timeline<Events>>,
    budget: Arc<Budget>,
    device: Pool<DeviceSource, Events>,
    pinned: Pool<PinnedSource, Events>,
    /// For copies that come without a stream.
    copies: Queue,
    rings: Mutex<Vec<Ring<Event>>>,
}

/// A stream, and whether somebody else made it.
#[derive(Clone)]
pub struct Queue {
    /// The stream.
    pub stream: Stream,
    /// Somebody else's: it may be recording a graph, and it may be gone when we are asked to forget it.
    pub foreign: bool,
}

/// The process's GPUs by the driver's number, or a sentence why there are none.
pub fn gpus() -> Result<&'static [Arc<Gpu>], &'static str> {
    static GPUS: OnceLock<Result<Vec<Arc<Gpu>>, String>> = OnceLock::new();
    let gpus = GPUS.get_or_init(|| {
        let gpu = |info| Arc::new(Gpu { info, budget: Arc::default(), core: Mutex::default() });
        Ok(abi::cuda::devices()?.into_iter().map(gpu).collect())
    });
    gpus.as_deref().map_err(String::as_str)
}

impl Gpu {
    /// What the driver says of it.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// What is used of its memory.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Starts to use the GPU.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn open(&self) -> Result<Arc<Core>> {
        let mut core = lock(&self.core);
        match &*core {
            Some(core) => Ok(core.clone()),
            None => Ok(core.insert(Arc::new(Core::new(&self.info, &self.budget)?)).clone()),
        }
    }
}

impl Core {
    fn new(info: &DeviceInfo, budget: &Arc<Budget>) -> Result<Self> {
        let context = Context::new(info.ordinal)?;
        let timeline = Arc::new(Timeline::new(Events { context: context.clone() }));
        let copies = Queue { stream: Stream::new(&context)?, foreign: false };
        timeline.add(copies.stream.handle().addr(), Arc::new(copies.clone()));
        let device = DeviceSource { context: context.clone(), budget: budget.clone(), failure: Mutex::default() };
        let pinned = PinnedSource { context: context.clone(), failure: Mutex::default() };
        Ok(Self {
            device: Pool::new(device, timeline.clone(), Kind::Device),
            pinned: Pool::new(pinned, timeline.clone(), Kind::Host),
            context,
            timeline,
            budget: budget.clone(),
            copies,
            rings: Mutex::default(),
        })
    }

    /// The context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The live streams.
    pub fn timeline(&self) -> &Timeline<Events> {
        &self.timeline
    }

    /// Device memory.
    pub fn device_pool(&self) -> &Pool<DeviceSource, Events> {
        &self.device
    }

    /// Page-locked host memory.
    pub fn pinned_pool(&self) -> &Pool<PinnedSource, Events> {
        &self.pinned
    }

    /// The stream for copies that come without one.
    pub fn copies(&self) -> &Queue {
        &self.copies
    }

    /// The live stream that ORT means; `None` for one of another device or library.
    pub fn find(&self, stream: StreamRef<'_>) -> Option<(StreamKey, Arc<Queue>)> {
        self.timeline.find(stream.handle().addr())
    }

    /// Why there are no `asked` bytes of device memory.
    pub fn shortage(&self, asked: usize, purpose: &str) -> Error {
        if let Some(failure) = lock(&self.device.source().failure).take() {
            return failure;
        }
        let (free, total) = self.context.memory().unwrap_or((0, self.context.info().total_memory));
        let limit = self.budget.limit().unwrap_or(total);
        let purpose = format!("{purpose} on GPU {}", self.context.info().ordinal);
        Error::DeviceMemory { asked, used: self.budget.used(), free, limit, purpose }
    }

    /// Why there are no `asked` bytes of page-locked memory.
    pub fn pinned_shortage(&self, asked: usize) -> Error {
        let failure = lock(&self.pinned.source().failure).take();
        failure.unwrap_or_else(|| Error::Memory { asked, purpose: "a tensor in page-locked host memory".into() })
    }

    /// Lends a ring for a batch of copies.
    ///
    /// # Errors
    /// When page-locked memory is short.
    pub fn borrow_ring(&self) -> Result<Ring<Event>> {
        if let Some(ring) = lock(&self.rings).pop() {
            return Ok(ring);
        }
        let memory = self.context.alloc_pinned(SLOTS * SLOT)?;
        // SAFETY: the memory is the ring's and never freed: rings live as long as the process.
        Ok(unsafe { Ring::new(memory) })
    }

    /// Takes back a ring whose batch is finished. One whose batch failed is not given back, but left to whatever copies
    /// still use it.
    pub fn return_ring(&self, ring: Ring<Event>) {
        lock(&self.rings).push(ring);
    }
}

impl DeviceMemory for Core {
    fn alloc(&self, bytes: usize) -> Result<u64> {
        let address = self.device.reserve(bytes);
        address.map(|address| address as u64).ok_or_else(|| self.shortage(bytes, "weights and workspaces"))
    }

    fn free(&self, address: u64, _bytes: usize) {
        self.device.free(usize::try_from(address).expect("addresses are 64 bits wide"));
    }
}

/// Events of the driver.
pub struct Events {
    context: Arc<Context>,
}

impl Marks for Events {
    type Stream = Queue;
    type Event = Event;

    fn record(&self, queue: &Queue, spare: Option<Event>) -> Option<Event> {
        // An event would become part of the graph that the stream's owner is recording.
        if queue.foreign && queue.stream.is_capturing().unwrap_or(true) {
            return None;
        }
        let event = spare.map_or_else(|| Event::new(&self.context), Ok).ok()?;
        event.record(&queue.stream).ok()?;
        Some(event)
    }

    fn passed(&self, event: &Event) -> bool {
        event.query().unwrap_or(false)
    }

    fn wait(&self, event: &Event) {
        // Who waits asks again whether the event is passed.
        let _ = event.synchronize();
    }
}

/// The device's own memory, within the budget.
pub struct DeviceSource {
    context: Arc<Context>,
    budget: Arc<Budget>,
    /// The last failure that was not a lack of memory.
    failure: Mutex<Option<Error>>,
}

impl Source for DeviceSource {
    fn take(&self, bytes: usize) -> Option<usize> {
        if !self.budget.take(bytes) {
            return None;
        }
        match self.context.alloc(bytes) {
            Ok(address) => Some(usize::try_from(address).expect("addresses are 64 bits wide")),
            Err(error) => {
                self.budget.give(bytes);
                *lock(&self.failure) = (!matches!(error, Error::DeviceMemory { .. })).then_some(error);
                None
            }
        }
    }

    fn give(&self, address: usize, bytes: usize) {
        self.context.free(address as u64);
        self.budget.give(bytes);
    }
}

/// Page-locked host memory.
pub struct PinnedSource {
    context: Arc<Context>,
    failure: Mutex<Option<Error>>,
}

impl Source for PinnedSource {
    fn take(&self, bytes: usize) -> Option<usize> {
        match self.context.alloc_pinned(bytes) {
            Ok(memory) => Some(memory.as_ptr().expose_provenance()),
            Err(error) => {
                *lock(&self.failure) = (!matches!(error, Error::Memory { .. })).then_some(error);
                None
            }
        }
    }

    fn give(&self, address: usize, _bytes: usize) {
        if let Some(memory) = std::ptr::NonNull::new(std::ptr::with_exposed_provenance_mut(address)) {
            self.context.free_pinned(memory);
        }
    }
}

/// Locks, whatever a panic left behind: all that is guarded here stays whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
