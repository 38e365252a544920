// Several products of one input of few rows, behind the norm that makes it and before the gated activation that takes
// two of them. The input is normalised into shared memory by every block; weights stream through registers as in gemv4.cuh.
#include "segment.cuh"

using namespace nxrt;

struct GroupedParams {
    const void* x;      // [m, k]
    const void* skip;   // [m, k], added to x; null: none
    const void* gamma;  // [k]
    void* sum;          // x + skip; null: nobody reads it
    uint32_t tiles;     // of all
    uint32_t count;
    uint32_t m, k, chunks;
    uint32_t norm;   // whether x is normalised
    uint32_t gated;  // y = silu(x w0^T) * (x w1^T), tile by tile
    float epsilon;
    uint32_t first[kSegments];  // each product's first tile; together, since every block reads them all
    Segment segments[kSegments];
};

// A tile on its way, and this warp's next group of it.
struct Cursor {
    uint32_t tile;  // among all; gated: pairs of tiles
    uint32_t segment, local, group;

    NXRT_DEVICE void locate(const GroupedParams& p) {
        if (p.gated) {
            segment = tile & 1;
            local = tile >> 1;
            return;
        }
        segment = 0;
        while (segment + 1 < p.count && tile >= p.first[segment + 1]) ++segment;
        local = tile - p.first[segment];
    }

    NXRT_DEVICE static Cursor start(const GroupedParams& p) {
        Cursor c;
        c.tile = p.gated ? 2 * blockIdx.x : blockIdx.x;
        c.group = warp_id();
        c.locate(p);
        return c;
    }

    // To this warp's next group; whether the tile is done.
    NXRT_DEVICE bool advance(const GroupedParams& p, uint32_t groups, uint32_t warps) {
        group += warps;
        if (group < groups) return false;
        group = warp_id();
        if (!p.gated) {
            tile += gridDim.x;
        } else {
            tile = tile & 1 ? tile - 1 + 2 * gridDim.x : tile + 1;
        }
        locate(p);
        return true;
    }
};

// A group of 16-bit weights: 128 columns.
template <class T>
NXRT_DEVICE void multiply_halves(float (&sum)[4], const uint8_t* data, uint32_t local, uint32_t group, uint32_t chunks, const uint8_t* x) {
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
        uint32_t words[16];
        load_chunk<16>(words, data + (uint64_t(local) * chunks + group * 2 + c) * chunk_bytes<16>(), lane_id());
#pragma unroll
        for (uint32_t u = 0; u < 2; ++u) {
            const auto v = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(x + (2 * c + u) * kUnit * 2));
#pragma unroll
            for (uint32_t f = 0; f < 2; ++f) {
                uint32_t a[4];
                decode<T, 16>(a, words, int(u * 2 + f), Offsets{0, 0});
                const uint32_t columns[2] = {v[int(2 * f)], v[int(2 * f + 1)]};
                mma_m16n8k16<T>(sum, a, columns);
            }
        }
    }
}

// 4-bit weights in blocks of kUnit << SHIFT.
template <class T, int SHIFT, bool BYTES>
struct Lean {
    using G = Gemv4<T, SHIFT, BYTES>;
    using Group = typename G::Group;

    static NXRT_DEVICE void load(Group& to, const GroupedParams& p, const Cursor& at, uint32_t groups) {
        if (at.tile >= p.tiles || p.segments[at.segment].halves) return;
        const unsigned lane = lane_id();
        const uint64_t index = uint64_t(at.local) * groups + at.group;
        const uint8_t* words = p.segments[at.segment].data + index * G::kGroupBytes + lane * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto v = load_stream<uint32_t, 4>(reinterpret_cast<const uint32_t*>(words + i * (G::kGroupBytes / 2)));
#pragma unroll
            for (int j = 0; j < 4; ++j) to.words[i][j] = v[j];
        }
        const uint32_t* scales = static_cast<const uint32_t*>(p.segments[at.segment].scales) + index * (G::kScales * 8) + lane / 4;
        const uint8_t* zeros = static_cast<const uint8_t*>(p.segments[at.segment].zeros) + (BYTES ? index * (G::kScales * 8) + lane / 4 : 0);
#pragma unroll
        for (uint32_t i = 0; i < G::kScales; ++i) {
            to.scales[i] = load_stream<uint32_t, 1>(scales + i * 8)[0];
            if constexpr (BYTES) to.zeros[i] = load_stream<uint8_t, 1>(zeros + i * 8)[0];
        }
    }

    static NXRT_DEVICE void multiply(float (&sum)[4], const Group& w, const GroupedParams& p, const Cursor& at, const uint8_t* x) {
        if (p.segments[at.segment].halves) {
            multiply_halves<T>(sum, p.segments[at.segment].data, at.local, at.group, p.chunks, x);
        } else {
            G::multiply(sum, w, x);
        }
    }
};

