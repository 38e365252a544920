//! Joins past and new rows where asked to, then runs the shared attention kernel.

use super::shape::Dims;
use super::{Attrs, slot};
use crate::cpu::attention::{Attention, Output, Rows, Sizes};
use crate::cpu::float::Float;
use crate::kernel::{Carver, Kernel, RunCx, Shapes, Tensor};
use crate::par::Par;
use crate::settings::Tier;
use crate::with_float;
use abi::{DType, Error, Result};
use std::ops::Range;

pub(super) struct Sdpa {
    pub attrs: Attrs,
    pub tier: Tier,
    pub lanes: usize,
}

impl Dims {
    pub fn of<'a>(attrs: &Attrs, input: impl Fn(usize) -> Option<&'a [usize]>) -> Self {
        let need = |s| input(s).expect("a required input");
        Self::new(attrs, need(slot::Q), need(slot::K), need(slot::V), input(slot::PAST_KEY))
            .expect("infer checked the shapes")
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            batch: self.batch,
            heads: self.q_heads,
            kv_heads: self.kv_heads,
            rows: self.rows,
            keys: self.keys(),
            dim: self.head,
            v_dim: self.v_head,
        }
    }

    /// Elements of joined keys and values.
    fn joined(&self) -> [usize; 2] {
        let rows = self.batch * self.kv_heads * self.keys();
        [rows * self.head, rows * self.v_head]
    }

    /// New keys or values as they arrive.
    fn arriving<'a, T>(&self, data: &'a [T], head: usize) -> Rows<'a, T> {
        let (rows, heads) = (self.new_keys, self.kv_heads);
        let batch = rows * heads * head;
        match self.flat {
            true => Rows { data, batch, head, row: heads * head },
            false => Rows { data, batch, head: rows * head, row: head },
        }
    }
}

impl Kernel for Sdpa {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let d = Dims::of(&self.attrs, |s| shapes.inputs.get(s).copied().flatten().map(|(_, s)| s));
        let element = if matches!(shapes.inputs[slot::Q], Some((DType::F32, _))) { 4 } else { 2 };
        let outputs = [slot::PRESENT_KEY, slot::PRESENT_VALUE];
        let joined = outputs.into_iter().zip(d.joined()).map(|(out, n)| {
            let absent = shapes.outputs.get(out).copied().flatten().is_none();
            if absent && d.past > 0 { Carver::size::<u8>(n * element) } else { 0 }
        });
        let joined: usize = joined.sum();
        let scores = match shapes.outputs.get(slot::SCORES).copied().flatten() {
            Some(_) => self.lanes.max(1) * d.score_scratch(),
            None => 0,
        };
        joined + d.sizes().scratch_bytes(self.lanes).max(scores)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        with_float!(cx.required(slot::Q).dtype(), T => self.attend::<T>(cx))
    }
}

/// Copies past and new rows of every head to `to`, `[B, K, T, head]`.
fn join<T: Float>(par: Par<'_>, d: &Dims, head: usize, past: Option<&[T]>, new: Rows<'_, T>, to: &mut [T]) {
    let chunk = d.keys() * head;
    if chunk == 0 {
        return;
    }
    let par = if size_of_val(to) < 1 << 17 { Par::serial() } else { par };
    par.chunks_mut(to, chunk, |i, to| {
        let (old, fresh) = to.split_at_mut(d.past * head);
        if let Some(past) = past {
            old.copy_from_slice(&past[i * d.past * head..(i + 1) * d.past * head]);
        }
        for (t, to) in fresh.chunks_exact_mut(head).enumerate() {
            let at = i / d.kv_heads * new.batch + i % d.kv_heads * new.head + t * new.row;
            to.copy_from_slice(&new.data[at..at + head]);
        }
    });
}

/// The mask with its strides, broadcast dims 0.
#[derive(Clone, Copy)]
struct Mask<'a> {
    tensor: Tensor<'a>,
    strides: [usize; 4],
    /// Keys it speaks of; later ones are hidden. `None`: one value for all keys.
    keys: Option<usize>,
}

impl<'a> Mask<'a> {
    fn new(tensor: Tensor<'a>, keys: usize) -> Self {
        let shape = tensor.shape();
        let (mut strides, mut stride) = ([0; 4], 1);
        for (i, &dim) in shape.iter().rev().enumerate() {
            strides[3 - i] = if dim == 1 { 0 } else { stride };
            stride *= dim;
        }
        let last = shape.last().copied().unwrap_or(1);
        Self { tensor, strides, keys: (last != 1 || keys == 1).then_some(last) }
    }

    /// Adds the mask's row to the scores of `keys`.
    fn add<T: Float>(&self, b: usize, head: usize, row: usize, keys: Range<usize>, scores: &mut [f32]) {
        let [sb, sh, sr, _] = self.strides;
        let at = b * sb + head * sh + row * sr;
        let given = self.keys.map_or(keys.end, |n| n.clamp(keys.start, keys.end));
        let (scores, beyond) = scores.split_at_mut(given - keys.start);
        beyond.fill(f32::NEG_INFINITY);
        let range = match self.keys {
            Some(_) => at + keys.start..at + given,
            None => at..at + 1,
        };
        let hidden = |v: &u8| if *v == 0 { f32::NEG_INFINITY } else { 0.0 };
        match (self.tensor.dtype(), self.keys) {
            (DType::Bool, Some(_)) => {
                let mask = &self.tensor.bytes()[range];
                scores.iter_mut().zip(mask).for_each(|(v, m)| *v += hidden(m));
            }
            (DType::Bool, None) => {
                let m = hidden(&self.tensor.bytes()[at]);
                scores.iter_mut().for_each(|v| *v += m);
            }
            (_, Some(_)) => {
                let mask = &self.tensor.slice::<T>()[range];
                scores.iter_mut().zip(mask).for_each(|(v, m)| *v += m.to_f32());
            }
            (_, None) => {
                let m = self.tensor.slice::<T>()[at].to_f32();
                scores.iter_mut().for_each(|v| *v += m);
            }
        }
    }
}

