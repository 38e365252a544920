//! The shape program: types and shapes of every value for one Run's inputs, on the host.

use crate::eval;
use crate::fact::{Fact, Facts};
use crate::kernel::Tensor;
use crate::op::NodeCx;
use crate::par::Par;
use crate::plan::{Io, Plan, Step};
use abi::{Dim, Error, HostTensor, Result, ValueId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Every value's fact for the inputs of `io`.
pub fn infer(plan: &Plan, io: &dyn Io) -> Result<Facts> {
    let mut facts = plan.template.clone();
    for (i, &value) in plan.graph.inputs.iter().enumerate() {
        facts[value] = Some(Arc::new(input_fact(plan, io, i)?));
    }
    for step in &plan.steps {
        let node = &plan.graph.nodes[step.node];
        for (value, fact) in node.outputs.iter().zip(infer_step(plan, step, &facts)?) {
            if let Some(value) = *value {
                facts[value] = Some(Arc::new(fact));
            }
        }
    }
    Ok(facts)
}

/// How the facts of one Run differ from those of another.
#[derive(Default)]
pub struct Changes {
    /// Values whose facts differ, with the facts that they had.
    pub values: Vec<(ValueId, Option<Arc<Fact>>)>,
    /// Steps to which that makes a difference, in order. Only they make any.
    pub steps: Vec<usize>,
}

impl Changes {
    fn set(&mut self, facts: &mut Facts, value: ValueId, fact: Fact) -> bool {
        if facts[value].as_ref().is_some_and(|old| same(old, &fact)) {
            return false;
        }
        self.values.push((value, facts[value].replace(Arc::new(fact))));
        true
    }

    /// Whether what differs makes no difference to `step`.
    fn leave(&self, plan: &Plan, step: &Step, facts: &Facts) -> bool {
        let Some(steady) = step.def.steady else { return false };
        let node = &plan.graph.nodes[step.node];
        if node.outputs.iter().flatten().any(|&v| plan.on_host[v]) {
            return false;
        }
        let cx = NodeCx::new(&plan.graph, step.node, facts);
        let old = |value: ValueId| self.values.iter().find(|(v, _)| *v == value).map(|(_, old)| old);
        node.inputs.iter().enumerate().all(|(slot, value)| match value.and_then(old) {
            None => true,
            Some(old) => old.as_ref().is_some_and(|old| steady(&cx, slot, old)),
        })
    }

    /// Gives `facts` back what they were.
    pub fn undo(&mut self, facts: &mut Facts) {
        self.values.drain(..).for_each(|(value, fact)| facts[value] = fact);
    }
}

/// Brings `facts`, those of another Run, up to the inputs of `io`; only what differs is inferred. `changes` says what did,
/// after an error too.
pub fn update(plan: &Plan, io: &dyn Io, facts: &mut Facts, changes: &mut Changes) -> Result<()> {
    let mut due = BinaryHeap::new();
    let read = |value: ValueId, due: &mut BinaryHeap<_>| due.extend(plan.readers[value].iter().map(|&at| Reverse(at)));
    for (i, &value) in plan.graph.inputs.iter().enumerate() {
        if !is_input(plan, io, i, facts[value].as_deref())? && changes.set(facts, value, input_fact(plan, io, i)?) {
            read(value, &mut due);
        }
    }
    while let Some(Reverse(at)) = due.pop() {
        if changes.steps.last() == Some(&at) {
            continue;
        }
        let step = &plan.steps[at];
        if changes.leave(plan, step, facts) {
            continue;
        }
        changes.steps.push(at);
        let node = &plan.graph.nodes[step.node];
        for (value, fact) in node.outputs.iter().zip(infer_step(plan, step, facts)?) {
            if let Some(value) = value.filter(|&value| changes.set(facts, value, fact)) {
                read(value, &mut due);
            }
        }
    }
    Ok(())
}

/// Whether `fact` is all there is to say about graph input `i`.
fn is_input(plan: &Plan, io: &dyn Io, i: usize, fact: Option<&Fact>) -> Result<bool> {
    let (dtype, shape, _) = io.input(i)?;
    let Some((fact, dims)) = fact.and_then(|fact| Some((fact, fact.shape.as_ref()?))) else { return Ok(false) };
    let equal = dims.len() == shape.len() && dims.iter().zip(shape).all(|(dim, &d)| *dim == Dim::Known(d));
    Ok(fact.dtype == dtype && equal && !plan.key_inputs.contains(&i))
}

fn same(a: &Fact, b: &Fact) -> bool {
    let bytes = |f: &Fact| f.value.as_ref().map(|v| v.bytes().as_ptr());
    let equal = match (&a.value, &b.value) {
        (None, None) => true,
        (Some(x), Some(y)) => bytes(a) == bytes(b) || x.bytes() == y.bytes(),
        _ => false,
    };
    a.dtype == b.dtype && a.shape == b.shape && equal
}

/// Inputs on which shapes depend hold at most this many bytes.
const MAX_SHAPE_INPUT: usize = 1 << 20;

/// Graph input `i`, small enough to be read for shapes.
pub fn input_tensor<'a>(io: &'a dyn Io, i: usize) -> Result<Tensor<'a>> {
    let (dtype, shape, ptr) = io.input(i)?;
    let bytes = dtype.bytes(shape.iter().product()).unwrap_or(usize::MAX);
    if bytes > MAX_SHAPE_INPUT {
        let problem = format!(
            "holds {bytes} bytes, but output shapes depend on its contents; at most {MAX_SHAPE_INPUT} are read for that"
        );
        return Err(Error::Model { place: format!("graph input {i}"), problem });
    }
    // SAFETY: the host promises that the input's bytes are valid for this Run.
    Ok(unsafe { Tensor::from_raw(dtype, shape, ptr) })
}

