//! Shapes from the definitions, known and symbolic.

use crate::eval::Single;
use crate::fact::Fact;
use crate::op::NodeCx;
use crate::ops::testing::{fault, held, ints, iota, run};
use abi::{Attr, DType, Dim, Graph, HostTensor, Node, Value};

fn reshape(from: &[usize], to: &[i64]) -> Single {
    Single::new("", "Reshape", 14, 1).input(iota(DType::F32, from)).input(ints(to))
}

#[test]
fn reshape_takes_zero_and_minus_one() {
    for (from, to, want) in [
        (&[2, 3, 4][..], &[4, -1][..], &[4, 6][..]),
        (&[2, 3, 4], &[0, -1, 2], &[2, 6, 2]),
        (&[2, 3, 4], &[0, 0, 0], &[2, 3, 4]),
        (&[], &[1, 1], &[1, 1]),
        (&[1], &[], &[]),
        (&[0, 3], &[3, 0, 4], &[]),
    ] {
        if want.is_empty() && from == [0, 3] {
            assert_eq!(fault(&reshape(from, to)), "input 1 (shape)");
            continue;
        }
        let y = run(&reshape(from, to));
        assert_eq!(y.shape(), want);
        assert_eq!(held(&y), held(&iota(DType::F32, from)));
    }
    let zero = reshape(&[0, 3], &[3, 0]).attr("allowzero", Attr::Int(1));
    assert_eq!(run(&zero).shape(), [3, 0]);
    for to in [&[-1, -1][..], &[5, -1], &[-2, 3], &[7], &[6, 1, 1, 0], &[1 << 40, 1 << 40]] {
        assert_eq!(fault(&reshape(&[2, 3], to)), "input 1 (shape)");
    }
}

#[test]
fn flatten_squeeze_unsqueeze() {
    let x = || iota(DType::I32, &[2, 3, 4]);
    for (axis, want) in [(0, [1, 24]), (1, [2, 12]), (-1, [6, 4]), (3, [24, 1])] {
        assert_eq!(run(&Single::new("", "Flatten", 13, 1).attr("axis", Attr::Int(axis)).input(x())).shape(), want);
    }
    let x = || iota(DType::F32, &[1, 3, 1]);
    let squeeze = || Single::new("", "Squeeze", 13, 1).input(x());
    assert_eq!(run(&squeeze()).shape(), [3]);
    assert_eq!(run(&squeeze().input(ints(&[-1]))).shape(), [1, 3]);
    assert_eq!(fault(&squeeze().input(ints(&[1]))), "input 0 (data)");
    assert_eq!(fault(&squeeze().input(ints(&[3]))), "axes");
    let old = Single::new("", "Squeeze", 11, 1).attr("axes", Attr::Ints(vec![0])).input(x());
    assert_eq!(run(&old).shape(), [3, 1]);
    let unsqueeze = |axes: &[i64]| Single::new("", "Unsqueeze", 13, 1).input(x()).input(ints(axes));
    assert_eq!(run(&unsqueeze(&[-1, 0])).shape(), [1, 1, 3, 1, 1]);
    assert_eq!(fault(&unsqueeze(&[0, 0])), "axes");
    assert_eq!(fault(&unsqueeze(&[5])), "axes");
}

#[test]
fn shape_and_size() {
    let shape = |start: Option<i64>, end: Option<i64>| {
        let mut single = Single::new("", "Shape", 15, 1).input(iota(DType::F16, &[2, 0, 4]));
        for (name, value) in [("start", start), ("end", end)] {
            if let Some(value) = value {
                single = single.attr(name, Attr::Int(value));
            }
        }
        held(&run(&single))
    };
    assert_eq!(shape(None, None), [2.0, 0.0, 4.0]);
    assert_eq!(shape(Some(-1), None), [4.0]);
    assert_eq!(shape(Some(1), Some(-1)), [0.0]);
    assert_eq!(shape(Some(2), Some(1)), [0.0; 0]);
    assert_eq!(shape(Some(-9), Some(9)), [2.0, 0.0, 4.0]);
    assert_eq!(held(&run(&Single::new("", "Size", 13, 1).input(iota(DType::U8, &[2, 3])))), [6.0]);
}

