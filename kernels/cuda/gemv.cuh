// Products of few rows with weights in fragments: weights stream once through registers, tensor cores multiply eight rows
// of activations at a time, float accumulates.
#pragma once

#include "product.cuh"

namespace nxrt {

constexpr unsigned kGemvWarps = 16;
constexpr unsigned kGemvRows = 8;

// What becomes of a block's scale.
enum class Scaling {
    kNone,    // 16-bit weights have none
    kAfter,   // zero points are integers; a block's product is scaled in float
    kBefore,  // any zero point, any block: weights are scaled before the product
};

// What a warp reads of a tile's weights at once.
template <int BITS, Scaling S>
struct Group {
    static constexpr int kChunks = BITS == 16 ? 1 : 2;
    static constexpr int kUnits = 2 * kChunks;
    uint32_t words[kChunks][BITS];
    uint32_t scales[kUnits];
    uint32_t zeros[kUnits];

    NXRT_DEVICE void load(const Weights& w, uint32_t tile, uint32_t group) {
        const unsigned lane = lane_id();
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const uint32_t chunk = group * kChunks + i;
            if (chunk < w.chunks) load_chunk<BITS>(words[i], w.chunk<BITS>(tile, chunk), lane);
        }
        if constexpr (S != Scaling::kNone) {
#pragma unroll
            for (int i = 0; i < kUnits; ++i) {
                const uint32_t column = (group * kUnits + i) * kUnit + lane % 4 * 8;
                if (column >= w.chunks * kChunk) break;
                const uint64_t at = w.pair_index(tile, column, lane / 4);
                scales[i] = __ldg(static_cast<const uint32_t*>(w.scales) + at);
                if (w.zero_kind == kZeroBytes) zeros[i] = load_zero_bytes<BITS>(w.zeros, at);
                if (w.zero_kind == kZeroFloat) zeros[i] = __ldg(static_cast<const uint32_t*>(w.zeros) + at);
            }
        }
    }

    // Adds this group's products with `x`, the lane's activations of each unit.
    template <class T>
    NXRT_DEVICE void multiply(float (&sum)[4], const Weights& w, uint32_t group, const uint32_t (&x)[kUnits][4]) const {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            if (group * kChunks + i / 2 >= w.chunks) break;
            const uint32_t* chunk = words[i / 2];
            uint32_t a[2][4];
            Offsets offset = default_offsets<T, BITS>();
            if constexpr (S != Scaling::kNone) {
                if (w.zero_kind == kZeroBytes) offset = stored_offsets<T, BITS>(zeros[i]);
                if (w.zero_kind == kZeroFloat) offset = offsets<T, BITS>(0, 0);
            }
#pragma unroll
            for (int f = 0; f < 2; ++f) {
                decode<T, BITS>(a[f], chunk, i % 2 * 2 + f, offset);
                if constexpr (S == Scaling::kBefore) {
                    if (w.zero_kind == kZeroFloat) subtract_fragment<T>(a[f], zeros[i]);
                    scale_fragment<T>(a[f], scales[i]);
                }
            }
            const uint32_t b0[2] = {x[i][0], x[i][1]}, b1[2] = {x[i][2], x[i][3]};
            if constexpr (S == Scaling::kNone || S == Scaling::kBefore) {
                mma_m16n8k16<T>(sum, a[0], b0);
                mma_m16n8k16<T>(sum, a[1], b1);
            } else {
                float part[4] = {};
                mma_m16n8k16<T>(part, a[0], b0);
                mma_m16n8k16<T>(part, a[1], b1);
                const float2 scale = Pair<T>::floats(scales[i]);
                sum[0] += part[0] * scale.x;
                sum[1] += part[1] * scale.x;
                sum[2] += part[2] * scale.y;
                sum[3] += part[3] * scale.y;
            }
        }
    }
};

// Eight activations of one row from column k on as words; zeros past the matrix. `wide`: whole vectors are aligned.
template <class T>
NXRT_DEVICE void load_activations(uint32_t (&x)[4], const T* row, bool inside, uint32_t k, uint32_t columns, bool wide) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = 0;
    if (!inside || k >= columns) return;
    if (wide) {
        const Vec<uint32_t, 4> v = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(row + k));
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = v[i];
        return;
    }
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(row + k);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (k + i < columns) x[i / 2] |= uint32_t(bits[i]) << (i % 2 * 16);
    }
}

