//! The CPU kernel: packs constant weights once, quantises rows at accuracy level 4, and streams panels.

use super::{A, B, BIAS, SCALES, ZERO_POINTS, layout, omitted};
use crate::build::BuildCx;
use crate::cpu::dense;
use crate::cpu::float::Float;
use crate::cpu::nbits::{self, Decode, Left, Part};
use crate::cpu::rows::{self, Groups, QuantRow, Strided, max_group};
use crate::cpu::simd::LANES;
use crate::cpu::simd::scalar::Scalar;
use crate::cpu::sink::{Addend, Sink};
use crate::cpu::split::Split;
use crate::kernel::{Carver, Kernel, RunCx, Shapes, Tensor};
use crate::par::{Par, SharedMut};
use crate::quant::nbits::{self as nbits_layout, Layout, Packed, Source, View, ZeroPoint};
use crate::settings::Tier;
use crate::weights::Constant;
use crate::with_float;
use abi::{DType, Error, Result};
use std::sync::Arc;

/// Parses the node and packs its weights.
pub fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let layout = layout(cx)?;
    let settings = cx.settings();
    let weights = if omitted(cx) {
        Weights::Omitted
    } else if constant_weights(cx)? {
        let slots = [B, SCALES, ZERO_POINTS];
        Weights::Packed(cx.pack_bytes(&slots, &name(&layout), |c| pack(&layout, c))?)
    } else {
        Weights::AtRun
    };
    let bias = match cx.constant(BIAS)? {
        None => None,
        Some(_) => Some(cx.pack(&[BIAS], "f32 vector", |c| {
            let bias = c[0].as_ref().and_then(Constant::to_f32s);
            bias.ok_or_else(|| Error::Internal("a bias is not of a float type".into()))
        })?),
    };
    Ok(Box::new(MatMulNBits {
        layout,
        weights,
        bias,
        int8: cx.int("accuracy_level", 0) == 4,
        tier: settings.tier,
        workers: settings.chunks,
    }))
}

/// The packed form's name for the cache.
pub fn name(layout: &Layout) -> String {
    format!("{layout:?}")
}

/// Packs constant B, scales and zero points.
pub fn pack(layout: &Layout, constants: &[Option<Constant>]) -> Result<Packed> {
    let bytes = |slot: usize| constants[slot].as_ref().map_or(&[][..], Constant::bytes);
    let forget = || constants.iter().flatten().for_each(Constant::forget_pages);
    let from = source(layout, bytes(0), bytes(1), bytes(2))?;
    if let Some(scales) = constants[1].as_ref().and_then(|scales| halved(layout, scales)) {
        let layout = Layout { scale: DType::F16, ..*layout };
        return layout.pack(&Source { scales: &scales, ..from }, forget);
    }
    layout.pack(&from, forget)
}

/// Float scales as float16, where that loses nothing (a checkpoint often had them so): a tenth of an int4 matrix's bytes.
fn halved(layout: &Layout, scales: &Constant) -> Option<Vec<u8>> {
    if layout.scale != DType::F32 || layout.zero_point == ZeroPoint::Float {
        return None;
    }
    nbits_layout::fit_half(scales.as_slice::<f32>()?).then(|| nbits_layout::halved(scales.bytes()))
}

/// The source, its sizes checked.
pub(super) fn source<'a>(layout: &Layout, b: &'a [u8], scales: &'a [u8], zero_points: &'a [u8]) -> Result<Source<'a>> {
    if layout.source_bytes() != (b.len(), scales.len(), zero_points.len()) {
        let got = (b.len(), scales.len(), zero_points.len());
        return Err(Error::Internal(format!(
            "MatMulNBits weights of {got:?} bytes passed the shape check of {layout:?}"
        )));
    }
    Ok(Source { b, scales, zero_points })
}

