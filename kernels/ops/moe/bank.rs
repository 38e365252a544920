//! A projection's weights where the CPU kernel can multiply with them.

use super::experts::{Expert, Experts, Raw};
use super::problem::{Matrix, Slots};
use crate::build::BuildCx;
use crate::cpu::dense;
use crate::cpu::simd::LANES;
use crate::cpu::sink::Sink;
use crate::kernel::{Carver, RunCx};
use crate::par::SharedMut;
use crate::settings::Tier;
use crate::weights::Constant;
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
}

enum Bank {
    /// All experts in the form that the format names.
    Held(Arc<Held>),
    /// Inputs of the run.
    AtRun,
}

struct Held {
    bytes: AlignedBytes,
    global: Vec<f32>,
}

/// A projection in a Run.
pub(super) struct Active<'a> {
    pub matrix: &'a Matrix,
    /// All experts' weights, scales and zero points.
    bytes: &'a [u8],
    global: &'a [f32],
    pub bias: Option<&'a [f32]>,
    tier: Tier,
    experts: usize,
}

impl Slots {
    /// Those whose tensors make up the weights.
    fn weight_slots(&self) -> Vec<usize> {
        [Some(self.weights), self.scales, self.zero_points, self.global].into_iter().flatten().collect()
    }
}

/// Bytes of all experts of a projection.
fn held_bytes(matrix: &Matrix, experts: usize) -> usize {
    matrix.sizes().total() * experts
}

impl Projection {
    /// Takes over the constants.
    pub fn build(cx: &mut BuildCx, matrix: Matrix, experts: usize) -> Result<Self> {
        let slots = matrix.slots;
        let tier = cx.settings().tier;
        let mut constant = true;
        for slot in slots.weight_slots() {
            constant &= !cx.has_input(slot) || cx.constant(slot)?.is_some();
        }
        let bank = if constant {
            let name = format!("moe {experts} {:?} {:?}", matrix.format, matrix.stored);
            Bank::Held(cx.pack(&slots.weight_slots(), &name, |c| hold(&matrix, experts, c))?)
        } else {
            Bank::AtRun
        };
        let bias = match cx.constant(slots.bias)? {
            None => None,
            Some(_) => Some(cx.pack(&[slots.bias], "f32 vector", |c| {
                let bias = c[0].as_ref().and_then(Constant::to_f32s);
                bias.ok_or_else(|| Error::Internal("a bias is not of a float type".into()))
            })?),
        };
        Ok(Self { matrix, bank, bias, tier })
    }

    /// Scratch for [`Self::active`].
    pub fn scratch_bytes(&self, experts: usize) -> usize {
        let weights = match self.bank {
            Bank::AtRun => Carver::size::<u8>(held_bytes(&self.matrix, experts)),
            Bank::Held(_) => 0,
        };
        let bias = if self.bias.is_none() { Carver::size::<f32>(experts * self.matrix.n) } else { 0 };
        weights + bias
    }

    /// The weights of a Run; `wanted` are the experts that it needs.
    pub fn active<'a, 'b: 'a>(
        &'a self,
        cx: &RunCx<'b>,
        experts: usize,
        wanted: &[u32],
        scratch: &mut Carver<'a>,
    ) -> Result<Active<'a>> {
        let slots = &self.matrix.slots;
        let bias = match (&self.bias, cx.input(slots.bias)) {
            (Some(bias), _) => Some(bias.as_slice()),
            (None, None) => None,
            (None, Some(bias)) => {
                let out = scratch.take::<f32>(experts * self.matrix.n);
                crate::with_float!(bias.dtype(), T => <T as crate::cpu::float::Float>::widen(bias.slice::<T>(), out));
                Some(&*out)
            }
        };
        let (bytes, global) = match &self.bank {
            Bank::Held(held) => (held.bytes.as_slice(), held.global.as_slice()),
            Bank::AtRun => {
                let tensor = |slot: Option<usize>| slot.and_then(|slot| cx.input(slot));
                let bytes = |slot| tensor(slot).map_or(&[][..], |t| t.bytes());
                let raw = Raw {
                    weights: bytes(Some(slots.weights)),
                    scales: bytes(slots.scales),
                    scale: tensor(slots.scales).map_or(DType::F32, |t| t.dtype()),
                    zero_points: bytes(slots.zero_points),
                    global: tensor(slots.global).map_or(&[][..], |t| t.slice::<f32>()),
                };
                let out = scratch.take::<u8>(held_bytes(&self.matrix, experts));
                fill(&Experts::new(&self.matrix, experts, raw)?, experts, out, wanted, cx);
                (&*out, raw.global)
            }
        };
        Ok(Active { matrix: &self.matrix, bytes, global, bias, tier: self.tier, experts })
    }
}

