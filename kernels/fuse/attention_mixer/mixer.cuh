// The attention of a decode step in one kernel: query heads and the new key are normalised and rotated, the new row goes to
// the cache, attention runs over it, and the gate multiplies what comes out.
//
// A block takes the query heads that share a key head, kRows of them at most, and a part of that head's keys; the last block
// to end joins the parts. Every block prepares the queries anew while its first keys and values are on their way. The new
// key never comes from the cache: the block of the last part has it at hand.
//
// Dims: B batch, N query heads, K key heads, H head size. Scores and maxima are in units of log2.
#pragma once

#include "attention.cuh"

namespace nxrt {

// Where the angles of a batch entry are.
enum Rotary : uint32_t {
    kNone = 0,
    kCache = 1,    // where the new row stands, or as `positions` [B, positions_row] says; a first prompt reads its first one
    kEach = 2,     // positions[b]
    kFirst = 3,    // positions[0]
    kStreams = 4,  // positions[stream of the pair][b]
    kEntry = 5,    // row b
};

// Element [b, head, 0] of what the projections left.
struct HeadStrides {
    int64_t batch;
    int64_t head;
};

struct MixerParams {
    const void* q;
    const void* k;
    const void* v;
    const void* gate;  // its sigmoid multiplies the output; null: none
    const void* past_key;  // [B, K, past, H]; may be `keys` itself
    const void* past_value;
    void* keys;  // [B, K, T, H]
    void* values;
    void* out;             // [B, N, H]
    const void* q_weight;  // [H]; null: no normalisation
    const void* k_weight;
    const void* cos;  // [angles, half]
    const void* sin;
    const int64_t* positions;
    const uint8_t* streams;  // by pair
    const void* sink;        // by query head
    float* partial;          // by place and part: sums [rows, H]; then for each of them maximum and sum of exponentials
    uint32_t* counters;      // by place: 0
    Lengths lengths;
    HeadStrides q_at;
    HeadStrides k_at;
    HeadStrides v_at;
    HeadStrides gate_at;
    uint32_t batch;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t dim;
    uint32_t half;         // pairs that are rotated
    uint32_t interleaved;  // pairs are neighbours, not in two halves
    uint32_t rotary;
    uint32_t angles;
    uint32_t positions_row;
    uint32_t wide_angles;  // cos and sin are f32
    uint32_t has_sink;     // without `sink`: a logit of 0
    uint32_t splits;       // parts at most
    uint32_t granule;      // a part's length is a multiple of this
    uint32_t group;        // query heads a key head
    uint32_t early;        // the kernel in front writes neither lengths nor angles nor the past
    int32_t left;          // keys before the new one that it sees; -1: all
    float q_epsilon;
    float k_epsilon;
    float scale;
    float softcap;
};

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * static_cast<int>(kWarpSize);
constexpr int kMostParts = 128;

NXRT_DEVICE float score_of(const MixerParams& p, float dot) {
    float x = dot * p.scale;
    if (p.softcap > 0.0f) x = p.softcap * tanhf(x / p.softcap);
    return x * kLog2e;
}

// A factor for sums at maximum `from` that are to join others at `to`.
NXRT_DEVICE float shrink_of(float from, float to) { return exp2_approx(from - (to == kHidden ? 0.0f : to)); }

// Pairs lane, lane + 32, ... of a head: their angles.
template <class T, int kPairs>
struct Angles {
    float cos[kPairs];
    float sin[kPairs];
    int half = 0;

