//! Claim, Compile and Run.

use crate::budget::Limit;
use crate::gpu::Gpu;
use crate::options::Choices;
use crate::stream::Streams;
use abi::ort::{Compiled, Ep, Logger, StreamSource};
use abi::{Error, Graph, NodeId, Result};
use std::sync::Arc;

/// The EP of one session.
pub struct CudaEp {
    gpu: Arc<Gpu>,
    choices: Choices,
    streams: Streams,
    logger: Logger,
    /// In force as long as the session lives.
    _limit: Option<Limit>,
}

impl CudaEp {
    /// An EP with these choices. Does nothing costly: some sessions never claim anything.
    pub fn new(gpu: Arc<Gpu>, choices: Choices, streams: Streams, logger: Logger) -> Self {
        let limit = gpu.budget().limited(choices.memory_limit);
        Self { gpu, choices, streams, logger, _limit: limit }
    }
}

impl Ep for CudaEp {
    fn claim(&self, _graph: &Graph) -> Result<Vec<Vec<NodeId>>> {
        let _ = (&self.gpu, &self.choices, &self.logger);
        Ok(Vec::new())
    }

    fn compile(&self, _graph: Graph, name: &str) -> Result<Box<dyn Compiled>> {
        Err(Error::Internal(format!("'{name}' was not claimed")))
    }

    fn memcpy_kernels(&self) -> bool {
        true
    }

    fn streams(&self) -> Option<&dyn StreamSource> {
        // The factory's will do without a stream of the user's.
        self.streams.user_stream.map(|_| &self.streams as _)
    }
}
