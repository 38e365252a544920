//! Graphs that no real ORT would pass, and some that it would.

use super::{OK, failure};
use abi::ort::sys::{OrtApi, OrtStatusPtr};
use std::ffi::{CString, c_char, c_void};

/// A type: an element code, and dimensions if the rank is known.
#[derive(Clone)]
pub struct MockType {
    pub code: i32,
    pub dims: Option<Vec<i64>>,
    names: Vec<CString>,
}

impl MockType {
    pub fn new(code: i32, dims: Option<&[i64]>) -> Self {
        let names = dims.unwrap_or_default().iter().map(|d| match d {
            -7 => c"seven".to_owned(),
            _ => CString::default(),
        });
        Self { code, dims: dims.map(Into::into), names: names.collect() }
    }
}

/// A value; as a constant it holds bytes, of a type that may differ from the declared one.
pub struct MockValue {
    name: CString,
    type_: Option<MockType>,
    pub constant: Option<(MockType, Vec<u8>)>,
    pub file: Option<(CString, i64, usize)>,
}

impl MockValue {
    pub fn new(name: &str, type_: Option<MockType>) -> Box<Self> {
        let name = CString::new(name).expect("no NUL");
        Box::new(Self { name, type_, constant: None, file: None })
    }

    /// A constant whose declaration is true.
    pub fn constant(name: &str, type_: MockType, bytes: &[u8]) -> Box<Self> {
        let mut value = Self::new(name, Some(type_.clone()));
        value.constant = Some((type_, bytes.into()));
        value
    }
}

/// A node, its values by address.
pub struct MockNode {
    name: CString,
    pub inputs: Vec<*const MockValue>,
    pub outputs: Vec<*const MockValue>,
    pub body: *const MockGraph,
}

impl MockNode {
    pub fn new(name: &str, inputs: &[*const MockValue], outputs: &[*const MockValue]) -> Box<Self> {
        let name = CString::new(name).expect("no NUL");
        Box::new(Self { name, inputs: inputs.into(), outputs: outputs.into(), body: std::ptr::null() })
    }
}

/// A graph.
#[derive(Default)]
pub struct MockGraph {
    pub inputs: Vec<*const MockValue>,
    pub outputs: Vec<*const MockValue>,
    pub initializers: Vec<*const MockValue>,
    pub nodes: Vec<*const MockNode>,
}

/// Counts and fills for one list.
macro_rules! list {
    ($count:ident, $fill:ident, $of:ty, $item:ty, $field:ident) => {
        unsafe extern "system" fn $count(of: *const $of, out: *mut usize) -> OrtStatusPtr {
            // SAFETY: the library passes a live object and an out pointer.
            unsafe { out.write((&(*of).$field).len()) };
            OK
        }
        unsafe extern "system" fn $fill(of: *const $of, out: *mut *const $item, len: usize) -> OrtStatusPtr {
            // SAFETY: as above, with room for `len`.
            unsafe {
                assert_eq!(len, (&(*of).$field).len());
                for (i, item) in (&(*of).$field).iter().enumerate() {
                    out.add(i).write(*item);
                }
            }
            OK
        }
    };
}
list!(graph_num_inputs, graph_inputs, MockGraph, MockValue, inputs);
list!(graph_num_outputs, graph_outputs, MockGraph, MockValue, outputs);
list!(graph_num_initializers, graph_initializers, MockGraph, MockValue, initializers);
list!(graph_num_nodes, graph_nodes, MockGraph, MockNode, nodes);
list!(node_num_inputs, node_inputs, MockNode, MockValue, inputs);
list!(node_num_outputs, node_outputs, MockNode, MockValue, outputs);

/// Fills the graph functions of a table.
pub(super) unsafe fn fill(api: *mut OrtApi) {
    macro_rules! set {
        ($($slot:ident = $f:path),* $(,)?) => {
            // SAFETY: as in `get_api`.
            unsafe { $((&raw mut (*api).$slot).cast::<*const c_void>().write($f as *const c_void);)* }
        };
    }
    set!(
        Graph_GetModelPath = null_string,
        Graph_GetParentNode = null_string,
        Graph_GetNumInputs = graph_num_inputs,
        Graph_GetInputs = graph_inputs,
        Graph_GetNumOutputs = graph_num_outputs,
        Graph_GetOutputs = graph_outputs,
        Graph_GetNumInitializers = graph_num_initializers,
        Graph_GetInitializers = graph_initializers,
        Graph_GetNumNodes = graph_num_nodes,
        Graph_GetNodes = graph_nodes,
        Node_GetName = node_name,
        Node_GetOperatorType = node_name,
        Node_GetDomain = node_domain,
        Node_GetSinceVersion = node_since,
        Node_GetNumInputs = node_num_inputs,
        Node_GetInputs = node_inputs,
        Node_GetNumOutputs = node_num_outputs,
        Node_GetOutputs = node_outputs,
        Node_GetNumImplicitInputs = zero,
        Node_GetNumAttributes = zero,
        Node_GetNumSubgraphs = node_num_bodies,
        Node_GetSubgraphs = node_bodies,
        GetValueInfoName = value_name,
        GetValueInfoTypeInfo = value_type,
        CastTypeInfoToTensorInfo = same_type,
        GetTensorElementType = type_code,
        TensorTypeAndShape_HasShape = type_has_shape,
        GetDimensionsCount = type_rank,
        GetDimensions = type_dims,
        GetSymbolicDimensions = type_names,
        ValueInfo_IsConstantInitializer = value_is_constant,
        ValueInfo_GetInitializerValue = value_tensor,
        ValueInfo_GetExternalInitializerInfo = value_file,
        ExternalInitializerInfo_GetFilePath = file_path,
        ExternalInitializerInfo_GetFileOffset = file_offset,
        ExternalInitializerInfo_GetByteSize = file_size,
        ReleaseExternalInitializerInfo = release_file,
        IsTensor = is_tensor,
        GetTensorElementTypeAndShapeDataReference = tensor_type,
        GetTensorSizeInBytes = tensor_size,
        GetTensorData = tensor_data,
    );
}

