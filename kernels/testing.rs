//! What unit tests of ops share: numbers, tensors of any float format, comparison with float64 references.

use crate::settings::{Settings, Tier};
use abi::{DType, HostTensor};
use half::{bf16, f16};

/// A small generator of repeatable numbers (xorshift64*).
pub struct Numbers(u64);

impl Numbers {
    /// `seed` may be anything.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// About normal, mean 0, deviation 1.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }

    /// A tensor of about normal numbers.
    pub fn tensor(&mut self, dtype: DType, shape: &[usize]) -> HostTensor {
        let n = shape.iter().product();
        tensor(dtype, shape, &(0..n).map(|_| self.normal()).collect::<Vec<_>>())
    }

    /// A tensor of numbers in [low, high).
    pub fn between(&mut self, dtype: DType, shape: &[usize], low: f64, high: f64) -> HostTensor {
        let n = shape.iter().product();
        let numbers = (0..n).map(|_| low + (high - low) * self.uniform());
        tensor(dtype, shape, &numbers.collect::<Vec<_>>())
    }
}

/// `values` rounded to a float format.
pub fn tensor(dtype: DType, shape: &[usize], values: &[f64]) -> HostTensor {
    let each = values.iter();
    match dtype {
        DType::F64 => HostTensor::new(shape, values),
        DType::F32 => HostTensor::new(shape, &each.map(|&v| v as f32).collect::<Vec<_>>()),
        DType::F16 => HostTensor::new(shape, &each.map(|&v| f16::from_f64(v)).collect::<Vec<_>>()),
        DType::BF16 => HostTensor::new(shape, &each.map(|&v| bf16::from_f64(v)).collect::<Vec<_>>()),
        other => panic!("no test numbers of type {other}"),
    }
}

/// The elements, widened.
pub fn values(tensor: &HostTensor) -> Vec<f64> {
    let dtype = tensor.dtype();
    match dtype {
        DType::F64 => tensor.as_slice::<f64>().map(<[f64]>::to_vec),
        DType::F32 => tensor.as_slice::<f32>().map(|s| s.iter().map(|&v| v.into()).collect()),
        DType::F16 => tensor.as_slice::<f16>().map(|s| s.iter().map(|v| v.to_f64()).collect()),
        DType::BF16 => tensor.as_slice::<bf16>().map(|s| s.iter().map(|v| v.to_f64()).collect()),
        _ => None,
    }
    .unwrap_or_else(|| panic!("no numbers of type {dtype}"))
}

/// The part of the maximum that results of a type may be off by.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        other => panic!("no tolerance for {other}"),
    }
}

/// Compares with a float64 reference, within the type's tolerance of the reference's maximum.
#[track_caller]
pub fn assert_close(what: &str, got: Option<&HostTensor>, want: &[f64]) {
    let got = got.unwrap_or_else(|| panic!("{what}: no output"));
    let bound = tolerance(got.dtype()) * want.iter().fold(0f64, |m, v| m.max(v.abs())).max(1e-30);
    let got = values(got);
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let same = (got - want).abs() <= bound || got == want;
        assert!(same, "{what}: element {i} is {got}, not {want} (bound {bound})");
    }
}

/// Compares two runs' outputs bit by bit.
#[track_caller]
pub fn assert_same_bytes(what: &str, got: &[Option<HostTensor>], want: &[Option<HostTensor>]) {
    let bytes = |all: &[Option<HostTensor>]| -> Vec<Vec<u8>> {
        all.iter().map(|t| t.as_ref().map_or(Vec::new(), |t| t.bytes().to_vec())).collect()
    };
    assert!(bytes(got) == bytes(want), "{what}: the runs differ");
}

/// Positions `part` of a tensor's dim `axis`.
pub fn slice(tensor: &HostTensor, axis: usize, part: std::ops::Range<usize>) -> HostTensor {
    let mut shape = tensor.shape().to_vec();
    let inner = tensor.dtype().bytes(shape[axis + 1..].iter().product()).expect("it has bytes");
    let whole = (shape[axis] * inner).max(1);
    shape[axis] = part.len();
    let rows = tensor.bytes().chunks_exact(whole);
    let bytes: Vec<u8> = rows.flat_map(|row| row[part.start * inner..part.end * inner].to_vec()).collect();
    HostTensor::from_bytes(tensor.dtype(), &shape, &bytes).expect("the part's bytes")
}

/// Settings of each tier that this processor has.
pub fn every_tier() -> impl Iterator<Item = Settings> {
    Tier::ALL.into_iter().filter(|t| t.is_available()).map(|tier| Settings { tier, ..Settings::default() })
}

/// The float formats that kernels compute in.
pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
