//! The products of one expert's rows with its weights.

use super::experts::Expert;
use super::problem::Matrix;
use crate::cpu::dense::{self, Panels};
use crate::cpu::e4m3;
use crate::cpu::nbits::{self, Decode, Left};
use crate::cpu::rows::{self, QuantRow, max_group};
use crate::cpu::simd::LANES;
use crate::cpu::sink::{Addend, Sink};
use crate::quant::nbits::{Layout, View};
use crate::settings::Tier;
use abi::DType;
use std::ops::Range;

/// How the rows that a projection reads are laid out, in the groups of [`crate::cpu::rows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// f32, `k` values a row, padding included; beside them minus the sum of each `block`, unless that is 0.
    Floats { k: usize, block: usize },
    /// int8, a scale and a correction a block.
    Int8(Layout),
}

impl Form {
    /// Bytes a row takes.
    pub fn row_bytes(&self) -> usize {
        match self {
            Self::Floats { k, .. } => k * 4,
            Self::Int8(layout) => layout.padded_k(),
        }
    }

    /// Blocks of a row that have numbers of their own.
    pub fn blocks(&self) -> usize {
        match self {
            Self::Floats { k, block } => k.checked_div(*block).unwrap_or(0),
            Self::Int8(layout) => layout.blocks(),
        }
    }

    /// Puts one row, `r` of the group.
    pub fn put(&self, tier: Tier, values: &[f32], r: usize, group: &mut Group<'_>) {
        let size = group.size;
        match self {
            Self::Floats { .. } => {
                // SAFETY: any bytes are f32; the group is aligned, so nothing is left out.
                let (_, out, _) = unsafe { group.a.align_to_mut::<f32>() };
                if size == 1 {
                    out[..values.len()].copy_from_slice(values);
                } else {
                    out[r..].iter_mut().step_by(size).zip(values).for_each(|(out, v)| *out = *v);
                }
                out[values.len() * size..].fill(0.0);
            }
            Self::Int8(l) => {
                let row = QuantRow {
                    a: values.as_ptr().cast(),
                    dtype: DType::F32,
                    k: values.len(),
                    block: l.block,
                    q: group.a[4 * r..].as_mut_ptr().cast(),
                    scales: group.scales[r..].as_mut_ptr(),
                    fixes: group.fixes[r..].as_mut_ptr().cast(),
                    rows: size,
                    zero_point: l.zero_point,
                    default_zero: 1 << (l.bits - 1),
                };
                // SAFETY: the group has padded K bytes, and a scale and a correction a block, for each of its rows.
                unsafe { rows::quantizer(tier)(&row) };
            }
        }
    }

    /// Ends a group.
    pub fn finish(&self, group: &mut Group<'_>) {
        if let Self::Floats { block: block @ 1.., .. } = self {
            // SAFETY: as in `put`.
            let (_, values, _) = unsafe { group.a.align_to::<f32>() };
            for (block, fixes) in values.chunks_exact(block * group.size).zip(group.fixes.chunks_exact_mut(group.size))
            {
                rows::negative_sums(block, fixes);
            }
        }
    }
}

/// A group's part of the left operand.
pub(super) struct Group<'a> {
    /// Rows of the group.
    pub size: usize,
    pub a: &'a mut [u8],
    pub scales: &'a mut [f32],
    pub fixes: &'a mut [f32],
}

/// A projection in a Run.
pub(super) struct Active<'a> {
    pub matrix: &'a Matrix,
    pub operand: Operand<'a>,
    pub form: Form,
    /// [E, N]
    pub bias: Option<&'a [f32]>,
    pub tier: Tier,
}

