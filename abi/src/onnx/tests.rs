//! The reader on models built here: what it must read, and damage that it must name.

use super::Model;
use super::proto::*;
use crate::tensor::DType;
use crate::{Attr, Dim, Error, Graph, InitializerData, Node};
use proptest::prelude::*;
use prost::Message;
use prost::bytes::Bytes;
use std::collections::HashSet;

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|&n| n.to_owned()).collect()
}

fn node(op_type: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        name: format!("n_{}", outputs.first().unwrap_or(&"")),
        op_type: op_type.into(),
        input: strings(inputs),
        output: strings(outputs),
        ..NodeProto::default()
    }
}

fn int_attribute(name: &str, value: i64) -> AttributeProto {
    AttributeProto { name: name.into(), kind: kind::INT, i: Some(value), ..AttributeProto::default() }
}

fn reference(name: &str, of: &str) -> AttributeProto {
    AttributeProto { name: name.into(), kind: kind::INT, ref_attr_name: of.into(), ..AttributeProto::default() }
}

fn floats(name: &str, values: &[f32]) -> TensorProto {
    TensorProto {
        name: name.into(),
        dims: vec![values.len() as i64],
        data_type: 1,
        float_data: values.to_vec(),
        ..TensorProto::default()
    }
}

fn external(location: &str, elements: i64) -> TensorProto {
    let entry = |key: &str, value: &str| StringStringEntryProto { key: key.into(), value: value.into() };
    TensorProto {
        name: "w".into(),
        dims: vec![elements],
        data_type: 1,
        data_location: 1,
        external_data: vec![entry("location", location), entry("offset", "8")],
        ..TensorProto::default()
    }
}

fn info(name: &str) -> ValueInfoProto {
    let dim = DimensionProto { dim_param: Some("batch".into()), dim_value: None };
    let shape = Some(TensorShapeProto { dim: vec![dim] });
    let tensor_type = Some(TensorTypeProto { elem_type: 1, shape });
    ValueInfoProto { name: name.into(), r#type: Some(TypeProto { tensor_type }) }
}

fn import(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: domain.into(), version }
}

