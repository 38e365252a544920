//! Against the definition, for every diagonal.

use crate::eval::Single;
use crate::ops::testing::{fault, held, iota, run};
use abi::{Attr, DType, HostTensor};

#[test]
fn every_diagonal() {
    for dtype in [DType::F32, DType::U8, DType::I64, DType::F16] {
        for upper in [0, 1] {
            for k in [-5, -2, -1, 0, 1, 2, 5, i64::MAX, i64::MIN] {
                let x = iota(dtype, &[2, 3, 4]);
                let single = Single::new("", "Trilu", 14, 1).attr("upper", Attr::Int(upper)).input(x.clone());
                let y = held(&run(&single.input(HostTensor::new(&[], &[k]))));
                for (i, (y, x)) in y.iter().zip(held(&x)).enumerate() {
                    let (row, column) = ((i / 4 % 3) as i128, (i % 4) as i128);
                    let above = column - row - i128::from(k);
                    let kept = if upper == 1 { above >= 0 } else { above <= 0 };
                    assert_eq!(*y, if kept { x } else { 0.0 });
                }
            }
        }
    }
    assert_eq!(fault(&Single::new("", "Trilu", 14, 1).input(iota(DType::F32, &[3]))), "input 0 (input)");
}
