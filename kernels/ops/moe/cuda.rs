//! MoE and QMoE on CUDA devices: tokens are routed there, and launches depend on shapes alone. Sums are float.
//!
//! Few tokens: every row of an expert's output by itself, weights streamed once for each. Many: pairs of a token and one of its
//! experts are sorted by expert, and each expert multiplies its rows.

mod offload;
mod projection;
mod slots;

use super::pack::Form;
use super::problem::{Format, Gate, INPUT, Kind, Matrix, Problem, ROUTER, ROUTER_WEIGHTS, Routing, quantized};
use crate::build::BuildCx;
use crate::cuda::number::{code, size};
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, Weights, linear, suffix};
use crate::experts::Experts;
use crate::kernel_params;
use crate::op::{Decline, NodeCx};
use abi::cuda::{Function, LaunchShape};
use abi::{DType, Graph, Node, Result, ValueId};
use offload::Offload;
use projection::{Projection, SMALL_ROWS};
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

/// FC1 and what it gates: one matrix on the device.
fn up_matrices(problem: &Problem) -> Vec<&Matrix> {
    [Some(&problem.fc1), problem.fc3.as_ref()].into_iter().flatten().collect()
}

/// How the two projections lie on the device.
fn forms(problem: &Problem) -> [Form; 2] {
    let up = Form::of(problem.dtype, problem.gate, &up_matrices(problem), problem.inter);
    [up, Form::of(problem.dtype, Gate::None, &[&problem.fc2], problem.hidden)]
}

/// The node's experts as they are packed.
pub(super) fn experts(cx: &NodeCx) -> Result<Experts> {
    let problem = Problem::of(cx)?;
    let bytes = forms(&problem).iter().map(Form::bytes).sum();
    Ok(Experts { count: problem.experts, top: problem.routing.top, bytes })
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let problem = Problem::of(cx)?;
    let own = experts(cx)?;
    let slots = cx.settings().experts.map(|share| share.slots(&own));
    let [up, down] = forms(&problem);
    let up = Projection::build(cx, device, up, &up_matrices(&problem), slots)?;
    let down = Projection::build(cx, device, down, &[&problem.fc2], slots)?;
    let find = |name: &str| device.function("moe", name);
    Ok(Box::new(Arc::new(Moe {
        offload: slots.map(|slots| Offload::new(device, own.count, slots)).transpose()?,
        route: find("route")?,
        order: find("order")?,
        combine: find(&format!("combine_{}", suffix(problem.dtype)))?,
        biases: biases(cx, &problem)?,
        given: quantized(cx),
        problem,
        up,
        down,
    })))
}

/// The input slots of FC1's, FC2's and FC3's biases; those that are all zeros are left out.
fn biases(cx: &mut BuildCx, problem: &Problem) -> Result<[Option<usize>; 3]> {
    let mut given = |matrix: Option<&Matrix>| -> Result<Option<usize>> {
        let Some(slot) = matrix.map(|m| m.slots.bias).filter(|&slot| cx.has_input(slot)) else { return Ok(None) };
        let constant = cx.constant(slot)?;
        let zero = constant.is_some_and(|c| c.bytes().iter().all(|&byte| byte == 0));
        Ok((!zero).then_some(slot))
    };
    Ok([given(Some(&problem.fc1))?, given(Some(&problem.fc2))?, given(problem.fc3.as_ref())?])
}

struct Moe {
    problem: Problem,
    biases: [Option<usize>; 3],
    /// Whether experts may have weights of their own.
    given: bool,
    up: Projection,
    down: Projection,
    route: Function,
    order: Function,
    combine: Function,
    /// Where not all experts are on the device.
    offload: Option<Arc<Offload>>,
}

