//! An `OrtGraph` as a [`Graph`].

use super::attrs::read_attrs;
use super::context::type_and_shape;
use super::status::{ort, slice_from, string_from};
use super::{Api, sys};
use crate::error::{Error, Result};
use crate::graph::{Dim, Graph, Initializer, InitializerData, Node, Value, ValueId};
use crate::tensor::{DType, HostTensor};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How much of the constants to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Small ones whole, since claims look at shapes and axes; of the others the type and shape.
    Claim,
    /// Inline ones whole; of external ones the place in their file.
    Compile,
}

/// The largest constant, in bytes, that [`Depth::Claim`] reads.
const CLAIM_BYTES: usize = 64 << 10;

/// Bodies nested deeper than this are refused, so that a hostile model cannot exhaust the stack.
const MAX_NESTING: usize = 32;

/// Reads a graph, its nodes in topological order.
///
/// # Errors
/// When an ORT call fails or the graph contradicts itself.
///
/// # Safety
/// `graph` is live for the call. The result's node handles are only good as long as `graph` is.
pub(crate) unsafe fn read_graph(api: Api, graph: *const sys::OrtGraph, depth: Depth) -> Result<Graph> {
    // SAFETY: the caller vouches for `graph`.
    unsafe { Reader::read(api, graph, depth, 0) }
}

/// The names of a node's inputs and outputs; empty where one is absent.
///
/// # Safety
/// `node` is live for the call.
pub(crate) unsafe fn value_names(api: Api, node: *const sys::OrtNode) -> Result<(Vec<String>, Vec<String>)> {
    // SAFETY: the caller vouches for `node`.
    unsafe {
        let names = |infos: Vec<_>| infos.into_iter().map(|info| value_name(api, info)).collect();
        let inputs: Result<_> = names(list!(api, node, Node_GetNumInputs, Node_GetInputs));
        let outputs: Result<_> = names(list!(api, node, Node_GetNumOutputs, Node_GetOutputs));
        Ok((inputs?, outputs?))
    }
}

/// ORT's "count, then fill" pairs: a `Vec` of pointers. Needs an `unsafe` block around it.
macro_rules! list {
    ($api:expr, $of:expr, $count:ident, $fill:ident) => {{
        let mut len = 0usize;
        ort!($api, $count($of, &raw mut len))?;
        let mut items = vec![std::ptr::null(); len];
        if len > 0 {
            ort!($api, $fill($of, items.as_mut_ptr(), len))?;
        }
        items
    }};
}
pub(crate) use list;

/// A tensor's element type and shape, as far as known.
type TensorType = (Option<DType>, Option<Vec<Dim>>);

/// A graph while it is read.
pub(super) struct Reader {
    pub(super) api: Api,
    pub(super) depth: Depth,
    pub(super) nesting: usize,
    graph: Graph,
    ids: HashMap<String, ValueId>,
    /// One `Arc` a dimension name.
    symbols: HashMap<String, Arc<str>>,
    /// The model file's folder.
    folder: PathBuf,
}

impl Reader {
    /// # Safety
    /// `graph` is live for the call.
    pub(super) unsafe fn read(api: Api, graph: *const sys::OrtGraph, depth: Depth, nesting: usize) -> Result<Graph> {
        if nesting > MAX_NESTING {
            let problem = format!("control flow is nested deeper than {MAX_NESTING} levels");
            return Err(Error::Model { place: "graph".into(), problem });
        }
        let mut path = std::ptr::null();
        let mut parent = std::ptr::null();
        // SAFETY: the caller vouches for `graph`; everything it returns lives as long.
        unsafe {
            ort!(api, Graph_GetModelPath(graph, &raw mut path))?;
            ort!(api, Graph_GetParentNode(graph, &raw mut parent))?;
            let path = string_from(path);
            let model_path = (!path.is_empty()).then(|| PathBuf::from(path));
            let folder = model_path.as_deref().and_then(Path::parent).unwrap_or(Path::new("")).to_owned();
            let mut reader = Self {
                api,
                depth,
                nesting,
                graph: Graph { model_path, is_body: !parent.is_null(), ..Default::default() },
                ids: HashMap::new(),
                symbols: HashMap::new(),
                folder,
            };
            // Initializers first, so that values know their constants whichever list names them next.
            for info in list!(api, graph, Graph_GetNumInitializers, Graph_GetInitializers) {
                reader.value(info)?;
            }
            for info in list!(api, graph, Graph_GetNumInputs, Graph_GetInputs) {
                if let Some(id) = reader.value(info)?
                    && reader.graph.values[id].initializer.is_none()
                {
                    reader.graph.inputs.push(id);
                }
            }
            for node in list!(api, graph, Graph_GetNumNodes, Graph_GetNodes) {
                let node = reader.node(node)?;
                reader.graph.nodes.push(node);
            }
            for info in list!(api, graph, Graph_GetNumOutputs, Graph_GetOutputs) {
                let id = reader.value(info)?;
                let id = id.ok_or_else(|| Error::Internal("a graph output has no name".into()))?;
                reader.graph.outputs.push(id);
            }
            sort(reader.graph).map(Graph::without_unread_outputs)
        }
    }

