//! One projection of a node's experts: its weights on the device, and the kernels that multiply with them.

use super::{ExpertParams, activation_code};
use crate::build::BuildCx;
use crate::cuda::{Buffer, DevPtr, Device, LaunchCx, Pinned, gemv_shape, suffix};
use crate::ops::moe::pack::{self, Codes, Form};
use crate::ops::moe::problem::{Kind, Matrix, Problem};
use crate::ops::moe::{bank, experts};
use crate::weights::Constant;
use abi::cuda::{Function, LaunchShape};
use abi::{DType, Error, Result};
use std::sync::Arc;

/// A projection, or a gate and what it gates.
pub(super) struct Projection {
    pub form: Form,
    /// Of all experts, or of those in the node's slots.
    pub weights: Arc<Buffer>,
    /// Of all experts, where there are slots.
    pub source: Option<Arc<Pinned>>,
    /// A factor an expert.
    pub globals: Option<Arc<Buffer>>,
    pub kernels: Kernels,
}

impl Projection {
    pub fn build(
        cx: &mut BuildCx,
        device: &Arc<Device>,
        form: Form,
        matrices: &[&Matrix],
        slots: Option<usize>,
    ) -> Result<Self> {
        let (weights, source) = Self::pack(cx, device, &form, matrices, slots)?;
        let global = matrices[0].slots.global.filter(|&slot| form.has_globals() && cx.has_input(slot));
        let globals = global.map(|slot| {
            cx.pack(&[slot], "cuda factors", |c| {
                let missing = || Error::Internal("a factor is no constant".into());
                device.upload(c[0].as_ref().ok_or_else(missing)?.bytes())
            })
        });
        let kernels = Kernels::new(&form, Problem::of(cx)?.dtype, device)?;
        Ok(Self { form, weights, source, globals: globals.transpose()?, kernels })
    }

    /// Packs the experts: into device memory, or into page-locked memory and the first of them into the slots.
    fn pack(
        cx: &mut BuildCx,
        device: &Arc<Device>,
        form: &Form,
        matrices: &[&Matrix],
        slots: Option<usize>,
    ) -> Result<(Arc<Buffer>, Option<Arc<Pinned>>)> {
        let inputs: Vec<_> = matrices.iter().flat_map(|m| m.slots.weight_slots()).collect();
        let stored: Vec<_> = matrices.iter().map(|m| (m.format, m.stored)).collect();
        let name = format!("cuda experts {form:?} {stored:?}");
        for &slot in &inputs {
            if cx.has_input(slot) && cx.constant(slot)?.is_none() {
                return Err(cx.error(
                    format_args!("input {slot}"),
                    "what another part of the model computes",
                    "a constant",
                ));
            }
        }
        let (count, bytes) = (Problem::of(cx)?.experts, form.bytes());
        let each = |constants: &[Option<Constant>], put: &(dyn Fn(usize, &[u8]) -> Result<()> + Sync)| {
            let (mut from, mut rest) = (Vec::new(), constants);
            for matrix in matrices {
                let (own, others) = rest.split_at(matrix.slots.weight_slots().len());
                from.push(experts::Experts::new(matrix, count, bank::raw(&matrix.slots, own))?);
                rest = others;
            }
            pack::each(form, &from, put, || constants.iter().flatten().for_each(Constant::forget_pages))
        };
        let Some(slots) = slots else {
            let weights = cx.pack(&inputs, &name, |constants| {
                let buffer = device.alloc(count * bytes)?;
                let at = |e: usize| buffer.address() + (e * bytes) as u64;
                each(constants, &|e, packed| device.context().copy_to_device(at(e), packed))?;
                Ok(buffer)
            })?;
            return Ok((weights, None));
        };
        let source = cx.pack(&inputs, &format!("{name}, page-locked"), |constants| {
            let memory = Pinned::new(device, count * bytes)?;
            each(constants, &|e, packed| {
                // SAFETY: each expert has a place of its own there, and is packed once.
                unsafe { memory.at(e * bytes, bytes).copy_from_nonoverlapping(packed.as_ptr(), bytes) };
                Ok(())
            })?;
            Ok(memory)
        })?;
        // SAFETY: all experts have been packed, and nobody writes them any more.
        let first = unsafe { std::slice::from_raw_parts(source.at(0, slots * bytes), slots * bytes) };
        Ok((Arc::new(device.upload(first)?), Some(source)))
    }

