//! Slice: <https://onnx.ai/onnx/operators/onnx__Slice.html>. Starts, ends and axes are attributes in opset 1 and inputs
//! since 10, which also brought steps.

use super::cuda::Views;
use super::gather_view;
use crate::build::BuildCx;
use crate::cpu::number::MOVABLE;
use crate::cpu::view::{MAX_RANK, Strides, View};
use crate::cuda::{Device, DeviceKernel, LaunchCx, walk};
use crate::fact::{self, Fact};
use crate::kernel::{Kernel, RunCx, Tensor};
use crate::op::{Decline, NodeCx, OpDef};
use crate::ops::elementwise::{check_rank, claim_rank};
use abi::{DType, Dim, Result};
use std::sync::Arc;

/// Slice.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "Slice", (1, 1), claim, infer, build).with_cuda_claim(walk::claim_rank, build_cuda),
    OpDef::new("", "Slice", (10, 13), claim, infer, build)
        .with_host_inputs(&[1, 2, 3, 4])
        .with_cuda_claim(walk::claim_rank, build_cuda),
];

const INPUTS: [&str; 4] = ["starts", "ends", "axes", "steps"];

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_dtype(0, "data", MOVABLE)?;
    claim_rank(cx)?;
    if cx.node().since_version == 1 {
        cx.check_required(1)?;
        for name in ["starts", "ends"] {
            if cx.ints(name).is_none() {
                return Err(cx.decline(format_args!("attribute '{name}'"), "nothing", "integers"));
            }
        }
        return Ok(());
    }
    cx.check_required(3)?;
    (1..5).try_for_each(|slot| cx.check_dtype(slot, INPUTS[slot - 1], &[DType::I64, DType::I32]))
}

/// Starts, ends, axes and steps by index; axes and steps may be absent.
type Lists<'a> = [Option<&'a [i64]>; 4];

/// What a Slice takes of one dim.
#[derive(Clone, Copy)]
struct Part {
    start: i64,
    len: usize,
    step: i64,
}

/// The parts of every dim; the error names the list at fault.
fn parts(shape: &[usize], [starts, ends, axes, steps]: Lists<'_>) -> Result<[Part; MAX_RANK], String> {
    let mut parts = [Part { start: 0, len: 0, step: 1 }; MAX_RANK];
    for (part, &dim) in parts.iter_mut().zip(shape) {
        part.len = dim;
    }
    let (starts, ends) = (starts.unwrap_or(&[]), ends.unwrap_or(&[]));
    let n = starts.len();
    if ends.len() != n || axes.is_some_and(|a| a.len() != n) || steps.is_some_and(|s| s.len() != n) {
        return Err("lists of different lengths".into());
    }
    let mut seen = [false; MAX_RANK];
    for i in 0..n {
        let axis = axes.map_or(i as i64, |axes| axes[i]);
        let axis = fact::axis(axis, shape.len())
            .filter(|&a| !std::mem::replace(&mut seen[a], true))
            .ok_or_else(|| format!("axis {axis} (out of range or twice)"))?;
        let step = steps.map_or(1, |steps| steps[i]);
        if step == 0 {
            return Err("step 0".into());
        }
        parts[axis] = part(shape[axis] as i64, starts[i], ends[i], step);
    }
    Ok(parts)
}

fn part(dim: i64, start: i64, end: i64, step: i64) -> Part {
    let from_end = |v: i64| if v < 0 { v.saturating_add(dim) } else { v };
    let (low, high) = if step > 0 { (0, dim) } else { (-1, dim - 1) };
    let start = from_end(start).clamp(low.max(0).min(high.max(0)), high.max(0));
    // A negative end that lies before the first element means "through it" for negative steps.
    let end = from_end(end).clamp(low, high.max(low));
    let span = if step > 0 { end - start } else { start - end };
    let len = if dim == 0 || span <= 0 { 0 } else { (span - 1) / step.saturating_abs() + 1 };
    Part { start, len: len as usize, step }
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    check_rank(cx)?;
    let data = cx.required(0)?;
    let Some(shape) = &data.shape else {
        return Ok(vec![Fact::unranked(data.dtype)]);
    };
    let unknown = || Ok(vec![Fact::new(data.dtype, vec![Dim::Unknown; shape.len()])]);
    let mut values: [Option<Vec<i64>>; 4] = Default::default();
    for (i, name) in INPUTS.iter().enumerate() {
        if cx.node().since_version == 1 {
            values[i] = cx.ints(name).map(<[i64]>::to_vec);
        } else if let Some(fact) = cx.input(i + 1) {
            match fact.ints() {
                Some(ints) => values[i] = Some(ints),
                // Without axes nothing is known to stay.
                None if i == 2 => return unknown(),
                None => {}
            }
        }
    }
    let lists = [0, 1, 2, 3].map(|i| values[i].as_deref());
    let n = lists[2].or(lists[0]).or(lists[1]).map(<[i64]>::len);
    let complete = lists[0].is_some() && lists[1].is_some() && (lists[3].is_some() || !cx.has_input(4));
    let mut dims = shape.clone();
    let Some(n) = n else { return unknown() };
    // Work on 1-dim pieces, so that known dims are exact beside unknown ones.
    if complete {
        let known: Vec<usize> = shape.iter().map(|d| d.known().unwrap_or(0)).collect();
        let parts = parts(&known, lists).map_err(|got| cx.error("slice inputs", got, "as in the definition"))?;
        for (i, dim) in dims.iter_mut().enumerate() {
            if dim.known().is_some() {
                *dim = Dim::Known(parts[i].len);
            }
        }
    }
    for i in 0..n {
        let axis = fact::axis(lists[2].map_or(i as i64, |axes| axes[i]), shape.len());
        let Some(axis) = axis else { return unknown() };
        let whole = complete
            && lists.iter().flatten().all(|l| l.len() == n)
            && lists[0].is_some_and(|s| s[i] == 0)
            && lists[1].is_some_and(|e| e[i] >= i32::MAX as i64)
            && lists[3].is_none_or(|s| s[i] == 1);
        if !whole && (!complete || shape[axis].known().is_none()) {
            dims[axis] = Dim::Unknown;
        }
    }
    Ok(vec![Fact::new(data.dtype, dims)])
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let attribute = |name| cx.ints(name).map(<[i64]>::to_vec);
    Ok(Box::new(Slice {
        attributes: (cx.node().since_version == 1).then(|| ["starts", "ends", "axes"].map(attribute)),
    }))
}

