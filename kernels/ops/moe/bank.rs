//! A projection's weights where the CPU kernel can multiply with them.

use super::experts::{Experts, Raw, Sizes};
use super::problem::{Format, Matrix, Slots};
use super::product::{Active, Form, Operand};
use crate::build::BuildCx;
use crate::cpu::dense;
use crate::cpu::float::Float;
use crate::cpu::simd::LANES;
use crate::kernel::{Carver, RunCx};
use crate::par::SharedMut;
use crate::quant::nbits::{self, Layout, Source, ZeroPoint};
use crate::settings::Tier;
use crate::weights::Constant;
use crate::with_float;
use abi::tensor::AlignedBytes;
use abi::{DType, Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// A projection: weights and bias.
pub(super) struct Projection {
    pub matrix: Matrix,
    bank: Bank,
    /// [E, N], where it is a constant.
    bias: Option<Arc<Vec<f32>>>,
    tier: Tier,
    int8: bool,
}

enum Bank {
    /// Integers as MatMulNBits packs them, one expert after the other.
    Blocks(Arc<Blocks>),
    /// Panels of [`dense`], one expert after the other.
    Dense(DType, Arc<AlignedBytes>),
    /// Panels of float8e4m3fn.
    Fp8(Arc<Fp8>),
    /// Inputs of the run.
    AtRun,
}

struct Blocks {
    layout: Layout,
    /// Whether the codes are float4e2m1.
    e2m1: bool,
    bytes: AlignedBytes,
    global: Vec<f32>,
}

struct Fp8 {
    /// Panels of [`crate::cpu::e4m3`], one expert after the other.
    bytes: AlignedBytes,
    /// A scale for each square of `block`: [E, ceil(N / block), ceil(K / block)].
    scales: Vec<f32>,
    block: usize,
    global: Vec<f32>,
}

impl Slots {
    /// Those whose tensors make up the weights.
    pub fn weight_slots(&self) -> Vec<usize> {
        [Some(self.weights), self.scales, self.zero_points, self.global].into_iter().flatten().collect()
    }
}

impl Projection {
    /// Takes over the constants.
    pub fn build(cx: &mut BuildCx, matrix: Matrix, experts: usize, int8: bool) -> Result<Self> {
        let (slots, tier) = (matrix.slots, cx.settings().tier);
        let mut constant = true;
        for slot in slots.weight_slots() {
            constant &= !cx.has_input(slot) || cx.constant(slot)?.is_some();
        }
        let name = format!("moe {experts} {:?} {:?}", matrix.format, matrix.stored);
        let from = slots.weight_slots();
        let bank = match matrix.format {
            _ if !constant => Bank::AtRun,
            Format::Int(layout) => Bank::Blocks(cx.pack(&from, &name, |c| blocks(&matrix, experts, layout, c))?),
            Format::Dense(dtype) => Bank::Dense(dtype, cx.pack(&from, &name, |c| panels(&matrix, experts, dtype, c))?),
            Format::Fp4 { block } => {
                let (n, k, zero_point) = (matrix.n, matrix.k, ZeroPoint::Default);
                let layout = Layout { n, k, bits: 4, block, scale: DType::BF16, zero_point };
                Bank::Blocks(cx.pack(&from, &name, |c| blocks(&matrix, experts, layout, c))?)
            }
            Format::Fp8 { block } => Bank::Fp8(cx.pack(&from, &name, |c| fp8(&matrix, experts, block, c))?),
        };
        let bias = match cx.constant(slots.bias)? {
            None => None,
            Some(_) => Some(cx.pack(&[slots.bias], "f32 vector", |c| {
                let bias = c[0].as_ref().and_then(Constant::to_f32s);
                bias.ok_or_else(|| Error::Internal("a bias is not of a float type".into()))
            })?),
        };
        Ok(Self { matrix, bank, bias, tier, int8 })
    }

    /// How the rows that the projection reads are laid out.
    pub fn form(&self) -> Form {
        match &self.bank {
            Bank::Blocks(blocks) if self.int8 && !blocks.e2m1 => Form::Int8(blocks.layout),
            Bank::Blocks(blocks) => Form::Floats { k: blocks.layout.padded_k(), block: blocks.layout.block },
            _ => Form::Floats { k: self.matrix.k, block: 0 },
        }
    }

    /// Scratch for [`Self::active`].
    pub fn scratch_bytes(&self, experts: usize) -> usize {
        let weights = match self.bank {
            Bank::AtRun => Carver::size::<u8>(self.matrix.sizes().total() * experts),
            _ => 0,
        };
        let bias = if self.bias.is_none() { Carver::size::<f32>(experts * self.matrix.n) } else { 0 };
        weights + bias
    }

    /// The projection in a Run.
    pub fn active<'a, 'b: 'a>(
        &'a self,
        cx: &RunCx<'b>,
        experts: usize,
        scratch: &mut Carver<'a>,
    ) -> Result<Active<'a>> {
        let slots = &self.matrix.slots;
        let bias = match (&self.bias, cx.input(slots.bias)) {
            (Some(bias), _) => Some(bias.as_slice()),
            (None, None) => None,
            (None, Some(bias)) => {
                let out = scratch.take::<f32>(experts * self.matrix.n);
                with_float!(bias.dtype(), T => T::widen(bias.slice::<T>(), out));
                Some(&*out)
            }
        };
        let operand = match &self.bank {
            Bank::Blocks(blocks) => {
                let Blocks { layout, e2m1, bytes, global } = &**blocks;
                Operand::Blocks { layout: *layout, e2m1: *e2m1, bytes: bytes.as_slice(), global }
            }
            Bank::Dense(dtype, bytes) => Operand::Dense { dtype: *dtype, bytes: bytes.as_slice() },
            Bank::Fp8(fp8) => {
                let Fp8 { bytes, scales, block, global } = &**fp8;
                Operand::Fp8 { bytes: bytes.as_slice(), scales, block: *block, global }
            }
            Bank::AtRun => self.at_run(cx, experts, scratch)?,
        };
        Ok(Active { matrix: &self.matrix, operand, form: self.form(), bias, tier: self.tier })
    }

    /// Unpacks weights that arrive with the Run.
    fn at_run<'a, 'b: 'a>(&self, cx: &RunCx<'b>, experts: usize, scratch: &mut Carver<'a>) -> Result<Operand<'a>> {
        let slots = &self.matrix.slots;
        let tensor = |slot: Option<usize>| slot.and_then(|slot| cx.input(slot));
        let bytes = |slot| tensor(slot).map_or(&[][..], |t| t.bytes());
        let raw = Raw {
            weights: bytes(Some(slots.weights)),
            scales: bytes(slots.scales),
            scale: tensor(slots.scales).map_or(DType::F32, |t| t.dtype()),
            zero_points: bytes(slots.zero_points),
            global: tensor(slots.global).map_or(&[][..], |t| t.slice::<f32>()),
        };
        let from = Experts::new(&self.matrix, experts, raw)?;
        let out = scratch.take::<u8>(self.matrix.sizes().total() * experts);
        let shared = SharedMut::new(&mut *out);
        cx.par.for_each(experts, |e| {
            let [weights, scales, points] = self.matrix.places(experts, e);
            // SAFETY: the places of different experts do not overlap, and each expert is visited once.
            unsafe { from.fill(e, shared.slice(weights), shared.slice(scales), shared.slice(points)) };
        });
        Ok(Operand::Held { bytes: out, global: raw.global, experts })
    }
}

