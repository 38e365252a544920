#include "number.cuh"
#include "walk.cuh"

using namespace nxrt;

struct ArgParams {
    const void* x;
    int64_t* y;
    uint64_t rows;
    uint64_t n;      // elements of a row
    uint64_t inner;  // from one to the next
    uint32_t dtype;
    uint32_t min;
    uint32_t last;  // whether the last of equals wins
    uint32_t pad;
};

constexpr uint64_t kNone = ~uint64_t{0};

struct Best {
    uint64_t key;
    uint64_t at;  // kNone: nothing yet
};

NXRT_DEVICE Best better(const ArgParams& p, Best a, Best b) {
    if (b.at == kNone) return a;
    if (a.at == kNone || b.key > a.key) return b;
    return b.key == a.key && (p.last ? b.at > a.at : b.at < a.at) ? b : a;
}

// The best of the row at `base` that the `lane`th of `lanes` threads sees. A NaN is the best if it comes first, else it
// does not count.
NXRT_DEVICE Best find(const ArgParams& p, uint64_t base, uint32_t lane, uint32_t lanes) {
    Best best = {0, kNone};
    const bool real = p.dtype <= kF64;
    if (real && order_key(p.dtype, p.x, base) == kNone) return {0, 0};
    for (uint64_t i = lane; i < p.n; i += lanes) {
        const uint64_t key = order_key(p.dtype, p.x, base + i * p.inner);
        if (real && key == kNone) continue;
        best = better(p, best, {p.min ? ~key : key, i});
    }
    return best;
}

NXRT_DEVICE Best warp_best(const ArgParams& p, Best best) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const Best other = {__shfl_xor_sync(kFullMask, best.key, step), __shfl_xor_sync(kFullMask, best.at, step)};
        best = better(p, best, other);
    }
    return best;
}

NXRT_DEVICE uint64_t row_base(const ArgParams& p, uint64_t row) {
    uint64_t column = row;
    return split_off(column, p.inner) * p.n * p.inner + column;
}

NXRT_DEVICE void arg_of_blocks(const ArgParams& p) {
    NXRT_SHARED Best shared[32];
    for (uint64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        Best best = warp_best(p, find(p, row_base(p, row), threadIdx.x, blockDim.x));
        __syncthreads();
        if (lane_id() == 0) shared[warp_id()] = best;
        __syncthreads();
        best = warp_best(p, lane_id() < warp_count() ? shared[lane_id()] : Best{0, kNone});
        if (threadIdx.x == 0) p.y[row] = static_cast<int64_t>(best.at);
    }
}

NXRT_DEVICE void arg_of_warps(const ArgParams& p) {
    const uint64_t warps = grid_threads() / kWarpSize;
    for (uint64_t row = grid_thread() / kWarpSize; row < p.rows; row += warps) {
        const Best best = warp_best(p, find(p, row_base(p, row), lane_id(), kWarpSize));
        if (lane_id() == 0) p.y[row] = static_cast<int64_t>(best.at);
    }
}

// Neighbouring rows in neighbouring lanes.
NXRT_DEVICE void arg_of_threads(const ArgParams& p) {
    for (uint64_t row = grid_thread(); row < p.rows; row += grid_threads()) {
        p.y[row] = static_cast<int64_t>(find(p, row_base(p, row), 0, 1).at);
    }
}

NXRT_KERNEL(arg_blocks, ArgParams, arg_of_blocks, 256)
NXRT_KERNEL(arg_warps, ArgParams, arg_of_warps, 256)
NXRT_KERNEL(arg_threads, ArgParams, arg_of_threads, 256)
