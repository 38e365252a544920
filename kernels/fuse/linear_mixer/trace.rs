//! Which nodes around a delta rule belong to its layer, and what each of them is there for.

use crate::fact::Fact;
use crate::op::{self, NodeCx};
use crate::weights::Constant;
use abi::{DType, Dim, Graph, NodeId, ValueId};
use std::collections::HashSet;
use std::sync::Arc;

const MS: &str = "com.microsoft";
/// The convolution's at most, as in `mixer.cu`.
const TAPS: usize = 8;

/// What a trace may walk over.
pub struct Links<'a> {
    pub graph: &'a Graph,
    pub facts: &'a [Option<Arc<Fact>>],
    /// The node that makes a value, if the trace may have it.
    pub producer: &'a dyn Fn(ValueId) -> Option<NodeId>,
    /// The node that reads a value, if it is the only one, and the trace may have it.
    pub reader: &'a dyn Fn(ValueId) -> Option<NodeId>,
}

/// An input slot of a member.
pub type Slot = (NodeId, usize);

/// How the rule's query or key comes from what is read.
#[derive(Clone, Copy)]
pub struct Rows {
    pub read: Slot,
    pub value: ValueId,
    /// An LpNormalization of each head.
    pub norm: Option<NodeId>,
    /// What it is multiplied by afterwards.
    pub scale: f32,
}

/// Where query, key and value are parts of one tensor.
pub struct Joint {
    pub read: Slot,
    pub split: Option<NodeId>,
    /// The Split's output for each.
    pub slots: [usize; 3],
    pub conv: Option<NodeId>,
}

/// A layer around `core`.
pub struct Mixer {
    pub core: NodeId,
    pub rows: [Rows; 3],
    pub joint: Option<Joint>,
    /// LinearAttentionGate.
    pub gate: Option<NodeId>,
    /// Where the decay and beta are read, or what they are made of.
    pub gates: [Option<Slot>; 2],
    /// GatedRMSNorm.
    pub norm: Option<NodeId>,
    /// Transposes that must move nothing.
    pub transposes: Vec<NodeId>,
    /// All, the core first.
    pub nodes: Vec<NodeId>,
}

impl Mixer {
    /// The node whose output 0 is the layer's.
    /// The convolution, if it is part of this.
    pub fn conv(&self) -> Option<NodeId> {
        self.joint.as_ref()?.conv
    }

    pub fn last(&self) -> NodeId {
        self.norm.unwrap_or(self.core)
    }
}

/// Whether `id` is a delta rule.
pub fn is_core(graph: &Graph, id: NodeId) -> bool {
    let node = &graph.nodes[id];
    matches!((node.domain.as_str(), node.op_type.as_str()), (MS | "", "LinearAttention") | (MS, "GatedDeltaNet"))
}

/// The layer around `core`, as large as `links` allow.
pub fn trace(links: &Links<'_>, core: NodeId) -> Option<Mixer> {
    let mut walk = Walk { links, nodes: vec![core], transposes: Vec::new() };
    let node = walk.node(core);
    let delta_net = node.node().op_type == "GatedDeltaNet";
    let packed = delta_net && !node.has_input(1);
    let normed = delta_net && node.int("qk_l2_norm", 0) == 1;
    let rows = if packed {
        [walk.rows((core, 0), false, false)?; 3]
    } else {
        // The core's own norm would come after these.
        let [q, k, v] = [(0, !normed), (1, !normed), (2, false)]
            .map(|(slot, norm)| walk.rows((core, slot), norm, slot == 0 && norm));
        [q?, k?, v?]
    };
    let joint = walk.joint(&rows, packed);
    let mut gates = [4, 5].map(|slot| node.has_input(slot).then_some((core, slot)));
    let gate = walk.gate(&gates).filter(|_| !delta_net);
    if let Some(gate) = gate {
        walk.nodes.push(gate);
        gates = [Some((gate, 0)), Some((gate, 3))];
    } else if delta_net {
        gates = gates.map(|gate| gate.map(|slot| walk.widened(slot)));
    }
    let norm = walk.norm(core);
    let mut seen = HashSet::new();
    walk.nodes.retain(|&id| seen.insert(id));
    Some(Mixer { core, rows, joint, gate, gates, norm, transposes: walk.transposes, nodes: walk.nodes })
}

