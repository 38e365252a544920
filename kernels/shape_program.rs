//! The shape program: types and shapes of every value for one Run's inputs, on the host.

use crate::eval;
use crate::fact::{Fact, Facts};
use crate::kernel::Tensor;
use crate::op::NodeCx;
use crate::par::Par;
use crate::plan::{Io, Plan, Step};
use abi::{Dim, Error, HostTensor, Result};
use std::sync::Arc;

/// Every value's fact for the inputs of `io`, and whether it differs from `base`, the facts of another Run. Steps
/// none of whose inputs differ are not inferred again.
pub fn infer(plan: &Plan, io: &dyn Io, base: Option<&Facts>) -> Result<(Facts, Vec<bool>)> {
    let mut facts = base.unwrap_or(&plan.template).clone();
    let mut changed = vec![base.is_none(); facts.len()];
    for (i, &value) in plan.graph.inputs.iter().enumerate() {
        let fact = input_fact(plan, io, i)?;
        changed[value] |= !facts[value].as_ref().is_some_and(|old| same(old, &fact));
        facts[value] = Some(Arc::new(fact));
    }
    for step in &plan.steps {
        let node = &plan.graph.nodes[step.node];
        if base.is_some() && !node.inputs.iter().flatten().any(|&v| changed[v]) {
            continue;
        }
        for (value, fact) in node.outputs.iter().zip(infer_step(plan, step, &facts)?) {
            let Some(value) = *value else { continue };
            changed[value] |= !facts[value].as_ref().is_some_and(|old| same(old, &fact));
            facts[value] = Some(Arc::new(fact));
        }
    }
    Ok((facts, changed))
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
