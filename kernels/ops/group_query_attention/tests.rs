//! Against a float64 reference written from the definition.

use super::{shape, slot};
use crate::cpu::float::Float;
use crate::eval::Single;
use crate::fact::{Fact, Facts};
use crate::op::NodeCx;
use crate::par::Par;
use crate::settings::{Settings, Tier};
use abi::{Attr, DType, Dim, Graph, HostTensor, Node};
use proptest::prelude::*;
use std::sync::Arc;

/// One node and its inputs, all as f64.
#[derive(Debug, Clone)]
struct Case {
    heads: usize,
    kv_heads: usize,
    head: usize,
    rows: usize,
    /// Tokens by batch entry, after the step.
    tokens: Vec<usize>,
    /// Rows of the past; `None`: no past input.
    past: Option<usize>,
    /// The queries come with keys of their own.
    own_keys: bool,
    packed: bool,
    half: Option<usize>,
    interleaved: bool,
    window: Option<usize>,
    window_cache: bool,
    softcap: f32,
    smooth: bool,
    sink: bool,
    bias: Option<[bool; 2]>,
    causal: bool,
    norm: bool,
    positions: bool,
    seed: u64,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            heads: 4,
            kv_heads: 2,
            head: 16,
            rows: 1,
            tokens: vec![6],
            past: Some(5),
            own_keys: true,
            packed: false,
            half: None,
            interleaved: false,
            window: None,
            window_cache: false,
            softcap: 0.0,
            smooth: false,
            sink: false,
            bias: None,
            causal: true,
            norm: false,
            positions: false,
            seed: 1,
        }
    }
}

/// Numbers in -1..1 from a splitmix generator.
struct Random(u64);

impl Random {
    fn one(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// `n` numbers that `T` holds exactly.
    fn many<T: Float>(&mut self, n: usize) -> Vec<T> {
        (0..n).map(|_| T::from_f32(self.one() as f32)).collect()
    }
}

/// Every tensor of a case.
struct Data<T> {
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    past: [Vec<T>; 2],
    cos: Vec<T>,
    sin: Vec<T>,
    bias: Vec<T>,
    sink: Vec<T>,
    norm: [Vec<T>; 2],
    positions: Vec<i64>,
}

const POSITIONS: usize = 64;

impl Case {
    fn batch(&self) -> usize {
        self.tokens.len()
    }

    fn total(&self) -> usize {
        *self.tokens.iter().max().expect("a batch")
    }

    fn first(&self) -> bool {
        self.total() == self.rows
    }

    fn before(&self, b: usize) -> usize {
        if self.first() { 0 } else { self.tokens[b] - self.rows }
    }

    fn new_rows(&self) -> usize {
        if self.own_keys { self.rows } else { 0 }
    }

    fn resident(&self, tokens: usize) -> usize {
        match (self.window_cache, self.window, self.past) {
            (true, Some(w), Some(c)) if tokens > c => {
                let g = c - w + 1;
                tokens - g * (tokens - c).div_ceil(g)
            }
            _ => tokens,
        }
    }

    fn capacity(&self) -> usize {
        let past = self.past.unwrap_or(0);
        if self.window_cache { past } else { past.max(self.total()) }
    }

    fn data<T: Float>(&self) -> Data<T> {
        let mut r = Random(self.seed);
        let b = self.batch();
        let cache = b * self.kv_heads * self.past.unwrap_or(0) * self.head;
        let half = self.half.unwrap_or(0);
        let [bb, bh] = self.bias.unwrap_or_default();
        let (bb, bh) = (if bb { b } else { 1 }, if bh { self.heads } else { 1 });
        Data {
            q: r.many(b * self.rows * self.heads * self.head),
            k: r.many(b * self.new_rows() * self.kv_heads * self.head),
            v: r.many(b * self.new_rows() * self.kv_heads * self.head),
            past: [r.many(cache), r.many(cache)],
            cos: r.many(POSITIONS * half),
            sin: r.many(POSITIONS * half),
            bias: r.many(bb * bh * self.rows * self.total()),
            sink: r.many(self.heads),
            norm: [r.many(self.head), r.many(self.head)],
            positions: (0..b * self.rows).map(|i| (i * 7 % 50) as i64).collect(),
        }
    }

