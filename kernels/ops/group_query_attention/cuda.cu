// GroupQueryAttention around the attention itself: normalises and rotates queries and keys, and keeps the cache.
#include "attention.cuh"

using namespace nxrt;

// Dims as in mod.rs. The cache being written is [B, K, T, H].
struct PrepareParams {
    const void* query;  // the first row of each, in the packed tensor or its own
    const void* key;
    const void* value;
    const void* past_key;  // null: no past; may be `keys` itself
    const void* past_value;
    void* keys;
    void* values;
    void* queries;  // [B, S, N, H], prepared; null: they can be read where they are
    const void* cos;  // null: no rotation
    const void* sin;
    const int64_t* positions;
    const void* q_norm;  // null: no normalisation
    const void* k_norm;
    Lengths lengths;
    int64_t query_row;  // elements between tokens
    int64_t key_row;
    uint32_t batch;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t dim;
    uint32_t half;         // pairs that are rotated
    uint32_t interleaved;  // pairs are neighbours, not in two halves
    uint32_t positions_row;
    uint32_t angles;  // rows of cos and sin
    uint32_t row_blocks;  // the blocks that take rows; those behind keep the past
    uint32_t pieces;      // blocks a head of the cache
    float q_epsilon;
    float k_epsilon;
};

constexpr int kWarps = 8;

// Positions beyond the angles are clamped.
NXRT_DEVICE int64_t position_of(const PrepareParams& p, const Span& span, int b, int s) {
    int64_t position = static_cast<int64_t>(span.base) + span.offset + s;
    if (p.positions) {
        const bool first = p.lengths.first == 2 ? *p.lengths.total == static_cast<int>(p.lengths.rows) : p.lengths.first != 0;
        position = first ? p.positions[0] + s : p.positions[static_cast<int64_t>(b) * p.positions_row + s];
    }
    return min(max(position, static_cast<int64_t>(0)), static_cast<int64_t>(p.angles) - 1);
}

// Normalises where there are weights, rotates where there are angles: a row by a warp, kN elements a lane and step.
template <class T, int kN>
NXRT_DEVICE void prepare_row(const PrepareParams& p, const T* from, T* to, const T* weight, float epsilon, const T* cos, const T* sin) {
    const int lane = lane_id(), dim = p.dim, half = cos ? p.half : 0;
    using V = Vec<T, kN>;
    float by = 1.0f;
    if (weight) {
        float square = 0.0f;
        for (int d = lane * kN; d < dim; d += kWarpSize * kN) {
            const V x = load_vec<T, kN>(from + d);
#pragma unroll
            for (int i = 0; i < kN; ++i) square += to_float(x[i]) * to_float(x[i]);
        }
        by = rsqrtf(warp_sum(square) / dim + epsilon);
    }
    auto scaled = [&](const V& x, int d, float(&y)[kN]) {
#pragma unroll
        for (int i = 0; i < kN; ++i) y[i] = to_float(x[i]);
        if (!weight) return;
        const V w = load_vec<T, kN>(weight + d);
#pragma unroll
        for (int i = 0; i < kN; ++i) y[i] = y[i] * by * to_float(w[i]);
    };
    auto store = [&](int d, const float(&y)[kN]) {
        V x;
#pragma unroll
        for (int i = 0; i < kN; ++i) x[i] = from_float<T>(y[i]);
        store_vec<T, kN>(to + d, x);
    };
    for (int d = lane * kN; d < dim - half; d += kWarpSize * kN) {
        // Steps within the first half take their partners along; what lies behind the pairs moves up.
        if (d >= half) {
            float y[kN];
            scaled(load_vec<T, kN>(from + d + half), d + half, y);
            store(d + half, y);
            continue;
        }
        float x[kN], y[kN];
        scaled(load_vec<T, kN>(from + d), d, x);
        scaled(load_vec<T, kN>(from + d + half), d + half, y);
        const V c = load_vec<T, kN>(cos + d), s = load_vec<T, kN>(sin + d);
#pragma unroll
        for (int i = 0; i < kN; ++i) {
            const float cos_i = to_float(c[i]), sin_i = to_float(s[i]), a = x[i], b = y[i];
            x[i] = a * cos_i - b * sin_i;
            y[i] = a * sin_i + b * cos_i;
        }
        store(d, x);
        store(d + half, y);
    }
}

