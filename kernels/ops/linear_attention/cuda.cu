// The recurrence over one token a sequence (decode), in one pass over the state, and over any tokens, in any layout.
// Blocks own columns of a head's state and read each element before they write it, so that both states may be one.
#include "delta_rule.cuh"

using namespace nxrt;

constexpr unsigned kThreads = 128;
constexpr unsigned kWarps = kThreads / kWarpSize;
// Columns of a head's state that a block of one token holds.
constexpr unsigned kColumns = 16;
// D at most, for one token.
constexpr unsigned kMostRows = 256;

// What sums over the rows of the state give for four columns; f k and f q stand for decayed keys and queries.
struct Sums {
    float seen[4];  // S^T (f k)
    float read[4];  // S^T (f q)
    float kq;
    float kk;
    float qq;
};
constexpr unsigned kSums = 11;

// Adds up over the lanes whose numbers differ in bits from `first_step` on.
NXRT_DEVICE void sum_lanes(Sums& s, unsigned first_step) {
    auto over = [=](float& x) {
        for (unsigned step = first_step; step < kWarpSize; step *= 2) x += __shfl_xor_sync(kFullMask, x, step);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        over(s.seen[i]);
        over(s.read[i]);
    }
    over(s.kq);
    over(s.kk);
    over(s.qq);
}

// One token's place: a block for each sequence, head and 16 columns.
struct Decode {
    uint32_t token, head, sequence_head, column;

    NXRT_DEVICE explicit Decode(const DeltaParams& p) {
        const uint32_t blocks = ceil_div(p.dv, kColumns);
        sequence_head = blockIdx.x / blocks;
        token = sequence_head / p.v_heads;
        head = sequence_head % p.v_heads;
        column = blockIdx.x % blocks * kColumns;
    }
};

// What four columns need besides the state: loaded early, used late.
template <class T>
struct Columns {
    uint32_t column;
    int count;
    Vec<T, 4> v;
    float beta;

    NXRT_DEVICE Columns(const DeltaParams& p, const Decode& at, uint32_t column)
        : column(column), count(static_cast<int>(p.dv) - static_cast<int>(column)) {
        const T* from = v_row<T>(p, at.token, at.head) + column;
        v = load_four(from, count, fours<T>(from, p.dv));
        beta = beta_factor<T>(p, at.token, at.head);
    }

    // Their d, times the key's inverse norm; writes their outputs.
    NXRT_DEVICE Vec<float, 4> finish(const DeltaParams& p, const Decode& at, const Sums& s, bool writes) const {
        const float k_inverse = inverse_norm(p, s.kk), q_inverse = inverse_norm(p, s.qq);
        Vec<float, 4> d, out;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            d[i] = to_float(v[i]);
            if (p.beta) d[i] = beta * (d[i] - s.seen[i] * k_inverse);
            out[i] = p.scale * q_inverse * fmaf(d[i], s.kq * k_inverse, s.read[i]);
            d[i] *= k_inverse;
        }
        T* to = static_cast<T*>(p.out);
        if (writes && to) {
            to += (uint64_t(at.token) * p.v_heads + at.head) * p.dv + column;
            store_four(to, narrow<T>(out), count, fours<T>(to, p.dv));
        }
        return d;
    }
};

// States [D, E]: a thread holds four columns of every 32nd row.
template <class T>
NXRT_DEVICE void step_k_major(const DeltaParams& p) {
    constexpr unsigned kSlices = 32, kRows = kMostRows / kSlices;
    NXRT_SHARED float shared[kWarps][4][kSums + 1];
    const Decode at(p);
    const unsigned group = threadIdx.x % 4, slice = threadIdx.x / 4;
    const uint32_t column = at.column + group * 4;
    const bool wide = state_fours(p, p.dv);
    const T* ks = k_row<T>(p, at.token, at.head);
    const T* qs = q_row<T>(p, at.token, at.head * p.q_heads / p.v_heads);
    const Columns<T> columns(p, at, column);
    Vec<float, 4> state[kRows];
    float k[kRows], q[kRows], f[kRows];
#pragma unroll
    for (unsigned n = 0; n < kRows; ++n) {
        const uint32_t row = slice + n * kSlices;
        const bool within = row < p.dk;
        state[n] = load_state_four(p, state_at(p, at.sequence_head, row, column), within ? columns.count : 0, wide);
        k[n] = within ? to_float(ks[row]) : 0.0f;
        q[n] = within ? to_float(qs[row]) : 0.0f;
    }
    const float one = decay_factor<T>(p, at.token, at.head, 0);
    Sums s = {};
#pragma unroll
    for (unsigned n = 0; n < kRows; ++n) {
        const uint32_t row = slice + n * kSlices;
        f[n] = p.per_key && row < p.dk ? decay_factor<T>(p, at.token, at.head, row) : one;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            state[n][i] *= f[n];
            s.seen[i] = fmaf(k[n], state[n][i], s.seen[i]);
            s.read[i] = fmaf(q[n], state[n][i], s.read[i]);
        }
        s.kq = fmaf(k[n], q[n], s.kq);
        s.kk = fmaf(k[n], k[n], s.kk);
        s.qq = fmaf(q[n], q[n], s.qq);
    }
    sum_lanes(s, 4);
    if (lane_id() < 4) {
        float* to = shared[warp_id()][group];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to[i] = s.seen[i];
            to[4 + i] = s.read[i];
        }
        to[8] = s.kq;
        to[9] = s.kk;
        to[10] = s.qq;
    }
    __syncthreads();
    s = {};
