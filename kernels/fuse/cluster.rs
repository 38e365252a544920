//! Clusters: nodes that a device may run as one.
//!
//! The nodes stay in the plan, each with its own kernel. Where a cluster's kernel takes the shapes at hand, its launches
//! stand for theirs; where it does not, they run one after the other. A cluster is one step of the plan's order: what its
//! members read stays where it is until all of them are done.

use crate::cuda::{Device, DeviceKernel, DeviceTensor, LaunchCx};
use crate::fact::Fact;
use crate::op::{NodeCx, OpDef};
use crate::plan::Step;
use abi::{Graph, NodeId, Result, ValueId};
use smallvec::SmallVec;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// Patterns by priority: a node belongs to the first that finds it.
const PATTERNS: &[Pattern] = &[super::linear_mixer::PATTERN, super::attention_mixer::PATTERN, super::products::PATTERN];

/// A pattern of nodes.
pub struct Pattern {
    /// The nodes of the occurrence that the given one stands for, or nothing.
    pub find: fn(&Search<'_>, NodeId) -> Option<Vec<NodeId>>,
    /// The kernel for an occurrence; `None` when the members turn out to be of other kinds than it takes.
    pub build: fn(&Occurrence<'_>) -> Result<Built>,
}

/// A cluster's kernel, or none.
pub type Built = Option<Box<dyn ClusterKernel>>;

/// Several nodes as one.
pub trait ClusterKernel: Send + Sync {
    /// Writes down launches for all that leaves the cluster. `false`, with nothing written down, when the members shall run
    /// one by one. As for a [`DeviceKernel`], nothing may depend on tensors' contents.
    ///
    /// # Errors
    /// As [`LaunchCx::push`].
    fn launch(&self, cx: &mut LaunchCx<'_>, members: &[Member<'_>]) -> Result<bool>;

    /// Whether its first launch reads constants alone before its wait, and so may begin long before: see
    /// [`LaunchCx::hastens`].
    fn is_patient(&self) -> bool {
        false
    }
}

/// A node of a cluster, in the order in which the pattern named it.
pub struct Member<'a> {
    pub(crate) inputs: SmallVec<[Option<DeviceTensor<'a>>; 16]>,
    pub(crate) outputs: SmallVec<[Option<DeviceTensor<'a>>; 8]>,
}

impl<'a> Member<'a> {
    /// Input `slot`; `None` when absent or packed.
    pub fn input(&self, slot: usize) -> Option<DeviceTensor<'a>> {
        self.inputs.get(slot).copied().flatten()
    }

    /// Output `slot`; `None` when nobody reads it.
    pub fn output(&self, slot: usize) -> Option<DeviceTensor<'a>> {
        self.outputs.get(slot).copied().flatten()
    }
}

/// An occurrence of a pattern whose nodes have their kernels.
pub struct Occurrence<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) facts: &'a [Option<Arc<Fact>>],
    pub(crate) nodes: &'a [NodeId],
    pub(crate) kernels: &'a [Option<&'a dyn DeviceKernel>],
    /// Where it will run.
    pub device: &'a Arc<Device>,
}

impl<'a> Occurrence<'a> {
    /// Number of members.
    pub fn members(&self) -> usize {
        self.nodes.len()
    }

    /// Member `i`'s node.
    pub fn node(&self, i: usize) -> NodeCx<'a> {
        NodeCx::new(self.graph, self.nodes[i], self.facts)
    }

    /// Member `i`'s kernel; `None` where nothing moves.
    pub fn kernel(&self, i: usize) -> Option<&'a dyn DeviceKernel> {
        self.kernels[i]
    }
}

/// What patterns look at: the nodes that are left after folding.
pub struct Search<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// What is known of each value.
    pub facts: &'a [Option<Arc<Fact>>],
    defs: Vec<Option<&'static OpDef>>,
    producers: Vec<Option<NodeId>>,
    readers: Vec<Vec<NodeId>>,
}

