//! Graphs that ORT replays by id (`enable_cuda_graph=1`): the caller then keeps inputs and outputs where they were at the
//! first Run of the id.

use crate::counters::{Counter, add};
use crate::replay::Replay;
use abi::cuda::Stream;
use abi::{Error, Result};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The run option that names the graph; -1 is a Run without one.
pub const RUN_OPTION: &str = "gpu_graph_id";

thread_local! {
    /// The id of the Run that this thread is in. A Run's nodes run on the thread that called it.
    static WANTED: Cell<Option<i32>> = const { Cell::new(None) };
}

/// One session's graphs by id.
#[derive(Default)]
pub struct Graphs {
    /// Whether ORT manages replay.
    managed: bool,
    /// A graph a fused node, in order.
    kept: Mutex<HashMap<i32, Vec<(Replay, Stream)>>>,
}

impl Graphs {
    pub fn new(managed: bool) -> Self {
        Self { managed, kept: Mutex::default() }
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
        let wanted = (self.managed && id != -1).then_some(id);
        if let Some(id) = wanted {
            // A Run that ORT does not replay starts the id anew.
            self.release(id)?;
        }
        WANTED.set(wanted);
        Ok(())
    }

    /// The end of a Run.
    pub fn run_end(&self) {
        WANTED.set(None);
    }

    /// The id that this thread's Run is to keep its graph under.
    pub fn wanted(&self) -> Option<i32> {
        WANTED.get().filter(|_| self.managed)
    }

    /// Keeps a graph for ORT's replays.
    pub fn keep(&self, id: i32, replay: Replay, stream: Stream) {
        self.lock().entry(id).or_default().push((replay, stream));
    }

    /// Whether there is a graph of this id.
    pub fn has(&self, id: i32) -> bool {
        self.lock().contains_key(&id)
    }

    /// Launches the graphs of this id.
    ///
    /// # Errors
    /// When there is none, or the driver refuses.
    pub fn replay(&self, id: i32) -> Result<()> {
        let kept = self.lock();
        let graphs = kept.get(&id).ok_or_else(|| Error::Internal(format!("there is no CUDA graph {id} to replay")))?;
        graphs.iter().try_for_each(|(replay, stream)| replay.launch(stream))?;
        add(Counter::ManagedReplays, 1);
        Ok(())
    }

    /// Waits for all replays.
    ///
    /// # Errors
    /// When work on the device has failed.
    pub fn sync(&self) -> Result<()> {
        // Not under the lock: other threads may replay meanwhile.
        let streams: Vec<_> = self.lock().values().flatten().map(|(_, stream)| stream.clone()).collect();
        streams.iter().try_for_each(Stream::synchronize)
    }

    /// Forgets the graphs of this id once their work is done.
    ///
    /// # Errors
    /// When work on the device has failed.
    pub fn release(&self, id: i32) -> Result<()> {
        let gone = self.lock().remove(&id);
        gone.iter().flatten().try_for_each(|(_, stream)| stream.synchronize())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Vec<(Replay, Stream)>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
