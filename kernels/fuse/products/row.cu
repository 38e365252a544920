// Several products of one row, behind the norm that makes the row and before the gated activation that takes two of them:
// what gemv.cu does for some rows, with fewer steps from the row's arrival to the results'. All of a warp's first weights are
// in registers by then. They are not freed of their zero points one by one: an integer q is the float kLow + q (or kHigh + q),
// and the sum of a block's activations, which ones in the place of weights give, times that offset goes off its sum.
//
// A lot is the tiles that a block takes at once, of one product (gated: as many of both). `along` of its warps share a tile's
// groups of columns; a warp takes TB tiles (gated: one of each product), and GU groups of each at once.
#include "segment.cuh"

using namespace nxrt;

struct RowParams {
    const void* x;      // [k]
    const void* skip;   // [k], added to x; null: none
    const void* gamma;  // [k]
    void* sum;          // x + skip; null: nobody reads it
    uint32_t lots;      // of all
    uint32_t count;
    uint32_t k, groups;
    uint32_t along;
    uint32_t per_lot;  // tiles of a lot (gated: of each product)
    uint32_t rounds;   // groups over along GU
    uint32_t norm;     // whether x is normalised
    uint32_t gated;    // y = silu(x w0^T) * (x w1^T)
    float epsilon;
    float inverse_k;
    uint32_t pad;
    uint32_t first[kSegments];  // each product's first lot
    Segment segments[kSegments];
};

// ---- weights ----

// Four-bit integers as floats that are off by a constant: kLow for a fragment's row g, kHigh for row g + 8.
template <class T>
struct Raw;
template <>
struct Raw<half> {
    static constexpr float kLow = 1024, kHigh = 64;
    static constexpr uint32_t kOnes = 0x3c003c00;
    static NXRT_DEVICE void decode(uint32_t (&a)[4], uint32_t x) {
        const uint32_t y = x >> 8;
        a[0] = lop3<0xEA>(x, 0x000f000f, kHalf1024);
        a[1] = lop3<0xEA>(x, 0x00f000f0, kHalf64);
        a[2] = lop3<0xEA>(y, 0x000f000f, kHalf1024);
        a[3] = lop3<0xEA>(y, 0x00f000f0, kHalf64);
    }
};
template <>
struct Raw<bf16> {
    static constexpr float kLow = 128, kHigh = 128;
    static constexpr uint32_t kOnes = 0x3f803f80;
    static NXRT_DEVICE void decode(uint32_t (&a)[4], uint32_t x) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = lop3<0xEA>(x >> (4 * i), 0x000f000f, kBf128);
    }
};

// A group of a tile's weights on their way. A block is kUnit << SHIFT columns; BYTES: zero points are stored, not 8.
template <int SHIFT, bool BYTES>
struct Item {
    static constexpr int kBlocks = kGroupUnits >> SHIFT;
    static constexpr uint32_t kBytes = kGroupColumns * kTileRows / 2, kScaleBytes = kBlocks * 8 * 4, kZeroBytes = kBlocks * 8;
    uint32_t words[kGroupUnits][2];
    uint32_t scales[kBlocks];
    uint32_t zeros[kBlocks];
};

// The activations of one group: those of lanes 0 to 3 are the row, all others' are zero.
template <class T, int SHIFT>
struct Activations {
    static constexpr int kBlocks = kGroupUnits >> SHIFT;
    uint32_t x[kGroupUnits][4];
    float sums[kBlocks];  // over each block

