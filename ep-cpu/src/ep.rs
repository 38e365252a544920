//! Claim and Compile.

use crate::run::CompiledPlan;
use abi::ort::{Compiled, Ep, Level, Logger};
use abi::{Graph, NodeId, Result};
use kernels::claim::claim;
use kernels::plan::Plan;
use kernels::settings::Settings;
use kernels::weights::PackCache;

/// The EP of one session.
pub struct CpuEp {
    settings: Settings,
    /// Shared by the session's groups, so that weights which several of them use are packed once.
    packed: PackCache,
    logger: Logger,
}

impl CpuEp {
    /// An EP with these settings.
    pub fn new(settings: Settings, logger: Logger) -> Self {
        Self { settings, packed: PackCache::default(), logger }
    }
}

impl Ep for CpuEp {
    fn claim(&self, graph: &Graph) -> Result<Vec<Vec<NodeId>>> {
        // Bodies of control flow come with the node that owns them, or not at all.
        if graph.is_body {
            return Ok(Vec::new());
        }
        let claim = claim(graph, &self.settings);
        for (_, reason) in &claim.declined {
            self.logger.log(Level::Info, format_args!("not claimed: {reason}"));
        }
        Ok(claim.groups)
    }

    fn compile(&self, graph: Graph, name: &str) -> Result<Box<dyn Compiled>> {
        let nodes = graph.nodes.len();
        let plan = Plan::build(graph, &self.settings, &self.packed, None)?;
        self.logger.log(Level::Info, format_args!("{name}: {nodes} nodes run as {} kernels", plan.steps()));
        Ok(Box::new(CompiledPlan(plan)))
    }
}