    fn node<T: Float>(&self, data: &Data<T>) -> Single {
        let (b, s, h) = (self.batch(), self.rows, self.head);
        let mut node = Single::new("com.microsoft", "GroupQueryAttention", 1, 3)
            .attr("num_heads", Attr::Int(self.heads as i64))
            .attr("kv_num_heads", Attr::Int(self.kv_heads as i64))
            .attr("softcap", Attr::Float(self.softcap))
            .attr("smooth_softmax", Attr::Int(i64::from(self.smooth)))
            .attr("causal", Attr::Int(i64::from(self.causal)))
            .attr("do_rotary", Attr::Int(i64::from(self.half.is_some())))
            .attr("rotary_interleaved", Attr::Int(i64::from(self.interleaved)))
            .attr("sliding_window_cache", Attr::Int(i64::from(self.window_cache)))
            .attr("local_window_size", Attr::Int(self.window.map_or(-1, |w| w as i64)));
        let t = |shape: &[usize], data: &[T]| HostTensor::new(shape, data);
        if self.packed {
            let (qw, kw) = (self.heads * h, self.kv_heads * h);
            let mut all = Vec::new();
            for row in 0..b * s {
                all.extend_from_slice(&data.q[row * qw..(row + 1) * qw]);
                all.extend_from_slice(&data.k[row * kw..(row + 1) * kw]);
                all.extend_from_slice(&data.v[row * kw..(row + 1) * kw]);
            }
            node = node.input(t(&[b, s, qw + 2 * kw], &all)).absent().absent();
        } else {
            let new = [b, self.new_rows(), self.kv_heads * h];
            node = node.input(t(&[b, s, self.heads * h], &data.q)).input(t(&new, &data.k)).input(t(&new, &data.v));
        }
        let lengths: Vec<_> = self.tokens.iter().map(|&t| t as i32 - 1).collect();
        let some = |node: Single, yes: bool, tensor: HostTensor| {
            if yes { node.input(tensor) } else { node.absent() }
        };
        for past in &data.past {
            let shape = [b, self.kv_heads, self.past.unwrap_or(0), h];
            node = some(node, self.past.is_some(), t(&shape, past));
        }
        node = node.input(HostTensor::new(&[b], &lengths)).input(HostTensor::new(&[], &[self.total() as i32]));
        let half = self.half.unwrap_or(0);
        for angle in [&data.cos, &data.sin] {
            node = some(node, half > 0, t(&[POSITIONS, half], angle));
        }
        node = some(node, self.positions, HostTensor::new(&[b, s], &data.positions));
        let [bb, bh] = self.bias.unwrap_or_default();
        let shape = [if bb { b } else { 1 }, if bh { self.heads } else { 1 }, s, self.total()];
        node = some(node, self.bias.is_some(), t(&shape, &data.bias));
        node = some(node, self.sink, t(&[self.heads], &data.sink));
        node = node.absent().absent();
        for norm in &data.norm {
            node = some(node, self.norm, t(&[h], norm));
        }
        node
    }

    /// Normalises and rotates a row.
    fn prepare<T: Float>(&self, data: &Data<T>, row: &mut [f64], weight: &[T], b: usize, s: usize) {
        if self.norm {
            let square = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
            let by = 1.0 / (square + f64::from(1e-6f32)).sqrt();
            row.iter_mut().zip(weight).for_each(|(v, w)| *v *= by * f64::from(w.to_f32()));
        }
        let Some(half) = self.half else { return };
        let position = match (self.positions, self.first()) {
            (false, _) => self.before(b) + s,
            (true, true) => data.positions[0] as usize + s,
            (true, false) => data.positions[b * self.rows + s] as usize,
        };
        let old = row.to_vec();
        for i in 0..half {
            let (x, y) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let cos = f64::from(data.cos[position * half + i].to_f32());
            let sin = f64::from(data.sin[position * half + i].to_f32());
            row[x] = old[x] * cos - old[y] * sin;
            row[y] = old[x] * sin + old[y] * cos;
        }
    }