    NXRT_DEVICE void load(const uint8_t* from) {
#pragma unroll
        for (uint32_t u = 0; u < kGroupUnits; ++u) {
            const auto v = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(from + u * kUnit * 2));
#pragma unroll
            for (int j = 0; j < 4; ++j) x[u][j] = v[j];
        }
        const uint32_t ones[4] = {Raw<T>::kOnes, Raw<T>::kOnes, Raw<T>::kOnes, Raw<T>::kOnes};
        float part[kBlocks][4] = {};
#pragma unroll
        for (uint32_t f = 0; f < 2; ++f)
#pragma unroll
            for (uint32_t u = 0; u < kGroupUnits; ++u) add(part[u >> SHIFT], ones, u, f);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) sums[b] = part[b][0];
    }

    // Adds the product of a fragment with the activations of unit u that go with its fragment f.
    NXRT_DEVICE void add(float (&to)[4], const uint32_t (&a)[4], uint32_t u, uint32_t f) const {
        const uint32_t columns[2] = {x[u][2 * f], x[u][2 * f + 1]};
        mma_m16n8k16<T>(to, a, columns);
    }
};

// Adds a group's products for rows g and g + 8.
template <class T, int SHIFT, bool BYTES>
NXRT_DEVICE void multiply(float (&sum)[2], const Item<SHIFT, BYTES>& w, const Activations<T, SHIFT>& x) {
    constexpr int kBlocks = kGroupUnits >> SHIFT;
    float part[kBlocks][4] = {};
#pragma unroll
    for (uint32_t f = 0; f < 2; ++f)
#pragma unroll
        for (uint32_t u = 0; u < kGroupUnits; ++u) {
            uint32_t a[4];
            Raw<T>::decode(a, w.words[u][f]);
            x.add(part[u >> SHIFT], a, u, f);
        }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        const float2 scale = Pair<T>::floats(w.scales[b]);
        const float low = BYTES ? static_cast<float>(w.zeros[b] & 0xf) : 8.0f, high = BYTES ? static_cast<float>(w.zeros[b] >> 4) : 8.0f;
        sum[0] = fmaf(fmaf(-(Raw<T>::kLow + low), x.sums[b], part[b][0]), scale.x, sum[0]);
        sum[1] = fmaf(fmaf(-(Raw<T>::kHigh + high), x.sums[b], part[b][2]), scale.y, sum[1]);
    }
}

// A group of a tile of 16-bit weights at `from`, straight from memory.
template <class T, int SHIFT>
NXRT_DEVICE void multiply_halves(float (&sum)[2], const uint8_t* from, const Activations<T, SHIFT>& x) {
    float part[4] = {};
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
        uint32_t words[16];
        load_chunk<16>(words, from + c * chunk_bytes<16>(), lane_id());
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            uint32_t a[4];
            decode<T, 16>(a, words, static_cast<int>(i), Offsets{0, 0});
            x.add(part, a, c * 2 + i / 2, i % 2);
        }
    }
    sum[0] += part[0];
    sum[1] += part[2];
}

// Where a warp's tiles of a lot are.
template <class T, int SHIFT, bool BYTES, int TB>
struct Feed {
    using I = Item<SHIFT, BYTES>;
    const RowParams& p;
    uint32_t segment, local;  // the lot's product, and its first tile there
    uint32_t halves;
    const uint8_t* data[TB];  // this lane's; 16-bit weights: the tile's
    const uint8_t* scales[TB];
    const uint8_t* zeros[TB];
    bool live[TB];

    // `set`: the warp's place among those that share no tile.
    NXRT_DEVICE void locate(uint32_t lot, uint32_t set) {
        segment = 0;
#pragma unroll
        for (uint32_t s = 1; s < kSegments; ++s)
            if (s < p.count && !p.gated && lot >= p.first[s]) segment = s;
        local = (lot - p.first[segment]) * p.per_lot;
        halves = p.segments[segment].halves;
#pragma unroll
        for (int t = 0; t < TB; ++t) {
            const Segment& s = p.segments[p.gated ? t : segment];
            const uint32_t tile = local + (p.gated ? set : set * TB + t);
            live[t] = tile < s.tiles;
            const uint64_t at = uint64_t(live[t] ? tile : 0) * p.groups;
            data[t] = halves ? s.data + at * (2 * chunk_bytes<16>()) : s.data + at * I::kBytes + lane_id() * 16;
            scales[t] = static_cast<const uint8_t*>(s.scales) + at * I::kScaleBytes + lane_id() / 4 * 4;
            if constexpr (BYTES) zeros[t] = static_cast<const uint8_t*>(s.zeros) + at * I::kZeroBytes + lane_id() / 4;
        }
    }

