//! Which experts a token goes to, and with what weight.

use super::problem::Routing;

/// How far below the greatest logit the sparse mixer still counts one, relative to the greater magnitude, twice.
const JITTER: f32 = 0.01;

impl Routing {
    /// The experts of one token and their weights, `top` each, from its logits, one an expert. `given`: weights that
    /// replace the logits' own.
    ///
    /// Of equal logits the later expert goes first, as in ORT's CPU kernels; in the sparse mixer, which only its CUDA
    /// kernels have, the earlier one.
    pub fn route(&self, logits: &[f32], given: Option<&[f32]>, experts: &mut [u32], weights: &mut [f32]) {
        if self.sparse_mixer {
            mix(logits, experts, weights);
        } else {
            choose(logits, experts);
        }
        match given {
            Some(given) => {
                for (weight, expert) in weights.iter_mut().zip(&*experts) {
                    *weight = given[*expert as usize];
                }
                if self.normalize {
                    let sum: f32 = weights.iter().sum();
                    let factor = if sum == 0.0 { 0.0 } else { 1.0 / sum };
                    weights.iter_mut().for_each(|w| *w *= factor);
                }
            }
            None if self.sparse_mixer => {}
            None => self.softmax(logits, experts, weights),
        }
    }

    /// Softmax over the chosen experts, or over all.
    fn softmax(&self, logits: &[f32], experts: &[u32], weights: &mut [f32]) {
        let top = logits[experts[0] as usize];
        for (weight, expert) in weights.iter_mut().zip(experts) {
            *weight = (logits[*expert as usize] - top).exp();
        }
        let sum: f32 = if self.normalize { weights.iter().sum() } else { logits.iter().map(|l| (l - top).exp()).sum() };
        weights.iter_mut().for_each(|w| *w /= sum);
    }
}

/// The greatest logits in order.
fn choose(logits: &[f32], experts: &mut [u32]) {
    let mut found = 0;
    for (e, &logit) in logits.iter().enumerate() {
        let at = experts[..found].iter().position(|&other| logit >= logits[other as usize]);
        let at = at.unwrap_or(found);
        if at < experts.len() {
            found = (found + 1).min(experts.len());
            experts.copy_within(at..found - 1, at + 1);
            experts[at] = e as u32;
        }
    }
}

/// Two experts: the greatest logit, and the greatest of the others; each is weighed among those that are close to it.
fn mix(logits: &[f32], experts: &mut [u32], weights: &mut [f32]) {
    let mut first = None;
    for (expert, weight) in experts.iter_mut().zip(weights) {
        let others = || logits.iter().enumerate().filter(|&(e, _)| Some(e) != first);
        let (chosen, top) =
            others().fold((0, f32::NEG_INFINITY), |best, (e, &l)| if l > best.1 { (e, l) } else { best });
        let close = |l: f32| top - l <= 2.0 * JITTER * l.abs().max(top);
        let sum: f32 = others().filter(|&(_, &l)| close(l)).map(|(_, l)| (l - top).exp()).sum();
        (*expert, *weight) = (chosen as u32, 1.0 / sum);
        first = Some(chosen);
    }
}

/// The rows that each expert computes: (token, choice) pairs, `token * top + choice`, expert by expert.
pub(super) struct Plan<'a> {
    /// Where expert `e`'s rows begin; one more than experts.
    pub starts: &'a [u32],
    /// The pairs, in order within an expert.
    pub rows: &'a [u32],
}

impl<'a> Plan<'a> {
    /// Sorts `experts`, one a pair, into `starts` and `rows`.
    pub fn new(experts: &[u32], starts: &'a mut [u32], rows: &'a mut [u32]) -> Self {
        starts.fill(0);
        for &e in experts {
            starts[e as usize] += 1;
        }
        let mut sum = 0;
        for start in starts.iter_mut() {
            sum += std::mem::replace(start, sum);
        }
        for (pair, &e) in experts.iter().enumerate() {
            rows[starts[e as usize] as usize] = pair as u32;
            starts[e as usize] += 1;
        }
        // Each start has moved to its end, which is the next one's start.
        starts.copy_within(..starts.len() - 1, 1);
        starts[0] = 0;
        Self { starts, rows }
    }

    /// Expert `e`'s range of `rows`.
    pub fn of(&self, e: usize) -> std::ops::Range<usize> {
        self.starts[e] as usize..self.starts[e + 1] as usize
    }
}
