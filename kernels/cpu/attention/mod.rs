//! Attention with an online softmax: the one kernel behind GroupQueryAttention and Attention.
//!
//! Dims: B batch, N query heads, G query heads a key head, S query rows, T keys, H head size, W value head size. Keys go by in
//! tiles of 64 and nothing of size S x T is ever held. Accumulation is f32 whatever the tensors hold.

mod tile;

use crate::cpu::float::Float;
use crate::kernel::Carver;
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use tile::{KEYS, PAD, Tile};

/// Query rows a tile holds: enough to use a key tile while it is in the first-level cache.
const ROWS: usize = 32;
/// Fewest keys worth a task of their own when the keys of one head are cut.
const SPLIT_KEYS: usize = 256;

/// The sizes of one attention.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// B.
    pub batch: usize,
    /// N; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// S.
    pub rows: usize,
    /// Most keys that a row can see with these shapes: decides how work is cut.
    pub keys: usize,
    /// H.
    pub dim: usize,
    /// W.
    pub v_dim: usize,
}

/// Keys or values: element `[b, head, t, 0]` is at `b * batch + head * head_stride + t * row`.
#[derive(Clone, Copy)]
pub struct Rows<'a, T> {
    /// The whole tensor.
    pub data: &'a [T],
    /// Elements between batch entries.
    pub batch: usize,
    /// Elements between heads.
    pub head: usize,
    /// Elements between rows.
    pub row: usize,
}

impl<'a, T> Rows<'a, T> {
    /// Row `t`, `len` elements.
    pub fn get(&self, b: usize, head: usize, t: usize, len: usize) -> &'a [T] {
        let at = b * self.batch + head * self.head + t * self.row;
        &self.data[at..at + len]
    }
}

/// Where the output goes: element `[b, head, s, 0]` is at `b * batch + head * head_stride + s * row`.
pub struct Output<'a, T> {
    /// The whole tensor.
    pub data: &'a mut [T],
    /// Elements between batch entries.
    pub batch: usize,
    /// Elements between heads.
    pub head: usize,
    /// Elements between rows.
    pub row: usize,
}

/// Writes query row `(batch, head, row)`, H elements.
pub type LoadQuery<'a> = &'a (dyn Fn(usize, usize, usize, &mut [f32]) + Sync);
/// Adds to the scores of `(batch, head, row)` over a range of keys; -inf hides a key.
pub type AddBias<'a> = &'a (dyn Fn(usize, usize, usize, Range<usize>, &mut [f32]) + Sync);

/// One attention: softmax(scale * q k' softcapped, plus bias) v over the visible keys.
pub struct Attention<'a, T> {
    /// The sizes.
    pub sizes: Sizes,
    /// Most keys that a row sees in this Run: decides whether threads are worth waking.
    pub longest: usize,
    /// Keys `[B, kv_heads, T, H]`, strided.
    pub keys: Rows<'a, T>,
    /// Values `[B, kv_heads, T, W]`, strided.
    pub values: Rows<'a, T>,
    /// Multiplies q . k.
    pub scale: f32,
    /// `cap * tanh(score / cap)` when positive.
    pub softcap: f32,
    /// Gives the queries.
    pub load_query: LoadQuery<'a>,
    /// The keys that row `(batch, row)` sees; every one is within `keys` and `values`. An empty range gives a zero row.
    pub visible: &'a (dyn Fn(usize, usize) -> Range<usize> + Sync),
    /// Added after the soft cap.
    pub bias: Option<AddBias<'a>>,
    /// One more logit by query head, in the denominator only.
    pub sink: Option<&'a (dyn Fn(usize) -> f32 + Sync)>,
}

/// How the work is cut: `tasks` = B x kv_heads x `row_tiles` x `splits`.
#[derive(Debug, Clone, Copy)]
struct Cut {
    lanes: usize,
    row_tiles: usize,
    splits: usize,
}

impl Sizes {
    fn group_rows(&self) -> usize {
        self.heads / self.kv_heads.max(1) * self.rows
    }

    fn cut(&self, lanes: usize) -> Cut {
        let row_tiles = self.group_rows().div_ceil(ROWS);
        let tasks = self.batch * self.kv_heads * row_tiles;
        // Cutting keys costs a merge: only where rows alone cannot keep the lanes busy.
        let splits = if row_tiles != 1 || tasks.is_multiple_of(lanes) || tasks >= 4 * lanes {
            1
        } else {
            (4 * lanes).div_ceil(tasks).min(self.keys / SPLIT_KEYS).max(1)
        };
        Cut { lanes, row_tiles, splits }
    }

