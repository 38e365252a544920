//! The CPU kernel: routes tokens, gathers each expert's rows, and multiplies them expert by expert.

use super::activation::Row;
use super::bank::{Active, Part, Projection};
use super::problem::{INPUT, Problem, ROUTER, ROUTER_WEIGHTS};
use super::route::Plan;
use crate::build::BuildCx;
use crate::cpu::convert::{Floats, FloatsMut};
use crate::cpu::rows::{Groups, max_group};
use crate::cpu::simd::LANES;
use crate::cpu::sink::{Addend, Sink};
use crate::kernel::{Carver, Kernel, RunCx, Shapes};
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use abi::{DType, Result};
use std::ops::Range;

pub(super) struct Moe {
    problem: Problem,
    fc1: Projection,
    fc2: Projection,
    fc3: Option<Projection>,
    tier: Tier,
    /// How many tasks may run at once.
    workers: usize,
}

/// Takes over a node's weights.
pub(super) fn build(cx: &mut BuildCx) -> Result<Box<dyn Kernel>> {
    let problem = Problem::of(cx)?;
    let experts = problem.experts;
    let fc1 = Projection::build(cx, problem.fc1.clone(), experts)?;
    let fc2 = Projection::build(cx, problem.fc2.clone(), experts)?;
    let fc3 = problem.fc3.clone().map(|m| Projection::build(cx, m, experts)).transpose()?;
    let settings = cx.settings();
    Ok(Box::new(Moe { problem, fc1, fc2, fc3, tier: settings.tier, workers: settings.chunks }))
}

/// Rows (one a token and choice) that are computed together: their values should stay below the weights in size.
const MAX_ROWS: usize = 8192;

/// What one pass over some tokens works in.
struct Room<'a> {
    /// Of each row: its expert and weight, and the rows in the order of experts.
    experts: &'a mut [u32],
    weights: &'a mut [f32],
    starts: &'a mut [u32],
    rows: &'a mut [u32],
    active: &'a mut [u32],
    /// One token's logits, and its given weights, a task.
    logits: &'a mut [f32],
    left: &'a mut [f32],
    fc1: &'a mut [f32],
    fc3: &'a mut [f32],
    hidden: &'a mut [f32],
    sums: &'a mut [f32],
    tile: &'a mut [f32],
    buffers: &'a mut [f32],
}

impl Moe {
    /// Tokens of one pass.
    fn pass(&self, tokens: usize) -> usize {
        tokens.min((MAX_ROWS / self.problem.routing.top).max(1))
    }

    /// Elements of each piece of [`Room`], the f32 ones after the u32 ones.
    fn counts(&self, tokens: usize) -> ([usize; 4], [usize; 9]) {
        let p = &self.problem;
        let pass = self.pass(tokens);
        let rows = pass * p.routing.top;
        let buffer = self.buffer();
        let fc3 = p.fc3.as_ref().map_or(0, |m| rows * m.n);
        let integers = [rows, p.experts + 1, rows, p.experts];
        let floats = [
            rows,
            self.workers * 2 * p.experts,
            rows * p.hidden,
            rows * p.fc1.n,
            fc3,
            rows * p.inter,
            pass * p.hidden,
            self.workers * pass * LANES,
            self.workers * buffer,
        ];
        (integers, floats)
    }

    /// Values that a task of any projection works in.
    fn buffer(&self) -> usize {
        self.problem.matrices().map(Active::buffer).max().unwrap_or(0)
    }

