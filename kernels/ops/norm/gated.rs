//! com.microsoft GatedRMSNorm 1:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GatedRMSNorm>.
//!
//! X, gate and Y [..., H C], scale `[C]`; the mean of squares is over each group of C.

use super::cuda;
use super::rows::{Activation, Call, Norm};
use crate::build::BuildCx;
use crate::cpu::convert::{Floats, FloatsMut, widened, widened_bytes};
use crate::fact::{Fact, unify};
use crate::kernel::{Carver, Kernel, RunCx, Shapes};
use crate::op::{Decline, NodeCx, OpDef};
use crate::settings::Tier;
use crate::shapes::{agree, ranked, show};
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] =
    &[OpDef::new("com.microsoft", "GatedRMSNorm", (1, 1), claim, infer, build).with_cuda(cuda::build_gated)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(3)?;
    cx.check_dtype(0, "X", &[DType::F32, DType::F16, DType::BF16])?;
    let dtype = cx.required(0)?.dtype;
    cx.check_dtype(1, "scale", &[dtype])?;
    cx.check_dtype(2, "gate", &[dtype])?;
    cx.check_string("activation", "silu", &["silu", "swish", "sigmoid"])
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (x, gate) = (cx.required(0)?, cx.required(2)?);
    let c = &ranked(cx, 1, "scale", 1)?[0];
    let shape = match (&x.shape, &gate.shape) {
        (Some(a), Some(b)) => {
            if a.len() != b.len() || a.iter().zip(b).any(|(a, b)| unify(a, b).is_none()) {
                return Err(cx.error("input 2 (gate)", show(b), show(a)));
            }
            Some((0..a.len()).map(|i| agree(cx, 2, "gate", i, &b[i], &a[i])).collect::<Result<_>>()?)
        }
        (shape, None) | (None, shape) => shape.clone(),
    };
    let fact = Fact::of(x.dtype, shape);
    if fact.rank() == Some(0) {
        return Err(cx.error("input 0 (X)", "a scalar", "at least one dim"));
    }
    if let (Dim::Known(c), Dim::Known(last)) = (c, fact.dim(-1))
        && (*c == 0 || last % c != 0)
    {
        return Err(cx.error("input 0 (X), last dim", last, format_args!("a multiple of the scale's {c}")));
    }
    Ok(vec![fact])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(GatedRmsNorm {
        tier: cx.settings().tier,
        epsilon: cx.float("epsilon", 1e-5),
        activation: match cx.string("activation", "silu") {
            "sigmoid" => Activation::Sigmoid,
            _ => Activation::Silu,
        },
    }))
}

struct GatedRmsNorm {
    tier: Tier,
    epsilon: f32,
    activation: Activation,
}

impl Kernel for GatedRmsNorm {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let is_f32 = matches!(shapes.inputs.first(), Some(Some((DType::F32, _))));
        widened_bytes(is_f32, shapes.input(1).iter().product())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut carver = Carver::new(cx.take_scratch());
        let (x, scale, gate) = (cx.required(0), cx.required(1), cx.required(2));
        let y = cx.output(0).map(FloatsMut::of);
        let call = Call {
            scale: Some(widened(cx.par, scale, &mut carver)),
            gate: Some((Floats::of(gate), self.activation)),
            ..Call::new(Norm::Rms(self.epsilon), Floats::of(x), scale.len(), y)
        };
        call.run(self.tier, cx.par);
        Ok(())
    }
}
