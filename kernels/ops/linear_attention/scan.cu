// The recurrence over many tokens, for decays of a factor a head and states that one query head reads.
//
// Four tokens at a time (a chunk): with F_c the product of the decays up to token c of the chunk,
//   d_c = beta_c (v_c - F_c S^T k_c - sum_{i<c} (F_c / F_i) (k_c k_i) d_i)
//   o_c = scale (F_c S^T q_c + sum_{i<=c} (F_c / F_i) (q_c k_i) d_i)
//   S   = F_3 S + sum_c (F_3 / F_c) k_c d_c^T
// so that the state is read and written once a chunk, and its sums are reduced once. What does not depend on the state is
// made by `coefficients`, all chunks side by side; `scan` then walks a sequence with the state in registers.
#include "delta_rule.cuh"

using namespace nxrt;

constexpr unsigned kChunk = 4;

// The coefficients of a chunk, [a | beta | w | r | A | B] with A and B 4 x 4:
//   d_c = beta_c v_c - a_c (S^T k_c) - sum_{i<c} A_ci d_i
//   o_c = r_c (S^T q_c) + sum_{i<=c} B_ci d_i
//   S   = A_00 S + sum_c k_c (w_c d_c)^T           (A's own first row is empty)
enum Record : unsigned { kA = 0, kBeta = 4, kW = 8, kR = 12, kInner = 16, kOuter = 32, kRecord = 48 };

// A warp for each head of each record.
template <class T>
NXRT_DEVICE void coefficients(const DeltaParams& p) {
    const uint64_t warp = uint64_t(blockIdx.x) * (blockDim.x / kWarpSize) + warp_id();
    const uint32_t record = static_cast<uint32_t>(warp / p.v_heads);
    const uint32_t head = static_cast<uint32_t>(warp % p.v_heads);
    if (record >= chunk_count(p, kChunk)) return;
    const Span tokens = chunk_span(p, record, kChunk);
    if (tokens.begin == tokens.end) return;

    const uint32_t first = tokens.begin, count = tokens.end - first;
    const uint32_t q_head = head * p.q_heads / p.v_heads;
    float kk[kChunk][kChunk] = {}, qk[kChunk][kChunk] = {}, qq[kChunk] = {};
    for (uint32_t i = lane_id(); i < p.dk; i += kWarpSize) {
        float k[kChunk], q[kChunk];
#pragma unroll
        for (unsigned c = 0; c < kChunk; ++c) {
            k[c] = c < count ? to_float(k_row<T>(p, first + c, head)[i]) : 0.0f;
            q[c] = c < count ? to_float(q_row<T>(p, first + c, q_head)[i]) : 0.0f;
        }
#pragma unroll
        for (unsigned c = 0; c < kChunk; ++c) {
            qq[c] = fmaf(q[c], q[c], qq[c]);
#pragma unroll
            for (unsigned j = 0; j <= c; ++j) {
                kk[c][j] = fmaf(k[c], k[j], kk[c][j]);
                qk[c][j] = fmaf(q[c], k[j], qk[c][j]);
            }
        }
    }
    float f = 1.0f, beta = 0.0f;
    if (lane_id() < count) {
        f = decay_factor<T>(p, first + lane_id(), head, 0);
        beta = beta_factor<T>(p, first + lane_id(), head);
    }
    float factors[kChunk], betas[kChunk], k_inverse[kChunk], q_inverse[kChunk];
#pragma unroll
    for (unsigned c = 0; c < kChunk; ++c) {
        factors[c] = __shfl_sync(kFullMask, f, c);
        betas[c] = __shfl_sync(kFullMask, beta, c);
#pragma unroll
        for (unsigned j = 0; j <= c; ++j) {
            kk[c][j] = warp_sum(kk[c][j]);
            qk[c][j] = warp_sum(qk[c][j]);
        }
        k_inverse[c] = inverse_norm(p, kk[c][c]);
        q_inverse[c] = inverse_norm(p, p.l2_norm ? warp_sum(qq[c]) : 0.0f);
    }
    if (lane_id() != 0) return;
    float r[kRecord] = {};
#pragma unroll
    for (unsigned c = 0; c < kChunk; ++c) {
        // The products of factors after j up to c, for falling j.
        float product = 1.0f;
#pragma unroll
        for (unsigned j = c + 1; j-- > 0;) {
            const float k_scale = product * k_inverse[j];
            if (j < c && p.beta) r[kInner + 4 * c + j] = betas[c] * k_scale * k_inverse[c] * kk[c][j];
            if (c < count) r[kOuter + 4 * c + j] = p.scale * k_scale * q_inverse[c] * qk[c][j];
            if (c == kChunk - 1 && j < count) r[kW + j] = k_scale;
            product *= factors[j];
        }
        if (c == kChunk - 1) r[kInner] = product;
        if (p.beta) r[kA + c] = betas[c] * product * k_inverse[c];
        r[kBeta + c] = betas[c];
        if (c < count) r[kR + c] = p.scale * product * q_inverse[c];
    }
    float* to = p.scratch + warp * kRecord;
#pragma unroll
    for (unsigned i = 0; i < kRecord; i += 4) store_vec<float, 4>(to + i, {r[i], r[i + 1], r[i + 2], r[i + 3]});
}