    fn room<'a>(&self, tokens: usize, scratch: &mut Carver<'a>) -> Room<'a> {
        let (integers, floats) = self.counts(tokens);
        let [experts, starts, rows, active] = integers.map(|n| scratch.take::<u32>(n));
        let [weights, logits, left, fc1, fc3, hidden, sums, tile, buffers] = floats.map(|n| scratch.take::<f32>(n));
        Room { experts, weights, starts, rows, active, logits, left, fc1, fc3, hidden, sums, tile, buffers }
    }

    /// Chooses the experts of tokens `range`.
    fn route(&self, cx: &RunCx<'_>, range: Range<usize>, room: &mut Room<'_>) {
        let (e, top) = (self.problem.experts, self.problem.routing.top);
        let router = Floats::of(cx.required(ROUTER));
        let given = cx.input(ROUTER_WEIGHTS).map(Floats::of);
        let (logits, experts) = (SharedMut::new(room.logits), SharedMut::new(room.experts));
        let weights = SharedMut::new(room.weights);
        let tokens = range.len();
        let each = tokens.div_ceil(self.workers).max(ROUTED);
        cx.par.for_each(tokens.div_ceil(each), |task| {
            // SAFETY: tasks are fewer than workers, and each has a piece of its own.
            let (logits, own) = unsafe { logits.slice(task * 2 * e..(task + 1) * 2 * e) }.split_at_mut(e);
            for t in task * each..((task + 1) * each).min(tokens) {
                let at = (range.start + t) * e;
                router.read(at..at + e, logits);
                let own = given.as_ref().map(|given| {
                    given.read(at..at + e, own);
                    &*own
                });
                let part = t * top..(t + 1) * top;
                // SAFETY: each token is visited by one task.
                let (experts, weights) = unsafe { (experts.slice(part.clone()), weights.slice(part)) };
                self.problem.routing.route(logits, own, experts, weights);
            }
        });
    }

    /// Computes tokens `range` into the output.
    fn tokens(&self, cx: &RunCx<'_>, w: &Weights<'_>, range: Range<usize>, room: &mut Room<'_>, out: FloatsMut<'_>) {
        let p = &self.problem;
        let (top, pairs) = (p.routing.top, range.len() * p.routing.top);
        let plan = Plan::new(&room.experts[..pairs], room.starts, &mut room.rows[..pairs]);
        let mut count = 0;
        for e in (0..p.experts).filter(|&e| !plan.of(e).is_empty()) {
            room.active[count] = e as u32;
            count += 1;
        }
        let pass = Pass {
            moe: self,
            par: cx.par,
            plan,
            active: &room.active[..count],
            buffers: SharedMut::new(room.buffers),
            buffer: self.buffer(),
        };
        pass.gather(Floats::of(cx.required(INPUT)), range.start, room.left);
        pass.project(&w.fc1, room.left, room.fc1);
        if let Some(fc3) = &w.fc3 {
            pass.project(fc3, room.left, room.fc3);
        }
        pass.activate(room.fc1, room.fc3, room.hidden);
        let sums = &mut room.sums[..range.len() * p.hidden];
        sums.fill(0.0);
        pass.sum(&w.fc2, room.hidden, &room.weights[..pairs], top, SharedMut::new(room.tile), SharedMut::new(sums));
        cx.par.ranges(sums.len(), 1 << 14, |part| {
            let to = range.start * p.hidden + part.start..range.start * p.hidden + part.end;
            // SAFETY: `ranges` gives disjoint ranges.
            unsafe { out.write(to, &sums[part]) };
        });
    }
}

/// Tokens that one task routes at the least.
const ROUTED: usize = 16;

/// The projections of a Run.
struct Weights<'a> {
    fc1: Active<'a>,
    fc2: Active<'a>,
    fc3: Option<Active<'a>>,
}