    // Positions beyond the angles are clamped.
    NXRT_DEVICE void load(const MixerParams& p, const Span& span, int b) {
        if (p.rotary == kNone || p.angles == 0) return;
        half = p.half;
        int64_t row = b, streams[3] = {};
        switch (p.rotary) {
            case kCache: {
                const bool first = p.lengths.first == 2 ? *p.lengths.total == 1 : p.lengths.first != 0;
                row = static_cast<int64_t>(span.base) + span.offset;
                if (p.positions) row = p.positions[first ? 0 : static_cast<int64_t>(b) * p.positions_row];
                break;
            }
            case kEach: row = p.positions[b]; break;
            case kFirst: row = p.positions[0]; break;
            case kStreams:
#pragma unroll
                for (int i = 0; i < 3; ++i) streams[i] = p.positions[i * static_cast<int64_t>(p.batch) + b];
                break;
            default: break;
        }
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int pair = static_cast<int>(lane_id()) + i * static_cast<int>(kWarpSize);
            if (pair >= half) continue;
            if (p.rotary == kStreams) {
                const uint8_t stream = p.streams[pair];
                row = stream == 0 ? streams[0] : stream == 1 ? streams[1] : streams[2];
            }
            const int64_t angle = min(max(row, static_cast<int64_t>(0)), static_cast<int64_t>(p.angles) - 1) * half + pair;
            cos[i] = at(p, p.cos, angle);
            sin[i] = at(p, p.sin, angle);
        }
    }

    static NXRT_DEVICE float at(const MixerParams& p, const void* table, int64_t i) {
        return p.wide_angles ? static_cast<const float*>(table)[i] : to_float(static_cast<const T*>(table)[i]);
    }
};

// One head's row by a warp: normalised where there are weights, rotated where there are angles. `room` holds kWide floats;
// `to` gets zeros behind the row.
template <class T, int kWide, class A>
NXRT_DEVICE void prepare_row(const MixerParams& p, const T* from, const T* weight, float epsilon, const A* angles, float* room, T* to,
                             T* cache) {
    constexpr int kN = kWide / static_cast<int>(kWarpSize);
    const int lane = lane_id(), dim = p.dim;
    float x[kN];
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
        const int d = lane + i * static_cast<int>(kWarpSize);
        x[i] = d < dim ? to_float(from[d]) : 0.0f;
        square += x[i] * x[i];
    }
    if (weight) {
        float w[kN];
#pragma unroll
        for (int i = 0; i < kN; ++i) {
            const int d = lane + i * static_cast<int>(kWarpSize);
            w[i] = d < dim ? to_float(weight[d]) : 0.0f;
        }
        const float by = rsqrtf(warp_sum(square) / static_cast<float>(dim) + epsilon);
#pragma unroll
        for (int i = 0; i < kN; ++i) x[i] *= by * w[i];
    }
    const int half = angles ? angles->half : 0;
    if (half > 0) {
#pragma unroll
        for (int i = 0; i < kN; ++i) room[lane + i * static_cast<int>(kWarpSize)] = x[i];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
            const int pair = lane + i * static_cast<int>(kWarpSize);
            if (pair >= half) continue;
            const int first = p.interleaved ? 2 * pair : pair, second = p.interleaved ? 2 * pair + 1 : pair + half;
            const float a = room[first], b = room[second], cos = angles->cos[i], sin = angles->sin[i];
            room[first] = a * cos - b * sin;
            room[second] = a * sin + b * cos;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kN; ++i) x[i] = room[lane + i * static_cast<int>(kWarpSize)];
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) {
        const int d = lane + i * static_cast<int>(kWarpSize);
        const T value = from_float<T>(x[i]);
        to[d] = value;
        if (cache && d < dim) cache[d] = value;
    }
}

// A Core is how a warp takes kTile keys at a time, for kRows query heads of at most kWide elements. This one takes them one by
// one, wherever they lie.
template <class T, int kRows, int kWide, int kTile>
struct Plain {
    static constexpr int kN = kWide / static_cast<int>(kWarpSize);

    const MixerParams& p;
    const T *keys, *values;
    int end;
    float acc[kRows][kN] = {};
    float top[kRows], sum[kRows] = {};

