//! The function between the projections.

use super::problem::{Activation, Gate, Kind};
use crate::cpu::isa::{Isa, Job, dispatch};
use crate::cpu::math::{sigmoid, silu, tanh};
use crate::settings::Tier;

/// One row of what the first projections gave: FC1's values, FC3's (or none), and where the features go.
pub(super) struct Row<'a> {
    pub fc1: &'a [f32],
    pub fc3: &'a [f32],
    pub out: &'a mut [f32],
}

impl Activation {
    /// The features of one row.
    pub fn apply(&self, tier: Tier, gate: Gate, row: Row<'_>) {
        dispatch(tier, Apply { activation: *self, gate, row });
    }
}

struct Apply<'a> {
    activation: Activation,
    gate: Gate,
    row: Row<'a>,
}

impl Job for Apply<'_> {
    type Out = ();
    #[inline(always)]
    fn run<I: Isa>(self) {
        let Activation { kind, alpha, beta, limit, limit_after } = self.activation;
        match kind {
            Kind::Relu => self.each(|g, l| g.max(0.0) * l),
            Kind::Relu2 => self.each(|g, l| g.max(0.0) * g.max(0.0) * l),
            Kind::Gelu | Kind::Geglu => self.each(|g, l| gelu(g) * l),
            Kind::Silu => self.each(|g, l| silu(g) * l),
            Kind::Identity => self.each(|g, l| g * l),
            Kind::Swiglu if limit_after => {
                self.each(|g, l| (g * sigmoid(alpha * g)).min(limit) * (l.max(-limit).min(limit) + beta));
            }
            Kind::Swiglu => self.each(|g, l| {
                let g = g.min(limit);
                g * sigmoid(alpha * g) * (l.max(-limit).min(limit) + beta)
            }),
        }
    }
}

impl Apply<'_> {
    /// `f` of the activated value and its factor, feature by feature.
    #[inline(always)]
    fn each(self, f: impl Fn(f32, f32) -> f32) {
        let Row { fc1, fc3, out } = self.row;
        let inter = out.len();
        match self.gate {
            Gate::None => out.iter_mut().zip(fc1).for_each(|(out, &g)| *out = f(g, 1.0)),
            Gate::Interleaved => {
                out.iter_mut().zip(fc1.as_chunks::<2>().0).for_each(|(out, &[g, l])| *out = f(g, l));
            }
            Gate::Halves => {
                let (g, l) = fc1.split_at(inter);
                out.iter_mut().zip(g.iter().zip(l)).for_each(|(out, (&g, &l))| *out = f(g, l));
            }
            Gate::Separate => out.iter_mut().zip(fc1.iter().zip(fc3)).for_each(|(out, (&g, &l))| *out = f(g, l)),
        }
    }
}

/// x times the normal distribution function at x, by a tanh.
#[inline(always)]
fn gelu(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + tanh(SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)))
}
