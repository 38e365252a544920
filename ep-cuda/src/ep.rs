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
use kernels::experts::Share;
use kernels::plan::Plan;
use kernels::settings::{Settings, Target};
use kernels::weights::PackCache;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// Of the last claim; earlier ones see functions that ORT inlines afterwards.
    experts: Mutex<Result<Option<Share>>>,
    /// Whether Runs fetch experts.
    fetches: AtomicBool,
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
            experts: Mutex::new(Ok(None)),
            fetches: AtomicBool::new(false),
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

    /// The part of the experts that is on the device; an error when the session's options and the model do not agree.
    fn check(&self, claim: &Claim) -> Result<Option<Share>> {
        let share = Share::of(self.choices.expert_limit, &claim.experts)?;
        if self.choices.graphs == GraphMode::Strict {
            self.check_strict(claim, share.is_some())?;
        }
        Ok(share)
    }

    /// Under `cuda_graph=strict`, why the model is not one CUDA graph.
    fn check_strict(&self, claim: &Claim, shared: bool) -> Result<()> {
        let strict = |expected: String| Error::Option { name: "cuda_graph".into(), got: "strict".into(), expected };
        if let Some((_, reason)) = claim.declined.first() {
            return Err(strict(format!("auto or off for this model, since part of it runs elsewhere: {reason}")));
        }
        if let Some((label, _)) = claim.experts.first().filter(|_| shared) {
            let (option, limit) = (kernels::experts::OPTION, self.choices.expert_limit);
            return Err(strict(format!(
                "auto or off with {option} = {limit}: not all experts of {label} fit, and a CUDA graph cannot fetch those that \
                 its tokens go to"
            )));
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
        let share = self.check(&claim);
        *lock(&self.experts) = share.clone();
        match share {
            Err(failure) if claim.groups.is_empty() => Err(failure),
            // Else Compile says so.
            _ => Ok(claim.groups),
        }
    }

    fn compile(&self, graph: Graph, name: &str) -> Result<Box<dyn Compiled>> {
        let experts = lock(&self.experts).clone()?;
        self.fetches.fetch_or(experts.is_some(), Ordering::Relaxed);
        let settings = Settings { experts, ..self.settings.clone() };
        let nodes = graph.nodes.len();
        let plan = Plan::build(graph, &settings, &self.packed, Some(self.device()?))?;
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
        // A Run that ORT repeats until there is a graph would be several steps of in-place state.
        self.graphs.managed() && !self.fetches.load(Ordering::Relaxed)
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
