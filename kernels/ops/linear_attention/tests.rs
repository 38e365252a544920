use crate::eval::Single;
use crate::par::Par;
use crate::testing::{FLOATS, Numbers, assert_close, assert_same_bytes, every_tier, slice, tensor, values};
use abi::{Attr, DType, HostTensor};
use proptest::prelude::*;

/// One call's sizes and attributes, and its tensors.
#[derive(Debug, Clone)]
struct Case {
    domain: &'static str,
    rule: &'static str,
    b: usize,
    t: usize,
    hq: usize,
    hk: usize,
    hv: usize,
    dk: usize,
    dv: usize,
    dtype: DType,
    state: DType,
    per_key: bool,
    one_beta: bool,
    scale: f32,
    past: bool,
}

impl Case {
    fn new(rule: &'static str) -> Self {
        Self {
            domain: "com.microsoft",
            rule,
            b: 2,
            t: 5,
            hq: 2,
            hk: 2,
            hv: 2,
            dk: 8,
            dv: 6,
            dtype: DType::F32,
            state: DType::F32,
            per_key: false,
            one_beta: false,
            scale: 0.0,
            past: true,
        }
    }

    fn inputs(&self, seed: u64) -> Inputs {
        let mut n = Numbers::new(seed);
        let Self { b, t, hq, hk, hv, dk, dv, .. } = *self;
        let mut key: Vec<f64> = (0..b * t * hk * dk).map(|_| n.normal()).collect();
        for k in key.chunks_exact_mut(dk) {
            let norm = k.iter().map(|v| v * v).sum::<f64>().sqrt();
            k.iter_mut().for_each(|v| *v /= norm);
        }
        let decays = if self.per_key { hv * dk } else { hv };
        let betas = if self.one_beta { 1 } else { hv };
        Inputs {
            query: n.tensor(self.dtype, &[b, t, hq * dk]),
            key: tensor(self.dtype, &[b, t, hk * dk], &key),
            value: n.tensor(self.dtype, &[b, t, hv * dv]),
            past: self.past.then(|| n.tensor(self.state, &[b, hv, dk, dv])),
            decay: self.rule.starts_with("gated").then(|| n.between(self.dtype, &[b, t, decays], -2.0, 0.0)),
            beta: self.rule.ends_with("delta").then(|| n.between(self.dtype, &[b, t, betas], 0.0, 1.0)),
        }
    }

    fn node(&self, x: &Inputs) -> Single {
        let since = if self.domain.is_empty() { 27 } else { 1 };
        let node = Single::new(self.domain, "LinearAttention", since, 2)
            .attr("q_num_heads", Attr::Int(self.hq as i64))
            .attr("kv_num_heads", Attr::Int(self.hv as i64))
            .attr("update_rule", Attr::String(self.rule.into()))
            .attr("scale", Attr::Float(self.scale))
            .input(x.query.clone())
            .input(x.key.clone())
            .input(x.value.clone());
        [&x.past, &x.decay, &x.beta].into_iter().fold(node, |node, tensor| match tensor {
            Some(tensor) => node.input(tensor.clone()),
            None => node.absent(),
        })
    }

    /// (output, present_state) in float64, from the definition.
    fn reference(&self, x: &Inputs) -> (Vec<f64>, Vec<f64>) {
        let Self { b, t, hq, hk, hv, dk, dv, .. } = *self;
        let (q, k, v) = (values(&x.query), values(&x.key), values(&x.value));
        let mut state = x.past.as_ref().map_or(vec![0.0; b * hv * dk * dv], values);
        let (decay, beta) = (x.decay.as_ref().map(values), x.beta.as_ref().map(values));
        let ho = hq.max(hv);
        let scale = if self.scale == 0.0 { (dk as f64).powf(-0.5) } else { self.scale.into() };
        let mut out = vec![0.0; b * t * ho * dv];
        for (bt, h) in (0..b * t).flat_map(|bt| (0..hv).map(move |h| (bt, h))) {
            let s = &mut state[(bt / t * hv + h) * dk * dv..][..dk * dv];
            let kk = &k[(bt * hk + h * hk / hv) * dk..][..dk];
            let mut delta = v[(bt * hv + h) * dv..][..dv].to_vec();
            if let Some(g) = &decay {
                for (i, row) in s.chunks_exact_mut(dv).enumerate() {
                    let at = if self.per_key { (bt * hv + h) * dk + i } else { bt * hv + h };
                    row.iter_mut().for_each(|s| *s *= g[at].exp());
                }
            }
            if let Some(beta) = &beta {
                let beta = beta[if self.one_beta { bt } else { bt * hv + h }];
                for (j, d) in delta.iter_mut().enumerate() {
                    let seen: f64 = (0..dk).map(|i| kk[i] * s[i * dv + j]).sum();
                    *d = beta * (*d - seen);
                }
            }
            for (i, row) in s.chunks_exact_mut(dv).enumerate() {
                row.iter_mut().zip(&delta).for_each(|(s, d)| *s += kk[i] * d);
            }
            for o in (0..ho).filter(|o| o * hv / ho == h) {
                let qq = &q[(bt * hq + o * hq / ho) * dk..][..dk];
                for j in 0..dv {
                    let sum: f64 = (0..dk).map(|i| qq[i] * s[i * dv + j]).sum();
                    out[(bt * ho + o) * dv + j] = scale * sum;
                }
            }
        }
        (out, state)
    }

