//! The recurrence that LinearAttention and GatedDeltaNet share, in f32.
//!
//! For each sequence and value head, with S the state, token by token:
//!
//! ```text
//! S' = diag(decay) S                       rules with decay
//! d  = beta (v - S'^T k)                   rules with delta; else d = v
//! S  = S' + k d^T
//! o  = scale S^T q                         for each query head that reads this state
//! ```
//!
//! Columns of S (the value axis) are independent, so a task is a sequence, a head and a block of columns
//! that fits the registers of one row and, over all rows, the first-level cache.

use crate::cpu::isa::{Isa, Job, dispatch, dot};
use crate::par::{Par, SharedMut};
use crate::settings::Tier;
use std::ops::Range;

/// One call's data. Letters: N tokens of all sequences, Hq, Hk, Hv heads, D key size, E value size.
pub struct Recurrence<'a> {
    /// D.
    pub dk: usize,
    /// E.
    pub dv: usize,
    /// Hq, of which Hv is a multiple or the other way round.
    pub q_heads: usize,
    /// Hk, of which Hv is a multiple.
    pub k_heads: usize,
    /// Hv.
    pub v_heads: usize,
    /// Factor of the output.
    pub scale: f32,
    /// [N, Hq, D]
    pub q: Rows<'a>,
    /// [N, Hk, D]
    pub k: Rows<'a>,
    /// [N, Hv, E]
    pub v: Rows<'a>,
    /// Factors of the state, [N, Hv] or [N, Hv, D]; `None` for rules without decay.
    pub decay: Option<&'a [f32]>,
    /// Whether `decay` has a factor for each key dim.
    pub decay_per_key: bool,
    /// [N, Hv] or [N, 1]; `None` for rules without delta.
    pub beta: Option<&'a [f32]>,
    /// Heads of `beta`.
    pub beta_heads: usize,
    /// The sequences' tokens.
    pub spans: Spans<'a>,
}

/// Heads of tokens whose rows lie `stride` elements apart.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// From the first token's first head on.
    pub data: &'a [f32],
    /// Elements from one token to the next.
    pub stride: usize,
}

impl<'a> Rows<'a> {
    /// Token `t`'s head `h` of `size` elements.
    #[inline(always)]
    fn head(&self, t: usize, h: usize, size: usize) -> &'a [f32] {
        &self.data[t * self.stride + h * size..][..size]
    }
}

/// Which tokens belong to which sequence.
#[derive(Clone, Copy)]
pub enum Spans<'a> {
    /// So many sequences of so many tokens.
    Uniform(usize, usize),
    /// Exclusive prefix sums, checked: not decreasing, from 0 to N.
    Ragged(&'a [i32]),
}

impl Spans<'_> {
    /// Number of sequences.
    pub fn len(&self) -> usize {
        match self {
            Self::Uniform(sequences, _) => *sequences,
            Self::Ragged(sums) => sums.len() - 1,
        }
    }

    /// The tokens of one.
    pub fn get(&self, sequence: usize) -> Range<usize> {
        match self {
            Self::Uniform(_, tokens) => sequence * tokens..(sequence + 1) * tokens,
            Self::Ragged(sums) => sums[sequence] as usize..sums[sequence + 1] as usize,
        }
    }
}

/// Where a head's state lies: [D, E] or [E, D], in any float format.
pub trait State: Sync {
    /// Reads columns `at.columns` of a head into `block` [D, W], zeros beyond them.
    fn load(&self, at: &At, block: &mut [f32], width: usize);
    /// Writes them back.
    fn store(&self, at: &At, block: &[f32], width: usize);
    /// The head's f32 [D, E] to read and to write (perhaps the same), if the state is stored so.
    fn direct(&self, at: &At) -> Option<(*const f32, *mut f32)>;
    /// The head's f32 [E, D] to read and to write (perhaps the same), if the state is stored so.
    fn transposed(&self, at: &At) -> Option<(*const f32, *mut f32)>;
}

/// A task: columns of one head of one sequence.
pub struct At {
    /// The sequence.
    pub sequence: usize,
    /// The value head.
    pub head: usize,
    /// Columns of the state.
    pub columns: Range<usize>,
}

/// The output's factor: `attribute`, or 1 / sqrt(D) when that is 0.
pub fn scale(attribute: f32, dk: usize) -> f32 {
    if attribute == 0.0 { 1.0 / (dk as f32).sqrt() } else { attribute }
}

/// Vectors in a block's row: as many as `dv` fills, at most 4.
fn row_vectors(lanes: usize, dv: usize) -> usize {
    match dv.div_ceil(lanes) {
        0 | 1 => 1,
        2 => 2,
        _ => 4,
    }
}

