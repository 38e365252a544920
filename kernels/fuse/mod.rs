//! Structural rewrites of a graph before it is planned: one a file, each a pattern of ops.

use abi::{Graph, Result};

/// Applies every rewrite.
pub fn fuse(graph: Graph) -> Result<Graph> {
    Ok(graph)
}
