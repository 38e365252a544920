//! Against float64 from the definition.

use crate::eval::Single;
use crate::ops::testing::{assert_close, fault, held, run, tensor};
use abi::{Attr, DType};

/// Softmax (or its logarithm) over the middle one of three dims.
fn reference(x: &[f64], [outer, n, inner]: [usize; 3], log: bool) -> Vec<f64> {
    let mut out = vec![0.0; x.len()];
    for o in 0..outer {
        for i in 0..inner {
            let at = |k: usize| (o * n + k) * inner + i;
            let max = (0..n).map(|k| x[at(k)]).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = (0..n).map(|k| (x[at(k)] - max).exp()).sum();
            for k in 0..n {
                let y = x[at(k)] - max;
                out[at(k)] = if log { y - sum.ln() } else { y.exp() / sum };
            }
        }
    }
    out
}

#[test]
fn every_axis_version_and_type() {
    let shape = [3, 300, 5];
    let values: Vec<f64> = (0..4500).map(|i| f64::from(i * 37 % 101) / 7.0 - 5.0).collect();
    for (op, log) in [("Softmax", false), ("LogSoftmax", true)] {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            let x = tensor(dtype, &shape, &values);
            let single = |since| Single::new("", op, since, 1).input(x.clone());
            for (axis, dims) in [(0, [1, 3, 1500]), (1, [3, 300, 5]), (-1, [900, 5, 1])] {
                let y = run(&single(13).attr("axis", Attr::Int(axis)));
                assert_close(op, &y, &reference(&held(&x), dims, log));
            }
            let last = run(&single(13));
            assert_close(op, &last, &reference(&held(&x), [900, 5, 1], log));
            let old = run(&single(11));
            assert_close(op, &old, &reference(&held(&x), [3, 1500, 1], log));
        }
    }
}

#[test]
fn masked_and_empty_rows() {
    let x = tensor(DType::F32, &[2, 2], &[f64::NEG_INFINITY, 3.0, 1000.0, -1000.0]);
    assert_close("Softmax", &run(&Single::new("", "Softmax", 13, 1).input(x)), &[0.0, 1.0, 1.0, 0.0]);
    assert_eq!(run(&Single::new("", "Softmax", 13, 1).input(tensor(DType::F32, &[2, 0], &[]))).shape(), [2, 0]);
    let axis = Single::new("", "Softmax", 13, 1).attr("axis", Attr::Int(2)).input(tensor(DType::F32, &[1, 1], &[0.0]));
    assert_eq!(fault(&axis), "attribute 'axis'");
}