// Columns of a head's state that one block holds; eight lanes share a column, each with a slice of its rows.
constexpr unsigned kColumns = 16;
constexpr unsigned kThreads = 128;

// What a block reads for some tokens, as f32 in shared memory. R: rows of a lane.
template <int R>
struct Tile {
    static constexpr unsigned kRows = 8 * R;
    static constexpr unsigned kTokens = R > 16 ? 8 : 16;
    float k[kTokens][kRows];
    float q[kTokens][kRows];
    float v[kTokens][kColumns];
    float records[kTokens / kChunk][kRecord];
};

// A tile on its way from global memory, in the registers of all threads.
template <class T, int R>
struct Fetch {
    using To = Tile<R>;
    static constexpr unsigned kPieces = To::kRows / 4;
    static constexpr unsigned kLoads = To::kTokens * kPieces / kThreads;
    Vec<T, 4> k[kLoads], q[kLoads], v;
    Vec<float, 4> record;

    NXRT_DEVICE void load(const DeltaParams& p, const Span& tokens, uint32_t first, uint64_t record_at, uint32_t head,
                          uint32_t column, bool wide) {
        const T* ks = k_row<T>(p, first, head);
        const T* qs = q_row<T>(p, first, head * p.q_heads / p.v_heads);
#pragma unroll
        for (unsigned n = 0; n < kLoads; ++n) {
            const unsigned item = threadIdx.x + n * kThreads, token = item / kPieces, row = item % kPieces * 4;
            const int count = first + token < tokens.end ? static_cast<int>(p.dk) - static_cast<int>(row) : 0;
            k[n] = load_four(ks + token * p.k_stride + row, count, wide);
            q[n] = load_four(qs + token * p.q_stride + row, count, wide);
        }
        const unsigned token = threadIdx.x / (kColumns / 4), at = column + threadIdx.x % (kColumns / 4) * 4;
        const bool within = token < To::kTokens && first + token < tokens.end;
        v = load_four(v_row<T>(p, first + token, head) + at, within ? static_cast<int>(p.dv) - static_cast<int>(at) : 0, wide);
        const unsigned chunk = threadIdx.x / (kRecord / 4);
        record = {};
        if (chunk < To::kTokens / kChunk && first + chunk * kChunk < tokens.end)
            record = load_vec<float, 4>(p.scratch + ((record_at + chunk) * p.v_heads + head) * kRecord +
                                        threadIdx.x % (kRecord / 4) * 4);
    }

    NXRT_DEVICE void store(To& tile) const {
#pragma unroll
        for (unsigned n = 0; n < kLoads; ++n) {
            const unsigned item = threadIdx.x + n * kThreads, token = item / kPieces, row = item % kPieces * 4;
            store_vec<float, 4>(&tile.k[token][row], widen(k[n]));
            store_vec<float, 4>(&tile.q[token][row], widen(q[n]));
        }
        const unsigned token = threadIdx.x / (kColumns / 4);
        if (token < To::kTokens) store_vec<float, 4>(&tile.v[token][threadIdx.x % (kColumns / 4) * 4], widen(v));
        const unsigned chunk = threadIdx.x / (kRecord / 4);
        if (chunk < To::kTokens / kChunk)
            store_vec<float, 4>(&tile.records[chunk][threadIdx.x % (kRecord / 4) * 4], record);
    }
};

