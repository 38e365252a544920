//! The function between the projections.

use super::problem::{Activation, Gate, Kind};
use crate::cpu::math::{sigmoid, silu, tanh};

/// One row of what the first projections gave: FC1's values, FC3's (or none).
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub fc1: &'a [f32],
    pub fc3: &'a [f32],
}

impl Gate {
    /// The activated value and its factor, for feature `i` of `inter`.
    #[inline(always)]
    fn pair(self, row: Row<'_>, i: usize, inter: usize) -> (f32, f32) {
        match self {
            Self::None => (row.fc1[i], 1.0),
            Self::Interleaved => (row.fc1[2 * i], row.fc1[2 * i + 1]),
            Self::Halves => (row.fc1[i], row.fc1[inter + i]),
            Self::Separate => (row.fc1[i], row.fc3[i]),
        }
    }
}

impl Activation {
    /// The features of one row, every `stride`th of `out` from the first on.
    pub fn apply(&self, gate: Gate, row: Row<'_>, inter: usize, out: &mut [f32], stride: usize) {
        let each = |f: &dyn Fn(f32, f32) -> f32, out: &mut [f32]| {
            for (i, out) in out.iter_mut().step_by(stride).take(inter).enumerate() {
                let (g, l) = gate.pair(row, i, inter);
                *out = f(g, l);
            }
        };
        let Self { alpha, beta, limit, .. } = *self;
        match self.kind {
            Kind::Relu => each(&|g, l| g.max(0.0) * l, out),
            Kind::Relu2 => each(&|g, l| g.max(0.0) * g.max(0.0) * l, out),
            Kind::Gelu | Kind::Geglu => each(&|g, l| gelu(g) * l, out),
            Kind::Silu => each(&|g, l| silu(g) * l, out),
            Kind::Identity => each(&|g, l| g * l, out),
            Kind::Swiglu if self.limit_after => {
                each(&|g, l| (g * sigmoid(alpha * g)).min(limit) * (l.clamp(-limit, limit) + beta), out);
            }
            Kind::Swiglu => each(
                &|g, l| {
                    let g = g.min(limit);
                    g * sigmoid(alpha * g) * (l.clamp(-limit, limit) + beta)
                },
                out,
            ),
        }
    }
}

/// x times the normal distribution function at x, by a tanh.
#[inline(always)]
fn gelu(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + tanh(SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)))
}
