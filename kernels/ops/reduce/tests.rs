//! Against float64 from the definitions over random axes.

use crate::eval::Single;
use crate::ops::testing::{assert_close, fault, held, ints, iota, run, tensor};
use abi::{Attr, DType};
use proptest::prelude::*;

type Definition = fn(&[f64]) -> f64;

/// Op, version with the axes as input, and definition.
const OPS: &[(&str, u32, Definition)] = &[
    ("ReduceSum", 13, |x| x.iter().sum()),
    ("ReduceMean", 18, |x| x.iter().sum::<f64>() / x.len() as f64),
    ("ReduceProd", 18, |x| x.iter().product()),
    ("ReduceMax", 20, |x| x.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
    ("ReduceMin", 20, |x| x.iter().copied().fold(f64::INFINITY, f64::min)),
    ("ReduceL1", 18, |x| x.iter().map(|v| v.abs()).sum()),
    ("ReduceL2", 18, |x| x.iter().map(|v| v * v).sum::<f64>().sqrt()),
    ("ReduceSumSquare", 18, |x| x.iter().map(|v| v * v).sum()),
    ("ReduceLogSum", 18, |x| x.iter().sum::<f64>().ln()),
    ("ReduceLogSumExp", 18, |x| x.iter().map(|v| v.exp()).sum::<f64>().ln()),
];

/// Reduces the marked dims, which stay as 1.
fn reference(values: &[f64], shape: &[usize], reduced: &[bool], f: Definition) -> Vec<f64> {
    let kept: Vec<usize> = shape.iter().zip(reduced).map(|(&d, &r)| if r { 1 } else { d }).collect();
    let mut groups = vec![Vec::new(); kept.iter().product()];
    for (i, &v) in values.iter().enumerate() {
        let (mut rest, mut at, mut stride) = (i, 0, 1);
        for d in (0..shape.len()).rev() {
            at += stride * if reduced[d] { 0 } else { rest % shape[d] };
            rest /= shape[d];
            stride *= kept[d];
        }
        groups[at].push(v);
    }
    groups.iter().map(|g| f(g)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_axes(shape in prop::collection::vec(1usize..6, 0..5), wide in 0usize..5, bits in 0u32..32) {
        let mut shape = shape;
        // One dim that takes more than a block and a bit.
        if let Some(dim) = shape.get_mut(wide) {
            *dim = 275;
        }
        prop_assume!(shape.iter().product::<usize>() < 20_000);
        let reduced: Vec<bool> = (0..shape.len()).map(|d| bits >> d & 1 == 1).collect();
        let axes: Vec<i64> = (0..shape.len()).filter(|&d| reduced[d]).map(|d| d as i64 - shape.len() as i64).collect();
        let n: usize = shape.iter().product();
        let values: Vec<f64> = (0..n).map(|i| ((i * 37 % 23) as f64 + 1.0) / 16.0).collect();
        for &(op, since, f) in OPS {
            for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64, DType::I32, DType::U64] {
                let exact = matches!(dtype, DType::I32 | DType::U64);
                let values: Vec<f64> = values.iter().map(|v| if exact { (v * 16.0) % 3.0 + 1.0 } else { *v }).collect();
                if op == "ReduceProd" && dtype != DType::F64 {
                    continue;
                }
                let x = tensor(dtype, &shape, &values);
                let all = if axes.is_empty() { vec![true; shape.len()] } else { reduced.clone() };
                let mut want = reference(&held(&x), &shape, &all, f);
                if exact {
                    want.iter_mut().for_each(|v| *v = (*v + 1e-9).trunc());
                }
                let y = run(&Single::new("", op, since, 1).input(x.clone()).input(ints(&axes)));
                assert_close(op, &y, &want);
                let old = Single::new("", op, 11, 1).attr("axes", Attr::Ints(axes.clone())).attr("keepdims", Attr::Int(0));
                let old = run(&old.input(x));
                assert_eq!(old.bytes(), y.bytes());
                prop_assert_eq!(old.shape().len(), all.iter().filter(|r| !**r).count());
            }
        }
    }
}

#[test]
fn no_axes_and_no_elements() {
    let noop =
        Single::new("", "ReduceSum", 13, 1).attr("noop_with_empty_axes", Attr::Int(1)).input(iota(DType::F32, &[2, 2]));
    assert_eq!(held(&run(&noop)), [0.0, 1.0, 2.0, 3.0]);
    let empty =
        |op, since| held(&run(&Single::new("", op, since, 1).input(iota(DType::F32, &[2, 0])).input(ints(&[1]))));
    assert_eq!(empty("ReduceSum", 13), [0.0; 2]);
    assert_eq!(empty("ReduceProd", 18), [1.0; 2]);
    assert_eq!(empty("ReduceMax", 20), [f64::NEG_INFINITY; 2]);
    assert_eq!(empty("ReduceLogSumExp", 18), [f64::NEG_INFINITY; 2]);
    assert_eq!(fault(&Single::new("", "ReduceSum", 13, 1).input(iota(DType::F32, &[2])).input(ints(&[1]))), "axes");
}

#[test]
fn exponentials_do_not_overflow() {
    let x = tensor(DType::F32, &[2, 2], &[1000.0, 1000.0, f64::NEG_INFINITY, f64::NEG_INFINITY]);
    let y = run(&Single::new("", "ReduceLogSumExp", 18, 1).input(x).input(ints(&[1])));
    assert_close("ReduceLogSumExp", &y, &[1000.0 + 2f64.ln(), f64::NEG_INFINITY]);
    let bools = tensor(DType::Bool, &[2, 2], &[0.0, 1.0, 0.0, 0.0]);
    assert_eq!(held(&run(&Single::new("", "ReduceMax", 20, 1).input(bools).input(ints(&[1])))), [1.0, 0.0]);
}