/// f32 lanes of `tier`.
fn lanes(tier: Tier) -> usize {
    match tier {
        Tier::Scalar => 4,
        Tier::Avx2 => 8,
        Tier::Avx512Vnni => 16,
    }
}

/// Whether a block of columns always fills its vectors, so that a state which is `direct` needs no copy.
pub fn whole_blocks(tier: Tier, dv: usize) -> bool {
    dv.is_multiple_of(lanes(tier) * row_vectors(lanes(tier), dv))
}

/// f32 elements that [`run`] needs in `blocks`; none when every state is `direct`, every sequence has one token
/// and [`whole_blocks`] holds.
pub fn block_elements(tier: Tier, sequences: usize, v_heads: usize, dk: usize, dv: usize) -> usize {
    let width = lanes(tier) * row_vectors(lanes(tier), dv);
    sequences * v_heads * dv.next_multiple_of(width) * dk
}

/// Runs every sequence and head. `out`: [N, max(Hq, Hv), E]; `blocks`: see [`block_elements`], contents arbitrary.
pub fn run(tier: Tier, par: Par<'_>, call: &Recurrence<'_>, state: &impl State, out: &mut [f32], blocks: &mut [f32]) {
    let vectors = row_vectors(lanes(tier), call.dv);
    let width = lanes(tier) * vectors;
    let row_blocks = call.dv.div_ceil(width);
    let needs_blocks = !blocks.is_empty();
    let (out, blocks) = (SharedMut::new(out), SharedMut::new(blocks));
    par.for_each(call.spans.len() * call.v_heads * row_blocks, |task| {
        let start = task % row_blocks * width;
        let at = At {
            sequence: task / row_blocks / call.v_heads,
            head: task / row_blocks % call.v_heads,
            columns: start..(start + width).min(call.dv),
        };
        let len = if needs_blocks { call.dk * width } else { 0 };
        // SAFETY: tasks are distinct, so are their pieces.
        let block = unsafe { blocks.slice(task * len..(task + 1) * len) };
        let task = Task { call, state, out, at, block };
        match vectors {
            1 => dispatch(tier, Columns::<1>(task)),
            2 => dispatch(tier, Columns::<2>(task)),
            _ => dispatch(tier, Columns::<4>(task)),
        }
    });
}

struct Task<'a> {
    call: &'a Recurrence<'a>,
    state: &'a dyn State,
    out: SharedMut<'a, f32>,
    at: At,
    block: &'a mut [f32],
}

/// A task whose rows take `R` vectors.
struct Columns<'a, const R: usize>(Task<'a>);

impl<const R: usize> Job for Columns<'_, R> {
    type Out = ();

    #[inline(always)]
    fn run<I: Isa>(self) {
        let Task { call, state, out, at, block } = self.0;
        let width = R * I::LANES;
        let tokens = call.spans.get(at.sequence);
        // One token: a pass over the state where it lies. More: a packed copy, which has no cache conflicts.
        if let Some((from, to)) = state.direct(&at)
            && tokens.len() == 1
            && at.columns.len() == width
        {
            let rows = Grid::<I, R> {
                // SAFETY: the columns are within the head's rows.
                from: unsafe { from.add(at.columns.start) },
                // SAFETY: as above.
                to: unsafe { to.add(at.columns.start) },
                stride: call.dv,
                isa: std::marker::PhantomData,
            };
            return token(call, &rows, &at, tokens.start, out);
        }
        if let Some((from, to)) = state.transposed(&at)
            && tokens.len() == 1
        {
            return token_transposed::<I>(call, (from, to), &at, tokens.start, out, block);
        }
        state.load(&at, block, width);
        let rows =
            Grid::<I, R> { from: block.as_ptr(), to: block.as_mut_ptr(), stride: width, isa: std::marker::PhantomData };
        for t in tokens {
            token(call, &rows, &at, t, out);
        }
        state.store(&at, block, width);
    }
}

/// Rows of `R` vectors, `stride` elements apart; `from` and `to` may be one.
struct Grid<I, const R: usize> {
    from: *const f32,
    to: *mut f32,
    stride: usize,
    isa: std::marker::PhantomData<I>,
}

impl<I: Isa, const R: usize> Grid<I, R> {
    #[inline(always)]
    fn read(base: *const f32) -> [I::V; R] {
        // A loop, not `array::from_fn`: a closure that is not inlined would lose the target features.
        let mut row = [I::splat(0.0); R];
        for (r, v) in row.iter_mut().enumerate() {
            // SAFETY: a row has `R` vectors; `token` stays within the rows.
            *v = unsafe { I::load(base.add(r * I::LANES)) };
        }
        row
    }

    #[inline(always)]
    fn write(base: *mut f32, row: &[I::V; R]) {
        for (r, v) in row.iter().enumerate() {
            // SAFETY: as in `read`.
            unsafe { I::store(base.add(r * I::LANES), *v) }
        }
    }

