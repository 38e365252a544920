// The mixer for half types where heads have a size known here and all rows can be read 16 bytes at a time: the work of
// mixer.cuh in few dependent steps. A grid has parts in x, key heads' tiles of query heads in y, batch entries in z.
//
// What the kernel in front does not write is read before that has ended: weights and, with `early`, lengths, angles, the first
// keys and values. The new key and value take their places in the tile that they belong to. Warps leave sums with maxima of
// their own, and whoever gathers them weighs them.
//
// H200, f16, 8 query and 2 key heads of 256, microseconds in a chain of kernels that overlap, mixer.cuh against this: 64 tokens
// 9.2 and 5.7, 265 12.4 and 8.2, 1024 14.2 and 8.8, 4000 16.1 and 9.8. Without `early` 265 take 9.7; blocks of four warps 8.5.
#pragma once

#include "mixer.cuh"

namespace nxrt {

// Counts up; who counts later sees what was written before.
NXRT_DEVICE uint32_t ticket_of(uint32_t* counter) {
#ifdef NXRT_EMULATE
    return atomicAdd(counter, 1u);
#else
    uint32_t ticket;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(ticket) : "l"(counter) : "memory");
    return ticket;
#endif
}

template <class Core>
struct Swift {
    using T = typename Core::Type;
    using Piece = Vec<T, 8>;
    static constexpr int kRows = Core::kRows, kWide = Core::kWide, kTile = Core::kTile;
    static constexpr int kGranule = kWarps * kTile;
    // Rows begin in different banks.
    static constexpr int kPitch = kWide + 8;

    struct Shared {
        alignas(16) T query[kRows * kPitch];
        alignas(16) T key[kWide];
        alignas(16) T value[kWide];
        alignas(16) float top[kRows][kWarps];
        alignas(16) float sum[kRows][kWarps];
        uint32_t ticket;
    };

    const MixerParams& p;
    Shared& shared;
    float* sums;  // [kWarps][rows][H + 4]
    int lane, warp, split, place, b, kv_head, first, rows;
    bool whole;
    // Known once the lengths are.
    Span span;
    KeyRange keys;  // what the new token sees, itself included
    int step, parts, fresh;  // fresh: its row, where it sees itself
    // The angles of the lane's elements.
    float cos[8], sin[8];

    NXRT_DEVICE Swift(const MixerParams& params, Shared& room, float* sums_room) : p(params), shared(room), sums(sums_room) {
        lane = lane_id();
        warp = warp_id();
        split = blockIdx.x;
        place = blockIdx.z * gridDim.y + blockIdx.y;
        b = blockIdx.z;
        kv_head = blockIdx.y;
        int tile = 0;
        if (p.group > kRows) {
            const int tiles = ceil_div(static_cast<int>(p.group), kRows);
            tile = kv_head % tiles;
            kv_head /= tiles;
        }
        first = kv_head * p.group + tile * kRows;
        rows = min(kRows, static_cast<int>(p.group) - tile * kRows);
        whole = tile == 0;
    }

    NXRT_DEVICE void measure() {
        span = span_of(p.lengths, b);
        const int start = p.left < 0 ? 0 : max(span.offset - p.left, 0), end = max(min(span.valid, span.offset + 1), 0);
        const bool sees = start <= span.kept && span.kept < end;
        const int old = max(min(end, span.kept) - start, 0), count = old + (sees ? 1 : 0);
        fresh = sees ? span.kept : -1;
        keys = {start, start + count};
        step = kGranule;
        if (count > kGranule * static_cast<int>(p.splits)) step = ceil_div(ceil_div(count, static_cast<int>(p.splits)), kGranule) * kGranule;
        parts = max(step == kGranule ? ceil_div(count, kGranule) : ceil_div(count, step), 1);
    }

    NXRT_DEVICE bool owner() const { return split == parts - 1; }
    NXRT_DEVICE int part_start() const { return keys.start + split * step; }
    NXRT_DEVICE int part_end() const { return min(part_start() + step, keys.end); }
    NXRT_DEVICE int first_key() const { return part_start() + warp * kTile; }
    NXRT_DEVICE int64_t row_in(uint32_t rows_a_head, int row) const {
        return ((static_cast<int64_t>(b) * p.kv_heads + kv_head) * rows_a_head + row) * kWide;
    }