    NXRT_DEVICE void load(I& to, int t, uint32_t group) const {
        if (group >= p.groups || !live[t]) return;
        if (halves) {
            prefetch_l2(data[t] + uint64_t(group) * (2 * chunk_bytes<16>()) + lane_id() * (2 * chunk_bytes<16>() / kWarpSize));
            return;
        }
        const uint8_t* words = data[t] + group * I::kBytes;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const auto v = load_stream<uint32_t, 4>(reinterpret_cast<const uint32_t*>(words + i * (I::kBytes / 2)));
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) to.words[i * 2 + j / 2][j % 2] = v[int(j)];
        }
#pragma unroll
        for (int b = 0; b < I::kBlocks; ++b) {
            const uint8_t* scale = scales[t] + group * I::kScaleBytes + b * 32;
            to.scales[b] = load_stream<uint32_t, 1>(reinterpret_cast<const uint32_t*>(scale))[0];
            if constexpr (BYTES) to.zeros[b] = load_stream<uint8_t, 1>(zeros[t] + group * I::kZeroBytes + b * 8)[0];
        }
    }
};

// A group of this warp's tile t of a lot, whatever its weights are.
template <class T, int SHIFT, bool BYTES>
NXRT_DEVICE void multiply_any(float (&sum)[2], const RowParams& p, const Item<SHIFT, BYTES>& item, uint32_t segment, uint32_t tile,
                              uint32_t group, const Activations<T, SHIFT>& x) {
    const Segment& s = p.segments[segment];
    if (!s.halves) {
        multiply<T, SHIFT, BYTES>(sum, item, x);
    } else if (tile < s.tiles) {
        multiply_halves<T, SHIFT>(sum, s.data + (uint64_t(tile) * p.groups + group) * (2 * chunk_bytes<16>()), x);
    }
}

// ---- the row ----

// The inverse of the row's root mean square from each thread's sum of squares. `shared32` is free again after the next barrier.
NXRT_DEVICE float inverse_norm(const RowParams& p, float squares, float* shared32) {
    return rsqrtf(fmaf(quick_block_sum(squares, shared32), p.inverse_k, p.epsilon));
}

// The row to shared memory, V elements a thread: all that depends on the kernel in front of this one begins here.
template <class T, int V>
NXRT_DEVICE void stage(const RowParams& p, T* to, float* shared32) {
    const uint32_t at = threadIdx.x * V;
    const bool live = at < p.k;
    Vec<T, V> factor = {}, x = {}, skip = {};
    if (live && p.norm) factor = load_vec<T, V>(static_cast<const T*>(p.gamma) + at);
    grid_dependency_wait();
    if (live) x = load_vec<T, V>(static_cast<const T*>(p.x) + at);
    if (live && p.skip) skip = load_vec<T, V>(static_cast<const T*>(p.skip) + at);
    grid_dependency_launch();
    if (!p.norm) {
        if (live) store_vec<T, V>(to + at, x);
        return;
    }
    float v[V], squares = 0;
#pragma unroll
    for (int j = 0; j < V; ++j) {
        v[j] = to_float(x[j]) + (p.skip ? to_float(skip[j]) : 0.0f);
        squares = fmaf(v[j], v[j], squares);
    }
    const float inverse = inverse_norm(p, squares, shared32);
    Vec<T, V> sum, scaled;
#pragma unroll
    for (int j = 0; j < V; ++j) {
        sum[j] = from_float<T>(v[j]);
        scaled[j] = from_float<T>(v[j] * (inverse * to_float(factor[j])));
    }
    if (live) store_vec<T, V>(to + at, scaled);
    if (live && p.sum && blockIdx.x == 0) store_vec<T, V>(static_cast<T*>(p.sum) + at, sum);
}