fn model(nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> ModelProto {
    ModelProto {
        ir_version: Some(10),
        opset_import: vec![import("", 22), import("com.microsoft", 1)],
        graph: Some(GraphProto {
            node: nodes,
            initializer,
            input: vec![info("x")],
            output: vec![info("y")],
            ..GraphProto::default()
        }),
        functions: vec![],
    }
}

fn function(name: &str, nodes: Vec<NodeProto>) -> FunctionProto {
    FunctionProto {
        name: name.into(),
        domain: "local".into(),
        input: strings(&["a"]),
        output: strings(&["b"]),
        node: nodes,
        opset_import: vec![import("", 13), import("local", 1)],
        ..FunctionProto::default()
    }
}

fn call(name: &str, input: &str, output: &str) -> NodeProto {
    NodeProto { domain: "local".into(), ..node(name, &[input], &[output]) }
}

/// A model with every construct that the reader knows.
fn rich() -> ModelProto {
    let body = GraphProto {
        node: vec![node("Add", &["x", "c"], &["body_out"])],
        output: vec![info("body_out")],
        initializer: vec![floats("c", &[1.0])],
        ..GraphProto::default()
    };
    let mut branch = node("If", &["condition"], &["selected"]);
    branch.attribute = ["then_branch", "else_branch"]
        .map(|name| AttributeProto {
            name: name.into(),
            kind: kind::GRAPH,
            g: Some(body.clone()),
            ..AttributeProto::default()
        })
        .to_vec();
    let mut constant = node("Constant", &[], &["axes"]);
    constant.attribute = vec![AttributeProto {
        name: "value_ints".into(),
        kind: kind::INTS,
        ints: vec![0, -1],
        ..AttributeProto::default()
    }];
    let mut inner = node("Softmax", &["a"], &["b"]);
    inner.attribute = vec![reference("axis", "axis"), int_attribute("other", 3)];
    let mut outer = call("F", "selected", "called");
    outer.attribute = vec![int_attribute("axis", 5)];
    let mut nodes = vec![
        node("Add", &["called", "bias"], &["y"]),
        outer,
        branch,
        node("Cast", &["x"], &["condition"]),
        constant,
        node("ReduceSum", &["x", "axes"], &["unread"]),
    ];
    nodes[3].attribute = vec![int_attribute("to", 9)];
    let mut proto = model(nodes, vec![floats("bias", &[0.5, 2.0])]);
    proto.functions = vec![function("F", vec![inner])];
    proto
}

fn read(proto: &ModelProto) -> crate::Result<Graph> {
    Model::from_bytes(&proto.encode_to_vec())?.graph()
}

fn read_inlined(bytes: &[u8]) -> crate::Result<Graph> {
    let mut model = Model::from_bytes(bytes)?;
    model.graph()?;
    while model.inline(&HashSet::new())? {}
    model.graph()
}

#[track_caller]
fn assert_problem<T: std::fmt::Debug>(result: crate::Result<T>, part: &str) {
    match result {
        Err(error @ Error::Model { .. }) => {
            assert!(error.to_string().contains(part), "'{error}' lacks '{part}'")
        }
        other => panic!("expected a model error with '{part}', got {other:?}"),
    }
}

#[test]
fn reads_every_construct() {
    let graph = read(&rich()).unwrap();
    let value = |name: &str| graph.values.iter().position(|v| v.name == name).unwrap();
    let ops: Vec<_> = graph.nodes.iter().map(Node::op).collect();
    assert_eq!(ops, ["ai.onnx::Cast", "ai.onnx::If", "local::F", "ai.onnx::Add", "ai.onnx::ReduceSum"]);
    let versions: Vec<_> = graph.nodes.iter().map(|n| n.since_version).collect();
    assert_eq!(versions, [21, 21, 1, 14, 13]);
    assert_eq!(graph.inputs, [value("x")]);
    assert_eq!(graph.outputs, [value("y")]);
    assert_eq!(graph.values[value("x")].dtype, Some(DType::F32));
    assert_eq!(graph.values[value("x")].shape, Some(vec![Dim::Symbol("batch".into())]));
    let InitializerData::Inline(axes) = &graph.values[value("axes")].initializer.as_ref().unwrap().data else {
        panic!("a Constant node is a small initializer");
    };
    assert_eq!(axes.as_slice::<i64>(), Some(&[0, -1][..]));
    let branch = &graph.nodes[1];
    assert_eq!(branch.implicit_inputs, [value("x")]);
    let Some(Attr::Graph(body)) = branch.attr("else_branch") else { panic!("a body") };
    assert!(body.is_body && body.inputs.is_empty() && body.nodes.len() == 1);
    let captured = body.nodes[0].inputs[0].unwrap();
    assert_eq!(body.values[captured].name, "x");
    assert_eq!(body.values[captured].dtype, Some(DType::F32));
}

#[test]
fn expands_functions() {
    let graph = read_inlined(&rich().encode_to_vec()).unwrap();
    let softmax = graph.nodes.iter().find(|n| n.op_type == "Softmax").unwrap();
    // By the function's opset, not the model's.
    assert_eq!(softmax.since_version, 13);
    assert!(matches!(softmax.attr("axis"), Some(Attr::Int(5))));
    assert!(matches!(softmax.attr("other"), Some(Attr::Int(3))));
    assert!(graph.nodes.iter().all(|n| n.op_type != "F"));

    let mut proto = rich();
    proto.graph.as_mut().unwrap().node[1].attribute.clear();
    let graph = read_inlined(&proto.encode_to_vec()).unwrap();
    let softmax = graph.nodes.iter().find(|n| n.op_type == "Softmax").unwrap();
    assert!(softmax.attr("axis").is_none(), "neither caller nor default sets it");

    proto.functions[0].attribute_proto = vec![int_attribute("axis", 7)];
    let graph = read_inlined(&proto.encode_to_vec()).unwrap();
    let softmax = graph.nodes.iter().find(|n| n.op_type == "Softmax").unwrap();
    assert!(matches!(softmax.attr("axis"), Some(Attr::Int(7))));
}

#[test]
fn keeps_the_calls_that_it_is_told_to_keep() {
    let mut model = Model::from_bytes(&rich().encode_to_vec()).unwrap();
    let graph = model.graph().unwrap();
    let handle = graph.nodes.iter().find(|n| n.op_type == "F").unwrap().handle;
    assert!(!model.inline(&HashSet::from([handle])).unwrap());
    assert!(model.inline(&HashSet::new()).unwrap());
    assert!(!model.inline(&HashSet::new()).unwrap());
}

#[test]
fn hands_inputs_through_functions() {
    let mut proto = model(vec![call("F", "x", "y")], vec![]);
    proto.functions = vec![FunctionProto { output: strings(&["a"]), ..function("F", vec![]) }];
    let graph = read_inlined(&proto.encode_to_vec()).unwrap();
    assert_eq!(graph.nodes[0].op(), "ai.onnx::Identity");
}

#[test]
fn refuses_endless_functions() {
    let mut proto = model(vec![call("F", "x", "y")], vec![]);
    proto.functions = vec![function("F", vec![call("G", "a", "b")]), function("G", vec![call("F", "a", "b")])];
    assert_problem(read_inlined(&proto.encode_to_vec()), "calls itself");

    // Each function calls the next one 64 times.
    let level = |index: usize| {
        let next = format!("F{}", index + 1);
        let name = |i: usize| if i == 63 { "b".into() } else { format!("v{i}") };
        let calls = (0..64).map(|i| call(&next, "a", &name(i))).collect();
        function(&format!("F{index}"), calls)
    };
    let mut proto = model(vec![call("F0", "x", "y")], vec![]);
    proto.functions = (0..8).map(level).collect();
    proto.functions.push(function("F8", vec![node("Neg", &["a"], &["b"])]));
    assert_problem(read_inlined(&proto.encode_to_vec()), "too large");
}

#[test]
fn names_damage_in_the_graph() {
    let relu = |from: &str, to: &str| node("Relu", &[from], &[to]);
    let refused = |nodes, initializers, part: &str| assert_problem(read(&model(nodes, initializers)), part);
    refused(vec![relu("z", "y"), relu("y", "z")], vec![], "node 'n_y' (ai.onnx::Relu): stands in a cycle");
    refused(vec![relu("x", "y"), relu("x", "y")], vec![], "value 'y': is defined twice");
    refused(vec![relu("gone", "y")], vec![], "node 'n_y' (ai.onnx::Relu): reads 'gone', which nothing defines");
    refused(vec![], vec![], "graph output 'y': reads 'y', which nothing defines");
    let mut bad = floats("w", &[1.0]);
    bad.dims = vec![-1];
    refused(vec![relu("x", "y")], vec![bad.clone()], "initializer 'w': negative dimension");
    bad.dims = vec![i64::MAX, i64::MAX];
    refused(vec![relu("x", "y")], vec![bad.clone()], "more elements than can be addressed");
    bad.dims = vec![3];
    refused(vec![relu("x", "y")], vec![bad.clone()], "holds 1 items of 4 bytes, but float[3] takes 12 bytes");
    bad.raw_data = Some(Bytes::from_static(&[0; 13]));
    refused(vec![relu("x", "y")], vec![bad.clone()], "holds 13 bytes");
    bad.data_type = 99;
    refused(vec![relu("x", "y")], vec![bad], "unknown element type 99");
    let mut proto = model(vec![relu("x", "y")], vec![]);
    proto.opset_import.clear();
    assert_problem(read(&proto), "no opset of domain 'ai.onnx' is imported");
    proto.graph = None;
    assert_problem(read(&proto), "holds no graph");
}

#[test]
fn typed_fields_hold_every_element_type() {
    let tensor = |data_type, dims: &[i64], items: &[i32]| TensorProto {
        dims: dims.to_vec(),
        data_type,
        int32_data: items.to_vec(),
        ..TensorProto::default()
    };
    let bytes = |t: TensorProto| super::tensor::attribute(&t, String::new()).unwrap().unwrap().bytes().to_vec();
    assert_eq!(bytes(tensor(3, &[2], &[-1, 2])), [255, 2]);
    assert_eq!(bytes(tensor(10, &[1], &[0x3c00])), [0, 0x3c]);
    assert_eq!(bytes(tensor(21, &[3], &[0x21, 0x3])), [0x21, 0x3]);
    assert_eq!(bytes(tensor(6, &[1], &[-2])), (-2i32).to_le_bytes());
}

#[test]
fn external_data_stays_in_the_models_folder() {
    let folder = std::env::temp_dir().join(format!("nxrt-onnx-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("sub")).unwrap();
    let path = folder.join("model.onnx");
    let open = |tensor: TensorProto| {
        let proto = model(vec![node("Relu", &["x"], &["y"])], vec![tensor]);
        std::fs::write(&path, proto.encode_to_vec()).unwrap();
        Model::open(&path)?.graph()
    };
    std::fs::write(folder.join("sub/data"), [1u8; 24]).unwrap();

    let graph = open(external("sub/data", 4)).unwrap();
    let weight = graph.values.iter().find(|v| v.name == "w").unwrap();
    let InitializerData::Inline(small) = &weight.initializer.as_ref().unwrap().data else {
        panic!("small external data are read");
    };
    assert_eq!(small.bytes(), [1; 16]);

    assert_problem(open(external("sub/data", 5)), "ends at byte 28");
    assert_problem(open(external("sub/data", 1 << 20)), "ends at byte 4194312");
    assert_problem(open(external("missing", 4)), "cannot be read");
    let graph = open(external("missing", 1 << 20)).unwrap();
    let weight = graph.values.iter().find(|v| v.name == "w").unwrap();
    let data = &weight.initializer.as_ref().unwrap().data;
    assert!(matches!(data, InitializerData::External { path, offset: 8, len: 4194304 }
        if *path == folder.join("missing")));
    for outside in ["../data", "sub/../../data", "/etc/passwd", "", ".", "sub/..", "a\0b"] {
        assert_problem(open(external(outside, 4)), "not inside the model's folder");
    }
    let mut overflow = external("sub/data", 4);
    overflow.external_data[1].value = u64::MAX.to_string();
    assert_problem(open(overflow), "beyond any file");
    let mut text = external("sub/data", 4);
    text.external_data[1].value = "eight".into();
    assert_problem(open(text), "offset 'eight' is no number");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn missing_and_empty_files_are_named() {
    let nowhere = std::path::Path::new("/no/such/model.onnx");
    assert_problem(Model::open(nowhere).map(|_| ()), "'/no/such/model.onnx': cannot be read");
    assert_problem(Model::open(std::path::Path::new("/")).map(|_| ()), "not a file");
    assert_problem(Model::from_bytes(&[]).map(|_| ()), "holds no graph");
}

#[test]
fn truncated_models_are_read_or_refused() {
    let whole = rich().encode_to_vec();
    for end in 0..whole.len() {
        if let Err(error) = read_inlined(&whole[..end]) {
            assert!(matches!(error, Error::Model { .. }), "{error}");
        }
    }
}

proptest! {
    #[test]
    fn damaged_models_are_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = rich().encode_to_vec();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Err(error) = read_inlined(&bytes) {
            let is_model = matches!(error, Error::Model { .. });
            prop_assert!(is_model, "{}", error);
        }
    }

    #[test]
    fn noise_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        let _ = read_inlined(&bytes);
    }
}
