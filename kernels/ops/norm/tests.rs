use crate::eval::Single;
use crate::par::Par;
use crate::settings::Settings;
use crate::testing::{FLOATS, Numbers, assert_close, every_tier, values};
use abi::{Attr, DType, HostTensor};

/// Rows of `n` normalised in float64: (x - mean) / sqrt(var + epsilon), each row's mean and factor.
fn reference(x: &[f64], n: usize, centred: bool, epsilon: f64) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (mut y, mut means, mut factors) = (Vec::new(), Vec::new(), Vec::new());
    for row in x.chunks_exact(n) {
        let mean = if centred { row.iter().sum::<f64>() / n as f64 } else { 0.0 };
        let square = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        let factor = 1.0 / (square + epsilon).sqrt();
        y.extend(row.iter().map(|v| (v - mean) * factor));
        means.push(mean);
        factors.push(factor);
    }
    (y, means, factors)
}

/// `y[i] * scale[i % n] + bias[i % n]`
fn affine(y: &[f64], scale: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let at = |v: &[f64], i: usize| v[i % v.len()];
    let each = y.iter().enumerate();
    each.map(|(i, y)| y * at(scale, i) + bias.map_or(0.0, |b| at(b, i))).collect()
}

#[test]
fn layer_norms_of_every_type_and_width() {
    for n in [1, 3, 64, 130, 1024, 1537] {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            for (op, since) in [
                ("LayerNormalization", 17),
                ("LayerNormalization", 1),
                ("SimplifiedLayerNormalization", 1),
                ("RMSNormalization", 23),
            ] {
                let mut r = Numbers::new(n as u64);
                let x = r.tensor(dtype, &[2, 3, n]);
                let (scale, bias) = (r.tensor(dtype, &[n]), r.tensor(dtype, &[n]));
                let centred = op == "LayerNormalization";
                let (y, mean, factor) = reference(&values(&x), n, centred, f64::from(1e-5f32));
                let b = values(&bias);
                let y = affine(&y, &values(&scale), centred.then_some(&b[..]));
                for settings in every_tier() {
                    let outputs = if centred { 3 } else { 2 };
                    let mut node = Single::new("", op, since, outputs).input(x.clone()).constant(scale.clone());
                    if centred {
                        node = node.input(bias.clone());
                    }
                    let got = node.run(&settings, Par::serial()).expect("valid");
                    let what = format!("{op} {dtype} n={n} {:?}", settings.tier);
                    assert_close(&what, got[0].as_ref(), &y);
                    if centred {
                        assert_close(&what, got[1].as_ref(), &mean);
                    }
                    assert_close(&what, got[outputs - 1].as_ref(), &factor);
                }
            }
        }
    }
}

#[test]
fn scales_broadcast() {
    let mut r = Numbers::new(1);
    let x = r.tensor(DType::F32, &[2, 3, 8]);
    for axis in [0i64, 1, 2, -1, -2] {
        let first = if axis < 0 { (axis + 3) as usize } else { axis as usize };
        let n = [2, 3, 8][first..].iter().product();
        let (y, _, _) = reference(&values(&x), n, false, 1e-6);
        for shape in [&[8usize][..], &[3, 8], &[2, 3, 8], &[2, 1, 1], &[3, 1], &[1, 1, 8], &[1], &[]] {
            for dtype in [DType::F32, DType::F16] {
                let scale = r.tensor(dtype, shape);
                let s = values(&scale);
                let (lead, mut full) = (3 - shape.len(), Vec::new());
                for (index, y) in y.iter().enumerate() {
                    let at = [index / 24, index / 8 % 3, index % 8];
                    let flat = shape
                        .iter()
                        .enumerate()
                        .fold(0, |flat, (i, &d)| flat * d + if d == 1 { 0 } else { at[lead + i] });
                    full.push(y * s[flat]);
                }
                let node = Single::new("", "SimplifiedLayerNormalization", 1, 1)
                    .attr("axis", Attr::Int(axis))
                    .attr("epsilon", Attr::Float(1e-6))
                    .input(x.clone())
                    .input(scale);
                let got = node.run(&Settings::default(), Par::serial()).expect("valid");
                assert_close(&format!("axis {axis} {shape:?} {dtype}"), got[0].as_ref(), &full);
            }
        }
    }
}

#[test]
fn skip_norms() {
    for dtype in FLOATS {
        for (op, centred) in [("SkipSimplifiedLayerNormalization", false), ("SkipLayerNormalization", true)] {
            for (input, skip) in [
                (&[2usize, 3, 96][..], &[2usize, 3, 96][..]),
                (&[2, 3, 96], &[1, 3, 96]),
                (&[2, 3, 96], &[3, 96]),
                (&[5, 96], &[5, 96]),
                (&[2, 0, 96], &[2, 0, 96]),
            ] {
                let mut r = Numbers::new(2);
                let (x, s) = (r.tensor(dtype, input), r.tensor(dtype, skip));
                let [gamma, beta, bias] = [0; 3].map(|_| r.tensor(dtype, &[96]));
                let (xs, ss, bs) = (values(&x), values(&s), values(&bias));
                let sum: Vec<_> = (0..xs.len()).map(|i| xs[i] + ss[i % ss.len()] + bs[i % 96]).collect();
                let (y, mean, factor) = reference(&sum, 96, centred, 1e-6);
                let b = values(&beta);
                let y = affine(&y, &values(&gamma), centred.then_some(&b[..]));
                for settings in every_tier() {
                    let mut node = skip_node(op, &x, &s).constant(gamma.clone());
                    if centred {
                        node = node.constant(beta.clone());
                    }
                    let node = node.constant(bias.clone());
                    let got = node.run(&settings, Par::serial()).expect("valid");
                    let what = format!("{op} {dtype} {input:?} {skip:?} {:?}", settings.tier);
                    assert_close(&what, got[0].as_ref(), &y);
                    assert_close(&what, got[3].as_ref(), &sum);
                    if centred {
                        assert_close(&what, got[1].as_ref(), &mean);
                        assert_close(&what, got[2].as_ref(), &factor);
                    }
                }
            }
        }
    }
}