// The same for a row of more than eight elements a thread: it is read twice.
template <class T>
NXRT_DEVICE void stage_long(const RowParams& p, T* to, float* shared32) {
    grid_dependency_wait();
    grid_dependency_launch();
    auto element = [&](uint32_t i) {
        return to_float(static_cast<const T*>(p.x)[i]) + (p.skip ? to_float(static_cast<const T*>(p.skip)[i]) : 0.0f);
    };
    float squares = 0, inverse = 1;
    for (uint32_t i = threadIdx.x; p.norm && i < p.k; i += blockDim.x) squares += element(i) * element(i);
    if (p.norm) inverse = inverse_norm(p, squares, shared32);
    for (uint32_t i = threadIdx.x; i < p.k; i += blockDim.x) {
        const float v = element(i);
        if (p.sum && blockIdx.x == 0) static_cast<T*>(p.sum)[i] = from_float<T>(v);
        to[i] = from_float<T>(p.norm ? v * (inverse * to_float(static_cast<const T*>(p.gamma)[i])) : v);
    }
}

template <class T>
NXRT_DEVICE void stage_any(const RowParams& p, T* to, float* shared32) {
    if (p.k <= blockDim.x * 2) {
        stage<T, 2>(p, to, shared32);
    } else if (p.k <= blockDim.x * 4) {
        stage<T, 4>(p, to, shared32);
    } else if (p.k <= blockDim.x * 8) {
        stage<T, 8>(p, to, shared32);
    } else {
        stage_long<T>(p, to, shared32);
    }
}

// ---- the results ----

// Floats from one row of a tile to the next: warps' sums side by side, whole vectors, in different banks.
NXRT_DEVICE uint32_t sums_pitch(const RowParams& p) { return (p.along + 3) / 4 * 4 + 4; }

// Adds up what the warps have of each output of a lot, and stores it. Behind a barrier.
template <class T>
NXRT_DEVICE void finish(const RowParams& p, uint32_t segment, uint32_t local, const float* sums) {
    const uint32_t pitch = sums_pitch(p);
    for (uint32_t i = threadIdx.x; i < p.per_lot * kTileRows; i += blockDim.x) {
        const uint32_t tile = i / kTileRows, n = (local + tile) * kTileRows + i % kTileRows;
        auto total = [&](uint32_t of, const Segment& s) {
            const float* from = sums + (of * kTileRows + i % kTileRows) * pitch;
            float sum = s.bias && n < s.n ? to_float(static_cast<const T*>(s.bias)[n]) : 0.0f;
            for (uint32_t w = 0; w < p.along; w += 4) {
                const auto v = load_vec<float, 4>(from + w);
#pragma unroll
                for (uint32_t j = 0; j < 4; ++j) sum += w + j < p.along ? v[int(j)] : 0.0f;
            }
            return sum;
        };
        float y;
        if (p.gated) {
            const float gate = total(2 * tile, p.segments[0]);
            y = gate / (1.0f + __expf(-gate)) * total(2 * tile + 1, p.segments[1]);
        } else {
            y = total(tile, p.segments[segment]);
        }
        if (n < p.segments[segment].n) static_cast<T*>(p.segments[segment].y)[n] = from_float<T>(y);
    }
}

// ---- all of it ----

