//! float, float16 and bfloat16 products: constant right operands packed once in their own type, others read in place or
//! packed for the run.

use super::problem::{Problem, Spec, Strides};
use super::{A, B, C};
use crate::build::BuildCx;
use crate::cpu::dense::{self, Panels, Part, element_bytes, pack_panel};
use crate::cpu::float::Float;
use crate::cpu::rows::{Groups, Strided, gather, max_group};
use crate::cpu::simd::LANES;
use crate::cpu::sink::{Addend, Sink};
use crate::cpu::split::Split;
use crate::kernel::{Carver, Kernel, RunCx, Shapes, Tensor};
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use crate::weights::Constant;
use crate::with_float;
use abi::tensor::AlignedBytes;
use abi::{DType, Error, Result};
use std::sync::Arc;

/// A constant right operand: the panels of each of its matrices, one matrix after the other.
struct Packed {
    bytes: AlignedBytes,
    shape: Vec<usize>,
}

/// Parses the node and packs a constant B.
pub fn build(cx: &mut BuildCx, spec: Spec) -> Result<Box<dyn Kernel>> {
    let dtype = cx.required(A)?.dtype;
    let packed = match cx.constant(B)? {
        Some(_) => {
            let layout = format!("panels {dtype} trans {}", spec.trans_b);
            Some(cx.pack(&[B], &layout, |c| with_float!(dtype, T => pack::<T>(&spec, &c[0])))?)
        }
        None => None,
    };
    let settings = cx.settings();
    Ok(Box::new(Product { spec, dtype, packed, tier: settings.tier, workers: settings.chunks }))
}

fn pack<T: Float>(spec: &Spec, constant: &Option<Constant>) -> Result<Packed> {
    let wrong = || Error::Internal("a constant B changed its type after the claim".into());
    let constant = constant.as_ref().ok_or_else(wrong)?;
    let values = constant.as_slice::<T>().ok_or_else(wrong)?;
    let shape = constant.shape();
    // A of one row: only B's dims matter here.
    let out = [&shape[..shape.len().saturating_sub(2)], &[1, 1]].concat();
    let p = Problem::new(&Spec { trans_a: false, ..*spec }, &[1, 1], shape, &out);
    let k = if p.n == 0 { 0 } else { b_rows(spec, shape) };
    let panels = p.n.div_ceil(LANES);
    let matrices: usize = shape[..shape.len().saturating_sub(2)].iter().product();
    let asked = k * LANES * size_of::<T>() * panels * matrices;
    let mut bytes =
        AlignedBytes::try_zeroed(asked).ok_or_else(|| Error::Memory { asked, purpose: "packed weights".into() })?;
    // SAFETY: 64-byte aligned memory of plain numbers.
    let all = unsafe {
        std::slice::from_raw_parts_mut(bytes.as_mut_slice().as_mut_ptr().cast::<T>(), asked / size_of::<T>())
    };
    // Rows of a row-major B that are read before their pages may go; a transposed B is read panel by panel.
    let rows = if p.b.column == 1 { (DONE_BYTES / (p.n * size_of::<T>()).max(1)).max(1) } else { k };
    let mut packed = 0;
    for (matrix, out) in all.chunks_exact_mut((panels * k * LANES).max(1)).enumerate() {
        for first in (0..k).step_by(rows.max(1)) {
            let count = rows.min(k - first);
            let from = &values[matrix * k * p.n + first * p.b.row..];
            for (panel, out) in out.chunks_exact_mut(k * LANES).enumerate() {
                let out = &mut out[first * LANES..][..count * LANES];
                pack_panel(from, (p.b.row, p.b.column), (count, p.n), panel, T::from_f32(0.0), out);
                packed += size_of_val(out);
                if packed > DONE_BYTES && (p.b.column != 1 || panel + 1 == panels) {
                    packed = 0;
                    constant.forget_pages();
                }
            }
        }
    }
    Ok(Packed { bytes, shape: shape.to_vec() })
}

/// Packed bytes after which the source's pages may go, so that no matrix is in memory twice.
const DONE_BYTES: usize = 8 << 20;

/// K, from B's shape.
pub(super) fn b_rows(spec: &Spec, shape: &[usize]) -> usize {
    match *shape {
        [k] => k,
        [.., _, k] if spec.trans_b => k,
        [.., k, _] => k,
        [] => 1,
    }
}

struct Product {
    spec: Spec,
    dtype: DType,
    packed: Option<Arc<Packed>>,
    tier: Tier,
    /// How many products of a batch may run at once.
    workers: usize,
}