    /// The id of a value, read when it is met first; `None` for an absent one.
    ///
    /// # Safety
    /// `info` is null or a live value info of this graph.
    unsafe fn value(&mut self, info: *const sys::OrtValueInfo) -> Result<Option<ValueId>> {
        // SAFETY: the caller vouches for `info`.
        let name = unsafe { value_name(self.api, info) }?;
        if name.is_empty() {
            return Ok(None);
        }
        if let Some(&id) = self.ids.get(&name) {
            return Ok(Some(id));
        }
        // SAFETY: as above, and not null, since it has a name.
        let (type_, initializer) = unsafe {
            let type_ = self.tensor_type(info)?;
            let mut constant = false;
            ort!(self.api, ValueInfo_IsConstantInitializer(info, &raw mut constant))?;
            let initializer = if constant { Some(self.initializer(info, &name, &type_)?) } else { None };
            (type_, initializer)
        };
        let (dtype, shape) = type_.map_or((None, None), |(dtype, shape)| (dtype, shape));
        let id = self.graph.values.len();
        self.graph.values.push(Value { name: name.clone(), dtype, shape, initializer });
        self.ids.insert(name, id);
        Ok(Some(id))
    }

    /// The element type and shape, as far as known; `None` for what is no tensor.
    ///
    /// # Safety
    /// `info` is a live value info.
    unsafe fn tensor_type(&mut self, info: *const sys::OrtValueInfo) -> Result<Option<TensorType>> {
        let api = self.api;
        let mut type_info = std::ptr::null();
        let mut tensor = std::ptr::null();
        // SAFETY: the caller vouches for `info`, which owns the type infos.
        unsafe {
            ort!(api, GetValueInfoTypeInfo(info, &raw mut type_info))?;
            if type_info.is_null() {
                return Ok(None);
            }
            ort!(api, CastTypeInfoToTensorInfo(type_info, &raw mut tensor))?;
            if tensor.is_null() {
                return Ok(None);
            }
            // An integer, since a newer runtime may know more types than the enum.
            let mut code = 0i32;
            ort!(api, GetTensorElementType(tensor, (&raw mut code).cast()))?;
            let dtype = DType::from_ort(code);
            if !((*api.ort()).TensorTypeAndShape_HasShape)(tensor) {
                return Ok(Some((dtype, None)));
            }
            let mut rank = 0usize;
            ort!(api, GetDimensionsCount(tensor, &raw mut rank))?;
            let (mut sizes, mut names) = (vec![-1i64; rank], vec![std::ptr::null(); rank]);
            if rank > 0 {
                ort!(api, GetDimensions(tensor, sizes.as_mut_ptr(), rank))?;
                ort!(api, GetSymbolicDimensions(tensor, names.as_mut_ptr(), rank))?;
            }
            let dims = sizes.iter().zip(&names);
            let dims = dims.map(|(&size, &name)| match usize::try_from(size) {
                Ok(size) => Dim::Known(size),
                Err(_) => self.symbol(string_from(name)),
            });
            Ok(Some((dtype, Some(dims.collect()))))
        }
    }

    fn symbol(&mut self, name: String) -> Dim {
        if name.is_empty() {
            return Dim::Unknown;
        }
        let shared = self.symbols.entry(name).or_insert_with_key(|name| name.as_str().into());
        Dim::Symbol(shared.clone())
    }

