//! The recurrence on CUDA devices, for LinearAttention and GatedDeltaNet: one pass over the state for one token a
//! sequence; for more, products of matrices over chunks of tokens, or a scan; a plain loop for what these do not take.

use super::{Rule, recurrence};
use crate::build::BuildCx;
use crate::cuda::{DevPtr, Device, DeviceKernel, LaunchCx, linear, suffix};
use crate::kernel_params;
use abi::cuda::{Function, LaunchShape};
use abi::{DType, Result};
use std::sync::Arc;

kernel_params! {
    /// As in `delta_rule.cuh`.
    struct DeltaParams {
        q: DevPtr,
        k: DevPtr,
        v: DevPtr,
        decay: DevPtr,
        beta: DevPtr,
        a_log: DevPtr,
        dt_bias: DevPtr,
        cu_seqlens: DevPtr,
        past: DevPtr,
        present: DevPtr,
        out: DevPtr,
        scratch: DevPtr,
        q_stride: u64,
        k_stride: u64,
        v_stride: u64,
        tokens: u32,
        sequences: u32,
        q_heads: u32,
        k_heads: u32,
        v_heads: u32,
        dk: u32,
        dv: u32,
        beta_heads: u32,
        state_type: u32,
        v_major: u32,
        per_key: u32,
        f32_gates: u32,
        gate: u32,
        bias_per_key: u32,
        sigmoid_beta: u32,
        l2_norm: u32,
        scale: f32,
        lower_bound: f32,
    }
}

/// One call, as `delta_rule.cuh` describes its parts.
pub struct Call {
    /// Addresses and element strides from token to token.
    pub q: (DevPtr, usize),
    /// As `q`.
    pub k: (DevPtr, usize),
    /// As `q`.
    pub v: (DevPtr, usize),
    /// Null: no decay.
    pub decay: DevPtr,
    /// Null: no delta.
    pub beta: DevPtr,
    /// Null: sequences of one length.
    pub cu_seqlens: DevPtr,
    /// Null: zeros.
    pub past: DevPtr,
    /// Null: nobody reads it.
    pub present: DevPtr,
    /// Null: nobody reads it.
    pub out: DevPtr,
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Number of sequences.
    pub sequences: usize,
    /// Query, key and value heads.
    pub heads: [usize; 3],
    /// D.
    pub dk: usize,
    /// E.
    pub dv: usize,
    /// 1, or as many as value heads.
    pub beta_heads: usize,
    /// Of the states.
    pub state: DType,
    /// States are [E, D].
    pub v_major: bool,
    /// The decay has an element for each key dim.
    pub per_key: bool,
    /// The factor of the output, not 0.
    pub scale: f32,
    /// What GatedDeltaNet has fused.
    pub gates: Gates,
}

/// Gates and norms that are computed with the recurrence.
#[derive(Default)]
pub struct Gates {
    /// Decay and beta are f32.
    pub f32: bool,
    /// How the log decay is made: 0 given, 1 softplus, 2 sigmoid.
    pub kind: u32,
    /// `[Hv]`
    pub a_log: DevPtr,
    /// `[Hv]` or [Hv, D]
    pub dt_bias: DevPtr,
    /// Whether `dt_bias` is [Hv, D].
    pub bias_per_key: bool,
    /// The sigmoid gate's factor.
    pub lower_bound: f32,
    /// beta is the sigmoid of its input.
    pub sigmoid_beta: bool,
    /// q and k are divided by their norms.
    pub l2_norm: bool,
}

/// The kernels for one type of query.
pub struct Kernels {
    k_major: Function,
    v_major: Function,
    any: Function,
    coefficients: Function,
    /// By D at most.
    scans: [(usize, Function); 3],
    /// For 16-bit queries.
    chunks: Option<Chunks>,
}

/// The kernels of `chunks_prepare.cu` and `chunks_walk.cu`.
struct Chunks {
    /// By D.
    kernels: [(usize, Prepare, Walk); 3],
    /// Whether a state in two parts of the queries' type is as good as one of f32: two of bf16 have 16 bits.
    exact: bool,
}

/// What does not depend on the state, for all chunks.
type Prepare = Function;
/// What does, chunk by chunk.
type Walk = Function;

/// Threads of a block, but for those of chunks.
const THREADS: u32 = 128;
/// Columns of the state in a block, but for the plain loop's.
const COLUMNS: usize = 16;
/// What is kept of each head's chunk of tokens.
struct Record {
    tokens: usize,
    floats: usize,
}
/// As in `scan.cu`.
const SCAN: Record = Record { tokens: 4, floats: 48 };
/// As in `chunks.cuh`.
const WALK: Record = Record { tokens: 32, floats: 1636 };
/// Threads of a block of `prepare` and of `walk`.
const PREPARERS: u32 = 32;
const WALKERS: u32 = 160;
/// Rows of the state from which on only the plain loop serves.
const MOST_ROWS: usize = 256;

