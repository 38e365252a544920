//! LinearAttention on the CPU: widens half inputs, runs the recurrence in f32, rounds once at the end.

use super::Rule;
use super::recurrence::{self, Recurrence, Rows, Spans};
use super::state::KMajor;
use crate::cpu::convert::{self, Floats, FloatsMut, narrowed, widened, widened_bytes};
use crate::kernel::{Carver, Kernel, RunCx, Shapes, Tensor};
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use crate::with_float;
use abi::{DType, Result};

pub struct LinearAttention {
    pub tier: Tier,
    pub rule: Rule,
    pub q_heads: usize,
    pub v_heads: usize,
    /// 0: 1 / sqrt(D).
    pub scale: f32,
}

/// What the shapes decide.
struct Dims {
    batch: usize,
    tokens: usize,
    dk: usize,
    dv: usize,
}

impl LinearAttention {
    fn dims(&self, query: &[usize], value: &[usize]) -> Dims {
        Dims { batch: query[0], tokens: query[1], dk: query[2] / self.q_heads, dv: value[2] / self.v_heads }
    }

    fn out_elements(&self, dims: &Dims) -> usize {
        dims.batch * dims.tokens * self.q_heads.max(self.v_heads) * dims.dv
    }

    /// Elements of packed state blocks. `direct`: there are an f32 past and an f32 present.
    fn block_elements(&self, dims: &Dims, direct: bool) -> usize {
        if direct && dims.tokens == 1 && recurrence::whole_blocks(self.tier, dims.dv) {
            return 0;
        }
        recurrence::block_elements(self.tier, dims.batch, self.v_heads, dims.dk, dims.dv)
    }
}

impl Kernel for LinearAttention {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let dims = self.dims(shapes.input(0), shapes.input(2));
        let len = |slot: usize| shapes.input(slot).iter().product::<usize>();
        let dtype = |side: &[Option<(DType, &[usize])>], slot: usize| side.get(slot)?.map(|(dtype, _)| dtype);
        let is_f32 = dtype(shapes.inputs, 0) == Some(DType::F32);
        let has_output = dtype(shapes.outputs, 0).is_some();
        let direct = [dtype(shapes.inputs, 3), dtype(shapes.outputs, 1)] == [Some(DType::F32); 2];
        let widened = [0, 1, 2].map(|slot| widened_bytes(is_f32, len(slot)));
        // An absent or unused decay or beta has no elements or is not carved: asking for it costs little.
        widened.iter().sum::<usize>()
            + Carver::size::<f32>(shapes.inputs.get(4).map_or(0, |_| len(4)))
            + widened_bytes(is_f32, shapes.inputs.get(5).map_or(0, |_| len(5)))
            + widened_bytes(is_f32 && has_output, self.out_elements(&dims))
            + Carver::size::<f32>(self.block_elements(&dims, direct))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let par = cx.par;
        let (query, key, value) = (cx.required(0), cx.required(1), cx.required(2));
        let dims = self.dims(query.shape(), value.shape());
        let mut carver = Carver::new(cx.take_scratch());
        let decay = cx.input(4).filter(|_| self.rule.decay);
        let beta = cx.input(5).filter(|_| self.rule.delta);
        let factors = decay.map(|decay| {
            let to = carver.take::<f32>(decay.len());
            convert::map(par, Floats::of(decay), FloatsMut::F32(SharedMut::new(&mut *to)), |_, log| log.exp());
            &*to
        });
        let call = Recurrence {
            dk: dims.dk,
            dv: dims.dv,
            q_heads: self.q_heads,
            k_heads: key.shape()[2] / dims.dk,
            v_heads: self.v_heads,
            scale: recurrence::scale(self.scale, dims.dk),
            q: rows(par, query, &mut carver),
            k: rows(par, key, &mut carver),
            v: rows(par, value, &mut carver),
            decay: factors,
            decay_per_key: decay.is_some_and(|d| d.shape()[2] != self.v_heads),
            beta: beta.map(|beta| widened(par, beta, &mut carver)),
            beta_heads: beta.map_or(0, |beta| beta.shape()[2]),
            spans: Spans::Uniform(dims.batch, dims.tokens),
        };
        let (past, present) = (cx.input(3), cx.output(1));
        let dtypes = [past.map(|p| p.dtype()), present.as_ref().map(|p| p.dtype())];
        let blocks = carver.take::<f32>(self.block_elements(&dims, dtypes == [Some(DType::F32); 2]));
        let (out, rounded) = match cx.output(0) {
            Some(output) if output.dtype() == DType::F32 => (output.into_slice::<f32>(), None),
            other => (carver.take::<f32>(self.out_elements(&dims)), other),
        };
        with_float!(dtypes[0].or(dtypes[1]).unwrap_or(DType::F32), S => {
            let (heads, dk, dv) = (self.v_heads, dims.dk, dims.dv);
            let (from, to) = (past.map(|p| p.ptr().cast::<S>()), present.map(|p| p.ptr().cast::<S>().cast_mut()));
            let state = KMajor { from, to, heads, dk, dv };
            recurrence::run(self.tier, par, &call, &state, &mut *out, blocks);
        });
        if let Some(output) = rounded {
            narrowed(par, out, output);
        }
        Ok(())
    }
}

/// [B, T, heads and elements] as f32 rows.
fn rows<'a>(par: Par<'_>, tensor: Tensor<'a>, carver: &mut Carver<'a>) -> Rows<'a> {
    Rows { data: widened(par, tensor, carver), stride: tensor.shape()[2] }
}
