//! Against a float64 reference written from the definition.

use crate::cpu::float::Float;
use crate::eval::Single;
use crate::par::Par;
use crate::settings::{Settings, Tier};
use abi::{Attr, HostTensor};
use half::{bf16, f16};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    since: u32,
    flat: bool,
    b: usize,
    kv: usize,
    group: usize,
    s: usize,
    l: usize,
    past: Option<usize>,
    h: usize,
    w: usize,
    causal: bool,
    left: i64,
    right: i64,
    softcap: f32,
    scale: Option<f32>,
    mode: i64,
    /// Which of the mask's dims are there in full, and whether it is boolean.
    mask: Option<([bool; 4], bool)>,
    /// Rank of the mask.
    mask_rank: usize,
    lengths: Option<Vec<usize>>,
    seed: usize,
}

fn wave(i: usize) -> f32 {
    let x = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((x >> 40) as f32 / (1u64 << 24) as f32) * 2.0 - 1.0
}

/// Element `i` of tensor `seed`.
fn one<T: Float>(i: usize, seed: usize) -> T {
    T::from_f32(wave(i + 7919 * seed + 1))
}

fn many<T: Float>(n: usize, seed: usize) -> Vec<T> {
    (0..n).map(|i| one(i, seed)).collect()
}

impl Case {
    fn n(&self) -> usize {
        self.kv * self.group
    }

    fn t(&self) -> usize {
        self.past.unwrap_or(0) + self.l
    }

    fn mask_shape(&self, full: [bool; 4]) -> Vec<usize> {
        let dims = [self.b, self.n(), self.s, self.t()];
        let all: Vec<_> = dims.iter().zip(full).map(|(&d, f)| if f { d } else { 1 }).collect();
        all[4 - self.mask_rank..].to_vec()
    }

    fn node<T: Float>(&self) -> Single {
        let (b, n, kv) = (self.b, self.n(), self.kv);
        let mut node = Single::new("", "Attention", self.since, 4)
            .attr("is_causal", Attr::Int(i64::from(self.causal)))
            .attr("softcap", Attr::Float(self.softcap))
            .attr("qk_matmul_output_mode", Attr::Int(self.mode));
        if self.since >= 25 {
            node = node.attr("left_window_size", Attr::Int(self.left)).attr("right_window_size", Attr::Int(self.right));
        }
        if let Some(scale) = self.scale {
            node = node.attr("scale", Attr::Float(scale));
        }
        if self.flat {
            node = node.attr("q_num_heads", Attr::Int(n as i64)).attr("kv_num_heads", Attr::Int(kv as i64));
        }
        for (i, (heads, rows, head)) in
            [(n, self.s, self.h), (kv, self.l, self.h), (kv, self.l, self.w)].into_iter().enumerate()
        {
            let shape = if self.flat { vec![b, rows, heads * head] } else { vec![b, heads, rows, head] };
            node = node.input(HostTensor::new(&shape, &many::<T>(b * heads * rows * head, self.seed + i)));
        }
        node = match self.mask {
            None => node.absent(),
            Some((full, boolean)) => {
                let shape = self.mask_shape(full);
                let values = many::<T>(shape.iter().product(), self.seed + 3);
                if boolean {
                    let bytes: Vec<u8> = values.iter().map(|v| u8::from(v.to_f32() < 0.3)).collect();
                    node.input(HostTensor::from_bytes(abi::DType::Bool, &shape, &bytes).expect("sizes agree"))
                } else {
                    node.input(HostTensor::new(&shape, &values))
                }
            }
        };
        for (i, head) in [self.h, self.w].into_iter().enumerate() {
            node = match self.past {
                None => node.absent(),
                Some(p) => {
                    node.input(HostTensor::new(&[b, kv, p, head], &many::<T>(b * kv * p * head, self.seed + 4 + i)))
                }
            };
        }
        match &self.lengths {
            None => node,
            Some(l) => {
                let l: Vec<_> = l.iter().map(|&v| v as i64).collect();
                node.input(HostTensor::new(&[b], &l))
            }
        }
    }

