//! `com.microsoft::RotaryEmbedding`, `com.microsoft::MRotaryEmbedding` and `ai.onnx::RotaryEmbedding`.
//! Specs: <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.RotaryEmbedding>,
//! <https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html>.
//!
//! Dims: B batch, S tokens, N heads, H head size, R rotated elements of a head (the rest passes through), M rows of the caches.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::rotary::Pairs;
use crate::fact::Fact;
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use abi::{DType, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("com.microsoft", "RotaryEmbedding", (1, 1), claim, infer, build).with_cuda(cuda::build),
    OpDef::new("com.microsoft", "MRotaryEmbedding", (1, 1), claim, infer, build).with_cuda(cuda::build),
    OpDef::new("", "RotaryEmbedding", (23, u32::MAX), claim, infer, build).with_cuda(cuda::build),
];

/// Which of the three ops it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Inputs x, position_ids `[1]` or `[B, S]`, cos, sin.
    Contrib,
    /// Inputs x, position_ids `[3, B, S]`, cos, sin.
    Multimodal,
    /// Inputs x, cos, sin, position_ids `[B, S]` or none (then the caches are `[B, S, R / 2]`).
    Onnx,
}

impl Form {
    fn of(cx: &NodeCx) -> Self {
        match (cx.node().domain.as_str(), cx.node().op_type.as_str()) {
            ("", _) => Self::Onnx,
            (_, "MRotaryEmbedding") => Self::Multimodal,
            _ => Self::Contrib,
        }
    }

    /// Input slots.
    pub fn positions(self) -> usize {
        if self == Self::Onnx { 3 } else { 1 }
    }

    pub fn cos(self) -> usize {
        if self == Self::Onnx { 1 } else { 2 }
    }

    pub fn sin(self) -> usize {
        self.cos() + 1
    }
}

/// The attributes.
#[derive(Debug, Clone)]
pub(crate) struct Attrs {
    pub form: Form,
    pub pairs: Pairs,
    /// 0 where the shapes say it.
    pub heads: usize,
    /// R; 0: H.
    pub rotated: usize,
    /// Position stream (0, 1 or 2) of each pair; empty but for the multimodal form.
    pub streams: Vec<u8>,
}

impl Attrs {
    pub fn parse(cx: &NodeCx) -> Result<Self, Decline> {
        let form = Form::of(cx);
        let count = |name: &str| {
            let got = cx.int(name, 0);
            usize::try_from(got).map_err(|_| cx.decline(format_args!("attribute '{name}'"), got, "0 or more"))
        };
        let (heads, rotated) = (count("num_heads")?, count("rotary_embedding_dim")?);
        if rotated % 2 != 0 {
            return Err(cx.decline("attribute 'rotary_embedding_dim'", rotated, "an even number"));
        }
        if form == Form::Contrib && rotated > 0 && heads == 0 {
            return Err(cx.decline("attribute 'num_heads'", heads, "more than 0 with rotary_embedding_dim"));
        }
        let scale = cx.float("scale", 1.0);
        if scale != 1.0 && scale != 0.0 {
            return Err(cx.decline("attribute 'scale'", scale, "1: the schema does not say what it scales"));
        }
        let streams = match form {
            Form::Multimodal => streams(cx)?,
            _ => Vec::new(),
        };
        Ok(Self { form, pairs: Pairs::from_attribute(cx.int("interleaved", 0)), heads, rotated, streams })
    }

    /// Whether both rotate a head alike.
    pub fn rotates_like(&self, other: &Self) -> bool {
        (self.form, self.pairs, self.rotated, &self.streams) == (other.form, other.pairs, other.rotated, &other.streams)
    }
}

/// The stream that each pair of the rotated part takes its position from.
fn streams(cx: &NodeCx) -> Result<Vec<u8>, Decline> {
    let section = cx.ints("mrope_section").unwrap_or_default();
    let sizes: Vec<usize> = section.iter().filter_map(|&v| usize::try_from(v).ok()).collect();
    let total = sizes.iter().try_fold(0usize, |n, &v| n.checked_add(v));
    let (&[t, h, w], 3, Some(total @ 0..=65536)) = (sizes.as_slice(), section.len(), total) else {
        return Err(cx.decline(
            "attribute 'mrope_section'",
            format_args!("{section:?}"),
            "3 numbers of 0 or more, at most 65536 together",
        ));
    };
    match cx.int("mrope_layout", 0) {
        0 => Ok([vec![0; t], vec![1; h], vec![2; w]].concat()),
        1 => Ok((0..total)
            .map(|i| match i % 3 {
                1 if i < 3 * h => 1,
                2 if i < 3 * w => 2,
                _ => 0,
            })
            .collect()),
        layout => Err(cx.decline("attribute 'mrope_layout'", layout, "0 or 1")),
    }
}

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    let attrs = Attrs::parse(cx)?;
    cx.check_required(if attrs.form == Form::Onnx { 3 } else { 4 })?;
    cx.check_dtype(0, "input", &[DType::F32, DType::F16, DType::BF16])?;
    let dtype = cx.required(0)?.dtype;
    cx.check_dtype(attrs.form.cos(), "cos_cache", &[dtype])?;
    cx.check_dtype(attrs.form.sin(), "sin_cache", &[dtype])?;
    cx.check_dtype(attrs.form.positions(), "position_ids", &[DType::I64])
}

