// The end of a block that has one tile of a product in registers, as mma_m16n8k16 leaves it with weights on the left: d[0], d[1]
// are rows r, r + 1 of y at column c, d[2], d[3] the same rows at column c + 8.
#pragma once

#include "product.cuh"

namespace nxrt {

struct TileOutput {
    const ProductParams& p;
    uint32_t row0, column0;  // of y, where the tile begins

    // Makes sums values of y; r and c count from the tile's beginning.
    NXRT_DEVICE void scale(float (&d)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) d[j] *= p.alpha;
    }
    template <class T>
    NXRT_DEVICE void add_c(float (&d)[4], int r, int c) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t m = row0 + r + j % 2, n = column0 + c + j / 2 * 8;
            if (m < p.m && n < p.w.n)
                d[j] += p.beta * to_float(static_cast<const T*>(p.c)[uint64_t(m) * p.c_row + uint64_t(n) * p.c_column]);
        }
    }

    // Stores a part's sums as they are, to [part, m, n].
    NXRT_DEVICE void store_part(const float (&d)[4], int r, int c) const {
        float* to = static_cast<float*>(p.y) + uint64_t(blockIdx.y) * p.m * p.w.n;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t m = row0 + r + j % 2, n = column0 + c + j / 2 * 8;
            if (m < p.m && n < p.w.n) to[uint64_t(m) * p.w.n + n] = d[j];
        }
    }

    // Stores the tile from shared memory, where a row is PITCH elements.
    template <class T, int ROWS, int COLUMNS, int PITCH, int THREADS>
    NXRT_DEVICE void store(const T* tile, T* y) const {
        constexpr uint32_t PIECES = COLUMNS / 8;
        const uint32_t c = threadIdx.x % PIECES * 8, n = column0 + c, rows = min(p.m - row0, uint32_t(ROWS));
        if (n >= p.w.n) return;
        const bool vectors = (reinterpret_cast<uintptr_t>(y) | p.w.n * 2) % 16 == 0;
        y += uint64_t(row0) * p.w.n + n;
#pragma unroll 8
        for (uint32_t r = threadIdx.x / PIECES; r < rows; r += THREADS / PIECES) {
            T* to = y + uint64_t(r) * p.w.n;
            const T* from = tile + r * PITCH + c;
            if (vectors) {
                store_vec<T, 8>(to, load_vec<T, 8>(from));
            } else {
                for (uint32_t j = 0; j < 8 && n + j < p.w.n; ++j) to[j] = from[j];
            }
        }
    }
};

}  // namespace nxrt
