//! com.microsoft SkipSimplifiedLayerNormalization 1 and SkipLayerNormalization 1:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.SkipLayerNormalization>.
//!
//! B batch, S tokens, C hidden size. input [B, S, C] or [N, C]; skip like input, [1, S, C] or [S, C];
//! gamma, beta and bias `[C]`. Output 0 is the norm of input + skip + bias, output 3 that sum, outputs 1 and 2
//! each row's mean and 1 / deviation in f32.

use super::cuda;
use super::layer::shared;
use super::rows::{Call, Norm};
use crate::build::BuildCx;
use crate::cpu::convert::{Floats, FloatsMut, widened, widened_bytes};
use crate::fact::Fact;
use crate::kernel::{Carver, Kernel, RunCx, Shapes};
use crate::op::{Decline, NodeCx, OpDef};
use crate::settings::Tier;
use crate::shapes::{agree, ranked, show};

use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("com.microsoft", "SkipSimplifiedLayerNormalization", (1, 1), claim, infer, build)
        .with_cuda(cuda::build_skip),
    OpDef::new("com.microsoft", "SkipLayerNormalization", (1, 1), claim, infer, build).with_cuda(cuda::build_skip),
];

fn simplified(cx: &NodeCx) -> bool {
    cx.node().op_type == "SkipSimplifiedLayerNormalization"
}

/// The `C`-element inputs by slot: gamma, beta (layer norm only), bias.
fn vectors(cx: &NodeCx) -> &'static [(usize, &'static str)] {
    if simplified(cx) { &[(2, "gamma"), (3, "bias")] } else { &[(2, "gamma"), (3, "beta"), (4, "bias")] }
}

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(3)?;
    cx.check_dtype(0, "input", &[DType::F32, DType::F16, DType::BF16])?;
    let dtype = cx.required(0)?.dtype;
    cx.check_dtype(1, "skip", &[dtype])?;
    for (slot, name) in vectors(cx) {
        cx.check_dtype(*slot, name, &[dtype])?;
    }
    if simplified(cx) && cx.has_output(1) {
        return Err(cx.decline("output 1 (mean)", "a reader", "none: an RMS norm has no mean"));
    }
    Ok(())
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let input = cx.required(0)?;
    let Some(mut shape) = input.shape.clone() else {
        let rows = Fact::unranked(DType::F32);
        let like = Fact::unranked(input.dtype);
        return Ok(vec![like.clone(), rows.clone(), rows, like]);
    };
    let rank = shape.len();
    if rank != 2 && rank != 3 {
        return Err(cx.error("input 0 (input)", show(&shape), "rank 2 or 3"));
    }
    for (slot, name) in vectors(cx) {
        if cx.has_input(*slot) {
            let dims = ranked(cx, *slot, name, 1)?;
            shape[rank - 1] = agree(cx, *slot, name, 0, &dims[0], &shape[rank - 1])?;
        }
    }
    if let Some(skip) = &cx.required(1)?.shape {
        let fits = skip.len() == rank || (rank == 3 && skip.len() == 2);
        if !fits {
            return Err(cx.error("input 1 (skip)", show(skip), show(&shape)));
        }
        let lead = rank - skip.len();
        for (axis, dim) in skip.iter().enumerate() {
            let broadcast = rank == 3 && lead + axis == 0 && *dim != shape[0];
            let expected = if broadcast { &Dim::Known(1) } else { &shape[lead + axis] };
            agree(cx, 1, "skip", axis, dim, expected)?;
        }
    }
    let mut rows = shape.clone();
    rows[rank - 1] = Dim::Known(1);
    let (like, rows) = (Fact::new(input.dtype, shape), Fact::new(DType::F32, rows));
    Ok(vec![like.clone(), rows.clone(), rows, like])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let epsilon = cx.float("epsilon", 1e-12);
    let simplified = simplified(cx);
    Ok(Box::new(SkipNorm {
        tier: cx.settings().tier,
        norm: if simplified { Norm::Rms(epsilon) } else { Norm::Layer(epsilon) },
        beta: (!simplified).then_some(3),
        bias: if simplified { 3 } else { 4 },
    }))
}

struct SkipNorm {
    tier: Tier,
    norm: Norm,
    /// Slot of beta, if the op has one.
    beta: Option<usize>,
    /// Slot of bias.
    bias: usize,
}

impl Kernel for SkipNorm {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let is_f32 = matches!(shapes.inputs.first(), Some(Some((DType::F32, _))));
        3 * widened_bytes(is_f32, shapes.input(2).iter().product())
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let par = cx.par;
        let mut carver = Carver::new(cx.take_scratch());
        let (x, skip, gamma) = (cx.required(0), cx.required(1), cx.required(2));
        let [beta, bias] = [self.beta, Some(self.bias)].map(|slot| slot.and_then(|slot| cx.input(slot)));
        let y = cx.output(0).map(FloatsMut::of);
        let call = Call {
            skip: Some(Floats::of(skip)),
            scale: Some(widened(par, gamma, &mut carver)),
            bias: beta.map(|beta| widened(par, beta, &mut carver)),
            skip_bias: bias.map(|bias| widened(par, bias, &mut carver)),
            sum: cx.output(3).map(FloatsMut::of),
            mean: shared(cx, 1),
            inverse: shared(cx, 2),
            ..Call::new(self.norm, Floats::of(x), gamma.len(), y)
        };
        call.run(self.tier, par);
        Ok(())
    }
}
