// What the attention kernels share: which keys a row sees, masks, the softmax's last step.
//
// Dims: B batch, N query heads, K key heads, G = N / K, S query rows, T rows of keys and values a head, H head size, W value
// head size. The G x S rows of a key head are counted row first (r = s * G + g), so that neighbours share their keys.
// Scores and maxima are in units of log2, so that exponentials are powers of two.
#pragma once

#include "common.cuh"

namespace nxrt {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kHidden = -INFINITY;

enum LengthKind : uint32_t { kAllKeys = 0, kLastToken = 1, kKeyCount = 2 };
enum MaskKind : uint32_t { kNoMask = 0, kAdded = 1, kBool = 2 };
constexpr uint32_t kOneValue = 0xffffffffu;

// How far the keys of a batch entry reach; `data` is read on the device.
struct Lengths {
    const void* data;      // kLastToken: int32, the last token's position; kKeyCount: int64, the number of keys
    const int32_t* total;  // read where `first` is 2
    uint32_t kind;
    uint32_t rows;             // S
    uint32_t new_rows;         // keys that this step appends
    uint32_t keys;             // T
    uint32_t past;             // rows of the past
    uint32_t window_capacity;  // more than 0: the cache forgets, and holds so many rows at most
    uint32_t window;           // keys that such a cache must hold
    uint32_t first;            // 1: no tokens before these; 2: where *total is S
};

// One batch entry's keys, in rows of its cache.
struct Span {
    int offset;  // where query row 0 stands; may be negative
    int valid;   // rows that hold keys
    int base;    // position of row 0
    int kept;    // rows in front of the new ones
};

NXRT_DEVICE int resident_rows(const Lengths& g, int tokens) {
    const int capacity = g.window_capacity;
    if (capacity == 0 || tokens <= capacity) return tokens;
    const int step = capacity - static_cast<int>(g.window) + 1;
    return tokens - step * ceil_div(tokens - capacity, step);
}

// Lengths beyond the tensors are clamped.
NXRT_DEVICE Span span_of(const Lengths& g, uint32_t b) {
    const int keys = g.keys, rows = g.rows;
    if (g.kind == kAllKeys) return {static_cast<int>(g.past), keys, 0, static_cast<int>(g.past)};
    if (g.kind == kKeyCount) {
        const int64_t count = static_cast<const int64_t*>(g.data)[b];
        const int valid = count < 0 ? 0 : count > keys ? keys : static_cast<int>(count);
        return {valid - rows, valid, 0, 0};
    }
    const int last = static_cast<const int32_t*>(g.data)[b];
    const int most = g.window_capacity > 0 ? 1 << 30 : keys;
    const int tokens = min(max(last, -1), most - 1) + 1;
    const bool first = g.first == 2 ? *g.total == rows : g.first != 0;
    const int before = first ? 0 : max(tokens - rows, 0);
    const int held = g.new_rows == 0 ? tokens : before;
    const int kept = min(resident_rows(g, held), keys - static_cast<int>(g.new_rows));
    const int base = held - kept;
    return {before - base, max(min(tokens - base, keys), 0), base, kept};
}

struct Strides {
    int64_t batch;
    int64_t head;
    int64_t row;
};

struct AttentionParams {
    const void* q;
    const void* k;
    const void* v;
    void* out;
    const void* mask;
    const void* sink;  // by query head
    float* partial;    // [B, N, S, splits, W + 2]: sums, then the maximum and the sum of exponentials
    Lengths lengths;
    Strides q_at;
    Strides k_at;
    Strides v_at;
    Strides out_at;
    Strides mask_at;
    uint32_t batch;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t dim;
    uint32_t v_dim;
    int32_t left;   // keys before a row's own that it sees; -1: all
    int32_t right;  // keys behind; -1: all
    uint32_t mask_kind;
    uint32_t mask_columns;  // later keys are hidden; kOneValue: there is one value for all keys
    uint32_t has_sink;      // without `sink`: a logit of 0
    uint32_t splits;        // parts that the keys are cut into
    uint32_t granule;       // a part's length is a multiple of this
    uint32_t row_tiles;     // tiles of rows a key head
    uint32_t tile_rows;
    float scale;
    float softcap;
};

#ifdef NXRT_EMULATE
NXRT_DEVICE float exp2_approx(float x) { return exp2f(x); }
#else
NXRT_DEVICE float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
#endif

struct KeyRange {
    int start;
    int end;
};

// Keys that row s sees, masks aside; neither end descends with s.
NXRT_DEVICE KeyRange seen_by(const AttentionParams& p, const Span& span, int s) {
    const int here = span.offset + s;
    const int end = p.right < 0 ? span.valid : min(span.valid, here + p.right + 1);
    const int start = p.left < 0 ? 0 : max(here - p.left, 0);
    return {start, max(end, 0)};
}

// Keys that any of rows r0 <= r < r0 + n of a key head sees.
NXRT_DEVICE KeyRange seen_by_tile(const AttentionParams& p, const Span& span, int r0, int n) {
    const int group = p.heads / p.kv_heads, all = group * p.lengths.rows;
    const KeyRange low = seen_by(p, span, r0 / group);
    const KeyRange high = seen_by(p, span, (min(r0 + n, all) - 1) / group);
    return {low.start, max(high.end, low.start)};
}

// Keys a part: short ranges are cut into fewer parts.
NXRT_DEVICE int part_keys(const AttentionParams& p, const KeyRange& range) {
    const int granule = p.granule;
    return max(ceil_div(ceil_div(range.end - range.start, static_cast<int>(p.splits)), granule), 1) * granule;
}

// Part `split` of the keys; empty behind the last.
NXRT_DEVICE KeyRange part_of(const AttentionParams& p, const KeyRange& range, int split) {
    const int step = part_keys(p, range);
    const int64_t start = range.start + static_cast<int64_t>(step) * split;
    if (start >= range.end) return {range.end, range.end};
    return {static_cast<int>(start), min(static_cast<int>(start) + step, range.end)};
}

// From q . k to the score that the softmax takes; `key` is a row of the cache.
template <class T>
NXRT_DEVICE float score_of(const AttentionParams& p, float dot, int b, int head, int s, int key, int base) {
    float x = dot * p.scale;
    if (p.softcap > 0.0f) x = p.softcap * tanhf(x / p.softcap);
    x *= kLog2e;
    if (p.mask_kind == kNoMask) return x;
    const uint32_t column = key + base;
    if (column >= p.mask_columns) return kHidden;
    int64_t at = b * p.mask_at.batch + head * p.mask_at.head + s * p.mask_at.row;
    if (p.mask_columns != kOneValue) at += column;
    if (p.mask_kind == kBool) return static_cast<const uint8_t*>(p.mask)[at] == 0 ? kHidden : x;
    return x + to_float(static_cast<const T*>(p.mask)[at]) * kLog2e;
}

// What a row's sums are multiplied by; a row that sees nothing becomes zero. P has a sink.
template <class T, class P>
NXRT_DEVICE float finish_factor(const P& p, int head, float top, float sum) {
    float shrink = 1.0f, total = sum;
    if (p.has_sink) {
        const float sink = p.sink ? to_float(static_cast<const T*>(p.sink)[head]) * kLog2e : 0.0f;
        const float high = fmaxf(top, sink);
        if (high > kHidden) {
            shrink = exp2_approx(top - high);
            total = sum * shrink + exp2_approx(sink - high);
        }
    }
    return total == 0.0f ? 0.0f : shrink / total;
}

// Adds up N values over the lanes of a stream. Afterwards lane l holds N / (2 * Step), at least one, of the sums: those
// whose number begins with the bits of l.
template <int N, int Step>
struct Scatter {
    template <int Size>
    static NXRT_DEVICE void add(float (&x)[Size], int lane) {
        if constexpr (N > 1) {
            const bool upper = (lane & Step) != 0;
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                const float mine = upper ? x[i + N / 2] : x[i], theirs = upper ? x[i] : x[i + N / 2];
                x[i] = mine + __shfl_xor_sync(kFullMask, theirs, Step);
            }
        } else {
            x[0] += __shfl_xor_sync(kFullMask, x[0], Step);
        }
        if constexpr (Step > 1) Scatter<(N > 1 ? N / 2 : 1), Step / 2>::add(x, lane);
    }
};