#[test]
fn constants() {
    let constant = |name: &str, attr| run(&Single::new("", "Constant", 13, 1).attr(name, attr));
    assert_eq!(held(&constant("value_ints", Attr::Ints(vec![3, 4]))), [3.0, 4.0]);
    assert_eq!(constant("value_float", Attr::Float(2.0)).shape(), [0; 0]);
    assert!(fault(&Single::new("", "Constant", 13, 1)).contains("attributes"));
    let of_shape = |dims: &[i64]| Single::new("", "ConstantOfShape", 9, 1).input(ints(dims));
    assert_eq!(held(&run(&of_shape(&[2, 2]))), [0.0; 4]);
    let value = Attr::Tensor(HostTensor::new(&[1], &[7i16]));
    assert_eq!(held(&run(&of_shape(&[3]).attr("value", value))), [7.0; 3]);
    assert_eq!(run(&of_shape(&[])).shape(), [0; 0]);
    assert_eq!(fault(&of_shape(&[-1])), "input 0 (input)");
}

/// The output's dims where input 0 has the dims given and input 1 the values given.
fn symbolic(op: &str, since: u32, dims: &[Dim], values: Option<&[i64]>) -> Vec<Dim> {
    let mut graph = Graph::default();
    for name in ["x", "v", "y"] {
        graph.values.push(Value { name: name.into(), dtype: None, shape: None, initializer: None });
    }
    graph.nodes.push(Node {
        name: "n".into(),
        domain: String::new(),
        op_type: op.into(),
        since_version: since,
        inputs: vec![Some(0), Some(1)],
        outputs: vec![Some(2)],
        attrs: Vec::new(),
        implicit_inputs: Vec::new(),
        handle: 0,
    });
    let by = values.map_or_else(|| Fact::new(DType::I64, vec![Dim::Known(3)]), |v| Fact::with_value(ints(v)));
    let facts = [Some(Fact::new(DType::F32, dims.to_vec()).into()), Some(by.into()), None];
    let def = crate::op::find(&graph.nodes[0]).unwrap();
    let cx = NodeCx::new(&graph, 0, &facts);
    (def.claim)(&cx).unwrap();
    (def.infer)(&cx).unwrap()[0].shape.clone().unwrap()
}

#[test]
fn symbols_pass_through() {
    let (b, s, k) = (Dim::Symbol("B".into()), Dim::Symbol("S".into()), Dim::Known);
    let x = [b.clone(), s.clone(), k(8)];
    assert_eq!(symbolic("Reshape", 14, &x, Some(&[0, -1, 2, 4])), [b.clone(), s.clone(), k(2), k(4)]);
    assert_eq!(symbolic("Reshape", 14, &x, Some(&[0, 0, -1])), [b.clone(), s.clone(), k(8)]);
    assert_eq!(symbolic("Reshape", 14, &x, Some(&[-1, 8])), [Dim::Unknown, k(8)]);
    assert_eq!(symbolic("Reshape", 14, &x, None), [Dim::Unknown, Dim::Unknown, Dim::Unknown]);
    assert_eq!(symbolic("Unsqueeze", 13, &x, Some(&[1])), [b.clone(), k(1), s.clone(), k(8)]);
    assert_eq!(symbolic("Squeeze", 13, &[b.clone(), k(1), s.clone()], Some(&[1])), [b.clone(), s.clone()]);
    assert_eq!(symbolic("Expand", 13, &[k(1), s.clone()], Some(&[4, 1])), [k(4), s.clone()]);
    assert_eq!(symbolic("ReduceSum", 13, &x, Some(&[2])), [b, s, k(1)]);
}
