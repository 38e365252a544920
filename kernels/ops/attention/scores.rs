//! Output 3: the scores at one stage of the computation, for whoever wants to look at them.

use super::Stage;
use super::shape::Dims;
use crate::cpu::attention::Attention;
use crate::cpu::float::Float;
use crate::kernel::Carver;
use crate::par::{Par, SharedMut};

impl Dims {
    /// Scratch bytes a lane: a query, a key and a row of scores.
    pub fn score_scratch(&self) -> usize {
        2 * Carver::size::<f32>(self.head) + Carver::size::<f32>(self.keys())
    }
}

impl<T: Float> Attention<'_, T> {
    /// Writes `[B, N, S, T]`. `scratch`: [`Dims::score_scratch`] for each lane.
    pub(super) fn write_scores(&self, out: &mut [T], stage: Stage, lanes: usize, par: Par<'_>, scratch: &mut [u8]) {
        let s = &self.sizes;
        if s.keys == 0 {
            return;
        }
        let lane_bytes = 2 * Carver::size::<f32>(s.dim) + Carver::size::<f32>(s.keys);
        let rows = s.batch * s.heads * s.rows;
        let lanes = lanes.clamp(1, par.width());
        let (out, scratch) = (SharedMut::new(out), SharedMut::new(scratch));
        par.for_each(lanes, |lane| {
            // SAFETY: every lane has a piece of its own.
            let mut carver = Carver::new(unsafe { scratch.slice(lane * lane_bytes..(lane + 1) * lane_bytes) });
            let (q, k, scores) = (carver.take(s.dim), carver.take(s.dim), carver.take(s.keys));
            for i in rows * lane / lanes..rows * (lane + 1) / lanes {
                self.score_row(i, stage, q, k, scores);
                // SAFETY: every lane has rows of its own.
                T::narrow(scores, unsafe { out.slice(i * s.keys..(i + 1) * s.keys) });
            }
        });
    }

    fn score_row(&self, i: usize, stage: Stage, q: &mut [f32], k: &mut [f32], scores: &mut [f32]) {
        let s = &self.sizes;
        let (b, head, row) = (i / s.rows / s.heads, i / s.rows % s.heads, i % s.rows);
        (self.load_query)(b, head, row, q);
        for (t, score) in scores.iter_mut().enumerate() {
            T::widen(self.keys.get(b, head / (s.heads / s.kv_heads), t, s.dim), k);
            *score = q.iter().zip(&*k).map(|(a, b)| a * b).sum::<f32>() * self.scale;
        }
        if stage >= Stage::Softcapped && self.softcap > 0.0 {
            scores.iter_mut().for_each(|v| *v = self.softcap * (*v / self.softcap).tanh());
        }
        if stage >= Stage::Biased {
            if let Some(bias) = self.bias {
                bias(b, head, row, 0..s.keys, scores);
            }
            let seen = (self.visible)(b, row);
            for (t, score) in scores.iter_mut().enumerate() {
                if !seen.contains(&t) {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
        if stage == Stage::Softmax {
            let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if top == f32::NEG_INFINITY {
                scores.fill(0.0);
                return;
            }
            scores.iter_mut().for_each(|v| *v = (*v - top).exp());
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|v| *v /= sum);
        }
    }
}
