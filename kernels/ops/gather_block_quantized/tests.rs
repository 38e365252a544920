//! Against the definition, element by element in float64.

use crate::eval::Single;
use crate::par::Par;
use crate::settings::Settings;
use abi::{Attr, DType, HostTensor};
use half::f16;

fn nibbles(v: &[u8]) -> Vec<u8> {
    let mut out = vec![0; v.len().div_ceil(2)];
    v.iter().enumerate().for_each(|(i, v)| out[i / 2] |= (v & 15) << (4 * (i % 2)));
    out
}

fn node(attrs: &[(&str, i64)]) -> Single {
    let node = Single::new("com.microsoft", "GatherBlockQuantized", 1, 1);
    attrs.iter().fold(node, |n, (k, v)| n.attr(k, Attr::Int(*v)))
}

fn run(node: &Single) -> HostTensor {
    let out = node.run(&Settings::default(), Par::serial()).unwrap();
    out[0].clone().unwrap()
}

/// Rows of 24 values in blocks of 16: the last block is partial, and uint8 zero points end on whole bytes.
#[test]
fn packed_uint8_of_every_width() {
    for bits in [2usize, 4, 8] {
        for zero_points in [false, true] {
            let (rows, k, blocks, top) = (5, 24, 2, 1usize << bits);
            let q: Vec<usize> = (0..rows * k).map(|i| (i * 7 + i / 5) % top).collect();
            let z: Vec<usize> = (0..rows * blocks).map(|i| (i * 3 + 1) % top).collect();
            let pack = |v: &[usize], per_row: usize| {
                let row = (per_row * bits).div_ceil(8);
                let mut out = vec![0u8; v.len() / per_row * row];
                for (i, v) in v.iter().enumerate() {
                    let bit = i % per_row * bits;
                    out[i / per_row * row + bit / 8] |= (*v as u8) << (bit % 8);
                }
                (out, row)
            };
            let (data, row) = pack(&q, k);
            let (zeros, zero_row) = pack(&z, blocks);
            let scales: Vec<f32> = (0..rows * blocks).map(|i| 0.25 * (i + 1) as f32).collect();
            let n = node(&[("bits", bits as i64), ("block_size", 16)])
                .constant(HostTensor::new(&[rows, row], &data))
                .input(HostTensor::new(&[2, 2], &[4i64, 0, -2, 9]))
                .constant(HostTensor::new(&[rows, blocks], &scales));
            let n = if zero_points { n.constant(HostTensor::new(&[rows, zero_row], &zeros)) } else { n };
            let out = run(&n);
            assert_eq!(out.shape(), [2, 2, k]);
            let got = out.as_slice::<f32>().unwrap();
            for (i, at) in [4usize, 0, 3, 9].into_iter().enumerate() {
                for j in 0..k {
                    let expected = if at == 9 {
                        0.0
                    } else {
                        let zero = if zero_points { z[at * blocks + j / 16] } else { top / 2 };
                        (q[at * k + j] as f32 - zero as f32) * scales[at * blocks + j / 16]
                    };
                    assert_eq!(got[i * k + j], expected, "bits {bits} zero points {zero_points} row {at} column {j}");
                }
            }
        }
    }
}

/// Four-bit types gather and quantise along any axes; their default zero point is 0.
#[test]
fn four_bit_types_on_every_axis() {
    let shape = [3usize, 20, 2];
    let raw: Vec<u8> = (0..120).map(|i| (i * 5 + i / 7) as u8 & 15).collect();
    for (dtype, gather, quantize) in [
        (DType::U4, 0, 1),
        (DType::I4, 1, 1),
        (DType::I4, 2, 1),
        (DType::U4, 0, 2),
        (DType::I4, 1, 0),
        (DType::U4, -1, -2),
    ] {
        let at = |axis: i64| if axis < 0 { axis + 3 } else { axis } as usize;
        let (g, q) = (at(gather), at(quantize));
        let mut scale_shape = shape;
        scale_shape[q] = shape[q].div_ceil(16);
        let count: usize = scale_shape.iter().product();
        let scales: Vec<f16> = (0..count).map(|i| f16::from_f32(0.5 + i as f32)).collect();
        let indices = [1i32, 0, -1];
        let n = node(&[("gather_axis", gather), ("quantize_axis", quantize), ("block_size", 16)])
            .constant(HostTensor::from_bytes(dtype, &shape, &nibbles(&raw)).unwrap())
            .input(HostTensor::new(&[3], &indices))
            .constant(HostTensor::new(&scale_shape, &scales));
        let out = run(&n);
        let mut out_shape = shape;
        out_shape[g] = 3;
        assert_eq!(out.shape(), out_shape);
        let got = out.as_slice::<f16>().unwrap();
        for (flat, got) in got.iter().enumerate() {
            let mut c = [flat / (out_shape[1] * out_shape[2]), flat / out_shape[2] % out_shape[1], flat % out_shape[2]];
            c[g] = (i64::from(indices[c[g]]) + if indices[c[g]] < 0 { shape[g] as i64 } else { 0 }) as usize;
            let v = raw[(c[0] * shape[1] + c[1]) * shape[2] + c[2]];
            let v = if dtype == DType::I4 && v > 7 { f32::from(v) - 16.0 } else { f32::from(v) };
            c[q] /= 16;
            let scale = scales[(c[0] * scale_shape[1] + c[1]) * scale_shape[2] + c[2]];
            assert_eq!(*got, f16::from_f32(v * scale.to_f32()), "{dtype} {gather} {quantize} {flat}");
        }
    }
}