/// The right operands of all experts.
pub(super) enum Operand<'a> {
    /// Packed as [`Layout`] says, integers or float4e2m1; a factor an expert, or none.
    Blocks { layout: Layout, e2m1: bool, bytes: &'a [u8], global: &'a [f32] },
    /// Packed in panels.
    Dense { dtype: DType, bytes: &'a [u8] },
    /// Panels of float8e4m3fn, a scale for each square of `block`, a factor an expert, or none.
    Fp8 { bytes: &'a [u8], scales: &'a [f32], block: usize, global: &'a [f32] },
    /// In the form that the format names: see [`Matrix::places`].
    Held { bytes: &'a [u8], global: &'a [f32], experts: usize },
}

/// Some rows of one expert times some of its panels.
pub(super) struct Part<'a> {
    pub expert: usize,
    /// The expert's first row.
    pub left: Left,
    /// The rows; they begin at a multiple of every tier's group.
    pub rows: Range<usize>,
    pub panels: Range<usize>,
    /// The first of the expert's rows, and column 0.
    pub out: *mut f32,
    pub stride: usize,
    /// [`Active::buffer`] values of the task's own.
    pub buffer: &'a mut [f32],
}

impl Active<'_> {
    /// Values of the buffer that a task of [`Self::multiply`] needs.
    pub fn buffer(matrix: &Matrix) -> usize {
        matrix.k.next_multiple_of(256) * (2 * LANES)
    }

    /// Panels of 16 rows of a matrix.
    pub fn panels(&self) -> usize {
        self.matrix.n.div_ceil(LANES)
    }

    /// About the bytes of a panel.
    pub fn panel_bytes(&self) -> usize {
        match &self.operand {
            Operand::Blocks { layout, .. } => layout.panel_bytes(),
            _ => self.matrix.k * LANES * 4,
        }
    }

    /// The factor of one expert's products.
    fn factor(&self, e: usize) -> f32 {
        match &self.operand {
            Operand::Blocks { global, .. } | Operand::Fp8 { global, .. } => global.get(e).copied().unwrap_or(1.0),
            _ => 1.0,
        }
    }

    /// Computes the part, bias included.
    ///
    /// # Safety
    /// `left` holds the rows, `out` is valid for these rows and panels, and nobody else touches them.
    pub unsafe fn multiply(&self, part: Part<'_>) {
        let n = self.matrix.n;
        let Part { expert, left, rows, panels, out, stride, buffer } = part;
        let bias = self.bias.map(|bias| &bias[expert * n..][..n]);
        let addend = bias.map(|values| Addend { values, row: 0, column: 1 });
        let (ptr, alpha) = (out.cast(), self.factor(expert));
        let out = &Sink { ptr, dtype: DType::F32, stride, n, alpha, addend };
        let to = To { tier: self.tier, left, rows, panels, out };
        // SAFETY: the caller's promises; buffers hold a panel; the processor has the tier.
        unsafe {
            match &self.operand {
                Operand::Blocks { layout, e2m1, bytes, .. } => {
                    let size = layout.panel_bytes() * layout.panels();
                    let w = View::new(*layout, &bytes[expert * size..][..size]);
                    let w = w.expect("the experts were packed in this layout");
                    match (self.form, e2m1) {
                        (Form::Int8(_), _) => nbits::int8_kernel(self.tier)(&to.stream(w)),
                        (_, true) => to.blocks(w, nbits::e2m1_kernel, nbits::e2m1_decoder, buffer),
                        (_, false) => to.blocks(w, nbits::f32_kernel, nbits::decoder, buffer),
                    }
                }
                Operand::Dense { dtype, bytes } => {
                    let size = self.panels() * LANES * self.matrix.k * dense::element_bytes(*dtype);
                    let from = bytes[expert * size..][..size].as_ptr();
                    to.dense(Panels::packed(from, *dtype, self.matrix.k), 0, to.panels.clone());
                }
                Operand::Fp8 { bytes, scales, block, .. } => {
                    let (n, k) = (self.matrix.n, self.matrix.k);
                    let size = n.div_ceil(*block) * k.div_ceil(*block);
                    let bytes = &bytes[expert * self.panels() * LANES * k..][..self.panels() * LANES * k];
                    to.fp8((n, k), bytes, (&scales[expert * size..][..size], *block), buffer);
                }
                Operand::Held { bytes, global, experts } => {
                    let [weights, scales, zero_points] =
                        self.matrix.places(*experts, expert).map(|range| &bytes[range]);
                    let global = global.get(expert).copied().unwrap_or(1.0);
                    to.held(&Expert { matrix: self.matrix, weights, scales, zero_points, global }, buffer);
                }
            }
        }
    }
}

