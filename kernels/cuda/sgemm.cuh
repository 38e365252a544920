// Float products in tiles through shared memory, multiplied and added in float.
#pragma once

#include "common.cuh"

namespace nxrt {

// A block of 256 threads makes 128 x 64 of the output, eight by four a thread.
struct FloatTile {
    static constexpr int kThreads = 256;
    static constexpr int kRows = 128;
    static constexpr int kColumns = 64;
    static constexpr int kDepth = 32;

    float left[kDepth][kRows + 4];
    float right[kDepth][kColumns + 4];
};

// `left(tile.left, row0, k0)` and `right(tile.right, column0, k0)` fill the tile, zeros where the matrices end;
// `out(row, column, sum)` takes a sum.
template <class Left, class Right, class Out>
NXRT_DEVICE void float_product(uint32_t m, uint32_t k, const Left& left, const Right& right, const Out& out) {
    NXRT_SHARED FloatTile tile;
    const uint32_t row_blocks = ceil_div(m, uint32_t(FloatTile::kRows));
    const uint32_t row0 = blockIdx.x % row_blocks * FloatTile::kRows, column0 = blockIdx.x / row_blocks * FloatTile::kColumns;
    const unsigned ty = threadIdx.x / 16 * 4, tx = threadIdx.x % 16 * 4;
    float sum[8][4] = {};
    for (uint32_t k0 = 0; k0 < k; k0 += FloatTile::kDepth) {
        left(tile.left, row0, k0);
        right(tile.right, column0, k0);
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < FloatTile::kDepth; ++i) {
            const Vec<float, 4> a = load_vec<float, 4>(&tile.left[i][ty]);
            const Vec<float, 4> b = load_vec<float, 4>(&tile.left[i][64 + ty]);
            const Vec<float, 4> w = load_vec<float, 4>(&tile.right[i][tx]);
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    sum[r][c] += a[r] * w[c];
                    sum[4 + r][c] += b[r] * w[c];
                }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 8; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) out(row0 + r / 4 * 64 + ty + r % 4, column0 + tx + c, sum[r][c]);
}

// Rows of a strided float matrix into FloatTile::left (SIZE = kRows) or its columns into FloatTile::right.
template <int SIZE>
NXRT_DEVICE void load_float_tile(
    float (&to)[FloatTile::kDepth][SIZE + 4], const float* from, uint64_t outer, uint64_t along, uint32_t first, uint32_t size,
    uint32_t k0, uint32_t k) {
#pragma unroll 4
    for (int i = int(threadIdx.x); i < SIZE * FloatTile::kDepth; i += FloatTile::kThreads) {
        // Neighbouring threads read neighbouring elements.
        const bool by_depth = along == 1;
        const int r = by_depth ? i / FloatTile::kDepth : i % SIZE, d = by_depth ? i % FloatTile::kDepth : i / SIZE;
        const bool inside = first + r < size && k0 + d < k;
        to[d][r] = inside ? from[(first + r) * outer + (k0 + d) * along] : 0.0f;
    }
}

}  // namespace nxrt