/// Whether B, scales and zero points are all constants.
pub(super) fn constant_weights(cx: &mut BuildCx) -> Result<bool> {
    for slot in [B, SCALES, ZERO_POINTS] {
        if cx.has_input(slot) && cx.constant(slot)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

enum Weights {
    Packed(Arc<Packed>),
    /// Inputs of the run: packed each time.
    AtRun,
    /// An empty B: the product is zero.
    Omitted,
}

struct MatMulNBits {
    layout: Layout,
    weights: Weights,
    bias: Option<Arc<Vec<f32>>>,
    int8: bool,
    tier: Tier,
    /// How many panels may be decoded at once.
    workers: usize,
}

/// How a run goes, by the number of rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// int8 dot products.
    Int8,
    /// f32, weights decoded in registers.
    Streamed,
    /// f32, each panel decoded to memory first, which many rows share.
    Decoded,
}

impl MatMulNBits {
    fn way(&self, m: usize) -> Way {
        if self.int8 {
            Way::Int8
        } else if m <= 2 * max_group(self.tier) {
            Way::Streamed
        } else {
            Way::Decoded
        }
    }

    fn bias<'a>(&'a self, bias: Option<Tensor<'a>>, scratch: &mut Carver<'a>) -> Option<&'a [f32]> {
        if let Some(bias) = &self.bias {
            return Some(bias);
        }
        let bias = bias?;
        let out = scratch.take::<f32>(self.layout.n);
        with_float!(bias.dtype(), T => T::widen(bias.slice::<T>(), out));
        Some(out)
    }

    /// Packs weights that arrived with the run.
    fn pack_at_run<'a>(&self, cx: &RunCx<'_>, scratch: &mut Carver<'a>) -> Result<View<'a>> {
        let bytes = |slot: usize| cx.input(slot).map_or(&[][..], |t| t.bytes());
        let from = source(&self.layout, bytes(B), bytes(SCALES), bytes(ZERO_POINTS))?;
        let size = self.layout.panel_bytes();
        let out = scratch.take::<u8>(size * self.layout.panels());
        cx.par.chunks_mut(out, size, |panel, out| self.layout.pack_panel(panel, &from, out));
        let view = View::new(self.layout, out);
        view.ok_or_else(|| Error::Internal("packed weights have an odd size".into()))
    }
}

impl Kernel for MatMulNBits {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let l = &self.layout;
        let m = shapes.input(A).iter().product::<usize>() / l.k;
        let left = match self.way(m) {
            Way::Int8 => Carver::size::<u8>(m * l.padded_k()) + 2 * Carver::size::<f32>(m * l.blocks()),
            Way::Streamed => Carver::size::<f32>(m * l.padded_k()) + Carver::size::<i32>(m * l.blocks()),
            Way::Decoded => {
                Carver::size::<f32>(m * l.padded_k()) + Carver::size::<f32>(self.workers * l.padded_k() * LANES)
            }
        };
        let bias = if self.bias.is_none() { Carver::size::<f32>(l.n) } else { 0 };
        let weights = match self.weights {
            Weights::AtRun => Carver::size::<u8>(l.bytes().unwrap_or(usize::MAX / 4)),
            _ => 0,
        };
        left + bias + weights
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let l = &self.layout;
        let a = cx.required(A);
        let m = a.len() / l.k;
        let Some(mut out) = cx.output(0) else { return Ok(()) };
        if m == 0 {
            return Ok(());
        }
        let mut scratch = Carver::new(cx.take_scratch());
        let bias = self.bias(cx.input(BIAS), &mut scratch);
        let sink = Sink {
            ptr: out.bytes().as_mut_ptr(),
            dtype: out.dtype(),
            stride: l.n,
            n: l.n,
            alpha: 1.0,
            addend: bias.map(|values| Addend { values, row: 0, column: 1 }),
        };
        let w = match &self.weights {
            Weights::Packed(packed) => packed.view(),
            Weights::AtRun => self.pack_at_run(cx, &mut scratch)?,
            Weights::Omitted => {
                fill(m, &sink);
                return Ok(());
            }
        };
        let product = Product { tier: self.tier, w, par: &cx.par, sink: &sink, m, workers: self.workers };
        match self.way(m) {
            Way::Int8 => product.int8(&a, &mut scratch),
            Way::Streamed => with_float!(a.dtype(), T => product.streamed(a.slice::<T>(), &mut scratch)),
            Way::Decoded => with_float!(a.dtype(), T => product.decoded(a.slice::<T>(), &mut scratch)),
        }
        Ok(())
    }
}

/// Fills the output with the bias or zeros.
fn fill(m: usize, sink: &Sink<'_>) {
    for row in 0..m {
        for col in (0..sink.n).step_by(LANES) {
            // SAFETY: within the output; one thread.
            unsafe { sink.store::<Scalar>(row, col, [0.0; LANES]) };
        }
    }
}

/// One run's product.
struct Product<'a> {
    tier: Tier,
    w: View<'a>,
    par: &'a Par<'a>,
    sink: &'a Sink<'a>,
    m: usize,
    workers: usize,
}

/// Rows that one task gathers or quantises, at the least: a multiple of every tier's group.
const GATHER_ROWS: usize = 24;

