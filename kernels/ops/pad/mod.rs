//! Pad: <https://onnx.ai/onnx/operators/onnx__Pad.html>. Pads and value are attributes in opset 2 and inputs since 11; 18 adds
//! `axes`, 19 the mode `wrap`. Negative pads crop.

mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::map::{words, words_mut};
use crate::cpu::number::MOVABLE;
use crate::cpu::view::{MAX_RANK, Strides};
use crate::cuda::walk;
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx, Tensor};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::elementwise::{check_rank, claim_rank};
use crate::ops::gather::Indices;
use crate::ops::movement::COPY;
use crate::par::SharedMut;
use crate::with_word;
use abi::tensor::Element;
use abi::{DType, Dim, HostTensor, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Pad", (2, 2), claim, infer, build).with_cuda_claim(walk::claim_rank, cuda::build),
    OpDef::new("", "Pad", (11, 25), claim, infer, build)
        .with_host_inputs(&[1, 3])
        .with_cuda_claim(walk::claim_rank, cuda::build),
];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_dtype(0, "data", MOVABLE)?;
    claim_rank(cx)?;
    let modes = ["constant", "reflect", "edge", "wrap"];
    let known = if cx.node().since_version < 19 { 3 } else { 4 };
    cx.check_string("mode", "constant", &modes[..known])?;
    if cx.node().since_version == 2 {
        cx.check_required(1)?;
        cx.check_dtype(0, "data", &[DType::F32, DType::F16, DType::F64])?;
        return match cx.ints("pads") {
            Some(_) => Ok(()),
            None => Err(cx.decline("attribute 'pads'", "nothing", "integers")),
        };
    }
    cx.check_required(2)?;
    cx.check_dtype(1, "pads", &[DType::I64])?;
    cx.check_dtype(2, "constant_value", &[cx.required(0)?.dtype])?;
    cx.check_dtype(3, "axes", &[DType::I64, DType::I32])
}

/// (before, after) of every dim.
type Pads = [(i64, i64); MAX_RANK];

/// Spreads the pads, given for `axes` or all, over the dims; the error says what is wrong.
fn spread(rank: usize, pads: &[i64], axes: Option<Indices>) -> Result<Pads, String> {
    let n = axes.as_ref().map_or(rank, Indices::len);
    if pads.len() != 2 * n {
        return Err(format!("{} pads for {n} axes", pads.len()));
    }
    let mut spread = [(0, 0); MAX_RANK];
    for i in 0..n {
        let axis = axes.as_ref().map_or(i as i64, |axes| axes.get(i));
        let axis = fact::axis(axis, rank).ok_or_else(|| format!("axis {axis} of rank {rank}"))?;
        spread[axis] = (pads[i], pads[n + i]);
    }
    Ok(spread)
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let data = cx.required(0)?;
    let Some(shape) = &data.shape else {
        return Ok(vec![Fact::unranked(data.dtype)]);
    };
    let unknown = Ok(vec![Fact::new(data.dtype, vec![Dim::Unknown; shape.len()])]);
    let pads = match cx.node().since_version {
        2 => cx.ints("pads").map(<[i64]>::to_vec),
        _ => cx.required(1)?.ints(),
    };
    let axes = cx.input(3).map(Fact::ints);
    let (Some(pads), Some(axes)) = (pads, axes.map_or(Some(None), |axes| axes.map(Some))) else {
        return unknown;
    };
    let problem = |got: String| cx.error("pads", got, "as in the definition");
    let pads = spread(shape.len(), &pads, axes.as_deref().map(Indices::I64)).map_err(problem)?;
    let constant = cx.string("mode", "constant") == "constant";
    let mut dims = Vec::with_capacity(shape.len());
    for (dim, (before, after)) in shape.iter().zip(pads) {
        dims.push(match dim {
            _ if (before, after) == (0, 0) => dim.clone(),
            Dim::Known(dim) => {
                let sum = (*dim as i64).saturating_add(before).saturating_add(after);
                let cropped = (*dim as i64).saturating_add(before.min(0)).saturating_add(after.min(0));
                match usize::try_from(sum) {
                    // There must be something to repeat.
                    Ok(sum) if constant || sum == 0 || cropped > 0 => Dim::Known(sum),
                    _ => return Err(problem(format!("({before}, {after}) around a dim of {dim}"))),
                }
            }
            _ => Dim::Unknown,
        });
    }
    Ok(vec![Fact::new(data.dtype, dims)])
}

/// What lies around the data; `cuda.cu` has the same codes.
#[derive(Clone, Copy)]
enum Mode {
    Constant,
    Reflect,
    Edge,
    Wrap,
}

fn mode(cx: &NodeCx) -> Mode {
    match cx.string("mode", "constant") {
        "reflect" => Mode::Reflect,
        "edge" => Mode::Edge,
        "wrap" => Mode::Wrap,
        _ => Mode::Constant,
    }
}

