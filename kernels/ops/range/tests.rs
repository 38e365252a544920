//! Examples of the definition.

use crate::eval::Single;
use crate::ops::testing::{fault, held, run, tensor};
use abi::{DType, HostTensor};

fn range(dtype: DType, values: [f64; 3]) -> Single {
    let scalar = |v| tensor(dtype, &[], &[v]);
    let [start, limit, delta] = values.map(scalar);
    Single::new("", "Range", if dtype == DType::F16 { 27 } else { 11 }, 1).input(start).input(limit).input(delta)
}

#[test]
fn up_down_and_nothing() {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::I64, DType::I32, DType::I16] {
        assert_eq!(held(&run(&range(dtype, [1.0, 6.0, 2.0]))), [1., 3., 5.]);
        assert_eq!(held(&run(&range(dtype, [10.0, 4.0, -2.0]))), [10., 8., 6.]);
        assert_eq!(held(&run(&range(dtype, [1.0, 1.0, 1.0]))), [0.0; 0]);
        assert_eq!(held(&run(&range(dtype, [1.0, 5.0, -1.0]))), [0.0; 0]);
        assert_eq!(fault(&range(dtype, [0.0, 1.0, 0.0])), "inputs");
    }
    assert_eq!(held(&run(&range(DType::F64, [0.0, 1.0, 0.3]))).len(), 4);
    assert_eq!(fault(&range(DType::F32, [0.0, f64::INFINITY, 1.0])), "inputs");
    let wide = [i64::MIN, i64::MAX, i64::MAX].map(|v| HostTensor::new(&[], &[v]));
    let [start, limit, delta] = wide;
    let y = run(&Single::new("", "Range", 11, 1).input(start).input(limit).input(delta));
    assert_eq!(y.as_slice::<i64>().unwrap(), [i64::MIN, -1, i64::MAX - 1]);
}