    fn padded(&self) -> (usize, usize) {
        (self.dim.next_multiple_of(PAD), self.v_dim.next_multiple_of(PAD))
    }

    fn lane_bytes(&self) -> usize {
        let (dim, v_dim) = self.padded();
        Carver::size::<f32>(ROWS * dim)
            + Carver::size::<f32>(KEYS * dim)
            + Carver::size::<f32>(KEYS * v_dim)
            + Carver::size::<f32>(ROWS * KEYS)
            + Carver::size::<f32>(ROWS * v_dim)
            + 2 * Carver::size::<f32>(ROWS)
    }

    /// Row results of all splits: W sums, then the maximum and the sum of exponentials.
    fn partials(&self, cut: Cut) -> usize {
        if cut.splits == 1 {
            return 0;
        }
        self.batch * self.heads * self.rows * cut.splits * (self.v_dim + 2)
    }

    /// Scratch bytes that [`Attention::run`] needs with that many lanes (the most that `Par` will have).
    pub fn scratch_bytes(&self, lanes: usize) -> usize {
        let cut = self.cut(lanes.max(1));
        cut.lanes * self.lane_bytes() + Carver::size::<f32>(self.partials(cut))
    }
}

/// One lane's scratch.
struct Lane<'a> {
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    scores: &'a mut [f32],
    acc: &'a mut [f32],
    top: &'a mut [f32],
    sum: &'a mut [f32],
}

impl<'a> Lane<'a> {
    fn carve(bytes: &'a mut [u8], sizes: &Sizes) -> Self {
        let (dim, v_dim) = sizes.padded();
        let mut carver = Carver::new(bytes);
        let lane = Self {
            q: carver.take(ROWS * dim),
            k: carver.take(KEYS * dim),
            v: carver.take(KEYS * v_dim),
            scores: carver.take(ROWS * KEYS),
            acc: carver.take(ROWS * v_dim),
            top: carver.take(ROWS),
            sum: carver.take(ROWS),
        };
        // The padding of rows takes part in dot products, so it must be zero once and stays so.
        if dim != sizes.dim {
            lane.q.fill(0.0);
            lane.k.fill(0.0);
        }
        if v_dim != sizes.v_dim {
            lane.v.fill(0.0);
        }
        lane
    }
}

/// A task's part of the work.
#[derive(Clone, Copy)]
struct Task {
    b: usize,
    kv_head: usize,
    /// First row and number of rows, counted over the G x S rows of the key head.
    first: usize,
    rows: usize,
    split: usize,
}

