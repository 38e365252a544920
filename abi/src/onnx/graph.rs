//! Decoded messages -> [`Graph`].

use super::proto::{AttributeProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto, kind};
use super::{Model, canonical, model_error, schema, tensor};
use crate::tensor::{DType, HostTensor};
use crate::{Attr, Dim, Graph, Initializer, InitializerData, Node, Result, Value, ValueId};
use prost::bytes::Bytes;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// The main graph of `model`.
pub fn build(model: &Model) -> Result<Graph> {
    let mut builder = Builder::new(model, None);
    let calls: Vec<_> = model.nodes.iter().map(|c| (&c.node, c.opset)).collect();
    builder.define(&model.graph, &calls)?;
    builder.connect(&model.graph, &calls)?;
    builder.graph.model_path = model.path.clone();
    Ok(builder.graph.without_unread_outputs())
}

/// Makes one graph; `outer` makes the one around it, whose values are all defined by then.
struct Builder<'a> {
    model: &'a Model,
    outer: Option<&'a Builder<'a>>,
    graph: Graph,
    names: HashMap<String, ValueId>,
    /// In a body: values of the enclosing graphs that it reads, in order of first use.
    captured: Vec<String>,
    /// Per node: whether it became an initializer.
    folded: Vec<bool>,
}

impl<'a> Builder<'a> {
    fn new(model: &'a Model, outer: Option<&'a Builder<'a>>) -> Self {
        let graph = Graph { is_body: outer.is_some(), ..Graph::default() };
        Self { model, outer, graph, names: HashMap::new(), captured: Vec::new(), folded: Vec::new() }
    }