struct Slice {
    attributes: Option<[Option<Vec<i64>>; 3]>,
}

impl Kernel for Slice {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let shape = cx.required(0).shape();
        let mut stored = [[0; MAX_RANK]; 4];
        let lists: Lists = match &self.attributes {
            Some([starts, ends, axes]) => [starts.as_deref(), ends.as_deref(), axes.as_deref(), None],
            None => {
                let mut rest = stored.iter_mut();
                let mut list = |slot| -> Option<&[i64]> {
                    let into = rest.next().expect("four lists");
                    cx.input(slot).map(|t| read(&t, into))
                };
                [list(1), list(2), list(3), list(4)]
            }
        };
        let parts = parts(shape, lists).map_err(|got| cx.error("slice inputs", got, "as in the definition"))?;
        let (offset, dims) = strided(shape, &parts);
        let view = View::new(offset, dims);
        if let Some(out) = cx.outputs.first().and_then(Option::as_ref)
            && out.len() != view.len()
        {
            return Err(cx.error("output 0", format_args!("{:?}", out.shape()), "the sliced shape"));
        }
        gather_view(cx, &view);
        Ok(())
    }
}

/// The first element, and length and stride of every dim.
fn strided<'a>(shape: &'a [usize], parts: &'a [Part]) -> (isize, impl Iterator<Item = (usize, isize)> + 'a) {
    let strides = Strides::of(shape);
    let offset =
        (0..shape.len()).map(|i| (parts[i].start as isize).wrapping_mul(strides.get(i))).fold(0, isize::wrapping_add);
    let dims = (0..shape.len()).map(move |i| {
        // A step over the whole dim leaves one element, whose stride does not matter.
        let step = parts[i].step.clamp(-(shape[i] as i64) - 1, shape[i] as i64 + 1);
        (parts[i].len, (step as isize).wrapping_mul(strides.get(i)))
    });
    (offset, dims)
}

fn build_cuda(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let attribute = |name| cx.ints(name).map(<[i64]>::to_vec);
    let attributes = (cx.node().since_version == 1).then(|| ["starts", "ends", "axes"].map(attribute));
    Ok(Box::new(CudaSlice { attributes, views: Views::new(device)? }))
}

struct CudaSlice {
    attributes: Option<[Option<Vec<i64>>; 3]>,
    views: Views,
}

impl DeviceKernel for CudaSlice {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let list = |i: usize| match &self.attributes {
            Some(attributes) => attributes.get(i).cloned().flatten(),
            None => cx.input(i + 1).and_then(|t| t.ints()),
        };
        let lists = [0, 1, 2, 3].map(list);
        let shape = cx.required(0).shape;
        let parts = parts(shape, [0, 1, 2, 3].map(|i| lists[i].as_deref()));
        let parts = parts.map_err(|got| cx.error("slice inputs", got, "as in the definition"))?;
        let (offset, dims) = strided(shape, &parts);
        self.views.launch(cx, offset as usize, dims)
    }
}

/// Up to [`MAX_RANK`] numbers of an int32 or int64 tensor.
fn read<'a>(tensor: &Tensor<'_>, into: &'a mut [i64; MAX_RANK]) -> &'a [i64] {
    let n = tensor.len().min(MAX_RANK);
    match tensor.dtype() {
        DType::I32 => {
            for (to, from) in into.iter_mut().zip(tensor.slice::<i32>()) {
                *to = (*from).into();
            }
        }
        _ => into[..n].copy_from_slice(&tensor.slice::<i64>()[..n]),
    }
    &into[..n]
}