impl Matrix {
    /// Where expert `e`'s weights, scales and zero points lie when all experts are held together.
    pub fn places(&self, experts: usize, e: usize) -> [Range<usize>; 3] {
        let Sizes { weights, scales, zero_points } = self.sizes();
        let part = |from: usize, size: usize| from + e * size..from + (e + 1) * size;
        [part(0, weights), part(experts * weights, scales), part(experts * (weights + scales), zero_points)]
    }
}

/// The constants of a projection's [`Slots::weight_slots`].
pub(super) fn raw<'a>(slots: &Slots, constants: &'a [Option<Constant>]) -> Raw<'a> {
    let at = |slot: Option<usize>| {
        let place = slots.weight_slots().into_iter().position(|s| Some(s) == slot)?;
        constants[place].as_ref()
    };
    let bytes = |slot: Option<usize>| at(slot).map_or(&[][..], Constant::bytes);
    Raw {
        weights: bytes(Some(slots.weights)),
        scales: bytes(slots.scales),
        scale: at(slots.scales).map_or(DType::F32, Constant::dtype),
        zero_points: bytes(slots.zero_points),
        global: at(slots.global).and_then(Constant::as_slice).unwrap_or(&[]),
    }
}

/// Memory for all experts.
fn memory(asked: Option<usize>) -> Result<AlignedBytes> {
    let asked = asked.unwrap_or(usize::MAX);
    AlignedBytes::try_zeroed(asked).ok_or_else(|| Error::Memory { asked, purpose: "expert weights".into() })
}