/// Elements from one row and one column of the output to the next in a C of this shape: 0 broadcasts.
pub fn addend_strides(shape: &[usize]) -> (usize, usize) {
    match *shape {
        [rows, columns] => (if rows == 1 { 0 } else { columns }, usize::from(columns != 1)),
        [columns] => (0, usize::from(columns != 1)),
        _ => (0, 0),
    }
}

/// Where a product's B comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Right {
    /// Packed at build.
    Packed,
    /// Row-major, few rows of A: read in place but for the last columns.
    InPlace,
    /// Packed in the run.
    Gathered,
}

impl Product {
    fn right(&self, p: &Problem<'_>) -> Right {
        if self.packed.is_some() {
            Right::Packed
        } else if p.b.column == 1 && p.m <= 2 * max_group(self.tier) {
            Right::InPlace
        } else {
            Right::Gathered
        }
    }

    /// How many products run at once: with one, its own loops are parallel.
    fn at_once(&self, p: &Problem<'_>) -> usize {
        self.workers.min(p.batch).max(1)
    }

    /// Scratch bytes of one product: A's rows and what is packed of B.
    fn item_bytes(&self, p: &Problem<'_>) -> (usize, usize) {
        let panel = p.k * LANES * element_bytes(self.dtype);
        let panels = match self.right(p) {
            Right::Packed => 0,
            Right::InPlace => usize::from(!p.n.is_multiple_of(LANES)),
            Right::Gathered => p.n.div_ceil(LANES),
        };
        (Carver::size::<f32>(p.m * p.k), Carver::size::<u8>(panel * panels))
    }

    fn problem<'a>(&'a self, a: &'a [usize], b: &'a [usize], out: &'a [usize]) -> Problem<'a> {
        let b = self.packed.as_ref().map_or(b, |packed| &packed.shape);
        Problem::new(&self.spec, a, b, out)
    }

    /// C as f32, times beta.
    fn addend<'a>(&self, c: Option<Tensor<'_>>, scratch: &mut Carver<'a>) -> Option<Addend<'a>> {
        let c = c?;
        let out = scratch.take::<f32>(c.len());
        with_float!(c.dtype(), T => T::widen(c.slice::<T>(), out));
        out.iter_mut().for_each(|v| *v *= self.spec.beta);
        let (row, column) = addend_strides(c.shape());
        Some(Addend { values: out, row, column })
    }
}

impl Kernel for Product {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let p = self.problem(shapes.input(A), shapes.input(B), shapes.output(0));
        let (rows, panels) = self.item_bytes(&p);
        let c = Carver::size::<f32>(shapes.input(C).iter().product());
        self.at_once(&p) * (rows + panels) + if shapes.inputs.get(C).is_some() { c } else { 0 }
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let (a, b, c) = (cx.required(A), cx.input(B), cx.input(C));
        let Some(mut out) = cx.output(0) else { return Ok(()) };
        if out.is_empty() {
            return Ok(());
        }
        let p = self.problem(a.shape(), b.map_or(&[], |b| b.shape()), out.shape());
        let mut scratch = Carver::new(cx.take_scratch());
        let sink = Sink {
            ptr: out.bytes().as_mut_ptr(),
            dtype: self.dtype,
            stride: p.n,
            n: p.n,
            alpha: self.spec.alpha,
            addend: self.addend(c, &mut scratch),
        };
        with_float!(self.dtype, T => {
            let b = b.map_or(&[][..], |b| b.slice::<T>());
            self.products(&p, a.slice::<T>(), b, &sink, (cx.par, &mut scratch));
        });
        Ok(())
    }
}

/// One product's operands and memory.
struct Item<'a, T> {
    a: Strided<'a, T>,
    /// The run's B; empty when it is packed.
    b: &'a [T],
    /// The packed B's panels.
    packed: *const u8,
    sink: Sink<'a>,
    rows: &'a mut [f32],
    panels: &'a mut [T],
}

