//! Conv: <https://onnx.ai/onnx/operators/onnx__Conv.html>. Dims: N batch, C channels, M feature maps, then any number of
//! spatial dims.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::build::BuildCx;
use crate::cpu::number::FLOATS;
use crate::fact::Fact;
use crate::kernel::Kernel;
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::elementwise::{check_rank, claim_rank};
use crate::with_real;
use abi::{Dim, Result};

/// The definition.
pub const OPS: &[OpDef] =
    &[OpDef::new("", "Conv", (1, 22), claim, infer, build).with_cuda_claim(cuda::claim, cuda::build)];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(0, "X", FLOATS)?;
    let dtype = cx.required(0)?.dtype;
    cx.check_dtype(1, "W", &[dtype])?;
    cx.check_dtype(2, "B", &[dtype])?;
    cx.check_string("auto_pad", "NOTSET", &["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])?;
    if spatial_dims(cx).is_none_or(|n| n == 0) {
        return Err(cx.decline("input 0 (X)", "an unknown or lower rank", "a known rank of 3 or more"));
    }
    claim_rank(cx)
}

/// How the kernel slides along one spatial dim.
#[derive(Clone, Copy, Debug, Default)]
struct Slide {
    /// Length of the kernel.
    kernel: usize,
    stride: usize,
    dilation: usize,
    /// Zeros before and after the input, as given; `None` where `auto_pad` decides.
    pads: Option<(usize, usize)>,
    /// Whether an odd zero goes before the input.
    lower: bool,
}

impl Slide {
    /// Zeros before the input, and length of the output; `None` when the kernel does not fit.
    fn over(&self, dim: usize) -> Option<(usize, usize)> {
        let reach = (self.kernel - 1).checked_mul(self.dilation)?.checked_add(1)?;
        if let Some((before, after)) = self.pads {
            let padded = dim.checked_add(before)?.checked_add(after)?;
            return Some((before, padded.checked_sub(reach)? / self.stride + 1));
        }
        let out = dim.div_ceil(self.stride);
        let pads = (out.saturating_sub(1) * self.stride).checked_add(reach)?.saturating_sub(dim);
        Some((if self.lower { pads.div_ceil(2) } else { pads / 2 }, out))
    }
}

/// The slides along all spatial dims, whose kernel lengths are `kernel`; the error says what is wrong.
fn slides(cx: &NodeCx, kernel: &[usize]) -> Result<Vec<Slide>> {
    let n = kernel.len();
    let list = |name: &str, len: usize, default: i64, least: i64| -> Result<Vec<usize>> {
        let values = cx.ints(name).map_or_else(|| vec![default; len], <[i64]>::to_vec);
        if values.len() == len && values.iter().all(|&v| (least..=1 << 32).contains(&v)) {
            return Ok(values.into_iter().map(|v| v as usize).collect());
        }
        let expected = format!("{len} numbers of {least} or more");
        Err(cx.error(format_args!("attribute '{name}'"), format_args!("{values:?}"), expected))
    };
    let (strides, dilations) = (list("strides", n, 1, 1)?, list("dilations", n, 1, 1)?);
    let pads = list("pads", 2 * n, 0, 0)?;
    let auto = cx.string("auto_pad", "NOTSET");
    let slide = |i: usize| Slide {
        kernel: kernel[i],
        stride: strides[i],
        dilation: dilations[i],
        pads: match auto {
            "NOTSET" => Some((pads[i], pads[n + i])),
            "VALID" => Some((0, 0)),
            _ => None,
        },
        lower: auto == "SAME_LOWER",
    };
    Ok((0..n).map(slide).collect())
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let (x, w) = (cx.required(0)?, cx.required(1)?);
    let (Some(shape), Some(weights)) = (&x.shape, &w.shape) else {
        return Ok(vec![Fact::unranked(x.dtype)]);
    };
    if shape.len() < 3 || weights.len() != shape.len() {
        return Err(cx.error(
            "input 1 (W)",
            format_args!("{weights:?}"),
            format_args!("the rank of {shape:?}, 3 or more"),
        ));
    }
    let group = usize::try_from(cx.int("group", 1)).ok().filter(|&g| g > 0);
    let group = group.ok_or_else(|| cx.error("attribute 'group'", cx.int("group", 1), "1 or more"))?;
    if let (Some(c), Some(per_group)) = (shape[1].known(), weights[1].known())
        && per_group.checked_mul(group) != Some(c)
    {
        let expected = format!("{c} channels in {group} groups");
        return Err(cx.error("input 1 (W)", format_args!("{weights:?}"), expected));
    }
    if let Some(m) = weights[0].known()
        && (m % group != 0 || cx.input(2).and_then(Fact::elements).is_some_and(|b| b != m))
    {
        let expected = format!("maps in {group} groups, and as many biases");
        return Err(cx.error("input 1 (W)", format_args!("{weights:?}"), expected));
    }
    let mut out = vec![shape[0].clone(), weights[0].clone()];
    let kernel: Option<Vec<usize>> = weights[2..].iter().map(Dim::known).collect();
    let Some(kernel) = kernel else {
        out.resize(shape.len(), Dim::Unknown);
        return Ok(vec![Fact::new(x.dtype, out)]);
    };
    let named = cx.ints("kernel_shape");
    if kernel.contains(&0) || named.is_some_and(|k| !k.iter().copied().eq(kernel.iter().map(|&k| k as i64))) {
        return Err(cx.error("attribute 'kernel_shape'", format_args!("{named:?}"), format_args!("{kernel:?}, W's")));
    }
    for (dim, slide) in shape[2..].iter().zip(slides(cx, &kernel)?) {
        let Some(dim) = dim.known() else {
            out.push(Dim::Unknown);
            continue;
        };
        match slide.over(dim) {
            Some((_, len)) => out.push(Dim::Known(len)),
            None => return Err(cx.error("input 0 (X)", format_args!("{shape:?}"), format_args!("room for {slide:?}"))),
        }
    }
    Ok(vec![Fact::new(x.dtype, out)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let dtype = cx.required(0)?.dtype;
    // The kernel's lengths may be known at run time only.
    let spatial = spatial_dims(cx).ok_or_else(|| cx.error("input 1 (W)", "an unknown rank", "a known one"))?;
    let (slides, group) = (slides(cx, &vec![1; spatial])?, cx.int("group", 1) as usize);
    let tier = cx.settings().tier;
    Ok(with_real!(dtype, T => Box::new(cpu::Conv::<T>::new(slides, group, tier))))
}

/// How many spatial dims there are, if the rank of an input says so.
fn spatial_dims(cx: &NodeCx) -> Option<usize> {
    (0..2).find_map(|slot| cx.input(slot)?.rank()?.checked_sub(2))
}