// Sums eight values over the lanes that share a column: lane slice 0..3 gets seen[slice], slice 4..7 read[slice - 4].
NXRT_DEVICE float reduce(const float (&seen)[kChunk], const float (&read)[kChunk]) {
    const bool upper = lane_id() & 16, high = lane_id() & 8, odd = lane_id() & 4;
    float a[4], b[2];
#pragma unroll
    for (int c = 0; c < 4; ++c)
        a[c] = (upper ? read[c] : seen[c]) + __shfl_xor_sync(kFullMask, upper ? seen[c] : read[c], 16);
#pragma unroll
    for (int c = 0; c < 2; ++c) b[c] = (high ? a[c + 2] : a[c]) + __shfl_xor_sync(kFullMask, high ? a[c] : a[c + 2], 8);
    return (odd ? b[1] : b[0]) + __shfl_xor_sync(kFullMask, odd ? b[0] : b[1], 4);
}

// A chunk: advances this lane's rows of the state, and gives output c of the column to lane slice 4 + c.
template <int R>
NXRT_DEVICE float step(const Tile<R>& tile, unsigned chunk, unsigned column, float (&s)[R]) {
    const unsigned slice = lane_id() / 4, first = chunk * kChunk;
    float seen[kChunk] = {}, read[kChunk] = {};
    // The keys stay for the update where registers allow.
    constexpr bool kKeep = R <= 16;
    Vec<float, 4> keys[kKeep ? R / 4 : 1][kChunk];
#pragma unroll
    for (int n = 0; n < R / 4; ++n) {
#pragma unroll
        for (unsigned c = 0; c < kChunk; ++c) {
            const Vec<float, 4> k = load_vec<float, 4>(&tile.k[first + c][n * 32 + slice * 4]);
            const Vec<float, 4> q = load_vec<float, 4>(&tile.q[first + c][n * 32 + slice * 4]);
            if (kKeep) keys[n][c] = k;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                seen[c] = fmaf(k[i], s[4 * n + i], seen[c]);
                read[c] = fmaf(q[i], s[4 * n + i], read[c]);
            }
        }
    }
    const float sum = reduce(seen, read);
    const float* r = tile.records[chunk];
    const Vec<float, 4> a = load_vec<float, 4>(r + kA), beta = load_vec<float, 4>(r + kBeta);
    float d[kChunk];
#pragma unroll
    for (unsigned c = 0; c < kChunk; ++c) {
        const Vec<float, 4> inner = load_vec<float, 4>(r + kInner + 4 * c);
        const float known = __shfl_sync(kFullMask, sum, c * 4 + column % 4);
        d[c] = fmaf(-a[c], known, beta[c] * tile.v[first + c][column]);
#pragma unroll
        for (unsigned j = 0; j < c; ++j) d[c] = fmaf(-inner[j], d[j], d[c]);
    }
    const Vec<float, 4> outer = load_vec<float, 4>(r + kOuter + slice % 4 * 4);
    float out = r[kR + slice % 4] * sum;
#pragma unroll
    for (unsigned c = 0; c < kChunk; ++c) out = fmaf(outer[c], d[c], out);
    const Vec<float, 4> w = load_vec<float, 4>(r + kW);
    const float decay = r[kInner];
#pragma unroll
    for (unsigned c = 0; c < kChunk; ++c) d[c] *= w[c];
#pragma unroll
    for (int n = 0; n < R / 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[4 * n + i] *= decay;
#pragma unroll
        for (unsigned c = 0; c < kChunk; ++c) {
            const Vec<float, 4> k = kKeep ? keys[kKeep ? n : 0][c] : load_vec<float, 4>(&tile.k[first + c][n * 32 + slice * 4]);
#pragma unroll
            for (int i = 0; i < 4; ++i) s[4 * n + i] = fmaf(k[i], d[c], s[4 * n + i]);
        }
    }
    return out;
}