/// Opset 2's pads and value.
fn attributes(cx: &NodeCx) -> Result<Option<(Vec<i64>, HostTensor)>> {
    let attributes = (cx.node().since_version == 2).then(|| {
        let value = cx.float("value", 0.0);
        let value = match cx.required(0)?.dtype {
            DType::F16 => HostTensor::new(&[], &[half::f16::from_f32(value)]),
            DType::F64 => HostTensor::new(&[], &[f64::from(value)]),
            _ => HostTensor::new(&[], &[value]),
        };
        Ok((cx.ints("pads").unwrap_or(&[]).to_vec(), value))
    });
    attributes.transpose()
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Pad { mode: mode(cx), attributes: attributes(cx)? }))
}

struct Pad {
    mode: Mode,
    /// Opset 2's pads and value.
    attributes: Option<(Vec<i64>, HostTensor)>,
}

/// How a dim of the output reads the input: `len` elements from `start` on lie at `before`.
#[derive(Clone, Copy, Default)]
struct Axis {
    before: i64,
    start: i64,
    len: i64,
}

impl Axis {
    fn new(dim: usize, (before, after): (i64, i64)) -> Self {
        Self { before: before.max(0), start: -before.min(0), len: (dim as i64 + before.min(0) + after.min(0)).max(0) }
    }

    /// The input position behind output position `i`; `None` where the constant goes.
    fn source(&self, mode: Mode, i: usize) -> Option<usize> {
        let at = i as i64 - self.before;
        if (0..self.len).contains(&at) {
            return Some((self.start + at) as usize);
        }
        let last = self.len - 1;
        let at = match mode {
            Mode::Constant => return None,
            Mode::Edge => at.clamp(0, last),
            Mode::Wrap => at.rem_euclid(self.len),
            Mode::Reflect if last == 0 => 0,
            Mode::Reflect => {
                let at = at.rem_euclid(2 * last);
                at.min(2 * last - at)
            }
        };
        Some((self.start + at) as usize)
    }
}

impl Kernel for Pad {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let data = cx.required(0);
        let shape = data.shape();
        let axes = cx.input(3).map(|t| Indices::of(&t));
        let pads = match &self.attributes {
            Some((pads, _)) => spread(shape.len(), pads, None),
            None => spread(shape.len(), cx.required(1).slice::<i64>(), axes),
        };
        let pads = pads.map_err(|got| cx.error("pads", got, "as in the definition"))?;
        let mut axes = [Axis::default(); MAX_RANK];
        for ((axis, &dim), pads) in axes.iter_mut().zip(shape).zip(pads) {
            *axis = Axis::new(dim, pads);
        }
        let given = self.attributes.as_ref().map(|(_, value)| value);
        let given = given.and_then(|v| Tensor::from_bytes(v.dtype(), &[], v.bytes()));
        let value = given.or(cx.input(2));
        let Some(mut out) = cx.output(0) else {
            return Ok(());
        };
        if out.is_empty() {
            return Ok(());
        }
        let out_shape = out.shape();
        with_word!(data.dtype(), W => {
            let value = value.map_or(W::default(), |v| words::<W>(&v)[0]);
            let walk = Walk { data: words::<W>(&data), shape, out_shape, axes: &axes[..shape.len()], value };
            let out = SharedMut::new(words_mut::<W>(&mut out));
            let row = out_shape.last().copied().unwrap_or(1);
            cx.par.ranges(out.len() / row, (COPY / (row * size_of::<W>())).max(1), |range| {
                for i in range {
                    // SAFETY: rows do not overlap, and each is written by one task.
                    walk.row(self.mode, i, unsafe { out.slice(i * row..(i + 1) * row) });
                }
            });
        });
        Ok(())
    }
}

struct Walk<'a, W> {
    data: &'a [W],
    shape: &'a [usize],
    out_shape: &'a [usize],
    axes: &'a [Axis],
    value: W,
}

impl<W: Element> Walk<'_, W> {
    /// Writes row `i` of the output, along its last dim.
    fn row(&self, mode: Mode, i: usize, out: &mut [W]) {
        let Some((last, outer)) = self.axes.split_last() else {
            out[0] = self.data[0];
            return;
        };
        let strides = Strides::of(self.shape);
        let (mut rest, mut base) = (i, Some(0));
        for (d, axis) in outer.iter().enumerate().rev() {
            let source = axis.source(mode, rest % self.out_shape[d]);
            rest /= self.out_shape[d];
            base = base.zip(source).map(|(base, at)| base + at * strides.get(d) as usize);
        }
        let Some(base) = base else {
            return out.fill(self.value);
        };
        let one = |i: usize| last.source(mode, i).map_or(self.value, |at| self.data[base + at]);
        // `out` may end before the input's elements do only where they are cropped, which `len` knows.
        let (start, len) = ((last.before as usize).min(out.len()), last.len as usize);
        let end = (start + len).min(out.len());
        let from = base + last.start as usize;
        out[start..end].copy_from_slice(&self.data[from..from + end - start]);
        (0..start).chain(end..out.len()).for_each(|i| out[i] = one(i));
    }
}