// Where split `split` of a row leaves its partial result.
NXRT_DEVICE float* partial_of(const AttentionParams& p, int b, int head, int s, int split) {
    const int64_t row = (static_cast<int64_t>(b) * p.heads + head) * p.lengths.rows + s;
    return p.partial + (row * p.splits + split) * (p.v_dim + 2);
}

// Whether rows of this tensor can be read `bytes` at a time from multiples of that.
template <class T>
NXRT_DEVICE bool rows_aligned(const void* data, const Strides& at, unsigned bytes) {
    const uint64_t steps = static_cast<uint64_t>(at.batch | at.head | at.row) * sizeof(T);
    return ((reinterpret_cast<uintptr_t>(data) | steps) & (bytes - 1)) == 0;
}

template <class T>
NXRT_DEVICE const T* row_of(const void* data, const Strides& at, int b, int head, int row) {
    return static_cast<const T*>(data) + b * at.batch + head * at.head + row * at.row;
}

// Elements from..from+N of a row of n, zeros behind it.
template <class T, int N>
NXRT_DEVICE Vec<T, N> load_part(const T* row, int from, int n, bool aligned) {
    if (aligned && from + N <= n) return load_vec<T, N>(row + from);
    Vec<T, N> r;
#pragma unroll
    for (int i = 0; i < N; ++i) r[i] = from + i < n ? row[from + i] : from_float<T>(0.0f);
    return r;
}

}  // namespace nxrt
