use crate::eval::Single;
use crate::par::Par;
use crate::settings::Settings;
use crate::testing::{FLOATS, Numbers, assert_close, values};
use abi::DType;

#[test]
fn decay_and_beta() {
    for dtype in FLOATS {
        for tokens in [0, 1, 3] {
            let mut n = Numbers::new(3);
            let a = n.between(dtype, &[2, tokens, 4], -30.0, 30.0);
            let (bias, scale) = (n.tensor(DType::F32, &[4]), n.between(DType::F32, &[4], -2.0, 0.0));
            let b = n.tensor(dtype, &[2, tokens, 4]);
            let (bs, ss) = (values(&bias), values(&scale));
            let decay: Vec<_> =
                values(&a).iter().enumerate().map(|(i, a)| ss[i % 4] * (a + bs[i % 4]).exp().ln_1p()).collect();
            let beta: Vec<_> = values(&b).iter().map(|b| 1.0 / (1.0 + (-b).exp())).collect();
            let node = Single::new("com.microsoft", "LinearAttentionGate", 1, 2)
                .input(a)
                .constant(bias)
                .constant(scale)
                .input(b);
            let got = node.run(&Settings::default(), Par::serial()).expect("valid");
            assert_close("decay", got[0].as_ref(), &decay);
            assert_close("beta", got[1].as_ref(), &beta);
        }
    }
}

#[test]
fn heads_must_agree() {
    let mut n = Numbers::new(4);
    let node = Single::new("com.microsoft", "LinearAttentionGate", 1, 1)
        .input(n.tensor(DType::F32, &[1, 1, 4]))
        .input(n.tensor(DType::F32, &[3]))
        .input(n.tensor(DType::F32, &[4]));
    let error = node.run(&Settings::default(), Par::serial());
    let message = error.expect_err("3 biases for 4 heads").to_string();
    assert!(message.contains("input 1 (dt_bias), dim 0"), "{message}");
}