fn input_fact(plan: &Plan, io: &dyn Io, i: usize) -> Result<Fact> {
    let (dtype, shape, _) = io.input(i)?;
    let stated = plan.template[plan.graph.inputs[i]].as_ref();
    if let Some(stated) = stated.filter(|f| f.dtype != dtype) {
        let place = format!("graph input '{}'", plan.graph.values[plan.graph.inputs[i]].name);
        return Err(Error::Model { place, problem: format!("got {dtype}, expected {}", stated.dtype) });
    }
    if plan.key_inputs.contains(&i) {
        let tensor = input_tensor(io, i)?;
        let value = HostTensor::from_bytes(dtype, shape, tensor.bytes());
        return Ok(Fact::with_value(value.ok_or_else(|| Error::Internal("an input's size is off".into()))?));
    }
    Ok(Fact::new(dtype, shape.iter().map(|&d| Dim::Known(d)).collect()))
}

/// A step's outputs; computes them when shapes depend on their contents.
fn infer_step(plan: &Plan, step: &Step, facts: &Facts) -> Result<Vec<Fact>> {
    let mut outputs = (step.def.infer)(&NodeCx::new(&plan.graph, step.node, facts))?;
    let wanted = plan.graph.nodes[step.node].outputs.iter().flatten().any(|&v| plan.on_host[v]);
    if wanted && outputs.iter().any(|f| f.value.is_none()) {
        evaluate(plan, step, facts, &mut outputs)?;
    }
    Ok(outputs)
}

fn evaluate(plan: &Plan, step: &Step, facts: &Facts, outputs: &mut [Fact]) -> Result<()> {
    let cx = NodeCx::new(&plan.graph, step.node, facts);
    let missing = || Error::Internal(format!("{}: shapes depend on it, but it has no host kernel", step.label));
    let host = step.host.as_ref().ok_or_else(missing)?;
    let mut inputs = Vec::with_capacity(host.inputs.len());
    for value in &host.inputs {
        let known = match *value {
            None => None,
            Some(v) => match (facts[v].as_ref().and_then(|f| f.value.clone()), plan.constants.get(&v)) {
                (Some(tensor), _) => Some(tensor),
                (None, Some(constant)) => Some(constant.to_tensor()?),
                (None, None) => {
                    return Err(Error::Internal(format!("{}: a host value is missing", step.label)));
                }
            },
        };
        inputs.push(known);
    }
    let node = &plan.graph.nodes[step.node];
    let mut shapes = Vec::with_capacity(node.outputs.len());
    for (slot, value) in node.outputs.iter().enumerate() {
        shapes.push(match outputs.get(slot).filter(|_| value.is_some()) {
            None => None,
            Some(f) => Some((f.dtype, f.known_shape().ok_or_else(|| eval::unknown_shape(&cx, slot, f))?)),
        });
    }
    let values = eval::run(&*host.kernel, &step.label, &inputs, &shapes, Par::serial())?;
    for (fact, value) in outputs.iter_mut().zip(values) {
        if let Some(value) = value {
            *fact = Fact::with_value(value);
        }
    }
    Ok(())
}
