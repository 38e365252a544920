// Products of strided matrices: float in tiles, few rows of float, exact types plainly; and what makes fragments of 16-bit
// operands that arrive with the run.
#include "product.cuh"
#include "sgemm.cuh"

using namespace nxrt;

// Elements from one row of x, column of y, row (K) of w ... to the next.
struct StridedParams {
    const void* x;
    const void* w;
    const void* c;  // null: none
    void* y;
    Batch batch;
    uint64_t w_matrix;  // elements
    uint64_t x_row, x_column;
    uint64_t w_row, w_column;  // w_row: along K
    uint32_t m, n, k;
    uint32_t c_row, c_column;
    float alpha, beta;
    uint32_t pad;
};

// One product's operands.
template <class T>
struct Operands {
    const T *x, *w;
    T* y;

    NXRT_DEVICE explicit Operands(const StridedParams& p) {
        const uint2 at = p.batch.operands();
        x = static_cast<const T*>(p.x) + at.x * p.batch.x_matrix;
        w = static_cast<const T*>(p.w) + at.y * p.w_matrix;
        y = static_cast<T*>(p.y) + uint64_t(p.batch.index()) * p.m * p.n;
    }
};

NXRT_DEVICE void finish(const StridedParams& p, float* y, uint32_t m, uint32_t n, float total) {
    total *= p.alpha;
    const float* c = static_cast<const float*>(p.c);
    if (c) total += p.beta * c[uint64_t(m) * p.c_row + uint64_t(n) * p.c_column];
    y[uint64_t(m) * p.n + n] = total;
}

NXRT_DEVICE void gemm_float(const StridedParams& p) {
    const Operands<float> o(p);
    float_product(
        p.m, p.k,
        [&](auto& to, uint32_t row0, uint32_t k0) {
            load_float_tile<FloatTile::kRows>(to, o.x, p.x_row, p.x_column, row0, p.m, k0, p.k);
        },
        [&](auto& to, uint32_t column0, uint32_t k0) {
            load_float_tile<FloatTile::kColumns>(to, o.w, p.w_column, p.w_row, column0, p.n, k0, p.k);
        },
        [&](uint32_t m, uint32_t n, float total) {
            if (m < p.m && n < p.n) finish(p, o.y, m, n, total);
        });
}

// w row-major: a warp has 32 neighbouring columns, the block's eight warps share K. blockIdx.y: the row.
NXRT_DEVICE void gemv_columns(const StridedParams& p) {
    NXRT_SHARED float shared[8][kWarpSize];
    const Operands<float> o(p);
    const uint32_t n = blockIdx.x * kWarpSize + lane_id();
    const float* x = o.x + blockIdx.y * p.x_row;
    float total = 0;
    if (n < p.n) {
#pragma unroll 4
        for (uint32_t k = warp_id(); k < p.k; k += 8) total += x[k * p.x_column] * o.w[k * p.w_row + n * p.w_column];
    }
    shared[warp_id()][lane_id()] = total;
    __syncthreads();
    if (warp_id() == 0 && n < p.n) {
        for (int i = 1; i < 8; ++i) total += shared[i][lane_id()];
        finish(p, o.y, blockIdx.y, n, total);
    }
}

// w with K innermost: a warp a column.
NXRT_DEVICE void gemv_rows(const StridedParams& p) {
    const Operands<float> o(p);
    const uint32_t n = blockIdx.x * 8 + warp_id();
    const float* x = o.x + blockIdx.y * p.x_row;
    float total = 0;
    if (n < p.n) {
#pragma unroll 4
        for (uint32_t k = lane_id(); k < p.k; k += kWarpSize) total += x[k * p.x_column] * o.w[k * p.w_row + n * p.w_column];
    }
    total = warp_sum(total);
    if (n < p.n && lane_id() == 0) finish(p, o.y, blockIdx.y, n, total);
}

// A thread an element. Integers wrap, so their sign does not matter.
template <class T>
NXRT_DEVICE void product_exact(const StridedParams& p) {
    const Operands<T> o(p);
    const uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t m = i / p.n, n = i % p.n;
    if (m >= p.m) return;
    T total = 0;
    for (uint32_t k = 0; k < p.k; ++k) total += o.x[m * p.x_row + k * p.x_column] * o.w[k * p.w_row + n * p.w_column];
    if constexpr (std::is_same_v<T, double>) {
        total *= double(p.alpha);
        if (p.c) total += double(p.beta) * static_cast<const T*>(p.c)[m * p.c_row + n * p.c_column];
    }
    o.y[i] = total;
}

struct FragmentsParams {
    const uint16_t* from;
    uint16_t* to;
    uint64_t matrix;       // elements of a source
    uint64_t row, column;  // elements from one N, one K to the next
    uint32_t n, k;
    uint32_t tiles, chunks;
    uint32_t matrices;
    uint32_t row_chunks;   // of the target, from one tile to the next
};

// A thread writes a lane's fragment.
NXRT_DEVICE void make_fragments(const FragmentsParams& p) {
    const uint64_t index = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const unsigned lane = index % kWarpSize, f = index / kWarpSize % 4;
    const uint64_t chunk = index / (4 * kWarpSize);
    const uint64_t tile = chunk / p.chunks, matrix = tile / p.tiles;
    if (matrix >= p.matrices) return;
    const uint32_t k0 = uint32_t(chunk % p.chunks) * kChunk + f / 2 * kUnit + lane % 4 * 8 + f % 2 * 4;
    const uint16_t* from = p.from + matrix * p.matrix;
    Vec<uint16_t, 8> v;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t n = uint32_t(tile % p.tiles) * kTileRows + lane / 4 + i / 2 % 2 * 8, k = k0 + i / 4 * 2 + i % 2;
        v[int(i)] = n < p.n && k < p.k ? from[n * p.row + k * p.column] : uint16_t(0);
    }
    const uint64_t to = tile * p.row_chunks + chunk % p.chunks;
    store_vec<uint16_t, 8>(p.to + (to * 4 + f) * kWarpSize * 8 + lane * 8, v);
}

struct RowsParams {
    const uint16_t* from;
    uint16_t* to;          // [matrices, rows, columns]
    uint64_t row, column;  // of `from`, whose matrices have rows * columns elements
    uint64_t total;
    uint32_t rows, columns;
};

// Turns matrices so that their columns are innermost.
NXRT_DEVICE void turn_rows(const RowsParams& p) {
    const uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.total) return;
    const uint64_t size = uint64_t(p.rows) * p.columns, within = i % size;
    p.to[i] = p.from[i - within + within / p.columns * p.row + within % p.columns * p.column];
}

NXRT_KERNEL(gemm_f32, StridedParams, gemm_float, FloatTile::kThreads)
NXRT_KERNEL(gemv_columns_f32, StridedParams, gemv_columns, 256)
NXRT_KERNEL(gemv_rows_f32, StridedParams, gemv_rows, 256)
NXRT_KERNEL(product_f64, StridedParams, product_exact<double>, 256)
NXRT_KERNEL(product_4, StridedParams, product_exact<uint32_t>, 256)
NXRT_KERNEL(product_8, StridedParams, product_exact<uint64_t>, 256)
NXRT_KERNEL(make_fragments_2, FragmentsParams, make_fragments, 256)
NXRT_KERNEL(turn_rows_2, RowsParams, turn_rows, 256)
