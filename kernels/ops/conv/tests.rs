//! Against the definition in float64.

use crate::eval::Single;
use crate::ops::testing::{assert_close, fault, held, iota, run, tensor};
use abi::{Attr, DType, HostTensor};
use proptest::prelude::*;

struct Case {
    x: [usize; 4],
    /// Maps, then kernel height and width.
    w: [usize; 3],
    group: usize,
    strides: [usize; 2],
    dilations: [usize; 2],
    pads: [usize; 4],
}

fn reference(case: &Case, x: &[f64], w: &[f64], bias: &[f64]) -> (Vec<usize>, Vec<f64>) {
    let [n, c, h, width] = case.x;
    let [m, kh, kw] = case.w;
    let len = |d: usize, k, dim| {
        (dim + case.pads[d] + case.pads[d + 2] - (k - 1) * case.dilations[d] - 1) / case.strides[d] + 1
    };
    let (oh, ow, cg) = (len(0, kh, h), len(1, kw, width), c / case.group);
    let mut out = Vec::new();
    for (b, map, y, z) in (0..n * m * oh * ow).map(|i| (i / (m * oh * ow), i / (oh * ow) % m, i / ow % oh, i % ow)) {
        let mut sum = bias[map];
        for (ch, i, j) in (0..cg * kh * kw).map(|k| (k / (kh * kw), k / kw % kh, k % kw)) {
            let r = (y * case.strides[0] + i * case.dilations[0]).wrapping_sub(case.pads[0]);
            let s = (z * case.strides[1] + j * case.dilations[1]).wrapping_sub(case.pads[1]);
            if r < h && s < width {
                let channel = map / (m / case.group) * cg + ch;
                sum += x[((b * c + channel) * h + r) * width + s] * w[((map * cg + ch) * kh + i) * kw + j];
            }
        }
        out.push(sum);
    }
    (vec![n, m, oh, ow], out)
}

fn wave(dtype: DType, shape: &[usize], k: usize) -> HostTensor {
    let n: usize = shape.iter().product();
    tensor(dtype, shape, &(0..n).map(|i| (i * k % 17) as f64 / 8.0 - 1.0).collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn two_dims(n in 1usize..3, group in 1usize..4, cg in 1usize..3, mg in 1usize..3, hw in (3usize..7, prop::sample::select(vec![3usize, 9, 300])),
                k in (1usize..4, 1usize..4), strides in (1usize..3, 1usize..4), dilations in (1usize..3, 1usize..3),
                pads in (0usize..3, 0usize..3, 0usize..3, 0usize..3)) {
        let case = Case {
            x: [n, group * cg, hw.0, hw.1],
            w: [group * mg, k.0, k.1],
            group,
            strides: [strides.0, strides.1],
            dilations: [dilations.0, dilations.1],
            pads: [pads.0, pads.1, pads.2, pads.3],
        };
        prop_assume!(hw.0 + pads.0 + pads.2 > (k.0 - 1) * dilations.0 && hw.1 + pads.1 + pads.3 > (k.1 - 1) * dilations.1);
        let list = |v: &[usize]| Attr::Ints(v.iter().map(|&v| v as i64).collect());
        for dtype in [DType::F32, DType::F16, DType::F64] {
            let x = wave(dtype, &case.x, 5);
            let w = wave(dtype, &[case.w[0], cg, k.0, k.1], 7);
            let b = wave(dtype, &[case.w[0]], 3);
            let (shape, want) = reference(&case, &held(&x), &held(&w), &held(&b));
            let single = Single::new("", "Conv", 11, 1).attr("group", Attr::Int(group as i64)).attr("strides", list(&case.strides));
            let single = single.attr("dilations", list(&case.dilations)).attr("pads", list(&case.pads));
            let y = run(&single.input(x).input(w).input(b));
            prop_assert_eq!(y.shape(), &shape[..]);
            assert_close("Conv", &y, &want);
        }
    }
}

#[test]
fn one_dim_and_automatic_pads() {
    let conv = |auto: &str, stride| {
        let single = Single::new("", "Conv", 22, 1).attr("auto_pad", Attr::String(auto.into()));
        let single = single.attr("strides", Attr::Ints(vec![stride])).input(iota(DType::F32, &[1, 1, 5]));
        single.input(HostTensor::new(&[1, 1, 2], &[1f32, 1.0]))
    };
    assert_eq!(held(&run(&conv("VALID", 1))), [1., 3., 5., 7.]);
    assert_eq!(held(&run(&conv("SAME_UPPER", 1))), [1., 3., 5., 7., 4.]);
    assert_eq!(held(&run(&conv("SAME_LOWER", 1))), [0., 1., 3., 5., 7.]);
    assert_eq!(held(&run(&conv("SAME_UPPER", 2))), [1., 5., 4.]);
    assert_eq!(fault(&conv("VALID", 0)), "attribute 'strides'");
    let x = || iota(DType::F32, &[1, 2, 3]);
    let with = |w: HostTensor| Single::new("", "Conv", 11, 1).input(x()).input(w);
    assert_eq!(fault(&with(iota(DType::F32, &[1, 1, 2]))), "input 1 (W)");
    assert_eq!(fault(&with(iota(DType::F32, &[1, 2, 4]))), "input 0 (X)");
    assert_eq!(fault(&with(iota(DType::F32, &[1, 2]))), "input 1 (W)");
    let flat = Single::new("", "Conv", 11, 1).input(iota(DType::F32, &[1, 2])).input(iota(DType::F32, &[1, 2]));
    assert!(fault(&flat).contains("rank of 3 or more"));
}
