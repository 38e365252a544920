//! Claim and Compile.

use crate::budget::Limit;
use crate::gpu::Gpu;
use crate::graphs::{Graphs, RUN_OPTION};
use crate::options::{Choices, GraphMode};
use crate::run::CompiledPlan;
use crate::stream::Streams;
use abi::ort::{Compiled, Ep, Level, Logger, RunOptions, StreamSource};
use abi::{Error, Graph, NodeId, Result};
use kernels::claim::{Claim, claim};
use kernels::cuda::{Device, Limits};
use kernels::plan::Plan;
use kernels::settings::{Settings, Target};
use kernels::weights::PackCache;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The EP of one session.
pub struct CudaEp {
    settings: Settings,
    choices: Choices,
    gpu: Arc<Gpu>,
    /// Made when the first group is compiled: some sessions never claim anything.
    device: OnceLock<Arc<Device>>,
    /// Shared by the session's groups, so that weights which several of them use lie on the device once.
    packed: PackCache,
    graphs: Arc<Graphs>,
    streams: Streams,
    /// What the last claim found; earlier ones see functions that ORT inlines afterwards.
    strict_failure: Mutex<Option<Error>>,
    logger: Logger,
    /// In force as long as the session lives.
    _limit: Option<Limit>,
}

impl CudaEp {
    /// An EP with these choices. Does nothing costly: some sessions never claim anything.
    pub fn new(gpu: Arc<Gpu>, choices: Choices, streams: Streams, logger: Logger) -> Self {
        let settings = Settings { fusion: choices.fusion, target: Target::Cuda, ..Settings::default() };
        Self {
            settings,
            graphs: Arc::new(Graphs::new(choices.ort_graphs && choices.graphs != GraphMode::Off, gpu.clone())),
            device: OnceLock::new(),
            packed: PackCache::default(),
            strict_failure: Mutex::default(),
            _limit: gpu.budget().limited(choices.memory_limit),
            gpu,
            choices,
            streams,
            logger,
        }
    }

    fn device(&self) -> Result<&Arc<Device>> {
        if let Some(device) = self.device.get() {
            return Ok(device);
        }
        let core = self.gpu.open()?;
        let limits = Limits { shared: self.choices.shared_memory_limit, overlap: self.choices.launch_overlap };
        let device = Device::new(core.context().clone(), core.clone(), limits);
        Ok(self.device.get_or_init(|| Arc::new(device)))
    }

    /// Under `cuda_graph=strict`, why the model is not one CUDA graph.
    fn check_strict(&self, claim: &Claim) -> Result<()> {
        if self.choices.graphs != GraphMode::Strict {
            return Ok(());
        }
        let strict = |expected: String| Error::Option { name: "cuda_graph".into(), got: "strict".into(), expected };
        if let Some((_, reason)) = claim.declined.first() {
            return Err(strict(format!("auto or off for this model, since part of it runs elsewhere: {reason}")));
        }
        match claim.groups.len() {
            0 | 1 => Ok(()),
            n => Err(strict(format!("auto or off for this model, which is {n} groups of nodes"))),
        }
    }
}

impl Ep for CudaEp {
    fn claim(&self, graph: &Graph) -> Result<Vec<Vec<NodeId>>> {
        // Bodies of control flow come with the node that owns them, or not at all.
        if graph.is_body {
            return Ok(Vec::new());
        }
        let claim = claim(graph, &self.settings);
        for (_, reason) in &claim.declined {
            self.logger.log(Level::Info, format_args!("not claimed: {reason}"));
        }
        let failure = self.check_strict(&claim).err();
        *lock(&self.strict_failure) = failure.clone();
        match failure.filter(|_| claim.groups.is_empty()) {
            Some(failure) => Err(failure),
            None => Ok(claim.groups),
        }
    }

    fn compile(&self, graph: Graph, name: &str) -> Result<Box<dyn Compiled>> {
        if let Some(failure) = &*lock(&self.strict_failure) {
            return Err(failure.clone());
        }
        let nodes = graph.nodes.len();
        let plan = Plan::build(graph, &self.settings, &self.packed, Some(self.device()?))?;
        self.logger.log(Level::Info, format_args!("{name}: {nodes} nodes run as {} steps", plan.steps()));
        let use_graphs = self.choices.graphs != GraphMode::Off;
        Ok(Box::new(CompiledPlan::new(plan, self.device()?.clone(), self.graphs.clone(), use_graphs)?))
    }

    fn run_start(&self, options: &RunOptions<'_>) -> Result<()> {
        self.graphs.run_start(options.get(RUN_OPTION).as_deref())
    }

    fn run_end(&self, _options: &RunOptions<'_>, sync: bool) -> Result<()> {
        self.graphs.run_end(sync)
    }

    fn sync(&self) -> Result<()> {
        self.graphs.sync()
    }

    fn memcpy_kernels(&self) -> bool {
        true
    }

    fn graph_capture_enabled(&self) -> bool {
        self.graphs.managed()
    }

    fn is_graph_captured(&self, id: i32) -> bool {
        self.graphs.has(id)
    }

    fn replay_graph(&self, id: i32) -> Result<()> {
        self.graphs.replay(id)
    }

    fn release_captured_graph(&self, id: i32) -> Result<()> {
        self.graphs.release(id)
    }

    fn streams(&self) -> Option<&dyn StreamSource> {
        // The factory's will do without a stream of the user's.
        self.streams.user_stream.map(|_| &self.streams as _)
    }
}

/// Locks; what is guarded is replaced whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
