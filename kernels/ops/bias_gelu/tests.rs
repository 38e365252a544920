use crate::cpu::arithmetic::erf_f64;
use crate::eval::Single;
use crate::par::Par;
use crate::settings::Settings;
use crate::testing::{FLOATS, Numbers, assert_close, values};
use abi::DType;

#[test]
fn both_forms_with_and_without_bias() {
    for dtype in FLOATS {
        for (op, has_bias) in [("BiasGelu", true), ("FastGelu", true), ("FastGelu", false)] {
            let mut r = Numbers::new(12);
            let (x, bias) = (r.between(dtype, &[3, 70], -6.0, 6.0), r.tensor(dtype, &[70]));
            let b = values(&bias);
            let want: Vec<_> = values(&x)
                .iter()
                .enumerate()
                .map(|(i, x)| {
                    let x = x + if has_bias { b[i % 70] } else { 0.0 };
                    let factor = match op {
                        "BiasGelu" => erf_f64(x * std::f64::consts::FRAC_1_SQRT_2),
                        _ => (0.797885 * x + 0.035677 * x.powi(3)).tanh(),
                    };
                    0.5 * x * (1.0 + factor)
                })
                .collect();
            let mut node = Single::new("com.microsoft", op, 1, 1).input(x);
            if has_bias {
                node = node.input(bias);
            }
            let got = node.run(&Settings::default(), Par::serial()).expect("valid");
            assert_close(&format!("{op} {dtype}"), got[0].as_ref(), &want);
        }
    }
}

#[test]
fn the_bias_is_a_row() {
    let mut r = Numbers::new(13);
    let node = Single::new("com.microsoft", "BiasGelu", 1, 1)
        .input(r.tensor(DType::F32, &[2, 8]))
        .input(r.tensor(DType::F32, &[7]));
    let error = node.run(&Settings::default(), Par::serial());
    let message = error.expect_err("7 biases for rows of 8").to_string();
    assert!(message.contains("input 1 (bias), dim 0"), "{message}");
}
