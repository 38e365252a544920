//! The CPU kernel: routes tokens, gathers each expert's rows, and multiplies them expert by expert.

use super::activation::Row;
use super::bank::Projection;
use super::pass::{CHUNK_ROWS, Lefts, Pass, TILE_ROWS};
use super::problem::{INPUT, Problem, ROUTER, ROUTER_WEIGHTS};
use super::product::{Active, Form};
use super::route::Plan;
use crate::build::BuildCx;
use crate::cpu::convert::{Floats, FloatsMut};
use crate::kernel::{Carver, Kernel, RunCx, Shapes};
use crate::par::SharedMut;
use crate::settings::Tier;
use abi::Result;
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
pub(super) fn build(cx: &mut BuildCx) -> Result<Moe> {
    let problem = Problem::of(cx)?;
    let mut projection = |matrix| Projection::build(cx, matrix, problem.experts, problem.int8);
    let fc1 = projection(problem.fc1.clone())?;
    let fc2 = projection(problem.fc2.clone())?;
    let fc3 = problem.fc3.clone().map(projection).transpose()?;
    let settings = cx.settings();
    Ok(Moe { problem, fc1, fc2, fc3, tier: settings.tier, workers: settings.chunks })
}

/// Rows (one a token and choice) that are computed together: their values should stay below the weights in size.
const MAX_ROWS: usize = 8192;

/// What one pass over some tokens works in.
struct Room<'a> {
    /// Of each token and choice: its expert and weight.
    experts: &'a mut [u32],
    weights: &'a mut [f32],
    /// See [`Plan`].
    starts: &'a mut [u32],
    rows: &'a mut [u32],
    /// Experts that have rows, and where chunks of rows begin.
    active: &'a mut [u32],
    chunks: &'a mut [u32],
    /// One token's logits, and its given weights, a task.
    logits: &'a mut [f32],
    left: &'a mut [u8],
    scales: &'a mut [f32],
    fixes: &'a mut [f32],
    fc1: &'a mut [f32],
    fc3: &'a mut [f32],
    sums: &'a mut [f32],
    tile: &'a mut [f32],
    buffers: &'a mut [f32],
}

impl Moe {
    /// Tokens of one pass.
    fn pass(&self, tokens: usize) -> usize {
        tokens.min((MAX_ROWS / self.problem.routing.top).max(1))
    }

    fn projections(&self) -> impl Iterator<Item = &Projection> {
        [Some(&self.fc1), Some(&self.fc2), self.fc3.as_ref()].into_iter().flatten()
    }

    /// Elements of each piece of [`Room`]: u32, f32, and bytes.
    fn counts(&self, tokens: usize) -> ([usize; 5], [usize; 8], usize) {
        let p = &self.problem;
        let pass = self.pass(tokens);
        let rows = pass * p.routing.top;
        let most = |of: fn(&Form) -> usize| self.projections().map(|p| of(&p.form())).max().unwrap_or(0);
        let integers = [rows, p.experts + 1, rows, p.experts, rows.div_ceil(CHUNK_ROWS) + p.experts + 1];
        let floats = [
            rows,
            self.workers * 2 * p.experts,
            rows * most(Form::blocks),
            rows * most(Form::blocks),
            rows * p.fc1.n,
            p.fc3.as_ref().map_or(0, |m| rows * m.n),
            pass * p.hidden,
            self.workers * (self.tile(pass) + self.buffer()),
        ];
        (integers, floats, rows * most(Form::row_bytes))
    }

    /// Values of a worker's tile of FC2.
    fn tile(&self, pass: usize) -> usize {
        pass.min(TILE_ROWS) * Pass::TILE_COLUMNS
    }

    /// Values that a task of any projection works in.
    fn buffer(&self) -> usize {
        self.problem.matrices().map(Active::buffer).max().unwrap_or(0)
    }

    fn room<'a>(&self, tokens: usize, scratch: &mut Carver<'a>) -> Room<'a> {
        let (integers, floats, bytes) = self.counts(tokens);
        let [experts, starts, rows, active, chunks] = integers.map(|n| scratch.take::<u32>(n));
        let [weights, logits, scales, fixes, fc1, fc3, sums, own] = floats.map(|n| scratch.take::<f32>(n));
        let left = scratch.take::<u8>(bytes);
        let (tile, buffers) = own.split_at_mut(self.workers * self.tile(self.pass(tokens)));
        Room {
            experts,
            weights,
            starts,
            rows,
            active,
            chunks,
            logits,
            left,
            scales,
            fixes,
            fc1,
            fc3,
            sums,
            tile,
            buffers,
        }
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
        let (h, inter, n1) = (p.hidden, p.inter, p.fc1.n);
        let (top, pairs) = (p.routing.top, range.len() * p.routing.top);
        let plan = Plan::new(&room.experts[..pairs], room.starts, &mut room.rows[..pairs]);
        let (active, chunks) = plan.list(room.active, room.chunks);
        let pass = Pass {
            par: cx.par,
            tier: self.tier,
            workers: self.workers,
            plan,
            active,
            chunks,
            buffers: SharedMut::new(room.buffers),
            buffer: self.buffer(),
        };
        let lefts = &mut Lefts { a: room.left, scales: room.scales, fixes: room.fixes };
        let x = Floats::of(cx.required(INPUT));
        let token = |at: usize, out: &mut [f32]| {
            let token = range.start + pass.plan.rows[at] as usize / top;
            x.read(token * h..(token + 1) * h, out);
        };
        pass.prepare(&w.fc1, token, lefts);
        pass.project(&w.fc1, lefts, room.fc1);
        if let Some(fc3) = &w.fc3 {
            pass.prepare(fc3, token, lefts);
            pass.project(fc3, lefts, room.fc3);
        }
        let (fc1, fc3) = (&*room.fc1, &*room.fc3);
        let features = |at: usize, out: &mut [f32]| {
            let fc3 = fc3.get(at * inter..(at + 1) * inter).unwrap_or(&[]);
            p.activation.apply(self.tier, p.gate, Row { fc1: &fc1[at * n1..(at + 1) * n1], fc3, out });
        };
        pass.prepare(&w.fc2, features, lefts);
        let sums = &mut room.sums[..range.len() * h];
        sums.fill(0.0);
        pass.sum(&w.fc2, lefts, (&room.weights[..pairs], top), SharedMut::new(room.tile), SharedMut::new(sums));
        cx.par.ranges(sums.len(), 1 << 14, |part| {
            // SAFETY: `ranges` gives disjoint ranges.
            unsafe { out.write(range.start * h + part.start..range.start * h + part.end, &sums[part]) };
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
        let (integers, floats, bytes) = self.counts(tokens);
        let room: usize = integers.iter().chain(&floats).map(|&n| Carver::size::<f32>(n)).sum();
        let weights: usize = self.projections().map(|projection| projection.scratch_bytes(p.experts)).sum();
        room + Carver::size::<u8>(bytes) + weights
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
        let w = Weights {
            fc1: self.fc1.active(cx, p.experts, &mut scratch)?,
            fc2: self.fc2.active(cx, p.experts, &mut scratch)?,
            fc3: self.fc3.as_ref().map(|fc3| fc3.active(cx, p.experts, &mut scratch)).transpose()?,
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
