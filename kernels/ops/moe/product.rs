//! The products of one expert's rows with its weights.

use super::experts::Expert;
use super::problem::Matrix;
use crate::cpu::dense::{self, Panels};
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
    /// Packed as [`Layout`] says.
    Blocks { layout: Layout, bytes: &'a [u8] },
    /// Packed in panels.
    Dense { dtype: DType, bytes: &'a [u8] },
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
        matrix.k.next_multiple_of(256) * (LANES + 1)
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

    /// Computes the part, bias included.
    ///
    /// # Safety
    /// `left` holds the rows, `out` is valid for these rows and panels, and nobody else touches them.
    pub unsafe fn multiply(&self, part: Part<'_>) {
        let n = self.matrix.n;
        let bias = self.bias.map(|bias| &bias[part.expert * n..][..n]);
        let out = Sink {
            ptr: part.out.cast(),
            dtype: DType::F32,
            stride: part.stride,
            n,
            alpha: 1.0,
            addend: bias.map(|values| Addend { values, row: 0, column: 1 }),
        };
        let Part { left, rows, panels, buffer, .. } = part;
        // SAFETY: the caller's promises; buffers hold a panel; the processor has the tier.
        unsafe {
            match &self.operand {
                Operand::Blocks { layout, bytes } => {
                    let size = layout.panel_bytes() * layout.panels();
                    let w = View::new(*layout, &bytes[part.expert * size..][..size]);
                    let w = w.expect("the experts were packed in this layout");
                    self.blocks(w, left, rows, panels, &out, buffer);
                }
                Operand::Dense { dtype, bytes } => {
                    let size = self.panels() * LANES * self.matrix.k * dense::element_bytes(*dtype);
                    let b = Panels::packed(bytes[part.expert * size..][..size].as_ptr(), *dtype, self.matrix.k);
                    let (a, a_stride) = (left.a.cast(), self.matrix.k);
                    let part = dense::Part { a, a_stride, rows, b, first_panel: 0, panels, out: &out };
                    dense::kernel(self.tier)(&part);
                }
                Operand::Held { bytes, global, experts } => {
                    let [weights, scales, zero_points] =
                        self.matrix.places(*experts, part.expert).map(|range| &bytes[range]);
                    let global = global.get(part.expert).copied().unwrap_or(1.0);
                    let expert = Expert { matrix: self.matrix, weights, scales, zero_points, global };
                    let (buffer, row) = buffer.split_at_mut(self.matrix.k * LANES);
                    for panel in panels {
                        expert.decode_panel(panel, buffer, row);
                        self.decoded(buffer, self.matrix.k, left, rows.clone(), panel, &out);
                    }
                }
            }
        }
    }

    /// # Safety
    /// As [`Self::multiply`].
    unsafe fn blocks(
        &self,
        w: View<'_>,
        left: Left,
        rows: Range<usize>,
        panels: Range<usize>,
        out: &Sink<'_>,
        buffer: &mut [f32],
    ) {
        // SAFETY: the caller's promises.
        unsafe {
            let int8 = matches!(self.form, Form::Int8(_));
            if int8 || rows.len() <= 2 * max_group(self.tier) {
                let kernel = if int8 { nbits::int8_kernel(self.tier) } else { nbits::f32_kernel(self.tier) };
                return kernel(&nbits::Part { left, rows, w, panels, out });
            }
            for panel in panels {
                nbits::decoder(self.tier)(&Decode { w, panel, out: buffer.as_mut_ptr() });
                self.decoded(buffer, w.layout.padded_k(), left, rows.clone(), panel, out);
            }
        }
    }

    /// Rows times a panel that was decoded to f32.
    ///
    /// # Safety
    /// As [`Self::multiply`]; `panel` holds `k` vectors.
    unsafe fn decoded(&self, from: &[f32], k: usize, left: Left, rows: Range<usize>, panel: usize, out: &Sink<'_>) {
        let part = dense::Part {
            a: left.a.cast(),
            a_stride: k,
            rows,
            b: Panels::packed(from.as_ptr().cast(), DType::F32, k),
            first_panel: panel,
            panels: panel..panel + 1,
            out,
        };
        // SAFETY: the caller's promises.
        unsafe { dense::kernel(self.tier)(&part) };
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
