//! Rotates tokens in parallel; all heads of a token share their angles.

use super::{Attrs, Form, Layout};
use crate::cpu::float::Float;
use crate::cpu::rotary::Pairs;
use crate::kernel::{Kernel, RunCx, Tensor};
use crate::par::SharedMut;
use crate::with_float;
use abi::Result;

pub(super) struct Rotary {
    pub attrs: Attrs,
}

/// Elements worth a task of their own: about 10 us.
const GRAIN: usize = 1 << 14;

impl Kernel for Rotary {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        with_float!(cx.required(0).dtype(), T => self.rotate_all::<T>(cx))
    }
}

/// Row of the caches for a pair.
#[derive(Clone, Copy)]
enum Angles<'a> {
    /// `positions[token]`.
    One(&'a [i64]),
    /// The same start for every batch entry, then ascending.
    Ascending(i64),
    /// `positions[stream][token]`, the stream by pair.
    Streams(&'a [i64]),
    /// The caches are by token already.
    Token,
}

impl Rotary {
    fn rotate_all<T: Float>(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let form = self.attrs.form;
        let x = cx.required(0);
        let (cos, sin) = (cx.required(form.cos()), cx.required(form.sin()));
        let half = cos.shape().last().copied().unwrap_or(0);
        let l = Layout::new(&self.attrs, x.shape(), half).map_err(abi::Error::Internal)?;
        let ids = cx.input(form.positions());
        let angles = self.angles(cx, &l, ids, cos.shape()[0])?;
        let Some(out) = cx.output(0) else { return Ok(()) };
        let (x, cos, sin) = (x.slice::<T>(), cos.slice::<T>(), sin.slice::<T>());
        let out = SharedMut::new(out.into_slice::<T>());
        let tokens = l.batch * l.rows;
        let grain = GRAIN.div_ceil((l.heads * l.head).max(1));
        cx.par.ranges(tokens, grain, |range| {
            for token in range {
                let (b, s) = (token / l.rows, token % l.rows);
                let at = |head: usize| match l.heads_first {
                    true => ((b * l.heads + head) * l.rows + s) * l.head,
                    false => (token * l.heads + head) * l.head,
                };
                let row_of = |pair: usize| match angles {
                    Angles::One(ids) => ids[token] as usize,
                    Angles::Ascending(first) => first as usize + s,
                    Angles::Streams(ids) => ids[usize::from(self.attrs.streams[pair]) * tokens + token] as usize,
                    Angles::Token => token,
                };
                for head in 0..l.heads {
                    let from = &x[at(head)..at(head) + l.head];
                    // SAFETY: each token and head has a row of its own.
                    let to = unsafe { out.slice(at(head)..at(head) + l.head) };
                    self.rotate_row(from, to, cos, sin, half, &row_of);
                }
            }
        });
        Ok(())
    }

    /// The angles' rows, all checked to be within the caches.
    fn angles<'a>(&self, cx: &RunCx<'a>, l: &Layout, ids: Option<Tensor<'a>>, limit: usize) -> Result<Angles<'a>> {
        let Some(ids) = ids else { return Ok(Angles::Token) };
        let slot = format_args!("input {} (position_ids)", self.attrs.form.positions()).to_string();
        let check = |id: i64| match usize::try_from(id) {
            Ok(p) if p < limit => Ok(()),
            _ => Err(cx.error(
                &slot,
                format_args!("position {id}"),
                format_args!("0 to {}, the rows of cos_cache", limit as i64 - 1),
            )),
        };
        let values = ids.slice::<i64>();
        if self.attrs.form == Form::Contrib && ids.shape().len() == 1 {
            if l.batch * l.rows > 0 {
                check(values[0])?;
                check(values[0] + l.rows as i64 - 1)?;
            }
            return Ok(Angles::Ascending(values[0]));
        }
        values.iter().try_for_each(|&id| check(id))?;
        Ok(match self.attrs.form {
            Form::Multimodal => Angles::Streams(values),
            _ => Angles::One(values),
        })
    }

    fn rotate_row<T: Float>(
        &self,
        from: &[T],
        to: &mut [T],
        cos: &[T],
        sin: &[T],
        half: usize,
        row_of: &impl Fn(usize) -> usize,
    ) {
        to[2 * half..].copy_from_slice(&from[2 * half..]);
        for i in 0..half {
            let at = row_of(i) * half + i;
            let (c, s) = (cos[at].to_f32(), sin[at].to_f32());
            let (x, y) = match self.attrs.pairs {
                Pairs::Halves => (i, i + half),
                Pairs::Interleaved => (2 * i, 2 * i + 1),
            };
            let (a, b) = (from[x].to_f32(), from[y].to_f32());
            to[x] = T::from_f32(a * c - b * s);
            to[y] = T::from_f32(a * s + b * c);
        }
    }
}