impl<T: Float> Attention<'_, T> {
    /// Computes the output. `scratch`: [`Sizes::scratch_bytes`] for `lanes` lanes.
    pub fn run(&self, out: Output<'_, T>, tier: Tier, lanes: usize, par: Par<'_>, scratch: &mut [u8]) {
        let sizes = &self.sizes;
        let cut = sizes.cut(lanes.max(1));
        let tasks = sizes.batch * sizes.kv_heads * cut.row_tiles * cut.splits;
        if tasks == 0 || sizes.v_dim == 0 {
            return;
        }
        let lane_bytes = sizes.lane_bytes();
        let (lane_scratch, rest) = scratch.split_at_mut(cut.lanes * lane_bytes);
        let partials = Carver::new(rest).take::<f32>(sizes.partials(cut));
        let out = Shared { data: SharedMut::new(out.data), batch: out.batch, head: out.head, row: out.row };
        let lane_scratch = SharedMut::new(lane_scratch);
        let shared_partials = SharedMut::new(partials);
        let next = AtomicUsize::new(0);
        let work = |lane: usize| {
            // SAFETY: every lane has a piece of its own and runs once.
            let bytes = unsafe { lane_scratch.slice(lane * lane_bytes..(lane + 1) * lane_bytes) };
            let mut lane = Lane::carve(bytes, sizes);
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= tasks {
                    return;
                }
                self.task(&task(sizes, cut, i), cut, tier, &mut lane, &out, &shared_partials);
            }
        };
        if self.is_small() {
            work(0);
        } else {
            par.for_each(cut.lanes.min(par.width()).min(tasks), work);
        }
        if cut.splits > 1 {
            self.merge(cut, partials, &out);
        }
    }

    /// Whether waking other threads costs more than the work: about 20 us of one core.
    fn is_small(&self) -> bool {
        let s = &self.sizes;
        s.batch * s.heads * s.rows * self.longest * (s.dim + s.v_dim) < 1 << 17
    }

    fn task(
        &self,
        task: &Task,
        cut: Cut,
        tier: Tier,
        lane: &mut Lane<'_>,
        out: &Shared<'_, T>,
        partials: &SharedMut<'_, f32>,
    ) {
        let s = &self.sizes;
        let (dim, v_dim) = s.padded();
        let mut visible: [Range<usize>; ROWS] = std::array::from_fn(|_| 0..0);
        let (mut start, mut end) = (usize::MAX, 0);
        for (r, seen) in visible.iter_mut().enumerate().take(task.rows) {
            let (head, row) = self.head_row(task, r);
            let query = &mut lane.q[r * dim..r * dim + s.dim];
            (self.load_query)(task.b, head, row, query);
            query.iter_mut().for_each(|v| *v *= self.scale);
            *seen = (self.visible)(task.b, row);
            if seen.start < seen.end {
                (start, end) = (start.min(seen.start), end.max(seen.end));
            }
        }
        lane.acc[..task.rows * v_dim].fill(0.0);
        lane.top[..task.rows].fill(f32::NEG_INFINITY);
        lane.sum[..task.rows].fill(0.0);
        if start < end {
            let all = split(start..end, task.split, cut.splits);
            for start in all.clone().step_by(KEYS) {
                let keys = start..(start + KEYS).min(all.end);
                self.tile(task, tier, lane, &visible, keys);
            }
        }
        for r in 0..task.rows {
            let (head, row) = self.head_row(task, r);
            let acc = &mut lane.acc[r * v_dim..r * v_dim + s.v_dim];
            let (top, sum) = (lane.top[r], lane.sum[r]);
            if cut.splits == 1 {
                self.finish(head, acc, top, sum);
                // SAFETY: one task a row of the output.
                T::narrow(acc, unsafe { out.get(task.b, head, row, s.v_dim) });
            } else {
                let index = ((task.b * s.heads + head) * s.rows + row) * cut.splits + task.split;
                let at = index * (s.v_dim + 2);
                // SAFETY: one task a row and split.
                let piece = unsafe { partials.slice(at..at + s.v_dim + 2) };
                piece[..s.v_dim].copy_from_slice(acc);
                piece[s.v_dim..].copy_from_slice(&[top, sum]);
            }
        }
    }

    /// The query head and row of a task's row `r`.
    fn head_row(&self, task: &Task, r: usize) -> (usize, usize) {
        let s = &self.sizes;
        let (g, row) = ((task.first + r) / s.rows, (task.first + r) % s.rows);
        (task.kv_head * (s.heads / s.kv_heads) + g, row)
    }

    fn tile(&self, task: &Task, tier: Tier, lane: &mut Lane<'_>, visible: &[Range<usize>; ROWS], keys: Range<usize>) {
        let s = &self.sizes;
        let (dim, v_dim) = s.padded();
        let n = keys.len();
        let (k, k_stride) = stage(&self.keys, task, keys.clone(), s.dim, lane.k, dim);
        let (v, v_stride) = stage(&self.values, task, keys.clone(), s.v_dim, lane.v, v_dim);
        let tile = Tile {
            q: lane.q.as_ptr(),
            k,
            k_stride,
            v,
            v_stride,
            scores: lane.scores.as_mut_ptr(),
            acc: lane.acc.as_mut_ptr(),
            top: lane.top.as_mut_ptr(),
            sum: lane.sum.as_mut_ptr(),
            rows: task.rows,
            keys: n,
            dim,
            v_dim,
            softcap: self.softcap,
        };
        let adjust = |r: usize, scores: &mut [f32]| {
            let seen = &visible[r];
            let seen = seen.start.clamp(keys.start, keys.end)..seen.end.clamp(keys.start, keys.end);
            if seen.is_empty() {
                return 0..0;
            }
            let local = seen.start - keys.start..seen.end - keys.start;
            let scores = &mut scores[local.clone()];
            if let Some(bias) = self.bias {
                let (head, row) = self.head_row(task, r);
                bias(task.b, head, row, seen, scores);
            }
            local
        };
        // SAFETY: the lane's buffers have the sizes of `Lane::carve`; `stage` gave rows of `dim` and `v_dim` elements;
        // settings hold only tiers that the processor has.
        unsafe { tile::run(tier, &tile, &adjust) }
    }

    /// Divides a row's sums; a row that sees nothing becomes zero.
    fn finish(&self, head: usize, acc: &mut [f32], top: f32, sum: f32) {
        let (mut shrink, mut total) = (1.0, sum);
        if let Some(sink) = self.sink {
            let sink = sink(head);
            let high = top.max(sink);
            if high > f32::NEG_INFINITY {
                shrink = (top - high).exp();
                total = sum * shrink + (sink - high).exp();
            }
        }
        if total == 0.0 {
            acc.fill(0.0);
            return;
        }
        let by = shrink / total;
        acc.iter_mut().for_each(|v| *v *= by);
    }

    /// Joins the splits of every row.
    fn merge(&self, cut: Cut, partials: &mut [f32], out: &Shared<'_, T>) {
        let s = &self.sizes;
        let width = s.v_dim + 2;
        for (i, pieces) in partials.chunks_exact_mut(width * cut.splits).enumerate() {
            let (b, head, row) = (i / s.rows / s.heads, i / s.rows % s.heads, i % s.rows);
            let top = pieces.chunks_exact(width).fold(f32::NEG_INFINITY, |m, p| m.max(p[s.v_dim]));
            let (first, rest) = pieces.split_at_mut(width);
            let weight = |p: &[f32]| {
                if p[s.v_dim] == f32::NEG_INFINITY { 0.0 } else { (p[s.v_dim] - top).exp() }
            };
            let w = weight(first);
            let mut sum = first[s.v_dim + 1] * w;
            first[..s.v_dim].iter_mut().for_each(|v| *v *= w);
            for piece in rest.chunks_exact(width) {
                let w = weight(piece);
                sum += piece[s.v_dim + 1] * w;
                for (a, v) in first[..s.v_dim].iter_mut().zip(piece) {
                    *a += w * v;
                }
            }
            self.finish(head, &mut first[..s.v_dim], top, sum);
            // SAFETY: the loop over tasks is over and this one visits each row once.
            T::narrow(&first[..s.v_dim], unsafe { out.get(b, head, row, s.v_dim) });
        }
    }
}