    NXRT_DEVICE int d() const { return lane * 8; }
    NXRT_DEVICE bool has() const { return kWide >= 256 || d() < kWide; }
    NXRT_DEVICE bool rotated() const { return d() < 2 * static_cast<int>(p.half); }
    NXRT_DEVICE bool lower() const { return d() < static_cast<int>(p.half); }
    NXRT_DEVICE int partner() const { return lower() ? d() + p.half : d() - p.half; }

    // ---- angles ----

    NXRT_DEVICE void angles_at(const void* table, int64_t row, float (&to)[8]) const {
        const int64_t at = min(max(row, static_cast<int64_t>(0)), static_cast<int64_t>(p.angles) - 1) * p.half + (lower() ? d() : d() - p.half);
        if (p.wide_angles) {
            const Vec<float, 8> x = load_vec<float, 8>(static_cast<const float*>(table) + at);
#pragma unroll
            for (int i = 0; i < 8; ++i) to[i] = x[i];
        } else {
            const Piece x = load_vec<T, 8>(static_cast<const T*>(table) + at);
#pragma unroll
            for (int i = 0; i < 8; ++i) to[i] = to_float(x[i]);
        }
    }

    // Needs the lengths for angles by place.
    NXRT_DEVICE void turn() {
        if (p.rotary == kNone || p.angles == 0 || !rotated() || !has()) return;
        int64_t row = b;
        if (p.rotary == kStreams) {
            const int64_t* at = p.positions + b;
            const int64_t r[3] = {at[0], at[p.batch], at[2 * static_cast<int64_t>(p.batch)]};
            angles_at(p.cos, r[0], cos);
            angles_at(p.sin, r[0], sin);
            if (r[1] == r[0] && r[2] == r[0]) return;
#pragma unroll 1
            for (int s = 1; s < 3; ++s) {
                float c[8], n[8];
                angles_at(p.cos, s == 1 ? r[1] : r[2], c);
                angles_at(p.sin, s == 1 ? r[1] : r[2], n);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (p.streams[(lower() ? d() : d() - p.half) + i] != s) continue;
                    cos[i] = c[i];
                    sin[i] = n[i];
                }
            }
            return;
        }
        if (p.rotary == kCache) {
            const bool prompt = p.lengths.first == 2 ? *p.lengths.total == 1 : p.lengths.first != 0;
            row = static_cast<int64_t>(span.base) + span.offset;
            if (p.positions) row = p.positions[prompt ? 0 : static_cast<int64_t>(b) * p.positions_row];
        } else if (p.rotary == kEach) {
            row = p.positions[b];
        } else if (p.rotary == kFirst) {
            row = p.positions[0];
        }
        angles_at(p.cos, row, cos);
        angles_at(p.sin, row, sin);
    }

    // ---- rows: a warp a row, eight elements a lane ----

    struct Row {
        Piece x, y;  // the lane's elements, and those that they are rotated with
    };

    NXRT_DEVICE Row read(const T* from, bool turned) const {
        Row r = {};
        if (from && has()) {
            r.x = load_vec<T, 8>(from + d());
            if (turned && rotated()) r.y = load_vec<T, 8>(from + partner());
        }
        return r;
    }

    // Units: queries, then the new key, then the new value.
    NXRT_DEVICE Row weights_of(int unit) const {
        return read(static_cast<const T*>(unit < rows ? p.q_weight : unit == rows ? p.k_weight : nullptr), true);
    }
    NXRT_DEVICE Row row_of(int unit) const {
        if (unit > rows + 1) return {};
        const HeadStrides& at = unit < rows ? p.q_at : unit == rows ? p.k_at : p.v_at;
        const T* from = static_cast<const T*>(unit < rows ? p.q : unit == rows ? p.k : p.v);
        return read(from + b * at.batch + (unit < rows ? first + unit : kv_head) * at.head, unit <= rows);
    }

    NXRT_DEVICE void prepare(int unit, const Row& row, const Row& weight) const {
        const bool query = unit < rows, key = unit == rows;
        float x[8], y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = to_float(row.x[i]);
            y[i] = to_float(row.y[i]);
        }
        if (query ? p.q_weight != nullptr : key && p.k_weight != nullptr) {
            float square = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) square += x[i] * x[i];
            const float by = rsqrtf(warp_sum(square) * (1.0f / kWide) + (query ? p.q_epsilon : p.k_epsilon));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                x[i] *= by * to_float(weight.x[i]);
                y[i] *= by * to_float(weight.y[i]);
            }
        }
        if (!has()) return;
        if ((query || key) && p.rotary != kNone && p.angles != 0 && rotated()) {
            const float sign = lower() ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = x[i] * cos[i] + sign * y[i] * sin[i];
        }
        Piece to;
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = from_float<T>(x[i]);
        store_vec<T, 8>((query ? shared.query + unit * kPitch : key ? shared.key : shared.value) + d(), to);
        if (!query && whole) store_vec<T, 8>(static_cast<T*>(key ? p.keys : p.values) + row_in(p.lengths.keys, span.kept) + d(), to);
    }

    // ---- sums ----

    NXRT_DEVICE int busy() const { return min(max(ceil_div(part_end() - part_start(), kTile), 0), kWarps); }
    NXRT_DEVICE int items() const { return rows * (kWide / 4); }
    NXRT_DEVICE float* sums_of(int source, int r) const { return sums + (source * rows + r) * (kWide + 4); }

    struct Share {
        float4 x;
        float top, sum;
    };

    // Elements d..d+4 of row r over the block's warps.
    NXRT_DEVICE Share gather(int r, int at) const {
        const int n = busy();
        float top[kWarps], sum[kWarps];
        float4 y[kWarps];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            top[w] = kHidden;
            sum[w] = 0.0f;
            y[w] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (w < n) {
                top[w] = shared.top[r][w];
                sum[w] = shared.sum[r][w];
                y[w] = *reinterpret_cast<const float4*>(sums_of(w, r) + at);
            }
        }
        Share s = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kHidden, 0.0f};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) s.top = fmaxf(s.top, top[w]);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float by = shrink_of(top[w], s.top);
            s.sum += by * sum[w];
            s.x = make_float4(s.x.x + by * y[w].x, s.x.y + by * y[w].y, s.x.z + by * y[w].z, s.x.w + by * y[w].w);
        }
        return s;
    }

    NXRT_DEVICE Vec<T, 4> gate_of(int item) const {
        const int r = item / (kWide / 4), at = item % (kWide / 4) * 4;
        if (p.gate == nullptr || r >= rows) return {};
        return load_vec<T, 4>(static_cast<const T*>(p.gate) + b * p.gate_at.batch + (first + r) * p.gate_at.head + at);
    }

    NXRT_DEVICE void emit(int item, const Share& s, const Vec<T, 4>& gate) const {
        const int r = item / (kWide / 4), at = item % (kWide / 4) * 4, head = first + r;
        const float by = finish_factor<T>(p, head, s.top, s.sum);
        const float y[4] = {s.x.x * by, s.x.y * by, s.x.z * by, s.x.w * by};
        Vec<T, 4> to;
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = from_float<T>(p.gate ? y[j] / (1.0f + __expf(-to_float(gate[j]))) : y[j]);
        store_vec<T, 4>(static_cast<T*>(p.out) + (static_cast<int64_t>(b) * p.heads + head) * kWide + at, to);
    }

    // ---- parts ----

    NXRT_DEVICE float* partial_of(int part) const {
        return p.partial + (static_cast<int64_t>(place) * p.splits + part) * min(kRows, static_cast<int>(p.group)) * (kWide + 4);
    }
    // Maximum and sum of a part's row r.
    NXRT_DEVICE float2* statistics_of(int part, int r) const {
        return reinterpret_cast<float2*>(partial_of(part) + min(kRows, static_cast<int>(p.group)) * kWide) + r;
    }

    // Whether all other parts have been left; makes the counter 0 again.
    NXRT_DEVICE bool is_last() const {
        __syncthreads();
        if (threadIdx.x == 0) {
            shared.ticket = ticket_of(p.counters + place);
            if (shared.ticket + 1 == static_cast<uint32_t>(parts)) p.counters[place] = 0;
        }
        __syncthreads();
        return shared.ticket + 1 == static_cast<uint32_t>(parts);
    }

    NXRT_DEVICE Share joined(int item) const {
        constexpr int kAtOnce = 8;
        const int r = item / (kWide / 4);
        Share s = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kHidden, 0.0f};
