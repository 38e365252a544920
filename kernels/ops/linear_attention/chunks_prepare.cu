// What the products over chunks take that does not depend on the state.
#include "chunks.cuh"

using namespace nxrt;

// Pairs of neighbours lie in distinct banks for rows g and columns 2 t.
constexpr unsigned kPitch = kChunk + 8;

// A column of (1 + L)^-1 a lane.
NXRT_DEVICE void invert(float (&x)[kChunk], const float (&lower)[kChunk][kPitch]) {
#pragma unroll
    for (unsigned c = 0; c < kChunk; ++c) {
        float sums[4] = {};
#pragma unroll
        for (unsigned i = 0; i < c; i += 4) {
            const Vec<float, 4> row = load_vec<float, 4>(&lower[c][i]);
#pragma unroll
            for (unsigned j = 0; j < 4 && i + j < c; ++j) sums[j] = fmaf(row[j], x[i + j], sums[j]);
        }
        x[c] = (c == lane_id() ? 1.0f : 0.0f) - ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
}

// The lower triangles of K K^T and Q K^T, in the order of operands.
struct Triangles {
    float kk[kOperands][4], qk[kOperands][4];
};

template <class T, unsigned D>
NXRT_DEVICE void multiply_triangles(Triangles& to, const Tokens<T, D>& keys, const Tokens<T, D>& queries) {
    const unsigned row = lane_id() % 16, column = lane_id() / 16 * 8;
#pragma unroll 4
    for (unsigned first = 0; first < D; first += 16) {
        uint32_t k[2][4], q[4];
#pragma unroll
        for (unsigned strip = 0; strip < 2; ++strip) ldmatrix_x4(k[strip], &keys[strip * kStrip + row][first + column]);
#pragma unroll
        for (unsigned strip = 0; strip < 2; ++strip) {
            ldmatrix_x4(q, &queries[strip * kStrip + row][first + column]);
#pragma unroll
            for (unsigned tile = 0; tile < 2 + 2 * strip; ++tile) {
                const uint32_t b[2] = {k[tile / 2][tile % 2], k[tile / 2][tile % 2 + 2]};
                mma_m16n8k16<T>(to.kk[2 * strip + tile], k[strip], b);
                mma_m16n8k16<T>(to.qk[2 * strip + tile], q, b);
            }
        }
    }
}

template <unsigned D, class T>
NXRT_DEVICE float row_inverse_norm(const DeltaParams& p, const T* row) {
    if (!p.l2_norm) return 1.0f;
    float squares = 0.0f;
#pragma unroll 4
    for (unsigned i = 0; i < D; i += 4) {
        const Vec<float, 4> x = widen(load_vec<T, 4>(row + i));
#pragma unroll
        for (int j = 0; j < 4; ++j) squares = fmaf(x[j], x[j], squares);
    }
    return inverse_norm(p, squares);
}

// A warp for each head of each chunk; lane c has token c of the chunk and column c of its matrices.
template <class T, unsigned D>
NXRT_DEVICE void prepare(const DeltaParams& p) {
    NXRT_SHARED __align__(16) Tokens<T, D> keys;
    NXRT_SHARED __align__(16) Tokens<T, D> queries;
    NXRT_SHARED __align__(16) float matrix[kChunk][kPitch];
    NXRT_SHARED float k_inverses[kChunk], q_inverses[kChunk], betas[kChunk];
    const unsigned lane = lane_id(), g = lane / 4, t = lane % 4;
    const uint32_t head = blockIdx.x % p.v_heads, q_head = head * p.q_heads / p.v_heads;
    const Span tokens = chunk_span(p, blockIdx.x / p.v_heads, kChunk);
    if (tokens.begin == tokens.end) return;

    const uint32_t count = tokens.end - tokens.begin;
    const bool wide = aligned_16(p), live = lane < count;
    copy_rows<kWarpSize, D>(keys, k_row<T>(p, tokens.begin, head), p.k_stride, count, wide);
    copy_rows<kWarpSize, D>(queries, q_row<T>(p, tokens.begin, q_head), p.q_stride, count, wide);
    cp_async_commit();
    const uint32_t token = tokens.begin + (live ? lane : 0);
    const float own_decay = decay_factor<T>(p, token, head, 0), own_beta = beta_factor<T>(p, token, head);
    const float f = live ? own_decay : 1.0f, beta = live ? own_beta : 0.0f;
    betas[lane] = beta;
    // F_c / F_i as a product: no decay is so strong that it spoils those after it.
    float ratio = 0.0f;
#pragma unroll
    for (unsigned c = 0; c < kChunk; ++c) {
        const float next = ratio * __shfl_sync(kFullMask, f, c);
        ratio = c == lane ? 1.0f : next;
        matrix[c][lane] = ratio;
    }
    cp_async_wait<0>();
    __syncthreads();

    Triangles triangles = {};
    multiply_triangles<T, D>(triangles, keys, queries);
    k_inverses[lane] = row_inverse_norm<D>(p, keys[lane]);
    q_inverses[lane] = row_inverse_norm<D>(p, queries[lane]);
    float* record = p.scratch + uint64_t(blockIdx.x) * kRecord;
    const float product = matrix[lane][0] * __shfl_sync(kFullMask, f, 0);
    record[kA + lane] = p.beta ? product * k_inverses[lane] : 0.0f;
    record[kR + lane] = p.scale * product * q_inverses[lane];
    record[kW + lane] = ratio * k_inverses[lane];
    if (lane == kChunk - 1) record[kLast] = product;
    __syncthreads();
    // Each element of the ratios makes way for that of L.
#pragma unroll
    for (unsigned n = 0; n < kOperands; ++n) {
        const unsigned strip = n >= 2, tile = n - 2 * strip;
        float outer[4];
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
            const unsigned c = strip * kStrip + i / 2 * 8 + g, column = tile * kTile + 2 * t + i % 2;
            const float factor = matrix[c][column] * k_inverses[column];
            outer[i] = column <= c ? p.scale * q_inverses[c] * factor * triangles.qk[n][i] : 0.0f;
            matrix[c][column] = p.beta && column < c ? betas[c] * k_inverses[c] * factor * triangles.kk[n][i] : 0.0f;
        }
        store_vec<float, 4>(record + kOuter + n * kOperand + 4 * lane, {outer[0], outer[2], outer[1], outer[3]});
    }
    __syncthreads();
    float x[kChunk];
    invert(x, matrix);
    __syncthreads();
#pragma unroll
    for (unsigned c = 0; c < kChunk; ++c) matrix[c][lane] = x[c] * beta;
    __syncthreads();
#pragma unroll
    for (unsigned n = 0; n < kOperands; ++n) {
        const unsigned strip = n >= 2, tile = n - 2 * strip;
        const Vec<float, 2> upper = load_vec<float, 2>(&matrix[strip * kStrip + g][tile * kTile + 2 * t]);
        const Vec<float, 2> lower = load_vec<float, 2>(&matrix[strip * kStrip + 8 + g][tile * kTile + 2 * t]);
        store_vec<float, 4>(record + kInner + n * kOperand + 4 * lane, {upper[0], lower[0], upper[1], lower[1]});
    }
}

NXRT_KERNEL(prepare_64_f16, DeltaParams, (prepare<half, 64>), 32)
NXRT_KERNEL(prepare_64_bf16, DeltaParams, (prepare<bf16, 64>), 32)
NXRT_KERNEL(prepare_128_f16, DeltaParams, (prepare<half, 128>), 32)
NXRT_KERNEL(prepare_128_bf16, DeltaParams, (prepare<bf16, 128>), 32)
NXRT_KERNEL(prepare_256_f16, DeltaParams, (prepare<half, 256>), 32)
NXRT_KERNEL(prepare_256_bf16, DeltaParams, (prepare<bf16, 256>), 32)