// A block for each sequence, head and 16 columns; D at most 8 R.
template <class T, int R>
NXRT_DEVICE void scan(const DeltaParams& p) {
    NXRT_DYNAMIC_SHARED(Tile<R>, tiles);
    const uint32_t blocks = ceil_div(p.dv, kColumns);
    const uint32_t sequence_head = blockIdx.x / blocks;
    const uint32_t head = sequence_head % p.v_heads, sequence = sequence_head / p.v_heads;
    const uint32_t first_column = blockIdx.x % blocks * kColumns;
    const uint32_t column = warp_id() * 4 + lane_id() % 4, state_column = first_column + column;
    const unsigned slice = lane_id() / 4;
    const Span tokens = span(p, sequence);
    const uint64_t records = first_chunk(tokens, sequence, kChunk);
    const bool wide = fours<T>(p.q, p.q_stride) && fours<T>(p.k, p.k_stride) && fours<T>(p.v, p.v_stride) &&
                      p.dk % 4 == 0 && p.dv % 4 == 0;

    float s[R];
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const uint32_t row = i / 4 * 32 + slice * 4 + i % 4;
        const bool within = row < p.dk && state_column < p.dv;
        s[i] = within ? load_state(p, state_at(p, sequence_head, row, state_column)) : 0.0f;
    }
    constexpr unsigned kTokens = Tile<R>::kTokens;
    Fetch<T, R> fetch;
    fetch.load(p, tokens, tokens.begin, records, head, first_column, wide);
    fetch.store(tiles[0]);
    __syncthreads();
    unsigned buffer = 0;
    for (uint32_t first = tokens.begin; first < tokens.end; first += kTokens, buffer ^= 1) {
        const uint32_t next = first + kTokens;
        const bool more = next < tokens.end;
        // On their way while this tile is worked on.
        if (more) fetch.load(p, tokens, next, records + (next - tokens.begin) / kChunk, head, first_column, wide);
        for (unsigned chunk = 0; chunk < kTokens / kChunk && first + chunk * kChunk < tokens.end; ++chunk) {
            const float out = step<R>(tiles[buffer], chunk, column, s);
            const uint32_t token = first + chunk * kChunk + slice % 4;
            if (p.out && slice >= 4 && token < tokens.end && state_column < p.dv)
                static_cast<T*>(p.out)[(uint64_t(token) * p.v_heads + head) * p.dv + state_column] = from_float<T>(out);
        }
        if (more) fetch.store(tiles[buffer ^ 1]);
        __syncthreads();
    }
    if (!p.present) return;
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const uint32_t row = i / 4 * 32 + slice * 4 + i % 4;
        if (row < p.dk && state_column < p.dv) store_state(p, state_at(p, sequence_head, row, state_column), s[i]);
    }
}

NXRT_KERNEL(coefficients_f32, DeltaParams, (coefficients<float>), 128)
NXRT_KERNEL(coefficients_f16, DeltaParams, (coefficients<half>), 128)
NXRT_KERNEL(coefficients_bf16, DeltaParams, (coefficients<bf16>), 128)
NXRT_KERNEL(scan_64_f32, DeltaParams, (scan<float, 8>), 128)
NXRT_KERNEL(scan_64_f16, DeltaParams, (scan<half, 8>), 128)
NXRT_KERNEL(scan_64_bf16, DeltaParams, (scan<bf16, 8>), 128)
NXRT_KERNEL(scan_128_f32, DeltaParams, (scan<float, 16>), 128)
NXRT_KERNEL(scan_128_f16, DeltaParams, (scan<half, 16>), 128)
NXRT_KERNEL(scan_128_bf16, DeltaParams, (scan<bf16, 16>), 128)
NXRT_KERNEL(scan_256_f32, DeltaParams, (scan<float, 32>), 128)
NXRT_KERNEL(scan_256_f16, DeltaParams, (scan<half, 32>), 128)
NXRT_KERNEL(scan_256_bf16, DeltaParams, (scan<bf16, 32>), 128)
