//! A graph as JSON, for tests to compare with the model.

use abi::{Attr, Dim, Graph, HostTensor, InitializerData, Node, Value};
use std::fmt::Display;

/// The graph as one JSON object. Tensors become `dtype[shape]:hex`.
pub fn json(graph: &Graph) -> String {
    let names = |ids: &[usize]| list(ids.iter().map(|&id| text(&graph.values[id].name)));
    object([
        ("inputs", names(&graph.inputs)),
        ("outputs", names(&graph.outputs)),
        ("is_body", graph.is_body.to_string()),
        ("model_path", graph.model_path.as_ref().map_or("null".into(), |path| text(&path.to_string_lossy()))),
        ("values", object(graph.values.iter().map(|v| (v.name.as_str(), value(v))))),
        ("nodes", list(graph.nodes.iter().map(|n| node(graph, n)))),
    ])
}

fn value(value: &Value) -> String {
    let dim = |dim: &Dim| match dim {
        Dim::Known(n) => n.to_string(),
        Dim::Symbol(name) => text(name),
        Dim::Unknown => "null".into(),
    };
    let initializer = |initializer: &abi::Initializer| match &initializer.data {
        InitializerData::Inline(t) => tensor(t),
        InitializerData::External { path, offset, len } => format!("{}@{offset}+{len}", path.display()),
        InitializerData::Unread => format!("unread {}{:?}", initializer.dtype, initializer.shape),
    };
    object([
        ("dtype", value.dtype.map_or("null".into(), |d| text(&d.to_string()))),
        ("shape", value.shape.as_ref().map_or("null".into(), |dims| list(dims.iter().map(dim)))),
        ("initializer", value.initializer.as_ref().map_or("null".into(), |i| text(&initializer(i)))),
    ])
}

fn node(graph: &Graph, node: &Node) -> String {
    let name = |id: &Option<usize>| id.map_or("null".into(), |id| text(&graph.values[id].name));
    object([
        ("name", text(&node.name)),
        ("domain", text(&node.domain)),
        ("op_type", text(&node.op_type)),
        ("since", node.since_version.to_string()),
        ("inputs", list(node.inputs.iter().map(name))),
        ("outputs", list(node.outputs.iter().map(name))),
        ("implicit", list(node.implicit_inputs.iter().map(|&id| text(&graph.values[id].name)))),
        ("attrs", object(node.attrs.iter().map(|(name, a)| (name.as_str(), attr(a))))),
    ])
}

fn attr(attr: &Attr) -> String {
    match attr {
        Attr::Int(n) => n.to_string(),
        Attr::Float(x) => text(&format!("f{x}")),
        Attr::String(s) => text(s),
        Attr::Ints(ns) => list(ns.iter()),
        Attr::Floats(xs) => list(xs.iter().map(|x| text(&format!("f{x}")))),
        Attr::Strings(ss) => list(ss.iter().map(|s| text(s))),
        Attr::Tensor(t) => text(&tensor(t)),
        Attr::Graph(graph) => json(graph),
        Attr::Other => text("other"),
    }
}

fn tensor(tensor: &HostTensor) -> String {
    let hex: String = tensor.bytes().iter().map(|b| format!("{b:02x}")).collect();
    format!("{}{:?}:{hex}", tensor.dtype(), tensor.shape())
}

fn list<T: Display>(items: impl Iterator<Item = T>) -> String {
    let items: Vec<String> = items.map(|item| item.to_string()).collect();
    format!("[{}]", items.join(","))
}

fn object<'a>(entries: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let entries: Vec<String> = entries.into_iter().map(|(k, v)| format!("{}:{v}", text(k))).collect();
    format!("{{{}}}", entries.join(","))
}

fn text(text: &str) -> String {
    let escaped: String = text
        .chars()
        .map(|c| match c {
            '"' | '\\' => format!("\\{c}"),
            c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
            c => c.to_string(),
        })
        .collect();
    format!("\"{escaped}\"")
}
