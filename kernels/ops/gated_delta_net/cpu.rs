//! GatedDeltaNet on the CPU: norms and gates into f32 scratch, then LinearAttention's recurrence.

use super::Gate;
use crate::cpu::convert::{self, Floats, FloatsMut, narrowed, widened, widened_bytes};
use crate::cpu::isa::{Isa, Job, dispatch, dot};
use crate::cpu::math::softplus;
use crate::kernel::{Carver, Kernel, RunCx, Shapes, Tensor};
use crate::ops::linear_attention::Rule;
use crate::ops::linear_attention::recurrence::{self, Recurrence, Rows, Spans};
use crate::ops::linear_attention::state::VMajor;
use crate::par::SharedMut;
use crate::settings::Tier;
use abi::{DType, Result};
use std::ops::Range;

pub struct GatedDeltaNet {
    pub tier: Tier,
    pub rule: Rule,
    pub gate: Gate,
    pub lower_bound: f32,
    pub sigmoid_beta: bool,
    pub l2_norm: bool,
    /// 0: 1 / sqrt(D).
    pub scale: f32,
    /// Query holds query, key and value.
    pub packed: bool,
}

/// What the shapes decide; `tokens` of all sequences.
#[derive(Clone, Copy)]
pub struct Dims {
    pub tokens: usize,
    pub batch: usize,
    pub q_heads: usize,
    pub v_heads: usize,
    pub dk: usize,
    pub dv: usize,
}

/// From the input shapes: query (which holds key and value too when `packed`), value, cu_seqlens and state (empty where
/// absent).
pub fn dims(packed: bool, query: &[usize], value: &[usize], sums: &[usize], state: &[usize]) -> Dims {
    let (lead, q_heads, v_heads, dk, dv) = if packed {
        let (v_heads, dv, dk) = (state[1], state[2], state[3]);
        let lead = &query[..query.len() - 1];
        let q_heads = (query[query.len() - 1] - v_heads * dv) / (2 * dk);
        (lead, q_heads, v_heads, dk, dv)
    } else {
        let (lead, head) = query.split_at(query.len() - 2);
        let value = &value[lead.len()..];
        (lead, head[0], value[0], head[1], value[1])
    };
    let batch = match (sums, lead, state) {
        ([n], _, _) => n - 1,
        (_, [batch, _], _) => *batch,
        _ => state[0],
    };
    Dims { tokens: lead.iter().product(), batch, q_heads, v_heads, dk, dv }
}

impl Dims {
    fn qk_elements(&self) -> usize {
        self.tokens * self.q_heads * self.dk
    }

    fn out_elements(&self) -> usize {
        self.tokens * self.v_heads * self.dv
    }

    fn block_elements(&self, tier: Tier) -> usize {
        recurrence::block_elements(tier, self.batch, self.v_heads, self.dk, self.dv)
    }
}

impl Kernel for GatedDeltaNet {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let dims = dims(self.packed, shapes.input(0), shapes.input(2), shapes.input(3), shapes.input(6));
        let dtype = |side: &[Option<(DType, &[usize])>], slot: usize| side.get(slot)?.map(|(dtype, _)| dtype);
        let len = |slot: usize| match dtype(shapes.inputs, slot) {
            Some(_) => shapes.input(slot).iter().product(),
            None => 0,
        };
        let is_f32 = dtype(shapes.inputs, 0) == Some(DType::F32);
        let has_output = dtype(shapes.outputs, 0).is_some();
        let widened: usize = [0, 1, 2].map(|slot| widened_bytes(is_f32, len(slot))).iter().sum();
        let normed = if self.l2_norm { 2 * Carver::size::<f32>(dims.qk_elements()) } else { 0 };
        widened
            + normed
            + Carver::size::<f32>(len(4))
            + Carver::size::<f32>(len(5))
            + widened_bytes(is_f32 && has_output, dims.out_elements())
            + Carver::size::<f32>(dims.block_elements(self.tier))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let par = cx.par;
        let shape = |slot: usize| cx.input(slot).map_or(&[][..], |tensor| tensor.shape());
        let dims = dims(self.packed, shape(0), shape(2), shape(3), shape(6));
        let spans = spans(cx, &dims)?;
        let mut carver = Carver::new(cx.take_scratch());
        let [q, k, v] = self.rows(cx, &dims, &mut carver);
        let per_key = cx.input(4).is_some_and(|d| d.len() != dims.tokens * dims.v_heads);
        let decay = cx.input(4).map(|decay| {
            let to = carver.take::<f32>(decay.len());
            self.decay_factors(cx, decay, &dims, to);
            &*to
        });
        let beta = cx.input(5).map(|beta| {
            let to = carver.take::<f32>(beta.len());
            let to_floats = FloatsMut::F32(SharedMut::new(&mut *to));
            convert::map(par, Floats::of(beta), to_floats, |_, raw| if self.sigmoid_beta { sigmoid(raw) } else { raw });
            &*to
        });
        let call = Recurrence {
            dk: dims.dk,
            dv: dims.dv,
            q_heads: dims.q_heads,
            k_heads: dims.q_heads,
            v_heads: dims.v_heads,
            scale: recurrence::scale(self.scale, dims.dk),
            q,
            k,
            v,
            decay: decay.filter(|_| self.rule.decay),
            decay_per_key: per_key,
            beta: beta.filter(|_| self.rule.delta),
            beta_heads: dims.v_heads,
            spans,
        };
        let state = VMajor {
            from: cx.input(6).map(|state| state.ptr().cast()),
            to: cx.output(1).map(|state| state.ptr().cast::<f32>().cast_mut()),
            heads: dims.v_heads,
            dk: dims.dk,
            dv: dims.dv,
        };
        let blocks = carver.take::<f32>(dims.block_elements(self.tier));
        let (out, rounded) = match cx.output(0) {
            Some(output) if output.dtype() == DType::F32 => (output.into_slice::<f32>(), None),
            other => (carver.take::<f32>(dims.out_elements()), other),
        };
        recurrence::run(self.tier, par, &call, &state, &mut *out, blocks);
        if let Some(output) = rounded {
            narrowed(par, out, output);
        }
        Ok(())
    }
}