    /// Element of keys (0) or values (1) with the past in front.
    fn joined<T: Float>(&self, which: usize, b: usize, kv: usize, t: usize, i: usize) -> T {
        let (head, past) = (if which == 0 { self.h } else { self.w }, self.past.unwrap_or(0));
        if t < past {
            return one(((b * self.kv + kv) * past + t) * head + i, self.seed + 4 + which);
        }
        let t = t - past;
        let row = if self.flat { (b * self.l + t) * self.kv + kv } else { (b * self.kv + kv) * self.l + t };
        one(row * head + i, self.seed + 1 + which)
    }

    /// Y, then the scores at the asked stage.
    fn expected<T: Float>(&self) -> [Vec<f64>; 2] {
        let f = |v: T| f64::from(v.to_f32());
        let (n, t) = (self.n(), self.t());
        let (mut y, mut all) = (vec![0.0; self.b * n * self.s * self.w], Vec::new());
        let q = many::<T>(self.b * n * self.s * self.h, self.seed);
        let mask = self.mask.map(|(full, boolean)| (self.mask_shape(full), boolean));
        let mask_values = mask.as_ref().map(|(s, _)| many::<T>(s.iter().product(), self.seed + 3));
        for (b, head, s) in (0..self.b).flat_map(|b| (0..n).flat_map(move |h| (0..self.s).map(move |s| (b, h, s)))) {
            let row = if self.flat { (b * self.s + s) * n + head } else { (b * n + head) * self.s + s };
            let scale = self.scale.map_or(1.0 / (self.h as f64).sqrt(), f64::from);
            let mut scores: Vec<f64> = (0..t)
                .map(|j| {
                    let dot: f64 = (0..self.h)
                        .map(|i| f(q[row * self.h + i]) * f(self.joined::<T>(0, b, head / self.group, j, i)))
                        .sum();
                    dot * scale
                })
                .collect();
            let mut shown = scores.clone();
            if self.softcap > 0.0 {
                let cap = f64::from(self.softcap);
                scores.iter_mut().for_each(|v| *v = cap * (*v / cap).tanh());
            }
            if self.mode == 1 {
                shown = scores.clone();
            }
            let valid = self.lengths.as_ref().map_or(t, |l| l[b]) as i64;
            let offset = match self.lengths {
                Some(_) => valid - self.s as i64,
                None => self.past.unwrap_or(0) as i64,
            };
            for (j, score) in scores.iter_mut().enumerate() {
                if let (Some((shape, boolean)), Some(values)) = (&mask, &mask_values) {
                    let index = [b, head, s, j];
                    let mut at = 0;
                    for (dim, i) in shape.iter().zip(&index[4 - shape.len()..]) {
                        at = at * dim + if *dim == 1 { 0 } else { *i };
                    }
                    let v = f(values[at]);
                    *score += if !boolean {
                        v
                    } else if v < f64::from(0.3f32) {
                        0.0
                    } else {
                        f64::NEG_INFINITY
                    };
                }
                let (j, here) = (j as i64, offset + s as i64);
                let window = self.since >= 25;
                let hidden = j >= valid
                    || (self.causal && j > here)
                    || (window && self.left >= 0 && j < here - self.left)
                    || (window && self.right >= 0 && j > here + self.right);
                if hidden {
                    *score = f64::NEG_INFINITY;
                }
            }
            if self.mode == 2 {
                shown = scores.clone();
            }
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if top == f64::NEG_INFINITY {
                scores.fill(0.0);
            } else {
                scores.iter_mut().for_each(|v| *v = (*v - top).exp());
                let sum: f64 = scores.iter().sum();
                scores.iter_mut().for_each(|v| *v /= sum);
            }
            for i in 0..self.w {
                y[row * self.w + i] =
                    (0..t).map(|j| scores[j] * f(self.joined::<T>(1, b, head / self.group, j, i))).sum();
            }
            if self.mode == 3 {
                shown = scores;
            }
            all.extend(shown);
        }
        [y, all]
    }