    /// Numbers every value that the graph itself defines.
    fn define(&mut self, proto: &GraphProto, calls: &[(&'a NodeProto, usize)]) -> Result<()> {
        for tensor in &proto.initializer {
            let place = format!("initializer '{}'", tensor.name);
            let initializer = tensor::initializer(tensor, place, self.model.folder())?;
            self.define_initializer(&tensor.name, initializer)?;
        }
        for sparse in &proto.sparse_initializer {
            let name = sparse.values.as_ref().map_or("", |v| v.name.as_str());
            let initializer = sparse_initializer(sparse, format!("sparse initializer '{name}'"))?;
            self.define_initializer(name, initializer)?;
        }
        for input in &proto.input {
            self.define_input(input)?;
        }
        for &(node, _) in calls {
            let constant = constant(node, self.model)?;
            self.folded.push(constant.is_some());
            match constant {
                Some(initializer) => self.define_initializer(&node.output[0], initializer)?,
                None => {
                    for name in node.output.iter().filter(|n| !n.is_empty()) {
                        self.add_value(name)?;
                    }
                }
            }
        }
        for info in proto.value_info.iter().chain(&proto.output) {
            if let Some(&id) = self.names.get(&info.name) {
                self.state_type(id, info);
            }
        }
        Ok(())
    }

    fn add_value(&mut self, name: &str) -> Result<ValueId> {
        let id = self.graph.values.len();
        if self.names.insert(name.to_owned(), id).is_some() {
            return Err(model_error(&format!("value '{name}'"), "is defined twice"));
        }
        self.graph.values.push(Value { name: name.to_owned(), dtype: None, shape: None, initializer: None });
        Ok(id)
    }

    fn define_initializer(&mut self, name: &str, initializer: Initializer) -> Result<()> {
        if name.is_empty() {
            return Err(model_error("initializer", "has no name"));
        }
        let id = self.add_value(name)?;
        let value = &mut self.graph.values[id];
        value.dtype = Some(initializer.dtype);
        value.shape = Some(initializer.shape.iter().map(|&d| d.into()).collect());
        value.initializer = Some(initializer);
        Ok(())
    }

    /// A graph input. One that an initializer defines too is that constant before IR version 4, and since then
    /// an input with a default, which is no constant.
    fn define_input(&mut self, input: &ValueInfoProto) -> Result<()> {
        if let Some(&id) = self.names.get(&input.name) {
            let value = &mut self.graph.values[id];
            if value.initializer.is_none() {
                return Err(model_error(&format!("input '{}'", input.name), "is listed twice"));
            }
            if self.model.ir_version >= 4 {
                value.initializer = None;
                self.graph.inputs.push(id);
            }
            return Ok(());
        }
        if input.name.is_empty() {
            return Err(model_error("graph input", "has no name"));
        }
        let id = self.add_value(&input.name)?;
        self.state_type(id, input);
        self.graph.inputs.push(id);
        Ok(())
    }

    /// Gives the value the type and shape that the model states, unless it has them.
    fn state_type(&mut self, id: ValueId, info: &ValueInfoProto) {
        let value = &mut self.graph.values[id];
        let Some(stated) = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref()) else { return };
        value.dtype = value.dtype.or_else(|| DType::from_onnx(stated.elem_type));
        if value.shape.is_none() {
            let dim = |d: &super::proto::DimensionProto| match (d.dim_value, &d.dim_param) {
                (Some(n), _) => usize::try_from(n).map_or(Dim::Unknown, Dim::Known),
                (None, Some(name)) if !name.is_empty() => Dim::Symbol(name.as_str().into()),
                _ => Dim::Unknown,
            };
            let shape = stated.shape.as_ref();
            value.shape = shape.map(|s| s.dim.iter().map(dim).collect());
        }
    }

    /// Makes the nodes, in topological order, and the outputs.
    fn connect(&mut self, proto: &GraphProto, calls: &[(&'a NodeProto, usize)]) -> Result<()> {
        let mut nodes = Vec::with_capacity(calls.len());
        for (handle, &(node, opset)) in calls.iter().enumerate() {
            if !self.folded[handle] {
                nodes.push(self.node(node, opset, handle)?);
            }
        }
        self.graph.nodes = sorted(nodes, self.graph.values.len())?;
        for output in &proto.output {
            let id = self.value(&output.name, || format!("graph output '{}'", output.name))?;
            self.graph.outputs.push(id);
        }
        Ok(())
    }

    /// The value of that name, defined here or captured from an enclosing graph.
    fn value(&mut self, name: &str, place: impl Fn() -> String) -> Result<ValueId> {
        if let Some(&id) = self.names.get(name) {
            return Ok(id);
        }
        let Some(outer) = self.outer.and_then(|o| o.find(name)) else {
            return Err(model_error(&place(), format!("reads '{name}', which nothing defines")));
        };
        let (dtype, shape) = (outer.dtype, outer.shape.clone());
        let initializer = outer.initializer.clone();
        let id = self.add_value(name)?;
        self.graph.values[id] = Value { name: name.to_owned(), dtype, shape, initializer };
        self.captured.push(name.to_owned());
        Ok(id)
    }

    /// The value of that name here or further out.
    fn find(&self, name: &str) -> Option<&Value> {
        match self.names.get(name) {
            Some(&id) => Some(&self.graph.values[id]),
            None => self.outer?.find(name),
        }
    }

    fn node(&mut self, proto: &'a NodeProto, opset: usize, handle: usize) -> Result<Node> {
        let domain = canonical(&proto.domain);
        let mut inputs = Vec::with_capacity(proto.input.len());
        for name in &proto.input {
            inputs.push(match name.is_empty() {
                true => None,
                false => Some(self.value(name, || place(proto))?),
            });
        }
        let outputs = proto.output.iter().map(|name| self.names.get(name).copied());
        let outputs = outputs.collect();
        let mut attrs = Vec::with_capacity(proto.attribute.len());
        let mut captured = Vec::new();
        for attribute in &proto.attribute {
            let value = self.attribute(proto, attribute, opset, &mut captured)?;
            attrs.push((attribute.name.clone(), value));
        }
        let mut implicit_inputs = Vec::new();
        for name in captured {
            let id = self.value(&name, || place(proto))?;
            if !implicit_inputs.contains(&id) {
                implicit_inputs.push(id);
            }
        }
        Ok(Node {
            name: proto.name.clone(),
            domain: domain.to_owned(),
            op_type: proto.op_type.clone(),
            since_version: self.since_version(proto, opset)?,
            inputs,
            outputs,
            attrs,
            implicit_inputs,
            handle,
        })
    }

    fn since_version(&self, proto: &NodeProto, opset: usize) -> Result<u32> {
        let domain = canonical(&proto.domain);
        if let Some(function) = self.model.function(proto) {
            let own = function.opset_import.iter().find(|i| canonical(&i.domain) == domain);
            return Ok(own.and_then(|i| i.version.try_into().ok()).unwrap_or(1));
        }
        let imported = self.model.opsets[opset].get(domain).copied();
        match imported {
            Some(version) => Ok(schema::since_version(domain, &proto.op_type, version)),
            // ORT adds the newest version of every other domain that it knows.
            None if !domain.is_empty() => Ok(1),
            None => Err(model_error(&place(proto), "no opset of domain 'ai.onnx' is imported")),
        }
    }

    fn attribute(
        &self,
        node: &NodeProto,
        proto: &'a AttributeProto,
        opset: usize,
        captured: &mut Vec<String>,
    ) -> Result<Attr> {
        let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).ok();
        let place = || format!("{}, attribute '{}'", place(node), proto.name);
        let missing = || model_error(&place(), "lacks the value that its type promises");
        Ok(match attribute_kind(proto) {
            kind::FLOAT => Attr::Float(proto.f.unwrap_or(0.0)),
            kind::INT => Attr::Int(proto.i.unwrap_or(0)),
            kind::STRING => match text(proto.s.as_ref().unwrap_or(&Bytes::new())) {
                Some(s) => Attr::String(s),
                None => Attr::Other,
            },
            kind::FLOATS => Attr::Floats(proto.floats.clone()),
            kind::INTS => Attr::Ints(proto.ints.clone()),
            kind::STRINGS => match proto.strings.iter().map(text).collect() {
                Some(s) => Attr::Strings(s),
                None => Attr::Other,
            },
            kind::TENSOR => match tensor::attribute(proto.t.as_ref().ok_or_else(missing)?, place())? {
                Some(tensor) => Attr::Tensor(tensor),
                None => Attr::Other,
            },
            kind::GRAPH => {
                let body = proto.g.as_ref().ok_or_else(missing)?;
                let calls: Vec<_> = body.node.iter().map(|n| (n, opset)).collect();
                let mut inner = Builder::new(self.model, Some(self));
                inner.define(body, &calls)?;
                inner.connect(body, &calls)?;
                captured.append(&mut inner.captured);
                Attr::Graph(Box::new(inner.graph))
            }
            _ => Attr::Other,
        })
    }
}

/// The kind that the attribute states or, in files older than the field, the one whose field is set.
fn attribute_kind(proto: &AttributeProto) -> i32 {
    if proto.kind != kind::UNDEFINED {
        return proto.kind;
    }
    let fields = [
        (proto.f.is_some(), kind::FLOAT),
        (proto.i.is_some(), kind::INT),
        (proto.s.is_some(), kind::STRING),
        (proto.t.is_some(), kind::TENSOR),
        (proto.g.is_some(), kind::GRAPH),
        (!proto.floats.is_empty(), kind::FLOATS),
        (!proto.ints.is_empty(), kind::INTS),
        (!proto.strings.is_empty(), kind::STRINGS),
    ];
    let set = fields.into_iter().find(|&(is_set, _)| is_set);
    set.map_or(kind::UNDEFINED, |(_, kind)| kind)
}

/// What a Constant node holds; `None` for other nodes. ORT makes initializers of them while it loads a model.
fn constant(node: &NodeProto, model: &Model) -> Result<Option<Initializer>> {
    let is_constant = node.op_type == "Constant" && canonical(&node.domain).is_empty();
    if !is_constant || model.function(node).is_some() {
        return Ok(None);
    }
    let [attribute] = &node.attribute[..] else {
        return Err(model_error(&place(node), "must have exactly one attribute"));
    };
    if node.output.len() != 1 || node.output[0].is_empty() {
        return Err(model_error(&place(node), "must have exactly one output"));
    }
    let place = place(node);
    let missing = || model_error(&place, format!("attribute '{}' holds no value", attribute.name));
    let inline = |tensor: HostTensor| Initializer {
        dtype: tensor.dtype(),
        shape: tensor.shape().to_vec(),
        data: InitializerData::Inline(tensor),
    };
    let strings = |shape: Vec<usize>| Initializer { dtype: DType::String, shape, data: InitializerData::Unread };
    Ok(Some(match attribute.name.as_str() {
        "value" => tensor::initializer(attribute.t.as_ref().ok_or_else(missing)?, place.clone(), model.folder())?,
        "sparse_value" => sparse_initializer(attribute.sparse_tensor.as_ref().ok_or_else(missing)?, place.clone())?,
        "value_float" => inline(HostTensor::new(&[], &[attribute.f.ok_or_else(missing)?])),
        "value_int" => inline(HostTensor::new(&[], &[attribute.i.ok_or_else(missing)?])),
        "value_floats" => inline(HostTensor::new(&[attribute.floats.len()], &attribute.floats)),
        "value_ints" => inline(HostTensor::new(&[attribute.ints.len()], &attribute.ints)),
        "value_string" => strings(vec![]),
        "value_strings" => strings(vec![attribute.strings.len()]),
        other => {
            return Err(model_error(&place, format!("has an unknown attribute '{other}'")));
        }
    }))
}

/// The dense type and shape of a sparse tensor; its contents are not read.
fn sparse_initializer(sparse: &SparseTensorProto, place: String) -> Result<Initializer> {
    let Some(values) = &sparse.values else {
        return Err(model_error(&place, "holds no values"));
    };
    let header = TensorProto { dims: sparse.dims.clone(), data_type: values.data_type, ..TensorProto::default() };
    tensor::unread(&header, place)
}

/// Nodes in topological order, by their place in the file where several orders are right.
fn sorted(nodes: Vec<Node>, values: usize) -> Result<Vec<Node>> {
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); values];
    let mut produced = vec![false; values];
    for node in &nodes {
        node.outputs.iter().flatten().for_each(|&v| produced[v] = true);
    }
    let mut waiting = vec![0usize; nodes.len()];
    for (index, node) in nodes.iter().enumerate() {
        for &value in node.inputs.iter().flatten().chain(&node.implicit_inputs) {
            if produced[value] {
                readers[value].push(index);
                waiting[index] += 1;
            }
        }
    }
    let ready = (0..nodes.len()).filter(|&i| waiting[i] == 0).map(Reverse);
    let mut ready: BinaryHeap<_> = ready.collect();
    let mut slots: Vec<Option<Node>> = nodes.into_iter().map(Some).collect();
    let mut order = Vec::with_capacity(slots.len());
    while let Some(Reverse(index)) = ready.pop() {
        let node = slots[index].take().expect("a node becomes ready once");
        for &value in node.outputs.iter().flatten() {
            for &reader in &readers[value] {
                waiting[reader] -= 1;
                if waiting[reader] == 0 {
                    ready.push(Reverse(reader));
                }
            }
        }
        order.push(node);
    }
    match slots.into_iter().flatten().next() {
        None => Ok(order),
        Some(node) => Err(model_error(&format!("node '{}' ({})", node.name, node.op()), "stands in a cycle")),
    }
}

/// How messages name a node.
pub fn place(node: &NodeProto) -> String {
    let domain = match canonical(&node.domain) {
        "" => "ai.onnx",
        other => other,
    };
    format!("node '{}' ({domain}::{})", node.name, node.op_type)
}
