use crate::eval::Single;
use crate::par::Par;
use crate::settings::Settings;
use crate::testing::{FLOATS, Numbers, assert_close, assert_same_bytes, every_tier, tensor, values};
use abi::{Attr, DType, HostTensor};

#[derive(Debug, Clone)]
struct Case {
    rule: &'static str,
    gate: &'static str,
    beta: &'static str,
    l2: bool,
    scale: f32,
    /// Tokens of each sequence.
    lengths: Vec<usize>,
    heads: usize,
    value_heads: usize,
    dk: usize,
    dv: usize,
    layout: Layout,
    per_key: bool,
    /// Elements of dt_bias a head: 1 or D.
    biases: usize,
    dtype: DType,
    gates: DType,
    state: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// [N, H, D], sequences of one length.
    Tokens,
    /// [N, H, D] with cu_seqlens.
    Ragged,
    /// [B, S, H, D].
    Batch,
    /// [N, 2 Hq D + Hv E].
    Packed,
    /// [B, S, 2 Hq D + Hv E].
    PackedBatch,
}

fn case() -> Case {
    Case {
        rule: "gated_delta",
        gate: "none",
        beta: "none",
        l2: false,
        scale: 0.0,
        lengths: vec![5, 5],
        heads: 2,
        value_heads: 2,
        dk: 8,
        dv: 6,
        layout: Layout::Batch,
        per_key: false,
        biases: 1,
        dtype: DType::F32,
        gates: DType::F32,
        state: true,
    }
}