    fn check<T: Float>(&self, tolerance: f64) {
        let [y, scores] = self.expected::<T>();
        let present = |which: usize| -> Vec<f64> {
            let head = if which == 0 { self.h } else { self.w };
            let mut out = Vec::new();
            for (b, kv) in (0..self.b).flat_map(|b| (0..self.kv).map(move |kv| (b, kv))) {
                for (t, i) in (0..self.t()).flat_map(|t| (0..head).map(move |i| (t, i))) {
                    out.push(f64::from(self.joined::<T>(which, b, kv, t, i).to_f32()));
                }
            }
            out
        };
        let expected = [y, present(0), present(1), scores];
        let node = self.node::<T>();
        for tier in Tier::ALL.into_iter().filter(|t| t.is_available()) {
            let settings = Settings { tier, chunks: 2, ..Settings::default() };
            let got = node.run(&settings, Par::serial()).unwrap_or_else(|e| panic!("{self:?}: {e}"));
            for (slot, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let got = got.as_ref().expect("an output").as_slice::<T>().expect("the type");
                assert_eq!(got.len(), expected.len(), "output {slot} of {self:?}");
                for (i, (g, e)) in got.iter().zip(expected).enumerate() {
                    let g = f64::from(g.to_f32());
                    let close = (g - e).abs() <= tolerance * e.abs().max(1.0);
                    assert!(g == *e || close, "{tier} output {slot}[{i}]: {g} not {e}; {self:?}");
                }
            }
        }
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (1usize..3, 1usize..3, 1usize..4, 1usize..6, 1usize..80, 0usize..6);
    let heads = (1usize..36, 1usize..36);
    let numbers = (23u32..26, -1i64..5, -1i64..5, 0i64..4, 1usize..5, 0usize..1000);
    (sizes, heads, numbers, any::<[bool; 12]>()).prop_map(
        |((b, kv, group, s, l, past), (h, w), (since, left, right, mode, mask_rank, seed), f)| {
            let lengths = (since >= 24 && f[9]).then(|| (0..b).map(|i| (seed / (i + 1)) % (l + 1)).collect());
            Case {
                since,
                flat: f[0],
                b,
                kv,
                group,
                s,
                l,
                past: (f[1] && lengths.is_none()).then_some(past),
                h,
                w,
                causal: f[2],
                left,
                right,
                softcap: if f[3] { 0.8 } else { 0.0 },
                scale: f[4].then_some(0.37),
                mode,
                mask: f[5].then_some(([f[6], f[7], f[8], f[10]], f[11])),
                mask_rank,
                lengths,
                seed,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn matches_the_definition(case in cases()) {
        case.check::<f32>(1e-5);
        case.check::<f16>(1e-3);
        case.check::<bf16>(8e-3);
    }
}

fn plain(lengths: i64, mask: &[usize], since: u32) -> Result<Vec<Option<HostTensor>>, abi::Error> {
    let x = vec![0.5f32; 64];
    let tensor = |shape: &[usize]| HostTensor::new(shape, &x[..shape.iter().product()]);
    let node = Single::new("", "Attention", since, 1)
        .input(tensor(&[1, 2, 2, 4]))
        .input(tensor(&[1, 1, 6, 4]))
        .input(tensor(&[1, 1, 6, 3]))
        .input(tensor(mask));
    let node = if since < 24 { node } else { node.absent().absent().input(HostTensor::new(&[1], &[lengths])) };
    node.run(&Settings::default(), Par::serial())
}

#[test]
fn a_short_mask_hides_the_keys_behind_it() {
    assert!(plain(6, &[2, 5], 24).is_ok());
    let error = plain(6, &[2, 5], 23).expect_err("opset 23 has no short masks").to_string();
    assert!(error.contains("attn_mask") && error.contains("1x2x2x6"), "{error}");
}

#[test]
fn hostile_lengths_are_named() {
    for bad in [-1, 7, i64::MAX, i64::MIN] {
        let error = plain(bad, &[2, 6], 24).expect_err("out of range").to_string();
        assert!(error.contains("nonpad_kv_seqlen") && error.contains("0 to 6"), "{error}");
    }
}