#pragma unroll
    for (unsigned w = 0; w < kWarps; ++w) {
        const float* from = shared[w][group];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s.seen[i] += from[i];
            s.read[i] += from[4 + i];
        }
        s.kq += from[8];
        s.kk += from[9];
        s.qq += from[10];
    }
    const Vec<float, 4> d = columns.finish(p, at, s, slice == 0);
    if (!p.present) return;
#pragma unroll
    for (unsigned n = 0; n < kRows; ++n) {
        const uint32_t row = slice + n * kSlices;
#pragma unroll
        for (int i = 0; i < 4; ++i) state[n][i] = fmaf(k[n], d[i], state[n][i]);
        store_state_four(p, state_at(p, at.sequence_head, row, column), state[n], row < p.dk ? columns.count : 0, wide);
    }
}

// States [E, D]: a warp holds four columns, a lane four rows of every 128.
template <class T>
NXRT_DEVICE void step_v_major(const DeltaParams& p) {
    constexpr unsigned kRows = kMostRows / (4 * kWarpSize);
    const Decode at(p);
    const uint32_t column = at.column + warp_id() * 4;
    const bool wide = state_fours(p, p.dk);
    const T* ks = k_row<T>(p, at.token, at.head);
    const T* qs = q_row<T>(p, at.token, at.head * p.q_heads / p.v_heads);
    const bool wide_k = fours<T>(ks, 0), wide_q = fours<T>(qs, 0);
    const Columns<T> columns(p, at, column);
    Vec<float, 4> state[kRows][4], k[kRows], q[kRows];
#pragma unroll
    for (unsigned n = 0; n < kRows; ++n) {
        const uint32_t row = lane_id() * 4 + n * 4 * kWarpSize;
        const int count = static_cast<int>(p.dk) - static_cast<int>(row);
#pragma unroll
        for (unsigned c = 0; c < 4; ++c)
            state[n][c] = load_state_four(p, state_at(p, at.sequence_head, row, column + c),
                                          column + c < p.dv ? count : 0, wide);
        k[n] = widen(load_four(ks + row, count, wide_k && p.dk % 4 == 0));
        q[n] = widen(load_four(qs + row, count, wide_q && p.dk % 4 == 0));
    }
    const float one = decay_factor<T>(p, at.token, at.head, 0);
    Sums s = {};
#pragma unroll
    for (unsigned n = 0; n < kRows; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t row = lane_id() * 4 + n * 4 * kWarpSize + i;
            const float f = p.per_key && row < p.dk ? decay_factor<T>(p, at.token, at.head, row) : one;
#pragma unroll
            for (unsigned c = 0; c < 4; ++c) {
                state[n][c][i] *= f;
                s.seen[c] = fmaf(k[n][i], state[n][c][i], s.seen[c]);
                s.read[c] = fmaf(q[n][i], state[n][c][i], s.read[c]);
            }
            s.kq = fmaf(k[n][i], q[n][i], s.kq);
            s.kk = fmaf(k[n][i], k[n][i], s.kk);
            s.qq = fmaf(q[n][i], q[n][i], s.qq);
        }
    }
    sum_lanes(s, 1);
    const Vec<float, 4> d = columns.finish(p, at, s, lane_id() == 0);
    if (!p.present) return;
#pragma unroll
    for (unsigned n = 0; n < kRows; ++n) {
        const uint32_t row = lane_id() * 4 + n * 4 * kWarpSize;
        const int count = static_cast<int>(p.dk) - static_cast<int>(row);
#pragma unroll
        for (unsigned c = 0; c < 4; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state[n][c][i] = fmaf(k[n][i], d[c], state[n][c][i]);
            store_state_four(p, state_at(p, at.sequence_head, row, column + c), state[n][c],
                             column + c < p.dv ? count : 0, wide);
        }
    }
}

