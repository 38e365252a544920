//! Against float64 from the definition, at every tier.

use crate::eval::Single;
use crate::par::Par;
use crate::settings::{Settings, Tier};
use abi::{Attr, DType, HostTensor};
use half::{bf16, f16};

/// xorshift64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    /// In -1..1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Zero {
    Default,
    Packed,
    Float,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    bits: usize,
    block: usize,
    zero: Zero,
    dtype: DType,
    level: i64,
    bias: bool,
    constant: bool,
}

/// Two threads, as a session has.
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

/// `values` rounded to `dtype`, as a tensor and as what it holds.
fn floats(dtype: DType, shape: &[usize], values: &[f32]) -> (HostTensor, Vec<f64>) {
    match dtype {
        DType::F16 => {
            let v: Vec<_> = values.iter().map(|&v| f16::from_f32(v)).collect();
            (HostTensor::new(shape, &v), v.iter().map(|v| v.to_f64()).collect())
        }
        DType::BF16 => {
            let v: Vec<_> = values.iter().map(|&v| bf16::from_f32(v)).collect();
            (HostTensor::new(shape, &v), v.iter().map(|v| v.to_f64()).collect())
        }
        _ => (HostTensor::new(shape, values), values.iter().map(|&v| v.into()).collect()),
    }
}

/// Packs `q` (rows of `per_row` values) as ONNX does: low bits first, each row to whole bytes.
fn pack_bits(q: &[u8], per_row: usize, bits: usize) -> Vec<u8> {
    let row = (per_row * bits).div_ceil(8);
    let mut out = vec![0u8; q.len() / per_row * row];
    for (i, &v) in q.iter().enumerate() {
        let bit = i % per_row * bits;
        out[i / per_row * row + bit / 8] |= v << (bit % 8);
    }
    out
}

/// The node and its float64 result.
fn make(c: Case, seed: u64) -> (Single, Vec<f64>) {
    let mut rng = Rng(seed | 1);
    let blocks = c.k.div_ceil(c.block);
    let padded = blocks * c.block;
    let top = 1u64 << c.bits;
    let (a, a64) = floats(c.dtype, &[c.m, c.k], &(0..c.m * c.k).map(|_| rng.float() + 0.3).collect::<Vec<_>>());
    let q: Vec<u8> = (0..c.n * padded).map(|_| (rng.next() % top) as u8).collect();
    let scales: Vec<_> = (0..c.n * blocks).map(|_| rng.float().abs() * 0.1 + 0.01).collect();
    // A case in two has scales that float16 holds too, which are packed so.
    let scales: Vec<_> = match seed % 2 {
        0 => scales.iter().map(|&v| f16::from_f32(v).to_f32()).collect(),
        _ => scales,
    };
    let (scales, scales64) = floats(c.dtype, &[c.n * blocks], &scales);
    let zq: Vec<u8> = (0..c.n * blocks).map(|_| (rng.next() % top) as u8).collect();
    let zf: Vec<_> = (0..c.n * blocks).map(|_| rng.float() + (top / 2) as f32).collect();
    let (zf, zf64) = floats(c.dtype, &[c.n, blocks], &zf);
    let (bias, bias64) = floats(c.dtype, &[c.n], &(0..c.n).map(|_| rng.float()).collect::<Vec<_>>());
    let mut expected = vec![0f64; c.m * c.n];
    for n in 0..c.n {
        for k in 0..c.k {
            let at = n * blocks + k / c.block;
            let zero = match c.zero {
                Zero::Default => (top / 2) as f64,
                Zero::Packed => f64::from(zq[at]),
                Zero::Float => zf64[at],
            };
            let w = (f64::from(q[n * padded + k]) - zero) * scales64[at];
            (0..c.m).for_each(|m| expected[m * c.n + n] += a64[m * c.k + k] * w);
        }
        (0..c.m).filter(|_| c.bias).for_each(|m| expected[m * c.n + n] += bias64[n]);
    }
    let b = HostTensor::new(&[c.n, blocks, c.block * c.bits / 8], &pack_bits(&q, padded, c.bits));
    let int = |v: usize| Attr::Int(v as i64);
    let node = Single::new("com.microsoft", "MatMulNBits", 1, 1)
        .attr("K", int(c.k))
        .attr("N", int(c.n))
        .attr("bits", int(c.bits))
        .attr("block_size", int(c.block))
        .attr("accuracy_level", Attr::Int(c.level))
        .input(a);
    let add = |node: Single, t: HostTensor| {
        if c.constant { node.constant(t) } else { node.input(t) }
    };
    let node = add(add(node, b), scales);
    let node = match c.zero {
        Zero::Default => node.absent(),
        Zero::Packed => {
            let row = (blocks * c.bits).div_ceil(8);
            let packed = pack_bits(&zq, blocks, c.bits);
            add(node, HostTensor::new(&[c.n, row], &packed))
        }
        Zero::Float => add(node, zf),
    };
    let node = node.absent();
    (if c.bias { add(node, bias) } else { node }, expected)
}

