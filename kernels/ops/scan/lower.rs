//! Rewrites Scans of the gated delta rule into LinearAttention nodes between transposes.

use super::{STATE, Steps, body::Role};
use crate::claim::stated_facts;
use crate::fact::Facts;
use crate::op::{self, NodeCx};
use abi::{Attr, DType, Error, Graph, HostTensor, Initializer, InitializerData, Node, NodeId, Result, Value, ValueId};
use std::sync::Arc;

/// Rewrites every Scan; all nodes were claimed.
///
/// # Errors
/// When a Scan was claimed that this cannot read.
pub fn rewrite(mut graph: Graph) -> Result<Graph> {
    if !graph.nodes.iter().any(super::is_scan) {
        return Ok(graph);
    }
    let facts = inferred(&graph);
    let mut scans = scans(&graph, &facts)?.into_iter().peekable();
    for (id, node) in std::mem::take(&mut graph.nodes).into_iter().enumerate() {
        match scans.next_if(|scan| scan.id == id) {
            Some(scan) => Lowering { graph: &mut graph, node: &node, scan }.write()?,
            None => graph.nodes.push(node),
        }
    }
    Ok(graph)
}

/// A node that scans.
struct ScanNode {
    id: NodeId,
    steps: Steps,
    /// Of the scanned inputs.
    ranks: [usize; 5],
    dtype: DType,
}

/// All of them, in order.
fn scans(graph: &Graph, facts: &Facts) -> Result<Vec<ScanNode>> {
    (0..graph.nodes.len())
        .filter(|&id| super::is_scan(&graph.nodes[id]))
        .map(|id| {
            let cx = NodeCx::new(graph, id, facts);
            let steps = Steps::of(&cx).map_err(|decline| Error::Internal(decline.0))?;
            let ranks = std::array::from_fn(|i| cx.input(i + 1).and_then(|fact| fact.rank()).unwrap_or(0));
            Ok(ScanNode { id, steps, ranks, dtype: cx.required(STATE)?.dtype })
        })
        .collect()
}

/// What is known of every value.
fn inferred(graph: &Graph) -> Facts {
    let mut facts = stated_facts(graph);
    for (id, node) in graph.nodes.iter().enumerate() {
        let made = op::find(node).ok().and_then(|def| (def.infer)(&NodeCx::new(graph, id, &facts)).ok());
        for (value, fact) in node.outputs.iter().zip(made.unwrap_or_default()) {
            if let Some(value) = *value {
                facts[value] = Some(Arc::new(fact));
            }
        }
    }
    facts
}

/// Writes one Scan anew.
struct Lowering<'a> {
    graph: &'a mut Graph,
    node: &'a Node,
    scan: ScanNode,
}

impl Lowering<'_> {
    fn write(mut self) -> Result<()> {
        let order = [Role::Query, Role::Key, Role::Value, Role::Decay, Role::Beta];
        let mut inputs = Vec::with_capacity(6);
        for role in order {
            let slot = self.scan.steps.slot(role);
            let lost = || Error::Internal(format!("Scan '{}' lost an input", self.node.name));
            let from = self.node.inputs[slot].ok_or_else(lost)?;
            inputs.push(Some(self.joined(from, self.scan.ranks[slot - 1], &format!("{role:?}"))));
        }
        inputs.insert(3, self.node.inputs[STATE]);
        let [state, out] = [0, 1].map(|slot| self.node.outputs.get(slot).copied().flatten());
        let attended = out.map(|_| self.value("LinearAttention"));
        let heads = self.scan.steps.heads as i64;
        let attrs = vec![
            ("q_num_heads".into(), Attr::Int(heads)),
            ("kv_num_heads".into(), Attr::Int(heads)),
            ("update_rule".into(), Attr::String("gated_delta".into())),
            ("scale".into(), Attr::Float(1.0)),
        ];
        self.push("com.microsoft", "LinearAttention", 1, (inputs, vec![attended, state]), attrs);
        if let (Some(attended), Some(out)) = (attended, out) {
            let shape = self.ints("shape of heads", &[0, 0, heads, -1]);
            let split = self.value("heads");
            self.push("", "Reshape", 14, (vec![Some(attended), Some(shape)], vec![Some(split)]), Vec::new());
            let turned = ("perm".into(), Attr::Ints(vec![1, 0, 2, 3]));
            self.push("", "Transpose", 13, (vec![Some(split)], vec![Some(out)]), vec![turned]);
        }
        Ok(())
    }

    /// `[T, B, H, n]` or `[T, B, H]` as `[B, T, H n]`.
    fn joined(&mut self, from: ValueId, rank: usize, name: &str) -> ValueId {
        let turned = self.value(&format!("{name} turned"));
        let perm = [1, 0].into_iter().chain(2..rank as i64).collect();
        let attrs = vec![("perm".into(), Attr::Ints(perm))];
        self.push("", "Transpose", 13, (vec![Some(from)], vec![Some(turned)]), attrs);
        if rank == 3 {
            return turned;
        }
        let (shape, joined) = (self.ints(&format!("{name} shape"), &[0, 0, -1]), self.value(&format!("{name} joined")));
        self.push("", "Reshape", 14, (vec![Some(turned), Some(shape)], vec![Some(joined)]), Vec::new());
        joined
    }

    fn push(
        &mut self,
        domain: &str,
        op: &str,
        version: u32,
        (inputs, outputs): (Vec<Option<ValueId>>, Vec<Option<ValueId>>),
        attrs: Vec<(String, Attr)>,
    ) {
        self.graph.nodes.push(Node {
            // Messages name the model's node.
            name: self.node.name.clone(),
            domain: domain.into(),
            op_type: op.into(),
            since_version: version,
            inputs,
            outputs,
            attrs,
            implicit_inputs: Vec::new(),
            handle: self.node.handle,
        });
    }

    fn value(&mut self, what: &str) -> ValueId {
        let name = format!("{} {what} {}", self.node.name, self.graph.values.len());
        self.graph.values.push(Value { name, dtype: Some(self.scan.dtype), shape: None, initializer: None });
        self.graph.values.len() - 1
    }

    fn ints(&mut self, what: &str, values: &[i64]) -> ValueId {
        let id = self.value(what);
        let tensor = HostTensor::new(&[values.len()], values);
        let init = Initializer { dtype: DType::I64, shape: vec![values.len()], data: InitializerData::Inline(tensor) };
        let value = &mut self.graph.values[id];
        (value.dtype, value.shape, value.initializer) = (Some(DType::I64), Some(vec![values.len().into()]), Some(init));
        id
    }
}