impl Sdpa {
    fn attend<T: Float>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let d = Dims::of(&self.attrs, |s| cx.input(s).map(|t| t.shape()));
        let lengths = cx.input(slot::LENGTHS).map(|t| t.slice::<i64>());
        check_lengths(cx, &d, lengths)?;
        let mut carver = Carver::new(cx.take_scratch());
        let par = cx.par;
        let mut held: [Option<&mut [T]>; 2] = [None, None];
        for (i, held) in held.iter_mut().enumerate() {
            let (new, past, present) =
                [(slot::K, slot::PAST_KEY, slot::PRESENT_KEY), (slot::V, slot::PAST_VALUE, slot::PRESENT_VALUE)][i];
            let out = cx.output(present).map(|out| out.into_slice::<T>());
            if out.is_none() && d.past == 0 {
                continue;
            }
            let head = if i == 0 { d.head } else { d.v_head };
            let to = out.unwrap_or_else(|| carver.take::<T>(d.joined()[i]));
            let past = cx.input(past).map(|t| t.slice::<T>());
            join(par, &d, head, past, d.arriving(cx.required(new).slice::<T>(), head), to);
            *held = Some(to);
        }
        let rows = |i: usize, head: usize| match &held[i] {
            Some(data) => Rows { data, batch: d.kv_heads * d.keys() * head, head: d.keys() * head, row: head },
            None => d.arriving(cx.required([slot::K, slot::V][i]).slice::<T>(), head),
        };
        let mask = cx.input(slot::MASK).map(|t| Mask::new(t, d.keys()));
        let add_bias = |b: usize, head: usize, row: usize, keys: Range<usize>, scores: &mut [f32]| {
            if let Some(mask) = &mask {
                mask.add::<T>(b, head, row, keys, scores);
            }
        };
        let query = cx.required(slot::Q).slice::<T>();
        let load_query = |b: usize, head: usize, s: usize, row: &mut [f32]| {
            let at = match d.flat {
                true => ((b * d.rows + s) * d.q_heads + head) * d.head,
                false => ((b * d.q_heads + head) * d.rows + s) * d.head,
            };
            T::widen(&query[at..at + d.head], row);
        };
        let attention = Attention {
            sizes: d.sizes(),
            longest: d.keys(),
            keys: rows(0, d.head),
            values: rows(1, d.v_head),
            scale: self.attrs.scale.unwrap_or(1.0 / (d.head as f32).sqrt()),
            softcap: self.attrs.softcap,
            load_query: &load_query,
            visible: &|b, s| self.visible(&d, lengths, b, s),
            bias: mask.is_some().then_some(&add_bias),
            sink: None,
        };
        let scratch = carver.rest();
        let outs = [slot::SCORES, 0].map(|s| (s, cx.outputs.get_mut(s).and_then(Option::take)));
        for (s, out) in outs {
            let Some(out) = out else { continue };
            let data = out.into_slice::<T>();
            if s == slot::SCORES {
                attention.write_scores(data, self.attrs.stage, self.lanes, par, scratch);
                continue;
            }
            let batch = d.q_heads * d.rows * d.v_head;
            let out = match d.flat {
                true => Output { data, batch, head: d.v_head, row: d.q_heads * d.v_head },
                false => Output { data, batch, head: d.rows * d.v_head, row: d.v_head },
            };
            attention.run(out, self.tier, self.lanes, par, scratch);
        }
        Ok(())
    }

    /// Keys that query row `s` sees, masks aside.
    fn visible(&self, d: &Dims, lengths: Option<&[i64]>, b: usize, s: usize) -> Range<usize> {
        // `check_lengths` bounds the lengths by T.
        let valid = lengths.map_or(d.keys(), |l| l[b] as usize);
        let offset = match lengths {
            Some(_) => valid as isize - d.rows as isize,
            None => d.past as isize,
        };
        let here = offset + s as isize;
        let mut end = valid as isize;
        if self.attrs.causal {
            end = end.min(here + 1);
        }
        if let Some(right) = self.attrs.right {
            end = end.min(here.saturating_add_unsigned(right).saturating_add(1));
        }
        let start = self.attrs.left.map_or(0, |left| here.saturating_sub_unsigned(left));
        start.max(0) as usize..end.max(0) as usize
    }
}

fn check_lengths(cx: &RunCx<'_>, d: &Dims, lengths: Option<&[i64]>) -> Result<(), Error> {
    for (b, &length) in lengths.unwrap_or_default().iter().enumerate() {
        if !usize::try_from(length).is_ok_and(|l| l <= d.keys()) {
            return Err(cx.error(
                "input 6 (nonpad_kv_seqlen)",
                format_args!("{length} for batch entry {b}"),
                format_args!("0 to {}", d.keys()),
            ));
        }
    }
    Ok(())
}
