//! Against float64 from the definition, at every tier.

use crate::eval::Single;
use crate::par::Par;
use crate::settings::{Settings, Tier};
use abi::{Attr, HostTensor};
use half::{bf16, f16};

fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

struct Threads;

impl abi::ParallelFor for Threads {
    fn run(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|s| {
            (0..total).for_each(|i| {
                s.spawn(move || task(i));
            });
        });
    }
}

/// Runs at every tier and compares.
fn check(node: &Single, shape: &[usize], expected: &[f64], tolerance: f64, what: &str) {
    let scale = expected.iter().fold(1e-30, |m: f64, v| m.max(v.abs()));
    for tier in Tier::ALL.into_iter().filter(|t| t.is_available()) {
        let settings = Settings { tier, chunks: 2, ..Settings::default() };
        let out = node.run(&settings, Par::new(&Threads, 2)).unwrap();
        let out = out[0].as_ref().unwrap();
        assert_eq!(out.shape(), shape, "{what}");
        let got: Vec<f64> = match out.dtype() {
            abi::DType::F16 => out.as_slice::<f16>().unwrap().iter().map(|v| v.to_f64()).collect(),
            abi::DType::BF16 => out.as_slice::<bf16>().unwrap().iter().map(|v| v.to_f64()).collect(),
            abi::DType::F64 => out.as_slice::<f64>().unwrap().to_vec(),
            _ => out.as_slice::<f32>().unwrap().iter().map(|&v| v.into()).collect(),
        };
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let error = (got - expected).abs();
            assert!(error <= tolerance * scale, "{what} {tier}: element {i}: got {got}, expected {expected}");
        }
    }
}

/// `[m, k]` times `[k, n]` in float64.
fn product(a: &[f32], b: &[f32], (m, k, n): (usize, usize, usize)) -> Vec<f64> {
    let mut out = vec![0f64; m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                out[i * n + j] += f64::from(a[i * k + l]) * f64::from(b[l * n + j]);
            }
        }
    }
    out
}

fn transposed(v: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| v[i % rows * columns + i / rows]).collect()
}

fn add(node: Single, t: HostTensor, constant: bool) -> Single {
    if constant { node.constant(t) } else { node.input(t) }
}

#[test]
fn every_size() {
    for (m, k, n) in (1..=34)
        .map(|m| (m, 7, 19))
        .chain((1..=34).map(|n| (2, 9, n)))
        .chain((0..=34).map(|k| (3, k, 18)))
        .chain([(70, 130, 300), (1, 600, 900), (1, 2100, 1030)])
    {
        let (a, b) = (values(m * k, 1), values(k * n, 2));
        let expected = product(&a, &b, (m, k, n));
        for constant in [false, true] {
            let node = Single::new("", "MatMul", 13, 1).input(HostTensor::new(&[m, k], &a));
            let node = add(node, HostTensor::new(&[k, n], &b), constant);
            check(&node, &[m, n], &expected, 1e-5, &format!("{m} {k} {n} constant {constant}"));
        }
    }
}

#[test]
fn halves() {
    let (m, k, n) = (5, 40, 50);
    let (a, b) = (values(m * k, 3), values(k * n, 4));
    for constant in [false, true] {
        let (a16, b16): (Vec<_>, Vec<_>) =
            (a.iter().map(|&v| f16::from_f32(v)).collect(), b.iter().map(|&v| f16::from_f32(v)).collect());
        let wide = |v: &[f16]| v.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
        let expected = product(&wide(&a16), &wide(&b16), (m, k, n));
        let node = Single::new("", "MatMul", 13, 1).input(HostTensor::new(&[m, k], &a16));
        let node = add(node, HostTensor::new(&[k, n], &b16), constant);
        check(&node, &[m, n], &expected, 1e-3, "float16");
        let (a16, b16): (Vec<_>, Vec<_>) =
            (a.iter().map(|&v| bf16::from_f32(v)).collect(), b.iter().map(|&v| bf16::from_f32(v)).collect());
        let wide = |v: &[bf16]| v.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
        let expected = product(&wide(&a16), &wide(&b16), (m, k, n));
        let node = Single::new("", "MatMul", 13, 1).input(HostTensor::new(&[m, k], &a16));
        let node = add(node, HostTensor::new(&[k, n], &b16), constant);
        check(&node, &[m, n], &expected, 8e-3, "bfloat16");
    }
}