    /// Everything but the activation, the input, the output, the extras and the rows.
    pub fn params(&self) -> ExpertParams {
        ExpertParams {
            x: DevPtr::NULL,
            y: DevPtr::NULL,
            ids: DevPtr::NULL,
            mix: DevPtr::NULL,
            order: DevPtr::NULL,
            items: DevPtr::NULL,
            bias: DevPtr::NULL,
            up_bias: DevPtr::NULL,
            globals: DevPtr::NULL,
            w: self.form.weights(self.weights.ptr()),
            expert_bytes: self.form.bytes() as u64,
            bias_row: 0,
            bias_step: 1,
            outputs: self.form.outputs as u32,
            parts: 1,
            share: 1,
            paired: self.form.paired().into(),
            kind: activation_code(Kind::Identity),
            limit_after: 0,
            early: 0,
            sums: 0,
            together: self.form.together as u32,
            alpha: 1.0,
            beta: 0.0,
            limit: f32::INFINITY,
            pad: 0,
        }
    }
}

/// The kernels of one projection.
pub(super) struct Kernels {
    stream: Function,
    gemm: Function,
    /// Tiles of 128 rows and columns.
    large: Option<Function>,
    bits: usize,
    pub float: bool,
}

/// Rows of an item, and rows and columns of a block of 16-bit elements.
pub(super) const SMALL_ROWS: usize = 64;
const LARGE_ROWS: usize = 128;
/// Warps of a block of the float kernels for few rows.
const FLOAT_WARPS: usize = 8;

impl Kernels {
    fn new(form: &Form, dtype: DType, device: &Device) -> Result<Self> {
        let (name, suffix, bits) = (form.codes.name(), suffix(dtype), form.bits());
        if dtype == DType::F32 {
            let find = |way: &str| device.function("moe_float", &format!("{way}_{name}_f32"));
            return Ok(Self { stream: find("stream")?, gemm: find("gemm")?, large: None, bits, float: true });
        }
        let stream = match form.codes {
            Codes::MxFp4 if form.lean() => device.function("moe_gemv4", &format!("stream4_mxfp4_{suffix}"))?,
            _ if form.lean() => {
                let zeros = if form.zeros { "bytes" } else { "plain" };
                device.function("moe_gemv4", &format!("stream4_{}_{zeros}_{suffix}", form.block))?
            }
            _ => device.function("moe_gemv", &format!("stream_{name}_{suffix}"))?,
        };
        let often = matches!(form.codes, Codes::Int(4 | 8) | Codes::MxFp4 | Codes::Fp8 | Codes::Dense);
        let large = often.then(|| device.function("moe_gemm_large", &format!("gemm_{name}_large_{suffix}")));
        Ok(Self {
            stream,
            gemm: device.function("moe_gemm", &format!("gemm_{name}_small_{suffix}"))?,
            large: large.transpose()?,
            bits,
            float: false,
        })
    }

    /// Shared memory of a block of `size` rows and columns: three stages of a chunk of each.
    fn shared(&self, size: usize) -> u32 {
        (3 * (size * 64 * self.bits / 8 + size * 64 * 2)) as u32
    }

    /// Rows of an item, about `average` an expert.
    pub fn rows(&self, average: usize, device: &Device) -> usize {
        let large = self.large.is_some() && average >= 96 && self.shared(LARGE_ROWS) <= device.shared_limit();
        if self.float || large { LARGE_ROWS } else { SMALL_ROWS }
    }

    /// `rows` rows of the output, each by itself; they are some of `all` rows, on which alone it depends how sums are cut.
    pub fn push_stream(&self, cx: &mut LaunchCx<'_>, params: &ExpertParams, (rows, all): (usize, usize)) -> Result<()> {
        let (tiles, parts) = (params.w.tiles(), params.parts as usize);
        let shape = if self.float {
            let warps = FLOAT_WARPS.min(params.w.chunks() * parts);
            LaunchShape {
                grid: [tiles as u32, all as u32, 1],
                block: [32 * warps as u32, 1, 1],
                shared: 0,
                overlap: true,
            }
        } else {
            let groups = if self.bits == 16 { params.w.chunks() } else { params.w.chunks().div_ceil(2) };
            gemv_shape(tiles, groups * parts, [all, 1], cx.device(), 0)
        };
        let grid = [shape.grid[0], rows as u32, 1];
        cx.push(&self.stream, LaunchShape { grid, ..shape }, params)
    }

    /// `slots` items of at most `rows` rows.
    pub fn push_gemm(&self, cx: &mut LaunchCx<'_>, params: &ExpertParams, slots: usize, rows: usize) -> Result<()> {
        let large = self.large.as_ref().filter(|_| rows == LARGE_ROWS);
        let columns = if self.float { 64 } else { rows };
        let blocks = (params.w.tiles() * 16).div_ceil(columns);
        let threads = if self.float { 256 } else { 128 };
        let shared = if self.float { 0 } else { self.shared(rows) };
        let shape =
            LaunchShape { grid: [blocks as u32, slots as u32, 1], block: [threads, 1, 1], shared, overlap: true };
        cx.push(large.unwrap_or(&self.gemm), shape, params)
    }
}