// 16-bit weights throughout.
template <class T>
struct Halves {
    struct Group {};
    static NXRT_DEVICE void load(Group&, const GroupedParams&, const Cursor&, uint32_t) {}
    static NXRT_DEVICE void multiply(float (&sum)[4], const Group&, const GroupedParams& p, const Cursor& at, const uint8_t* x) {
        multiply_halves<T>(sum, p.segments[at.segment].data, at.local, at.group, p.chunks, x);
    }
};

NXRT_DEVICE uint32_t row_bytes(const GroupedParams& p) { return p.chunks * kChunk * 2 + 64; }

// Eight elements of a row in float.
struct Eight {
    float v[8];

    NXRT_DEVICE float squares() const {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += v[j] * v[j];
        return sum;
    }
    template <class T>
    NXRT_DEVICE Vec<T, 8> rounded() const {
        Vec<T, 8> to;
#pragma unroll
        for (int j = 0; j < 8; ++j) to[j] = from_float<T>(v[j]);
        return to;
    }
    template <class T>
    NXRT_DEVICE void scale(float inverse, const Vec<T, 8>& factor) {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= inverse * to_float(factor[j]);
    }
};

// The input's elements at `at`, what is skipped added.
template <class T>
NXRT_DEVICE Eight load_sum(const GroupedParams& p, uint64_t at) {
    const Vec<T, 8> x = load_vec<T, 8>(static_cast<const T*>(p.x) + at);
    Vec<T, 8> skip = {};
    if (p.skip) skip = load_vec<T, 8>(static_cast<const T*>(p.skip) + at);
    Eight sum;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum.v[j] = to_float(x[j]) + (p.skip ? to_float(skip[j]) : 0.0f);
    return sum;
}

template <class T>
NXRT_DEVICE void store_sum(const GroupedParams& p, uint64_t at, const Eight& sum) {
    if (p.sum && blockIdx.x == 0) store_vec<T, 8>(static_cast<T*>(p.sum) + at, sum.rounded<T>());
}

// One row m0 to shared memory, normalised: a vector a thread.
template <class T>
NXRT_DEVICE void stage_row(const GroupedParams& p, T* to, uint32_t m0, float* shared32) {
    const unsigned i = threadIdx.x;
    const bool live = i < p.k / 8;
    Eight v = {};
    Vec<T, 8> factor = {};
    if (live) v = load_sum<T>(p, uint64_t(m0) * p.k + i * 8);
    if (live && p.norm) factor = load_vec<T, 8>(static_cast<const T*>(p.gamma) + i * 8);
    if (live) store_sum<T>(p, uint64_t(m0) * p.k + i * 8, v);
    if (p.norm) v.scale<T>(rsqrtf(quick_block_sum(v.squares(), shared32) / float(p.k) + p.epsilon), factor);
    if (live) store_vec<T, 8>(to + i * 8, v.rounded<T>());
}

// Rows m0 .. m0 + rows of the input to shared memory, normalised, a row a warp, and behind them a group of zeros.
template <class T>
NXRT_DEVICE void stage(const GroupedParams& p, uint8_t* staged, uint32_t m0, unsigned rows, float* shared32) {
    const Vec<uint32_t, 4> none = {};
    if (threadIdx.x < kGroupColumns / 8)
        store_vec<uint32_t, 4>(reinterpret_cast<uint32_t*>(staged + rows * row_bytes(p)) + threadIdx.x * 4, none);
    const unsigned vectors = p.k / 8;
    if (rows == 1 && vectors <= blockDim.x) {
        stage_row<T>(p, reinterpret_cast<T*>(staged), m0, shared32);
        return;
    }
    const bool alone = rows == 1;
    const unsigned lane = alone ? threadIdx.x : lane_id(), lanes = alone ? blockDim.x : kWarpSize;
    for (unsigned r = alone ? 0 : warp_id(); r < rows; r += alone ? 1 : warp_count()) {
        const uint64_t start = uint64_t(m0 + r) * p.k;
        T* to = reinterpret_cast<T*>(staged + r * row_bytes(p));
        float squares = 0, inverse = 1;
        for (unsigned i = lane; p.norm && i < vectors; i += lanes) squares += load_sum<T>(p, start + i * 8).squares();
        if (p.norm) {
            const float total = alone ? quick_block_sum(squares, shared32) : warp_sum(squares);
            inverse = rsqrtf(total / float(p.k) + p.epsilon);
        }
        for (unsigned i = lane; i < vectors; i += lanes) {
            Eight v = load_sum<T>(p, start + i * 8);
            store_sum<T>(p, start + i * 8, v);
            if (p.norm) v.scale<T>(inverse, load_vec<T, 8>(static_cast<const T*>(p.gamma) + i * 8));
            store_vec<T, 8>(to + i * 8, v.rounded<T>());
        }
    }
}

