use crate::eval::Single;
use crate::par::Par;
use crate::settings::Settings;
use crate::testing::{FLOATS, Numbers, assert_close, assert_same_bytes, every_tier, slice, tensor, values};
use abi::{Attr, DType, HostTensor};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    domain: &'static str,
    activation: &'static str,
    b: usize,
    c: usize,
    t: usize,
    k: usize,
    dilation: usize,
    last: bool,
    bias: bool,
    past: bool,
    constant: bool,
    dtype: DType,
}

const CASE: Case = Case {
    domain: "com.microsoft",
    activation: "silu",
    b: 2,
    c: 6,
    t: 5,
    k: 4,
    dilation: 1,
    last: false,
    bias: true,
    past: true,
    constant: true,
    dtype: DType::F32,
};

struct Inputs {
    input: HostTensor,
    weight: HostTensor,
    bias: Option<HostTensor>,
    past: Option<HostTensor>,
}

impl Case {
    fn length(&self) -> usize {
        (self.k - 1) * self.dilation
    }

    /// Inputs in channels-first order, whatever the layout.
    fn inputs(&self) -> Inputs {
        let mut n = Numbers::new(11);
        Inputs {
            input: n.tensor(self.dtype, &[self.b, self.c, self.t]),
            weight: n.tensor(self.dtype, &[self.c, 1, self.k]),
            bias: self.bias.then(|| n.tensor(self.dtype, &[self.c])),
            past: self.past.then(|| n.tensor(self.dtype, &[self.b, self.c, self.length()])),
        }
    }

    /// [B, C, n] as the node wants it: itself, or [B, n, 2, C / 2].
    fn layout(&self, from: &HostTensor) -> HostTensor {
        if !self.last {
            return from.clone();
        }
        let n = from.shape()[2];
        let shape = [self.b, n, 2, self.c / 2];
        tensor(self.dtype, &shape, &self.reorder(&values(from), n))
    }

    fn reorder(&self, from: &[f64], n: usize) -> Vec<f64> {
        if !self.last {
            return from.to_vec();
        }
        let mut to = vec![0.0; from.len()];
        for (i, v) in from.iter().enumerate() {
            let (b, c, t) = (i / n / self.c, i / n % self.c, i % n);
            to[(b * n + t) * self.c + c] = *v;
        }
        to
    }

    fn node(&self, x: &Inputs) -> Single {
        let since = if self.domain.is_empty() { 27 } else { 1 };
        let mut node = Single::new(self.domain, "CausalConvWithState", since, 2)
            .attr("activation", Attr::String(self.activation.into()));
        if !self.domain.is_empty() {
            node = node
                .attr("dilation", Attr::Int(self.dilation as i64))
                .attr("channels_last", Attr::Int(self.last.into()));
        }
        node = node.input(self.layout(&x.input));
        for weight in [Some(&x.weight), x.bias.as_ref()] {
            node = match weight {
                None => node.absent(),
                Some(weight) if self.constant => node.constant(weight.clone()),
                Some(weight) => node.input(weight.clone()),
            };
        }
        match &x.past {
            Some(past) => node.input(self.layout(past)),
            None => node,
        }
    }

    /// (output, present state) in float64, from the definition.
    fn reference(&self, x: &Inputs) -> (Vec<f64>, Vec<f64>) {
        let (input, weight) = (values(&x.input), values(&x.weight));
        let bias = x.bias.as_ref().map_or(vec![0.0; self.c], values);
        let length = self.length();
        let past = x.past.as_ref().map_or(vec![0.0; self.b * self.c * length], values);
        let (mut out, mut state) = (Vec::new(), Vec::new());
        for row in 0..self.b * self.c {
            let mut full = past[row * length..][..length].to_vec();
            full.extend(&input[row * self.t..][..self.t]);
            for t in 0..self.t {
                let taps = (0..self.k).map(|j| weight[row % self.c * self.k + j] * full[t + j * self.dilation]);
                let sum = bias[row % self.c] + taps.sum::<f64>();
                out.push(if self.activation == "none" { sum } else { sum / (1.0 + (-sum).exp()) });
            }
            state.extend(&full[full.len() - length..]);
        }
        (self.reorder(&out, self.t), self.reorder(&state, length))
    }

    #[track_caller]
    fn check(&self) {
        let x = self.inputs();
        let (out, state) = self.reference(&x);
        for settings in every_tier() {
            let what = format!("{:?} {self:?}", settings.tier);
            let node = self.node(&x);
            let got = node.run(&settings, Par::serial()).expect("the case is valid");
            assert_close(&format!("output {what}"), got[0].as_ref(), &out);
            assert_eq!(values(got[1].as_ref().expect("a state")), state, "state {what}");
            if self.past {
                let shared = node.run_in_place(&settings, Par::serial()).expect("the case is valid");
                assert_same_bytes(&what, &shared, &got);
            }
        }
    }
}