// SAFETY of all functions below: the library passes live objects and out pointers.

unsafe extern "system" fn null_string(_of: *const c_void, out: *mut *const c_void) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write(std::ptr::null()) };
    OK
}

unsafe extern "system" fn zero(_node: *const MockNode, out: *mut usize) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write(0) };
    OK
}

unsafe extern "system" fn node_name(node: *const MockNode, out: *mut *const c_char) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write((*node).name.as_ptr()) };
    OK
}

unsafe extern "system" fn node_domain(_node: *const MockNode, out: *mut *const c_char) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write(c"ai.onnx".as_ptr()) };
    OK
}

unsafe extern "system" fn node_since(_node: *const MockNode, out: *mut i32) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write(-1) };
    OK
}

unsafe extern "system" fn node_num_bodies(node: *const MockNode, out: *mut usize) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write(usize::from(!(*node).body.is_null())) };
    OK
}

unsafe extern "system" fn node_bodies(
    node: *const MockNode,
    graphs: *mut *const MockGraph,
    _count: usize,
    names: *mut *const c_char,
) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe {
        graphs.write((*node).body);
        names.write(c"body".as_ptr());
    }
    OK
}

unsafe extern "system" fn value_name(value: *const MockValue, out: *mut *const c_char) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write((*value).name.as_ptr()) };
    OK
}

unsafe extern "system" fn value_type(value: *const MockValue, out: *mut *const MockType) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write((&*value).type_.as_ref().map_or(std::ptr::null(), |t| t)) };
    OK
}

unsafe extern "system" fn same_type(type_: *const MockType, out: *mut *const MockType) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write(type_) };
    OK
}

unsafe extern "system" fn type_code(type_: *const MockType, out: *mut i32) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write((*type_).code) };
    OK
}

unsafe extern "system" fn type_has_shape(type_: *const MockType) -> bool {
    // SAFETY: see above.
    unsafe { &*type_ }.dims.is_some()
}

unsafe extern "system" fn type_rank(type_: *const MockType, out: *mut usize) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write((*type_).names.len()) };
    OK
}

unsafe extern "system" fn type_dims(type_: *const MockType, out: *mut i64, _len: usize) -> OrtStatusPtr {
    // SAFETY: see above.
    let dims = unsafe { &*type_ }.dims.as_deref().unwrap_or_default();
    // SAFETY: see above.
    dims.iter().enumerate().for_each(|(i, &d)| unsafe { out.add(i).write(d) });
    OK
}

unsafe extern "system" fn type_names(type_: *const MockType, out: *mut *const c_char, _len: usize) -> OrtStatusPtr {
    // SAFETY: see above.
    let names = unsafe { &(*type_).names };
    // SAFETY: see above.
    names.iter().enumerate().for_each(|(i, name)| unsafe { out.add(i).write(name.as_ptr()) });
    OK
}

unsafe extern "system" fn value_is_constant(value: *const MockValue, out: *mut bool) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write((*value).constant.is_some()) };
    OK
}

/// The value itself stands for its tensor.
unsafe extern "system" fn value_tensor(value: *const MockValue, out: *mut *const MockValue) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write(value) };
    OK
}

type File = (CString, i64, usize);

unsafe extern "system" fn value_file(value: *const MockValue, out: *mut *const File) -> OrtStatusPtr {
    // SAFETY: see above.
    let file = unsafe { &*value }.file.clone();
    // SAFETY: see above.
    unsafe { out.write(file.map_or(std::ptr::null(), |file| super::give(file))) };
    OK
}

unsafe extern "system" fn file_path(file: *const File) -> *const c_char {
    // SAFETY: see above.
    unsafe { &*file }.0.as_ptr()
}

unsafe extern "system" fn file_offset(file: *const File) -> i64 {
    // SAFETY: see above.
    unsafe { &*file }.1
}

unsafe extern "system" fn file_size(file: *const File) -> usize {
    // SAFETY: see above.
    unsafe { &*file }.2
}

unsafe extern "system" fn release_file(file: *mut File) {
    // SAFETY: from `value_file`.
    unsafe { super::take(file) }
}

unsafe extern "system" fn is_tensor(_value: *const MockValue, out: *mut i32) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write(1) };
    OK
}

unsafe extern "system" fn tensor_type(
    value: *const MockValue,
    code: *mut i32,
    dims: *mut *const i64,
    rank: *mut usize,
) -> OrtStatusPtr {
    // SAFETY: see above.
    let Some((type_, _)) = &unsafe { &*value }.constant else {
        return failure("no tensor");
    };
    let shape = type_.dims.as_deref().unwrap_or_default();
    // SAFETY: see above.
    unsafe {
        code.write(type_.code);
        dims.write(shape.as_ptr());
        rank.write(shape.len());
    }
    OK
}

unsafe extern "system" fn tensor_size(value: *const MockValue, out: *mut usize) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write((&*value).constant.as_ref().map_or(0, |c| c.1.len())) };
    OK
}

unsafe extern "system" fn tensor_data(value: *const MockValue, out: *mut *const u8) -> OrtStatusPtr {
    // SAFETY: see above.
    unsafe { out.write((&*value).constant.as_ref().map_or(std::ptr::null(), |c| c.1.as_ptr())) };
    OK
}