    NXRT_DEVICE Plain(const MixerParams& params, const T* all_keys, const T* all_values, int end_of_keys)
        : p(params), keys(all_keys), values(all_values), end(end_of_keys) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) top[r] = kHidden;
    }

    static NXRT_DEVICE int place(int i) { return static_cast<int>(lane_id()) + i * static_cast<int>(kWarpSize); }

    NXRT_DEVICE void read(const T* rows, int row, float (&x)[kN]) const {
#pragma unroll
        for (int i = 0; i < kN; ++i) x[i] = place(i) < static_cast<int>(p.dim) ? to_float(rows[static_cast<int64_t>(row) * p.dim + place(i)]) : 0.0f;
    }

    NXRT_DEVICE void begin(int) {}

    NXRT_DEVICE void step(const T* query, int pitch, int first, int) {
#pragma unroll 1
        for (int key = first; key < min(first + kTile, end); ++key) {
            float k[kN], v[kN];
            read(keys, key, k);
            read(values, key, v);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                float dot = 0.0f;
#pragma unroll
                for (int i = 0; i < kN; ++i) dot += to_float(query[r * pitch + place(i)]) * k[i];
                const float s = score_of(p, warp_sum(dot)), high = fmaxf(top[r], s);
                const float shrink = shrink_of(top[r], high), weight = shrink_of(s, high);
                top[r] = high;
                sum[r] = sum[r] * shrink + weight;
#pragma unroll
                for (int i = 0; i < kN; ++i) acc[r][i] = acc[r][i] * shrink + weight * v[i];
            }
        }
    }

    // Maxima and sums of the rows.
    NXRT_DEVICE void publish(float* tops, float* totals) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            tops[r] = top[r];
            totals[r] = sum[r];
        }
    }

    // `to` gives a row's place (null: there is no such row), `factor` what its sums are multiplied by.
    template <class To, class Factor>
    NXRT_DEVICE void put(To to, Factor factor) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float* row = to(r);
            if (row == nullptr) continue;
            const float by = factor(r);
#pragma unroll
            for (int i = 0; i < kN; ++i) {
                if (place(i) < static_cast<int>(p.dim)) row[place(i)] = acc[r][i] * by;
            }
        }
    }
};

// Core reads keys and values 16 bytes at a time.
template <class Core>
struct Mixer {
    using T = typename Core::Type;
    static constexpr int kRows = Core::kRows, kWide = Core::kWide, kTile = Core::kTile;
    // Rows begin in different banks.
    static constexpr int kPitch = kWide + 16 / static_cast<int>(sizeof(T));

    struct Shared {
        alignas(16) T query[kRows * kPitch];
        alignas(16) T key[kWide];
        alignas(16) T value[kWide];
        float room[kWarps][kWide];
        float top[kWarps][kRows];
        float sum[kWarps][kRows];
        float fresh[kRows];  // the new key's scores
        float weights[kMostParts][kRows];
        float joined_top[kRows];
        float joined_sum[kRows];
        uint32_t ticket;
    };

    const MixerParams& p;
    Shared& shared;
    float* sums;  // [kWarps][rows][dim + 4]
    int b, kv_head, place, split;
    int first, rows;  // query heads of this block
    Span span;
    KeyRange old;  // keys of the past that the new token sees
    bool fresh;    // whether it sees itself
    int step, parts;

    static NXRT_DEVICE Mixer of(const MixerParams& p, Shared& shared, float* sums) {
        const int group = p.heads / p.kv_heads, tiles = ceil_div(group, kRows);
        const int split = blockIdx.x % p.splits, place = blockIdx.x / p.splits;
        const int tile = place % tiles, kv_head = place / tiles % p.kv_heads, b = place / tiles / p.kv_heads;
        const Span span = span_of(p.lengths, b);
        const int start = p.left < 0 ? 0 : max(span.offset - p.left, 0);
        const int end = max(min(span.valid, span.offset + 1), 0), count = max(min(end, span.kept) - start, 0);
        const int granule = p.granule;
        const int step = max(ceil_div(ceil_div(count, static_cast<int>(p.splits)), granule), 1) * granule;
        const int first = kv_head * group + tile * kRows;
        return {p, shared, sums, b, kv_head, place, split, first, min(kRows, group - tile * kRows), span, {start, start + count},
                start <= span.kept && span.kept < end, step, max(ceil_div(count, step), 1)};
    }