/// Token-major inputs, each [N, ...].
struct Inputs {
    q: HostTensor,
    k: HostTensor,
    v: HostTensor,
    decay: HostTensor,
    beta: HostTensor,
    state: HostTensor,
    a_log: HostTensor,
    dt_bias: HostTensor,
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl Case {
    fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    fn inputs(&self) -> Inputs {
        let mut r = Numbers::new(21);
        let (n, h, dk) = (self.tokens(), self.value_heads, self.dk);
        let mut k = values(&r.tensor(self.dtype, &[n, self.heads, dk]));
        if !self.l2 {
            for head in k.chunks_exact_mut(dk) {
                let norm = head.iter().map(|v| v * v).sum::<f64>().sqrt();
                head.iter_mut().for_each(|v| *v /= norm);
            }
        }
        let decays = if self.per_key { vec![n, h, dk] } else { vec![n, h] };
        let top = if self.gate == "none" { 0.0 } else { 2.0 };
        let biases = if self.biases == 1 { vec![h] } else { vec![h, dk] };
        Inputs {
            q: r.tensor(self.dtype, &[n, self.heads, dk]),
            k: tensor(self.dtype, &[n, self.heads, dk], &k),
            v: r.tensor(self.dtype, &[n, h, self.dv]),
            decay: r.between(self.gates, &decays, -2.0, top),
            beta: r.between(self.gates, &[n, h], 0.0, 1.0),
            state: r.tensor(DType::F32, &[self.lengths.len(), h, self.dv, dk]),
            a_log: r.tensor(DType::F32, &[h]),
            dt_bias: r.tensor(DType::F32, &biases),
        }
    }

    /// `t` with its token axis as this layout has it.
    fn lead(&self, t: &HostTensor) -> HostTensor {
        let batch = matches!(self.layout, Layout::Batch | Layout::PackedBatch);
        let mut shape = t.shape().to_vec();
        if batch {
            shape.splice(0..1, [self.lengths.len(), self.lengths[0]]);
        }
        HostTensor::from_bytes(t.dtype(), &shape, t.bytes()).expect("the same bytes")
    }

    fn node(&self, x: &Inputs) -> Single {
        let mut node = Single::new("com.microsoft", "GatedDeltaNet", 1, 2)
            .attr("update_rule", Attr::String(self.rule.into()))
            .attr("gate_activation", Attr::String(self.gate.into()))
            .attr("beta_activation", Attr::String(self.beta.into()))
            .attr("qk_l2_norm", Attr::Int(self.l2.into()))
            .attr("scale", Attr::Float(self.scale));
        if matches!(self.layout, Layout::Packed | Layout::PackedBatch) {
            let parts =
                [&x.q, &x.k, &x.v].map(|t| (values(t), t.shape().iter().product::<usize>() / self.tokens().max(1)));
            let mut packed = Vec::new();
            for t in 0..self.tokens() {
                parts.iter().for_each(|(v, width)| packed.extend(&v[t * width..(t + 1) * width]));
            }
            let width = 2 * self.heads * self.dk + self.value_heads * self.dv;
            let packed = tensor(self.dtype, &[self.tokens(), width], &packed);
            node = node.input(self.lead(&packed)).absent().absent();
        } else {
            node = node.input(self.lead(&x.q)).input(self.lead(&x.k)).input(self.lead(&x.v));
        }
        node = if self.layout == Layout::Ragged {
            let mut sums = vec![0i32];
            self.lengths.iter().for_each(|n| sums.push(sums[sums.len() - 1] + *n as i32));
            node.input(HostTensor::new(&[sums.len()], &sums))
        } else {
            node.absent()
        };
        let gated = self.rule.starts_with("gated");
        let optional = [
            gated.then(|| self.lead(&x.decay)),
            self.rule.ends_with("delta").then(|| self.lead(&x.beta)),
            self.state.then(|| x.state.clone()),
            (self.gate != "none").then(|| x.a_log.clone()),
            (self.gate != "none").then(|| x.dt_bias.clone()),
        ];
        optional.into_iter().fold(node, |node, tensor| match tensor {
            Some(tensor) => node.input(tensor),
            None => node.absent(),
        })
    }

    /// Token `t`'s log decay of a head's key dim.
    fn log_decay(&self, x: &Inputs, t: usize, h: usize, i: usize) -> f64 {
        if !self.rule.starts_with("gated") {
            return 0.0;
        }
        let at = t * self.value_heads + h;
        let raw = values(&x.decay)[if self.per_key { at * self.dk + i } else { at }];
        let bias = values(&x.dt_bias)[if self.biases == 1 { h } else { h * self.dk + i }];
        let a = values(&x.a_log)[h].exp();
        match self.gate {
            "none" => raw,
            "softplus" | "qwen" => -a * (raw + bias).exp().ln_1p(),
            _ => -5.0 * sigmoid(a * (raw + bias)),
        }
    }

    /// (output, final state) in float64, from the definition.
    fn reference(&self, x: &Inputs) -> (Vec<f64>, Vec<f64>) {
        let (dk, dv, hv) = (self.dk, self.dv, self.value_heads);
        let unit = |x: &HostTensor| {
            let mut x = values(x);
            for head in x.chunks_exact_mut(dk).filter(|_| self.l2) {
                let norm = (head.iter().map(|v| v * v).sum::<f64>() + 1e-12).sqrt();
                head.iter_mut().for_each(|v| *v /= norm);
            }
            x
        };
        let (q, k, v, betas) = (unit(&x.q), unit(&x.k), values(&x.v), values(&x.beta));
        let scale = if self.scale == 0.0 { (dk as f64).powf(-0.5) } else { self.scale.into() };
        let mut state = if self.state { values(&x.state) } else { vec![0.0; values(&x.state).len()] };
        let mut out = vec![0.0; self.tokens() * hv * dv];
        let mut first = 0;
        for (sequence, length) in self.lengths.iter().enumerate() {
            for (t, h) in (first..first + length).flat_map(|t| (0..hv).map(move |h| (t, h))) {
                let head = t * self.heads + h * self.heads / hv;
                let (kk, qq) = (&k[head * dk..][..dk], &q[head * dk..][..dk]);
                let decay: Vec<_> = (0..dk).map(|i| self.log_decay(x, t, h, i).exp()).collect();
                for j in 0..dv {
                    let row = &mut state[((sequence * hv + h) * dv + j) * dk..][..dk];
                    row.iter_mut().zip(&decay).for_each(|(s, f)| *s *= f);
                    let mut delta = v[(t * hv + h) * dv + j];
                    if self.rule.ends_with("delta") {
                        let raw = betas[t * hv + h];
                        let beta = if self.beta == "sigmoid" { sigmoid(raw) } else { raw };
                        delta = beta * (delta - row.iter().zip(kk).map(|(s, k)| s * k).sum::<f64>());
                    }
                    row.iter_mut().zip(kk).for_each(|(s, k)| *s += k * delta);
                    let sum: f64 = row.iter().zip(qq).map(|(s, q)| s * q).sum();
                    out[(t * hv + h) * dv + j] = scale * sum;
                }
            }
            first += length;
        }
        (out, state)
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
            assert_close(&format!("state {what}"), got[1].as_ref(), &state);
            if self.state {
                let shared = node.run_in_place(&settings, Par::serial()).expect("the case is valid");
                assert_same_bytes(&what, &shared, &got);
            }
        }
    }
}