impl Drop for Moe {
    fn drop(&mut self) {
        // Kernels and copies may still use the weights' memory.
        self.offload.iter().for_each(|offload| offload.settle());
    }
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

/// What experts have besides weights, a row an expert; null where there is none.
#[derive(Clone, Copy)]
struct Extras {
    /// FC1's, FC2's and FC3's.
    biases: [DevPtr; 3],
    /// Factors of the weights of both projections.
    globals: [DevPtr; 2],
}

impl Moe {
    fn element(&self) -> usize {
        size(self.problem.dtype)
    }

    /// All experts' extras.
    fn extras(&self, cx: &LaunchCx<'_>) -> Extras {
        let globals = |of: &Projection| of.globals.as_ref().map_or(DevPtr::NULL, |b| b.ptr());
        Extras {
            biases: self.biases.map(|slot| slot.map_or(DevPtr::NULL, |slot| cx.input_ptr(slot))),
            globals: [globals(&self.up), globals(&self.down)],
        }
    }

    /// The first projection, its activation and its biases; `x` and `y` are those of some tokens.
    fn up(&self, extras: &Extras, x: DevPtr, y: DevPtr) -> ExpertParams {
        let p = &self.problem;
        let [bias, _, separate] = extras.biases;
        let (up_bias, row, step) = match p.gate {
            Gate::None => (DevPtr::NULL, p.inter, 1),
            Gate::Interleaved => (bias.plus(self.element()), 2 * p.inter, 2),
            Gate::Halves => (bias.plus(p.inter * self.element()), 2 * p.inter, 1),
            Gate::Separate => (separate, p.inter, 1),
        };
        let a = p.activation;
        ExpertParams {
            x,
            y,
            bias,
            up_bias,
            globals: extras.globals[0],
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
    fn down(&self, extras: &Extras, x: DevPtr, y: DevPtr) -> ExpertParams {
        let (bias, globals) = (extras.biases[1], extras.globals[1]);
        ExpertParams { x, y, bias, globals, bias_row: self.problem.hidden as u64, ..self.down.params() }
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

    /// Each row of an expert's output by itself; `x` and `y` are those of the tokens, some of `all`.
    fn push_few(
        &self,
        cx: &mut LaunchCx<'_>,
        tokens: &Tokens,
        all: usize,
        extras: &Extras,
        place: &Place,
    ) -> Result<()> {
        let top = self.problem.routing.top;
        let up = ExpertParams { ids: tokens.ids, ..self.up(extras, place.x, place.inner) };
        self.up.kernels.push_stream(cx, &up, (tokens.count * top, all * top))?;
        let early = !self.up.kernels.float;
        let down = self.down(extras, place.inner, place.y);
        let down = ExpertParams { ids: tokens.ids, mix: tokens.mix, parts: top as u32, early: early.into(), ..down };
        self.down.kernels.push_stream(cx, &down, (tokens.count, all))
    }

    /// Rows of an item, and items at most, for so many tokens.
    fn cut(&self, tokens: usize, device: &Device) -> (usize, usize) {
        let pairs = tokens * self.problem.routing.top;
        let held = pairs.min(self.problem.experts);
        // Both projections take the rows in one order.
        let rows = [&self.up, &self.down].map(|p| p.kernels.rows(pairs / held, device)).into_iter().min();
        let rows = rows.unwrap_or(SMALL_ROWS);
        // An expert's last item may be a small one.
        (rows, pairs.min(pairs / rows + held))
    }

    fn push_order(&self, cx: &mut LaunchCx<'_>, tokens: &Tokens, sorted: &Sorted) -> Result<()> {
        let order = OrderParams {
            ids: tokens.ids,
            order: sorted.order,
            items: sorted.items,
            pairs: (tokens.count * self.problem.routing.top) as u32,
            experts: self.problem.experts as u32,
            rows: sorted.rows as u32,
            slots: sorted.slots as u32,
        };
        let shared = 8 * self.problem.experts as u32;
        cx.push(&self.order, LaunchShape { shared, ..linear(1, 1024) }, &order)
    }

    /// Each expert multiplies the rows that go to it: `place.sums` gets a row a pair.
    fn push_products(&self, cx: &mut LaunchCx<'_>, sorted: &Sorted, extras: &Extras, place: &Place) -> Result<()> {
        let of = |params| ExpertParams { order: sorted.order, items: sorted.items, ..params };
        let up = of(self.up(extras, place.x, place.inner));
        self.up.kernels.push_gemm(cx, &up, sorted.slots, sorted.rows)?;
        let down = of(ExpertParams { share: 0, sums: 1, ..self.down(extras, place.inner, place.sums) });
        self.down.kernels.push_gemm(cx, &down, sorted.slots, sorted.rows)
    }

    fn push_combine(&self, cx: &mut LaunchCx<'_>, tokens: &Tokens, place: &Place) -> Result<()> {
        let combine = CombineParams {
            sums: place.sums,
            mix: tokens.mix,
            y: place.y,
            tokens: tokens.count as u32,
            top: self.problem.routing.top as u32,
            hidden: self.problem.hidden as u32,
            pad: 0,
        };
        cx.push(&self.combine, linear(tokens.count, 256), &combine)
    }

    /// Room for the results of `count` tokens, one pass at most.
    fn place(&self, cx: &mut LaunchCx<'_>, count: usize) -> Place {
        let pairs = count.min(PASS) * self.problem.routing.top;
        Place {
            x: cx.required(INPUT).ptr,
            y: cx.output_ptr(0),
            inner: cx.scratch(pairs * self.problem.inter * self.element()),
            sums: if count <= FEW { DevPtr::NULL } else { cx.scratch(pairs * self.problem.hidden * 4) },
        }
    }
}

/// Pairs sorted by expert.
struct Sorted {
    order: DevPtr,
    items: DevPtr,
    /// Rows of an item.
    rows: usize,
    /// Items there is room for.
    slots: usize,
}

/// Where some tokens' rows lie.
#[derive(Clone, Copy)]
struct Place {
    x: DevPtr,
    y: DevPtr,
    /// The first projection's results, a row a pair.
    inner: DevPtr,
    /// The second one's.
    sums: DevPtr,
}

impl Place {
    /// That of the tokens from `first` on, in x and y.
    fn from(&self, first: usize, row: usize) -> Self {
        Self { x: self.x.plus(first * row), y: self.y.plus(first * row), ..*self }
    }
}

impl DeviceKernel for Arc<Moe> {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let (p, top) = (&self.problem, self.problem.routing.top);
        let count = cx.required(INPUT).len() / p.hidden;
        if count == 0 || cx.output(0).is_none() {
            return Ok(());
        }
        if let Some(offload) = &self.offload {
            return offload.launch(self, cx, count);
        }
        let pass = count.min(PASS);
        let (ids, mix) = (cx.scratch(pass * top * 4), cx.scratch(pass * top * 4));
        let extras = self.extras(cx);
        if count <= FEW {
            let tokens = Tokens { first: 0, count, ids, mix };
            self.push_route(cx, &tokens)?;
            let place = self.place(cx, count);
            return self.push_few(cx, &tokens, count, &extras, &place);
        }
        let pairs = pass * top;
        let order = cx.scratch(pairs * 4);
        let items = cx.scratch(pairs.min(pairs / SMALL_ROWS + p.experts) * 16);
        let place = self.place(cx, count);
        for first in (0..count).step_by(PASS) {
            let tokens = Tokens { first, count: PASS.min(count - first), ids, mix };
            self.push_route(cx, &tokens)?;
            let (rows, slots) = self.cut(tokens.count, cx.device());
            let sorted = Sorted { order, items, rows, slots };
            self.push_order(cx, &tokens, &sorted)?;
            let place = place.from(first, p.hidden * self.element());
            self.push_products(cx, &sorted, &extras, &place)?;
            self.push_combine(cx, &tokens, &place)?;
        }
        Ok(())
    }
}