impl GatedDeltaNet {
    /// Query, key and value as f32, query and key normalised where the node asks.
    fn rows<'a>(&self, cx: &RunCx<'a>, dims: &Dims, carver: &mut Carver<'a>) -> [Rows<'a>; 3] {
        let (keys, values) = (dims.q_heads * dims.dk, dims.v_heads * dims.dv);
        let [q, k, v] = if self.packed {
            let data = widened(cx.par, cx.required(0), carver);
            let stride = 2 * keys + values;
            // Without tokens there is nothing to skip.
            [0, keys, 2 * keys].map(|skip| Rows { data: &data[skip.min(data.len())..], stride })
        } else {
            [(0, keys), (1, keys), (2, values)]
                .map(|(slot, stride)| Rows { data: widened(cx.par, cx.required(slot), carver), stride })
        };
        if !self.l2_norm {
            return [q, k, v];
        }
        let [q, k] = [q, k].map(|from| {
            let to = carver.take::<f32>(dims.qk_elements());
            let shared = SharedMut::new(&mut *to);
            cx.par.ranges(dims.tokens, 8192 / keys.max(1), |tokens| {
                // SAFETY: `ranges` gives disjoint ranges.
                let to = unsafe { shared.slice(tokens.start * keys..tokens.end * keys) };
                let size = dims.dk;
                dispatch(self.tier, Normalise { from, tokens, size, to });
            });
            Rows { data: to, stride: keys }
        });
        [q, k, v]
    }

    /// exp of the log decay.
    fn decay_factors(&self, cx: &RunCx<'_>, decay: Tensor<'_>, dims: &Dims, to: &mut [f32]) {
        let vector = |slot: usize| cx.input(slot).map_or(&[][..], |t| t.slice::<f32>());
        let (a_log, bias) = (vector(7), vector(8));
        // Decay elements of a head; `bias` has one for each, or one for the head.
        let each = decay.len() / (dims.tokens * dims.v_heads).max(1);
        let biases = bias.len() / dims.v_heads.max(1);
        convert::map(cx.par, Floats::of(decay), FloatsMut::F32(SharedMut::new(to)), |i, raw| {
            let head = i / each % dims.v_heads;
            let biased = || raw + bias[head * biases + if biases > 1 { i % each } else { 0 }];
            let log = match self.gate {
                Gate::Given => raw,
                Gate::Softplus => -a_log[head].exp() * softplus(biased()),
                Gate::Sigmoid => self.lower_bound * sigmoid(a_log[head].exp() * biased()),
            };
            log.exp()
        });
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The sequences' tokens; checks the values of cu_seqlens.
fn spans<'a>(cx: &RunCx<'a>, dims: &Dims) -> Result<Spans<'a>> {
    let Some(sums) = cx.input(3) else {
        return Ok(Spans::Uniform(dims.batch, dims.tokens / dims.batch.max(1)));
    };
    let sums = sums.slice::<i32>();
    let rising = sums.windows(2).all(|pair| pair[0] <= pair[1]);
    if rising && sums.first() == Some(&0) && sums.last().map(|&n| n as usize) == Some(dims.tokens) {
        return Ok(Spans::Ragged(sums));
    }
    let shown: Vec<_> = sums.iter().take(8).collect();
    Err(cx.error(
        "input 3 (cu_seqlens)",
        format_args!("{} numbers {shown:?}", sums.len()),
        format_args!("numbers that rise from 0 to {}", dims.tokens),
    ))
}

/// Divides each head by its L2 norm.
struct Normalise<'a> {
    from: Rows<'a>,
    tokens: Range<usize>,
    size: usize,
    to: &'a mut [f32],
}

/// As ORT's kernels have it (measured: the schema does not say).
const L2_EPSILON: f32 = 1e-12;

impl Job for Normalise<'_> {
    type Out = ();

    #[inline(always)]
    fn run<I: Isa>(self) {
        let width = self.to.len() / self.tokens.len().max(1);
        for (t, to) in self.tokens.zip(self.to.chunks_exact_mut(width.max(1))) {
            let from = &self.from.data[t * self.from.stride..][..width];
            let heads = from.chunks_exact(self.size).zip(to.chunks_exact_mut(self.size));
            for (from, to) in heads {
                let inverse = 1.0 / (dot::<I>(from, from) + L2_EPSILON).sqrt();
                for (to, x) in to.iter_mut().zip(from) {
                    *to = x * inverse;
                }
            }
        }
    }
}
