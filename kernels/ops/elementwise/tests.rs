//! Against float64 from the definitions, and exact for integers.

use crate::cpu::number::{Bool, Stored};
use crate::eval::Single;
use crate::ops::testing::{assert_close, held, run, tensor, tolerance};
use crate::par::Par;
use crate::settings::Settings;
use abi::{Attr, DType, Error, HostTensor};
use half::f16;

/// 300 numbers, enough for two blocks, some of them special.
fn numbers() -> Vec<f64> {
    let specials = [0.0, -0.0, 1.0, -1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 0.5, 1.5, 2.5, -2.5];
    let rest = (0..289).map(|i| ((i * 7919 % 289) as f64 - 144.0) / 24.0);
    specials.into_iter().chain(rest).collect()
}

#[test]
fn functions_of_one_tensor() {
    type F = fn(f64) -> f64;
    let functions: &[(&str, u32, F)] = &[
        ("Neg", 13, |x| -x),
        ("Abs", 13, f64::abs),
        ("Sign", 13, |x| if x == 0.0 || x.is_nan() { x } else { x.signum() }),
        ("Relu", 14, |x| if x < 0.0 { 0.0 } else { x }),
        ("Sqrt", 13, f64::sqrt),
        ("Reciprocal", 13, f64::recip),
        ("Floor", 13, f64::floor),
        ("Ceil", 13, f64::ceil),
        ("Round", 22, f64::round_ties_even),
        ("Exp", 13, f64::exp),
        ("Log", 13, f64::ln),
        ("Tanh", 13, f64::tanh),
        ("Sigmoid", 13, |x| 1.0 / (1.0 + (-x).exp())),
        ("Softplus", 22, |x| if x == f64::INFINITY { x } else { x.exp().ln_1p() }),
        ("Softsign", 22, |x| x / (1.0 + x.abs())),
        ("Sin", 22, f64::sin),
        ("Cos", 22, f64::cos),
        ("Atan", 22, f64::atan),
        ("HardSigmoid", 22, |x| (0.2 * x + 0.5).clamp(0.0, 1.0)),
        ("HardSwish", 22, |x| x * (x / 6.0 + 0.5).clamp(0.0, 1.0)),
        ("LeakyRelu", 16, |x| if x < 0.0 { 0.01 * x } else { x }),
        ("Elu", 22, |x| if x < 0.0 { x.exp_m1() } else { x }),
        ("Swish", 24, |x| x / (1.0 + (-x).exp())),
        ("Mish", 22, |x| x * x.exp().ln_1p().tanh()),
    ];
    for &(name, since, f) in functions {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            // Products of infinity and 0 follow the formula, not the limit.
            let finite = !matches!(name, "Softsign" | "HardSwish" | "Swish" | "Mish");
            let values = numbers().into_iter().filter(|v| finite || v.is_finite()).collect::<Vec<_>>();
            let x = tensor(dtype, &[values.len()], &values);
            let want: Vec<f64> = held(&x).into_iter().map(f).collect();
            let out = run(&Single::new("", name, since, 1).input(x));
            assert_close(name, &out, &want);
        }
    }
}

#[test]
fn gelu_in_both_forms_and_domains() {
    let x = tensor(DType::F32, &[5], &[-3.0, -0.5, 0.0, 1.0, 4.0]);
    // Python's math.erf and math.tanh.
    let exact = [-0.004_049_694_094_675_2, -0.154_268_769_363_893_3, 0.0, 0.841_344_746_068_543, 3.999_873_315_007_29];
    let tanh = [-0.003_637_392_081_773, -0.154_285_988_013_79, 0.0, 0.841_191_990_607_477, 3.999_929_753_807_23];
    for (domain, since) in [("", 20), ("com.microsoft", 1)] {
        let out = run(&Single::new(domain, "Gelu", since, 1).input(x.clone()));
        assert_close("Gelu", &out, &exact);
    }
    let single = Single::new("", "Gelu", 20, 1).attr("approximate", Attr::String("tanh".into()));
    assert_close("Gelu tanh", &run(&single.input(x)), &tanh);
}

/// Index of the broadcast operand element behind element `i` of a row-major `out`.
fn source(i: usize, shape: &[usize], out: &[usize]) -> usize {
    let (mut rest, mut stride, mut at) = (i, 1, 0);
    for (back, &dim) in out.iter().rev().enumerate() {
        let index = rest % dim;
        rest /= dim;
        if let Some(own) = shape.len().checked_sub(back + 1).map(|j| shape[j]) {
            at += stride * if own == 1 { 0 } else { index };
            stride *= own;
        }
    }
    at
}

