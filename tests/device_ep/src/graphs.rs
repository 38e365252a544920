//! Runs recorded for ORT to replay.

use crate::report::count;
use crate::stream::Queue;
use abi::ort::RunOptions;
use abi::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Runs until a graph is captured, as if the first ones warmed up.
const WARM_UPS: usize = 3;

/// Work that may be done again: it reads its inputs anew each time.
pub type Work = Arc<dyn Fn() + Send + Sync>;

/// The captured graphs of a session, and the one that the Run at hand belongs to.
#[derive(Default)]
pub struct Graphs {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    current: Option<i32>,
    graphs: HashMap<i32, Graph>,
}

#[derive(Default)]
struct Graph {
    runs: usize,
    work: Option<(Arc<Queue>, Work)>,
}

impl Graphs {
    /// Before a Run.
    pub fn begin(&self, options: &RunOptions<'_>) {
        let id = options.get("gpu_graph_id").map_or(0, |id| id.parse().expect("ORT checks the number"));
        self.state.lock().expect("no panic while locked").current = (id != -1).then_some(id);
    }

    /// A Run's work.
    pub fn record(&self, queue: &Arc<Queue>, work: &Work) {
        let mut state = self.state.lock().expect("no panic while locked");
        if let Some(id) = state.current {
            let graph = state.graphs.entry(id).or_default();
            graph.runs += 1;
            graph.work = Some((queue.clone(), work.clone()));
        }
    }

    pub fn captured(&self, id: i32) -> bool {
        let state = self.state.lock().expect("no panic while locked");
        state.graphs.get(&id).is_some_and(|graph| graph.runs >= WARM_UPS)
    }

    pub fn replay(&self, id: i32) -> Result<()> {
        count("replay");
        let state = self.state.lock().expect("no panic while locked");
        let work = state.graphs.get(&id).and_then(|graph| graph.work.clone());
        let (queue, work) = work.ok_or_else(|| Error::Internal(format!("no graph {id}")))?;
        queue.push(move || work());
        Ok(())
    }

    pub fn release(&self, id: i32) {
        count("release_graph");
        self.state.lock().expect("no panic while locked").graphs.remove(&id);
    }

    /// Waits for all graphs.
    pub fn sync(&self) -> Result<()> {
        count("sync");
        let state = self.state.lock().expect("no panic while locked");
        let mut queues = state.graphs.values().filter_map(|graph| graph.work.as_ref());
        queues.try_for_each(|(queue, _)| queue.ticket().wait())
    }
}