/// Packs float8e4m3fn into panels. Without blocks, one holds all of the matrix.
fn fp8(matrix: &Matrix, experts: usize, block: usize, constants: &[Option<Constant>]) -> Result<Fp8> {
    let Matrix { n, k, .. } = *matrix;
    let size = n.next_multiple_of(LANES) * k;
    let mut bytes = memory(size.checked_mul(experts))?;
    let mut all_scales = Vec::new();
    each_expert(matrix, experts, constants, |e, weights, scales, _| {
        let out = &mut bytes.as_mut_slice()[e * size..][..size];
        for (panel, out) in out.chunks_exact_mut(LANES * k).enumerate() {
            dense::pack_panel(weights, (1, k), (k, n), panel, 0, out);
        }
        all_scales.extend(scales.as_chunks::<4>().0.iter().map(|&scale| f32::from_le_bytes(scale)));
    })?;
    if block == 0 {
        all_scales = vec![1.0; experts];
    }
    let block = if block == 0 { n.max(k) } else { block };
    Ok(Fp8 { bytes, scales: all_scales, block, global: raw(&matrix.slots, constants).global.to_vec() })
}

/// Calls `f(e, weights, scales, zero points)` for every expert.
fn each_expert(
    matrix: &Matrix,
    experts: usize,
    constants: &[Option<Constant>],
    mut f: impl FnMut(usize, &[u8], &[u8], &[u8]),
) -> Result<()> {
    let from = Experts::new(matrix, experts, raw(&matrix.slots, constants))?;
    let sizes = matrix.sizes();
    let mut one = memory(Some(sizes.total()))?;
    for e in 0..experts {
        let (weights, rest) = one.as_mut_slice().split_at_mut(sizes.weights);
        let (scales, points) = rest.split_at_mut(sizes.scales);
        from.fill(e, weights, scales, points);
        f(e, weights, scales, points);
        constants.iter().flatten().for_each(Constant::forget_pages);
    }
    Ok(())
}

/// Packs integers into the panels that [`crate::cpu::nbits`] streams.
fn blocks(matrix: &Matrix, experts: usize, from: Layout, constants: &[Option<Constant>]) -> Result<Blocks> {
    let e2m1 = matches!(matrix.format, Format::Fp4 { .. });
    let scales = constants[1].as_ref().and_then(Constant::as_slice::<f32>);
    let half = scales.is_some_and(nbits::fit_half);
    let layout = if half { Layout { scale: DType::F16, ..from } } else { from };
    let size = layout.bytes().unwrap_or(usize::MAX);
    let mut bytes = memory(size.checked_mul(experts))?;
    each_expert(matrix, experts, constants, |e, b, scales, zero_points| {
        let halves = if half { nbits::halved(scales) } else { Vec::new() };
        let source = Source { b, scales: if half { &halves } else { scales }, zero_points };
        let out = &mut bytes.as_mut_slice()[e * size..][..size];
        for (panel, out) in out.chunks_exact_mut(layout.panel_bytes()).enumerate() {
            layout.pack_panel(panel, &source, out);
        }
    })?;
    Ok(Blocks { layout, e2m1, bytes, global: raw(&matrix.slots, constants).global.to_vec() })
}

/// Packs whole numbers into the panels that [`dense`] reads.
fn panels(matrix: &Matrix, experts: usize, dtype: DType, constants: &[Option<Constant>]) -> Result<AlignedBytes> {
    let Matrix { n, k, .. } = *matrix;
    let size = n.next_multiple_of(LANES) * k * dense::element_bytes(dtype);
    let mut bytes = memory(size.checked_mul(experts))?;
    let all = constants[0].as_ref();
    with_float!(dtype, T => {
        let all = all.and_then(Constant::as_slice::<T>);
        let all = all.ok_or_else(|| Error::Internal("weights changed their type".into()))?;
        for (e, out) in bytes.as_mut_slice().chunks_exact_mut(size).enumerate() {
            let from = &all[e * n * k..][..n * k];
            // SAFETY: any bytes are numbers of these types; nothing is left out, since memory is aligned.
            let (_, out, _) = unsafe { out.align_to_mut::<T>() };
            for (panel, out) in out.chunks_exact_mut(LANES * k).enumerate() {
                dense::pack_panel(from, (1, k), (k, n), panel, T::from_f32(0.0), out);
            }
            constants.iter().flatten().for_each(Constant::forget_pages);
        }
    });
    Ok(bytes)
}