impl Record {
    /// Records of all chunks and heads.
    fn count(&self, call: &Call) -> usize {
        (call.tokens / self.tokens + call.sequences) * call.heads[2]
    }

    fn scratch(&self, cx: &mut LaunchCx<'_>, call: &Call) -> DevPtr {
        cx.scratch(self.count(call) * self.floats * size_of::<f32>())
    }
}

impl Chunks {
    fn new(device: &Device, dtype: DType) -> Result<Self> {
        let suffix = suffix(dtype);
        let kernels = |rows: usize| -> Result<_> {
            let function = |name: &str| {
                device.function(&format!("linear_attention_chunks_{name}"), &format!("{name}_{rows}_{suffix}"))
            };
            Ok((rows, function("prepare")?, function("walk")?))
        };
        Ok(Self { kernels: [kernels(64)?, kernels(128)?, kernels(256)?], exact: dtype == DType::F16 })
    }

    /// The kernels for `call`, and the second one's shared memory; none where only the scan fits.
    fn of(&self, cx: &LaunchCx<'_>, call: &Call) -> Option<(&Prepare, &Walk, u32)> {
        let (_, prepare, walk) = self.kernels.iter().find(|(rows, ..)| call.dk == *rows)?;
        let shared = walk_shared(call.dk) as u32;
        let exact = self.exact || call.state != DType::F32;
        (exact && call.tokens > 0 && call.dv.is_multiple_of(COLUMNS) && shared <= cx.device().shared_limit())
            .then_some((prepare, walk, shared))
    }
}

/// `sizeof(Shared)` in `chunks_walk.cu`.
fn walk_shared(dk: usize) -> usize {
    let stage = WALK.tokens * (2 * (dk + 8) + COLUMNS) * size_of::<u16>() + WALK.floats * size_of::<f32>();
    // A pair of warps has eight columns: those of the state and of its change in two 16-bit parts, and of two f32 matrices.
    let parts = |rows: usize| 2 * rows * 8 * size_of::<u16>() + 16;
    let pair = parts(dk) + parts(WALK.tokens) + 2 * WALK.tokens * 8 * size_of::<f32>();
    3 * stage + 2 * pair + 128 * size_of::<f32>()
}

impl Kernels {
    /// Finds the kernels for queries of `dtype`.
    pub fn new(device: &Device, dtype: DType) -> Result<Self> {
        let suffix = suffix(dtype);
        let function = |name: &str| device.function("linear_attention", &format!("{name}_{suffix}"));
        let scan = |name: &str| device.function("linear_attention_scan", &format!("{name}_{suffix}"));
        Ok(Self {
            k_major: function("step_k_major")?,
            v_major: function("step_v_major")?,
            any: function("any_tokens")?,
            coefficients: scan("coefficients")?,
            scans: [(64, scan("scan_64")?), (128, scan("scan_128")?), (256, scan("scan_256")?)],
            chunks: (dtype != DType::F32).then(|| Chunks::new(device, dtype)).transpose()?,
        })
    }

    /// Writes the launches of `call` down.
    pub fn push(&self, cx: &mut LaunchCx<'_>, call: &Call) -> Result<()> {
        let [q_heads, k_heads, v_heads] = call.heads;
        let heads = call.sequences * v_heads;
        let mut params = params(cx, call)?;
        if heads * call.dk * call.dv == 0 {
            return Ok(());
        }
        let one_reader = q_heads <= v_heads;
        let columns = call.dv.div_ceil(COLUMNS);
        if one_reader && call.dk <= MOST_ROWS && call.tokens == call.sequences && call.cu_seqlens.is_null() {
            let function = if call.v_major { &self.v_major } else { &self.k_major };
            return cx.push(function, linear(heads * columns, THREADS), &params);
        }
        if one_reader && !call.per_key {
            if let Some((prepare, walk, shared)) = self.chunks.as_ref().and_then(|chunks| chunks.of(cx, call)) {
                params.scratch = WALK.scratch(cx, call);
                cx.push(prepare, linear(WALK.count(call), PREPARERS), &params)?;
                return cx.push(walk, LaunchShape { shared, ..linear(heads * columns, WALKERS) }, &params);
            }
            if let Some((most, scan)) = self.scans.iter().find(|(most, _)| call.dk <= *most) {
                params.scratch = SCAN.scratch(cx, call);
                let warps = THREADS as usize / 32;
                if call.tokens > 0 {
                    cx.push(&self.coefficients, linear(SCAN.count(call).div_ceil(warps), THREADS), &params)?;
                }
                let tokens = if *most > 128 { 8 } else { 16 };
                let tile = tokens * (2 * most + COLUMNS) + tokens / SCAN.tokens * SCAN.floats;
                let shared = (2 * tile * size_of::<f32>()) as u32;
                return cx.push(scan, LaunchShape { shared, ..linear(heads * columns, THREADS) }, &params);
            }
        }
        params.scratch = cx.scratch(heads * call.dk * call.dv * size_of::<f32>());
        let mut shape = linear(heads * call.dv.div_ceil(THREADS as usize), THREADS);
        let shared = 3 * call.dk * size_of::<f32>();
        if shared > cx.device().shared_limit() as usize {
            return Err(cx.error("input 0 (query), key size", call.dk, "one that fits shared memory thrice"));
        }
        debug_assert!(k_heads > 0);
        shape.shared = shared as u32;
        cx.push(&self.any, shape, &params)
    }
}