/// A trace under way.
struct Walk<'a, 'l> {
    links: &'a Links<'l>,
    nodes: Vec<NodeId>,
    transposes: Vec<NodeId>,
}

impl<'l> Walk<'_, 'l> {
    fn node(&self, id: NodeId) -> NodeCx<'l> {
        NodeCx::new(self.links.graph, id, self.links.facts)
    }

    fn read(&self, (id, slot): Slot) -> Option<ValueId> {
        *self.links.graph.nodes[id].inputs.get(slot)?
    }

    fn producer(&self, slot: Slot) -> Option<NodeId> {
        (self.links.producer)(self.read(slot)?)
    }

    fn is(&self, id: NodeId, domain: &str, name: &str) -> bool {
        let node = &self.links.graph.nodes[id];
        node.domain == domain && node.op_type == name
    }

    fn is_view(&self, id: NodeId) -> bool {
        op::find(&self.links.graph.nodes[id]).is_ok_and(|def| def.view)
    }

    fn is_constant(&self, slot: Slot) -> bool {
        self.read(slot).and_then(|v| self.links.facts[v].as_ref()).is_some_and(|fact| fact.constant)
    }

    fn dtype(&self, slot: Slot) -> Option<DType> {
        Some(self.links.facts[self.read(slot)?].as_ref()?.dtype)
    }

    /// The number in a constant of one element.
    fn scalar(&self, slot: Slot) -> Option<f32> {
        let fact = self.links.facts[self.read(slot)?].as_ref()?;
        let value = fact.value.as_ref().filter(|_| fact.constant)?;
        match Constant::computed(value.clone()).to_f32s()?[..] {
            [one] => Some(one),
            _ => None,
        }
    }

    /// From a slot of the core back over reshapes, a norm and a factor.
    fn rows(&mut self, mut read: Slot, may_norm: bool, may_scale: bool) -> Option<Rows> {
        let (mut norm, mut scale) = (None, 1.0);
        while let Some(id) = self.producer(read) {
            let factor = |slot: usize| self.scalar((id, slot)).filter(|_| may_scale && norm.is_none());
            let mut next = (id, 0);
            if may_norm && norm.is_none() && self.is_norm(id) {
                norm = Some(id);
            } else if self.is(id, "", "Mul") && self.keeps_type(id) {
                match (factor(0), factor(1)) {
                    (None, Some(factor)) => scale *= factor,
                    (Some(factor), None) => {
                        scale *= factor;
                        next = (id, 1);
                    }
                    _ => break,
                }
            } else if !self.is_view(id) {
                break;
            }
            self.nodes.push(id);
            read = next;
        }
        Some(Rows { read, value: self.read(read)?, norm, scale })
    }

    /// Whether `id` divides rows by their L2 norm, over the last axis.
    fn is_norm(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let rank = node.input(0).and_then(Fact::rank);
        let last = |axis: i64| axis == -1 || rank.is_some_and(|rank| axis == rank as i64 - 1);
        self.is(id, "", "LpNormalization") && node.int("p", 2) == 2 && last(node.int("axis", -1))
    }

    /// Whether a Mul by a constant gives the shape of its other operand.
    fn keeps_type(&self, id: NodeId) -> bool {
        let ranks = [0, 1].map(|slot| self.node(id).input(slot).and_then(Fact::rank));
        let constant = usize::from(self.is_constant((id, 1)));
        matches!(ranks, [Some(a), Some(b)] if if constant == 1 { b <= a } else { a <= b })
    }

    /// The tensor that query, key and value are parts of, and the convolution that makes it.
    fn joint(&mut self, rows: &[Rows; 3], packed: bool) -> Option<Joint> {
        let (mut read, mut split, mut slots) = (rows[0].read, None, [0; 3]);
        if !packed {
            let id = self.producer(rows[0].read).filter(|&id| self.is(id, "", "Split"))?;
            let outputs = &self.links.graph.nodes[id].outputs;
            for (slot, row) in slots.iter_mut().zip(rows) {
                *slot = outputs.iter().position(|&v| v == Some(row.value))?;
            }
            let mut sorted = slots;
            sorted.sort_unstable();
            if outputs.len() != 3 || sorted != [0, 1, 2] {
                return None;
            }
            self.nodes.push(id);
            (split, read) = (Some(id), (id, 0));
        }
        let conv = self.conv(&mut read);
        Some(Joint { read, split, slots, conv })
    }

    /// The convolution that makes what is read; `read` moves to its input.
    fn conv(&mut self, read: &mut Slot) -> Option<NodeId> {
        let (mut at, mut chain) = (*read, Vec::new());
        let conv = loop {
            let id = self.producer(at)?;
            if self.links.graph.nodes[id].op_type == "CausalConvWithState" {
                break id;
            }
            if !self.is_view(id) && !self.is(id, "", "Transpose") {
                return None;
            }
            chain.push(id);
            at = (id, 0);
        };
        let constants = [1, 2].iter().all(|&slot| self.read((conv, slot)).is_none() || self.is_constant((conv, slot)));
        let makes_rows = self.links.graph.nodes[conv].outputs.first() == Some(&self.read(at));
        let taps = self.node(conv).input(1).map_or(Dim::Unknown, |weight| weight.dim(-1));
        let short = taps.known().is_some_and(|taps| (1..=TAPS).contains(&taps));
        if !constants || !makes_rows || !short || self.node(conv).int("dilation", 1) != 1 {
            return None;
        }
        chain.push(conv);
        at = (conv, 0);
        while let Some(id) = self.producer(at).filter(|&id| self.is_view(id) || self.is(id, "", "Transpose")) {
            chain.push(id);
            at = (id, 0);
        }
        let transposes: Vec<_> = chain.iter().copied().filter(|&id| self.is(id, "", "Transpose")).collect();
        self.transposes.extend(transposes);
        self.nodes.extend(chain);
        *read = at;
        Some(conv)
    }

    /// The LinearAttentionGate that makes both decay and beta.
    fn gate(&self, gates: &[Option<Slot>; 2]) -> Option<NodeId> {
        let [decay, beta] = *gates;
        let id = self.producer(decay?).filter(|&id| self.is(id, MS, "LinearAttentionGate"))?;
        let outputs = &self.links.graph.nodes[id].outputs;
        let both = outputs.first() == Some(&self.read(decay?)) && outputs.get(1) == Some(&self.read(beta?));
        (both && self.is_constant((id, 1)) && self.is_constant((id, 2))).then_some(id)
    }

    /// Back over a Cast to f32 of what the core computes in anyway.
    fn widened(&mut self, slot: Slot) -> Slot {
        let cast = self.producer(slot).filter(|&id| self.is(id, "", "Cast"));
        let Some(id) = cast.filter(|&id| self.dtype((id, 0)) == self.dtype((slot.0, 0))) else { return slot };
        if self.dtype(slot) != Some(DType::F32) {
            return slot;
        }
        self.nodes.push(id);
        (id, 0)
    }

    /// The gated norm of the core's output.
    fn norm(&mut self, core: NodeId) -> Option<NodeId> {
        let (mut at, mut chain) = (core, Vec::new());
        loop {
            let made = (*self.links.graph.nodes[at].outputs.first()?)?;
            let id = (self.links.reader)(made)?;
            if self.links.graph.nodes[id].inputs.first() != Some(&Some(made)) {
                return None;
            }
            chain.push(id);
            if self.is(id, MS, "GatedRMSNorm") {
                if !self.is_constant((id, 1)) {
                    return None;
                }
                self.nodes.extend(chain);
                return Some(id);
            }
            if !self.is_view(id) {
                return None;
            }
            at = id;
        }
    }
}