impl Kernel for Moe {
    fn scratch_bytes(&self, shapes: &Shapes<'_>) -> usize {
        let p = &self.problem;
        let tokens = shapes.input(INPUT).iter().product::<usize>() / p.hidden;
        let (integers, floats) = self.counts(tokens);
        let room: usize = integers.iter().chain(&floats).map(|&n| Carver::size::<f32>(n)).sum();
        let projections = [Some(&self.fc1), Some(&self.fc2), self.fc3.as_ref()];
        let weights: usize = projections.into_iter().flatten().map(|p2| p2.scratch_bytes(p.experts)).sum();
        room + weights
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let p = &self.problem;
        let tokens = cx.required(INPUT).len() / p.hidden;
        let Some(out) = cx.output(0) else { return Ok(()) };
        if tokens == 0 {
            return Ok(());
        }
        let out = FloatsMut::of(out);
        let mut scratch = Carver::new(cx.take_scratch());
        let mut room = self.room(tokens, &mut scratch);
        let all: &[u32] = {
            room.active.iter_mut().enumerate().for_each(|(e, to)| *to = e as u32);
            room.active
        };
        let cx = &*cx;
        let w = Weights {
            fc1: self.fc1.active(cx, p.experts, all, &mut scratch)?,
            fc2: self.fc2.active(cx, p.experts, all, &mut scratch)?,
            fc3: self.fc3.as_ref().map(|fc3| fc3.active(cx, p.experts, all, &mut scratch)).transpose()?,
        };
        let pass = self.pass(tokens);
        for start in (0..tokens).step_by(pass) {
            let range = start..(start + pass).min(tokens);
            self.route(cx, range.clone(), &mut room);
            self.tokens(cx, &w, range, &mut room, out);
        }
        Ok(())
    }
}

/// One pass: the rows of some tokens, sorted by expert.
struct Pass<'a> {
    moe: &'a Moe,
    par: Par<'a>,
    plan: Plan<'a>,
    /// Experts that have rows.
    active: &'a [u32],
    buffers: SharedMut<'a, f32>,
    buffer: usize,
}

/// Panels of one task.
const PANELS: usize = 4;

