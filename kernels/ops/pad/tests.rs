//! Against numpy.pad's results, and index arithmetic for crops.

use crate::eval::Single;
use crate::ops::testing::{fault, held, ints, iota, run};
use abi::{Attr, DType, HostTensor};

fn pad(mode: &str, shape: &[usize], pads: &[i64]) -> Single {
    let single = Single::new("", "Pad", 19, 1).attr("mode", Attr::String(mode.into()));
    single.input(iota(DType::F32, shape)).input(ints(pads))
}

#[test]
fn modes_in_one_dim() {
    let row = |mode, pads: &[i64]| held(&run(&pad(mode, &[3], pads)));
    assert_eq!(row("constant", &[1, 2]), [0., 0., 1., 2., 0., 0.]);
    assert_eq!(row("edge", &[2, 1]), [0., 0., 0., 1., 2., 2.]);
    // numpy.pad(range(3), (3, 3), mode) for reflect and wrap
    assert_eq!(row("reflect", &[3, 3]), [1., 2., 1., 0., 1., 2., 1., 0., 1.]);
    assert_eq!(row("wrap", &[4, 2]), [2., 0., 1., 2., 0., 1., 2., 0., 1.]);
    assert_eq!(row("constant", &[-1, 1]), [1., 2., 0.]);
    assert_eq!(row("edge", &[-1, -1]), [1.]);
    assert_eq!(row("constant", &[-2, -1]), [0.0; 0]);
    assert_eq!(fault(&pad("constant", &[3], &[-2, -2])), "pads");
    assert_eq!(fault(&pad("edge", &[0], &[1, 0])), "pads");
    assert_eq!(fault(&pad("constant", &[3], &[1])), "pads");
    assert_eq!(row("constant", &[0, 0]), [0., 1., 2.]);
}

#[test]
fn two_dims_axes_and_values() {
    let y = run(&pad("edge", &[2, 2], &[1, 0, 0, 1]));
    assert_eq!((y.shape(), held(&y)), (&[3, 3][..], vec![0., 1., 1., 0., 1., 1., 2., 3., 3.]));
    let value = pad("constant", &[2, 2], &[1, 0]).input(HostTensor::new(&[], &[9f32])).input(ints(&[-1]));
    assert_eq!(held(&run(&value)), [9., 0., 1., 9., 2., 3.]);
    let old = Single::new("", "Pad", 2, 1).attr("pads", Attr::Ints(vec![0, 1])).attr("value", Attr::Float(5.0));
    assert_eq!(held(&run(&old.input(iota(DType::F16, &[2])))), [0., 1., 5.]);
    let scalar = Single::new("", "Pad", 19, 1).input(iota(DType::F32, &[])).input(ints(&[]));
    assert_eq!(held(&run(&scalar)), [0.0]);
}