// Adds up what the warps have of a tile, in `shared` [warp][row][16], and stores it. `shared` is free again after the next
// barrier but one.
template <class T>
NXRT_DEVICE void reduce_and_store(const ProductParams& p, T* y, uint32_t tile, uint32_t m0, unsigned rows, const float* shared) {
    __syncthreads();
    const T* c = static_cast<const T*>(p.c);
    for (unsigned i = threadIdx.x; i < rows * kTileRows; i += blockDim.x) {
        const uint32_t n = tile * kTileRows + i % kTileRows, m = m0 + i / kTileRows;
        float total = 0;
        for (unsigned warp = 0; warp < warp_count(); ++warp) total += shared[warp * (kGemvRows * kTileRows) + i];
        if (n < p.w.n) {
            total *= p.alpha;
            if (c) total += p.beta * to_float(c[uint64_t(m) * p.c_row + uint64_t(n) * p.c_column]);
            y[uint64_t(m) * p.w.n + n] = from_float<T>(total);
        }
    }
}

// A lane's sums go where reduce_and_store finds them.
NXRT_DEVICE void share_sums(const float (&sum)[4], unsigned rows, float* shared) {
    const unsigned g = lane_id() / 4, column = lane_id() % 4 * 2;
    float* mine = shared + warp_id() * (kGemvRows * kTileRows);
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
        if (column + i < rows) {
            mine[(column + i) * kTileRows + g] = sum[i];
            mine[(column + i) * kTileRows + g + 8] = sum[2 + i];
        }
    }
}

// A block takes tile after tile; its warps share a tile's columns, group after group. blockIdx.y: eight rows each;
// blockIdx.z: the product of a batch.
template <class T, int BITS, Scaling S>
NXRT_DEVICE void gemv(const ProductParams& p) {
    using G = Group<BITS, S>;
    NXRT_SHARED float shared[2][kGemvWarps * kGemvRows * kTileRows];
    const unsigned lane = lane_id(), warps = warp_count();
    const uint32_t m0 = blockIdx.y * kGemvRows, first = warp_id();
    const uint32_t groups = ceil_div(p.w.chunks, uint32_t(G::kChunks));
    Weights w = p.w;
    const T* x = static_cast<const T*>(p.x);
    T* y = static_cast<T*>(p.y);
    if constexpr (BITS == 16) take_from_batch(p, x, w, y);
    const uint32_t row = m0 + lane / 4;
    const bool inside = row < p.m;
    const unsigned rows = min(p.m - m0, kGemvRows);
    x += uint64_t(row) * p.x_row;
    const bool wide = (reinterpret_cast<uintptr_t>(p.x) | p.x_row * 2 | w.k * 2 | p.batch.x_matrix * 2) % 16 == 0;

    // Weights never change: the first ones are on their way before the kernel in front has written x.
    G current;
    current.load(w, blockIdx.x, first);
    grid_dependency_ready();
    unsigned parity = 0;
    for (uint32_t tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
        float sum[4] = {};
        for (uint32_t group = first; group < groups; group += warps) {
            uint32_t activations[G::kUnits][4];
#pragma unroll
            for (int i = 0; i < G::kUnits; ++i) {
                const uint32_t k = (group * G::kUnits + i) * kUnit + lane % 4 * 8;
                load_activations<T>(activations[i], x, inside, k, w.k, wide);
            }
            const bool last = group + warps >= groups;
            const uint32_t next_tile = last ? tile + gridDim.x : tile;
            G next = current;
            if (next_tile < w.tiles) next.load(w, next_tile, last ? first : group + warps);
            current.template multiply<T>(sum, w, group, activations);
            current = next;
        }
        share_sums(sum, rows, shared[parity]);
        reduce_and_store<T>(p, y, tile, m0, rows, shared[parity]);
        parity ^= 1;
    }
}

}  // namespace nxrt
