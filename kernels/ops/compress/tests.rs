//! Examples of the definitions.

use crate::cpu::number::Bool;
use crate::eval::Single;
use crate::ops::testing::{fault, held, iota, run, tensor};
use abi::{Attr, DType, HostTensor};

fn flags(flags: &[u8]) -> HostTensor {
    HostTensor::new(&[flags.len()], &flags.iter().map(|&f| Bool(f)).collect::<Vec<_>>())
}

#[test]
fn compress_along_an_axis_and_flat() {
    let single =
        |condition: &[u8]| Single::new("", "Compress", 11, 1).input(iota(DType::F16, &[3, 2])).input(flags(condition));
    let y = run(&single(&[0, 1, 1]).attr("axis", Attr::Int(0)));
    assert_eq!((y.shape(), held(&y)), (&[2, 2][..], vec![2., 3., 4., 5.]));
    let y = run(&single(&[0, 1]).attr("axis", Attr::Int(-1)));
    assert_eq!((y.shape(), held(&y)), (&[3, 1][..], vec![1., 3., 5.]));
    assert_eq!(held(&run(&single(&[0, 1, 0, 0, 1]))), [1., 4.]);
    assert_eq!(run(&single(&[0; 9])).shape(), [0]);
    assert_eq!(run(&single(&[1; 9])).shape(), [6]);
    assert_eq!(fault(&single(&[1]).attr("axis", Attr::Int(2))), "attribute 'axis'");
}

#[test]
fn positions_that_are_not_zero() {
    for dtype in [DType::F32, DType::Bool, DType::I64] {
        let x = tensor(dtype, &[2, 2], &[1.0, 0.0, 1.0, 1.0]);
        let y = run(&Single::new("", "NonZero", 13, 1).input(x));
        assert_eq!((y.shape(), held(&y)), (&[2, 3][..], vec![0., 1., 1., 0., 0., 1.]));
    }
    let scalar = run(&Single::new("", "NonZero", 13, 1).input(tensor(DType::F32, &[], &[3.0])));
    assert_eq!((scalar.shape(), held(&scalar)), (&[1, 1][..], vec![0.0]));
}
