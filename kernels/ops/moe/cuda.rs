//! MoE and QMoE on CUDA devices: tokens are routed there, and launches depend on shapes alone. Sums are float.
//!
//! Few tokens: every row of an expert's output by itself, weights streamed once for each. Many: pairs of a token and one of its
//! experts are sorted by expert, and each expert multiplies its rows.

use super::bank;
use super::experts::Experts;
use super::pack::{self, Codes, Form};
use super::problem::{Format, Gate, INPUT, Kind, Matrix, Problem, ROUTER, ROUTER_WEIGHTS, Routing, quantized};
use crate::build::BuildCx;
use crate::cuda::number::{code, size};
use crate::cuda::{Buffer, DevPtr, Device, DeviceKernel, LaunchCx, Weights, gemv_shape, linear, suffix};
use crate::kernel_params;
use crate::op::{Decline, NodeCx};
use crate::weights::Constant;
use abi::cuda::{Function, LaunchShape};
use abi::{DType, Error, Graph, Node, Result, ValueId};
use std::sync::Arc;

/// Experts of a token that the kernels take: one a lane.
const MAX_TOP: usize = 32;
/// Experts whose counters fit every device's shared memory.
const MAX_EXPERTS: usize = 4096;

/// What the CUDA kernels do not take.
pub(super) fn claim(cx: &NodeCx) -> Result<(), Decline> {
    let p = Problem::of(cx)?;
    for (got, most, what) in [(p.routing.top, MAX_TOP, "attribute 'k'"), (p.experts, MAX_EXPERTS, "number of experts")]
    {
        if got > most {
            return Err(cx.decline(what, got, format_args!("at most {most}")));
        }
    }
    for matrix in p.matrices() {
        let slots = matrix.slots;
        for slot in slots.weight_slots() {
            if cx.node().inputs.get(slot).copied().flatten().is_some_and(|value| !settled(cx.graph(), value)) {
                return Err(cx.decline(
                    format_args!("input {slot} (weights of {})", slots.name),
                    "an input",
                    "a constant",
                ));
            }
        }
        if let Format::Fp8 { block } = matrix.format
            && block % 16 != 0
            && block < matrix.k
        {
            return Err(cx.decline("attribute 'block_size'", block, "a multiple of 16"));
        }
    }
    Ok(())
}

/// Whether `value` follows from constants alone: what computes it is folded.
fn settled(graph: &Graph, value: ValueId) -> bool {
    let from = || graph.nodes.iter().find(|node| node.outputs.contains(&Some(value)));
    let all_settled = |node: &Node| {
        let mut inputs = node.inputs.iter().flatten().peekable();
        inputs.peek().is_some() && inputs.all(|&input| settled(graph, input))
    };
    graph.values[value].initializer.is_some() || from().is_some_and(all_settled)
}

kernel_params! {
    /// As in `cuda.cu`.
    struct RouteParams {
        logits: DevPtr, weights: DevPtr, ids: DevPtr, mix: DevPtr,
        dtype: u32, weights_dtype: u32, tokens: u32, experts: u32, top: u32, normalize: u32, sparse: u32, pad: u32,
    }
}
kernel_params! {
    /// As in `cuda.cu`.
    struct OrderParams { ids: DevPtr, order: DevPtr, items: DevPtr, pairs: u32, experts: u32, rows: u32, slots: u32 }
}
kernel_params! {
    /// As in `cuda.cu`.
    struct CombineParams { sums: DevPtr, mix: DevPtr, y: DevPtr, tokens: u32, top: u32, hidden: u32, pad: u32 }
}
kernel_params! {
    /// As in `experts.cuh`.
    struct ExpertParams {
        x: DevPtr, y: DevPtr, ids: DevPtr, mix: DevPtr, order: DevPtr, items: DevPtr, bias: DevPtr, up_bias: DevPtr,
        globals: DevPtr, w: Weights, expert_bytes: u64, bias_row: u64,
        bias_step: u32, outputs: u32, parts: u32, share: u32, paired: u32, kind: u32, limit_after: u32, early: u32, sums: u32,
        together: u32, alpha: f32, beta: f32, limit: f32, pad: u32,
    }
}

