// Products of few rows with 4-bit weights, as lean as the memory's speed asks for: whole groups of 128 columns, blocks of
// 32, 64 or 128, activations in shared memory, two groups of weights under way for each warp.
#pragma once

#include "gemv.cuh"

namespace nxrt {

constexpr uint32_t kGroupColumns = 2 * kChunk;
constexpr uint32_t kGroupUnits = kGroupColumns / kUnit;

// A block is kUnit << SHIFT columns. BYTES: zero points are stored, not the default.
template <class T, int SHIFT, bool BYTES>
struct Gemv4 {
    static constexpr uint32_t kScales = kGroupUnits >> SHIFT;
    static constexpr uint32_t kGroupBytes = kGroupColumns * kTileRows / 2;

    // A group's weights on their way through registers.
    struct Group {
        uint32_t words[2][4];
        uint32_t scales[kScales];
        uint32_t zeros[kScales];
    };

    const ProductParams& p;
    // Where this lane loads from next: tile and group, and its bytes there.
    uint32_t tile, group;
    const uint8_t* words;
    const uint32_t* scales;
    const uint8_t* zeros;
    uint32_t groups, warps;

    NXRT_DEVICE explicit Gemv4(const ProductParams& params) : p(params) {
        const unsigned lane = lane_id();
        groups = p.w.chunks / 2;
        warps = warp_count();
        tile = blockIdx.x;
        group = warp_id();
        const uint64_t index = uint64_t(tile) * groups + group;
        words = p.w.data + index * kGroupBytes + lane * 16;
        scales = static_cast<const uint32_t*>(p.w.scales) + index * (kScales * 8) + lane / 4;
        zeros = static_cast<const uint8_t*>(p.w.zeros) + (BYTES ? index * (kScales * 8) + lane / 4 : 0);
    }

    // Loads the next group, if there is one, and moves on.
    NXRT_DEVICE void load(Group& to) {
        if (tile >= p.w.tiles) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto v = load_stream<uint32_t, 4>(reinterpret_cast<const uint32_t*>(words + i * (kGroupBytes / 2)));
#pragma unroll
            for (int j = 0; j < 4; ++j) to.words[i][j] = v[j];
        }
#pragma unroll
        for (uint32_t i = 0; i < kScales; ++i) {
            to.scales[i] = load_stream<uint32_t, 1>(scales + i * 8)[0];
            if constexpr (BYTES) to.zeros[i] = load_stream<uint8_t, 1>(zeros + i * 8)[0];
        }
        uint32_t step = warps;
        group += warps;
        if (group >= groups) {
            // To the same warp's first group of this block's next tile.
            const uint32_t first = warp_id();
            step = first + warps - group + gridDim.x * groups;
            group = first;
            tile += gridDim.x;
        }
        words += uint64_t(step) * kGroupBytes;
        scales += uint64_t(step) * (kScales * 8);
        if constexpr (BYTES) zeros += uint64_t(step) * (kScales * 8);
    }

    // Adds a group's products. `x`: this lane's first activations of the group, in shared memory.
    static NXRT_DEVICE void multiply(float (&sum)[4], const Group& w, const uint8_t* x) {
        Offsets offset = default_offsets<T, 4>();
#pragma unroll
        for (uint32_t b = 0; b < kScales; ++b) {
            if constexpr (BYTES) offset = stored_offsets<T, 4>(w.zeros[b]);
            float part[4] = {};
#pragma unroll
            for (uint32_t u = b << SHIFT; u < (b + 1) << SHIFT; ++u) {
                const auto v = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(x + u * kUnit * 2));
#pragma unroll
                for (uint32_t f = 0; f < 2; ++f) {
                    uint32_t a[4];
                    decode<T, 4>(a, w.words[u / 2], int(u % 2 * 2 + f), offset);
                    const uint32_t columns[2] = {v[int(2 * f)], v[int(2 * f + 1)]};
                    mma_m16n8k16<T>(part, a, columns);
                }
            }
            const float2 scale = Pair<T>::floats(w.scales[b]);
            sum[0] += part[0] * scale.x;
            sum[1] += part[1] * scale.x;
            sum[2] += part[2] * scale.y;
            sum[3] += part[3] * scale.y;
        }
    }
};

