//! com.microsoft MoEGroupRouter:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MoEGroupRouter>.
//!
//! E experts in groups of E / n_group. With s = sigmoid(logits), the groups with the greatest sums of their best
//! s + bias stay, then the experts in them with the greatest s + bias: these get log s, the others a sentinel. Or else
//! s + bias and s themselves, of all experts. Of equals the earlier is chosen.

#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::convert::{Floats, FloatsMut};
use crate::cpu::isa::{Isa, Job, dispatch, dot};
use crate::cpu::math::sigmoid;
use crate::fact::{Fact, mul};
use crate::kernel::{Carver, Kernel, RunCx, Shapes};
use crate::op::{Decline, NodeCx, OpDef};
use crate::par::SharedMut;
use crate::settings::Tier;
use crate::shapes::{agree, ranked, show};
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[OpDef::new("com.microsoft", "MoEGroupRouter", (1, 1), claim, infer, build)];

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Input slots.
const LOGITS: usize = 0;
const BIAS: usize = 1;
const PROJECTION: usize = 2;

/// Output slots.
const PROBS: usize = 0;
const SELECTION: usize = 1;
const WEIGHTS: usize = 2;

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(LOGITS, "logits", &FLOATS)?;
    cx.check_dtype(BIAS, "expert_bias", &[DType::F32])?;
    cx.check_dtype(PROJECTION, "projection_weight", &[cx.required(LOGITS)?.dtype])?;
    for (name, default) in [("n_group", 1), ("topk_group", 1), ("top_k", 0), ("group_topk", 2)] {
        let got = cx.int(name, default);
        if !(1..=i64::from(i32::MAX)).contains(&got) {
            return Err(cx.decline(format_args!("attribute '{name}'"), got, "a positive 32-bit integer"));
        }
    }
    let (groups, kept) = (cx.int("n_group", 1), cx.int("topk_group", 1));
    if kept > groups {
        return Err(cx.decline("attribute 'topk_group'", kept, format_args!("at most the {groups} groups")));
    }
    let full = cx.has_output(SELECTION) || cx.has_output(WEIGHTS);
    if full && cx.has_output(PROBS) {
        return Err(cx.decline("output 0 (router_probs)", "a reader", "none beside the scores of all experts"));
    }
    if full && groups != 1 {
        return Err(cx.decline("attribute 'n_group'", groups, "1, for the scores of all experts"));
    }
    if !full {
        cx.check_absent(PROJECTION, "projection_weight", "it belongs to the scores of all experts")?;
    }
    Ok(sizes(cx).map(|_| ())?)
}