#pragma unroll 1
        for (int part = 0; part < parts; part += kAtOnce) {
            float2 t[kAtOnce];
            float4 y[kAtOnce];
            float top = s.top;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                t[i] = make_float2(kHidden, 0.0f);
                y[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (part + i < parts) {
                    t[i] = __ldcg(statistics_of(part + i, r));
                    y[i] = __ldcg(reinterpret_cast<const float4*>(partial_of(part + i)) + item);
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) top = fmaxf(top, t[i].x);
            const float shrink = shrink_of(s.top, top);
            s = {make_float4(s.x.x * shrink, s.x.y * shrink, s.x.z * shrink, s.x.w * shrink), top, s.sum * shrink};
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const float by = shrink_of(t[i].x, top);
                s.sum += by * t[i].y;
                s.x = make_float4(s.x.x + by * y[i].x, s.x.y + by * y[i].y, s.x.z + by * y[i].z, s.x.w + by * y[i].w);
            }
        }
        return s;
    }

    NXRT_DEVICE void run() {
        const bool early = p.early != 0;
        Row weight = weights_of(warp);
        if (!early) grid_dependency_ready();
        measure();
        const T* old_keys = static_cast<const T*>(p.past_key) + row_in(p.lengths.past, 0);
        const T* old_values = static_cast<const T*>(p.past_value) + row_in(p.lengths.past, 0);
        Core core(p, old_keys, old_values, 0);
        if (split < parts) {
            begin(core);
            turn();
        }
        if (early) grid_dependency_ready();
        if (split < parts) attend(core, weight);
        keep();
    }

    NXRT_DEVICE void attend(Core& core, Row& weight) const {
        Row row = row_of(warp);
        const Vec<T, 4> gate = gate_of(threadIdx.x);
        const int units = rows + (owner() ? 2 : 0);
#pragma unroll 1
        for (int unit = warp; unit < units;) {
            prepare(unit, row, weight);
            unit += kWarps;
            if (unit >= units) break;
            row = row_of(unit);
            weight = weights_of(unit);
        }
        __syncthreads();
        core.expect(fresh, shared.key, shared.value, rows);
        take(core, part_end());
        for (int item = threadIdx.x; item < items(); item += kThreads) {
            const int r = item / (kWide / 4), at = item % (kWide / 4) * 4;
            const Share s = gather(r, at);
            if (parts == 1) {
                emit(item, s, item < kThreads ? gate : gate_of(item));
                continue;
            }
            reinterpret_cast<float4*>(partial_of(split))[item] = s.x;
            if (at == 0) *statistics_of(split, r) = make_float2(s.top, s.sum);
        }
        if (parts == 1 || !is_last()) return;
        for (int item = threadIdx.x; item < items(); item += kThreads) emit(item, joined(item), item < kThreads ? gate : gate_of(item));
    }

    // The warps' tiles, and what they leave in shared memory.
    NXRT_DEVICE void take(Core& core, int end) const {
#pragma unroll 1
        for (int key = first_key(); key < end; key += kGranule) core.step(shared.query, kPitch, key, key + kGranule);
        if (first_key() < end) {
            core.publish(&shared.top[0][warp], &shared.sum[0][warp], kWarps);
            core.put([&](int r) { return r < rows ? sums_of(warp, r) : nullptr; }, [](int) { return 1.0f; });
        }
        __syncthreads();
    }

    NXRT_DEVICE void begin(Core& core) const {
        core.end = part_end();
        // Not a row outside of what is seen, whatever it holds.
        const int old = min(part_end(), span.kept);
        core.last = old > part_start() ? old - 1 : -1;
        if (first_key() < core.end) core.begin(first_key());
    }

    NXRT_DEVICE void keep() const {
        if (!whole) return;
        keep_one(p.past_key, p.keys);
        keep_one(p.past_value, p.values);
    }

    // This block's share of a past that lies in another buffer than the cache: a copy, and zeros behind the new row.
    NXRT_DEVICE void keep_one(const void* past, void* cache) const {
        if (past == cache) return;
        const int64_t kept = static_cast<int64_t>(span.kept) * kWide, all = static_cast<int64_t>(p.lengths.keys) * kWide;
        const T* from = static_cast<const T*>(past) + row_in(p.lengths.past, 0);
        T* to = static_cast<T*>(cache) + row_in(p.lengths.keys, 0);
        const int64_t begin = (static_cast<int64_t>(split) * kThreads + threadIdx.x) * 8, stride = static_cast<int64_t>(p.splits) * kThreads * 8;
#pragma unroll 1
        for (int64_t i = begin; i < all; i += stride) {
            if (i >= kept && i < kept + kWide) continue;
            store_vec<T, 8>(to + i, i < kept ? load_vec<T, 8>(from + i) : Piece{});
        }
    }
};

template <class Core>
NXRT_DEVICE void mix_swiftly(const MixerParams& p) {
    NXRT_SHARED typename Swift<Core>::Shared shared;
    NXRT_DYNAMIC_SHARED(float, sums);
    Swift<Core>(p, shared, sums).run();
}

}  // namespace nxrt