// Bytes from one row of activations in shared memory to the next: 64 past a multiple of 128, so that two rows' halves of a
// quarter warp's loads lie in different banks.
NXRT_DEVICE uint32_t staged_row_bytes(const Weights& w) { return w.chunks * kChunk * 2 + 64; }

// Rows m0 .. m0 + rows of x to shared memory, zeros past K, and behind them a group of zeros.
template <class T>
NXRT_DEVICE void stage_rows(const ProductParams& p, uint8_t* shared, uint32_t m0, unsigned rows) {
    const uint32_t pieces = p.w.chunks * kChunk / 8, row_bytes = staged_row_bytes(p.w);
    const bool wide = (reinterpret_cast<uintptr_t>(p.x) | p.x_row * 2 | p.w.k * 2) % 16 == 0;
    for (unsigned r = 0; r < rows; ++r) {
        const T* row = static_cast<const T*>(p.x) + (m0 + r) * p.x_row;
        for (uint32_t i = threadIdx.x; i < pieces; i += blockDim.x) {
            uint32_t x[4];
            load_activations<T>(x, row, true, i * 8, p.w.k, wide);
            Vec<uint32_t, 4> v;
#pragma unroll
            for (int j = 0; j < 4; ++j) v[j] = x[j];
            store_vec<uint32_t, 4>(reinterpret_cast<uint32_t*>(shared + r * row_bytes + i * 16), v);
        }
    }
    const Vec<uint32_t, 4> none = {};
    if (threadIdx.x < kGroupColumns / 8)
        store_vec<uint32_t, 4>(reinterpret_cast<uint32_t*>(shared + rows * row_bytes) + threadIdx.x * 4, none);
}

// Dynamic shared memory: rows * staged_row_bytes + kGroupColumns * 2.
template <class T, int SHIFT, bool BYTES>
NXRT_DEVICE void gemv4(const ProductParams& p) {
    using G = Gemv4<T, SHIFT, BYTES>;
    NXRT_SHARED float sums[2][kGemvWarps * kGemvRows * kTileRows];
    NXRT_DYNAMIC_SHARED(uint8_t, staged);
    const uint32_t m0 = blockIdx.y * kGemvRows, rows = min(p.m - m0, kGemvRows);
    G from(p);
    typename G::Group even, odd;
    // Weights never change: the first ones are on their way before the kernel in front has written x.
    from.load(even);
    from.load(odd);
    grid_dependency_ready();
    stage_rows<T>(p, staged, m0, rows);
    __syncthreads();

    const uint32_t row = lane_id() / 4, row_bytes = staged_row_bytes(p.w), first = warp_id();
    // Lanes past the last row read the zeros, whatever the group.
    const uint32_t mask = row < rows ? 0xffffffffu : 0;
    const uint8_t* x = staged + min(row, rows) * row_bytes + lane_id() % 4 * 16;
    uint32_t tile = blockIdx.x, group = first;
    unsigned parity = 0;
    float sum[4] = {};
    // One group of `w`; false when it was the last.
    auto step = [&](typename G::Group& w) {
        G::multiply(sum, w, x + (group * kGroupColumns * 2 & mask));
        from.load(w);
        group += from.warps;
        if (group >= from.groups) {
            share_sums(sum, rows, sums[parity]);
            reduce_and_store<T>(p, static_cast<T*>(p.y), tile, m0, rows, sums[parity]);
            parity ^= 1;
            group = first;
            tile += gridDim.x;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = 0;
        }
        return tile < p.w.tiles;
    };
    while (step(even) && step(odd)) {
    }
}

}  // namespace nxrt
