//! Against a stable sort.

use crate::eval::Single;
use crate::ops::testing::{fault, held, ints, iota, tensor};
use crate::par::Par;
use crate::settings::Settings;
use abi::{Attr, DType, HostTensor};

fn top_k(single: &Single) -> [HostTensor; 2] {
    let outputs = single.run(&Settings::default(), Par::serial()).unwrap();
    [0, 1].map(|i| outputs[i].clone().unwrap())
}

#[test]
fn equals_come_in_order() {
    let values: Vec<f64> = (0..60).map(|i| f64::from(i * 7 % 13)).collect();
    for dtype in [DType::F32, DType::F16, DType::I64, DType::I8] {
        for largest in [0, 1] {
            for (axis, outer, n, inner) in [(-1, 12, 5, 1), (1, 3, 4, 5)] {
                let x = tensor(dtype, &[3, 4, 5], &values);
                let single =
                    Single::new("", "TopK", 11, 2).attr("axis", Attr::Int(axis)).attr("largest", Attr::Int(largest));
                let [got, at] = top_k(&single.input(x).input(ints(&[3])));
                for o in 0..outer {
                    for i in 0..inner {
                        let x = |k: usize| values[(o * n + k) * inner + i];
                        let mut order: Vec<usize> = (0..n).collect();
                        order
                            .sort_by(|&a, &b| if largest == 1 { x(b).total_cmp(&x(a)) } else { x(a).total_cmp(&x(b)) });
                        for (k, &from) in order[..3].iter().enumerate() {
                            let out = (o * 3 + k) * inner + i;
                            assert_eq!((held(&got)[out], held(&at)[out]), (x(from), from as f64));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn k_of_none_all_and_too_many() {
    let x = || iota(DType::F32, &[4]);
    let single = |k: &[i64]| Single::new("", "TopK", 24, 2).input(x()).input(ints(k));
    assert_eq!(top_k(&single(&[0]))[0].shape(), [0]);
    assert_eq!(held(&top_k(&single(&[4]))[1]), [3.0, 2.0, 1.0, 0.0]);
    for k in [&[5][..], &[-1], &[1, 2]] {
        assert_eq!(fault(&single(k)), "K");
    }
    let nan = tensor(DType::F32, &[3], &[1.0, f64::NAN, 2.0]);
    assert_eq!(held(&top_k(&Single::new("", "TopK", 11, 2).input(nan).input(ints(&[2])))[1]), [1.0, 2.0]);
    assert_eq!(held(&top_k(&Single::new("", "TopK", 1, 2).attr("k", Attr::Int(1)).input(x()))[1]), [3.0]);
}
