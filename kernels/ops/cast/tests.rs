//! Every pair of types, and floats that do not fit.

use crate::cpu::number::ANY;
use crate::eval::Single;
use crate::ops::testing::{assert_close, fault, held, run, tensor};
use abi::{Attr, DType, HostTensor};

/// TensorProto.DataType of a type.
fn code(dtype: DType) -> Attr {
    Attr::Int((1..30).find(|&c| DType::from_onnx(c) == Some(dtype)).unwrap().into())
}

fn cast(x: HostTensor, to: DType) -> HostTensor {
    run(&Single::new("", "Cast", 19, 1).attr("to", code(to)).input(x))
}

#[test]
fn every_pair_of_types() {
    let values: Vec<f64> = (0..300).map(|i| f64::from(i % 100)).collect();
    for &from in ANY {
        let x = tensor(from, &[300], &values);
        let held = held(&x);
        for &to in ANY {
            let want: Vec<f64> =
                held.iter().map(|&v| if to == DType::Bool { (v != 0.0) as u8 as f64 } else { v }).collect();
            let y = cast(x.clone(), to);
            assert_eq!(y.dtype(), to);
            assert_close("Cast", &y, &want);
            let like = Single::new("", "CastLike", 19, 1).input(x.clone()).input(tensor(to, &[1], &[0.0]));
            assert_eq!(run(&like).bytes(), y.bytes());
        }
    }
}

/// What ORT 1.32's CPU EP gave on x86-64 for these casts.
#[test]
fn floats_that_integers_do_not_hold() {
    let x = HostTensor::new(&[6], &[-1.5f32, 300.0, 3e9, 1e20, f32::NAN, f32::NEG_INFINITY]);
    let low = f64::from(i32::MIN);
    assert_eq!(held(&cast(x.clone(), DType::I32)), [-1.0, 300.0, low, low, low, low]);
    let lowest = i64::MIN as f64;
    assert_eq!(held(&cast(x.clone(), DType::I64)), [-1.0, 300.0, 3e9, lowest, lowest, lowest]);
    assert_eq!(held(&cast(x.clone(), DType::U8))[..2], [255.0, 44.0]);
    assert_eq!(held(&cast(x, DType::Bool)), [1.0; 6]);
    let x = HostTensor::new(&[2], &[-1i32, 70_000]);
    assert_eq!(held(&cast(x.clone(), DType::U16)), [65_535.0, 4464.0]);
    assert_eq!(held(&cast(x, DType::F16)), [-1.0, f64::INFINITY]);
}

#[test]
fn other_types_are_declined_by_name() {
    let x = || HostTensor::new(&[1], &[1f32]);
    let to = |dtype| Single::new("", "Cast", 19, 1).attr("to", code(dtype)).input(x());
    assert!(fault(&to(DType::F8E4M3FN)).contains("float8e4m3fn"));
    assert!(fault(&to(DType::String)).contains("string"));
    let unknown = Single::new("", "Cast", 19, 1).attr("to", Attr::Int(99)).input(x());
    assert!(fault(&unknown).contains("attribute 'to'"));
}