    /// Keys or values of a head by position, and the output caches.
    fn history<T: Float>(&self, data: &Data<T>, b: usize, kv: usize, key: bool) -> Vec<Vec<f64>> {
        let (h, past) = (self.head, self.past.unwrap_or(0));
        let tokens = if self.own_keys { self.before(b) } else { self.tokens[b] };
        let held = self.resident(tokens);
        let cache = &data.past[usize::from(!key)];
        let mut rows = vec![vec![f64::NAN; h]; tokens - held];
        for t in 0..held {
            let at = ((b * self.kv_heads + kv) * past + t) * h;
            rows.push(cache[at..at + h].iter().map(|v| f64::from(v.to_f32())).collect());
        }
        let new = if key { &data.k } else { &data.v };
        for s in 0..self.new_rows() {
            let at = ((b * self.rows + s) * self.kv_heads + kv) * h;
            let mut row: Vec<_> = new[at..at + h].iter().map(|v| f64::from(v.to_f32())).collect();
            if key {
                self.prepare(data, &mut row, &data.norm[1], b, s);
            }
            rows.push(row);
        }
        rows
    }

    fn expected_output<T: Float>(&self, data: &Data<T>) -> Vec<f64> {
        let h = self.head;
        let mut out = Vec::new();
        for b in 0..self.batch() {
            for s in 0..self.rows {
                for n in 0..self.heads {
                    let kv = n * self.kv_heads / self.heads;
                    let (keys, values) = (self.history(data, b, kv, true), self.history(data, b, kv, false));
                    let at = ((b * self.rows + s) * self.heads + n) * h;
                    let mut q: Vec<_> = data.q[at..at + h].iter().map(|v| f64::from(v.to_f32())).collect();
                    self.prepare(data, &mut q, &data.norm[0], b, s);
                    let here = self.before(b) + s + 1;
                    let end = if self.causal { here.min(self.tokens[b]) } else { self.tokens[b] };
                    let start = self.window.map_or(0, |w| here.saturating_sub(w)).min(end);
                    let mut logits: Vec<f64> = (start..end)
                        .map(|t| {
                            let dot: f64 = q.iter().zip(&keys[t]).map(|(a, b)| a * b).sum();
                            let mut x = dot / (h as f64).sqrt();
                            if self.softcap > 0.0 {
                                let cap = f64::from(self.softcap);
                                x = cap * (x / cap).tanh();
                            }
                            if let Some([bb, bh]) = self.bias {
                                let (bi, hi) = (if bb { b } else { 0 }, if bh { n } else { 0 });
                                let heads = if bh { self.heads } else { 1 };
                                let at = ((bi * heads + hi) * self.rows + s) * self.total() + t;
                                x += f64::from(data.bias[at].to_f32());
                            }
                            x
                        })
                        .collect();
                    let sink = match (self.sink, self.smooth) {
                        (true, _) => f64::from(data.sink[n].to_f32()).exp(),
                        (false, true) => 1.0,
                        _ => 0.0,
                    };
                    logits.iter_mut().for_each(|x| *x = x.exp());
                    let sum = logits.iter().sum::<f64>() + sink;
                    let value = |i: usize| -> f64 {
                        let y: f64 = (start..end).zip(&logits).map(|(t, w)| w * values[t][i]).sum();
                        if start == end { 0.0 } else { y / sum }
                    };
                    out.extend((0..h).map(value));
                }
            }
        }
        out
    }

    /// Expected contents of a cache; NaN where anything goes.
    fn expected_cache<T: Float>(&self, data: &Data<T>, key: bool) -> Vec<f64> {
        let mut out = Vec::new();
        for b in 0..self.batch() {
            for kv in 0..self.kv_heads {
                let mut rows = self.history(data, b, kv, key);
                if self.window_cache {
                    rows.truncate(self.tokens[b]);
                    rows.drain(..rows.len() - self.resident(self.tokens[b]));
                }
                let mut flat: Vec<f64> = rows.concat();
                flat.resize(self.capacity() * self.head, 0.0);
                out.extend(flat);
            }
        }
        out
    }

