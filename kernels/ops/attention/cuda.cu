// Attention around the attention itself: joins past and new rows, and shows the scores to whoever wants them.
#include "attention.cuh"

using namespace nxrt;

struct JoinParams {
    const void* past;  // [B, K, P, H]
    const void* fresh;
    void* to;  // [B, K, T, H]
    Strides fresh_at;
    uint32_t heads;  // B * K
    uint32_t kv_heads;
    uint32_t past_rows;
    uint32_t rows;  // T
    uint32_t dim;
    uint32_t pad;
};

// A warp a row.
template <class T>
NXRT_DEVICE void join_rows(const JoinParams& p) {
    const int warps = blockDim.x / kWarpSize, lane = lane_id(), dim = p.dim;
    const int64_t step = static_cast<int64_t>(gridDim.x) * warps, all = static_cast<int64_t>(p.heads) * p.rows;
    constexpr int kN = 16 / sizeof(T);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * warps + warp_id(); i < all; i += step) {
        const int head = static_cast<int>(i / p.rows), row = static_cast<int>(i % p.rows), past_rows = p.past_rows;
        const T* from = static_cast<const T*>(p.past) + (static_cast<int64_t>(head) * past_rows + row) * dim;
        if (row >= past_rows) from = row_of<T>(p.fresh, p.fresh_at, head / p.kv_heads, head % p.kv_heads, row - past_rows);
        T* to = static_cast<T*>(p.to) + i * dim;
        if (((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) & 15) == 0) {
            for (int d = lane * kN; d + kN <= dim; d += kWarpSize * kN) store_vec<T, kN>(to + d, load_vec<T, kN>(from + d));
            for (int d = dim / kN * kN + lane; d < dim; d += kWarpSize) to[d] = from[d];
        } else {
            for (int d = lane; d < dim; d += kWarpSize) to[d] = from[d];
        }
    }
}

// Stages of a score; AttentionParams::granule names the one that is stored to AttentionParams::out, [B, N, S, T].
enum Stage : uint32_t { kRaw = 0, kSoftcapped = 1, kBiased = 2, kSoftmax = 3 };

constexpr int kWarps = 4;

template <class T>
struct Scores {
    AttentionParams p;
    const T* query;
    int b, head, s, stage;
    Span span;
    KeyRange seen;

    // Every lane gets it.
    NXRT_DEVICE float at(int key) const {
        const T* row = row_of<T>(p.k, p.k_at, b, head / static_cast<int>(p.heads / p.kv_heads), key);
        float dot = 0.0f;
        for (int d = lane_id(); d < static_cast<int>(p.dim); d += kWarpSize) dot += to_float(query[d]) * to_float(row[d]);
        dot = warp_sum(dot);
        if (stage >= kBiased && (key < seen.start || key >= seen.end)) return kHidden;
        return score_of<T>(p, dot, b, head, s, key, span.base);
    }
};

// A block a query row, its warps the keys.
template <class T>
NXRT_DEVICE void scores(const AttentionParams& given) {
    NXRT_SHARED float tops[kWarps];
    NXRT_SHARED float sums[kWarps];
    const int rows = given.lengths.rows, keys = given.lengths.keys, warp = warp_id();
    const int s = blockIdx.x % rows, head = blockIdx.x / rows % given.heads, b = blockIdx.x / rows / given.heads;
    const Span span = span_of(given.lengths, b);
    Scores<T> f = {given, row_of<T>(given.q, given.q_at, b, head, s), b, head, s, static_cast<int>(given.granule), span,
                   seen_by(given, span, s)};
    if (f.stage < kSoftcapped) f.p.softcap = 0.0f;
    if (f.stage < kBiased) f.p.mask_kind = kNoMask;
    T* out = static_cast<T*>(given.out) + static_cast<int64_t>(blockIdx.x) * keys;
    float top = kHidden, sum = 0.0f;
    if (f.stage == kSoftmax) {
        for (int key = warp; key < keys; key += kWarps) {
            const float x = f.at(key), high = fmaxf(top, x), zero = high == kHidden ? 0.0f : high;
            sum = sum * exp2_approx(top - zero) + exp2_approx(x - zero);
            top = high;
        }
        if (lane_id() == 0) {
            tops[warp] = top;
            sums[warp] = sum;
        }
        __syncthreads();
        for (int i = 0; i < kWarps; ++i) top = fmaxf(top, tops[i]);
        sum = 0.0f;
        for (int i = 0; i < kWarps; ++i) sum += sums[i] * (tops[i] == kHidden ? 0.0f : exp2_approx(tops[i] - top));
    }
    for (int key = warp; key < keys; key += kWarps) {
        const float x = f.at(key);
        float y = x / kLog2e;
        if (f.stage == kSoftmax) y = top == kHidden ? 0.0f : exp2_approx(x - top) / sum;
        if (lane_id() == 0) out[key] = from_float<T>(y);
    }
}

NXRT_KERNEL(join_rows_4, JoinParams, (join_rows<uint32_t>), 256)
NXRT_KERNEL(join_rows_2, JoinParams, (join_rows<uint16_t>), 256)
NXRT_KERNEL(scores_f32, AttentionParams, (scores<float>), 128)
NXRT_KERNEL(scores_f16, AttentionParams, (scores<half>), 128)
NXRT_KERNEL(scores_bf16, AttentionParams, (scores<bf16>), 128)
