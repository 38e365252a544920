//! An instance becomes that of other shapes, where the tensors can stay in their places.

use super::{Instance, Place, Placed, roomy};
use crate::fact::Facts;
use crate::op::NodeCx;
use crate::plan::{Io, Plan};
use crate::shape_program::{self, Changes};
use abi::{HostTensor, Result, ValueId};
use std::sync::Arc;

/// What a change of shapes overwrote.
#[derive(Default)]
struct Undo {
    values: Vec<(ValueId, Option<Placed>)>,
    host: Vec<(usize, HostTensor)>,
}

impl Instance {
    /// Makes this the instance for the shapes of `io`, at the cost of what differs. When some tensor must then lie
    /// elsewhere, gives the facts of those shapes, for an instance of their own; this one is then, and after an error, what
    /// it was.
    pub fn adapt(&mut self, plan: &Plan, io: &dyn Io) -> Result<Option<Facts>> {
        let mut changes = Changes::default();
        let mut undo = Undo::default();
        let done = shape_program::update(plan, io, &mut self.facts, &mut changes).and_then(|()| {
            if !self.stays(plan, &changes) {
                return Ok(Some(self.facts.clone()));
            }
            undo = self.reshape(&changes);
            match (&plan.device, &self.program) {
                (Some(side), Some(program)) => {
                    self.program = Some(Arc::new(program.adapted(plan, side, self, &changes.steps)?));
                }
                _ => self.size_scratch(plan, |at| changes.steps.binary_search(&at).is_ok()),
            }
            Ok(None)
        });
        if !matches!(done, Ok(None)) {
            changes.undo(&mut self.facts);
            undo.values.into_iter().for_each(|(value, placed)| self.values[value] = placed);
            undo.host.into_iter().for_each(|(i, tensor)| self.host[i] = tensor);
        }
        done
    }

    /// Whether every tensor may stay where it is.
    fn stays(&self, plan: &Plan, changes: &Changes) -> bool {
        changes.steps.iter().all(|&at| self.parts_stay(plan, at))
            && changes.values.iter().all(|&(value, _)| {
                let (Some(fact), Some(placed)) = (&self.facts[value], &self.values[value]) else { return false };
                let Some(bytes) = fact.elements().and_then(|n| fact.dtype.bytes(n)) else { return false };
                match (placed.place, &fact.value) {
                    // On a device it has a place of its size.
                    (Some(Place::Host(_)), Some(_)) => plan.device.is_none() || placed.bytes() == bytes,
                    (Some(Place::Input(_) | Place::Output(_)), None) => true,
                    (Some(Place::Input(_)), Some(_)) => plan.graph.inputs.contains(&value),
                    // A single token must not take a prompt's memory.
                    (Some(Place::Workspace(_)), None) => bytes <= placed.room && placed.room <= 2 * roomy(bytes),
                    _ => false,
                }
            })
    }

    /// Whether the outputs of step `at`, where they are parts of its input, still begin where they did, and the input still
    /// fits there.
    fn parts_stay(&self, plan: &Plan, at: usize) -> bool {
        let (step, moves) = (&plan.steps[at], self.steps.binary_search_by_key(&at, |&(step, _)| step).is_ok());
        let Some(alias) = step.def.alias.filter(|_| plan.device.is_some() && !moves) else { return true };
        let node = &plan.graph.nodes[step.node];
        let shift = |value: &Option<ValueId>| self.values[(*value)?].as_ref().map(|placed| placed.shift);
        let on_host = |value: &Option<ValueId>| matches!(value.and_then(|v| self.placed(v)), Some(Place::Host(_)));
        if node.outputs.iter().all(|value| value.is_none() || on_host(value)) {
            return true;
        }
        let offsets = alias(&NodeCx::new(&plan.graph, step.node, &self.facts));
        let (Some(offsets), Some(start)) = (offsets, node.inputs.first().and_then(shift)) else { return false };
        let same = |(value, offset): (&Option<ValueId>, usize)| value.is_none() || shift(value) == Some(start + offset);
        self.whole_stays(plan, node.inputs[0]) && node.outputs.iter().zip(offsets).all(same)
    }

    /// Whether `whole`, of which other values are parts, is no longer than the graph output in whose stead it is.
    fn whole_stays(&self, plan: &Plan, whole: Option<ValueId>) -> bool {
        let Some((value, placed)) = whole.and_then(|value| Some((value, self.values[value].as_ref()?))) else {
            return true;
        };
        let Some(Place::Output(j)) = placed.place else { return true };
        let bytes = |value: ValueId| self.facts[value].as_ref().and_then(|f| f.dtype.bytes(f.elements()?));
        bytes(value).zip(bytes(plan.graph.outputs[j])).is_some_and(|(whole, part)| placed.shift + whole <= part)
    }

    /// Gives values their new shapes, and host values their contents.
    fn reshape(&mut self, changes: &Changes) -> Undo {
        let mut undo = Undo::default();
        for &(value, _) in &changes.values {
            undo.values.push((value, self.values[value].clone()));
            let (Some(fact), Some(placed)) = (&self.facts[value], &mut self.values[value]) else { continue };
            placed.shape = fact.known_shape().unwrap_or_default().into();
            if let (Some(Place::Host(i)), Some(tensor)) = (placed.place, &fact.value) {
                undo.host.push((i, std::mem::replace(&mut self.host[i], tensor.clone())));
            }
        }
        undo
    }
}
