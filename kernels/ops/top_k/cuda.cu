#include "number.cuh"
#include "walk.cuh"

using namespace nxrt;

struct TopKParams {
    const void* x;
    void* values;      // null: nobody reads them
    int64_t* indices;  // null: nobody reads them
    uint64_t rows;
    uint64_t n;      // elements of a row
    uint64_t k;
    uint64_t inner;  // from one element to the next
    uint32_t dtype;
    uint32_t element;
    uint32_t largest;
    uint32_t pad;
};

// An element's place in the order: the key, then the index.
struct Place {
    uint64_t key;
    uint64_t at;
};

NXRT_DEVICE bool before(Place a, Place b) { return a.key < b.key || (a.key == b.key && a.at < b.at); }

struct Row {
    uint64_t outer;
    uint64_t column;
};

NXRT_DEVICE Row row_of(const TopKParams& p, uint64_t row) {
    uint64_t column = row;
    const uint64_t outer = split_off(column, p.inner);
    return {outer, column};
}

NXRT_DEVICE Place place(const TopKParams& p, Row row, uint64_t i) {
    const uint64_t key = order_key(p.dtype, p.x, (row.outer * p.n + i) * p.inner + row.column);
    return {p.largest ? ~key : key, i};
}

NXRT_DEVICE void write(const TopKParams& p, Row row, uint64_t rank, uint64_t i) {
    const uint64_t to = (row.outer * p.k + rank) * p.inner + row.column;
    if (p.indices) p.indices[to] = static_cast<int64_t>(i);
    if (!p.values) return;
    const uint64_t from = (row.outer * p.n + i) * p.inner + row.column;
    char* value = static_cast<char*>(p.values) + to * p.element;
    copy_word(value, static_cast<const char*>(p.x) + from * p.element, p.element, p.element);
}

NXRT_DEVICE Place warp_first(Place first) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const Place other = {__shfl_xor_sync(kFullMask, first.key, step), __shfl_xor_sync(kFullMask, first.at, step)};
        if (before(other, first)) first = other;
    }
    return first;
}

constexpr uint64_t kNone = ~uint64_t{0};

// Of the elements that come behind `last` (or of all, in pass 0) the first that the `lane`th of `lanes` threads sees.
NXRT_DEVICE Place next(const TopKParams& p, Row row, uint64_t pass, Place last, uint32_t lane, uint32_t lanes) {
    Place first = {kNone, kNone};
    for (uint64_t i = lane; i < p.n; i += lanes) {
        const Place here = place(p, row, i);
        if (before(here, first) && (pass == 0 || before(last, here))) first = here;
    }
    return first;
}

// A pass over the row for each of few results.
NXRT_DEVICE void select_by_warps(const TopKParams& p) {
    const uint64_t warps = grid_threads() / kWarpSize;
    for (uint64_t r = grid_thread() / kWarpSize; r < p.rows; r += warps) {
        const Row row = row_of(p, r);
        Place last = {0, 0};
        for (uint64_t pass = 0; pass < p.k; ++pass) {
            last = warp_first(next(p, row, pass, last, lane_id(), kWarpSize));
            if (lane_id() == 0) write(p, row, pass, last.at);
        }
    }
}

NXRT_DEVICE void select_by_blocks(const TopKParams& p) {
    NXRT_SHARED Place shared[32];
    for (uint64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const Row row = row_of(p, r);
        Place last = {0, 0};
        for (uint64_t pass = 0; pass < p.k; ++pass) {
            last = warp_first(next(p, row, pass, last, threadIdx.x, blockDim.x));
            __syncthreads();
            if (lane_id() == 0) shared[warp_id()] = last;
            __syncthreads();
            last = warp_first(lane_id() < warp_count() ? shared[lane_id()] : Place{kNone, kNone});
            if (threadIdx.x == 0) write(p, row, pass, last.at);
        }
    }
}

// Every element counts those before it.
NXRT_DEVICE void rank_each(const TopKParams& p) {
    for (uint64_t i = grid_thread(); i < p.rows * p.n; i += grid_threads()) {
        uint64_t at = i;
        const Row row = row_of(p, split_off(at, p.n));
        const Place here = place(p, row, at);
        uint64_t rank = 0;
        for (uint64_t j = 0; j < p.n; ++j) rank += before(place(p, row, j), here);
        if (rank < p.k) write(p, row, rank, at);
    }
}

NXRT_KERNEL(top_k_warps, TopKParams, select_by_warps, 256)
NXRT_KERNEL(top_k_blocks, TopKParams, select_by_blocks, 256)
NXRT_KERNEL(top_k_rank, TopKParams, rank_each, 256)