#[test]
fn functions_of_two_tensors_broadcast() {
    type F = fn(f64, f64) -> f64;
    let functions: &[(&str, u32, F)] = &[
        ("Add", 14, |a, b| a + b),
        ("Sub", 14, |a, b| a - b),
        ("Mul", 14, |a, b| a * b),
        ("Div", 14, |a, b| a / b),
        ("PRelu", 16, |a, b| if a < 0.0 { a * b } else { a }),
        ("Max", 13, f64::max),
        ("Min", 13, f64::min),
        ("Equal", 19, |a, b| (a == b) as u8 as f64),
        ("Less", 13, |a, b| (a < b) as u8 as f64),
        ("LessOrEqual", 16, |a, b| (a <= b) as u8 as f64),
        ("Greater", 13, |a, b| (a > b) as u8 as f64),
        ("GreaterOrEqual", 16, |a, b| (a >= b) as u8 as f64),
    ];
    type Shapes = (&'static [usize], &'static [usize], &'static [usize]);
    let shapes: &[Shapes] = &[
        (&[2, 300], &[2, 300], &[2, 300]),
        (&[3, 1, 5], &[4, 1], &[3, 4, 5]),
        (&[], &[7], &[7]),
        (&[600], &[1, 1], &[1, 600]),
        (&[3, 130], &[130], &[3, 130]),
        (&[3, 130], &[3, 1], &[3, 130]),
        (&[0, 2], &[1, 2], &[0, 2]),
        (&[], &[], &[]),
    ];
    for &(name, since, f) in functions {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64, DType::I32, DType::I64, DType::I8, DType::U8] {
            for &(a_shape, b_shape, out_shape) in shapes {
                let fill = |shape: &[usize], k: usize| -> Vec<f64> {
                    let n = shape.iter().product();
                    (0..n).map(|i| ((i * k) % 11) as f64 + 1.0).collect()
                };
                let a = tensor(dtype, a_shape, &fill(a_shape, 7));
                let b = tensor(dtype, b_shape, &fill(b_shape, 5));
                let (av, bv) = (held(&a), held(&b));
                let n: usize = out_shape.iter().product();
                let mut want: Vec<f64> =
                    (0..n).map(|i| f(av[source(i, a_shape, out_shape)], bv[source(i, b_shape, out_shape)])).collect();
                if tolerance(dtype) == 0.0 {
                    want.iter_mut().for_each(|v| *v = v.trunc());
                    if dtype == DType::U8 {
                        want.iter_mut().for_each(|v| *v = v.rem_euclid(256.0));
                    }
                }
                let out = run(&Single::new("", name, since, 1).input(a).input(b));
                assert_eq!(out.shape(), out_shape, "{name}");
                assert_close(name, &out, &want);
            }
        }
    }
}

#[test]
fn integers_wrap_and_refuse_zero_divisors() {
    let run2 = |name: &str, a: i32, b: i32| {
        let single = Single::new("", name, 14, 1).input(HostTensor::new(&[], &[a]));
        single.input(HostTensor::new(&[1], &[b])).run(&Settings::default(), Par::serial())
    };
    let value = |name: &str, a, b| run2(name, a, b).unwrap()[0].clone().unwrap().as_slice::<i32>().unwrap()[0];
    assert_eq!(value("Add", i32::MAX, 1), i32::MIN);
    assert_eq!(value("Div", i32::MIN, -1), i32::MIN);
    assert_eq!(value("Div", -7, 2), -3);
    assert!(matches!(run2("Div", 1, 0), Err(Error::Node { slot, .. }) if slot == "input 1 (B)"));
}

#[test]
fn modulo_and_shifts() {
    let two = |single: Single, a: &[i64], b: &[i64]| {
        let single = single.input(HostTensor::new(&[a.len()], a)).input(HostTensor::new(&[b.len()], b));
        run(&single).as_slice::<i64>().unwrap().to_vec()
    };
    let (a, b) = ([-4, 7, 5, 4, -7, 8], [2, -3, 8, -2, 3, 5]);
    assert_eq!(two(Single::new("", "Mod", 13, 1), &a, &b), [0, -2, 5, 0, 2, 3]);
    let fmod = Single::new("", "Mod", 13, 1).attr("fmod", Attr::Int(1));
    assert_eq!(two(fmod, &a, &b), [0, 1, 5, 0, -1, 3]);
    let shift = |direction: &str| Single::new("", "BitShift", 28, 1).attr("direction", Attr::String(direction.into()));
    assert_eq!(two(shift("LEFT"), &[1, 3, 5], &[1, 2, 64]), [2, 12, 0]);
    assert_eq!(two(shift("RIGHT"), &[16, -16, -1], &[1, 2, 64]), [8, -4, -1]);
}

#[test]
fn powers_of_mixed_types() {
    let pow = |x: HostTensor, y: HostTensor| held(&run(&Single::new("", "Pow", 15, 1).input(x).input(y)));
    let f = |v: &[f32]| HostTensor::new(&[v.len()], v);
    assert_eq!(pow(f(&[1.5, -2.0, 4.0]), f(&[2.0, 3.0, 0.5])), [2.25, -8.0, 2.0]);
    assert_eq!(pow(f(&[1.5, -2.0]), HostTensor::new(&[], &[2i64])), [2.25, 4.0]);
    assert_eq!(pow(HostTensor::new(&[2], &[3i32, -3]), HostTensor::new(&[2], &[4i64, 3])), [81.0, -27.0]);
    assert_eq!(pow(HostTensor::new(&[2], &[4i64, 2]), f(&[0.5, -1.0])), [2.0, 0.0]);
}