/// Where a product goes, and what it is of.
struct To<'a> {
    tier: Tier,
    left: Left,
    rows: Range<usize>,
    panels: Range<usize>,
    out: &'a Sink<'a>,
}

/// A kernel of each tier, and a decoder.
type Kernel = fn(Tier) -> unsafe fn(&nbits::Part<'_>);
type Decoder = fn(Tier) -> unsafe fn(&Decode<'_>);

impl<'a> To<'a> {
    /// The part for kernels that decode in registers.
    fn stream(&self, w: View<'a>) -> nbits::Part<'a> {
        nbits::Part { left: self.left, rows: self.rows.clone(), w, panels: self.panels.clone(), out: self.out }
    }

    /// Weights decoded in registers for few rows, to memory first for many.
    ///
    /// # Safety
    /// As [`Active::multiply`]; `buffer` holds a panel.
    unsafe fn blocks(&self, w: View<'a>, kernel: Kernel, decoder: Decoder, buffer: &mut [f32]) {
        // SAFETY: the caller's promises.
        unsafe {
            if self.rows.len() <= 2 * max_group(self.tier) {
                return kernel(self.tier)(&self.stream(w));
            }
            for panel in self.panels.clone() {
                decoder(self.tier)(&Decode { w, panel, out: buffer.as_mut_ptr() });
                self.decoded(buffer, w.layout.padded_k(), panel);
            }
        }
    }

    /// # Safety
    /// As [`Self::blocks`].
    unsafe fn fp8(&self, (n, k): (usize, usize), bytes: &[u8], (scales, block): (&[f32], usize), buffer: &mut [f32]) {
        let across = k.div_ceil(block);
        let (out, of_panel) = buffer.split_at_mut(k * LANES);
        let of_panel = &mut of_panel[..across * LANES];
        for panel in self.panels.clone() {
            for (i, scale) in of_panel.iter_mut().enumerate() {
                let column = (panel * LANES + i % LANES).min(n - 1);
                *scale = scales[column / block * across + i / LANES];
            }
            let from = &bytes[panel * LANES * k..][..LANES * k];
            // SAFETY: the caller's promises.
            unsafe {
                let decode = e4m3::decoder(self.tier);
                decode(&mut e4m3::Decode { panel: from, block, scales: of_panel, out: &mut *out });
                self.decoded(out, k, panel);
            }
        }
    }

    /// # Safety
    /// As [`Self::blocks`].
    unsafe fn held(&self, expert: &Expert<'_>, buffer: &mut [f32]) {
        let k = expert.matrix.k;
        let (buffer, row) = buffer.split_at_mut(k * LANES);
        for panel in self.panels.clone() {
            expert.decode_panel(panel, buffer, row);
            // SAFETY: the caller's promises.
            unsafe { self.decoded(buffer, k, panel) };
        }
    }

    /// Rows times a panel that was decoded to f32.
    ///
    /// # Safety
    /// As [`Active::multiply`]; `from` holds `k` vectors.
    unsafe fn decoded(&self, from: &[f32], k: usize, panel: usize) {
        let b = Panels::packed(from.as_ptr().cast(), DType::F32, k);
        // SAFETY: the caller's promises.
        unsafe { self.dense(b, panel, panel..panel + 1) };
    }

    /// # Safety
    /// As [`Active::multiply`]; `b` holds the panels.
    unsafe fn dense(&self, b: Panels, first_panel: usize, panels: Range<usize>) {
        let (a, a_stride, rows, out) = (self.left.a.cast(), b.k, self.rows.clone(), self.out);
        // SAFETY: the caller's promises.
        unsafe { dense::kernel(self.tier)(&dense::Part { a, a_stride, rows, b, first_panel, panels, out }) };
    }
}

impl Expert<'_> {
    /// Panel `panel` as K vectors of 16; `row` holds K values.
    fn decode_panel(&self, panel: usize, out: &mut [f32], row: &mut [f32]) {
        let row = &mut row[..self.matrix.k];
        for c in 0..LANES {
            let n = panel * LANES + c;
            if n < self.matrix.n {
                self.decode_row(n, row);
            } else {
                row.fill(0.0);
            }
            out[c..].iter_mut().step_by(LANES).zip(&*row).for_each(|(to, from)| *to = *from);
        }
    }
}