impl Product {
    fn products<T: Float>(
        &self,
        p: &Problem<'_>,
        a: &[T],
        b: &[T],
        sink: &Sink<'_>,
        (par, scratch): (Par<'_>, &mut Carver<'_>),
    ) {
        let (rows_bytes, panels_bytes) = self.item_bytes(p);
        let at_once = self.at_once(p);
        let rows = SharedMut::new(scratch.take::<f32>(at_once * rows_bytes / 4));
        let panels = SharedMut::new(scratch.take::<T>(at_once * panels_bytes / size_of::<T>()));
        let packed_bytes = p.n.div_ceil(LANES) * p.k * LANES * size_of::<T>();
        let item = |worker: usize, i: usize, par: Par<'_>| {
            let (ia, ib) = p.operands(i);
            let piece = |bytes: usize, size: usize| worker * bytes / size..(worker + 1) * bytes / size;
            let item = Item {
                a: Strided {
                    data: &a[if p.batch == 1 { 0 } else { ia * p.m * p.k }..],
                    row: p.a.row,
                    column: p.a.column,
                },
                b: if self.packed.is_some() { b } else { &b[ib * p.k * p.n..] },
                packed: self
                    .packed
                    .as_ref()
                    .map_or(std::ptr::null(), |packed| packed.bytes.as_slice()[ib * packed_bytes..].as_ptr()),
                sink: Sink { ptr: sink.ptr.wrapping_add(i * p.m * p.n * size_of::<T>()), ..*sink },
                // SAFETY: a worker's pieces are its own.
                rows: unsafe { rows.slice(piece(rows_bytes, 4)) },
                // SAFETY: as above.
                panels: unsafe { panels.slice(piece(panels_bytes, size_of::<T>())) },
            };
            self.product(p, item, par);
        };
        if p.batch == 1 {
            return item(0, 0, par);
        }
        // Each worker takes every n-th product: they are alike.
        let workers = at_once.min(par.width());
        par.for_each(workers, |worker| {
            (worker..p.batch).step_by(workers).for_each(|i| item(worker, i, Par::serial()));
        });
    }

    fn product<T: Float>(&self, p: &Problem<'_>, item: Item<'_, T>, par: Par<'_>) {
        let panel_len = p.k * LANES;
        let whole = match self.right(p) {
            Right::Packed => None,
            Right::Gathered => Some(0),
            Right::InPlace => Some(p.n / LANES),
        };
        if let Some(first) = whole {
            // Pack the panels from `first` on.
            let out = &mut item.panels[..(p.n.div_ceil(LANES) - first) * panel_len];
            let strides: Strides = p.b;
            par.chunks_mut(out, panel_len, |i, out| {
                let strides = (strides.row, strides.column);
                pack_panel(item.b, strides, (p.k, p.n), first + i, T::from_f32(0.0), out);
            });
        }
        self.gather(p, &item.a, item.rows, par);
        let (kernel, panels) = (dense::kernel(self.tier), p.n.div_ceil(LANES));
        let packed = if item.packed.is_null() { item.panels.as_ptr().cast() } else { item.packed };
        let packed = Panels::packed(packed, self.dtype, p.k);
        let in_place = Panels::in_place(item.b.as_ptr().cast(), self.dtype, p.k, p.n);
        let first = whole.unwrap_or(0);
        let (sink, rows_ptr) = (&item.sink, Rows(item.rows.as_ptr()));
        let split = Split::new(&par, self.tier, (p.m, p.k * 4), (panels, packed.panel));
        split.run(&par, |_, rows, range| {
            let part = |b: Panels, first_panel: usize, panels| Part {
                a: rows_ptr.get(),
                a_stride: p.k,
                rows: rows.clone(),
                b,
                first_panel,
                panels,
                out: sink,
            };
            // SAFETY: the rows were gathered, panels before `first` are whole within B's rows, the others were packed; tasks
            // write disjoint tiles; the processor has the tier.
            unsafe {
                if range.start < first {
                    kernel(&part(in_place, 0, range.start..range.end.min(first)));
                }
                if range.end > first {
                    kernel(&part(packed, first, range.start.max(first)..range.end));
                }
            }
        });
    }

    /// A's rows as f32 groups.
    fn gather<T: Float>(&self, p: &Problem<'_>, a: &Strided<'_, T>, out: &mut [f32], par: Par<'_>) {
        const ROWS: usize = 24;
        let (out, max) = (SharedMut::new(out), max_group(self.tier));
        par.for_each(p.m.div_ceil(ROWS), |i| {
            let groups = Groups::new(i * ROWS..((i + 1) * ROWS).min(p.m), max);
            // SAFETY: each group is visited by one task.
            unsafe { gather(*a, (p.k, p.k), groups, out) };
        });
    }
}

/// Gathered rows, shared by the tasks that read them.
struct Rows(*const f32);

// SAFETY: only read.
unsafe impl Sync for Rows {}

impl Rows {
    fn get(&self) -> *const f32 {
        self.0
    }
}