// Adds up what the warps have of a tile and stores it; of a gated pair's first tile only keeps it in `held`.
template <class T>
NXRT_DEVICE void finish(const GroupedParams& p, const Cursor& at, uint32_t m0, unsigned rows, const float* sums, float* held) {
    __syncthreads();
    const T* bias = static_cast<const T*>(p.segments[at.segment].bias);
    T* y = static_cast<T*>(p.segments[at.segment].y);
    for (unsigned i = threadIdx.x; i < rows * kTileRows; i += blockDim.x) {
        const uint32_t n = at.local * kTileRows + i % kTileRows, m = m0 + i / kTileRows;
        float total = 0;
        for (unsigned warp = 0; warp < warp_count(); ++warp) total += sums[warp * (kGemvRows * kTileRows) + i];
        if (n >= p.segments[at.segment].n) continue;
        if (bias) total += to_float(bias[n]);
        if (p.gated && at.segment == 0) {
            held[i] = total;
            continue;
        }
        // The thread that kept it takes it back.
        if (p.gated) total *= held[i] / (1.0f + __expf(-held[i]));
        y[uint64_t(m) * p.segments[at.segment].n + n] = from_float<T>(total);
    }
}

// Dynamic shared memory: the rows as row_bytes says, and a group of zeros.
template <class T, class Main>
NXRT_DEVICE void grouped(const GroupedParams& p) {
    NXRT_SHARED float sums[2][kGemvWarps * kGemvRows * kTileRows];
    NXRT_SHARED float held[kGemvRows * kTileRows];
    NXRT_SHARED float shared32[kWarpSize];
    NXRT_DYNAMIC_SHARED(uint8_t, staged);
    const uint32_t m0 = blockIdx.y * kGemvRows, rows = min(p.m - m0, kGemvRows);
    const uint32_t groups = p.chunks / 2, warps = warp_count();
    Cursor at = Cursor::start(p), ahead = at;
    typename Main::Group even, odd;
    // Weights are constant: the first ones are on their way before the kernel in front has written x.
    Main::load(even, p, ahead, groups);
    ahead.advance(p, groups, warps);
    Main::load(odd, p, ahead, groups);
    ahead.advance(p, groups, warps);
    grid_dependency_ready();
    stage<T>(p, staged, m0, rows, shared32);
    __syncthreads();

    const uint32_t row = lane_id() / 4;
    // Lanes past the last row read the zeros, whatever the group.
    const uint32_t mask = row < rows ? 0xffffffffu : 0;
    const uint8_t* x = staged + min(row, rows) * row_bytes(p) + lane_id() % 4 * 16;
    unsigned parity = 0;
    float sum[4] = {};
    // One group of `w`; false when it was the last.
    auto step = [&](typename Main::Group& w) {
        Main::multiply(sum, w, p, at, x + (at.group * kGroupColumns * 2 & mask));
        Main::load(w, p, ahead, groups);
        ahead.advance(p, groups, warps);
        const Cursor done = at;
        if (at.advance(p, groups, warps)) {
            share_sums(sum, rows, sums[parity]);
            finish<T>(p, done, m0, rows, sums[parity], held);
            parity ^= 1;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = 0;
        }
        return at.tile < p.tiles;
    };
    while (step(even) && step(odd)) {
    }
}

#define LEAN(block, shift, type, T)                                                                                 \
    NXRT_KERNEL_EARLY(lean_##block##_plain_##type, GroupedParams, (grouped<T, Lean<T, shift, false>>), 512) \
    NXRT_KERNEL_EARLY(lean_##block##_bytes_##type, GroupedParams, (grouped<T, Lean<T, shift, true>>), 512)

LEAN(32, 0, f16, half)
LEAN(64, 1, f16, half)
LEAN(128, 2, f16, half)
LEAN(32, 0, bf16, bf16)
LEAN(64, 1, bf16, bf16)
LEAN(128, 2, bf16, bf16)
NXRT_KERNEL_EARLY(halves_f16, GroupedParams, (grouped<half, Halves<half>>), 512)
NXRT_KERNEL_EARLY(halves_bf16, GroupedParams, (grouped<bf16, Halves<bf16>>), 512)