    NXRT_DEVICE bool whole() const { return first == kv_head * static_cast<int>(p.heads / p.kv_heads); }
    NXRT_DEVICE bool owner() const { return split == parts - 1; }
    NXRT_DEVICE KeyRange part() const {
        const int start = old.start + split * step;
        return {start, min(start + step, old.end)};
    }
    // Warps that have keys.
    NXRT_DEVICE int busy() const {
        const KeyRange range = part();
        return min(ceil_div(range.end - range.start, kTile), kWarps);
    }
    NXRT_DEVICE int64_t row_in(uint32_t rows_a_head, int row) const {
        return ((static_cast<int64_t>(b) * p.kv_heads + kv_head) * rows_a_head + row) * p.dim;
    }

    // Queries, and in the block of the last part the new key and value, to shared memory and to the cache.
    NXRT_DEVICE void prepare(const Angles<T, kWide / 64>& angles) const {
        float* room = shared.room[warp_id()];
        for (int unit = warp_id(); unit < kRows + (owner() ? 2 : 0); unit += kWarps) {
            if (unit < rows) {
                const T* from = static_cast<const T*>(p.q) + b * p.q_at.batch + (first + unit) * p.q_at.head;
                prepare_row<T, kWide>(p, from, static_cast<const T*>(p.q_weight), p.q_epsilon, &angles, room,
                                      shared.query + unit * kPitch, static_cast<T*>(nullptr));
            } else if (unit < kRows) {
                for (int d = lane_id(); d < kWide; d += kWarpSize) shared.query[unit * kPitch + d] = from_float<T>(0.0f);
            } else {
                const bool key = unit == kRows;
                const HeadStrides& at = key ? p.k_at : p.v_at;
                const T* from = static_cast<const T*>(key ? p.k : p.v) + b * at.batch + kv_head * at.head;
                T* cache = static_cast<T*>(key ? p.keys : p.values) + row_in(p.lengths.keys, span.kept);
                prepare_row<T, kWide>(p, from, static_cast<const T*>(key ? p.k_weight : nullptr), p.k_epsilon, key ? &angles : nullptr,
                                      room, key ? shared.key : shared.value, whole() ? cache : nullptr);
            }
        }
    }

    NXRT_DEVICE void score_new_key() const {
        for (int r = warp_id(); r < rows; r += kWarps) {
            float dot = 0.0f;
            for (int d = lane_id(); d < kWide; d += kWarpSize) dot += to_float(shared.query[r * kPitch + d]) * to_float(shared.key[d]);
            dot = warp_sum(dot);
            if (lane_id() == 0) shared.fresh[r] = score_of(p, dot);
        }
    }

    NXRT_DEVICE bool sees_new() const { return fresh && owner(); }

    NXRT_DEVICE float top_of(int r) const {
        float top = sees_new() ? shared.fresh[r] : kHidden;
        for (int w = 0; w < busy(); ++w) top = fmaxf(top, shared.top[w][r]);
        return top;
    }

    NXRT_DEVICE float* sums_of(int source, int r) const { return sums + (source * rows + r) * (static_cast<int>(p.dim) + 4); }

    NXRT_DEVICE const T* past(const void* cache) const { return static_cast<const T*>(cache) + row_in(p.lengths.past, 0); }
    NXRT_DEVICE int first_key() const { return part().start + static_cast<int>(warp_id()) * kTile; }

    // Attention over this block's part.
    NXRT_DEVICE void attend() const {
        const bool aligned = ((reinterpret_cast<uintptr_t>(p.past_key) | reinterpret_cast<uintptr_t>(p.past_value)) & 15) == 0;
        Core core(p, past(p.past_key), past(p.past_value), part().end);
        if (aligned && first_key() < part().end) core.begin(first_key());
        Angles<T, kWide / 64> angles;
        angles.load(p, span, b);
        prepare(angles);
        __syncthreads();
        if (sees_new()) score_new_key();
        if (aligned) {
            take(core);
        } else {
            take(Plain<T, kRows, kWide, kTile>(p, past(p.past_key), past(p.past_value), part().end));
        }
        if (parts == 1) {
            emit(busy(), [&](int r) { return top_of(r); }, [&](int r, float top) { return sum_of(r, top); });
        } else {
            leave();
            if (is_last()) join();
        }
    }

