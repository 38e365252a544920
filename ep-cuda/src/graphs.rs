//! Graphs that ORT replays by id (`enable_cuda_graph=1`): the caller promises to keep inputs and outputs where they were at
//! the first Run of the id.
//!
//! A caller may break the promise unawares: onnxruntime-genai makes some inputs anew for each step. So a graph is replayed
//! by ORT only as long as nobody has given back the memory of its inputs and outputs. Else the Run goes the usual way, and
//! updates the graph.

use crate::counters::{Counter, add};
use crate::gpu::Gpu;
use crate::replay::{Addresses, Replay};
use abi::cuda::Stream;
use abi::{Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The run option that names the graph; -1 is a Run without one.
pub const RUN_OPTION: &str = "gpu_graph_id";

/// What a Run is to do about graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Whatever the EP thinks best.
    Any,
    /// None.
    No,
    /// One that ORT may replay by this id.
    Kept(i32),
}

thread_local! {
    /// The Run that this thread is in. A Run's nodes run on the thread that called it.
    static WANTED: Cell<Wanted> = const { Cell::new(Wanted::Any) };
    /// The id whose Run this thread has just ended: ORT then asks whether it has a graph now, and runs again if not.
    static ENDED: Cell<Option<i32>> = const { Cell::new(None) };
    /// The streams of the Run that this thread is in. ORT leaves it to an EP with graphs of its own to wait for them.
    static STREAMS: RefCell<Vec<Stream>> = const { RefCell::new(Vec::new()) };
}

/// One session's graphs by id.
pub struct Graphs {
    /// Whether ORT manages replay.
    managed: bool,
    gpu: Arc<Gpu>,
    kept: Mutex<HashMap<i32, Entry>>,
}

/// The graphs of one id.
#[derive(Default)]
struct Entry {
    /// One a fused node, in order.
    graphs: Vec<Kept>,
    /// Those of the Run before, to be updated.
    old: Vec<Kept>,
    /// Addresses of inputs and outputs, and which allocation each was.
    io: Vec<(u64, Option<u64>)>,
    /// Whether some input was copied: a replay would not copy it.
    copies: bool,
}

struct Kept {
    /// Tells the fused nodes apart.
    node: usize,
    replay: Replay,
    stream: Stream,
}

impl Graphs {
    pub fn new(managed: bool, gpu: Arc<Gpu>) -> Self {
        Self { managed, gpu, kept: Mutex::default() }
    }

    /// Whether ORT manages replay.
    pub fn managed(&self) -> bool {
        self.managed
    }

    /// Takes note of a Run's `gpu_graph_id`.
    ///
    /// # Errors
    /// When it is no integer.
    pub fn run_start(&self, option: Option<&str>) -> Result<()> {
        let id = option.unwrap_or("0").trim();
        let id: i32 = id.parse().map_err(|_| Error::Option {
            name: RUN_OPTION.into(),
            got: id.into(),
            expected: "an integer; -1 for a Run without a graph".into(),
        })?;
        ENDED.set(None);
        STREAMS.take();
        WANTED.set(match id {
            _ if !self.managed => Wanted::Any,
            -1 => Wanted::No,
            id => Wanted::Kept(id),
        });
        if let (Wanted::Kept(id), mut kept) = (WANTED.get(), self.lock())
            && let Some(entry) = kept.get_mut(&id)
        {
            *entry = Entry { old: std::mem::take(&mut entry.graphs), ..Entry::default() };
        }
        Ok(())
    }

    /// The end of a Run. `sync`: its results must be there when this returns.
    ///
    /// # Errors
    /// When work on the device has failed.
    pub fn run_end(&self, sync: bool) -> Result<()> {
        if let Wanted::Kept(id) = WANTED.replace(Wanted::Any) {
            ENDED.set(Some(id));
        }
        let streams = STREAMS.take();
        if sync { streams.iter().try_for_each(Stream::synchronize) } else { Ok(()) }
    }

    /// Takes note of a stream that this thread's Run uses.
    pub fn uses(&self, stream: &Stream) {
        if self.managed {
            STREAMS.with_borrow_mut(|streams| streams.push(stream.clone()));
        }
    }

    /// What this thread's Run is to do.
    pub fn wanted(&self) -> Wanted {
        if self.managed { WANTED.get() } else { Wanted::Any }
    }

    /// The graph that fused node `node` had in the Run before.
    pub fn take(&self, id: i32, node: usize) -> Option<Replay> {
        let mut kept = self.lock();
        let old = &mut kept.get_mut(&id)?.old;
        let at = old.iter().position(|kept| kept.node == node)?;
        Some(old.remove(at).replay)
    }

    /// Keeps a graph for ORT's replays. `copies`: it reads copies of inputs.
    ///
    /// # Errors
    /// When the GPU is gone.
    pub fn keep(
        &self,
        id: i32,
        node: usize,
        (replay, stream): (Replay, Stream),
        io: &Addresses,
        copies: bool,
    ) -> Result<()> {
        let addresses: Vec<u64> = io.inputs.iter().chain(&io.outputs).copied().collect();
        let serials = self.gpu.open()?.device_pool().serials(&addresses);
        let mut kept = self.lock();
        let entry = kept.entry(id).or_default();
        entry.graphs.push(Kept { node, replay, stream });
        entry.io.extend(addresses.into_iter().zip(serials));
        entry.copies |= copies;
        Ok(())
    }

    /// Whether ORT may replay the graph of this id.
    pub fn has(&self, id: i32) -> bool {
        let kept = self.lock();
        let Some(entry) = kept.get(&id).filter(|entry| !entry.graphs.is_empty()) else { return false };
        if ENDED.take() == Some(id) {
            return true;
        }
        let addresses: Vec<u64> = entry.io.iter().map(|&(address, _)| address).collect();
        let Ok(core) = self.gpu.open() else { return false };
        let now = core.device_pool().serials(&addresses);
        !entry.copies && entry.io.iter().map(|&(_, serial)| serial).eq(now)
    }

    /// Launches the graphs of this id.
    ///
    /// # Errors
    /// When there is none, or the driver refuses.
    pub fn replay(&self, id: i32) -> Result<()> {
        let kept = self.lock();
        let entry = kept.get(&id).filter(|entry| !entry.graphs.is_empty());
        let entry = entry.ok_or_else(|| Error::Internal(format!("there is no CUDA graph {id} to replay")))?;
        entry.graphs.iter().try_for_each(|kept| kept.replay.launch(&kept.stream))?;
        add(Counter::ManagedReplays, 1);
        Ok(())
    }

    /// Waits for all replays.
    ///
    /// # Errors
    /// When work on the device has failed.
    pub fn sync(&self) -> Result<()> {
        // Not under the lock: other threads may replay meanwhile.
        let streams: Vec<_> = self.lock().values().flat_map(|e| &e.graphs).map(|kept| kept.stream.clone()).collect();
        streams.iter().try_for_each(Stream::synchronize)
    }

    /// Forgets the graphs of this id once their work is done.
    ///
    /// # Errors
    /// When work on the device has failed.
    pub fn release(&self, id: i32) -> Result<()> {
        let gone = self.lock().remove(&id);
        let all = gone.iter().flat_map(|entry| entry.graphs.iter().chain(&entry.old));
        all.into_iter().try_for_each(|kept| kept.stream.synchronize())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Entry>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