fn params(cx: &LaunchCx<'_>, call: &Call) -> Result<DeltaParams> {
    let small = |n: usize| {
        let too_large = || cx.error("the inputs, a dim", n, "less than 2^31");
        u32::try_from(n).ok().filter(|&n| n < 1 << 31).ok_or_else(too_large)
    };
    let [q_heads, k_heads, v_heads] = call.heads;
    let gates = &call.gates;
    Ok(DeltaParams {
        q: call.q.0,
        k: call.k.0,
        v: call.v.0,
        decay: call.decay,
        beta: call.beta,
        a_log: gates.a_log,
        dt_bias: gates.dt_bias,
        cu_seqlens: call.cu_seqlens,
        past: call.past,
        present: call.present,
        out: call.out,
        scratch: DevPtr::NULL,
        q_stride: call.q.1 as u64,
        k_stride: call.k.1 as u64,
        v_stride: call.v.1 as u64,
        tokens: small(call.tokens)?,
        sequences: small(call.sequences)?,
        q_heads: small(q_heads)?,
        k_heads: small(k_heads)?,
        v_heads: small(v_heads)?,
        dk: small(call.dk)?,
        dv: small(call.dv)?,
        beta_heads: small(call.beta_heads)?,
        state_type: match call.state {
            DType::F32 => 0,
            DType::F16 => 1,
            _ => 2,
        },
        v_major: u32::from(call.v_major),
        per_key: u32::from(call.per_key),
        f32_gates: u32::from(gates.f32),
        gate: gates.kind,
        bias_per_key: u32::from(gates.bias_per_key),
        sigmoid_beta: u32::from(gates.sigmoid_beta),
        l2_norm: u32::from(gates.l2_norm),
        scale: call.scale,
        lower_bound: gates.lower_bound,
    })
}

pub(super) fn build(cx: &mut BuildCx, device: &Arc<Device>) -> Result<Box<dyn DeviceKernel>> {
    let dtype = cx.required(0)?.dtype;
    let (q_heads, v_heads) = super::head_counts(cx)?;
    Ok(Box::new(LinearAttention {
        kernels: Kernels::new(device, dtype)?,
        rule: Rule::of(cx),
        q_heads,
        v_heads,
        scale: cx.float("scale", 0.0),
        f32: dtype == DType::F32,
    }))
}

struct LinearAttention {
    kernels: Kernels,
    rule: Rule,
    q_heads: usize,
    v_heads: usize,
    /// 0: 1 / sqrt(D).
    scale: f32,
    f32: bool,
}

impl DeviceKernel for LinearAttention {
    fn launch(&self, cx: &mut LaunchCx<'_>) -> Result<()> {
        let [query, key, value] = [0, 1, 2].map(|slot| cx.required(slot));
        let (dk, dv) = (query.shape[2] / self.q_heads, value.shape[2] / self.v_heads);
        let decay = cx.input(4).filter(|_| self.rule.decay);
        let beta = cx.input(5).filter(|_| self.rule.delta);
        let states = [cx.input(3), cx.output(1)];
        let call = Call {
            q: (query.ptr, query.shape[2]),
            k: (key.ptr, key.shape[2]),
            v: (value.ptr, value.shape[2]),
            decay: decay.map_or(DevPtr::NULL, |t| t.ptr),
            beta: beta.map_or(DevPtr::NULL, |t| t.ptr),
            cu_seqlens: DevPtr::NULL,
            past: cx.input_ptr(3),
            present: cx.output_ptr(1),
            out: cx.output_ptr(0),
            tokens: query.shape[0] * query.shape[1],
            sequences: query.shape[0],
            heads: [self.q_heads, key.shape[2] / dk, self.v_heads],
            dk,
            dv,
            beta_heads: beta.map_or(0, |beta| beta.shape[2]),
            state: states.into_iter().flatten().next().map_or(DType::F32, |state| state.dtype),
            v_major: false,
            per_key: decay.is_some_and(|decay| decay.shape[2] != self.v_heads),
            scale: recurrence::scale(self.scale, dk),
            gates: Gates { f32: self.f32, ..Gates::default() },
        };
        self.kernels.push(cx, &call)
    }
}
