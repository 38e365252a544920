//! What is known of every op, those without a kernel here too: its versions, and the types of its outputs.

use crate::graph::{Attr, Dim, Node};
use crate::tensor::DType;
use std::collections::HashMap;
use std::sync::LazyLock;

/// One line an op; see `opsets.py`.
const TABLE: &str = include_str!("opsets.txt");

struct Schema {
    /// Since-versions, ascending.
    versions: Vec<u32>,
    outputs: Vec<Rule>,
}

/// What an output's type follows from.
enum Rule {
    /// The type of this input, and its shape if `shape`.
    Like { input: usize, shape: bool },
    /// Always this type.
    Is(DType),
    /// On more than the table holds.
    Unknown,
}

static SCHEMAS: LazyLock<HashMap<&str, Schema>> =
    LazyLock::new(|| TABLE.lines().filter(|l| !l.starts_with('#')).filter_map(parse).collect());

fn parse(line: &'static str) -> Option<(&'static str, Schema)> {
    let (head, rules) = line.split_once(" : ").unwrap_or((line, ""));
    let mut words = head.split_ascii_whitespace();
    let name = words.next()?;
    let versions = words.map(|w| w.parse().expect("the table holds versions")).collect();
    let rule = |word: &str| match (word.strip_prefix('#'), word.strip_suffix('=')) {
        _ if word == "?" => Rule::Unknown,
        (Some(code), _) => Rule::Is(code.parse().ok().and_then(DType::from_onnx).expect("the table holds types")),
        (None, like) => {
            let input = like.unwrap_or(word).parse().expect("the table holds input slots");
            Rule::Like { input, shape: like.is_some() }
        }
    };
    Some((name, Schema { versions, outputs: rules.split_ascii_whitespace().map(rule).collect() }))
}

fn find(domain: &str, op_type: &str) -> Option<&'static Schema> {
    match domain {
        "" => SCHEMAS.get(op_type),
        "com.microsoft" => SCHEMAS.get(format!("{domain}::{op_type}").as_str()),
        _ => None,
    }
}

/// The since-version of `domain::op_type` under version `opset` of its domain.
///
/// An op of the default domain that the table lacks, or that is newer than `opset`, gets `opset` itself: no
/// definition will match it. Ops of com.microsoft have one version, 1.
pub(super) fn since_version(domain: &str, op_type: &str, opset: u32) -> u32 {
    if domain == "com.microsoft" {
        return 1;
    }
    let newest = |schema: &Schema| schema.versions.iter().rev().find(|&&since| since <= opset).copied();
    find(domain, op_type).and_then(newest).unwrap_or(opset)
}

/// An element type and, if its rank is known, a shape.
pub type TensorType = (DType, Option<Vec<Dim>>);

/// The type of `node`'s output `slot` by the op's schema, where that says it. `input` gives the types of the inputs.
///
/// This stands in for ORT's inference at nodes that are not claimed, so that what follows them can be judged.
pub fn output_type(node: &Node, slot: usize, input: impl Fn(usize) -> Option<TensorType>) -> Option<TensorType> {
    // The shape is known where the bodies agree and none of them runs many times.
    let body = |index: usize| {
        let graphs = node.attrs.iter().filter_map(|(_, a)| if let Attr::Graph(g) = a { Some(g) } else { None });
        let mut types = graphs.map(|g| {
            let value = &g.values[*g.outputs.get(index)?];
            Some((value.dtype?, value.shape.clone()))
        });
        let (dtype, shape) = types.next()??;
        let agree = node.op_type == "If" && types.all(|t| t.is_some_and(|(_, other)| other == shape));
        Some((dtype, shape.filter(|_| agree)))
    };
    match (node.domain.as_str(), node.op_type.as_str()) {
        // The first output of a Loop's body is its condition.
        ("", "Loop") => return body(slot + 1),
        ("", "If" | "Scan") => return body(slot),
        _ => {}
    }
    match find(&node.domain, &node.op_type)?.outputs.get(slot) {
        Some(&Rule::Is(dtype)) => Some((dtype, None)),
        Some(&Rule::Like { input: from, shape }) => {
            let (dtype, from_shape) = input(from)?;
            Some((dtype, from_shape.filter(|_| shape)))
        }
        // Cast, EyeLike, the random ops and their like name the type of their one output.
        Some(Rule::Unknown) | None => match node.attr("to").or(node.attr("dtype")) {
            Some(&Attr::Int(code)) if slot == 0 => Some((DType::from_onnx(code.try_into().ok()?)?, None)),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_newest_version_not_above_the_import() {
        assert_eq!(since_version("", "Add", 22), 14);
        assert_eq!(since_version("", "Add", 13), 13);
        assert_eq!(since_version("", "RMSNormalization", 24), 23);
        assert_eq!(since_version("", "RMSNormalization", 22), 22);
        assert_eq!(since_version("", "NoSuchOp", 9), 9);
        assert_eq!(since_version("com.microsoft", "MatMulNBits", 7), 1);
        assert_eq!(since_version("a.b", "C", 5), 5);
    }

    #[test]
    fn outputs_follow_the_schema() {
        let node = |domain: &str, op_type: &str, attrs| Node {
            name: String::new(),
            domain: domain.into(),
            op_type: op_type.into(),
            since_version: 1,
            inputs: vec![],
            outputs: vec![],
            attrs,
            implicit_inputs: vec![],
            handle: 0,
        };
        let shape = || Some(vec![Dim::Known(2)]);
        let inputs = |slot: usize| Some(([DType::Bool, DType::F16, DType::F16][slot], shape()));
        let outputs = |n: &Node, slot| output_type(n, slot, inputs);
        assert_eq!(outputs(&node("", "Where", vec![]), 0), Some((DType::F16, None)));
        assert_eq!(outputs(&node("", "Softmax", vec![]), 0), Some((DType::Bool, shape())));
        assert_eq!(outputs(&node("", "TopK", vec![]), 1), Some((DType::I64, None)));
        assert_eq!(outputs(&node("", "TopK", vec![]), 2), None);
        let to = vec![("to".to_owned(), Attr::Int(1))];
        assert_eq!(outputs(&node("", "Cast", to), 0), Some((DType::F32, None)));
        assert_eq!(outputs(&node("com.microsoft", "Gelu", vec![]), 0), Some((DType::Bool, None)));
        assert_eq!(outputs(&node("a.b", "C", vec![]), 0), None);
    }
}
