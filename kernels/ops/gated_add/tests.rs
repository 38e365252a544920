use crate::eval::Single;
use crate::par::Par;
use crate::settings::Settings;
use crate::testing::{FLOATS, Numbers, assert_close, values};
use abi::DType;

#[test]
fn rows_have_one_gate_each() {
    for dtype in FLOATS {
        for tokens in [0, 1, 3] {
            let mut r = Numbers::new(9);
            let [x, y] = [0; 2].map(|_| r.tensor(dtype, &[2, tokens, 70]));
            let gate = r.between(dtype, &[2, tokens, 1], 0.0, 1.0);
            let (xs, ys, gs) = (values(&x), values(&y), values(&gate));
            let want: Vec<_> = (0..xs.len()).map(|i| xs[i] + ys[i] * gs[i / 70]).collect();
            let node = Single::new("com.microsoft", "GatedAdd", 1, 1).input(x).input(y).input(gate);
            let got = node.run(&Settings::default(), Par::serial()).expect("valid");
            assert_close(&format!("{dtype}"), got[0].as_ref(), &want);
        }
    }
}

#[test]
fn gates_do_not_broadcast() {
    let mut r = Numbers::new(9);
    let node = Single::new("com.microsoft", "GatedAdd", 1, 1)
        .input(r.tensor(DType::F32, &[2, 3, 8]))
        .input(r.tensor(DType::F32, &[2, 3, 8]))
        .input(r.tensor(DType::F32, &[2, 1, 1]));
    let error = node.run(&Settings::default(), Par::serial());
    let message = error.expect_err("one gate for three rows").to_string();
    assert!(message.contains("input 2 (gate), dim 1"), "{message}");
}