    #[track_caller]
    fn check(&self) {
        let x = self.inputs(7);
        let (out, state) = self.reference(&x);
        for settings in every_tier() {
            let what = format!("{:?} {self:?}", settings.tier);
            let node = self.node(&x);
            let got = node.run(&settings, Par::serial()).expect("the case is valid");
            assert_close(&format!("output {what}"), got[0].as_ref(), &out);
            assert_close(&format!("state {what}"), got[1].as_ref(), &state);
            if self.past {
                let shared = node.run_in_place(&settings, Par::serial()).expect("the case is valid");
                assert_same_bytes(&what, &shared, &got);
            }
        }
    }
}

#[derive(Clone)]
struct Inputs {
    query: HostTensor,
    key: HostTensor,
    value: HostTensor,
    past: Option<HostTensor>,
    decay: Option<HostTensor>,
    beta: Option<HostTensor>,
}

const RULES: [&str; 4] = ["linear", "gated", "delta", "gated_delta"];

#[test]
fn every_rule_in_both_domains() {
    for rule in RULES {
        for domain in ["", "com.microsoft"] {
            Case { domain, ..Case::new(rule) }.check();
        }
    }
}

#[test]
fn grouped_and_inverse_grouped_heads() {
    for (hq, hk, hv) in [(4, 2, 2), (2, 2, 4), (2, 4, 4), (6, 2, 2), (3, 3, 9)] {
        for rule in RULES {
            let new = Case::new(rule);
            Case { hq, hk, hv, ..new }.check();
        }
    }
}

#[test]
fn optional_inputs_and_shapes() {
    for rule in RULES {
        for t in [0, 1, 2, 5] {
            for (past, per_key, one_beta, scale) in
                [(true, true, false, 0.0), (false, false, true, 1.0), (true, true, true, 0.25)]
            {
                let new = Case::new(rule);
                Case { t, past, per_key, one_beta, scale, ..new }.check();
            }
        }
    }
}

#[test]
fn sizes_around_the_vector_widths() {
    for (dk, dv) in [(1, 1), (7, 16), (32, 32), (5, 33), (128, 128), (16, 70), (64, 192), (3, 64)] {
        for t in [1, 3] {
            let new = Case::new("gated_delta");
            Case { dk, dv, t, ..new }.check();
        }
    }
}

#[test]
fn half_data_with_either_state() {
    for dtype in FLOATS {
        for state in [dtype, DType::F32] {
            for t in [0, 1, 9] {
                let new = Case::new("gated_delta");
                Case { dtype, state, t, dv: 64, ..new }.check();
            }
        }
    }
}

#[test]
fn wrong_inputs_are_named() {
    let case = Case::new("gated_delta");
    let x = case.inputs(1);
    let run = |case: &Case, x: &Inputs| {
        let error = case.node(x).run(&crate::settings::Settings::default(), Par::serial());
        error.expect_err("the case is invalid").to_string()
    };
    let message = run(&case, &Inputs { beta: None, ..x.clone() });
    assert!(message.contains("input 5 (beta)"), "{message}");
    let message = run(&Case { rule: "foo", ..case.clone() }, &x);
    assert!(message.contains("update_rule"), "{message}");
    let message = run(&Case { hv: 3, ..case.clone() }, &x);
    assert!(message.contains("q_num_heads"), "{message}");
    let message = run(&Case { domain: "", hv: 4, ..case.clone() }, &x);
    assert!(message.contains("q_num_heads"), "{message}");
    let past = Some(Numbers::new(1).tensor(DType::F32, &[2, 2, 8, 7]));
    let message = run(&case, &Inputs { past, ..x.clone() });
    assert!(message.contains("input 3 (past_state), dim 3"), "{message}");
    let decay = Some(Numbers::new(1).tensor(DType::F32, &[2, 5, 3]));
    let message = run(&case, &Inputs { decay, ..x });
    assert!(message.contains("input 4 (decay), dim 2"), "{message}");
}

impl Inputs {
    fn tokens(&self, part: std::ops::Range<usize>, past: HostTensor) -> Self {
        let cut = |tensor: &HostTensor| slice(tensor, 1, part.clone());
        Self {
            query: cut(&self.query),
            key: cut(&self.key),
            value: cut(&self.value),
            past: Some(past),
            decay: self.decay.as_ref().map(cut),
            beta: self.beta.as_ref().map(cut),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Tokens in pieces, each from the state that the last one left, are the tokens at once.
    #[test]
    fn pieces_are_the_whole(
        rule in 0..4usize,
        pieces in prop::collection::vec(0..6usize, 1..5),
        (hq, hk, hv) in prop::sample::select(vec![(2, 2, 2), (4, 2, 2), (2, 2, 4)]),
        (dk, dv) in (1..40usize, 1..80usize),
        per_key: bool,
    ) {
        let t = pieces.iter().sum();
        let case = Case { t, hq, hk, hv, dk, dv, per_key, ..Case::new(RULES[rule]) };
        let x = case.inputs(3);
        let (out, state) = case.reference(&x);
        for settings in every_tier() {
            let mut past = x.past.clone().expect("the case has a past");
            let mut parts = Vec::new();
            let mut start = 0;
            for piece in &pieces {
                let part = x.tokens(start..start + piece, past);
                start += piece;
                let mut got = case.node(&part).run_in_place(&settings, Par::serial()).expect("valid");
                past = got[1].take().expect("a state");
                parts.push(got[0].take().expect("an output"));
            }
            let mut joined = Vec::new();
            let width = hq.max(hv) * dv;
            for batch in 0..case.b {
                for part in &parts {
                    joined.extend(values(&slice(part, 0, batch..batch + 1)));
                }
            }
            let joined = tensor(DType::F32, &[case.b, t, width], &joined);
            assert_close("output", Some(&joined), &out);
            assert_close("state", Some(&past), &state);
        }
    }
}
