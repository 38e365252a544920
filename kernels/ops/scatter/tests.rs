//! Examples of the definitions, and indices that are out of range.

use crate::eval::Single;
use crate::ops::testing::{fault, held, ints, iota, run, tensor};
use abi::{Attr, DType, HostTensor};

fn elements(dtype: DType, reduction: &str, indices: &[i64]) -> Single {
    let single = Single::new("", "ScatterElements", 18, 1).attr("reduction", Attr::String(reduction.into()));
    let updates: Vec<f64> = (0..indices.len()).map(|i| i as f64 + 5.0).collect();
    let single = single.input(tensor(dtype, &[4], &[1.0, 2.0, 3.0, 4.0])).input(ints(indices));
    single.input(tensor(dtype, &[indices.len()], &updates))
}

#[test]
fn elements_are_replaced_and_combined() {
    for dtype in [DType::F32, DType::F16, DType::I64] {
        assert_eq!(held(&run(&elements(dtype, "none", &[1, -1]))), [1., 5., 3., 6.]);
        assert_eq!(held(&run(&elements(dtype, "add", &[1, 1]))), [1., 13., 3., 4.]);
        assert_eq!(held(&run(&elements(dtype, "mul", &[0, 1]))), [5., 12., 3., 4.]);
        assert_eq!(held(&run(&elements(dtype, "max", &[3, 3]))), [1., 2., 3., 6.]);
        assert_eq!(held(&run(&elements(dtype, "min", &[3, 0]))), [1., 2., 3., 4.]);
    }
    for bad in [4, -5, i64::MIN] {
        assert_eq!(fault(&elements(DType::F32, "none", &[bad])), "input 1 (indices)");
    }
}

#[test]
fn elements_along_columns() {
    let by = HostTensor::new(&[2, 2], &[1i32, 0, 2, 2]);
    let updates = HostTensor::new(&[2, 2], &[1f32, 2., 3., 4.]);
    let x = HostTensor::new(&[3, 2], &[0f32; 6]);
    let single = Single::new("", "ScatterElements", 13, 1).input(x).input(by).input(updates);
    assert_eq!(held(&run(&single)), [0., 2., 1., 0., 3., 4.]);
}

#[test]
fn slices_by_tuples() {
    let nd = |by: HostTensor, updates: HostTensor| {
        Single::new("", "ScatterND", 18, 1).input(iota(DType::F32, &[3, 2])).input(by).input(updates)
    };
    let rows = nd(HostTensor::new(&[2, 1], &[2i64, 0]), HostTensor::new(&[2, 2], &[9f32, 8., 7., 6.]));
    assert_eq!(held(&run(&rows)), [7., 6., 2., 3., 9., 8.]);
    let one = HostTensor::new(&[1], &[9f32]);
    assert_eq!(held(&run(&nd(HostTensor::new(&[1, 2], &[1i64, -1]), one.clone()))), [0., 1., 2., 9., 4., 5.]);
    assert_eq!(fault(&nd(HostTensor::new(&[1, 2], &[3i64, 0]), one.clone())), "input 1 (indices)");
    assert_eq!(fault(&nd(HostTensor::new(&[1, 1], &[0i64]), one)), "input 2 (updates)");
}