/// The result as f64.
fn values(t: &HostTensor) -> Vec<f64> {
    match t.dtype() {
        DType::F16 => t.as_slice::<f16>().unwrap().iter().map(|v| v.to_f64()).collect(),
        DType::BF16 => t.as_slice::<bf16>().unwrap().iter().map(|v| v.to_f64()).collect(),
        _ => t.as_slice::<f32>().unwrap().iter().map(|&v| v.into()).collect(),
    }
}

fn check(c: Case, seed: u64) {
    let (node, expected) = make(c, seed);
    let tolerance = match (c.level, c.dtype) {
        (4, _) => 1.5e-2,
        (_, DType::F16) => 1e-3,
        (_, DType::BF16) => 8e-3,
        _ => 1e-5,
    };
    let scale = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
    for tier in Tier::ALL.into_iter().filter(|t| t.is_available()) {
        let settings = Settings { tier, chunks: 2, ..Settings::default() };
        let out = node.run(&settings, Par::new(&Threads, 2)).unwrap();
        let got = values(out[0].as_ref().unwrap());
        assert_eq!(got.len(), expected.len());
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let error = (got - expected).abs();
            assert!(
                error <= tolerance * scale,
                "{c:?} {tier} seed {seed}: element {i}: got {got}, expected {expected} (scale {scale})"
            );
        }
    }
}

const BASE: Case = Case {
    m: 1,
    n: 33,
    k: 96,
    bits: 4,
    block: 32,
    zero: Zero::Default,
    dtype: DType::F32,
    level: 0,
    bias: false,
    constant: true,
};

#[test]
fn every_format() {
    let mut seed = 1;
    for bits in [2, 4, 8] {
        for block in [16, 32, 64, 128, 256] {
            for zero in [Zero::Default, Zero::Packed, Zero::Float] {
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    for level in [0, 4] {
                        seed += 1;
                        let (m, k) = (1 + seed as usize % 3, 2 * block + 24);
                        let (bias, n) = (seed % 2 == 0, 17 + seed as usize % 16);
                        let c = Case { m, n, k, bits, block, zero, dtype, level, bias, ..BASE };
                        check(c, seed);
                    }
                }
            }
        }
    }
}

#[test]
fn every_row_count() {
    for m in (1..=30).chain([61, 128]) {
        for (level, zero) in [(0, Zero::Packed), (4, Zero::Default), (4, Zero::Packed), (4, Zero::Float)] {
            check(Case { m, level, zero, ..BASE }, m as u64);
        }
    }
}

#[test]
fn every_column_count() {
    for n in 1..=34 {
        for level in [0, 4] {
            let c = Case { m: 3, n, level, bias: true, ..BASE };
            check(c, n as u64);
        }
    }
}