#[test]
fn logic_where_clip_and_tests_of_floats() {
    let b = |v: &[u8]| HostTensor::new(&[v.len()], &v.iter().map(|&v| Bool(v)).collect::<Vec<_>>());
    let logic = |name| held(&run(&Single::new("", name, 7, 1).input(b(&[0, 0, 1, 255])).input(b(&[0, 1, 0, 1]))));
    assert_eq!(logic("And"), [0.0, 0.0, 0.0, 1.0]);
    assert_eq!(logic("Or"), [0.0, 1.0, 1.0, 1.0]);
    assert_eq!(logic("Xor"), [0.0, 1.0, 1.0, 0.0]);
    assert_eq!(held(&run(&Single::new("", "Not", 1, 1).input(b(&[0, 3])))), [1.0, 0.0]);

    let x = HostTensor::new(&[2, 1], &[1i64, 2]);
    let chosen = run(&Single::new("", "Where", 16, 1).input(b(&[1, 0])).input(x).input(HostTensor::new(&[], &[9i64])));
    assert_eq!((chosen.shape(), held(&chosen)), (&[2usize, 2][..], vec![1.0, 9.0, 2.0, 9.0]));

    let x = HostTensor::new(&[4], &[-2f32, 0.5, f32::INFINITY, f32::NAN]);
    let clip = Single::new("", "Clip", 13, 1).input(x.clone()).absent().input(HostTensor::new(&[], &[1f32]));
    assert_close("Clip", &run(&clip), &[-2.0, 0.5, 1.0, f64::NAN]);
    let clip = Single::new("", "Clip", 6, 1).attr("min", Attr::Float(0.0)).input(x.clone());
    assert_close("Clip", &run(&clip), &[0.0, 0.5, f64::INFINITY, f64::NAN]);
    assert_eq!(held(&run(&Single::new("", "IsNaN", 20, 1).input(x.clone()))), [0.0, 0.0, 0.0, 1.0]);
    let inf = Single::new("", "IsInf", 20, 1).attr("detect_positive", Attr::Int(0));
    assert_eq!(held(&run(&inf.input(x.clone()))), [0.0; 4]);
    assert_eq!(held(&run(&Single::new("", "IsInf", 20, 1).input(x))), [0.0, 0.0, 1.0, 0.0]);
}

#[test]
fn variadic_round_once() {
    // 2048 + 1 + 1 in float16 is 2050; rounding between the two would leave 2048.
    let h = |v: f64| HostTensor::new(&[1], &[f16::store(v as f32)]);
    let sum = Single::new("", "Sum", 13, 1).input(h(2048.0)).input(h(1.0)).input(h(1.0));
    assert_eq!(held(&run(&sum)), [2050.0]);
    let mean = Single::new("", "Mean", 13, 1).input(h(1.0)).input(h(2.0)).input(h(6.0));
    assert_eq!(held(&run(&mean)), [3.0]);
    let nan = HostTensor::new(&[2], &[f32::NAN, 1.0]);
    let max = Single::new("", "Max", 13, 1).input(HostTensor::new(&[1], &[0f32])).input(nan);
    assert_close("Max", &run(&max), &[f64::NAN, 1.0]);
}

#[test]
fn shapes_that_do_not_broadcast_are_named() {
    let single = Single::new("", "Add", 14, 1).input(HostTensor::new(&[2], &[1f32, 2.0]));
    let single = single.input(HostTensor::new(&[3], &[1f32; 3]));
    let error = single.run(&Settings::default(), Par::serial()).unwrap_err();
    assert!(matches!(error, Error::Node { slot, .. } if slot == "inputs"));
}

#[test]
fn swiglu_gates_by_its_first_input() {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let (a, b) = (tensor(dtype, &[2, 2], &[-1.0, 0.5, 2.0, 30.0]), tensor(dtype, &[2, 2], &[1.0, 2.0, -3.0, 0.5]));
        let alpha = f64::from(1.702f32);
        let want: Vec<f64> = held(&a).iter().zip(held(&b)).map(|(a, b)| a / (1.0 + (-alpha * a).exp()) * b).collect();
        let single = Single::new("", "SwiGLU", 28, 1).attr("alpha", Attr::Float(1.702));
        assert_close("SwiGLU", &run(&single.input(a).input(b)), &want);
    }
    let shapes = Single::new("", "SwiGLU", 28, 1).input(tensor(DType::F32, &[1], &[0.0]));
    let error = shapes.input(tensor(DType::F32, &[2], &[0.0; 2])).run(&Settings::default(), Par::serial());
    assert!(matches!(error, Err(Error::Node { slot, .. }) if slot == "input 1 (B)"));
}