// As above for pairs of neighbours.
template <class T>
NXRT_DEVICE void prepare_neighbours(const PrepareParams& p, const T* from, T* to, const T* weight, float epsilon, const T* cos,
                                    const T* sin) {
    const int lane = lane_id(), dim = p.dim, half = p.half;
    float by = 1.0f;
    if (weight) {
        float square = 0.0f;
        for (int d = lane; d < dim; d += kWarpSize) square += to_float(from[d]) * to_float(from[d]);
        by = rsqrtf(warp_sum(square) / dim + epsilon);
    }
    auto scaled = [&](int d) { return weight ? to_float(from[d]) * by * to_float(weight[d]) : to_float(from[d]); };
    for (int i = lane; i < half; i += kWarpSize) {
        const float a = scaled(2 * i), b = scaled(2 * i + 1), c = to_float(cos[i]), s = to_float(sin[i]);
        to[2 * i] = from_float<T>(a * c - b * s);
        to[2 * i + 1] = from_float<T>(a * s + b * c);
    }
    for (int d = 2 * half + lane; d < dim; d += kWarpSize) to[d] = from_float<T>(scaled(d));
}

// One row of queries, keys or values.
template <class T>
NXRT_DEVICE void prepare_unit(const PrepareParams& p, int b, int s, int unit) {
    const int query_heads = p.queries ? p.heads : 0;
    const int64_t token = static_cast<int64_t>(b) * p.lengths.rows + s;
    const Span span = span_of(p.lengths, b);
    const bool query = unit < query_heads;
    const int head = query ? unit : (unit - query_heads) % p.kv_heads;
    const bool value = !query && unit - query_heads >= static_cast<int>(p.kv_heads);
    const T* from = static_cast<const T*>(query ? p.query : value ? p.value : p.key);
    from += token * (query ? p.query_row : p.key_row) + static_cast<int64_t>(head) * p.dim;
    T* to = static_cast<T*>(query ? p.queries : value ? p.values : p.keys);
    if (query) {
        to += (token * p.heads + head) * p.dim;
    } else {
        const int row = span.kept + s;
        if (row >= static_cast<int>(p.lengths.keys)) return;
        to += ((static_cast<int64_t>(b) * p.kv_heads + head) * p.lengths.keys + row) * p.dim;
    }
    const T *cos = nullptr, *sin = nullptr;
    const bool rotate = !value && p.cos && p.half > 0 && p.angles > 0;
    if (rotate) {
        const int64_t at = position_of(p, span, b, s) * p.half;
        cos = static_cast<const T*>(p.cos) + at;
        sin = static_cast<const T*>(p.sin) + at;
    }
    const T* weight = static_cast<const T*>(value ? nullptr : query ? p.q_norm : p.k_norm);
    const float epsilon = query ? p.q_epsilon : p.k_epsilon;
    if (rotate && p.interleaved) {
        prepare_neighbours(p, from, to, weight, epsilon, cos, sin);
        return;
    }
    constexpr int kN = 16 / sizeof(T);
    const uintptr_t where = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                            reinterpret_cast<uintptr_t>(cos) | reinterpret_cast<uintptr_t>(sin) |
                            reinterpret_cast<uintptr_t>(weight);
    if (where % 16 == 0 && p.dim % kN == 0 && (!rotate || p.half % kN == 0)) {
        prepare_row<T, kN>(p, from, to, weight, epsilon, cos, sin);
    } else {
        prepare_row<T, 1>(p, from, to, weight, epsilon, cos, sin);
    }
}

// Copies one head's past, and zeroes what is neither past nor new (begin..end); W is what moves at a time.
template <class W>
NXRT_DEVICE void keep_past(const W* past, W* to, int64_t kept, int64_t begin, int64_t end, int64_t all, int64_t first, int64_t step) {
    for (int64_t i = first; i < all; i += step) {
        if (i < kept) {
            to[i] = past[i];
        } else if (i < begin || i >= end) {
            to[i] = W{};
        }
    }
}

