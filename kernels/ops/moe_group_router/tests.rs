use crate::eval::Single;
use crate::ops::testing::{assert_close, fault, held, run, tensor};
use crate::par::Par;
use crate::settings::Settings;
use abi::{Attr, DType, HostTensor};

fn logits(values: &[f64]) -> HostTensor {
    tensor(DType::F32, &[1, values.len()], values)
}

fn router(values: &[f64], bias: &[f64], attrs: &[(&str, i64)]) -> Single {
    let node = Single::new("com.microsoft", "MoEGroupRouter", 1, 1).input(logits(values)).constant(tensor(
        DType::F32,
        &[bias.len()],
        bias,
    ));
    attrs.iter().fold(node, |node, (name, value)| node.attr(name, Attr::Int(*value)))
}

fn log_sigmoid(x: f64) -> f64 {
    -(-x).exp().ln_1p()
}

#[test]
fn the_best_groups_then_the_best_experts() {
    // The second group has the single best expert, the first the best two.
    let out = run(&router(&[1.0, 0.9, 1.5, -9.0], &[0.0; 4], &[("n_group", 2), ("top_k", 1)]));
    assert_close("router", &out, &[log_sigmoid(1.0), -10000.0, -10000.0, -10000.0]);
    let alone = [("n_group", 2), ("top_k", 1), ("group_topk", 1)];
    let out = run(&router(&[1.0, 0.9, 1.5, -9.0], &[0.0; 4], &alone));
    assert_close("router", &out, &[-10000.0, -10000.0, log_sigmoid(1.5), -10000.0]);
}

#[test]
fn the_bias_chooses_and_does_not_weigh() {
    let out = run(&router(&[1.0, 0.5, 0.0], &[0.0, 0.0, 2.0], &[("top_k", 1)]));
    assert_close("router", &out, &[-10000.0, -10000.0, 0.5f64.ln()]);
}

#[test]
fn of_equals_the_earlier() {
    let out = held(&run(&router(&[0.0; 6], &[0.0; 6], &[("n_group", 3), ("topk_group", 2), ("top_k", 3)])));
    let chosen: Vec<_> = out.iter().map(|v| *v > -100.0).collect();
    assert_eq!(chosen, [true, true, true, false, false, false]);
}

#[test]
fn groups_may_hold_fewer_than_are_asked_for() {
    let out = held(&run(&router(&[1.0, 2.0, 3.0, 4.0], &[0.0; 4], &[("n_group", 2), ("top_k", 3)])));
    assert_eq!(out.iter().filter(|v| **v > -100.0).count(), 2);
}

#[test]
fn scores_of_all_experts() {
    let sentence = fault(
        &Single::new("com.microsoft", "MoEGroupRouter", 1, 3)
            .input(logits(&[1.0]))
            .constant(tensor(DType::F32, &[1], &[0.0]))
            .attr("top_k", Attr::Int(1)),
    );
    assert!(sentence.contains("none beside the scores of all experts"), "{sentence}");
    let node = Single::new("com.microsoft", "MoEGroupRouter", 1, 3)
        .without_outputs(&[0])
        .input(tensor(DType::F32, &[1, 2], &[2.0, 1.0]))
        .constant(tensor(DType::F32, &[2], &[0.5, 0.25]))
        .constant(tensor(DType::F32, &[2, 2], &[1.0, -1.0, 0.0, -2.0]))
        .attr("top_k", Attr::Int(1));
    let mut out = node.run(&Settings::default(), Par::serial()).expect("the node is valid");
    let s = [log_sigmoid(1.0).exp(), log_sigmoid(-2.0).exp()];
    assert_close("router_weights", &out[2].take().unwrap(), &s);
    assert_close("selection_scores", &out[1].take().unwrap(), &[s[0] + 0.5, s[1] + 0.25]);
}