/// What the shapes must be, in numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub batch: usize,
    pub rows: usize,
    pub heads: usize,
    pub head: usize,
    /// The input is `[B, N, S, H]`, not `[B, S, N * H]`.
    heads_first: bool,
}

impl Layout {
    /// `half`: the last dim of the caches. The message says what is wrong with the shape.
    pub fn new(attrs: &Attrs, shape: &[usize], half: usize) -> Result<Self, String> {
        let layout = match *shape {
            [batch, heads, rows, head] => Self { batch, rows, heads, head, heads_first: true },
            [batch, rows, hidden] => {
                // Without either attribute the caches say how large a head is.
                let (heads, head) = match attrs.heads {
                    0 if attrs.form == Form::Contrib && half > 0 => (hidden / (2 * half), 2 * half),
                    0 => return Err("num_heads for an input of 3 dimensions".into()),
                    n => (n, hidden / n),
                };
                if heads * head != hidden {
                    return Err(format!("a hidden size of {heads} heads of equal size"));
                }
                Self { batch, rows, heads, head, heads_first: false }
            }
            _ => return Err("3 or 4 dimensions".into()),
        };
        Ok(layout)
    }
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let attrs = Attrs::parse(cx).map_err(|d| abi::Error::Internal(d.0))?;
    let x = cx.required(0)?;
    let out = Fact::of(x.dtype, x.shape.clone());
    let (cos, sin) = (cx.required(attrs.form.cos())?, cx.required(attrs.form.sin())?);
    if let (Some(shape), Some(cache)) = (x.known_shape(), cos.known_shape()) {
        check(cx, &attrs, &shape, &cache, sin)?;
    }
    Ok(vec![out])
}

fn shape_text(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// Checks everything that shapes decide, once they are known.
fn check(cx: &NodeCx, attrs: &Attrs, shape: &[usize], cache: &[usize], sin: &Fact) -> Result<()> {
    let form = attrs.form;
    let slot = |i: usize, name: &str| format!("input {i} ({name})");
    let positions = cx.input(form.positions());
    let rank = if form == Form::Onnx && positions.is_none() { 3 } else { 2 };
    let cache_error = |expected: String| {
        cx.error(slot(form.cos(), "cos_cache"), format_args!("shape {}", shape_text(cache)), expected)
    };
    if cache.len() != rank {
        return Err(cache_error(format!("{rank} dimensions")));
    }
    let half = cache[rank - 1];
    let layout = Layout::new(attrs, shape, half)
        .map_err(|e| cx.error("input 0", format_args!("shape {}", shape_text(shape)), e))?;
    let rotated = if attrs.rotated == 0 { layout.head } else { attrs.rotated };
    if rotated > layout.head || 2 * half != rotated {
        return Err(cache_error(format!(
            "a last dimension of {} (half of {rotated} rotated elements of a head of {})",
            rotated / 2,
            layout.head
        )));
    }
    if form == Form::Multimodal && attrs.streams.len() != half {
        return Err(cx.error(
            "attribute 'mrope_section'",
            format_args!("a sum of {}", attrs.streams.len()),
            format_args!("{half}, the pairs that are rotated"),
        ));
    }
    let (b, s) = (layout.batch, layout.rows);
    if rank == 3 && cache[..2] != [b, s] {
        return Err(cache_error(format!("{b}x{s}x{half} without position_ids")));
    }
    if sin.known_shape().is_some_and(|sin| sin != cache) {
        return Err(cx.error(
            slot(form.sin(), "sin_cache"),
            "another shape",
            format_args!("{}, as cos_cache", shape_text(cache)),
        ));
    }
    let Some(ids) = positions.and_then(Fact::known_shape) else { return Ok(()) };
    let good = match form {
        Form::Multimodal => ids == [3, b, s],
        Form::Onnx => ids == [b, s],
        Form::Contrib => ids == [1] || ids == [b, s],
    };
    if good {
        return Ok(());
    }
    let expected = match form {
        Form::Multimodal => format!("3x{b}x{s}"),
        Form::Onnx => format!("{b}x{s}"),
        Form::Contrib => format!("1 or {b}x{s}"),
    };
    Err(cx.error(slot(form.positions(), "position_ids"), format_args!("shape {}", shape_text(&ids)), expected))
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let attrs = Attrs::parse(cx).map_err(|d| abi::Error::Internal(d.0))?;
    Ok(Box::new(cpu::Rotary { attrs }))
}