template <class T>
NXRT_DEVICE void keep_cache(const PrepareParams& p, const void* past, void* cache, int head, int64_t first, int64_t step) {
    // The buffer that is written holds its past already.
    if (past == cache) return;
    const Lengths& g = p.lengths;
    const Span span = span_of(g, head / p.kv_heads);
    const int64_t row = static_cast<int64_t>(p.dim) * sizeof(T), all = row * g.keys;
    const char* from = static_cast<const char*>(past) + head * row * g.past;
    char* to = static_cast<char*>(cache) + head * all;
    const int64_t begin = row * span.kept, end = begin + row * g.new_rows;
    const int64_t kept = past ? min(begin, row * static_cast<int64_t>(g.past)) : 0;
    if (((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | row) & 15) == 0) {
        using W = uint4;
        constexpr int n = sizeof(W);
        keep_past(reinterpret_cast<const W*>(from), reinterpret_cast<W*>(to), kept / n, begin / n, end / n, all / n, first, step);
    } else {
        using W = typename detail::Word<sizeof(T)>::type;
        constexpr int n = sizeof(T);
        keep_past(reinterpret_cast<const W*>(from), reinterpret_cast<W*>(to), kept / n, begin / n, end / n, all / n, first, step);
    }
}

// Lengths and positions beyond the tensors are clamped.
template <class T>
NXRT_DEVICE void prepare(const PrepareParams& p) {
    if (blockIdx.x >= p.row_blocks) {
        const int block = blockIdx.x - p.row_blocks, head = block / p.pieces, piece = block % p.pieces;
        const int64_t first = static_cast<int64_t>(piece) * blockDim.x + threadIdx.x, step = static_cast<int64_t>(p.pieces) * blockDim.x;
        keep_cache<T>(p, p.past_key, p.keys, head, first, step);
        keep_cache<T>(p, p.past_value, p.values, head, first, step);
        return;
    }
    const int units = (p.queries ? p.heads : 0) + (p.lengths.new_rows > 0 ? 2 * p.kv_heads : 0);
    const int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id(), token = number / units;
    if (token >= static_cast<int64_t>(p.batch) * p.lengths.rows) return;
    prepare_unit<T>(p, static_cast<int>(token / p.lengths.rows), static_cast<int>(token % p.lengths.rows), static_cast<int>(number % units));
}

// A cache that forgets: `staged` [B, K, T, H] holds what was kept and the new rows.
struct ForgetParams {
    const void* staged;
    void* cache;  // [B, K, window_capacity, H]
    Lengths lengths;
    uint32_t kv_heads;
    uint32_t dim;
};

// A block a head: the rows that stay, zeros behind.
template <class W>
NXRT_DEVICE void forget(const ForgetParams& p) {
    const Lengths& g = p.lengths;
    const int head = blockIdx.x;
    const Span span = span_of(g, head / p.kv_heads);
    const int tokens = span.valid + span.base, end = min(span.kept + static_cast<int>(g.new_rows), tokens);
    const int keep = max(min(resident_rows(g, tokens), end), 0);
    const int64_t dim = p.dim, all = g.window_capacity * dim;
    const W* from = static_cast<const W*>(p.staged) + (static_cast<int64_t>(head) * g.keys + end - keep) * dim;
    W* to = static_cast<W*>(p.cache) + head * all;
    const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; i < all; i += step) to[i] = i < keep * dim ? from[i] : W{};
}

NXRT_KERNEL(prepare_f32, PrepareParams, (prepare<float>), 256)
NXRT_KERNEL(prepare_f16, PrepareParams, (prepare<half>), 256)
NXRT_KERNEL(prepare_bf16, PrepareParams, (prepare<bf16>), 256)
NXRT_KERNEL(forget_4, ForgetParams, (forget<uint32_t>), 256)
NXRT_KERNEL(forget_2, ForgetParams, (forget<uint16_t>), 256)