/// The output, written by several tasks.
struct Shared<'a, T> {
    data: SharedMut<'a, T>,
    batch: usize,
    head: usize,
    row: usize,
}

impl<'a, T> Shared<'a, T> {
    /// # Safety
    /// No row is borrowed twice at a time.
    unsafe fn get(&self, b: usize, head: usize, s: usize, len: usize) -> &'a mut [T] {
        let at = b * self.batch + head * self.head + s * self.row;
        // SAFETY: the caller's promise.
        unsafe { self.data.slice(at..at + len) }
    }
}

fn task(sizes: &Sizes, cut: Cut, i: usize) -> Task {
    let (i, split) = (i / cut.splits, i % cut.splits);
    // Last row tiles first: under a causal mask they are the longest.
    let (i, tile) = (i / cut.row_tiles, cut.row_tiles - 1 - i % cut.row_tiles);
    let first = tile * ROWS;
    Task {
        b: i / sizes.kv_heads,
        kv_head: i % sizes.kv_heads,
        first,
        rows: (sizes.group_rows() - first).min(ROWS),
        split,
    }
}

/// Part `i` of `n` of a range, cut at multiples of the tile size.
fn split(all: Range<usize>, i: usize, n: usize) -> Range<usize> {
    let step = all.len().div_ceil(n).next_multiple_of(KEYS);
    let start = (all.start + i * step).min(all.end);
    start..(start + step).min(all.end)
}

/// Rows `keys` as f32 with rows of `padded` elements: the tensor itself where it is that already, else widened into `to`.
fn stage<T: Float>(
    rows: &Rows<'_, T>,
    task: &Task,
    keys: Range<usize>,
    dim: usize,
    to: &mut [f32],
    padded: usize,
) -> (*const f32, usize) {
    let (b, head, last) = (task.b, task.kv_head, keys.end - 1);
    if dim == padded {
        // The last row's bounds check covers the others: rows ascend.
        let whole = &rows.data[..b * rows.batch + head * rows.head + last * rows.row + dim];
        if let Some(data) = T::as_f32s(whole) {
            return (data[b * rows.batch + head * rows.head + keys.start * rows.row..].as_ptr(), rows.row);
        }
    }
    for (to, t) in to.chunks_exact_mut(padded).zip(keys) {
        T::widen(rows.get(b, head, t, dim), &mut to[..dim]);
    }
    (to.as_ptr(), padded)
}
