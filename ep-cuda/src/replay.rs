//! Runs programs on one stream: as a CUDA graph that is built once a sequence of kernels, and afterwards only told what
//! changed.
//!
//! A lane is in one of these states for the program at hand:
//!
//! | state | when | what a Run does |
//! |---|---|---|
//! | eager | `cuda_graph=off`, or the caller captures the stream, or the host has a part in the Run | launches kernel by kernel |
//! | unknown | no graph has these kernels in this order | builds one, without running anything, and launches it |
//! | stale | a graph has, with other parameters or addresses | sets the parameters of the nodes that differ, and launches it |
//! | current | a graph has just these parameters and addresses | launches it |
//!
//! Nothing is ever executed to warm up: one Run is one pass over in-place state, from the first on.

use crate::counters::{Counter, add};
use abi::cuda::{Exec, Graph, Stream, launch};
use abi::{Error, Result};
use kernels::cuda::{Base, Bases, Buffer, COUNTER_BYTES, Device, HostCx, Program, Work};
use std::sync::Arc;

/// Graphs that a lane keeps: one for prompts and one for single tokens, and as many again for a client that changes
/// between kernels' variants.
const GRAPHS: usize = 4;

/// The addresses of one Run's inputs and outputs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Addresses {
    /// By graph input.
    pub inputs: Vec<u64>,
    /// By graph output.
    pub outputs: Vec<u64>,
}

/// One stream's graphs and workspace. Work of one lane is ordered by its stream, so that the workspace is never used twice
/// at once.
#[derive(Default)]
pub struct Lane {
    workspace: Option<Arc<Buffer>>,
    /// Least recently used first.
    graphs: Vec<Replay>,
}

/// A graph and what its nodes say at present.
pub struct Replay {
    exec: Exec,
    program: Arc<Program>,
    addresses: Addresses,
    /// Alive as long as a node refers to it.
    workspace: Option<Arc<Buffer>>,
}

impl Lane {
    /// Runs `program` once on `stream`, as a graph.
    ///
    /// # Errors
    /// When memory is short or the driver refuses; nothing was launched then.
    pub fn run(
        &mut self,
        device: &Arc<Device>,
        stream: &Stream,
        program: &Arc<Program>,
        addresses: &Addresses,
    ) -> Result<()> {
        let workspace = self.workspace(device, stream, program)?;
        let replay = match self.graphs.iter().rposition(|r| r.has_kernels_of(program)) {
            Some(at) => {
                let mut replay = self.graphs.remove(at);
                replay.update(program, addresses, workspace)?;
                replay
            }
            None => Replay::build(device, program, addresses, workspace)?,
        };
        let launched = replay.launch(stream);
        if self.graphs.len() >= GRAPHS {
            self.graphs.remove(0);
        }
        self.graphs.push(replay);
        launched
    }

    /// Runs `program` once on `stream`, kernel by kernel, with the host's part in it.
    ///
    /// # Errors
    /// As [`Self::run`]; some kernels may have been launched.
    pub fn run_eagerly(
        &mut self,
        device: &Arc<Device>,
        stream: &Stream,
        program: &Arc<Program>,
        addresses: &Addresses,
    ) -> Result<()> {
        let workspace = self.workspace(device, stream, program)?;
        let bases = bases(addresses, workspace.as_ref());
        // SAFETY: the addresses are of live tensors and of a workspace that is large enough.
        let host = unsafe { HostCx::new(device, stream, bases) };
        for work in program.work() {
            match work {
                // SAFETY: the program's kernels take their own parameter structs; the addresses are valid, as above.
                Work::Launch(l) => unsafe { launch(stream, &l.function, &l.shape, &l.bind(&bases))? },
                Work::Host(step) => {
                    let fetched = step.run(&host)?;
                    add(Counter::ExpertHits, fetched.hits);
                    add(Counter::ExpertMisses, fetched.misses);
                    add(Counter::ExpertBytesFetched, fetched.bytes);
                }
            }
        }
        add(Counter::EagerRuns, 1);
        Ok(())
    }