    fn check<T: Float>(&self, tolerance: f64) {
        let data = self.data::<T>();
        let node = self.node(&data);
        let expected =
            [self.expected_output(&data), self.expected_cache(&data, true), self.expected_cache(&data, false)];
        for tier in Tier::ALL.into_iter().filter(|t| t.is_available()) {
            let settings = Settings { tier, chunks: 3, ..Settings::default() };
            let got = node.run(&settings, Par::serial()).unwrap_or_else(|e| panic!("{self:?}: {e}"));
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let got = got.as_ref().expect("an output");
                let got = got.as_slice::<T>().expect("the type");
                assert_eq!(got.len(), expected.len(), "output {i} of {self:?}");
                let scale = expected.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
                for (j, (g, e)) in got.iter().zip(expected).enumerate() {
                    let error = (f64::from(g.to_f32()) - e).abs() / scale;
                    assert!(error <= tolerance, "{tier} output {i}[{j}]: {g:?} not {e}; {self:?}", g = g.to_f32());
                }
            }
        }
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes =
        (1usize..4, 1usize..4, prop_oneof![Just(8usize), Just(16), 1usize..40], 1usize..7, 0usize..40, 1usize..3);
    let flags = proptest::collection::vec(any::<bool>(), 12);
    (sizes, flags, any::<u64>(), 0usize..6).prop_map(|((kv, group, head, rows, before, batch), f, seed, ragged)| {
        let first = before == 0;
        let tokens = (0..batch)
            .map(|b| if b == 0 { rows + before } else { (rows + before - ragged.min(before)).max(1) })
            .collect();
        let past = match (first, f[0]) {
            (true, true) => None,
            (false, true) => Some(before),
            (_, false) => Some(before + rows + 3),
        };
        let half = (f[1] && head > 1).then_some(if f[2] { head / 2 } else { (head / 4).max(1) });
        let window = f[3].then_some(1 + seed as usize % 9);
        Case {
            heads: kv * group,
            kv_heads: kv,
            head,
            rows,
            tokens,
            past,
            packed: f[4],
            half,
            interleaved: f[5],
            window,
            softcap: if f[6] { 0.7 } else { 0.0 },
            smooth: f[7],
            sink: f[8],
            bias: f[9].then_some([f[10], f[11]]),
            causal: window.is_some() || f[10] || f[4],
            norm: f[11],
            positions: half.is_some() && f[7],
            seed,
            ..Case::default()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn matches_the_definition(case in cases()) {
        case.check::<f32>(1e-5);
        case.check::<half::f16>(1e-3);
        case.check::<half::bf16>(8e-3);
    }
}

proptest! {
    #[test]
    fn counts_that_make_no_difference(
        rows in 1usize..4, past in 0usize..9, angles in 5usize..9, old in 0i32..12, new in 0i32..12, rotary: bool,
    ) {
        let fact = |shape: &[usize]| Some(Fact::new(DType::F32, shape.iter().map(|&d| Dim::Known(d)).collect()));
        let total = |t: i32| Some(Fact::with_value(HostTensor::new(&[1], &[t])));
        let attr = |name: &str, n: i64| (name.to_string(), Attr::Int(n));
        let cache = fact(&[1, 1, past, 8]);
        let lengths = Some(Fact::new(DType::I32, vec![Dim::Known(1)]));
        let table = fact(&[angles, 4]).filter(|_| rotary);
        let new_keys = fact(&[1, rows, 8]);
        let facts = [new_keys.clone(), new_keys.clone(), new_keys, cache.clone(), cache, lengths, total(new), table.clone(), table];
        let node = Node {
            name: "attention".into(),
            domain: "com.microsoft".into(),
            op_type: "GroupQueryAttention".into(),
            since_version: 1,
            inputs: facts.iter().enumerate().map(|(i, fact)| fact.as_ref().map(|_| i)).collect(),
            outputs: vec![Some(9), Some(10), Some(11)],
            attrs: [attr("num_heads", 1), attr("kv_num_heads", 1), attr("do_rotary", rotary.into())].into(),
            implicit_inputs: Vec::new(),
            handle: 0,
        };
        let graph = Graph { nodes: vec![node], ..Graph::default() };
        let mut facts: Facts = facts.into_iter().map(|fact| fact.map(Arc::new)).collect();
        let before = total(old).expect("just made");
        let steady = shape::steady(&NodeCx::new(&graph, 0, &facts), slot::TOTAL, &before);
        let made = |facts: &Facts| shape::infer(&NodeCx::new(&graph, 0, facts)).map(|all| all.into_iter().map(|fact| fact.shape).collect::<Vec<_>>());
        let after = made(&facts);
        facts[slot::TOTAL] = Some(Arc::new(before));
        let first = |t: i32| t as usize == rows;
        // Just when all is well and stays so: else a growing length costs time.
        let within = |t: i32| t as usize <= past;
        let same = matches!((made(&facts), after), (Ok(a), Ok(b)) if a == b) && first(old) == first(new);
        prop_assert_eq!(steady, same && within(old) && within(new));
    }
}
