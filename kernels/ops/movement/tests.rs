//! Against index arithmetic from the definitions.

use crate::eval::Single;
use crate::ops::testing::{fault, held, ints, iota, run};
use crate::par::Par;
use crate::settings::Settings;
use abi::{Attr, DType, HostTensor};
use proptest::prelude::*;

const TYPES: [DType; 4] = [DType::F32, DType::F16, DType::U8, DType::I64];

/// Element `at` of a row-major tensor.
fn get(values: &[f64], shape: &[usize], at: &[usize]) -> f64 {
    values[at.iter().zip(shape).fold(0, |i, (a, d)| i * d + a)]
}

/// Every index of a shape, in order.
fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![Vec::new()], |all, &dim| {
        let longer = |at: &Vec<usize>, i| [at.as_slice(), &[i]].concat();
        all.iter().flat_map(|at| (0..dim).map(move |i| longer(at, i))).collect()
    })
}

fn outputs(single: &Single) -> Vec<HostTensor> {
    let outputs = single.run(&Settings::default(), Par::serial()).unwrap();
    outputs.into_iter().map(|o| o.unwrap()).collect()
}

proptest! {
    #[test]
    fn transpose((shape, perm) in prop::collection::vec(0usize..5, 0..5).prop_flat_map(|s| {
        let axes: Vec<i64> = (0..s.len() as i64).collect();
        (Just(s), Just(axes).prop_shuffle())
    })) {
        for dtype in TYPES {
            let x = iota(dtype, &shape);
            let y = run(&Single::new("", "Transpose", 13, 1).attr("perm", Attr::Ints(perm.clone())).input(x.clone()));
            let out: Vec<usize> = perm.iter().map(|&p| shape[p as usize]).collect();
            prop_assert_eq!(y.shape(), &out[..]);
            let want: Vec<f64> = indices(&out).iter().map(|at| {
                let mut from = vec![0; shape.len()];
                perm.iter().zip(at).for_each(|(&p, &a)| from[p as usize] = a);
                get(&held(&x), &shape, &from)
            }).collect();
            prop_assert_eq!(held(&y), want);
        }
    }

    /// The definition's clamps; unlike Python's, a start before the first element is the first for negative steps.
    #[test]
    fn slice(dim in 0usize..7, start in -9i64..9, end in -9i64..9, step in prop::sample::select(vec![-3i64, -2, -1, 1, 2, 5, i64::MIN, i64::MAX])) {
        let x = iota(DType::I64, &[2, dim]);
        let single = Single::new("", "Slice", 13, 1).input(x).input(ints(&[start])).input(ints(&[end]));
        let y = run(&single.input(ints(&[-1])).input(ints(&[step])));
        let n = dim as i64;
        let wrap = |v: i64| if v < 0 { v + n } else { v };
        let mut row = Vec::new();
        if step > 0 {
            let (mut i, end) = (wrap(start).max(0), wrap(end).min(n));
            while i < end { row.push(i); i = i.saturating_add(step); }
        } else {
            let (mut i, end) = (wrap(start).min(n - 1).max(0), wrap(end).max(-1));
            while i > end && (0..n).contains(&i) { row.push(i); i = i.saturating_add(step); }
        }
        let want: Vec<f64> = row.iter().chain(&row).enumerate().map(|(k, &i)| (i + if k < row.len() { 0 } else { n }) as f64).collect();
        prop_assert_eq!(y.shape(), &[2, row.len()]);
        prop_assert_eq!(held(&y), want);
    }

    #[test]
    fn split_undoes_concat(lens in prop::collection::vec(0usize..5, 1..4), outer in 0usize..4, inner in 0usize..4) {
        let parts: Vec<HostTensor> = lens.iter().map(|&n| iota(DType::F16, &[outer, n, inner])).collect();
        let mut concat = Single::new("", "Concat", 13, 1).attr("axis", Attr::Int(-2));
        for part in &parts {
            concat = concat.input(part.clone());
        }
        let whole = run(&concat);
        prop_assert_eq!(whole.shape(), &[outer, lens.iter().sum(), inner]);
        let sizes: Vec<i64> = lens.iter().map(|&n| n as i64).collect();
        let split = Single::new("", "Split", 18, lens.len()).attr("axis", Attr::Int(1)).input(whole.clone());
        let back = outputs(&split.input(ints(&sizes)));
        let old = Single::new("", "Split", 11, lens.len()).attr("axis", Attr::Int(1)).attr("split", Attr::Ints(sizes));
        for ((part, a), b) in parts.iter().zip(&back).zip(&outputs(&old.input(whole))) {
            prop_assert_eq!((part.shape(), part.bytes()), (a.shape(), a.bytes()));
            prop_assert_eq!(part.bytes(), b.bytes());
        }
    }
}

