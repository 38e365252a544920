// Few rows: every row of the output by itself. Weights stream once through registers; a warp takes groups of columns of any
// of the experts that make the row.
#pragma once

#include "experts.cuh"

namespace nxrt {

// SHIFT: blocks are kUnit << SHIFT columns, those of a group lie together, and groups are whole; negative: the parameters say.
// ZEROS: the kind of zero points; negative, likewise.
template <class T, class F, int SHIFT, int ZEROS>
struct Stream {
    static constexpr int kBits = F::kBits;
    static constexpr int kChunks = kBits == 16 ? 1 : 2;
    static constexpr int kUnits = 2 * kChunks;
    static constexpr int kUnitsABlock = SHIFT < 0 ? 1 : 1 << SHIFT;
    static constexpr int kScales = kUnits / kUnitsABlock;
    static_assert(kScales * kUnitsABlock == kUnits, "a group holds whole blocks");
    // The zero points of a pair.
    using Zero = typename std::conditional<kBits == 8, uint16_t, uint8_t>::type;

    // Weights and activations on their way through registers. Lanes 4 i + q hold the activations of unit i.
    struct Group {
        uint32_t words[kChunks][kBits];
        Vec<typename F::Raw, kScales> scales;
        Vec<Zero, kScales> zeros;
        uint32_t x[4];
        uint32_t part;
    };

    static NXRT_DEVICE void load(Group& to, const ExpertParams& p, const Weights& w, uint32_t tile, uint32_t group) {
        const unsigned lane = lane_id();
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const uint32_t chunk = group * kChunks + i;
            if (SHIFT >= 0 || chunk < w.chunks) {
                load_chunk<kBits>(to.words[i], w.chunk<kBits>(tile, chunk), lane);
            } else {
#pragma unroll
                for (int j = 0; j < kBits; ++j) to.words[i][j] = 0;
            }
        }
        const auto scales = static_cast<const typename F::Raw*>(w.scales);
        const auto zeros = static_cast<const Zero*>(w.zeros);
        if constexpr (F::kScale == ScaleCode::kNone) {
        } else if constexpr (SHIFT >= 0) {
            const uint64_t at = (uint64_t(tile) * (w.chunks / kChunks) + group) * (8 * kScales) + lane / 4 * kScales;
            to.scales = load_stream<typename F::Raw, kScales>(scales + at);
            if (stored_zeros(p)) to.zeros = load_stream<Zero, kScales>(zeros + at);
        } else {
#pragma unroll
            for (int i = 0; i < kScales; ++i) {
                const uint32_t column = (group * kUnits + i) * kUnit + lane % 4 * 8;
                to.scales[i] = {};
                to.zeros[i] = {};
                if (column >= w.chunks * kChunk) continue;
                const uint64_t at = p.pair_index(tile, column, lane / 4);
                to.scales[i] = __ldg(scales + at);
                if (stored_zeros(p)) to.zeros[i] = __ldg(zeros + at);
            }
        }
    }

    static NXRT_DEVICE void load_x(Group& to, const T* row, uint32_t columns, bool wide, uint32_t group) {
        const unsigned unit = lane_id() / 4;
        load_activations<T>(to.x, row, unit < unsigned(kUnits), (group * kUnits + unit) * kUnit + lane_id() % 4 * 8, columns, wide);
    }

    // Adds a group's products, times a factor. Column i of the tensor core's output is unit i's alone.
    static NXRT_DEVICE void multiply(float (&sum)[4], const ExpertParams& p, const Group& from, float factor) {
        const bool before = F::kBefore || (SHIFT < 0 && F::kScale != ScaleCode::kNone && p.w.block_shift < 5);
#pragma unroll
        for (int b = 0; b < kScales; ++b) {
            Offsets offset = {};
            if constexpr (F::kCode == Code::kInt) {
                offset = default_offsets<T, kBits>();
                if (stored_zeros(p)) offset = stored_offsets<T, kBits>(from.zeros[b]);
            }
            float part[4] = {};
#pragma unroll
            for (int i = b * kUnitsABlock; i < (b + 1) * kUnitsABlock; ++i) {
                const bool mine = lane_id() / 4 == unsigned(i);
#pragma unroll
                for (int f = 0; f < 2; ++f) {
                    uint32_t a[4];
                    decode_codes<T, F>(a, from.words[i / 2], i % 2 * 2 + f, offset);
                    if (before) scale_fragment<T>(a, scale_pair<T, F::kScale>(from.scales[b]));
                    const uint32_t x[2] = {mine ? from.x[2 * f] : 0, mine ? from.x[2 * f + 1] : 0};
                    mma_m16n8k16<T>(part, a, x);
                }
            }
            float2 scale = make_float2(factor, factor);
            if (!before) {
                const float2 own = scale_floats<T, F::kScale>(from.scales[b]);
                scale.x *= own.x;
                scale.y *= own.y;
            }
            sum[0] += part[0] * scale.x;
            sum[1] += part[1] * scale.x;
            sum[2] += part[2] * scale.y;
            sum[3] += part[3] * scale.y;
        }
    }

private:
    static NXRT_DEVICE bool stored_zeros(const ExpertParams& p) {
        if constexpr (F::kCode != Code::kInt) return false;
        else return ZEROS < 0 ? p.w.zero_kind == kZeroBytes : ZEROS == int(kZeroBytes);
    }
};

