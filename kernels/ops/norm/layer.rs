//! ai.onnx LayerNormalization 1 (ORT's own) and 17, SimplifiedLayerNormalization 1 (ORT's own) and
//! RMSNormalization 23: <https://onnx.ai/onnx/operators/onnx__LayerNormalization.html>.
//!
//! The norm is over the dims from 'axis' on; scale and bias broadcast to X. Outputs: Y of the scale's type,
//! then each row's mean (LayerNormalization only) and 1 / deviation in f32.

use super::cuda;
use super::rows::{Call, Norm};
use crate::build::BuildCx;
use crate::cpu::convert::{Floats, FloatsMut, widened};
use crate::fact::{Fact, axis, broadcast, unify};
use crate::kernel::{Carver, Kernel, RunCx, Shapes, Tensor};
use crate::op::{Decline, NodeCx, OpDef};
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use crate::shapes::show;
use abi::tensor::Element;
use abi::{DType, Dim, Result};

/// The definitions.
pub const OPS: &[OpDef] = &[
    OpDef::new("", "LayerNormalization", (1, 17), claim, infer, build)
        .with_cuda_claim(cuda::claim_layer, cuda::build_layer),
    OpDef::new("", "SimplifiedLayerNormalization", (1, 1), claim, infer, build)
        .with_cuda_claim(cuda::claim_layer, cuda::build_layer),
    OpDef::new("", "RMSNormalization", (23, 23), claim, infer, build)
        .with_cuda_claim(cuda::claim_layer, cuda::build_layer),
];

/// Whether the mean is subtracted: the op has a bias input and a mean output.
fn centred(cx: &NodeCx) -> bool {
    cx.node().op_type == "LayerNormalization"
}

/// The [broadcast] inputs by slot.
fn vectors(cx: &NodeCx) -> &'static [(usize, &'static str)] {
    if centred(cx) { &[(1, "scale"), (2, "B")] } else { &[(1, "scale")] }
}

fn claim(cx: &NodeCx) -> Result<(), Decline> {
    cx.check_required(2)?;
    cx.check_dtype(0, "X", &[DType::F32, DType::F16, DType::BF16, DType::F64])?;
    let halves = [DType::F32, DType::F16, DType::BF16];
    let double = [DType::F64];
    let allowed = if cx.required(0)?.dtype == DType::F64 { &double[..] } else { &halves };
    cx.check_dtype(1, "scale", allowed)?;
    cx.check_dtype(2, "B", &[cx.required(1)?.dtype])?;
    cx.check_int("stash_type", 1, &[1])
}

fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let (x, scale) = (cx.required(0)?, cx.required(1)?);
    let Some(shape) = &x.shape else {
        let rows = Fact::unranked(DType::F32);
        return Ok(vec![Fact::unranked(scale.dtype), rows.clone(), rows]);
    };
    let first = first_axis(cx, shape)?;
    for (slot, name) in vectors(cx) {
        let Some(vector) = cx.input(*slot).and_then(|fact| fact.shape.as_ref()) else {
            continue;
        };
        // It broadcasts to X, not X to it.
        let joined = broadcast(&[shape, vector]).filter(|joined| {
            joined.len() == shape.len() && joined.iter().zip(shape).all(|(a, b)| unify(a, b).is_some())
        });
        if joined.is_none() {
            return Err(cx.error(
                format_args!("input {slot} ({name})"),
                show(vector),
                format_args!("a shape that broadcasts to {}", show(shape)),
            ));
        }
    }
    let mut rows = shape.clone();
    rows[first..].fill(Dim::Known(1));
    let rows = Fact::new(DType::F32, rows);
    let y = Fact::new(scale.dtype, shape.clone());
    if centred(cx) { Ok(vec![y, rows.clone(), rows]) } else { Ok(vec![y, rows]) }
}

/// The first normalised dim.
fn first_axis(cx: &NodeCx, shape: &[Dim]) -> Result<usize> {
    let got = cx.int("axis", -1);
    axis(got, shape.len()).ok_or_else(|| {
        let rank = shape.len();
        cx.error("attribute 'axis'", got, format_args!("a dim of rank {rank}"))
    })
}

fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let epsilon = cx.float("epsilon", 1e-5);
    let centred = centred(cx);
    Ok(Box::new(LayerNorm {
        tier: cx.settings().tier,
        norm: if centred { Norm::Layer(epsilon) } else { Norm::Rms(epsilon) },
        centred,
        epsilon,
        axis: cx.int("axis", -1),
    }))
}

struct LayerNorm {
    tier: Tier,
    norm: Norm,
    centred: bool,
    epsilon: f32,
    axis: i64,
}

impl LayerNorm {
    /// Rows, and the elements of one.
    fn split(&self, shape: &[usize]) -> (usize, usize) {
        let first = axis(self.axis, shape.len()).unwrap_or(0);
        (shape[..first].iter().product(), shape[first..].iter().product())
    }
}

