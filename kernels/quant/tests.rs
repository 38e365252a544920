//! Packing and its scalar decode against the definition.

use super::nbits::{Layout, Source, ZeroPoint};
use abi::DType;
use half::{bf16, f16};

/// Every byte differs from its neighbours.
fn bytes(n: usize, seed: usize) -> Vec<u8> {
    (0..n).map(|i| ((i + seed) * 167 + i / 13) as u8).collect()
}

/// `n` floats of `dtype`: their bytes and what they hold.
fn floats(dtype: DType, n: usize) -> (Vec<u8>, Vec<f64>) {
    let values = (0..n).map(|i| 0.5 + (i % 97) as f32 / 64.0);
    match dtype {
        DType::F16 => {
            let v: Vec<_> = values.map(f16::from_f32).collect();
            (v.iter().flat_map(|v| v.to_le_bytes()).collect(), v.iter().map(|v| v.to_f64()).collect())
        }
        DType::BF16 => {
            let v: Vec<_> = values.map(bf16::from_f32).collect();
            (v.iter().flat_map(|v| v.to_le_bytes()).collect(), v.iter().map(|v| v.to_f64()).collect())
        }
        _ => (values.clone().flat_map(f32::to_le_bytes).collect(), values.map(f64::from).collect()),
    }
}

/// The `bits` wide value at `index` of a packed row.
fn bits_at(row: &[u8], index: usize, bits: usize) -> f64 {
    let bit = index * bits;
    f64::from((u16::from(row[bit / 8]) >> (bit % 8)) & ((1 << bits) - 1))
}

#[test]
fn decodes_what_was_packed() {
    for bits in [2, 4, 8] {
        for block in [16, 32, 64, 128, 256] {
            for zero_point in [ZeroPoint::Default, ZeroPoint::Bytes, ZeroPoint::Float] {
                for scale in [DType::F32, DType::F16, DType::BF16] {
                    // Partial panels and partial blocks.
                    for (n, k) in [(1, block), (17, 3 * block - 5), (33, block + 1)] {
                        check(Layout { n, k, bits, block, scale, zero_point });
                    }
                }
            }
        }
    }
}

fn check(l: Layout) {
    let (b, _, zero_bytes) = l.source_bytes();
    let b = bytes(b, 3);
    let (scales, scales64) = floats(l.scale, l.n * l.blocks());
    let (zero_points, zeros64) = match l.zero_point {
        ZeroPoint::Default => (Vec::new(), Vec::new()),
        ZeroPoint::Bytes => (bytes(zero_bytes, 5), Vec::new()),
        ZeroPoint::Float => floats(l.scale, l.n * l.blocks()),
    };
    let source = Source { b: &b, scales: &scales, zero_points: &zero_points };
    let packed = l.pack(&source, || {}).unwrap();
    let mut column = vec![0f32; l.k];
    for n in 0..l.n {
        packed.view().decode_column(n, &mut column);
        let row = &b[n * l.blocks() * l.blob()..][..l.blocks() * l.blob()];
        for (k, got) in column.iter().enumerate() {
            let at = n * l.blocks() + k / l.block;
            let zero = match l.zero_point {
                ZeroPoint::Default => (1 << (l.bits - 1)).into(),
                ZeroPoint::Bytes => {
                    let stride = zero_bytes / l.n;
                    bits_at(&zero_points[n * stride..][..stride], k / l.block, l.bits)
                }
                ZeroPoint::Float => zeros64[at],
            };
            let expected = (bits_at(row, k, l.bits) - zero) * scales64[at];
            let error = (f64::from(*got) - expected).abs();
            assert!(error <= 1e-5 * expected.abs().max(1.0), "{l:?} column {n} row {k}: {got}, expected {expected}");
        }
    }
}

/// What is packed takes at most 1.15 times what the model holds, at real widths.
#[test]
fn packing_adds_little() {
    for bits in [2, 4, 8] {
        for block in [16, 32, 64, 128, 256] {
            for zero_point in [ZeroPoint::Default, ZeroPoint::Bytes, ZeroPoint::Float] {
                for scale in [DType::F32, DType::F16] {
                    for (n, k) in [(576, 576), (1024, 3584), (3584, 1024), (2000, 1500)] {
                        let l = Layout { n, k, bits, block, scale, zero_point };
                        let (b, scales, zero_points) = l.source_bytes();
                        let (got, from) = (l.bytes().unwrap(), b + scales + zero_points);
                        // A byte for each 2-bit zero point is the most that is added.
                        assert!(got as f64 <= 1.15 * from as f64, "{l:?}: {got} for {from}");
                    }
                }
            }
        }
    }
}
