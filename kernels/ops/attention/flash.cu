// Attention with an online softmax in f32 arithmetic, for any type and head size up to 512: a block holds a tile of query rows
// and passes over the keys 32 at a time. Warp w owns the tile's rows w * kRows.., its lanes the keys.
#include "attention.cuh"

using namespace nxrt;

constexpr int kWarps = 4;
constexpr int kKeys = 32;
constexpr int kChunk = 64;          // dims staged at a time
constexpr int kStride = kChunk + 4;  // spreads a column over the banks

// Stages dims c.. of keys k0.. as floats; what lies behind `end` or the row's last dim becomes zero.
template <class T>
NXRT_DEVICE void stage(float* to, const void* data, const Strides& at, int b, int head, int k0, int end, int c, int dim, bool aligned) {
    for (int i = threadIdx.x; i < kKeys * (kChunk / 4); i += kWarps * kWarpSize) {
        const int key = i / (kChunk / 4), d = i % (kChunk / 4) * 4;
        Vec<float, 4> x = {};
        if (k0 + key < end) {
            const Vec<T, 4> raw = load_part<T, 4>(row_of<T>(data, at, b, head, k0 + key), c + d, dim, aligned);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] = to_float(raw[j]);
        }
        store_vec<float, 4>(to + key * kStride + d, x);
    }
}

// kRows query rows a warp, kColumns value dims a lane.
template <class T, int kRows, int kColumns>
struct Flash {
    const AttentionParams& p;
    int b, kv_head, split, lane, first;
    Span span;
    float *query, *staged, *weights;
    int stride;
    KeyRange range;
    int start[kRows] = {}, end[kRows] = {};
    float top[kRows] = {}, sum[kRows] = {}, acc[kRows][kColumns] = {};

    NXRT_DEVICE int group() const { return p.heads / p.kv_heads; }
    NXRT_DEVICE bool present(int r) const { return first + r < group() * static_cast<int>(p.lengths.rows); }
    NXRT_DEVICE int head_of(int r) const { return kv_head * group() + (first + r) % group(); }
    NXRT_DEVICE int row_index(int r) const { return (first + r) / group(); }

    NXRT_DEVICE void load_queries() {
        const bool aligned = rows_aligned<T>(p.q, p.q_at, 4 * sizeof(T));
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const bool here = present(r);
            const T* row = here ? row_of<T>(p.q, p.q_at, b, head_of(r), row_index(r)) : nullptr;
            for (int d = lane * 4; d < stride; d += kWarpSize * 4) {
                Vec<float, 4> x = {};
                if (here) {
                    const Vec<T, 4> raw = load_part<T, 4>(row, d, p.dim, aligned);
#pragma unroll
                    for (int j = 0; j < 4; ++j) x[j] = to_float(raw[j]);
                }
                store_vec<float, 4>(query + r * stride + d, x);
            }
            const KeyRange seen = here ? seen_by(p, span, row_index(r)) : KeyRange{0, 0};
            start[r] = seen.start;
            end[r] = seen.end;
            top[r] = kHidden;
        }
    }

    NXRT_DEVICE void scores(int k0, bool aligned, float (&dots)[kRows]) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) dots[r] = 0.0f;
        for (int c = 0; c < static_cast<int>(p.dim); c += kChunk) {
            __syncthreads();
            stage<T>(staged, p.k, p.k_at, b, kv_head, k0, range.end, c, p.dim, aligned);
            __syncthreads();
#pragma unroll 4
            for (int d = 0; d < kChunk; d += 4) {
                const Vec<float, 4> k = load_vec<float, 4>(staged + lane * kStride + d);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const Vec<float, 4> q = load_vec<float, 4>(query + r * stride + c + d);
#pragma unroll
                    for (int j = 0; j < 4; ++j) dots[r] += q[j] * k[j];
                }
            }
        }
    }

    NXRT_DEVICE void softmax(int k0, float (&dots)[kRows]) {
        const int key = k0 + lane;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float x = kHidden;
            if (key >= start[r] && key < end[r] && key < range.end) {
                x = score_of<T>(p, dots[r], b, head_of(r), row_index(r), key, span.base);
            }
            const float high = fmaxf(top[r], warp_max(x));
            const float zero = high == kHidden ? 0.0f : high;
            const float weight = exp2_approx(x - zero), shrink = exp2_approx(top[r] - zero);
            top[r] = high;
            sum[r] = sum[r] * shrink + warp_sum(weight);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) acc[r][c] *= shrink;
            weights[r * kKeys + lane] = weight;
        }
        __syncwarp();
    }

    NXRT_DEVICE void add_values(int k0, bool aligned) {
#pragma unroll
        for (int c = 0; c < kColumns; c += 2) {
            if (c * static_cast<int>(kWarpSize) < static_cast<int>(p.v_dim)) {
                __syncthreads();
                stage<T>(staged, p.v, p.v_at, b, kv_head, k0, range.end, c * kWarpSize, p.v_dim, aligned);
                __syncthreads();
#pragma unroll 2
                for (int key = 0; key < kKeys; key += 4) {
                    float v[4][2];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        v[j][0] = staged[(key + j) * kStride + lane];
                        v[j][1] = staged[(key + j) * kStride + lane + kWarpSize];
                    }
#pragma unroll
                    for (int r = 0; r < kRows; ++r) {
                        const Vec<float, 4> w = load_vec<float, 4>(weights + r * kKeys + key);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            acc[r][c] += w[j] * v[j][0];
                            acc[r][c + 1] += w[j] * v[j][1];
                        }
                    }
                }
            }
        }
    }

    NXRT_DEVICE void store() const {
        const int width = p.v_dim;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (!present(r)) continue;
            const int head = head_of(r), s = row_index(r);
            if (p.splits > 1) {
                float* to = partial_of(p, b, head, s, split);
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const int d = c * kWarpSize + lane;
                    if (d < width) to[d] = acc[r][c];
                }
                if (lane == 0) {
                    to[width] = top[r];
                    to[width + 1] = sum[r];
                }
                continue;
            }
            T* to = static_cast<T*>(p.out) + b * p.out_at.batch + head * p.out_at.head + s * p.out_at.row;
            const float by = finish_factor<T>(p, head, top[r], sum[r]);
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const int d = c * kWarpSize + lane;
                if (d < width) to[d] = from_float<T>(acc[r][c] * by);
            }
        }
    }
};