#[test]
fn every_k() {
    for k in 1..=70 {
        for level in [0, 4] {
            check(Case { m: 2, k, level, ..BASE }, k as u64);
        }
    }
}

#[test]
fn weights_that_arrive_with_the_run() {
    for zero in [Zero::Default, Zero::Packed, Zero::Float] {
        let c = Case { constant: false, bias: true, m: 5, zero, ..BASE };
        check(c, 7);
    }
}

#[test]
fn work_shared_by_threads() {
    for m in [1, 40, 300] {
        for level in [0, 4] {
            let c = Case { m, n: 700, k: 512, level, ..BASE };
            check(c, m as u64);
        }
    }
}

#[test]
fn an_empty_b_gives_the_bias() {
    let node = Single::new("com.microsoft", "MatMulNBits", 1, 1)
        .attr("K", Attr::Int(32))
        .attr("N", Attr::Int(3))
        .attr("bits", Attr::Int(4))
        .attr("block_size", Attr::Int(32))
        .input(HostTensor::new(&[2, 1, 32], &[1f32; 64]))
        .constant(HostTensor::new::<u8>(&[0, 1, 16], &[]))
        .constant(HostTensor::new::<f32>(&[0], &[]))
        .absent()
        .absent()
        .constant(HostTensor::new(&[3], &[1f32, 2.0, 3.0]));
    let out = node.run(&Settings::default(), Par::serial()).unwrap();
    let out = out[0].as_ref().unwrap();
    assert_eq!(out.shape(), [2, 1, 3]);
    assert_eq!(out.as_slice::<f32>().unwrap(), [1., 2., 3., 1., 2., 3.]);
}

#[test]
fn declines_name_the_slot() {
    let node = |name: &str, value: i64| {
        Single::new("com.microsoft", "MatMulNBits", 1, 1)
            .attr(name, Attr::Int(value))
            .attr("K", Attr::Int(32))
            .attr("N", Attr::Int(3))
            .attr("block_size", Attr::Int(32))
            .input(HostTensor::new(&[1, 32], &[1f32; 32]))
            .constant(HostTensor::new(&[3, 1, 16], &[0u8; 48]))
            .constant(HostTensor::new(&[3, 1], &[1f32; 3]))
            .run(&Settings::default(), Par::serial())
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    for (name, value) in [("weight_prepacked", 1), ("bits", 3), ("accuracy_level", 5)] {
        let message = node(name, value);
        assert!(message.contains(&format!("'{name}': got {value}")), "{message}");
    }
}

/// Activations that no int8 block holds: the others' rows are right, and zeros and tiny values give tiny results.
#[test]
fn extreme_activations() {
    for tier in Tier::ALL.into_iter().filter(|t| t.is_available()) {
        for extreme in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, 0.0] {
            let mut a = [1f32; 96];
            a[32..64].fill(extreme);
            let node = Single::new("com.microsoft", "MatMulNBits", 1, 1)
                .attr("K", Attr::Int(32))
                .attr("N", Attr::Int(2))
                .attr("block_size", Attr::Int(32))
                .attr("accuracy_level", Attr::Int(4))
                .input(HostTensor::new(&[3, 32], &a))
                .constant(HostTensor::new(&[2, 1, 16], &[0x99u8; 32]))
                .constant(HostTensor::new(&[2, 1], &[0.5f32, 2.0]));
            let out = node.run(&Settings { tier, ..Settings::default() }, Par::serial()).unwrap();
            let out = out[0].as_ref().unwrap().as_slice::<f32>().unwrap();
            for row in [0, 4] {
                assert!(
                    (out[row] - 16.0).abs() < 0.2 && (out[row + 1] - 64.0).abs() < 0.8,
                    "{tier} {extreme}: {out:?}"
                );
            }
            if extreme.abs() < 1.0 {
                assert!(out[2].abs() < 1e-20 && out[3].abs() < 1e-20, "{tier} {extreme}: {out:?}");
            }
        }
    }
}