    /// Like [`Self::run`], and hands the graph out: it stays as it is until it comes back as `old`.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_and_keep(
        &mut self,
        device: &Arc<Device>,
        stream: &Stream,
        program: &Arc<Program>,
        addresses: &Addresses,
        old: Option<Replay>,
    ) -> Result<Replay> {
        let workspace = self.workspace(device, stream, program)?;
        let replay = match old.filter(|old| old.has_kernels_of(program)) {
            Some(mut old) => {
                old.update(program, addresses, workspace)?;
                old
            }
            None => Replay::build(device, program, addresses, workspace)?,
        };
        replay.launch(stream)?;
        Ok(replay)
    }

    /// A workspace that `program` fits in.
    fn workspace(&mut self, device: &Device, stream: &Stream, program: &Program) -> Result<Option<Arc<Buffer>>> {
        let bytes = program.workspace_bytes();
        if bytes == 0 {
            return Ok(None);
        }
        if let Some(workspace) = self.workspace.as_ref().filter(|w| w.len() >= bytes) {
            return Ok(Some(workspace.clone()));
        }
        if stream.is_capturing()? {
            return Err(Error::Internal(format!(
                "the caller is capturing the stream, and this Run needs {bytes} bytes of workspace that a capture cannot \
                 allocate: run these shapes once before capturing"
            )));
        }
        // Graphs hold the old one: they go first, when their work is done.
        stream.synchronize()?;
        self.graphs.clear();
        self.workspace = None;
        // An eighth of slack: lengths that grow by one token then seldom need a new workspace.
        let made = device.alloc((bytes + bytes / 8).next_multiple_of(1 << 20)).or_else(|_| device.alloc(bytes))?;
        device.context().memset(made.address(), 0, made.len().min(COUNTER_BYTES))?;
        let made = Arc::new(made);
        self.workspace = Some(made.clone());
        Ok(Some(made))
    }
}

impl Replay {
    /// Builds the graph; nothing runs.
    fn build(
        device: &Device,
        program: &Arc<Program>,
        addresses: &Addresses,
        workspace: Option<Arc<Buffer>>,
    ) -> Result<Self> {
        let mut graph = Graph::new(device.context())?;
        let bound = bases(addresses, workspace.as_ref());
        for kernel in program.launches() {
            // SAFETY: as in `Lane::run_eagerly`, whenever the graph is launched: `update` keeps it so.
            unsafe { graph.add_kernel(&kernel.function, &kernel.shape, &kernel.bind(&bound))? };
        }
        let exec = graph.instantiate()?;
        add(Counter::Captures, 1);
        Ok(Self { exec, program: program.clone(), addresses: addresses.clone(), workspace })
    }

    fn has_kernels_of(&self, program: &Arc<Program>) -> bool {
        Arc::ptr_eq(&self.program, program) || self.program.same_functions(program)
    }

    /// Makes the graph say what `program` says, at these addresses.
    fn update(&mut self, program: &Arc<Program>, addresses: &Addresses, workspace: Option<Arc<Buffer>>) -> Result<()> {
        let same_program = Arc::ptr_eq(&self.program, program);
        let moved = self.moved(addresses, workspace.as_ref());
        if same_program && moved.is_empty() {
            return Ok(());
        }
        let bound = bases(addresses, workspace.as_ref());
        let mut due = if same_program { Vec::new() } else { program.differences(&self.program) };
        if !moved.is_empty() {
            due.extend(moved.iter().flat_map(|&base| program.users(base)));
            due.sort_unstable_by_key(|&(n, _)| n);
            due.dedup_by_key(|&mut (n, _)| n);
        }
        for &(n, kernel) in &due {
            // SAFETY: as in `build`.
            unsafe { self.exec.set_kernel(n, &kernel.function, &kernel.shape, &kernel.bind(&bound))? };
        }
        add(Counter::Updates, due.len() as u64);
        self.program = program.clone();
        self.addresses.clone_from(addresses);
        self.workspace = workspace;
        Ok(())
    }

    /// The bases that are no longer where the graph's nodes say.
    fn moved(&self, addresses: &Addresses, workspace: Option<&Arc<Buffer>>) -> Vec<Base> {
        let address = |w: Option<&Arc<Buffer>>| w.map_or(0, |w| w.address());
        let here = address(self.workspace.as_ref()) != address(workspace);
        let apart = |old: &[u64], new: &[u64], base: fn(usize) -> Base| {
            let pairs = old.iter().zip(new).enumerate();
            pairs.filter(|(_, (old, new))| old != new).map(|(i, _)| base(i)).collect::<Vec<_>>()
        };
        let mut moved = apart(&self.addresses.inputs, &addresses.inputs, Base::Input);
        moved.extend(apart(&self.addresses.outputs, &addresses.outputs, Base::Output));
        moved.extend(here.then_some(Base::Workspace));
        moved
    }

    /// One pass.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        if !self.exec.is_empty() {
            // SAFETY: the nodes' addresses are of this Run's tensors (`update`), or of those that the caller of a kept
            // graph has promised to leave where they are.
            unsafe { self.exec.launch(stream)? };
        }
        add(Counter::Replays, 1);
        Ok(())
    }
}

fn bases<'a>(addresses: &'a Addresses, workspace: Option<&Arc<Buffer>>) -> Bases<'a> {
    Bases { workspace: workspace.map_or(0, |w| w.address()), inputs: &addresses.inputs, outputs: &addresses.outputs }
}