#[test]
fn large_copies_are_cut_into_tasks() {
    let x = iota(DType::F32, &[2, 70_000]);
    let y = run(&Single::new("", "Concat", 13, 1).attr("axis", Attr::Int(1)).input(x.clone()).input(x.clone()));
    let v = held(&x);
    let want = [&v[..70_000], &v[..70_000], &v[70_000..], &v[70_000..]].concat();
    assert_eq!(held(&y), want);
}

#[test]
fn transpose_of_large_matrices() {
    for dtype in TYPES {
        let x = iota(dtype, &[3, 130, 70]);
        let perm = Attr::Ints(vec![0, 2, 1]);
        let y = held(&run(&Single::new("", "Transpose", 13, 1).attr("perm", perm).input(x.clone())));
        let x = held(&x);
        for (i, v) in y.iter().enumerate() {
            let (b, c, r) = (i / 9100, i % 9100 / 130, i % 130);
            assert_eq!(*v, x[b * 9100 + r * 70 + c]);
        }
    }
}

#[test]
fn expand_and_tile() {
    let expand = |shape: &[i64]| Single::new("", "Expand", 13, 1).input(iota(DType::I64, &[2, 1])).input(ints(shape));
    let y = run(&expand(&[2, 1, 3]));
    assert_eq!((y.shape(), held(&y)), (&[2, 2, 3][..], [[0.0; 3], [1.0; 3], [0.0; 3], [1.0; 3]].concat()));
    assert_eq!(run(&expand(&[1])).shape(), [2, 1]);
    assert_eq!(run(&expand(&[0])).shape(), [2, 0]);
    assert_eq!(fault(&expand(&[3, 3])), "input 1 (shape)");
    assert_eq!(fault(&expand(&[-1, 3])), "input 1");
    let tile = |repeats: &[i64]| Single::new("", "Tile", 13, 1).input(iota(DType::U8, &[2, 2])).input(ints(repeats));
    let y = run(&tile(&[2, 2]));
    assert_eq!(
        (y.shape(), held(&y)),
        (&[4, 4][..], [0., 1., 0., 1., 2., 3., 2., 3., 0., 1., 0., 1., 2., 3., 2., 3.].to_vec())
    );
    assert_eq!(run(&tile(&[0, 3])).shape(), [0, 6]);
    assert_eq!(fault(&tile(&[2])), "input 1 (repeats)");
}

#[test]
fn uneven_splits_are_of_opset_18() {
    let split = |since, n| Single::new("", "Split", since, n).input(iota(DType::F32, &[7]));
    let shapes: Vec<_> =
        outputs(&split(18, 4).attr("num_outputs", Attr::Int(4))).iter().map(|t| t.shape().to_vec()).collect();
    assert_eq!(shapes, [[2], [2], [2], [1]]);
    assert_eq!(fault(&split(18, 6)), "attribute 'num_outputs'");
    assert_eq!(fault(&split(18, 4).attr("num_outputs", Attr::Int(3))), "attribute 'num_outputs'");
    assert_eq!(fault(&split(13, 2)), "input 0 (input)");
    assert_eq!(fault(&split(13, 2).input(ints(&[3, 5]))), "split");
    assert_eq!(fault(&split(13, 2).input(ints(&[-1, 8]))), "split");
}

#[test]
fn faults_of_slices_are_named() {
    let slice = |axes: &[i64], steps: &[i64]| {
        let single =
            Single::new("", "Slice", 13, 1).input(iota(DType::F32, &[3, 4])).input(ints(&[0])).input(ints(&[2]));
        single.input(ints(axes)).input(ints(steps))
    };
    for (axes, steps) in [(&[2][..], &[1][..]), (&[0], &[0]), (&[0, 1], &[1, 1]), (&[-3], &[1])] {
        assert_eq!(fault(&slice(axes, steps)), "slice inputs");
    }
    let old = Single::new("", "Slice", 1, 1).attr("starts", Attr::Ints(vec![-2])).attr("ends", Attr::Ints(vec![9]));
    assert_eq!(held(&run(&old.attr("axes", Attr::Ints(vec![1])).input(iota(DType::F32, &[1, 4])))), [2.0, 3.0]);
}
