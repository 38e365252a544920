//! Examples of the definition.

use crate::eval::Single;
use crate::ops::testing::{fault, held, run, tensor};
use abi::{Attr, DType, HostTensor};

fn one_hot(axis: i64, indices: HostTensor, depth: f32) -> Single {
    let single = Single::new("", "OneHot", 11, 1).attr("axis", Attr::Int(axis)).input(indices);
    single.input(HostTensor::new(&[], &[depth])).input(HostTensor::new(&[2], &[2i32, 5]))
}

#[test]
fn any_axis_and_indices_outside() {
    for dtype in [DType::I64, DType::I32, DType::F32] {
        let indices = || tensor(dtype, &[2, 2], &[0.0, -1.0, 3.0, 1.0]);
        let y = run(&one_hot(-1, indices(), 3.0));
        assert_eq!((y.shape(), held(&y)), (&[2, 2, 3][..], vec![5., 2., 2., 2., 2., 5., 2., 2., 2., 2., 5., 2.]));
        let y = run(&one_hot(0, indices(), 2.0));
        assert_eq!((y.shape(), held(&y)), (&[2, 2, 2][..], vec![5., 2., 2., 2., 2., 5., 2., 5.]));
    }
    let indices = || tensor(DType::I64, &[1], &[0.0]);
    assert_eq!(fault(&one_hot(2, indices(), 3.0)), "attribute 'axis'");
    assert_eq!(fault(&one_hot(0, indices(), -1.0)), "input 1 (depth)");
    assert_eq!(run(&one_hot(0, indices(), 0.0)).shape(), [0, 1]);
}