#[test]
fn lengths_around_the_state() {
    for domain in ["", "com.microsoft"] {
        for activation in ["none", "silu", "swish"] {
            for t in [0, 1, 2, 3, 4, 5, 40] {
                for k in [1, 2, 4, 7] {
                    let new = CASE.clone();
                    Case { domain, activation, t, k, ..new }.check();
                }
            }
        }
    }
}

#[test]
fn optional_inputs_weights_and_layouts() {
    for last in [false, true] {
        for constant in [false, true] {
            for (bias, past) in [(false, false), (true, false), (false, true)] {
                for (t, dilation) in [(0, 1), (1, 2), (5, 3), (30, 2)] {
                    for dtype in FLOATS {
                        let new = CASE.clone();
                        Case { last, constant, bias, past, t, dilation, dtype, ..new }.check();
                    }
                }
            }
        }
    }
}

#[test]
fn many_channels() {
    for last in [false, true] {
        for t in [1, 9] {
            let new = CASE.clone();
            Case { last, t, c: 700, ..new }.check();
        }
    }
}

#[test]
fn wrong_inputs_are_named() {
    let x = CASE.inputs();
    let fail = |node: Single| {
        let error = node.run(&Settings::default(), Par::serial());
        error.expect_err("the case is invalid").to_string()
    };
    for (name, value) in [("ndim", 2), ("state_window", 3), ("dilation", 0), ("input_channels", 2)] {
        let message = fail(Case { dilation: 1, ..CASE }.node(&x).attr(name, Attr::Int(value)));
        assert!(message.contains(name), "{message}");
    }
    let past = Some(Numbers::new(1).tensor(DType::F32, &[2, 6, 2]));
    let message = fail(CASE.node(&Inputs { past, ..CASE.inputs() }));
    assert!(message.contains("input 3 (past_state), dim 2"), "{message}");
    let bias = Some(Numbers::new(1).tensor(DType::F32, &[5]));
    let message = fail(CASE.node(&Inputs { bias, ..CASE.inputs() }));
    assert!(message.contains("input 2 (bias), dim 0"), "{message}");
    let message = fail(Case { activation: "gelu", ..CASE }.node(&x));
    assert!(message.contains("activation"), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Positions in pieces, each from the state that the last one left, are the positions at once.
    #[test]
    fn pieces_are_the_whole(
        pieces in prop::collection::vec(0..6usize, 1..5),
        (c, k, dilation) in (1..20usize, 1..6usize, 1..4usize),
        last: bool,
    ) {
        let t = pieces.iter().sum();
        // Channels-last inputs here have two channel axes.
        let case = Case { t, k, dilation, last, c: 2 * c, ..CASE };
        let x = case.inputs();
        let (out, state) = case.reference(&x);
        let axis = if last { 1 } else { 2 };
        for settings in every_tier() {
            let whole = case.node(&x).run(&settings, Par::serial()).expect("valid");
            assert_close("output", whole[0].as_ref(), &out);
            let mut past = x.past.clone().expect("the case has a past");
            let mut start = 0;
            for piece in &pieces {
                let part = Case { t: *piece, ..case.clone() };
                let inputs = Inputs {
                    input: slice(&x.input, 2, start..start + piece),
                    weight: x.weight.clone(),
                    bias: x.bias.clone(),
                    past: Some(past),
                };
                let got = part.node(&inputs).run_in_place(&settings, Par::serial()).expect("valid");
                let whole = slice(whole[0].as_ref().expect("an output"), axis, start..start + piece);
                assert_close("piece", got[0].as_ref(), &values(&whole));
                past = part.channels_first(got[1].as_ref().expect("a state"));
                start += piece;
            }
            assert_close("state", Some(&case.layout(&past)), &state);
        }
    }
}

impl Case {
    /// What [`Self::layout`] made of a state.
    fn channels_first(&self, from: &HostTensor) -> HostTensor {
        if !self.last {
            return from.clone();
        }
        let (from, n) = (values(from), self.length());
        let mut to = vec![0.0; from.len()];
        for (i, v) in to.iter_mut().enumerate() {
            let (b, c, t) = (i / n / self.c, i / n % self.c, i % n);
            *v = from[(b * n + t) * self.c + c];
        }
        tensor(self.dtype, &[self.b, self.c, n], &to)
    }
}