/// Rows and experts, as far as they are known.
fn sizes(cx: &NodeCx) -> Result<(Dim, Dim)> {
    let mut experts = ranked(cx, BIAS, "expert_bias", 1)?.remove(0);
    let logits = cx.required(LOGITS)?;
    let rows = match &logits.shape {
        None => Dim::Unknown,
        Some(shape) if shape.len() < 2 => {
            return Err(cx.error("input 0 (logits)", show(shape), "rank 2 or more"));
        }
        Some(shape) => shape[..shape.len() - 1].iter().fold(Dim::Known(1), |all, dim| mul(&all, dim)),
    };
    if cx.has_input(PROJECTION) {
        let shape = ranked(cx, PROJECTION, "projection_weight", 2)?;
        experts = agree(cx, PROJECTION, "projection_weight", 0, &shape[0], &experts)?;
        agree(cx, LOGITS, "logits", 1, &ranked(cx, LOGITS, "logits", 2)?[1], &shape[1])?;
    } else {
        let rank = logits.rank().unwrap_or(1);
        experts = agree(cx, LOGITS, "logits", rank - 1, &logits.dim(-1), &experts)?;
    }
    if let Dim::Known(e) = experts {
        let (groups, top) = (cx.int("n_group", 1) as usize, cx.int("top_k", 0) as usize);
        if top > e || !e.is_multiple_of(groups) {
            let got = format!("top_k = {top} of {e} experts in {groups} groups");
            return Err(cx.error("attributes 'top_k' and 'n_group'", got, "no more than all, in equal groups"));
        }
    }
    Ok((rows, experts))
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (rows, experts) = sizes(cx)?;
    let fact = |dtype| Fact::new(dtype, vec![rows.clone(), experts.clone()]);
    Ok(vec![fact(cx.required(LOGITS)?.dtype), fact(DType::F32), fact(DType::F32)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let int = |name: &str, default: i64| cx.int(name, default) as usize;
    Ok(Box::new(Router {
        groups: int("n_group", 1),
        kept: int("topk_group", 1),
        summed: int("group_topk", 2),
        top: int("top_k", 0),
        sentinel: cx.float("router_sentinel", -10000.0),
        tier: cx.settings().tier,
        workers: cx.settings().chunks,
    }))
}

struct Router {
    groups: usize,
    kept: usize,
    summed: usize,
    top: usize,
    sentinel: f32,
    tier: Tier,
    workers: usize,
}

impl Kernel for Router {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let (width, experts) = (shapes.input(LOGITS).last().copied().unwrap_or(0), shapes.input(BIAS)[0]);
        Carver::size::<f32>(self.workers * self.own(width, experts)) + Carver::size::<f32>(width * experts)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (logits, bias) = (cx.required(LOGITS), cx.required(BIAS).slice::<f32>());
        let (width, e) = (logits.shape().last().copied().unwrap_or(0), bias.len());
        let rows = logits.len().checked_div(width).unwrap_or(0);
        let [probs, selection, scores] = [PROBS, SELECTION, WEIGHTS].map(|slot| cx.output(slot).map(FloatsMut::of));
        let mut scratch = Carver::new(cx.take_scratch());
        let own = self.own(width, e);
        let buffers = SharedMut::new(scratch.take::<f32>(self.workers * own));
        let projection = cx.input(PROJECTION).map(|w| {
            let out = scratch.take::<f32>(width * e);
            Floats::of(w).read(0..width * e, out);
            &*out
        });
        let x = Floats::of(logits);
        let each = rows.div_ceil(self.workers).max((GRAIN / own.max(1)).max(1));
        cx.par.for_each(rows.div_ceil(each), |task| {
            // SAFETY: tasks are no more than workers, and each has a piece of its own.
            let buffer = unsafe { buffers.slice(task * own..(task + 1) * own) };
            let (input, buffer) = buffer.split_at_mut(width);
            let (s, buffer) = buffer.split_at_mut(e);
            let (biased, buffer) = buffer.split_at_mut(e);
            let (out, sums) = buffer.split_at_mut(e);
            for row in task * each..((task + 1) * each).min(rows) {
                x.read(row * width..(row + 1) * width, input);
                dispatch(self.tier, Scores { input, projection, bias, s, biased });
                if probs.is_some() {
                    self.choose(s, biased, out, &mut sums[..self.groups]);
                }
                for (to, values) in [(&probs, &*out), (&selection, &*biased), (&scores, &*s)] {
                    if let Some(to) = to {
                        // SAFETY: each row is visited by one task.
                        unsafe { to.write(row * e..(row + 1) * e, values) };
                    }
                }
            }
        });
        Ok(())
    }
}

/// Values that one task computes at the least.
const GRAIN: usize = 1 << 12;

impl Router {
    /// Values of scratch that a task has for itself.
    fn own(&self, width: usize, experts: usize) -> usize {
        width + 3 * experts + self.groups
    }

    /// log s of the chosen experts, the sentinel for the others. Spoils `biased`.
    fn choose(&self, s: &[f32], biased: &mut [f32], out: &mut [f32], sums: &mut [f32]) {
        let size = biased.len() / self.groups;
        for (group, sum) in biased.chunks_exact_mut(size).zip(&mut *sums) {
            // The greatest of a group, taken out one by one and put back.
            *sum = 0.0;
            out[..size].copy_from_slice(group);
            for _ in 0..self.summed.min(size) {
                let best = greatest(group);
                *sum += std::mem::replace(&mut group[best], f32::NEG_INFINITY);
            }
            group.copy_from_slice(&out[..size]);
        }
        for _ in 0..self.kept {
            sums[greatest(sums)] = f32::NEG_INFINITY;
        }
        for (group, sum) in biased.chunks_exact_mut(size).zip(&*sums) {
            if *sum != f32::NEG_INFINITY {
                group.fill(f32::NEG_INFINITY);
            }
        }
        out.fill(self.sentinel);
        for _ in 0..self.top.min(self.kept * size) {
            let best = greatest(biased);
            biased[best] = f32::NEG_INFINITY;
            out[best] = s[best].max(1e-20).ln();
        }
    }
}

/// The first of the greatest values.
fn greatest(values: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        if *v > values[best] {
            best = i;
        }
    }
    best
}

/// The scores of one row.
struct Scores<'a> {
    input: &'a [f32],
    /// [E, width]
    projection: Option<&'a [f32]>,
    bias: &'a [f32],
    s: &'a mut [f32],
    biased: &'a mut [f32],
}

impl Job for Scores<'_> {
    type Out = ();
    #[inline(always)]
    fn run<I: Isa>(self) {
        match self.projection {
            None => self.s.copy_from_slice(self.input),
            Some(w) => {
                for (s, w) in self.s.iter_mut().zip(w.chunks_exact(self.input.len())) {
                    *s = dot::<I>(self.input, w);
                }
            }
        }
        for ((s, biased), bias) in self.s.iter_mut().zip(self.biased).zip(self.bias) {
            *s = sigmoid(*s);
            *biased = *s + bias;
        }
    }
}
