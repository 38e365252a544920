use super::pack::Form;
use super::problem::{Format, Gate, Matrix, Routing, Slots, Stored};
use super::route::Plan;
use crate::eval::Single;
use crate::ops::testing::{assert_close, fault, run, tensor};
use crate::quant::nbits::{Layout, ZeroPoint};
use abi::{Attr, DType, HostTensor};

fn routing(top: usize, normalize: bool, sparse_mixer: bool) -> Routing {
    Routing { top, normalize, sparse_mixer }
}

fn route(routing: Routing, logits: &[f32], given: Option<&[f32]>) -> (Vec<u32>, Vec<f32>) {
    let (mut experts, mut weights) = (vec![0; routing.top], vec![0.0; routing.top]);
    routing.route(logits, given, &mut experts, &mut weights);
    (experts, weights)
}

#[test]
fn equal_logits_go_to_the_later_expert() {
    let (experts, weights) = route(routing(3, true, false), &[-2.0, -1.0, -1.0, -2.0, -1.5], None);
    assert_eq!(experts, [2, 1, 4]);
    assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    assert_eq!(route(routing(2, true, false), &[0.5; 4], None), (vec![3, 2], vec![0.5, 0.5]));
}

#[test]
fn weights_are_shares_of_all_unless_normalized() {
    let logits = [1.0f32, 2.0, 3.0, 0.0];
    let sum: f32 = logits.iter().map(|l| l.exp()).sum();
    let (experts, weights) = route(routing(2, false, false), &logits, None);
    assert_eq!(experts, [2, 1]);
    assert!((weights[0] - 3f32.exp() / sum).abs() < 1e-6 && (weights[1] - 2f32.exp() / sum).abs() < 1e-6);
}

#[test]
fn given_weights_replace_the_logits_own() {
    let given = [0.1, 0.2, 0.6, 0.0];
    assert_eq!(route(routing(2, false, false), &[1.0, 2.0, 3.0, 0.0], Some(&given)).1, [0.6, 0.2]);
    let (_, weights) = route(routing(2, true, false), &[1.0, 2.0, 3.0, 0.0], Some(&given));
    assert!((weights[0] - 0.75).abs() < 1e-6 && (weights[1] - 0.25).abs() < 1e-6);
    assert_eq!(route(routing(2, true, false), &[1.0, 2.0, 3.0, 0.0], Some(&[0.0; 4])).1, [0.0, 0.0]);
}

#[test]
fn the_sparse_mixer_weighs_among_the_close() {
    // 3.0 and 2.99 are close; to 2.99 only 2.98 is, once 3.0 is taken.
    let (experts, weights) = route(routing(2, false, true), &[0.0, 3.0, 2.99, 2.98], None);
    assert_eq!(experts, [1, 2]);
    let first = 1.0 / (1.0 + (-0.01f32).exp() + (-0.02f32).exp());
    let second = 1.0 / (1.0 + (-0.01f32).exp());
    assert!((weights[0] - first).abs() < 1e-5 && (weights[1] - second).abs() < 1e-5, "{weights:?}");
    assert_eq!(route(routing(2, false, true), &[-5.0, -1.0, -3.0], None), (vec![1, 2], vec![1.0, 1.0]));
}

#[test]
fn rows_are_sorted_by_expert() {
    let (mut starts, mut rows) = (vec![7; 5], vec![9; 6]);
    let plan = Plan::new(&[3, 0, 3, 1, 0, 3], &mut starts, &mut rows);
    assert_eq!([0, 1, 2, 3].map(|e| plan.of(e)), [0..2, 2..3, 3..3, 3..6]);
    assert_eq!(plan.rows, [1, 4, 3, 0, 2, 5]);
}

/// Two experts of one feature in and one between: fc1 = [2, 3], fc2 = [1, 10].
fn dense(logits: &[f64]) -> Single {
    Single::new("com.microsoft", "MoE", 1, 1)
        .attr("activation_type", Attr::String("identity".into()))
        .attr("k", Attr::Int(1))
        .input(tensor(DType::F32, &[2, 1], &[1.0, 4.0]))
        .input(tensor(DType::F32, &[2, 2], logits))
        .constant(tensor(DType::F32, &[2, 1, 1], &[2.0, 3.0]))
        .constant(tensor(DType::F32, &[2, 1], &[0.5, 0.25]))
        .constant(tensor(DType::F32, &[2, 1, 1], &[1.0, 10.0]))
}