#[test]
fn batches_broadcast() {
    let (m, k, n) = (3, 5, 21);
    for (batch_a, batch_b, out) in [
        (vec![2, 3], vec![2, 3], vec![2, 3]),
        (vec![2, 1], vec![3], vec![2, 3]),
        (vec![], vec![2, 2], vec![2, 2]),
        (vec![4], vec![], vec![4]),
        (vec![4], vec![1, 1], vec![1, 4]),
        (vec![1], vec![5], vec![5]),
    ] {
        let count = |v: &[usize]| v.iter().product::<usize>();
        let (a, b) = (values(count(&batch_a) * m * k, 5), values(count(&batch_b) * k * n, 6));
        let mut expected = Vec::new();
        for i in 0..count(&out) {
            // By the definition: the coordinate of each batch axis, or 0 where it is 1 or missing.
            let pick = |dims: &[usize]| {
                let mut index = 0;
                for (axis, size) in dims.iter().enumerate() {
                    let axis = axis + out.len() - dims.len();
                    let coordinate = i / count(&out[axis + 1..]) % out[axis];
                    index = index * size + if *size == 1 { 0 } else { coordinate };
                }
                index
            };
            let (ia, ib) = (pick(&batch_a), pick(&batch_b));
            expected.extend(product(&a[ia * m * k..][..m * k], &b[ib * k * n..][..k * n], (m, k, n)));
        }
        for constant in [false, true] {
            let node = Single::new("", "MatMul", 13, 1).input(HostTensor::new(&[&batch_a[..], &[m, k]].concat(), &a));
            let node = add(node, HostTensor::new(&[&batch_b[..], &[k, n]].concat(), &b), constant);
            let what = format!("{batch_a:?} {batch_b:?} constant {constant}");
            check(&node, &[&out[..], &[m, n]].concat(), &expected, 1e-5, &what);
        }
    }
}

#[test]
fn vectors() {
    let (a, b) = (values(6, 7), values(6 * 4, 8));
    for constant in [false, true] {
        let run = |sa: &[usize], a: &[f32], sb: &[usize], b: &[f32], out: &[usize], mkn| {
            let node = Single::new("", "MatMul", 9, 1).input(HostTensor::new(sa, a));
            let node = add(node, HostTensor::new(sb, b), constant);
            check(&node, out, &product(a, b, mkn), 1e-5, &format!("{sa:?} {sb:?}"));
        };
        run(&[6], &a, &[6, 4], &b, &[4], (1, 6, 4));
        run(&[4, 6], &b, &[6], &a, &[4], (4, 6, 1));
        run(&[6], &a, &[6], &b[..6], &[], (1, 6, 1));
        run(&[2, 2, 6], &b, &[6], &a, &[2, 2], (4, 6, 1));
    }
}

#[test]
fn transposes_and_alpha() {
    let (m, k, n) = (6, 7, 20);
    let (a, b) = (values(m * k, 9), values(k * n, 10));
    let expected: Vec<f64> = product(&a, &b, (m, k, n)).iter().map(|v| v * 0.5).collect();
    for (trans_a, trans_b) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        for constant in [false, true] {
            let a = if trans_a == 1 { transposed(&a, m, k) } else { a.clone() };
            let b = if trans_b == 1 { transposed(&b, k, n) } else { b.clone() };
            let shape_a = if trans_a == 1 { [1, k, m] } else { [1, m, k] };
            let shape_b = if trans_b == 1 { [n, k] } else { [k, n] };
            let node = Single::new("com.microsoft", "FusedMatMul", 1, 1)
                .attr("transA", Attr::Int(trans_a))
                .attr("transB", Attr::Int(trans_b))
                .attr("alpha", Attr::Float(0.5))
                .input(HostTensor::new(&shape_a, &a));
            let node = add(node, HostTensor::new(&shape_b, &b), constant);
            check(&node, &[1, m, n], &expected, 1e-5, &format!("{trans_a} {trans_b}"));
        }
    }
}

