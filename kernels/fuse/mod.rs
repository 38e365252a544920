//! Structural rewrites of a graph before it is planned: one a file, each a pattern of ops.
//!
//! A fused op lives in the domain [`DOMAIN`], which no model can name: `claim` never sees these. Nodes that only a device
//! runs as one, for some shapes, are a [`cluster`].

use abi::{Graph, NodeId, Result, ValueId};

mod attention_mixer;
pub mod cluster;
mod linear_mixer;
mod products;
mod silu_mul;

/// The domain of ops that only rewrites make.
pub const DOMAIN: &str = "nxrt.fused";

/// Applies every rewrite.
pub fn fuse(mut graph: Graph) -> Result<Graph> {
    silu_mul::rewrite(&mut graph);
    Ok(graph)
}

/// Who makes and who reads each value.
struct Links {
    producer: Vec<Option<NodeId>>,
    readers: Vec<usize>,
}

impl Links {
    fn of(graph: &Graph) -> Self {
        let mut links = Self { producer: vec![None; graph.values.len()], readers: vec![0; graph.values.len()] };
        for (id, node) in graph.nodes.iter().enumerate() {
            node.outputs.iter().flatten().for_each(|&v| links.producer[v] = Some(id));
            node.inputs.iter().flatten().chain(&node.implicit_inputs).for_each(|&v| links.readers[v] += 1);
        }
        graph.outputs.iter().for_each(|&v| links.readers[v] += 1);
        links
    }

    /// The node that makes `value`, if it is `op` of the default domain and nobody else reads the value.
    fn sole(&self, graph: &Graph, value: ValueId, op: &str) -> Option<NodeId> {
        let id = self.producer[value].filter(|_| self.readers[value] == 1)?;
        let node = &graph.nodes[id];
        (node.domain.is_empty() && node.op_type == op && node.outputs.len() == 1).then_some(id)
    }
}

/// Removes the nodes marked in `gone`.
fn remove(graph: &mut Graph, gone: &[bool]) {
    let mut at = 0;
    graph.nodes.retain(|_| {
        at += 1;
        !gone[at - 1]
    });
}