    /// # Safety
    /// `info` is a live value info of a constant initializer.
    unsafe fn initializer(
        &self,
        info: *const sys::OrtValueInfo,
        name: &str,
        type_: &Option<TensorType>,
    ) -> Result<Initializer> {
        let bad = |problem: String| Error::Model { place: format!("initializer '{name}'"), problem };
        let Some((Some(dtype), Some(dims))) = type_ else {
            return Err(bad("is no tensor of a known type and shape".into()));
        };
        let shape: Option<Vec<usize>> = dims.iter().map(Dim::known).collect();
        let shape = shape.ok_or_else(|| bad(format!("has the shape {dims:?}")))?;
        let dtype = *dtype;
        let make = |data| Initializer { dtype, shape: shape.clone(), data };
        if dtype == DType::String {
            return Ok(make(InitializerData::Unread));
        }
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let len = elements.and_then(|n| dtype.bytes(n)).ok_or_else(|| bad(format!("has the shape {shape:?}")))?;
        if self.depth == Depth::Claim && len > CLAIM_BYTES {
            return Ok(make(InitializerData::Unread));
        }
        let file = match self.depth {
            // SAFETY: the caller vouches for `info`.
            Depth::Compile => unsafe { self.external(info) }?,
            Depth::Claim => None,
        };
        if let Some((path, offset, size)) = file {
            if size != len {
                let problem = format!("takes {size} bytes in its file, {len} by its shape {shape:?} of {dtype}");
                return Err(bad(problem));
            }
            let offset = u64::try_from(offset).map_err(|_| bad(format!("has the file offset {offset}")))?;
            return Ok(make(InitializerData::External { path, offset, len }));
        }
        let mut value = std::ptr::null();
        // SAFETY: as above; the value belongs to the graph.
        let tensor = unsafe {
            ort!(self.api, ValueInfo_GetInitializerValue(info, &raw mut value))?;
            if value.is_null() { None } else { read_tensor(self.api, value)? }
        };
        let tensor = tensor.ok_or_else(|| bad("has no value".into()))?;
        if tensor.dtype() != dtype || tensor.shape() != shape {
            return Err(bad(format!("is {tensor:?}, but declared as {dtype}{shape:?}")));
        }
        Ok(make(InitializerData::Inline(tensor)))
    }

    /// Where in which file an external initializer is; `None` for an inline one.
    ///
    /// # Safety
    /// `info` is a live value info of an initializer.
    unsafe fn external(&self, info: *const sys::OrtValueInfo) -> Result<Option<(PathBuf, i64, usize)>> {
        let api = self.api;
        let mut file = std::ptr::null_mut();
        // SAFETY: the caller vouches for `info`; the file info is ours to release.
        unsafe {
            ort!(api, ValueInfo_GetExternalInitializerInfo(info, &raw mut file))?;
            if file.is_null() {
                return Ok(None);
            }
            let path = string_from(((*api.ort()).ExternalInitializerInfo_GetFilePath)(file));
            let offset = ((*api.ort()).ExternalInitializerInfo_GetFileOffset)(file);
            let size = ((*api.ort()).ExternalInitializerInfo_GetByteSize)(file);
            ((*api.ort()).ReleaseExternalInitializerInfo)(file);
            Ok(Some((self.folder.join(path), offset, size)))
        }
    }