fn skip_node(op: &str, x: &HostTensor, skip: &HostTensor) -> Single {
    let node = Single::new("com.microsoft", op, 1, 4).attr("epsilon", Attr::Float(1e-6));
    let node = if op == "SkipLayerNormalization" { node } else { node.without_outputs(&[1, 2]) };
    node.input(x.clone()).input(skip.clone())
}

#[test]
fn gated_rms_norm() {
    for dtype in FLOATS {
        for (c, heads, tokens) in [(4, 2, 3), (128, 16, 2), (33, 3, 1), (8, 1, 0)] {
            for activation in ["silu", "swish", "sigmoid"] {
                let mut r = Numbers::new(5);
                let (x, gate) =
                    (r.tensor(dtype, &[2, tokens, heads * c]), r.between(dtype, &[2, tokens, heads * c], -20.0, 20.0));
                let scale = r.tensor(dtype, &[c]);
                let (y, _, _) = reference(&values(&x), c, false, 1e-6);
                let y = affine(&y, &values(&scale), None);
                let z = values(&gate);
                let factor = |z: f64| {
                    let sigmoid = 1.0 / (1.0 + (-z).exp());
                    if activation == "sigmoid" { sigmoid } else { z * sigmoid }
                };
                let y: Vec<_> = y.iter().zip(z).map(|(y, z)| y * factor(z)).collect();
                for settings in every_tier() {
                    let node = Single::new("com.microsoft", "GatedRMSNorm", 1, 1)
                        .attr("epsilon", Attr::Float(1e-6))
                        .attr("activation", Attr::String(activation.into()))
                        .input(x.clone())
                        .constant(scale.clone())
                        .input(gate.clone());
                    let got = node.run(&settings, Par::serial()).expect("valid");
                    assert_close(&format!("{activation} {dtype} C={c}"), got[0].as_ref(), &y);
                }
            }
        }
    }
}

#[test]
fn lp_norms_along_every_axis() {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        for (axis, p) in [(-1, 2), (2, 1), (1, 2), (0, 1), (-3, 2)] {
            let mut r = Numbers::new(6);
            let shape = [3usize, 4, 70];
            let mut x = values(&r.tensor(dtype, &shape));
            x[..70].fill(0.0); // a row of zeros stays so
            let x = crate::testing::tensor(dtype, &shape, &x);
            let v = values(&x);
            let along = if axis < 0 { axis + 3 } else { axis } as usize;
            let inner: usize = shape[along + 1..].iter().product();
            let want: Vec<_> = (0..v.len())
                .map(|i| {
                    let start = i / (inner * shape[along]) * inner * shape[along] + i % inner;
                    let each = (0..shape[along]).map(|j| v[start + j * inner]);
                    let norm = match p {
                        1 => each.map(f64::abs).sum(),
                        _ => each.map(|x| x * x).sum::<f64>().sqrt(),
                    };
                    if norm == 0.0 { 0.0 } else { v[i] / norm }
                })
                .collect();
            for settings in every_tier() {
                let node = Single::new("", "LpNormalization", 22, 1)
                    .attr("axis", Attr::Int(axis))
                    .attr("p", Attr::Int(p))
                    .input(x.clone());
                let got = node.run(&settings, Par::serial()).expect("valid");
                assert_close(&format!("axis {axis} p {p} {dtype}"), got[0].as_ref(), &want);
            }
        }
    }
}

#[test]
fn wrong_shapes_are_named() {
    let mut r = Numbers::new(8);
    let x = r.tensor(DType::F32, &[2, 3, 8]);
    let fail = |node: Single| {
        let error = node.run(&Settings::default(), Par::serial());
        error.expect_err("the node is invalid").to_string()
    };
    let scale = r.tensor(DType::F32, &[4, 1, 1, 8]);
    let node = Single::new("", "LayerNormalization", 17, 1).input(x.clone()).input(scale);
    assert!(fail(node).contains("input 1 (scale)"));
    let node = Single::new("", "LpNormalization", 22, 1).attr("axis", Attr::Int(3)).input(x.clone());
    assert!(fail(node).contains("attribute 'axis'"));
    let skip = r.tensor(DType::F32, &[2, 1, 8]);
    let gamma = r.tensor(DType::F32, &[8]);
    let node = skip_node("SkipSimplifiedLayerNormalization", &x, &skip).input(gamma);
    assert!(fail(node).contains("input 1 (skip), dim 1"));
    let node =
        Single::new("com.microsoft", "GatedRMSNorm", 1, 1).input(x.clone()).input(r.tensor(DType::F32, &[3])).input(x);
    assert!(fail(node).contains("input 0 (X), last dim"));
}