#[test]
fn gemm_adds_c_of_every_shape() {
    let (m, k, n) = (5, 8, 18);
    let (a, b, c) = (values(m * k, 11), values(k * n, 12), values(m * n, 13));
    let base = product(&a, &b, (m, k, n));
    for shape in [vec![m, n], vec![1, n], vec![n], vec![m, 1], vec![1, 1], vec![1], vec![]] {
        let count: usize = shape.iter().product();
        let (rows, columns) = match shape[..] {
            [r, c] => (r, c),
            [c] => (1, c),
            _ => (1, 1),
        };
        let expected: Vec<f64> = (0..m * n)
            .map(|i| {
                let (row, column) = (if rows == 1 { 0 } else { i / n }, if columns == 1 { 0 } else { i % n });
                1.5 * base[i] - 0.25 * f64::from(c[row * columns + column])
            })
            .collect();
        for (trans_a, trans_b, constant) in [(0, 0, true), (1, 1, false), (0, 1, true)] {
            let node = Single::new("", "Gemm", 13, 1)
                .attr("alpha", Attr::Float(1.5))
                .attr("beta", Attr::Float(-0.25))
                .attr("transA", Attr::Int(trans_a))
                .attr("transB", Attr::Int(trans_b));
            let (sa, va) = if trans_a == 1 { ([k, m], transposed(&a, m, k)) } else { ([m, k], a.clone()) };
            let (sb, vb) = if trans_b == 1 { ([n, k], transposed(&b, k, n)) } else { ([k, n], b.clone()) };
            let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            let double = node.input(HostTensor::new(&sa, &wide(&va)));
            let double = add(double, HostTensor::new(&sb, &wide(&vb)), constant);
            let double = double.input(HostTensor::new(&shape, &wide(&c[..count])));
            check(&double, &[m, n], &expected, 1e-12, "double");
            let node = Single::new("", "Gemm", 13, 1)
                .attr("alpha", Attr::Float(1.5))
                .attr("beta", Attr::Float(-0.25))
                .attr("transA", Attr::Int(trans_a))
                .attr("transB", Attr::Int(trans_b))
                .input(HostTensor::new(&sa, &va));
            let node = add(node, HostTensor::new(&sb, &vb), constant);
            let node = node.input(HostTensor::new(&shape, &c[..count]));
            check(&node, &[m, n], &expected, 1e-5, &format!("C {shape:?}"));
        }
    }
}

#[test]
fn integers_wrap() {
    let node = Single::new("", "MatMul", 9, 1)
        .input(HostTensor::new(&[1, 2], &[i32::MAX, 3]))
        .input(HostTensor::new(&[2, 2], &[2i32, 1, 1, -4]));
    let out = node.run(&Settings::default(), Par::serial()).unwrap();
    let expected = [i32::MAX.wrapping_mul(2).wrapping_add(3), i32::MAX.wrapping_sub(12)];
    assert_eq!(out[0].as_ref().unwrap().as_slice::<i32>().unwrap(), expected);
}

#[test]
fn wrong_shapes_are_named() {
    let run = |a: &[usize], b: &[usize]| {
        let tensor = |s: &[usize]| HostTensor::new(s, &values(s.iter().product(), 1));
        let node = Single::new("", "MatMul", 9, 1).input(tensor(a)).input(tensor(b));
        node.run(&Settings::default(), Par::serial()).map(|_| ()).unwrap_err().to_string()
    };
    assert!(run(&[2, 3], &[4, 5]).contains("input 1 (B)"));
    assert!(run(&[2, 2, 3], &[3, 3, 5]).contains("batch dims"));
    assert!(run(&[], &[3, 5]).contains("input 0"));
}
