//! Random nodes of every op in the table: whatever the attributes, types and shapes, claim, infer, build and run
//! may decline or fail with an error, but never panic, overflow or touch foreign memory.

#![no_main]

use abi::{Attr, DType, HostTensor};
use arbitrary::{Arbitrary, Unstructured};
use kernels::eval::Single;
use kernels::par::Par;
use kernels::settings::{Settings, Tier};
use libfuzzer_sys::{Corpus, fuzz_target};

/// Attributes that ops here read.
const NAMES: &[&str] = &[
    "accuracy_level", "activation", "allowzero", "alpha", "axes", "axis", "batch_dims", "beta", "bits", "block_size",
    "causal", "channels_last", "detect_negative", "detect_positive", "dilation", "dilations", "direction", "do_rotary",
    "dtype", "end", "epsilon", "exclusive", "fmod", "gate_activation", "gather_axis", "group", "interleaved",
    "is_causal", "K", "keepdims", "kernel_shape", "kv_num_heads", "largest", "local_window_size", "mode", "mrope_section",
    "N", "ndim", "noop_with_empty_axes", "num_heads", "num_outputs", "p", "pads", "perm", "q_num_heads",
    "qk_matmul_output_mode", "quantize_axis", "reduction", "reverse", "rotary_embedding_dim", "rotary_interleaved",
    "saturate", "scale", "smooth_softmax", "softcap", "sorted", "split", "start", "stash_type", "state_window", "strides",
    "to", "transA", "transB", "update_rule", "upper", "value_ints", "value_int",
];
const STRINGS: &[&str] = &["linear", "gated", "delta", "gated_delta", "silu", "none", "constant", "edge", "wrap", "add", "DCR", "CRD", "tanh"];
const DTYPES: &[DType] = &[
    DType::F32, DType::F16, DType::BF16, DType::F64, DType::I64, DType::I32, DType::U8, DType::I8, DType::Bool, DType::U4, DType::I4,
];

fn attr(u: &mut Unstructured) -> arbitrary::Result<Attr> {
    Ok(match u.int_in_range(0..=5)? {
        0 | 1 => Attr::Int(small(u)?),
        2 => Attr::Float(f32::arbitrary(u)?),
        3 => Attr::String(u.choose(STRINGS)?.to_string()),
        4 => Attr::Ints((0..u.int_in_range(0..=4)?).map(|_| small(u)).collect::<Result<_, _>>()?),
        _ => Attr::Tensor(tensor(u)?),
    })
}

/// Mostly sizes and axes, at times anything.
fn small(u: &mut Unstructured) -> arbitrary::Result<i64> {
    if u.ratio(1, 12)? { i64::arbitrary(u) } else { Ok(*u.choose(&[-3, -2, -1, 0, 1, 2, 3, 4, 8, 16, 32, 64])?) }
}

fn tensor(u: &mut Unstructured) -> arbitrary::Result<HostTensor> {
    let dtype = *u.choose(DTYPES)?;
    let rank = u.int_in_range(0..=4)?;
    let shape: Vec<usize> = (0..rank).map(|_| u.choose(&[0usize, 1, 2, 3, 4, 8, 16]).copied()).collect::<Result<_, _>>()?;
    let shape = if shape.iter().product::<usize>() > 4096 { vec![4] } else { shape };
    let bytes = dtype.bytes(shape.iter().product()).expect("no strings, small");
    let mut data = vec![0u8; bytes];
    if matches!(dtype, DType::I64 | DType::I32) && u.ratio(9, 10)? {
        let width = dtype.bits().expect("an integer") / 8;
        for chunk in data.chunks_exact_mut(width) {
            chunk.copy_from_slice(&small(u)?.to_le_bytes()[..width]);
        }
    } else {
        u.fill_buffer(&mut data)?;
    }
    if dtype == DType::Bool {
        data.iter_mut().for_each(|b| *b &= 1);
    }
    Ok(HostTensor::from_bytes(dtype, &shape, &data).expect("sized for the shape"))
}

fn run(data: &[u8]) -> arbitrary::Result<()> {
    let u = &mut Unstructured::new(data);
    let defs: Vec<_> = kernels::ops::all().collect();
    let def = u.choose(&defs)?;
    let since = u.int_in_range(def.since.0..=def.since.1.min(28).max(def.since.0))?;
    let mut node = Single::new(def.domain, def.name, since, u.int_in_range(1..=3)?);
    for _ in 0..u.int_in_range(0..=6)? {
        node = node.attr(u.choose(NAMES)?, attr(u)?);
    }
    for _ in 0..u.int_in_range(0..=8)? {
        node = match u.int_in_range(0..=5)? {
            0 => node.absent(),
            1 | 2 => node.constant(tensor(u)?),
            _ => node.input(tensor(u)?),
        };
    }
    let tier = *u.choose(&Tier::ALL)?;
    let settings = Settings { tier: if tier.is_available() { tier } else { Tier::Scalar }, ..Settings::default() };
    // Ok, a decline or an error: all fine. Only a crash is not.
    let _ = node.run(&settings, Par::serial());
    Ok(())
}

fuzz_target!(|data: &[u8]| -> Corpus { if run(data).is_ok() { Corpus::Keep } else { Corpus::Reject } });
