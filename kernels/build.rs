//! What an op's `build` sees: the node, the settings and the weights.

use crate::op::NodeCx;
use crate::settings::Settings;
use crate::weights::{Constant, PackCache};
use abi::{Result, ValueId};
use std::any::Any;
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

/// Constants of the graph being compiled: initializers opened on first use, and folded values.
#[derive(Default)]
pub struct Constants(HashMap<ValueId, Constant>);

impl Constants {
    /// The constant behind `value`; `None` when it is not one.
    pub fn get(&mut self, graph: &abi::Graph, value: ValueId) -> Result<Option<Constant>> {
        if let Some(constant) = self.0.get(&value) {
            return Ok(Some(constant.clone()));
        }
        let Some(init) = &graph.values[value].initializer else {
            return Ok(None);
        };
        let constant = Constant::open(&graph.values[value].name, init)?;
        self.0.insert(value, constant.clone());
        Ok(Some(constant))
    }

    /// Records a folded value.
    pub fn insert(&mut self, value: ValueId, constant: Constant) {
        self.0.insert(value, constant);
    }
}

/// A node on its way to becoming a kernel.
pub struct BuildCx<'a> {
    node: NodeCx<'a>,
    settings: &'a Settings,
    constants: &'a mut Constants,
    cache: &'a PackCache,
    packed: Vec<usize>,
}

impl<'a> Deref for BuildCx<'a> {
    type Target = NodeCx<'a>;

    fn deref(&self) -> &NodeCx<'a> {
        &self.node
    }
}

impl<'a> BuildCx<'a> {
    /// Starts on one node.
    pub fn new(node: NodeCx<'a>, settings: &'a Settings, constants: &'a mut Constants, cache: &'a PackCache) -> Self {
        Self { node, settings, constants, cache, packed: Vec::new() }
    }

    /// The session's settings.
    pub fn settings(&self) -> &'a Settings {
        self.settings
    }

    /// The constant at input `slot`, seen through folded Cast, Reshape, Transpose and so on; `None` when the
    /// input is absent or not constant.
    pub fn constant(&mut self, slot: usize) -> Result<Option<Constant>> {
        match self.node.node().inputs.get(slot) {
            Some(Some(value)) => self.constants.get(self.node.graph(), *value),
            _ => Ok(None),
        }
    }

    /// The constant behind any value of the graph, for kernels that look for another node's weights.
    pub fn constant_of(&mut self, value: ValueId) -> Result<Option<Constant>> {
        self.constants.get(self.node.graph(), value)
    }

    /// Packs the constants at `slots` into `layout` (a name that says everything that the packed form depends
    /// on but the constants and their shapes, e.g. "panels f32"), or finds the form that another node has packed.
    /// The kernel then does not get these inputs when it runs. `pack` sees `None` for absent or
    /// non-constant inputs; a non-constant one is not taken away.
    pub fn pack<T: Any + Send + Sync>(
        &mut self,
        slots: &[usize],
        layout: &str,
        pack: impl FnOnce(&[Option<Constant>]) -> Result<T>,
    ) -> Result<Arc<T>> {
        let mut shapes = Vec::with_capacity(slots.len());
        for &slot in slots {
            shapes.push(self.constant(slot)?.map(|constant| constant.shape().to_vec()));
        }
        self.pack_bytes(slots, &format!("{layout} of {shapes:?}"), pack)
    }

    /// [`Self::pack`] where the constants' bytes alone matter, since `layout` says what shapes would: nodes that see them
    /// in other shapes then share the packed form.
    pub fn pack_bytes<T: Any + Send + Sync>(
        &mut self,
        slots: &[usize],
        layout: &str,
        pack: impl FnOnce(&[Option<Constant>]) -> Result<T>,
    ) -> Result<Arc<T>> {
        let mut constants = Vec::with_capacity(slots.len());
        for &slot in slots {
            let constant = self.constant(slot)?;
            if constant.is_some() {
                self.packed.push(slot);
            }
            constants.push(constant);
        }
        self.cache.get(&constants, layout, pack)
    }

    /// The slots that were packed, which the kernel does not get in its Runs.
    pub fn into_packed(self) -> Vec<usize> {
        self.packed
    }
}