// The parts of a row: lane i holds part i's expert, and what its product counts for.
struct Parts {
    uint32_t id = 0;
    float factor = 0;

    NXRT_DEVICE void load_ids(const ExpertParams& p, uint32_t row) {
        if (lane_id() < p.parts) id = __ldcg(p.ids + uint64_t(row) * p.parts + lane_id());
    }
    NXRT_DEVICE void load_factors(const ExpertParams& p, uint32_t row) {
        if (lane_id() < p.parts) factor = p.mix_of(uint64_t(row) * p.parts + lane_id()) * p.global(id);
    }
};

// Adds up what the warps have of a tile, in `shared` [warp][16], and ends it. `id`: the expert of the lane's part.
template <class T>
NXRT_DEVICE void finish_row(const ExpertParams& p, uint32_t row, uint32_t tile, uint32_t id, const float* shared) {
    __syncthreads();
    if (warp_id() != 0) return;
    const unsigned r = lane_id() % kTileRows, warps = warp_count();
    float total = 0;
#pragma unroll
    for (unsigned i = 0; i < kGemvWarps / 2; ++i) {
        const unsigned warp = 2 * i + lane_id() / kTileRows;
        if (warp < warps) total += shared[warp * kTileRows + r];
    }
    total += __shfl_xor_sync(kFullMask, total, 16);
    if (p.bias || p.up_bias) {
        for (uint32_t part = 0; part < p.parts; ++part) {
            const uint32_t e = __shfl_sync(kFullMask, id, int(part));
            total += p.mix_of(uint64_t(row) * p.parts + part) * p.template row_bias<T>(e, tile, r);
        }
    }
    const float up = __shfl_xor_sync(kFullMask, total, 8);
    const uint32_t feature = p.feature(tile, r);
    if (lane_id() < (p.paired ? kTileRows / 2 : kTileRows) && feature < p.outputs)
        static_cast<T*>(p.y)[uint64_t(row) * p.outputs + feature] = from_float<T>(activate(p, total, p.paired ? up : 1.0f));
}

// A block takes tile after tile of the output's row blockIdx.y; its warps share the groups of all parts.
template <class T, class F, int SHIFT, int ZEROS>
NXRT_DEVICE void stream_row(const ExpertParams& p) {
    using S = Stream<T, F, SHIFT, ZEROS>;
    NXRT_SHARED float shared[2][kGemvWarps * kTileRows];
    const uint32_t row = blockIdx.y, warps = warp_count(), first = warp_id();
    const uint32_t groups = ceil_div(p.w.chunks, uint32_t(S::kChunks)), jobs = groups * p.parts;
    const bool wide = (reinterpret_cast<uintptr_t>(p.x) | p.w.k * 2) % 16 == 0;
    if (!p.early) grid_dependency_wait();
    Parts parts;
    parts.load_ids(p, row);

    // A tile, and a group of a part.
    struct Place {
        uint32_t tile, job;
    };
    auto behind = [&](Place at) { return at.job + warps < jobs ? Place{at.tile, at.job + warps} : Place{at.tile + gridDim.x, first}; };
    auto load_weights = [&](typename S::Group& to, Place at) {
        if (at.tile >= p.w.tiles) return;
        const uint32_t part = to.part = at.job / groups;
        S::load(to, p, p.expert(__shfl_sync(kFullMask, parts.id, int(part))), at.tile, at.job - part * groups);
    };
    auto load_row = [&](typename S::Group& to, Place at) {
        if (at.tile >= p.w.tiles) return;
        const uint64_t x_row = (uint64_t(row) * p.parts + to.part) / p.share;
        S::load_x(to, static_cast<const T*>(p.x) + x_row * p.w.k, p.w.k, wide, at.job - to.part * groups);
    };
    typename S::Group even, odd;
    Place at = {blockIdx.x, first}, next = behind(at);
    load_weights(even, at);
    load_weights(odd, next);
    if (p.early) grid_dependency_wait();
    // Blocks of the next kernel that start now find the ids: every block of this one has seen them.
    grid_dependency_launch();
    parts.load_factors(p, row);
    load_row(even, at);
    load_row(odd, next);

    unsigned parity = 0;
    float sum[4] = {};
    // One group; false when it was the last.
    auto step = [&](typename S::Group& group) {
        S::multiply(sum, p, group, __shfl_sync(kFullMask, parts.factor, int(group.part)));
        const Place done = at;
        at = next;
        next = behind(next);
        load_weights(group, next);
        load_row(group, next);
        if (at.tile == done.tile) return true;
        // Of a row's lanes, one or two hold columns with products.
        float low = sum[0] + sum[1], high = sum[2] + sum[3];
        low += __shfl_xor_sync(kFullMask, low, 1);
        high += __shfl_xor_sync(kFullMask, high, 1);
        float* mine = shared[parity] + first * kTileRows;
        if (lane_id() % 4 == 0) {
            mine[lane_id() / 4] = low;
            mine[lane_id() / 4 + 8] = high;
        }
        finish_row<T>(p, row, done.tile, parts.id, shared[parity]);
        parity ^= 1;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = 0;
        return at.tile < p.w.tiles;
    };
    while (step(even) && step(odd)) {
    }
}

}  // namespace nxrt