/// An embedding that a MatMulNBits shares is read from the packed form, and says the same.
#[test]
fn rows_of_shared_weights() {
    use crate::build::{BuildCx, Constants};
    use crate::fact::Fact;
    use crate::op::{NodeCx, NodeLabel, find};
    use crate::weights::PackCache;
    use std::sync::Arc;

    for (bits, zero_points) in [(2usize, false), (4, false), (4, true), (8, true)] {
        let (n, k, blocks) = (19usize, 96usize, 3usize);
        let row = k * bits / 8;
        let data: Vec<u8> = (0..n * row).map(|i| (i * 37 + i / 11) as u8).collect();
        let zero_row = (blocks * bits).div_ceil(8);
        let zeros: Vec<u8> = (0..n * zero_row).map(|i| (i * 91) as u8).collect();
        let scales: Vec<f32> = (0..n * blocks).map(|i| 0.01 * (i + 1) as f32).collect();
        let data = HostTensor::new(&[n, row], &data);
        let mut tensors =
            vec![data.clone(), HostTensor::new(&[2], &[18i64, -19]), HostTensor::new(&[n, blocks], &scales)];
        tensors.extend(zero_points.then(|| HostTensor::new(&[n, zero_row], &zeros)));
        let mut expected = node(&[("bits", bits as i64), ("block_size", 32)]).constant(data).input(tensors[1].clone());
        expected = tensors[2..].iter().fold(expected, |n, t| n.constant(t.clone()));
        let expected = run(&expected);

        let mut graph = abi::Graph::default();
        for (i, t) in tensors.iter().enumerate() {
            graph.values.push(abi::Value {
                name: format!("x{i}"),
                dtype: Some(t.dtype()),
                shape: Some(t.shape().iter().map(|&d| abi::Dim::Known(d)).collect()),
                initializer: (i != 1).then(|| abi::Initializer {
                    dtype: t.dtype(),
                    shape: t.shape().to_vec(),
                    data: abi::InitializerData::Inline(t.clone()),
                }),
            });
        }
        let zero_slot = zero_points.then_some(3);
        let make = |op: &str, inputs: Vec<Option<usize>>, attrs: &[(&str, usize)]| abi::Node {
            name: op.into(),
            domain: "com.microsoft".into(),
            op_type: op.into(),
            since_version: 1,
            inputs,
            outputs: vec![],
            attrs: attrs.iter().map(|(k, v)| ((*k).into(), Attr::Int(*v as i64))).collect(),
            implicit_inputs: vec![],
            handle: 0,
        };
        let attrs = [("bits", bits), ("block_size", 32), ("K", k), ("N", n)];
        graph.nodes.push(make("GatherBlockQuantized", vec![Some(0), Some(1), Some(2), zero_slot], &attrs[..2]));
        graph.nodes.push(make("MatMulNBits", vec![None, Some(0), Some(2), zero_slot], &attrs));
        let facts: Vec<_> = tensors.iter().map(|t| Some(Arc::new(Fact::with_value(t.clone())))).collect();
        let (settings, mut constants, cache) = (Settings::default(), Constants::default(), PackCache::default());
        let mut cx = BuildCx::new(NodeCx::new(&graph, 0, &facts), &settings, &mut constants, &cache);
        let kernel = (find(&graph.nodes[0]).unwrap().build)(&mut cx).unwrap();
        assert!(cx.into_packed().contains(&0), "the rows come from the packed form");
        let inputs = [None, Some(tensors[1].clone()), None, None];
        let outputs = [Some((DType::F32, vec![2, k]))];
        let label = NodeLabel::of(&graph.nodes[0]);
        let out = crate::eval::run(&*kernel, &label, &inputs, &outputs, Par::serial()).unwrap();
        assert_eq!(out[0].as_ref().unwrap().as_slice::<f32>(), expected.as_slice::<f32>(), "bits {bits}");
    }
}
