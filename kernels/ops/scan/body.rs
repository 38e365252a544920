//! Recognises the gated delta rule in a Scan's body, whatever the order of its inputs and factors.
//!
//! With state `S [D, E]` of a head, query `q [D]`, key `k [D]`, value `v [E]`, decay g and beta b:
//! `S' = exp(g) S`, `S'' = S' + k (b (v - k^T S'))^T`, `y = q^T S''`.

use crate::claim::stated_facts;
use crate::fact::Facts;
use abi::{Dim, Graph, Node};
use std::collections::HashMap;

/// What a scanned input is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Role {
    Query,
    Key,
    Value,
    Decay,
    Beta,
}

const ROLES: [Role; 5] = [Role::Query, Role::Key, Role::Value, Role::Decay, Role::Beta];

/// An axis of a value in the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Axis {
    Batch,
    Head,
    /// D.
    Key,
    /// E.
    Value,
    One,
}

/// What a value is, with factors and terms in order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Expr {
    State,
    Input(Role),
    Exp(Box<Expr>),
    Times(Vec<Expr>),
    Plus(Vec<Expr>),
    Minus(Box<Expr>, Box<Expr>),
    /// Over D.
    Sum(Box<Expr>),
}

impl Expr {
    fn times(a: &Self, b: &Self) -> Self {
        let factors = |e: &Self| if let Self::Times(all) = e { all.clone() } else { vec![e.clone()] };
        let mut all = [factors(a), factors(b)].concat();
        all.sort();
        Self::Times(all)
    }

    fn plus(a: Self, b: Self) -> Self {
        let mut all = vec![a, b];
        all.sort();
        Self::Plus(all)
    }
}

type Value = (Expr, Vec<Axis>);

/// The roles of the scanned inputs, of which `shapes` are one step's; `key` is D. `None` when the body is something else.
pub(super) fn roles(body: &Graph, shapes: &[&[Dim]], key: &Dim) -> Option<[Role; 5]> {
    if body.inputs.len() != 6 || body.outputs.len() != 2 {
        return None;
    }
    let facts = stated_facts(body);
    let [state, step] = step();
    permutations().find(|roles| {
        let mut values =
            HashMap::from([(body.inputs[0], (Expr::State, vec![Axis::Batch, Axis::Head, Axis::Key, Axis::Value]))]);
        for ((&input, &role), shape) in body.inputs[1..].iter().zip(roles).zip(shapes) {
            let Some(axes) = axes(role, shape, key) else { return false };
            values.insert(input, (Expr::Input(role), axes));
        }
        for node in &body.nodes {
            let Some(value) = evaluate(node, &facts, &values) else { return false };
            if let [Some(out)] = node.outputs[..] {
                values.insert(out, value);
            }
        }
        let is = |slot: usize, wanted: &Value| values.get(&body.outputs[slot]) == Some(wanted);
        is(0, &state) && is(1, &step)
    })
}

/// All orders of the roles.
fn permutations() -> impl Iterator<Item = [Role; 5]> {
    (0..120).map(|mut n| {
        let mut left = ROLES.to_vec();
        [5, 4, 3, 2, 1].map(|count| {
            let role = left.remove(n % count);
            n /= count;
            role
        })
    })
}

/// The axes of a step of an input in this role; `None` when it has no such shape.
fn axes(role: Role, shape: &[Dim], key: &Dim) -> Option<Vec<Axis>> {
    let last = match (role, shape.get(2)) {
        (Role::Query | Role::Key, Some(_)) => Some(Axis::Key),
        (Role::Value, Some(_)) => Some(Axis::Value),
        (Role::Decay | Role::Beta, None) => None,
        (Role::Decay | Role::Beta, Some(Dim::Known(1))) => Some(Axis::One),
        // A dim that only a Run tells is D, or 1 and broadcasts.
        (Role::Decay, Some(Dim::Known(n))) if key.known() != Some(*n) => return None,
        (Role::Decay, Some(_)) => Some(Axis::Key),
        (Role::Beta, Some(Dim::Known(_))) => return None,
        (Role::Beta, Some(_)) => Some(Axis::One),
        (Role::Query | Role::Key | Role::Value, None) => return None,
    };
    Some([Axis::Batch, Axis::Head].into_iter().chain(last).collect())
}

