//! Checks of shapes that many ops' `infer` share.

use crate::fact::unify;
use crate::op::NodeCx;
use abi::{Dim, Result};

/// The dims of input `slot` (`name` is the schema's), unknown ones when its rank is unknown. Errors when the
/// input is absent or has another rank.
pub fn ranked(cx: &NodeCx, slot: usize, name: &str, rank: usize) -> Result<Vec<Dim>> {
    let fact = cx.required(slot)?;
    match &fact.shape {
        None => Ok(vec![Dim::Unknown; rank]),
        Some(shape) if shape.len() == rank => Ok(shape.clone()),
        Some(shape) => Err(cx.error(
            format_args!("input {slot} ({name})"),
            format_args!("rank {} (shape {})", shape.len(), show(shape)),
            format_args!("rank {rank}"),
        )),
    }
}

/// The more certain of two claims about dim `axis` of input `slot`; errors when they contradict each other.
pub fn agree(cx: &NodeCx, slot: usize, name: &str, axis: usize, got: &Dim, expected: &Dim) -> Result<Dim> {
    unify(got, expected)
        .ok_or_else(|| cx.error(format_args!("input {slot} ({name}), dim {axis}"), show_dim(got), show_dim(expected)))
}

/// [`agree`] for each dim in turn; errors too when the ranks differ.
pub fn agree_all(cx: &NodeCx, slot: usize, name: &str, expected: &[Dim]) -> Result<Vec<Dim>> {
    let got = ranked(cx, slot, name, expected.len())?;
    (0..expected.len()).map(|axis| agree(cx, slot, name, axis, &got[axis], &expected[axis])).collect()
}

/// A shape for messages: `2x?xhidden`.
pub fn show(shape: &[Dim]) -> String {
    if shape.is_empty() {
        return "scalar".into();
    }
    shape.iter().map(show_dim).collect::<Vec<_>>().join("x")
}

fn show_dim(dim: &Dim) -> String {
    match dim {
        Dim::Known(n) => n.to_string(),
        Dim::Symbol(name) => name.to_string(),
        Dim::Unknown => "?".into(),
    }
}