impl<'a> Search<'a> {
    fn new(graph: &'a Graph, facts: &'a [Option<Arc<Fact>>], left: &[(NodeId, &'static OpDef)]) -> Self {
        let mut search = Self {
            graph,
            facts,
            defs: vec![None; graph.nodes.len()],
            producers: vec![None; graph.values.len()],
            readers: vec![Vec::new(); graph.values.len()],
        };
        for &(id, def) in left {
            search.defs[id] = Some(def);
            let node = &graph.nodes[id];
            node.outputs.iter().flatten().for_each(|&v| search.producers[v] = Some(id));
            node.inputs.iter().flatten().for_each(|&v| search.readers[v].push(id));
        }
        search
    }

    /// Node `id` as claims see it.
    pub fn node(&self, id: NodeId) -> NodeCx<'a> {
        NodeCx::new(self.graph, id, self.facts)
    }

    /// Whether `id` is an `op` of `domain`.
    pub fn is(&self, id: NodeId, domain: &str, op: &str) -> bool {
        let node = &self.graph.nodes[id];
        node.op_type == op && node.domain == domain
    }

    /// Whether `id` moves no bytes.
    pub fn is_view(&self, id: NodeId) -> bool {
        self.defs[id].is_some_and(|def| def.view)
    }

    /// The node that makes `value`; `None` for graph inputs and constants.
    pub fn producer(&self, value: ValueId) -> Option<NodeId> {
        self.producers[value]
    }

    /// The nodes that read `value`, once for each slot.
    pub fn readers(&self, value: ValueId) -> &[NodeId] {
        &self.readers[value]
    }

    /// The value at an input slot.
    pub fn input(&self, id: NodeId, slot: usize) -> Option<ValueId> {
        self.graph.nodes[id].inputs.get(slot).copied().flatten()
    }

    /// The value at an output slot, where somebody reads it.
    pub fn output(&self, id: NodeId, slot: usize) -> Option<ValueId> {
        let value = self.graph.nodes[id].outputs.get(slot).copied().flatten()?;
        (self.leaves(value) || !self.readers[value].is_empty()).then_some(value)
    }

    /// Whether `value` is an output of the graph.
    pub fn leaves(&self, value: ValueId) -> bool {
        self.graph.outputs.contains(&value)
    }

    /// Whether `value` is known at Compile.
    pub fn is_constant(&self, value: ValueId) -> bool {
        self.facts[value].as_ref().is_some_and(|fact| fact.constant)
    }

    /// Whether nobody but nodes of `members` sees what node `id` makes, its output slot `but` aside.
    pub fn is_inner(&self, id: NodeId, but: Option<usize>, members: &[NodeId]) -> bool {
        let made = self.graph.nodes[id].outputs.iter().enumerate().filter(|&(slot, _)| Some(slot) != but);
        let mut made = made.filter_map(|(_, value)| *value);
        made.all(|value| !self.leaves(value) && self.readers[value].iter().all(|reader| members.contains(reader)))
    }
}

/// A cluster of a plan.
pub(crate) struct Cluster {
    /// Its place among the plan's steps.
    pub steps: Range<usize>,
    /// The members in the pattern's order.
    pub members: Vec<usize>,
    pub kernel: Box<dyn ClusterKernel>,
}

/// Nodes that may become a cluster.
pub(crate) struct Candidate {
    pattern: &'static Pattern,
    nodes: Vec<NodeId>,
}

impl Candidate {
    /// The cluster, if its pattern takes the members' kernels.
    pub fn build(
        &self,
        graph: &Graph,
        facts: &[Option<Arc<Fact>>],
        device: &Arc<Device>,
        steps: &[Step],
    ) -> Result<Option<Cluster>> {
        let at = |&id: &NodeId| steps.iter().position(|s| s.node == id);
        let Some(members) = self.nodes.iter().map(at).collect::<Option<Vec<_>>>() else { return Ok(None) };
        let kernels: Vec<_> = members.iter().map(|&m| steps[m].device.as_deref()).collect();
        let occurrence = Occurrence { graph, facts, nodes: &self.nodes, kernels: &kernels, device };
        let Some(kernel) = (self.pattern.build)(&occurrence)? else { return Ok(None) };
        let first = members.iter().copied().min().unwrap_or(0);
        Ok(Some(Cluster { steps: first..first + members.len(), members, kernel }))
    }
}

/// Finds clusters, and brings `left` into an order in which the nodes of each stand together.
pub(crate) fn find(
    graph: &Graph,
    facts: &[Option<Arc<Fact>>],
    left: &mut Vec<(NodeId, &'static OpDef)>,
) -> Vec<Candidate> {
    let search = Search::new(graph, facts, left);
    let mut taken = vec![false; graph.nodes.len()];
    let mut found: Vec<Candidate> = Vec::new();
    for pattern in PATTERNS {
        for &(id, _) in left.iter() {
            let Some(nodes) = (pattern.find)(&search, id).filter(|nodes| nodes.iter().all(|&n| !taken[n])) else {
                continue;
            };
            nodes.iter().for_each(|&n| taken[n] = true);
            found.push(Candidate { pattern, nodes });
        }
    }
    // A cluster that some other node both follows and precedes cannot be one step.
    loop {
        match ordered(&search, left, &found) {
            Ok(order) => {
                *left = order;
                return found;
            }
            Err(stuck) => drop(found.remove(stuck)),
        }
    }
}

/// The nodes in an order that keeps clusters together, or a cluster that makes that impossible.
fn ordered(
    search: &Search<'_>,
    left: &[(NodeId, &'static OpDef)],
    clusters: &[Candidate],
) -> std::result::Result<Vec<(NodeId, &'static OpDef)>, usize> {
    let place: HashMap<NodeId, usize> = left.iter().enumerate().map(|(i, &(id, _))| (id, i)).collect();
    // Units are clusters, then single nodes; a unit's rank is its first node's place.
    let mut unit_of = vec![usize::MAX; left.len()];
    let mut units: Vec<Vec<usize>> = Vec::new();
    for cluster in clusters {
        let mut places: Vec<_> = cluster.nodes.iter().map(|n| place[n]).collect();
        places.sort_unstable();
        places.iter().for_each(|&p| unit_of[p] = units.len());
        units.push(places);
    }
    for (p, unit) in unit_of.iter_mut().enumerate().filter(|(_, unit)| **unit == usize::MAX) {
        *unit = units.len();
        units.push(vec![p]);
    }
    let mut waits = vec![BTreeSet::new(); units.len()];
    let mut followers = vec![BTreeSet::new(); units.len()];
    for (p, &(id, _)) in left.iter().enumerate() {
        for &value in search.graph.nodes[id].inputs.iter().flatten() {
            let Some(from) = search.producers[value].map(|n| unit_of[place[&n]]).filter(|&from| from != unit_of[p])
            else {
                continue;
            };
            waits[unit_of[p]].insert(from);
            followers[from].insert(unit_of[p]);
        }
    }
    let mut counts: Vec<_> = waits.iter().map(BTreeSet::len).collect();
    let mut ready: BTreeSet<(usize, usize)> =
        (0..units.len()).filter(|&u| counts[u] == 0).map(|u| (units[u][0], u)).collect();
    let mut order = Vec::with_capacity(left.len());
    let mut done = vec![false; units.len()];
    while let Some((_, unit)) = ready.pop_first() {
        done[unit] = true;
        order.extend(units[unit].iter().map(|&p| left[p]));
        for &next in &followers[unit] {
            counts[next] -= 1;
            if counts[next] == 0 {
                ready.insert((units[next][0], next));
            }
        }
    }
    match (0..clusters.len()).find(|&c| !done[c]) {
        Some(stuck) => Err(stuck),
        None => Ok(order),
    }
}
