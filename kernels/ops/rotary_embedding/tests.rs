//! Against complex multiplication in float64.

use crate::cpu::float::Float;
use crate::eval::Single;
use crate::par::Par;
use crate::settings::Settings;
use abi::{Attr, HostTensor, Result};
use half::{bf16, f16};
use proptest::prelude::*;

/// Rows of the caches.
const M: usize = 23;

#[derive(Debug, Clone)]
struct Case {
    op: usize,
    b: usize,
    s: usize,
    n: usize,
    head: usize,
    half: usize,
    heads_first: bool,
    interleaved: bool,
    /// One offset (contrib), no positions (onnx), layout 1 (multimodal).
    variant: bool,
    section: [usize; 3],
}

fn wave(i: usize) -> f32 {
    ((i * 37 % 101) as f32 / 50.0 - 1.0) * 0.9
}

impl Case {
    fn many<T: Float>(n: usize, from: usize) -> Vec<T> {
        (from..from + n).map(|i| T::from_f32(wave(i))).collect()
    }

    fn position(&self, stream: usize, token: usize) -> usize {
        (token * 5 + stream * 3) % (M - 8)
    }

    /// Row of the caches for a pair of a token.
    fn row(&self, token: usize, pair: usize) -> usize {
        let [t, h, w] = self.section;
        match (self.op, self.variant) {
            (0, true) => 3 + token % self.s,
            (1, true) => {
                let stream = match pair % 3 {
                    1 if pair < 3 * h => 1,
                    2 if pair < 3 * w => 2,
                    _ => 0,
                };
                self.position(stream, token)
            }
            (1, false) => self.position(usize::from(pair >= t) + usize::from(pair >= t + h), token),
            (2, true) => token,
            _ => self.position(0, token),
        }
    }

    fn node<T: Float>(&self) -> Single {
        let (domain, name, since) = [
            ("com.microsoft", "RotaryEmbedding", 1),
            ("com.microsoft", "MRotaryEmbedding", 1),
            ("", "RotaryEmbedding", 23),
        ][self.op];
        let (b, s, tokens) = (self.b, self.s, self.b * self.s);
        let x = Self::many::<T>(tokens * self.n * self.head, 0);
        let shape = if self.heads_first { vec![b, self.n, s, self.head] } else { vec![b, s, self.n * self.head] };
        let by_token = self.op == 2 && self.variant;
        let cache = if by_token { vec![b, s, self.half] } else { vec![M, self.half] };
        let len = cache.iter().product();
        let (cos, sin) = (Self::many::<T>(len, 7), Self::many::<T>(len, 11));
        let ids: Vec<i64> = (0..3 * tokens).map(|i| self.position(i / tokens.max(1), i % tokens) as i64).collect();
        let ids = match (self.op, self.variant) {
            (0, true) => Some(HostTensor::new(&[1], &[3i64])),
            (1, _) => Some(HostTensor::new(&[3, b, s], &ids)),
            (2, true) => None,
            _ => Some(HostTensor::new(&[b, s], &ids[..tokens])),
        };
        let mut node = Single::new(domain, name, since, 1)
            .attr("num_heads", Attr::Int(self.n as i64))
            .attr("rotary_embedding_dim", Attr::Int(2 * self.half as i64))
            .attr("interleaved", Attr::Int(i64::from(self.interleaved)))
            .input(HostTensor::new(&shape, &x));
        if self.op == 1 {
            node = node
                .attr("mrope_section", Attr::Ints(self.section.iter().map(|&v| v as i64).collect()))
                .attr("mrope_layout", Attr::Int(i64::from(self.variant)));
        }
        let (cos, sin) = (HostTensor::new(&cache, &cos), HostTensor::new(&cache, &sin));
        match (self.op, ids) {
            (2, None) => node.input(cos).input(sin),
            (2, Some(ids)) => node.input(cos).input(sin).input(ids),
            (_, Some(ids)) => node.input(ids).input(cos).input(sin),
            (_, None) => unreachable!("only the onnx form goes without positions"),
        }
    }

    fn check<T: Float>(&self, tolerance: f64) {
        let got = self.node::<T>().run(&Settings::default(), Par::serial());
        let got = got.unwrap_or_else(|e| panic!("{self:?}: {e}"))[0].clone().expect("an output");
        let got = got.as_slice::<T>().expect("the type");
        let x: Vec<T> = Self::many(got.len(), 0);
        let f = |v: T| f64::from(v.to_f32());
        let len = self.half * if self.op == 2 && self.variant { self.b * self.s } else { M };
        let (cos, sin) = (Self::many::<T>(len, 7), Self::many::<T>(len, 11));
        for (at, got) in got.iter().enumerate() {
            let i = at % self.head;
            let rest = at / self.head;
            let token = if self.heads_first { rest / self.s / self.n * self.s + rest % self.s } else { rest / self.n };
            let row = at - i;
            let expected = if i >= 2 * self.half {
                f(x[at])
            } else {
                let (pair, second) =
                    if self.interleaved { (i / 2, i % 2 == 1) } else { (i % self.half, i >= self.half) };
                let (re, im) = if self.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + self.half) };
                let (re, im) = (f(x[row + re]), f(x[row + im]));
                let angle = self.row(token, pair) * self.half + pair;
                let (c, s) = (f(cos[angle]), f(sin[angle]));
                if second { re * s + im * c } else { re * c - im * s }
            };
            assert!((f(*got) - expected).abs() <= tolerance, "[{at}] {} not {expected}; {self:?}", f(*got));
        }
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (0usize..3, 1usize..3, 1usize..6, 1usize..4, 1usize..12, 0usize..9);
    (sizes, any::<[bool; 3]>(), 0usize..12, 0usize..12).prop_map(|((op, b, s, n, half, rest), f, t, h)| {
        let t = t.min(half);
        let h = h.min(half - t);
        Case {
            op,
            b,
            s,
            n,
            head: 2 * half + rest,
            half,
            heads_first: f[0],
            interleaved: f[1],
            variant: f[2],
            section: [t, h, half - t - h],
        }
    })
}

proptest! {
    #[test]
    fn matches_the_definition(case in cases()) {
        case.check::<f32>(1e-6);
        case.check::<f16>(2e-3);
        case.check::<bf16>(1.6e-2);
    }
}

fn plain(ids: &[i64]) -> Result<Vec<Option<HostTensor>>> {
    let x = vec![1f32; 3 * 8];
    Single::new("com.microsoft", "RotaryEmbedding", 1, 1)
        .input(HostTensor::new(&[1, 3, 8], &x))
        .input(HostTensor::new(&[ids.len() / 3, 3], ids))
        .input(HostTensor::new(&[4, 4], &x[..16]))
        .input(HostTensor::new(&[4, 4], &x[..16]))
        .run(&Settings::default(), Par::serial())
}

#[test]
fn hostile_positions_are_named() {
    assert!(plain(&[0, 1, 3]).is_ok());
    for bad in [&[0, 1, 4][..], &[0, -1, 2], &[i64::MAX, 0, 0], &[i64::MIN, 0, 0]] {
        let error = plain(bad).expect_err("out of range").to_string();
        assert!(error.contains("position_ids") && error.contains("0 to 3"), "{error}");
    }
    let error = plain(&[0, 1, 2, 0, 1, 2]).expect_err("two rows for one").to_string();
    assert!(error.contains("expected 1 or 1x3"), "{error}");
}