#[test]
fn each_token_has_its_expert() {
    // Both logits far apart: the weight is 1.
    let out = run(&dense(&[100.0, 0.0, 0.0, 100.0]));
    assert_close("MoE", &out, &[2.5, 122.5]);
    let out = run(&dense(&[100.0, 0.0, 100.0, 0.0]));
    assert_close("MoE", &out, &[2.5, 8.5]);
}

/// One expert of int4 weights, [1, N, K / 2] each, whose dims the test chooses.
fn quantized(fc1: &[usize], fc2: &[usize], scales: [&[usize]; 2], hidden: usize) -> Single {
    let bytes = |shape: &[usize]| HostTensor::new(shape, &vec![0x99u8; shape.iter().product()]);
    let ones = |shape: &[usize]| tensor(DType::F32, shape, &vec![1.0; shape.iter().product()]);
    Single::new("com.microsoft", "QMoE", 1, 1)
        .attr("activation_type", Attr::String("identity".into()))
        .input(ones(&[1, hidden]))
        .input(ones(&[1, 1]))
        .constant(bytes(fc1))
        .constant(ones(scales[0]))
        .absent()
        .constant(bytes(fc2))
        .constant(ones(scales[1]))
}

#[test]
fn equal_dims_are_declined_by_name() {
    let square = || quantized(&[1, 64, 32], &[1, 64, 32], [&[1, 64], &[1, 64]], 64);
    assert!(fault(&square()).contains("set weights_prepacked to 0 or 1"));
    // 9 - 8 = 1 everywhere: 64 inputs of 1, then 64 of 64.
    assert_close("QMoE", &run(&square().attr("weights_prepacked", Attr::Int(0))), &[4096.0; 64]);
    // All codes are one: their order does not matter.
    assert_close("QMoE", &run(&square().attr("weights_prepacked", Attr::Int(1))), &[4096.0; 64]);
}

#[test]
fn dims_tell_the_layout() {
    let rows = quantized(&[1, 32, 32], &[1, 64, 16], [&[1, 32], &[1, 64]], 64);
    assert_close("QMoE", &run(&rows), &[2048.0; 64]);
    let prepacked = || quantized(&[1, 64, 64], &[1, 128, 32], [&[1, 128], &[1, 64]], 64);
    assert_close("QMoE", &run(&prepacked()), &[8192.0; 64]);
    let sentence = fault(&prepacked().attr("weights_prepacked", Attr::Int(0)));
    assert!(sentence.contains("these are the dims of prepacked weights"), "{sentence}");
    let neither = fault(&quantized(&[1, 32, 16], &[1, 64, 16], [&[1, 32], &[1, 64]], 64));
    assert!(neither.contains("[E, 1 I, H * bits / 8]"), "{neither}");
}

/// On a device, experts take at most 1.05 times what the model holds, at real widths.
#[test]
fn packed_experts_add_little() {
    let slots = Slots { name: "fc1", weights: 2, bias: 4, scales: Some(3), zero_points: Some(11), global: Some(15) };
    for (n, k) in [(512, 2048), (2048, 512), (2880, 2880), (768, 2048), (1408, 2048), (14336, 4096), (4096, 14336)] {
        let int = |bits, block, zero_point| {
            let layout = Layout { n, k, bits, block, scale: DType::F16, zero_point };
            let (b, scales, points) = layout.source_bytes();
            (Format::Int(layout), b + scales + points)
        };
        let mut formats = vec![
            (Format::Dense(DType::F16), 2 * n * k),
            (Format::Fp4 { block: 32 }, n * k / 2 + n * k / 32),
            (Format::Fp4 { block: 16 }, n * k / 2 + n * k / 16),
            (Format::Fp8 { block: 128 }, n * k),
            (Format::Fp8 { block: 0 }, n * k),
        ];
        for bits in [2, 4, 8] {
            formats.extend([32, 64, 128].map(|block| int(bits, block, ZeroPoint::Default)));
            formats.extend([32, 64, 128].map(|block| int(bits, block, ZeroPoint::Bytes)));
        }
        for (format, held) in formats {
            for (gate, features) in [(Gate::None, n), (Gate::Interleaved, n / 2)] {
                let matrix = Matrix { slots, n, k, format, stored: Stored::Rows };
                let bytes = Form::of(DType::F16, gate, &[&matrix], features).bytes();
                assert!(bytes as f64 <= 1.05 * held as f64, "{format:?}, {n} x {k}, {gate:?}: {bytes} for {held}");
            }
        }
    }
}