/// Whether `vector`, broadcast to `shape`, is one and the same for each row of `n` elements as it stands.
pub(super) fn is_row(vector: &[usize], shape: &[usize], n: usize) -> bool {
    let ones = vector.iter().take_while(|&&d| d == 1).count();
    let tail = &vector[ones..];
    vector.iter().product::<usize>() == n && shape.ends_with(tail)
}

/// Elements of f32 scratch that [`expanded`] takes.
fn expanded_elements(dtype: DType, vector: &[usize], shape: &[usize], n: usize) -> usize {
    match (is_row(vector, shape, n), dtype) {
        (true, DType::F32) => 0,
        (true, _) => n,
        (false, _) => shape.iter().product(),
    }
}

/// `vector` as `[n]`, or broadcast to X's shape.
fn expanded<'a>(par: Par<'_>, vector: Tensor<'a>, shape: &[usize], n: usize, carver: &mut Carver<'a>) -> &'a [f32] {
    if is_row(vector.shape(), shape, n) {
        return widened(par, vector, carver);
    }
    let to = carver.take::<f32>(shape.iter().product());
    let from = Floats::of(vector);
    spread(|i| from.get(i), vector.shape(), shape, to);
    to
}

/// Broadcasts elements `from`, of shape `vector`, to `shape`.
fn spread<T>(from: impl Fn(usize) -> T, vector: &[usize], shape: &[usize], to: &mut [T]) {
    let lead = shape.len() - vector.len();
    for (i, to) in to.iter_mut().enumerate() {
        let (mut rest, mut stride, mut at) = (i, 1, 0);
        for axis in (0..shape.len()).rev() {
            let index = rest % shape[axis];
            rest /= shape[axis];
            if axis >= lead && vector[axis - lead] != 1 {
                at += index * stride;
                stride *= vector[axis - lead];
            }
        }
        *to = from(at);
    }
}

impl Kernel for LayerNorm {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let shape = shapes.input(0);
        let (_, n) = self.split(shape);
        let vector = |slot: usize| match shapes.inputs.get(slot) {
            Some(Some((DType::F64, _))) => 2 * Carver::size::<f32>(shape.iter().product()),
            Some(Some((dtype, vector))) => Carver::size::<f32>(expanded_elements(*dtype, vector, shape, n)),
            _ => 0,
        };
        vector(1) + vector(2)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        if cx.required(0).dtype() == DType::F64 {
            self.run_double(cx);
            return Ok(());
        }
        let par = cx.par;
        let mut carver = Carver::new(cx.take_scratch());
        let x = cx.required(0);
        let (_, n) = self.split(x.shape());
        let bias = cx.input(2).filter(|_| self.centred);
        let y = cx.output(0).map(FloatsMut::of);
        let call = Call {
            scale: Some(expanded(par, cx.required(1), x.shape(), n, &mut carver)),
            bias: bias.map(|bias| expanded(par, bias, x.shape(), n, &mut carver)),
            mean: if self.centred { shared(cx, 1) } else { None },
            inverse: shared(cx, if self.centred { 2 } else { 1 }),
            ..Call::new(self.norm, Floats::of(x), n, y)
        };
        call.run(self.tier, par);
        Ok(())
    }
}

impl LayerNorm {
    /// Rows of doubles, which no decoder needs fast.
    fn run_double(&self, cx: &mut RunCx<'_>) {
        let mut carver = Carver::new(cx.take_scratch());
        let x = cx.required(0);
        let (rows, n) = self.split(x.shape());
        let mut vector = |vector: Tensor<'_>| {
            let to = carver.take::<f64>(x.len());
            let from = vector.slice::<f64>();
            spread(|i| from[i], vector.shape(), x.shape(), to);
            to
        };
        let scale = vector(cx.required(1));
        let bias = cx.input(2).filter(|_| self.centred).map(&mut vector);
        let mut y = cx.output(0);
        let mut mean = if self.centred { cx.output(1) } else { None };
        let mut inverse = cx.output(if self.centred { 2 } else { 1 });
        for row in 0..rows {
            let from = &x.slice::<f64>()[row * n..(row + 1) * n];
            let count = n as f64;
            let middle = if self.centred { from.iter().sum::<f64>() / count } else { 0.0 };
            let square = from.iter().map(|x| (x - middle) * (x - middle)).sum::<f64>() / count;
            let factor = 1.0 / (square + f64::from(self.epsilon)).sqrt();
            if let Some(mean) = &mut mean {
                mean.slice::<f32>()[row] = middle as f32;
            }
            if let Some(inverse) = &mut inverse {
                inverse.slice::<f32>()[row] = factor as f32;
            }
            if let Some(y) = &mut y {
                for (i, x) in from.iter().enumerate() {
                    let at = row * n + i;
                    let add = bias.as_ref().map_or(0.0, |bias| bias[at]);
                    y.slice::<f64>()[at] = (x - middle) * factor * scale[at] + add;
                }
            }
        }
    }
}

/// Output `slot`, for writing in parallel.
pub(super) fn shared<'a, T: Element>(cx: &mut RunCx<'a>, slot: usize) -> Option<SharedMut<'a, T>> {
    cx.output(slot).map(|output| SharedMut::new(output.into_slice()))
}