impl Product<'_> {
    fn split(&self, row_bytes: usize, panel_bytes: usize) -> Split {
        let panels = self.w.layout.panels();
        Split::new(self.par, self.tier, (self.m, row_bytes), (panels, panel_bytes))
    }

    /// Calls `f` with row groups, in parallel where there are many.
    fn groups(&self, f: impl Fn(Groups) + Sync) {
        let (m, max) = (self.m, max_group(self.tier));
        self.par.for_each(m.div_ceil(GATHER_ROWS), |i| {
            f(Groups::new(i * GATHER_ROWS..((i + 1) * GATHER_ROWS).min(m), max));
        });
    }

    /// int8 dot products.
    fn int8(&self, a: &Tensor<'_>, scratch: &mut Carver<'_>) {
        let l = &self.w.layout;
        let (padded, blocks) = (l.padded_k(), l.blocks());
        let q = scratch.take::<i8>(self.m * padded);
        let scales = scratch.take::<f32>(self.m * blocks);
        let fixes = scratch.take::<i32>(self.m * blocks);
        let left = Left { a: q.as_ptr().cast(), scales: scales.as_ptr(), fixes: fixes.as_ptr() };
        let (q, scales, fixes) = (SharedMut::new(q), SharedMut::new(scales), SharedMut::new(fixes));
        let quantize = rows::quantizer(self.tier);
        let (bytes, dtype) = (a.bytes(), a.dtype());
        let element = l.k * if dtype == DType::F32 { 4 } else { 2 };
        self.groups(|groups| {
            for (row, size) in groups {
                // SAFETY: groups do not overlap, and each is visited by one task; `Carver` gave each row its padded K
                // bytes and its blocks; the input holds M rows of K elements.
                unsafe {
                    let q = q.slice(row * padded..(row + size) * padded);
                    let scales = scales.slice(row * blocks..(row + size) * blocks);
                    let fixes = fixes.slice(row * blocks..(row + size) * blocks);
                    for r in 0..size {
                        quantize(&QuantRow {
                            a: bytes[(row + r) * element..].as_ptr(),
                            dtype,
                            k: l.k,
                            block: l.block,
                            q: q[4 * r..].as_mut_ptr(),
                            scales: scales[r..].as_mut_ptr(),
                            fixes: fixes[r..].as_mut_ptr(),
                            rows: size,
                            zero_point: l.zero_point,
                            default_zero: 1 << (l.bits - 1),
                        });
                    }
                }
            }
        });
        self.run(nbits::int8_kernel(self.tier), left, padded);
    }

    /// f32, weights decoded in registers.
    fn streamed<T: Float>(&self, a: &[T], scratch: &mut Carver<'_>) {
        let l = &self.w.layout;
        let (padded, blocks) = (l.padded_k(), l.blocks());
        let rows = self.gather(a, scratch);
        let fixes = scratch.take::<f32>(self.m * blocks);
        for (row, size) in Groups::new(0..self.m, max_group(self.tier)) {
            let group = &rows[row * padded..(row + size) * padded];
            let fixes = &mut fixes[row * blocks..(row + size) * blocks];
            for (block, fixes) in group.chunks_exact(l.block * size).zip(fixes.chunks_exact_mut(size)) {
                rows::negative_sums(block, fixes);
            }
        }
        let left = Left { a: rows.as_ptr().cast(), scales: std::ptr::null(), fixes: fixes.as_ptr().cast() };
        self.run(nbits::f32_kernel(self.tier), left, padded * 4);
    }

    fn run(&self, kernel: unsafe fn(&Part<'_>), left: Left, row_bytes: usize) {
        self.split(row_bytes, self.w.layout.panel_bytes()).run(self.par, |_, rows, panels| {
            // SAFETY: the rows were gathered for this layout, tasks write disjoint tiles, and the tier was
            // chosen among those that the processor has.
            unsafe {
                kernel(&Part { left, rows, w: self.w, panels, out: self.sink });
            }
        });
    }

    /// f32, each panel decoded once for all rows of a task.
    fn decoded<T: Float>(&self, a: &[T], scratch: &mut Carver<'_>) {
        let padded = self.w.layout.padded_k();
        let rows = self.gather(a, scratch);
        let size = padded * LANES;
        let panels = SharedMut::new(scratch.take::<f32>(self.workers * size));
        let (decode, multiply) = (nbits::decoder(self.tier), dense::kernel(self.tier));
        let split = self.split(padded * 4, size * 4).with_workers(self.workers);
        split.run(self.par, |worker, range, panels_range| {
            for panel in panels_range {
                // SAFETY: a worker's piece is its own; otherwise as in `run`.
                unsafe {
                    let out = panels.slice(worker * size..(worker + 1) * size).as_mut_ptr();
                    decode(&Decode { w: self.w, panel, out });
                    multiply(&dense::Part {
                        a: rows.as_ptr(),
                        a_stride: padded,
                        rows: range.clone(),
                        b: dense::Panels::packed(out.cast(), DType::F32, padded),
                        first_panel: panel,
                        panels: panel..panel + 1,
                        out: self.sink,
                    });
                }
            }
        });
    }

    /// The rows as f32 groups.
    fn gather<'s, T: Float>(&self, a: &[T], scratch: &mut Carver<'s>) -> &'s [f32] {
        let l = &self.w.layout;
        let out = scratch.take::<f32>(self.m * l.padded_k());
        let shared = SharedMut::new(&mut *out);
        let from = Strided { data: a, row: l.k, column: 1 };
        self.groups(|groups| {
            // SAFETY: each group is visited by one task.
            unsafe { rows::gather(from, (l.k, l.padded_k()), groups, shared) };
        });
        out
    }
}