    /// `sum_i x[i] row[i]`, over the state before (or after) this token.
    #[inline(always)]
    fn combine(&self, base: *const f32, x: &[f32], factor: Option<&[f32]>) -> [I::V; R] {
        // Two sums, so that the additions do not wait for each other.
        let (mut even, mut odd) = ([I::splat(0.0); R], [I::splat(0.0); R]);
        for i in 0..x.len() / 2 {
            self.accumulate(base, 2 * i, x, factor, &mut even);
            self.accumulate(base, 2 * i + 1, x, factor, &mut odd);
        }
        if x.len() % 2 == 1 {
            self.accumulate(base, x.len() - 1, x, factor, &mut even);
        }
        for r in 0..R {
            even[r] = I::add(even[r], odd[r]);
        }
        even
    }

    /// `sum += x[i] row[i]`.
    #[inline(always)]
    fn accumulate(&self, base: *const f32, i: usize, x: &[f32], factor: Option<&[f32]>, sum: &mut [I::V; R]) {
        // SAFETY: there are as many rows as `x` has elements.
        let row = Self::read(unsafe { base.add(i * self.stride) });
        let x = I::splat(match factor {
            Some(f) => x[i] * f[i],
            None => x[i],
        });
        for r in 0..R {
            sum[r] = I::mul_add(x, row[r], sum[r]);
        }
    }

    /// `row[i] = factor_i row[i] + k[i] delta`, and `sum_i q[i] row[i]` of the new rows.
    #[inline(always)]
    fn update(&self, factor: Factor<'_>, k: &[f32], delta: &[I::V; R], q: &[f32]) -> [I::V; R] {
        let mut sums = [I::splat(0.0); R];
        for i in 0..k.len().min(q.len()) {
            let f = I::splat(match factor {
                Factor::One(f) => f,
                Factor::Each(f) => f[i],
            });
            let (k, q) = (I::splat(k[i]), I::splat(q[i]));
            // SAFETY: there are as many rows as `k` has elements.
            let mut row = Self::read(unsafe { self.from.add(i * self.stride) });
            for r in 0..R {
                row[r] = I::mul_add(k, delta[r], I::mul(f, row[r]));
                sums[r] = I::mul_add(q, row[r], sums[r]);
            }
            // SAFETY: as above.
            Self::write(unsafe { self.to.add(i * self.stride) }, &row);
        }
        sums
    }
}

impl<'a> Recurrence<'a> {
    #[inline(always)]
    fn factor(&self, t: usize, head: usize) -> Factor<'a> {
        let at = t * self.v_heads + head;
        match self.decay {
            None => Factor::One(1.0),
            Some(f) if self.decay_per_key => Factor::Each(&f[at * self.dk..][..self.dk]),
            Some(f) => Factor::One(f[at]),
        }
    }

    /// The key that value head `head` sees.
    #[inline(always)]
    fn key(&self, t: usize, head: usize) -> &'a [f32] {
        self.k.head(t, head * self.k_heads / self.v_heads, self.dk)
    }

    #[inline(always)]
    fn beta_of(&self, t: usize, head: usize) -> Option<f32> {
        let head = if self.beta_heads == 1 { 0 } else { head };
        self.beta.map(|beta| beta[t * self.beta_heads + head])
    }
}

/// A token's decay.
#[derive(Clone, Copy)]
enum Factor<'a> {
    One(f32),
    Each(&'a [f32]),
}

/// Columns `at.columns` of one token: updates the state and writes the outputs that read it.
#[inline(always)]
fn token<I: Isa, const R: usize>(call: &Recurrence<'_>, rows: &Grid<I, R>, at: &At, t: usize, out: SharedMut<'_, f32>) {
    let (dk, dv) = (call.dk, call.dv);
    let factor = call.factor(t, at.head);
    let k = call.key(t, at.head);
    let v = &call.v.head(t, at.head, dv)[at.columns.clone()];
    let mut delta = widen::<I, R>(v);
    if let Some(beta) = call.beta_of(t, at.head) {
        let beta = I::splat(beta);
        let seen = match factor {
            Factor::One(f) => {
                let sums = rows.combine(rows.from, k, None);
                sums.map(|s| I::mul(I::splat(f), s))
            }
            Factor::Each(f) => rows.combine(rows.from, k, Some(f)),
        };
        for r in 0..R {
            delta[r] = I::mul(beta, I::sub(delta[r], seen[r]));
        }
    }
    let out_heads = call.q_heads.max(call.v_heads);
    let readers = out_heads / call.v_heads;
    for reader in 0..readers {
        let out_head = at.head * readers + reader;
        let q = call.q.head(t, out_head * call.q_heads / out_heads, dk);
        let sums = if reader == 0 { rows.update(factor, k, &delta, q) } else { rows.combine(rows.to, q, None) };
        let start = (t * out_heads + out_head) * dv;
        // SAFETY: tasks write distinct heads or columns.
        let out = unsafe { out.slice(start + at.columns.start..start + at.columns.end) };
        narrow::<I, R>(sums.map(|s| I::mul(I::splat(call.scale), s)), out);
    }
}