/// What the new state and the output must be.
fn step() -> [Value; 2] {
    use Axis::{Batch, Head, Key, Value as ValueAxis};
    let input = |role| Expr::Input(role);
    let decayed = Expr::times(&Expr::State, &Expr::Exp(Box::new(input(Role::Decay))));
    let held = Expr::Sum(Box::new(Expr::times(&input(Role::Key), &decayed)));
    let missing = Expr::Minus(Box::new(input(Role::Value)), Box::new(held));
    let update = Expr::times(&input(Role::Key), &Expr::times(&missing, &input(Role::Beta)));
    let state = Expr::plus(decayed, update);
    let out = Expr::Sum(Box::new(Expr::times(&input(Role::Query), &state)));
    [(state, vec![Batch, Head, Key, ValueAxis]), (out, vec![Batch, Head, ValueAxis])]
}

/// A node's output.
fn evaluate(node: &Node, facts: &Facts, values: &HashMap<usize, Value>) -> Option<Value> {
    if !node.domain.is_empty() {
        return None;
    }
    let input = |slot: usize| values.get(&(*node.inputs.get(slot)?)?);
    let ints = |slot: usize| facts[(*node.inputs.get(slot)?)?].as_ref()?.ints();
    match node.op_type.as_str() {
        "Identity" | "Cast" => input(0).cloned(),
        "Unsqueeze" => {
            let (expr, mut axes) = input(0)?.clone();
            let mut at = positions(&ints(1)?, axes.len() + ints(1)?.len())?;
            at.sort_unstable();
            at.into_iter().for_each(|at| axes.insert(at, Axis::One));
            Some((expr, axes))
        }
        "Squeeze" => {
            let (expr, mut axes) = input(0)?.clone();
            let mut at = positions(&ints(1)?, axes.len())?;
            at.sort_unstable();
            for at in at.into_iter().rev() {
                (axes.remove(at) == Axis::One).then_some(())?;
            }
            Some((expr, axes))
        }
        "Exp" => input(0).map(|(expr, axes)| (Expr::Exp(Box::new(expr.clone())), axes.clone())),
        "Mul" => {
            let (a, b) = (input(0)?, input(1)?);
            Some((Expr::times(&a.0, &b.0), broadcast(&a.1, &b.1)?))
        }
        "Add" => {
            let (a, b) = (input(0)?, input(1)?);
            Some((Expr::plus(a.0.clone(), b.0.clone()), broadcast(&a.1, &b.1)?))
        }
        "Sub" => {
            let (a, b) = (input(0)?, input(1)?);
            Some((Expr::Minus(Box::new(a.0.clone()), Box::new(b.0.clone())), broadcast(&a.1, &b.1)?))
        }
        "MatMul" => product(input(0)?, input(1)?),
        "ReduceSum" => {
            let (expr, mut axes) = input(0)?.clone();
            let [at] = positions(&ints(1)?, axes.len())?[..] else { return None };
            (axes[at] == Axis::Key).then_some(())?;
            if matches!(node.attr("keepdims"), Some(abi::Attr::Int(0))) {
                axes.remove(at);
            } else {
                axes[at] = Axis::One;
            }
            Some((Expr::Sum(Box::new(expr)), axes))
        }
        _ => None,
    }
}

/// Axes that may count from the end.
fn positions(axes: &[i64], rank: usize) -> Option<Vec<usize>> {
    axes.iter().map(|&axis| crate::fact::axis(axis, rank)).collect()
}

/// The axes of an elementwise result.
fn broadcast(a: &[Axis], b: &[Axis]) -> Option<Vec<Axis>> {
    let rank = a.len().max(b.len());
    let at = |axes: &[Axis], i: usize| (i + axes.len()).checked_sub(rank).map_or(Axis::One, |i| axes[i]);
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, Axis::One) => Some(x),
            (Axis::One, y) => Some(y),
            (x, y) => (x == y).then_some(x),
        })
        .collect()
}

/// A matrix product: over D, or the outer one.
fn product((a, left): &Value, (b, right): &Value) -> Option<Value> {
    let ([lead_a @ .., rows, inner], [lead_b @ .., other, columns]) = (&left[..], &right[..]) else { return None };
    let mut axes = broadcast(lead_a, lead_b)?;
    axes.extend([*rows, *columns]);
    let all = Expr::times(a, b);
    match (inner, other) {
        (Axis::Key, Axis::Key) => Some((Expr::Sum(Box::new(all)), axes)),
        (Axis::One, Axis::One) => Some((all, axes)),
        _ => None,
    }
}