    // Leaves the warps' sums, all relative to the block's maxima, in shared memory.
    template <class Any>
    NXRT_DEVICE void take(Any&& core) const {
        const int end = part().end;
        for (int key = first_key(); key < end; key += kWarps * kTile) core.step(shared.query, kPitch, key, key + kWarps * kTile);
        const bool has_keys = first_key() < end;
        if (has_keys) core.publish(shared.top[warp_id()], shared.sum[warp_id()]);
        __syncthreads();
        if (has_keys) core.put([&](int r) { return r < rows ? sums_of(warp_id(), r) : nullptr; },
                               [&](int r) { return shrink_of(shared.top[warp_id()][r], top_of(r)); });
        __syncthreads();
    }

    NXRT_DEVICE float sum_of(int r, float top) const {
        float sum = sees_new() ? shrink_of(shared.fresh[r], top) : 0.0f;
        for (int w = 0; w < busy(); ++w) sum += shared.sum[w][r] * shrink_of(shared.top[w][r], top);
        return sum;
    }

    // Elements d..d+4 of row r: the sources' sums, and the new value's share.
    NXRT_DEVICE float4 gather(int sources, int r, int d, float share) const {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (share > 0.0f) {
            const T* v = shared.value + d;
            x = make_float4(share * to_float(v[0]), share * to_float(v[1]), share * to_float(v[2]), share * to_float(v[3]));
        }
        for (int w = 0; w < sources; ++w) {
            const float4 y = *reinterpret_cast<const float4*>(sums_of(w, r) + d);
            x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
        }
        return x;
    }

    NXRT_DEVICE int items() const { return rows * static_cast<int>(p.dim) / 4; }
    // Vectors a row.
    NXRT_DEVICE int width() const { return p.dim / 4; }