/// `ActivationCode` of `experts.cuh`.
fn activation_code(kind: Kind) -> u32 {
    match kind {
        Kind::Relu => 0,
        Kind::Relu2 => 1,
        Kind::Gelu => 2,
        Kind::Silu => 3,
        Kind::Identity => 4,
        Kind::Swiglu => 5,
        Kind::Geglu => 6,
    }
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let problem = Problem::of(cx)?;
    let up: Vec<&Matrix> = [Some(&problem.fc1), problem.fc3.as_ref()].into_iter().flatten().collect();
    let up = Projection::build(cx, device, &problem, &up, problem.gate, problem.inter)?;
    let down = Projection::build(cx, device, &problem, &[&problem.fc2], Gate::None, problem.hidden)?;
    let find = |name: &str| device.function("moe", name);
    Ok(Box::new(Moe {
        route: find("route")?,
        order: find("order")?,
        combine: find(&format!("combine_{}", suffix(problem.dtype)))?,
        biases: Biases::of(cx, &problem)?,
        given: quantized(cx),
        problem,
        up,
        down,
    }))
}

/// A projection, or a gate and what it gates.
struct Projection {
    form: Form,
    weights: Arc<Buffer>,
    /// A factor an expert.
    globals: Option<Arc<Buffer>>,
    kernels: Kernels,
}

impl Projection {
    fn build(
        cx: &mut BuildCx,
        device: &Arc<Device>,
        problem: &Problem,
        matrices: &[&Matrix],
        gate: Gate,
        outputs: usize,
    ) -> Result<Self> {
        let form = Form::of(problem.dtype, gate, matrices, outputs);
        let slots: Vec<_> = matrices.iter().flat_map(|m| m.slots.weight_slots()).collect();
        let stored: Vec<_> = matrices.iter().map(|m| (m.format, m.stored)).collect();
        let name = format!("cuda experts {form:?} {stored:?}");
        for &slot in &slots {
            if cx.has_input(slot) && cx.constant(slot)?.is_none() {
                return Err(cx.error(
                    format_args!("input {slot}"),
                    "what another part of the model computes",
                    "a constant",
                ));
            }
        }
        let weights = cx.pack(&slots, &name, |constants| {
            let (mut from, mut rest) = (Vec::new(), constants);
            for matrix in matrices {
                let (own, others) = rest.split_at(matrix.slots.weight_slots().len());
                from.push(Experts::new(matrix, problem.experts, bank::raw(&matrix.slots, own))?);
                rest = others;
            }
            pack::upload(&form, &from, device, || constants.iter().flatten().for_each(Constant::forget_pages))
        })?;
        let global = matrices[0].slots.global.filter(|&slot| form.has_globals() && cx.has_input(slot));
        let globals = global.map(|slot| {
            cx.pack(&[slot], "cuda factors", |c| {
                let missing = || Error::Internal("a factor is no constant".into());
                device.upload(c[0].as_ref().ok_or_else(missing)?.bytes())
            })
        });
        Ok(Self { form, weights, globals: globals.transpose()?, kernels: Kernels::new(&form, problem.dtype, device)? })
    }

