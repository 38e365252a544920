//! Examples of the definition.

use crate::eval::Single;
use crate::ops::testing::{fault, held, iota, run, tensor};
use abi::{Attr, DType, HostTensor};

fn cumulative(op: &str, dtype: DType, axis: i32, exclusive: i64, reverse: i64) -> Vec<f64> {
    let since = if op == "CumSum" { 14 } else { 26 };
    let single =
        Single::new("", op, since, 1).attr("exclusive", Attr::Int(exclusive)).attr("reverse", Attr::Int(reverse));
    let x = tensor(dtype, &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    held(&run(&single.input(x).input(HostTensor::new(&[], &[axis]))))
}

#[test]
fn all_directions() {
    for dtype in [DType::F32, DType::F16, DType::I64, DType::I32] {
        assert_eq!(cumulative("CumSum", dtype, 1, 0, 0), [1., 3., 6., 4., 9., 15.]);
        assert_eq!(cumulative("CumSum", dtype, -1, 1, 0), [0., 1., 3., 0., 4., 9.]);
        assert_eq!(cumulative("CumSum", dtype, 1, 0, 1), [6., 5., 3., 15., 11., 6.]);
        assert_eq!(cumulative("CumSum", dtype, 0, 0, 0), [1., 2., 3., 5., 7., 9.]);
        assert_eq!(cumulative("CumSum", dtype, 0, 1, 1), [4., 5., 6., 0., 0., 0.]);
        assert_eq!(cumulative("CumProd", dtype, 1, 0, 0), [1., 2., 6., 4., 20., 120.]);
        assert_eq!(cumulative("CumProd", dtype, 1, 1, 0), [1., 1., 2., 1., 4., 20.]);
    }
    let bad = Single::new("", "CumSum", 14, 1).input(iota(DType::F32, &[2])).input(HostTensor::new(&[], &[1i64]));
    assert_eq!(fault(&bad), "input 1 (axis)");
}