/// Where expert `e`'s weights, scales and zero points lie.
fn places(matrix: &Matrix, experts: usize, e: usize) -> [Range<usize>; 3] {
    let sizes = matrix.sizes();
    let scales = experts * sizes.weights;
    let points = scales + experts * sizes.scales;
    let part = |from: usize, size: usize| from + e * size..from + (e + 1) * size;
    [part(0, sizes.weights), part(scales, sizes.scales), part(points, sizes.zero_points)]
}

/// Unpacks the `wanted` experts of a Run.
fn fill(from: &Experts<'_>, experts: usize, out: &mut [u8], wanted: &[u32], cx: &RunCx<'_>) {
    let out = SharedMut::new(out);
    cx.par.for_each(wanted.len(), |i| {
        let [weights, scales, points] = places(from.matrix, experts, wanted[i] as usize);
        // SAFETY: the places of different experts do not overlap, and each expert is wanted once.
        unsafe { from.fill(wanted[i] as usize, out.slice(weights), out.slice(scales), out.slice(points)) };
    });
}

/// Unpacks all experts from constants.
fn hold(matrix: &Matrix, experts: usize, constants: &[Option<Constant>]) -> Result<Held> {
    let at = |slot: Option<usize>| {
        let place = matrix.slots.weight_slots().into_iter().position(|s| Some(s) == slot)?;
        constants[place].as_ref()
    };
    let bytes = |slot: Option<usize>| at(slot).map_or(&[][..], Constant::bytes);
    let slots = &matrix.slots;
    let raw = Raw {
        weights: bytes(Some(slots.weights)),
        scales: bytes(slots.scales),
        scale: at(slots.scales).map_or(DType::F32, Constant::dtype),
        zero_points: bytes(slots.zero_points),
        global: at(slots.global).and_then(Constant::as_slice).unwrap_or(&[]),
    };
    let from = Experts::new(matrix, experts, raw)?;
    let asked = held_bytes(matrix, experts);
    let mut bytes =
        AlignedBytes::try_zeroed(asked).ok_or_else(|| Error::Memory { asked, purpose: "expert weights".into() })?;
    let out = SharedMut::new(bytes.as_mut_slice());
    for e in 0..experts {
        let [weights, scales, points] = places(matrix, experts, e);
        // SAFETY: the three places do not overlap, and the borrows end here.
        unsafe { from.fill(e, out.slice(weights), out.slice(scales), out.slice(points)) };
        constants.iter().flatten().for_each(Constant::forget_pages);
    }
    Ok(Held { bytes, global: raw.global.to_vec() })
}

/// Rows of one expert times some of its panels.
pub(super) struct Part<'a> {
    pub expert: usize,
    /// The expert's rows in groups, K values a row.
    pub a: *const f32,
    /// How many rows.
    pub rows: usize,
    pub panels: Range<usize>,
    pub out: Sink<'a>,
    /// [`Active::buffer`] values of the task's own.
    pub buffer: &'a mut [f32],
}

impl Active<'_> {
    /// Values of the buffer that a task of [`Self::multiply`] needs.
    pub fn buffer(matrix: &Matrix) -> usize {
        matrix.k * (LANES + 1)
    }

    /// Panels of 16 rows of a matrix.
    pub fn panels(&self) -> usize {
        self.matrix.n.div_ceil(LANES)
    }

    fn expert(&self, e: usize) -> Expert<'_> {
        let [weights, scales, points] = places(self.matrix, self.experts, e).map(|range| &self.bytes[range]);
        let global = self.global.get(e).copied().unwrap_or(1.0);
        Expert { matrix: self.matrix, weights, scales, zero_points: points, global }
    }

    /// One expert's bias.
    pub fn bias_of(&self, e: usize) -> Option<&[f32]> {
        self.bias.map(|bias| &bias[e * self.matrix.n..][..self.matrix.n])
    }

    /// Computes the part.
    ///
    /// # Safety
    /// `a` holds the rows, the sink's memory is valid for the panels, and nobody else touches it.
    pub unsafe fn multiply(&self, part: Part<'_>) {
        let k = self.matrix.k;
        let expert = self.expert(part.expert);
        let kernel = dense::kernel(self.tier);
        let (panel_buffer, row) = part.buffer.split_at_mut(k * LANES);
        for panel in part.panels {
            for c in 0..LANES {
                let n = panel * LANES + c;
                if n < self.matrix.n {
                    expert.decode_row(n, &mut row[..k]);
                } else {
                    row.fill(0.0);
                }
                let column = panel_buffer[c..].iter_mut().step_by(LANES);
                column.zip(&*row).for_each(|(to, from)| *to = *from);
            }
            // SAFETY: the caller's promises; the panel was decoded just now; the processor has the tier.
            unsafe {
                kernel(&dense::Part {
                    a: part.a,
                    a_stride: k,
                    rows: 0..part.rows,
                    b: dense::Panels::packed(panel_buffer.as_ptr().cast(), DType::F32, k),
                    first_panel: panel,
                    panels: panel..panel + 1,
                    out: &part.out,
                });
            }
        }
    }
}