    /// Everything but the activation, the input, the output and the rows.
    fn params(&self) -> ExpertParams {
        ExpertParams {
            x: DevPtr::NULL,
            y: DevPtr::NULL,
            ids: DevPtr::NULL,
            mix: DevPtr::NULL,
            order: DevPtr::NULL,
            items: DevPtr::NULL,
            bias: DevPtr::NULL,
            up_bias: DevPtr::NULL,
            globals: self.globals.as_ref().map_or(DevPtr::NULL, |b| b.ptr()),
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
struct Kernels {
    stream: Function,
    gemm: Function,
    /// Tiles of 128 rows and columns.
    large: Option<Function>,
    bits: usize,
    float: bool,
}

/// Rows of an item, and rows and columns of a block of 16-bit elements.
const SMALL_ROWS: usize = 64;
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
    fn rows(&self, average: usize, device: &Device) -> usize {
        let large = self.large.is_some() && average >= 96 && self.shared(LARGE_ROWS) <= device.shared_limit();
        if self.float || large { LARGE_ROWS } else { SMALL_ROWS }
    }

    /// `rows` rows of the output, each by itself.
    fn push_stream(&self, cx: &mut LaunchCx<'_>, params: &ExpertParams, rows: usize) -> Result<()> {
        let (tiles, parts) = (params.w.tiles(), params.parts as usize);
        let shape = if self.float {
            let warps = FLOAT_WARPS.min(params.w.chunks() * parts);
            LaunchShape {
                grid: [tiles as u32, rows as u32, 1],
                block: [32 * warps as u32, 1, 1],
                shared: 0,
                overlap: true,
            }
        } else {
            let groups = if self.bits == 16 { params.w.chunks() } else { params.w.chunks().div_ceil(2) };
            gemv_shape(tiles, groups * parts, [rows, 1], cx.device(), 0)
        };
        cx.push(&self.stream, shape, params)
    }

    /// `slots` items of at most `rows` rows.
    fn push_gemm(&self, cx: &mut LaunchCx<'_>, params: &ExpertParams, slots: usize, rows: usize) -> Result<()> {
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

/// Which inputs are biases of what the kernels add up; those that are all zeros are left out.
struct Biases {
    fc1: Option<usize>,
    fc2: Option<usize>,
    fc3: Option<usize>,
}

impl Biases {
    fn of(cx: &mut BuildCx, problem: &Problem) -> Result<Self> {
        let mut given = |matrix: Option<&Matrix>| -> Result<Option<usize>> {
            let Some(slot) = matrix.map(|m| m.slots.bias).filter(|&slot| cx.has_input(slot)) else { return Ok(None) };
            let constant = cx.constant(slot)?;
            let zero = constant.is_some_and(|c| c.bytes().iter().all(|&byte| byte == 0));
            Ok((!zero).then_some(slot))
        };
        let (fc1, fc2) = (given(Some(&problem.fc1))?, given(Some(&problem.fc2))?);
        Ok(Self { fc1, fc2, fc3: given(problem.fc3.as_ref())? })
    }
}

struct Moe {
    problem: Problem,
    biases: Biases,
    /// Whether experts may have weights of their own.
    given: bool,
    up: Projection,
    down: Projection,
    route: Function,
    order: Function,
    combine: Function,
}

/// Tokens whose rows are streamed one by one: past these, experts have rows to share weights.
const FEW: usize = 8;
/// Tokens of one pass, which bounds the room for the experts' outputs.
const PASS: usize = 4096;
/// Warps of a block that routes (`kRouteWarps`).
const ROUTE_WARPS: usize = 4;

/// Some of a Run's tokens.
struct Tokens {
    first: usize,
    count: usize,
    /// Where their experts and weights are written.
    ids: DevPtr,
    mix: DevPtr,
}

impl Moe {
    fn element(&self) -> usize {
        size(self.problem.dtype)
    }

    /// The first projection, its activation and its biases; `x` and `y` are those of `tokens`.
    fn up(&self, cx: &LaunchCx<'_>, x: DevPtr, y: DevPtr) -> ExpertParams {
        let p = &self.problem;
        let slot = |slot: Option<usize>| slot.map_or(DevPtr::NULL, |slot| cx.input_ptr(slot));
        let bias = slot(self.biases.fc1);
        let (up_bias, row, step) = match p.gate {
            Gate::None => (DevPtr::NULL, p.inter, 1),
            Gate::Interleaved => (bias.plus(self.element()), 2 * p.inter, 2),
            Gate::Halves => (bias.plus(p.inter * self.element()), 2 * p.inter, 1),
            Gate::Separate => (slot(self.biases.fc3), p.inter, 1),
        };
        let a = p.activation;
        ExpertParams {
            x,
            y,
            bias,
            up_bias,
            bias_row: row as u64,
            bias_step: step,
            share: p.routing.top as u32,
            kind: activation_code(a.kind),
            limit_after: a.limit_after.into(),
            alpha: a.alpha,
            beta: a.beta,
            limit: a.limit,
            ..self.up.params()
        }
    }

    /// The second projection and its bias.
    fn down(&self, cx: &LaunchCx<'_>, x: DevPtr, y: DevPtr) -> ExpertParams {
        let bias = self.biases.fc2.map_or(DevPtr::NULL, |slot| cx.input_ptr(slot));
        ExpertParams { x, y, bias, bias_row: self.problem.hidden as u64, ..self.down.params() }
    }

    fn push_route(&self, cx: &mut LaunchCx<'_>, tokens: &Tokens) -> Result<()> {
        let Routing { top, normalize, sparse_mixer } = self.problem.routing;
        let logits = cx.required(ROUTER);
        let given = if self.given { cx.input(ROUTER_WEIGHTS) } else { None };
        let at = |dtype: DType, ptr: DevPtr| ptr.plus(tokens.first * self.problem.experts * size(dtype));
        let params = RouteParams {
            logits: at(logits.dtype, logits.ptr),
            weights: given.map_or(DevPtr::NULL, |given| at(given.dtype, given.ptr)),
            ids: tokens.ids,
            mix: tokens.mix,
            dtype: code(logits.dtype),
            weights_dtype: given.map_or(0, |given| code(given.dtype)),
            tokens: tokens.count as u32,
            experts: self.problem.experts as u32,
            top: top as u32,
            normalize: normalize.into(),
            sparse: sparse_mixer.into(),
            pad: 0,
        };
        let warps = tokens.count.min(ROUTE_WARPS);
        cx.push(&self.route, linear(tokens.count.div_ceil(warps), 32 * warps as u32), &params)
    }

    /// Each row of an expert's output by itself.
    fn push_few(&self, cx: &mut LaunchCx<'_>, tokens: &Tokens, x: DevPtr, y: DevPtr) -> Result<()> {
        let (p, top) = (&self.problem, self.problem.routing.top);
        let pairs = tokens.count * top;
        let inner = cx.scratch(pairs * p.inter * self.element());
        let up = ExpertParams { ids: tokens.ids, ..self.up(cx, x, inner) };
        self.up.kernels.push_stream(cx, &up, pairs)?;
        let early = !self.up.kernels.float;
        let down = self.down(cx, inner, y);
        let down = ExpertParams { ids: tokens.ids, mix: tokens.mix, parts: top as u32, early: early.into(), ..down };
        self.down.kernels.push_stream(cx, &down, tokens.count)
    }

    /// Each expert multiplies the rows that go to it.
    fn push_many(&self, cx: &mut LaunchCx<'_>, tokens: &Tokens, room: &Room, x: DevPtr, y: DevPtr) -> Result<()> {
        let (p, top) = (&self.problem, self.problem.routing.top);
        let pairs = tokens.count * top;
        let held = pairs.min(p.experts);
        // Both projections take the rows in one order.
        let rows = [&self.up, &self.down].map(|p| p.kernels.rows(pairs / held, cx.device())).into_iter().min();
        let rows = rows.unwrap_or(SMALL_ROWS);
        // An expert's last item may be a small one.
        let slots = pairs.min(pairs / rows + held);
        let order = OrderParams {
            ids: tokens.ids,
            order: room.order,
            items: room.items,
            pairs: pairs as u32,
            experts: p.experts as u32,
            rows: rows as u32,
            slots: slots as u32,
        };
        let shared = 8 * p.experts as u32;
        cx.push(&self.order, LaunchShape { shared, ..linear(1, 1024) }, &order)?;
        let sorted = |params| ExpertParams { order: room.order, items: room.items, ..params };
        let up = sorted(self.up(cx, x, room.inner));
        self.up.kernels.push_gemm(cx, &up, slots, rows)?;
        let down = sorted(ExpertParams { share: 0, sums: 1, ..self.down(cx, room.inner, room.sums) });
        self.down.kernels.push_gemm(cx, &down, slots, rows)?;
        let combine = CombineParams {
            sums: room.sums,
            mix: tokens.mix,
            y,
            tokens: tokens.count as u32,
            top: top as u32,
            hidden: p.hidden as u32,
            pad: 0,
        };
        cx.push(&self.combine, linear(tokens.count, 256), &combine)
    }
}

/// Where the pairs of one pass are sorted, and their rows lie.
struct Room {
    order: DevPtr,
    items: DevPtr,
    inner: DevPtr,
    sums: DevPtr,
}

impl DeviceKernel for Moe {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (p, top) = (&self.problem, self.problem.routing.top);
        let (x, count) = (cx.required(INPUT).ptr, cx.required(INPUT).len() / p.hidden);
        if count == 0 || cx.output(0).is_none() {
            return Ok(());
        }
        let pass = count.min(PASS);
        let (ids, mix) = (cx.scratch(pass * top * 4), cx.scratch(pass * top * 4));
        let y = cx.output_ptr(0);
        if count <= FEW {
            let tokens = Tokens { first: 0, count, ids, mix };
            self.push_route(cx, &tokens)?;
            return self.push_few(cx, &tokens, x, y);
        }
        let pairs = pass * top;
        let room = Room {
            order: cx.scratch(pairs * 4),
            items: cx.scratch(pairs.min(pairs / SMALL_ROWS + p.experts) * 16),
            inner: cx.scratch(pairs * p.inter * self.element()),
            sums: cx.scratch(pairs * p.hidden * 4),
        };
        for first in (0..count).step_by(PASS) {
            let tokens = Tokens { first, count: PASS.min(count - first), ids, mix };
            self.push_route(cx, &tokens)?;
            let offset = first * p.hidden * self.element();
            self.push_many(cx, &tokens, &room, x.plus(offset), y.plus(offset))?;
        }
        Ok(())
    }
}
