//! What the unit tests of ops share.

use crate::cpu::number::{Bool, to_f64s};
use crate::eval::Single;
use crate::par::Par;
use crate::settings::{Settings, Tier};
use abi::tensor::Element;
use abi::{DType, Error, HostTensor, ParallelFor};
use half::{bf16, f16};

fn settings(tier: Tier) -> Settings {
    Settings { tier, ..Settings::default() }
}

/// Runs the tasks last to first: order must not matter.
struct Backwards;
impl ParallelFor for Backwards {
    fn run(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..total).rev().for_each(task);
    }
}

/// Output 0, computed at every tier on several tasks.
pub fn run(single: &Single) -> HostTensor {
    let mut last: Option<HostTensor> = None;
    for tier in Tier::ALL.into_iter().filter(|t| t.is_available()) {
        let mut out = single.run(&settings(tier), Par::new(&Backwards, 3)).expect("the node is valid");
        let out = out[0].take().expect("output 0 is read");
        if let Some(last) = &last {
            assert_eq!(last.shape(), out.shape());
        }
        last = Some(out);
    }
    last.expect("the scalar tier is there")
}

/// A tensor of any number type.
pub fn tensor(dtype: DType, shape: &[usize], values: &[f64]) -> HostTensor {
    fn of<T: Element>(shape: &[usize], values: &[f64], f: impl Fn(f64) -> T) -> HostTensor {
        HostTensor::new(shape, &values.iter().map(|&v| f(v)).collect::<Vec<_>>())
    }
    match dtype {
        DType::F32 => of(shape, values, |v| v as f32),
        DType::F64 => of(shape, values, |v| v),
        DType::F16 => of(shape, values, f16::from_f64),
        DType::BF16 => of(shape, values, bf16::from_f64),
        DType::I8 => of(shape, values, |v| v as i8),
        DType::U8 => of(shape, values, |v| v as u8),
        DType::I16 => of(shape, values, |v| v as i16),
        DType::U16 => of(shape, values, |v| v as u16),
        DType::I32 => of(shape, values, |v| v as i32),
        DType::U32 => of(shape, values, |v| v as u32),
        DType::I64 => of(shape, values, |v| v as i64),
        DType::U64 => of(shape, values, |v| v as u64),
        DType::Bool => of(shape, values, |v| Bool::from(v != 0.0)),
        other => panic!("{other} is not tested"),
    }
}

/// What a type may be off by, as part of the largest value.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        _ => 0.0,
    }
}

/// Asserts that `out` holds `want`, NaN and infinities included.
pub fn assert_close(name: &str, out: &HostTensor, want: &[f64]) {
    let got = to_f64s(out).expect("a number type");
    assert_eq!(got.len(), want.len(), "{name}");
    let scale = want.iter().filter(|v| v.is_finite()).fold(1e-3f64, |m, v| m.max(v.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let close = (got - want).abs() <= tolerance(out.dtype()) * scale;
        assert!(close || got == want || (got.is_nan() && want.is_nan()), "{name} {out:?}[{i}]: {got}, not {want}");
    }
}

/// The values as the type holds them.
pub fn held(tensor: &HostTensor) -> Vec<f64> {
    to_f64s(tensor).expect("a number type")
}

/// The slot that a Run's error names.
pub fn fault(single: &Single) -> String {
    match single.run(&Settings::default(), Par::serial()) {
        Err(Error::Node { slot, .. }) => slot,
        Err(Error::Internal(sentence)) => sentence,
        Err(other) => panic!("{other} names no slot"),
        Ok(_) => panic!("the node is not valid"),
    }
}

/// An int64 vector.
pub fn ints(values: &[i64]) -> HostTensor {
    HostTensor::new(&[values.len()], values)
}

/// 0, 1, 2... in a shape.
pub fn iota(dtype: DType, shape: &[usize]) -> HostTensor {
    let n: usize = shape.iter().product();
    tensor(dtype, shape, &(0..n).map(|i| i as f64).collect::<Vec<_>>())
}
