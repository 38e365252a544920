//! Packing and its scalar decode against the definition.

use super::fragments::{self, Shape, pack_elements, pack_rows};
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

/// Where the fragments hold row n, column k: tile, chunk, lane, and which of the lane's 32 values of a chunk.
fn place(n: usize, k: usize) -> (usize, usize, usize, usize) {
    let (unit, q, fragment, i) = (k % 64 / 32, k % 32 / 8, k % 8 / 4, k % 4);
    let lane = n % 8 * 4 + q;
    // A fragment's values: the pairs of columns (0, 1) of rows g and g + 8, then (2, 3) of both.
    (n / 16, k / 64, lane, (unit * 2 + fragment) * 8 + (i / 2 * 2 + n % 16 / 8) * 2 + i % 2)
}

/// Value `v` of a lane's chunk at `lane_bytes` (its bytes, vectors joined).
fn fragment_value(bits: usize, words: &[u32], v: usize) -> u32 {
    let (fragment, pair, high) = (v / 8, v % 8 / 2, v % 2);
    let (word, shift) = match bits {
        32 => (fragment * 8 + pair % 2 * 4 + pair / 2 * 2 + high, 0),
        16 => (fragment * 4 + pair, 16 * high),
        8 => (fragment * 2 + pair / 2, pair % 2 * 16 + 8 * high),
        4 => (fragment, 16 * high + 4 * pair),
        _ => (fragment / 2, 16 * high + fragment % 2 * 8 + 2 * pair),
    };
    words[word] >> shift & ((1u64 << bits) - 1) as u32
}

/// The words of `lane` in the chunk that begins at `at`.
fn lane_words(bits: usize, packed: &[u8], at: usize, lane: usize) -> Vec<u32> {
    let vector = (4 * bits).min(16);
    let bytes = (0..4 * bits).map(|i| packed[at + (i / vector * 32 + lane) * vector + i % vector]);
    let bytes: Vec<_> = bytes.collect();
    bytes.chunks(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn weights_in_fragments() {
    for bits in [2, 4, 8] {
        for (n, k) in [(1, 16), (17, 120), (40, 64), (16, 200)] {
            let shape = Shape { n, k, bits };
            let row_bytes = (k * bits).div_ceil(8);
            let rows = bytes(n * row_bytes, 3);
            let row = |r: usize| rows.get(r * row_bytes..(r + 1) * row_bytes).unwrap_or(&[]);
            let mut packed = vec![0; shape.bytes()];
            pack_rows(&shape, row, &mut packed);
            for r in 0..shape.tiles() * 16 {
                for column in 0..shape.chunks() * 64 {
                    let (tile, chunk, lane, v) = place(r, column);
                    let at = (tile * shape.chunks() + chunk) * shape.chunk_bytes();
                    let got = fragment_value(bits, &lane_words(bits, &packed, at, lane), v);
                    let expected = if r < n && column < k { bits_at(row(r), column, bits) } else { 0.0 };
                    assert_eq!(f64::from(got), expected, "{shape:?} row {r} column {column}");
                }
            }
        }
    }
}

/// Fragments take at most 1.05 times what the model holds, at real widths.
#[test]
fn fragments_add_little() {
    for bits in [2, 4, 8] {
        for block in [16, 32, 64, 128, 256] {
            for zero_point in [ZeroPoint::Default, ZeroPoint::Bytes, ZeroPoint::Float] {
                for (n, k) in [(576, 576), (1024, 3584), (3584, 1024), (248320, 1024), (1024, 896)] {
                    let l = Layout { n, k, bits, block, scale: DType::F16, zero_point };
                    let (b, scales, zero_points) = l.source_bytes();
                    let (got, from) = (fragments::parts(&l).bytes, b + scales + zero_points);
                    assert!(got as f64 <= 1.05 * from as f64, "{l:?}: {got} for {from}");
                }
            }
        }
    }
}

#[test]
fn whole_elements_in_fragments() {
    let (n, k) = (19, 70);
    for bits in [16, 32] {
        let shape = Shape { n, k, bits };
        let value = |row: usize, column: usize| (row * 100 + column + 1) as u32;
        let rows: Vec<Vec<u8>> =
            (0..n).map(|r| (0..k).flat_map(|c| value(r, c).to_le_bytes()[..bits / 8].to_vec()).collect()).collect();
        let mut packed = vec![0; shape.bytes()];
        pack_elements(&shape, |r| rows.get(r).map_or(&[][..], Vec::as_slice), &mut packed);
        let mut held = 0;
        for row in 0..shape.tiles() * 16 {
            for column in 0..shape.chunks() * 64 {
                let (tile, chunk, lane, v) = place(row, column);
                let words = lane_words(bits, &packed, (tile * 2 + chunk) * shape.chunk_bytes(), lane);
                let expected = if row < n && column < k { value(row, column) } else { 0 };
                assert_eq!(fragment_value(bits, &words, v), expected, "{bits} bits, row {row}, column {column}");
                held += usize::from(expected != 0);
            }
        }
        assert_eq!(held, n * k);
    }
}