impl Pass<'_> {
    /// Each expert's rows of the input in groups.
    fn gather(&self, x: Floats<'_>, first: usize, out: &mut [f32]) {
        const CHUNK: usize = 256;
        let (h, top) = (self.moe.problem.hidden, self.moe.problem.routing.top);
        let out = SharedMut::new(out);
        self.par.for_each(self.active.len(), |i| {
            let rows = self.plan.of(self.active[i] as usize);
            // SAFETY: experts' rows do not overlap.
            let out = unsafe { out.slice(rows.start * h..rows.end * h) };
            for (row, size) in Groups::new(0..rows.len(), max_group(self.moe.tier)) {
                let out = &mut out[row * h..(row + size) * h];
                for r in 0..size {
                    let token = first + self.plan.rows[rows.start + row + r] as usize / top;
                    let mut values = [0f32; CHUNK];
                    for at in (0..h).step_by(CHUNK) {
                        let values = &mut values[..CHUNK.min(h - at)];
                        x.read(token * h + at..token * h + at + values.len(), values);
                        let to = out[at * size + r..].iter_mut().step_by(size);
                        to.zip(&*values).for_each(|(to, v)| *to = *v);
                    }
                }
            }
        });
    }

    /// A first projection of every row.
    fn project(&self, w: &Active<'_>, left: &[f32], out: &mut [f32]) {
        let Active { matrix, .. } = w;
        let (n, k) = (matrix.n, matrix.k);
        let out = SharedMut::new(out);
        let chunks = w.panels().div_ceil(PANELS);
        self.tasks(self.active.len() * chunks, |task, buffer| {
            let (e, chunk) = (self.active[task / chunks] as usize, task % chunks);
            let rows = self.plan.of(e);
            let sink = Sink {
                // SAFETY: the rows lie within the buffer.
                ptr: unsafe { out.start().add(rows.start * n) }.cast(),
                dtype: DType::F32,
                stride: n,
                n,
                alpha: 1.0,
                addend: w.bias_of(e).map(|values| Addend { values, row: 0, column: 1 }),
            };
            let part = Part {
                expert: e,
                a: left[rows.start * k..].as_ptr(),
                rows: rows.len(),
                panels: chunk * PANELS..((chunk + 1) * PANELS).min(w.panels()),
                out: sink,
                buffer,
            };
            // SAFETY: the rows were gathered; tasks write disjoint tiles.
            unsafe { w.multiply(part) };
        });
    }

    /// FC2's left operand in groups.
    fn activate(&self, fc1: &[f32], fc3: &[f32], out: &mut [f32]) {
        let p = &self.moe.problem;
        let (n1, inter) = (p.fc1.n, p.inter);
        let out = SharedMut::new(out);
        self.par.for_each(self.active.len(), |i| {
            let rows = self.plan.of(self.active[i] as usize);
            // SAFETY: experts' rows do not overlap.
            let out = unsafe { out.slice(rows.start * inter..rows.end * inter) };
            for (row, size) in Groups::new(0..rows.len(), max_group(self.moe.tier)) {
                let out = &mut out[row * inter..(row + size) * inter];
                for r in 0..size {
                    let at = rows.start + row + r;
                    let fc3 = if fc3.is_empty() { fc3 } else { &fc3[at * inter..][..inter] };
                    let row = Row { fc1: &fc1[at * n1..][..n1], fc3 };
                    p.activation.apply(p.gate, row, inter, &mut out[r..], size);
                }
            }
        });
    }

    /// The second projection, each row weighed and added to its token's sum. A task owns panels of all tokens.
    fn sum(
        &self,
        w: &Active<'_>,
        left: &[f32],
        weights: &[f32],
        top: usize,
        tile: SharedMut<'_, f32>,
        sums: SharedMut<'_, f32>,
    ) {
        let (n, k) = (w.matrix.n, w.matrix.k);
        let tile_size = tile.len() / self.moe.workers;
        self.workers(w.panels(), |worker, panel, buffer| {
            // SAFETY: a worker's piece is its own.
            let tile = unsafe { tile.slice(worker * tile_size..(worker + 1) * tile_size) };
            let columns = panel * LANES..((panel + 1) * LANES).min(n);
            for &e in self.active {
                let rows = self.plan.of(e as usize);
                let out = Sink {
                    // The sink counts columns from the matrix's first.
                    ptr: tile.as_mut_ptr().wrapping_sub(panel * LANES).cast(),
                    dtype: DType::F32,
                    stride: LANES,
                    n,
                    alpha: 1.0,
                    addend: w.bias_of(e as usize).map(|values| Addend { values, row: 0, column: 1 }),
                };
                let a = left[rows.start * k..].as_ptr();
                let (expert, panels) = (e as usize, panel..panel + 1);
                // SAFETY: the rows were gathered; the tile holds 16 values of each.
                unsafe { w.multiply(Part { expert, a, rows: rows.len(), panels, out, buffer: &mut *buffer }) };
                for (pair, values) in self.plan.rows[rows].iter().zip(tile.chunks_exact(LANES)) {
                    let (token, weight) = (*pair as usize / top, weights[*pair as usize]);
                    // SAFETY: the columns belong to this task.
                    let sums = unsafe { sums.slice(token * n + columns.start..token * n + columns.end) };
                    sums.iter_mut().zip(values).for_each(|(sum, v)| *sum += weight * v);
                }
            }
        });
    }

    /// Calls `f(task, buffer)` for every task.
    fn tasks(&self, n: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        self.workers(n, |_, task, buffer| f(task, buffer));
    }

    /// Calls `f(worker, task, buffer)` for every task; a worker and its buffer belong to one thread at a time.
    fn workers(&self, n: usize, f: impl Fn(usize, usize, &mut [f32]) + Sync) {
        let next = std::sync::atomic::AtomicUsize::new(0);
        self.par.for_each(self.moe.workers.min(n), |worker| {
            // SAFETY: a worker's piece is its own.
            let buffer = unsafe { self.buffers.slice(worker * self.buffer..(worker + 1) * self.buffer) };
            loop {
                let task = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if task >= n {
                    return;
                }
                f(worker, task, buffer);
            }
        });
    }
}