    /// # Safety
    /// `node` is live for the call.
    unsafe fn node(&mut self, node: *const sys::OrtNode) -> Result<Node> {
        let api = self.api;
        let (mut name, mut op_type, mut domain) = (std::ptr::null(), std::ptr::null(), std::ptr::null());
        let mut since = 0i32;
        // SAFETY: the caller vouches for `node`, which owns everything it returns.
        unsafe {
            ort!(api, Node_GetName(node, &raw mut name))?;
            ort!(api, Node_GetOperatorType(node, &raw mut op_type))?;
            ort!(api, Node_GetDomain(node, &raw mut domain))?;
            ort!(api, Node_GetSinceVersion(node, &raw mut since))?;
            let mut ids =
                |infos: Vec<_>| -> Result<Vec<_>> { infos.into_iter().map(|info| self.value(info)).collect() };
            let inputs = ids(list!(api, node, Node_GetNumInputs, Node_GetInputs))?;
            let outputs = ids(list!(api, node, Node_GetNumOutputs, Node_GetOutputs))?;
            let implicit = ids(list!(api, node, Node_GetNumImplicitInputs, Node_GetImplicitInputs))?;
            let domain = string_from(domain);
            Ok(Node {
                name: string_from(name),
                domain: if domain == "ai.onnx" { String::new() } else { domain },
                op_type: string_from(op_type),
                // A function that is still to be inlined may have none.
                since_version: u32::try_from(since).unwrap_or(0),
                inputs,
                outputs,
                attrs: read_attrs(self, node)?,
                implicit_inputs: implicit.into_iter().flatten().collect(),
                handle: node.addr(),
            })
        }
    }
}

/// # Safety
/// `info` is null or a live value info.
unsafe fn value_name(api: Api, info: *const sys::OrtValueInfo) -> Result<String> {
    if info.is_null() {
        return Ok(String::new());
    }
    let mut name = std::ptr::null();
    // SAFETY: the caller vouches for `info`, which owns its name.
    unsafe {
        ort!(api, GetValueInfoName(info, &raw mut name))?;
        Ok(string_from(name))
    }
}

/// A copy of a tensor in host memory; `None` for strings and for what is no tensor.
///
/// # Safety
/// `value` is live for the call.
pub(super) unsafe fn read_tensor(api: Api, value: *const sys::OrtValue) -> Result<Option<HostTensor>> {
    let mut is_tensor = 0i32;
    let mut size = 0usize;
    let mut data = std::ptr::null();
    // SAFETY: the caller vouches for `value`, which owns its data.
    unsafe {
        ort!(api, IsTensor(value, &raw mut is_tensor))?;
        if is_tensor == 0 {
            return Ok(None);
        }
        let (dtype, shape) = type_and_shape(api, value)?;
        if dtype == DType::String {
            return Ok(None);
        }
        ort!(api, GetTensorSizeInBytes(value, &raw mut size))?;
        ort!(api, GetTensorData(value, &raw mut data))?;
        let tensor = HostTensor::from_bytes(dtype, shape, slice_from(data.cast(), size));
        let bad = || Error::Internal(format!("a {dtype}{shape:?} tensor takes {size} bytes"));
        tensor.map(Some).ok_or_else(bad)
    }
}

/// Brings nodes into topological order, keeping ORT's order where that is one.
fn sort(mut graph: Graph) -> Result<Graph> {
    let mut producer = vec![None; graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        for &id in node.outputs.iter().flatten() {
            if producer[id].replace(i).is_some() {
                let place = format!("value '{}'", graph.values[id].name);
                return Err(Error::Model { place, problem: "has two producers".into() });
            }
        }
    }
    let sources = |i: usize| {
        let node: &Node = &graph.nodes[i];
        let ids = node.inputs.iter().flatten().chain(&node.implicit_inputs);
        ids.filter_map(|&id| producer[id])
    };
    if (0..graph.nodes.len()).all(|i| sources(i).all(|source| source < i)) {
        return Ok(graph);
    }
    let mut waiting: Vec<usize> = (0..graph.nodes.len()).map(|i| sources(i).count()).collect();
    let mut users = vec![Vec::new(); graph.nodes.len()];
    for i in 0..graph.nodes.len() {
        sources(i).for_each(|source| users[source].push(i));
    }
    let mut ready: std::collections::BTreeSet<usize> = (0..graph.nodes.len()).filter(|&i| waiting[i] == 0).collect();
    let mut order = Vec::with_capacity(graph.nodes.len());
    while let Some(i) = ready.pop_first() {
        order.push(i);
        for &user in &users[i] {
            waiting[user] -= 1;
            if waiting[user] == 0 {
                ready.insert(user);
            }
        }
    }
    if order.len() < graph.nodes.len() {
        return Err(Error::Model { place: "graph".into(), problem: "its nodes form a cycle".into() });
    }
    let mut nodes: Vec<_> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
    graph.nodes = order.iter().map(|&i| nodes[i].take().expect("the order names each node once")).collect();
    Ok(graph)
}