/// Up to `R` vectors' worth of elements, zeros beyond.
#[inline(always)]
fn widen<I: Isa, const R: usize>(from: &[f32]) -> [I::V; R] {
    if from.len() == R * I::LANES {
        return Grid::<I, R>::read(from.as_ptr());
    }
    // 4 vectors of 16 lanes at most.
    let mut padded = [0f32; 64];
    padded[..from.len()].copy_from_slice(from);
    Grid::<I, R>::read(padded.as_ptr())
}

/// The leading elements of `R` vectors.
#[inline(always)]
fn narrow<I: Isa, const R: usize>(row: [I::V; R], to: &mut [f32]) {
    if to.len() == R * I::LANES {
        return Grid::<I, R>::write(to.as_mut_ptr(), &row);
    }
    let mut padded = [0f32; 64];
    Grid::<I, R>::write(padded.as_mut_ptr(), &row);
    to.copy_from_slice(&padded[..to.len()]);
}

/// [`token`] for a head that lies [E, D], where columns of the state are rows in memory and one query head
/// reads it. Each row is read once more from the first-level cache:
/// o = scale ((S row * decay) q + d (k q)) needs no second sum over the new row.
#[inline(always)]
fn token_transposed<I: Isa>(
    call: &Recurrence<'_>,
    (from, to): (*const f32, *mut f32),
    at: &At,
    t: usize,
    out: SharedMut<'_, f32>,
    scratch: &mut [f32],
) {
    let (dk, dv) = (call.dk, call.dv);
    let k = call.key(t, at.head);
    let q = call.q.head(t, at.head * call.q_heads / call.v_heads, dk);
    let v = call.v.head(t, at.head, dv);
    let factor = call.factor(t, at.head);
    let beta = call.beta_of(t, at.head);
    let (decayed_k, rest) = scratch.split_at_mut(dk);
    let decayed_q = &mut rest[..dk];
    for i in 0..dk {
        let f = match factor {
            Factor::One(f) => f,
            Factor::Each(f) => f[i],
        };
        decayed_k[i] = f * k[i];
        decayed_q[i] = f * q[i];
    }
    let k_q = dot::<I>(k, q);
    let start = (t * call.v_heads + at.head) * dv;
    // SAFETY: tasks write distinct heads or columns.
    let out = unsafe { out.slice(start + at.columns.start..start + at.columns.end) };
    for (column, out) in at.columns.clone().zip(out) {
        // SAFETY: the head has E rows of D elements; each row belongs to one task, and where both pointers
        // are one, the reads of the row end before its writes begin.
        let row = unsafe { std::slice::from_raw_parts(from.add(column * dk), dk) };
        let seen = if beta.is_some() { dot::<I>(row, decayed_k) } else { 0.0 };
        let read = dot::<I>(row, decayed_q);
        let delta = beta.unwrap_or(1.0) * (v[column] - seen);
        *out = call.scale * I::fma(delta, k_q, read);
        // SAFETY: as above.
        unsafe { decay_and_add::<I>((from.add(column * dk), to.add(column * dk)), factor, k, delta) };
    }
}

/// `to[i] = factor_i from[i] + k[i] delta`.
///
/// # Safety
/// Both pointers must be valid for `k.len()` elements; they may be one.
#[inline(always)]
unsafe fn decay_and_add<I: Isa>((from, to): (*const f32, *mut f32), factor: Factor<'_>, k: &[f32], delta: f32) {
    let whole = k.len() / I::LANES * I::LANES;
    for i in (0..whole).step_by(I::LANES) {
        // SAFETY: `i` and the lanes after it are within `k.len()`.
        unsafe {
            let f = match factor {
                Factor::One(f) => I::splat(f),
                Factor::Each(f) => I::load(f.as_ptr().add(i)),
            };
            let decayed = I::mul(f, I::load(from.add(i)));
            let sum = I::mul_add(I::load(k.as_ptr().add(i)), I::splat(delta), decayed);
            I::store(to.add(i), sum);
        }
    }
    for i in whole..k.len() {
        let f = match factor {
            Factor::One(f) => f,
            Factor::Each(f) => f[i],
        };
        // SAFETY: `i` is within `k.len()`.
        unsafe { *to.add(i) = I::fma(k[i], delta, f * *from.add(i)) };
    }
}