    // The output, from this many sources; `top` and `sum` give a row's.
    template <class Top, class Sum>
    NXRT_DEVICE void emit(int sources, Top top, Sum sum) const {
        for (int i = threadIdx.x; i < items(); i += kThreads) {
            const int r = i / width(), d = i % width() * 4, head = first + r;
            float gate[4] = {1.0f, 1.0f, 1.0f, 1.0f};
            if (p.gate) {
                const T* from = static_cast<const T*>(p.gate) + b * p.gate_at.batch + head * p.gate_at.head + d;
#pragma unroll
                for (int j = 0; j < 4; ++j) gate[j] = to_float(from[j]);
            }
            const float high = top(r), total = sum(r, high), by = finish_factor<T>(p, head, high, total);
            const bool added = parts == 1 && sees_new();
            const float4 x = gather(sources, r, d, added ? shrink_of(shared.fresh[r], high) : 0.0f);
            const float y[4] = {x.x * by, x.y * by, x.z * by, x.w * by};
            T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(b) * p.heads + head) * p.dim + d;
#pragma unroll
            for (int j = 0; j < 4; ++j) out[j] = from_float<T>(p.gate ? y[j] / (1.0f + __expf(-gate[j])) : y[j]);
        }
    }

    // Rows of a place in `partial`.
    NXRT_DEVICE int pitch() const { return min(kRows, static_cast<int>(p.heads / p.kv_heads)); }
    NXRT_DEVICE float* partial_of(int part) const {
        return p.partial + (static_cast<int64_t>(place) * p.splits + part) * pitch() * (static_cast<int>(p.dim) + 4);
    }
    NXRT_DEVICE float* statistics_of(int part) const { return partial_of(part) + pitch() * static_cast<int>(p.dim); }

    NXRT_DEVICE void leave() const {
        float4* to = reinterpret_cast<float4*>(partial_of(split));
        for (int i = threadIdx.x; i < items(); i += kThreads) {
            const int r = i / width();
            to[i] = gather(busy(), r, i % width() * 4, sees_new() ? shrink_of(shared.fresh[r], top_of(r)) : 0.0f);
        }
        for (int r = threadIdx.x; r < rows; r += kThreads) {
            const float top = top_of(r);
            statistics_of(split)[2 * r] = top;
            statistics_of(split)[2 * r + 1] = sum_of(r, top);
        }
    }

    // Whether all other parts have been left; makes the counter 0 again.
    NXRT_DEVICE bool is_last() const {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            shared.ticket = atomicAdd(p.counters + place, 1u);
            if (shared.ticket + 1 == static_cast<uint32_t>(parts)) p.counters[place] = 0;
            __threadfence();
        }
        __syncthreads();
        return shared.ticket + 1 == static_cast<uint32_t>(parts);
    }

    NXRT_DEVICE void join() const {
        weigh_parts();
        __syncthreads();
        // Threads by vector, and where there are more of them by part.
        const int sources = max(min(kThreads / items(), kWarps), 1);
        for (int i = threadIdx.x; i < sources * items(); i += kThreads) {
            const int source = i / items(), item = i % items(), r = item / width();
            float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
            for (int part = source; part < parts; part += sources) {
                const float by = shared.weights[part][r];
                const float4 y = __ldcg(reinterpret_cast<const float4*>(partial_of(part)) + item);
                x = make_float4(x.x + by * y.x, x.y + by * y.y, x.z + by * y.z, x.w + by * y.w);
            }
            *reinterpret_cast<float4*>(sums_of(source, r) + item % width() * 4) = x;
        }
        __syncthreads();
        emit(sources, [&](int r) { return shared.joined_top[r]; }, [&](int r, float) { return shared.joined_sum[r]; });
    }

    // A warp a row.
    NXRT_DEVICE void weigh_parts() const {
        for (int r = warp_id(); r < rows; r += kWarps) {
            constexpr int kMine = kMostParts / static_cast<int>(kWarpSize);
            float2 mine[kMine];
            float top = kHidden, sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                const int part = lane_id() + i * kWarpSize;
                mine[i] = make_float2(kHidden, 0.0f);
                if (part < parts) mine[i] = __ldcg(reinterpret_cast<const float2*>(statistics_of(part)) + r);
                top = fmaxf(top, mine[i].x);
            }
            top = warp_max(top);
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                const int part = lane_id() + i * kWarpSize;
                const float by = shrink_of(mine[i].x, top);
                sum += by * mine[i].y;
                if (part < parts) shared.weights[part][r] = by;
            }
            sum = warp_sum(sum);
            if (lane_id() == 0) {
                shared.joined_top[r] = top;
                shared.joined_sum[r] = sum;
            }
        }
    }

    // This block's share of a past that lies in another buffer than the cache: a copy, and zeros behind the new row.
    NXRT_DEVICE void keep(const void* past, void* cache) const {
        if (past == cache) return;
        const int64_t kept = static_cast<int64_t>(span.kept) * p.dim, all = static_cast<int64_t>(p.lengths.keys) * p.dim;
        const T* from = static_cast<const T*>(past) + row_in(p.lengths.past, 0);
        T* to = static_cast<T*>(cache) + row_in(p.lengths.keys, 0);
        constexpr int kN = 16 / static_cast<int>(sizeof(T));
        const bool wide = ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) & 15) == 0;
        if (wide) {
            keep_units<kN>(from, to, kept, all);
        } else {
            keep_units<1>(from, to, kept, all);
        }
    }

    template <int kN>
    NXRT_DEVICE void keep_units(const T* from, T* to, int64_t kept, int64_t all) const {
        Vec<T, kN> zero;
#pragma unroll
        for (int i = 0; i < kN; ++i) zero[i] = from_float<T>(0.0f);
        const int64_t begin = (static_cast<int64_t>(split) * kThreads + threadIdx.x) * kN, stride = static_cast<int64_t>(p.splits) * kThreads * kN;
        for (int64_t i = begin; i < all; i += stride) {
            if (i >= kept && i < kept + p.dim) continue;
            store_vec<T, kN>(to + i, i < kept ? load_vec<T, kN>(from + i) : zero);
        }
    }
};

template <class Core>
NXRT_DEVICE void mix(const MixerParams& p) {
    NXRT_SHARED typename Mixer<Core>::Shared shared;
    NXRT_DYNAMIC_SHARED(float, sums);
    const Mixer<Core> mixer = Mixer<Core>::of(p, shared, sums);
    if (mixer.split < mixer.parts) mixer.attend();
    if (!mixer.whole()) return;
    mixer.keep(p.past_key, p.keys);
    mixer.keep(p.past_value, p.values);
}

}  // namespace nxrt