// Dynamic shared memory: the row, 64 bytes, a group of zeros, then two times a lot's sums.
template <class T, int SHIFT, bool BYTES, int TB, int GU>
NXRT_DEVICE void row_products(const RowParams& p) {
    NXRT_SHARED float shared32[kWarpSize];
    NXRT_DYNAMIC_SHARED(uint8_t, staged);
    const uint32_t set = warp_id() / p.along, way = warp_id() % p.along;
    const uint32_t row_bytes = p.groups * kGroupColumns * 2 + 64;
    float* const sums = reinterpret_cast<float*>(staged + row_bytes + kGroupColumns * 2);
    const uint32_t lot_sums = p.per_lot * (p.gated ? 2 : 1) * kTileRows * sums_pitch(p);

    Feed<T, SHIFT, BYTES, TB> feed{p};
    feed.locate(blockIdx.x, set);
    Item<SHIFT, BYTES> items[GU][TB];
    // Weights are constant: they are on their way before the kernel in front has written x.
#pragma unroll
    for (int g = 0; g < GU; ++g)
#pragma unroll
        for (int t = 0; t < TB; ++t) feed.load(items[g][t], t, way + g * p.along);
    const Vec<uint32_t, 4> none = {};
    if (threadIdx.x < kGroupColumns / 8)
        store_vec<uint32_t, 4>(reinterpret_cast<uint32_t*>(staged + row_bytes) + threadIdx.x * 4, none);
    stage_any<T>(p, reinterpret_cast<T*>(staged), shared32);
    __syncthreads();

    // Lanes past the row read the zeros, whatever the group.
    const bool first_row = lane_id() < 4;
    const uint8_t* x = staged + (first_row ? 0 : row_bytes) + lane_id() % 4 * 16;
    Activations<T, SHIFT> activations;
    uint32_t loaded = ~0u, parity = 0;
    for (uint32_t lot = blockIdx.x; lot < p.lots; lot += gridDim.x) {
        const uint32_t segment = feed.segment, local = feed.local;
        const bool more = lot + gridDim.x < p.lots;
        float sum[TB][2] = {};
        for (uint32_t round = 0; round < p.rounds; ++round) {
            const bool last = round + 1 == p.rounds;
            if (last && more) feed.locate(lot + gridDim.x, set);
#pragma unroll
            for (int g = 0; g < GU; ++g) {
                const uint32_t group = way + (round * GU + g) * p.along;
                if (group < p.groups && group != loaded) {
                    activations.load(x + (first_row ? group * kGroupColumns * 2 : 0));
                    loaded = group;
                }
#pragma unroll
                for (int t = 0; t < TB; ++t) {
                    const uint32_t tile = local + set * TB + t;
                    if (group < p.groups) multiply_any<T, SHIFT, BYTES>(sum[t], p, items[g][t], segment, tile, group, activations);
                    if (!last || more) feed.load(items[g][t], t, last ? way + g * p.along : group + GU * p.along);
                }
            }
        }
        float* mine = sums + parity * lot_sums + (set * TB * kTileRows + lane_id() / 4) * sums_pitch(p) + way;
        if (lane_id() % 4 == 0) {
#pragma unroll
            for (uint32_t t = 0; t < TB; ++t) {
                mine[t * kTileRows * sums_pitch(p)] = sum[t][0];
                mine[(t * kTileRows + 8) * sums_pitch(p)] = sum[t][1];
            }
        }
        __syncthreads();
        finish<T>(p, segment, local, sums + parity * lot_sums);
        parity ^= 1;
    }
}

// `wide` takes two tiles a warp, `deep` two groups.
#define ROW(block, shift, zeros, bytes, type, T)                                                                            \
    NXRT_KERNEL_EARLY(row_wide_##block##_##zeros##_##type, RowParams, (row_products<T, shift, bytes, 2, 1>), 512) \
    NXRT_KERNEL_EARLY(row_deep_##block##_##zeros##_##type, RowParams, (row_products<T, shift, bytes, 1, 2>), 512)
#define ROWS(block, shift, type, T)               \
    ROW(block, shift, plain, false, type, T) \
    ROW(block, shift, bytes, true, type, T)

ROWS(32, 0, f16, half)
ROWS(64, 1, f16, half)
ROWS(128, 2, f16, half)
ROWS(32, 0, bf16, bf16)
ROWS(64, 1, bf16, bf16)
ROWS(128, 2, bf16, bf16)