// ---- any shape: a block for each sequence, head and 128 columns, a thread for each column ----

// One token's k or q in shared memory, divided by its norm where that is asked for.
template <class T>
NXRT_DEVICE void stage(const DeltaParams& p, const T* from, float* to, float* shared32) {
    float squares = 0.0f;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.dk; i += kThreads) {
        to[i] = to_float(from[i]);
        squares = fmaf(to[i], to[i], squares);
    }
    if (p.l2_norm) {
        const float inverse = inverse_norm(p, block_sum(squares, shared32));
        for (uint32_t i = threadIdx.x; i < p.dk; i += kThreads) to[i] *= inverse;
    }
    __syncthreads();
}

// The state in f32 lies in scratch, [D, E].
template <class T>
NXRT_DEVICE void any_tokens(const DeltaParams& p) {
    NXRT_SHARED float shared[kWarpSize];
    NXRT_DYNAMIC_SHARED(float, k);
    float* q = k + p.dk;
    float* f = q + p.dk;
    const uint32_t blocks = ceil_div(p.dv, kThreads);
    const uint32_t sequence_head = blockIdx.x / blocks;
    const uint32_t head = sequence_head % p.v_heads;
    const uint32_t column = blockIdx.x % blocks * kThreads + threadIdx.x;
    const bool live = column < p.dv;
    const Span tokens = span(p, sequence_head / p.v_heads);
    const uint32_t rows = live ? p.dk : 0, out_heads = max(p.q_heads, p.v_heads), readers = out_heads / p.v_heads;
    float* s = p.scratch + uint64_t(sequence_head) * p.dk * p.dv + column;
    for (uint32_t i = 0; i < rows; ++i) s[uint64_t(i) * p.dv] = load_state(p, state_at(p, sequence_head, i, column));
    for (uint32_t token = tokens.begin; token < tokens.end; ++token) {
        // `stage` starts with a barrier: nobody reads the last token's factors any more.
        stage<T>(p, k_row<T>(p, token, head), k, shared);
        for (uint32_t i = threadIdx.x; i < p.dk; i += kThreads) f[i] = decay_factor<T>(p, token, head, p.per_key ? i : 0);
        __syncthreads();
        float d = live ? to_float(v_row<T>(p, token, head)[column]) : 0.0f;
        if (p.beta) {
            float seen = 0.0f;
            for (uint32_t i = 0; i < rows; ++i) seen = fmaf(k[i] * f[i], s[uint64_t(i) * p.dv], seen);
            d = beta_factor<T>(p, token, head) * (d - seen);
        }
        for (uint32_t i = 0; i < rows; ++i) s[uint64_t(i) * p.dv] = fmaf(k[i], d, f[i] * s[uint64_t(i) * p.dv]);
        for (uint32_t reader = 0; reader < readers; ++reader) {
            const uint32_t out_head = head * readers + reader;
            stage<T>(p, q_row<T>(p, token, out_head * p.q_heads / out_heads), q, shared);
            float sum = 0.0f;
            for (uint32_t i = 0; i < rows; ++i) sum = fmaf(q[i], s[uint64_t(i) * p.dv], sum);
            T* out = static_cast<T*>(p.out);
            if (out && live) out[(uint64_t(token) * out_heads + out_head) * p.dv + column] = from_float<T>(p.scale * sum);
        }
    }
    if (!p.present) return;
    for (uint32_t i = 0; i < rows; ++i) store_state(p, state_at(p, sequence_head, i, column), s[uint64_t(i) * p.dv]);
}

NXRT_KERNEL(step_k_major_f32, DeltaParams, (step_k_major<float>), 128)
NXRT_KERNEL(step_k_major_f16, DeltaParams, (step_k_major<half>), 128)
NXRT_KERNEL(step_k_major_bf16, DeltaParams, (step_k_major<bf16>), 128)
NXRT_KERNEL(step_v_major_f32, DeltaParams, (step_v_major<float>), 128)
NXRT_KERNEL(step_v_major_f16, DeltaParams, (step_v_major<half>), 128)
NXRT_KERNEL(step_v_major_bf16, DeltaParams, (step_v_major<bf16>), 128)
NXRT_KERNEL(any_tokens_f32, DeltaParams, (any_tokens<float>), 128)
NXRT_KERNEL(any_tokens_f16, DeltaParams, (any_tokens<half>), 128)
NXRT_KERNEL(any_tokens_bf16, DeltaParams, (any_tokens<bf16>), 128)