#[test]
fn rules_types_and_layouts() {
    for rule in ["linear", "gated", "delta", "gated_delta"] {
        for layout in [Layout::Tokens, Layout::Ragged, Layout::Batch, Layout::Packed, Layout::PackedBatch] {
            for dtype in FLOATS {
                for gates in [DType::F32, dtype] {
                    Case { rule, layout, dtype, gates, ..case() }.check();
                }
            }
        }
    }
}

#[test]
fn gates_and_norms() {
    for gate in ["none", "softplus", "qwen", "sigmoid", "kda"] {
        for (per_key, biases) in [(false, 1), (true, 1), (true, 8)] {
            for l2 in [false, true] {
                for layout in [Layout::Packed, Layout::Batch] {
                    Case { gate, per_key, biases, l2, layout, beta: "sigmoid", value_heads: 4, ..case() }.check();
                }
            }
        }
    }
}

#[test]
fn ragged_sequences() {
    for lengths in [vec![3, 5], vec![1, 1], vec![0, 4], vec![4, 0, 2], vec![7], vec![1, 6, 1], vec![0]] {
        for state in [false, true] {
            Case { lengths: lengths.clone(), state, layout: Layout::Ragged, ..case() }.check();
        }
    }
}

#[test]
fn sizes_around_the_vector_widths() {
    for (dk, dv) in [(1, 1), (7, 16), (32, 32), (5, 33), (128, 128), (33, 70)] {
        for length in [0, 1, 3] {
            for per_key in [false, true] {
                Case { dk, dv, per_key, lengths: vec![length; 2], ..case() }.check();
            }
        }
    }
}

#[test]
fn wrong_inputs_are_named() {
    let x = case().inputs();
    let fail = |node: Single| {
        let error = node.run(&Settings::default(), Par::serial());
        error.expect_err("the case is invalid").to_string()
    };
    let message = fail(Case { state: false, layout: Layout::Tokens, ..case() }.node(&x));
    assert!(message.contains("input 6 (initial_state)"), "{message}");
    let message = fail(Case { rule: "foo", ..case() }.node(&x));
    assert!(message.contains("update_rule"), "{message}");
    let message = fail(case().node(&x).attr("state_update_capacity", Attr::Int(2)));
    assert!(message.contains("state_update_capacity"), "{message}");
    let message = fail(case().node(&x).attr("gate_activation", Attr::String("kda".into())));
    assert!(message.contains("input 7 (a_log)"), "{message}");
    let wrong = Inputs { v: Numbers::new(1).tensor(DType::F32, &[10, 3, 6]), ..case().inputs() };
    let message = fail(case().node(&wrong));
    assert!(message.contains("input 2 (value), heads"), "{message}");
}

#[test]
fn wrong_sequence_lengths_are_named() {
    let x = case().inputs();
    for sums in [[0, 2, 4], [0, 11, 10], [1, 2, 10], [-1, 2, 10], [0, 2, 19], [10, 10, 10]] {
        let node = Single::new("com.microsoft", "GatedDeltaNet", 1, 2)
            .input(x.q.clone())
            .input(x.k.clone())
            .input(x.v.clone())
            .input(HostTensor::new(&[3], &sums))
            .input(x.decay.clone())
            .input(x.beta.clone())
            .input(x.state.clone());
        let error = node.run(&Settings::default(), Par::serial());
        let message = error.expect_err("the sums are wrong").to_string();
        assert!(message.contains("input 3 (cu_seqlens)"), "{message}");
    }
}