// Shared memory: the tile's queries, kKeys x kStride staged elements, the weights of kKeys keys by row, all floats.
template <class T, int kRows, int kColumns>
NXRT_DEVICE void flash(const AttentionParams& p) {
    NXRT_DYNAMIC_SHARED(float, shared);
    const int split = blockIdx.x % p.splits, place = blockIdx.x / p.splits;
    const int heads = p.batch * p.kv_heads;
    // Last rows first: under a causal mask they take longest.
    const int tile = p.row_tiles - 1 - place / heads, b = place % heads / p.kv_heads;
    const Span span = span_of(p.lengths, b);
    const KeyRange all = seen_by_tile(p, span, tile * kWarps * kRows, kWarps * kRows);
    const KeyRange range = part_of(p, all, split);
    if (p.splits > 1 && range.start >= range.end) return;

    const int warp = warp_id(), stride = ceil_div(static_cast<int>(p.dim), kChunk) * kChunk;
    float* staged = shared + kWarps * kRows * stride;
    float* weights = staged + kKeys * kStride;
    Flash<T, kRows, kColumns> f = {p, b, place % heads % static_cast<int>(p.kv_heads), split, static_cast<int>(lane_id()),
                                   (tile * kWarps + warp) * kRows, span, shared + warp * kRows * stride, staged,
                                   weights + warp * kRows * kKeys, stride, range};
    f.load_queries();
    const bool k_aligned = rows_aligned<T>(p.k, p.k_at, 4 * sizeof(T));
    const bool v_aligned = rows_aligned<T>(p.v, p.v_at, 4 * sizeof(T));
    __syncwarp();
    for (int k0 = range.start; k0 < range.end; k0 += kKeys) {
        float dots[kRows];
        f.scores(k0, k_aligned, dots);
        f.softmax(k0, dots);
        f.add_values(k0, v_aligned);
    }
    f.store();
}

NXRT_KERNEL(flash_f32_128, AttentionParams, (flash<float, 8, 4>), 128)
NXRT_KERNEL(flash_f32_256, AttentionParams, (flash<float, 8, 8>), 128)
NXRT_KERNEL(flash_f32_512, AttentionParams, (flash<float, 4, 16>), 128)
NXRT_KERNEL(flash_f16_128, AttentionParams, (flash<half, 8, 4>), 128)
NXRT_KERNEL(flash_f16_256, AttentionParams, (flash<half, 8, 8>), 128)
NXRT_KERNEL(flash_f16_512, AttentionParams, (flash<half, 4, 16>), 128)
NXRT_KERNEL(flash_bf16_128, AttentionParams, (flash<bf16, 8, 4>), 128)
NXRT_KERNEL(flash_bf16_256, AttentionParams, (flash<bf16, 8, 8>), 128)
NXRT_KERNEL(flash_bf16_512, AttentionParams, (flash<bf16, 4, 16>), 128)
