//! Examples of the definitions, and indices that are out of range.

use crate::eval::Single;
use crate::ops::testing::{fault, held, ints, iota, run};
use abi::{Attr, DType, HostTensor};

fn matrix(rows: usize, values: &[i64]) -> HostTensor {
    HostTensor::new(&[rows, values.len() / rows], values)
}

#[test]
fn gather_along_any_axis() {
    for dtype in [DType::F32, DType::F16, DType::I64, DType::U8] {
        let x = iota(dtype, &[3, 4]);
        let rows = run(&Single::new("", "Gather", 13, 1).input(x.clone()).input(matrix(2, &[2, -3])));
        assert_eq!((rows.shape(), held(&rows)), (&[2, 1, 4][..], vec![8., 9., 10., 11., 0., 1., 2., 3.]));
        let column = Single::new("", "Gather", 13, 1).attr("axis", Attr::Int(-1)).input(x);
        let column = run(&column.input(HostTensor::new(&[], &[1i32])));
        assert_eq!((column.shape(), held(&column)), (&[3][..], vec![1., 5., 9.]));
    }
    let none = run(&Single::new("", "Gather", 13, 1).input(iota(DType::F32, &[3, 4])).input(ints(&[])));
    assert_eq!(none.shape(), [0, 4]);
}

#[test]
fn gather_elements_and_nd() {
    let x = || matrix(2, &[1, 2, 3, 4]);
    let elements = Single::new("", "GatherElements", 13, 1).attr("axis", Attr::Int(1)).input(x());
    assert_eq!(held(&run(&elements.input(matrix(2, &[0, 0, -1, 0])))), [1., 1., 4., 3.]);
    let nd = |by: HostTensor| Single::new("", "GatherND", 13, 1).input(x()).input(by);
    assert_eq!(held(&run(&nd(matrix(2, &[0, 0, 1, -1])))), [1., 4.]);
    let rows = run(&nd(matrix(2, &[1, 0])));
    assert_eq!((rows.shape(), held(&rows)), (&[2, 2][..], vec![3., 4., 1., 2.]));
    let batched =
        Single::new("", "GatherND", 13, 1).attr("batch_dims", Attr::Int(1)).input(iota(DType::F32, &[2, 2, 2]));
    let batched = run(&batched.input(matrix(2, &[1, 0])));
    assert_eq!((batched.shape(), held(&batched)), (&[2, 2][..], vec![2., 3., 4., 5.]));
}

#[test]
fn hostile_indices_are_named() {
    for bad in [3, -4, i64::MAX, i64::MIN] {
        for op in ["Gather", "GatherElements"] {
            let single = Single::new("", op, 13, 1).input(iota(DType::F32, &[3]));
            assert_eq!(fault(&single.input(ints(&[0, bad]))), "input 1 (indices)");
        }
        let nd = Single::new("", "GatherND", 13, 1).input(iota(DType::F32, &[3]));
        assert_eq!(fault(&nd.input(ints(&[bad]))), "input 1 (indices)");
    }
    let empty = Single::new("", "Gather", 13, 1).input(iota(DType::F32, &[0, 2])).input(ints(&[0]));
    assert_eq!(fault(&empty), "input 1 (indices)");
    let deep = Single::new("", "GatherND", 13, 1).input(iota(DType::F32, &[3])).input(matrix(1, &[0, 0]));
    assert_eq!(fault(&deep), "input 1 (indices)");
    let batch = Single::new("", "GatherND", 13, 1).attr("batch_dims", Attr::Int(-1)).input(iota(DType::F32, &[3]));
    assert_eq!(fault(&batch.input(ints(&[0]))), "attribute 'batch_dims'");
}
