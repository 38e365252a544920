#include "arithmetic.cuh"
#include "walk.cuh"

using namespace nxrt;

// An axis that the shape does not have leaves the output as it is (the CPU reports an error).
struct CumulativeParams {
    const void* x;
    const void* axis;  // null: `length` and `inner` say it
    void* y;
    uint64_t n;  // elements
    uint64_t length;
    uint64_t inner;
    uint64_t dims[8];
    uint32_t rank;
    uint32_t axis_type;
    uint32_t dtype;
    uint32_t product;
    uint32_t exclusive;
    uint32_t reverse;
};

template <class C>
NXRT_DEVICE C combine(const CumulativeParams& p, C a, C b) {
    return p.product ? mul(a, b) : add(a, b);
}

// A warp a row, whose elements are neighbours.
template <class C>
NXRT_DEVICE void scan_rows(const CumulativeParams& p) {
    const uint64_t warps = grid_threads() / kWarpSize, n = p.length;
    const C none = p.product ? C(1) : C(0);
    for (uint64_t row = grid_thread() / kWarpSize; row < p.n / n; row += warps) {
        C carry = none;
        for (uint64_t start = 0; start < n; start += kWarpSize) {
            const uint64_t i = start + lane_id();
            const bool present = i < n;
            const uint64_t at = row * n + (p.reverse ? n - 1 - i : i);
            C sum = present ? load_any<C>(p.dtype, p.x, at) : none;
#pragma unroll
            for (unsigned step = 1; step < kWarpSize; step *= 2) {
                const C before = __shfl_up_sync(kFullMask, sum, step);
                if (lane_id() >= step) sum = combine(p, before, sum);
            }
            const C before = __shfl_up_sync(kFullMask, sum, 1);
            const C own = p.exclusive ? (lane_id() == 0 ? none : before) : sum;
            if (present) store_any<C>(p.dtype, p.y, at, combine(p, carry, own));
            carry = combine(p, carry, __shfl_sync(kFullMask, sum, kWarpSize - 1));
        }
    }
}

// A thread a row.
template <class C>
NXRT_DEVICE void scan_columns(const CumulativeParams& p) {
    uint64_t n = p.length, inner = p.inner;
    if (p.axis) {
        int64_t axis = load_index(p.axis_type, p.axis, 0);
        if (axis < 0) axis += p.rank;
        if (axis < 0 || axis >= static_cast<int64_t>(p.rank)) return;
        n = p.dims[axis];
        inner = 1;
        for (uint32_t d = static_cast<uint32_t>(axis) + 1; d < p.rank; ++d) inner *= p.dims[d];
    }
    for (uint64_t row = grid_thread(); row < p.n / n; row += grid_threads()) {
        uint64_t column = row;
        const uint64_t base = split_off(column, inner) * n * inner + column;
        C acc = p.product ? C(1) : C(0);
        for (uint64_t i = 0; i < n; ++i) {
            const uint64_t at = base + (p.reverse ? n - 1 - i : i) * inner;
            const C next = combine(p, acc, load_any<C>(p.dtype, p.x, at));
            store_any<C>(p.dtype, p.y, at, p.exclusive ? acc : next);
            acc = next;
        }
    }
}

NXRT_KERNEL(rows_float, CumulativeParams, (scan_rows<float>), 256)
NXRT_KERNEL(rows_double, CumulativeParams, (scan_rows<double>), 256)
NXRT_KERNEL(rows_integer, CumulativeParams, (scan_rows<int64_t>), 256)
NXRT_KERNEL(columns_float, CumulativeParams, (scan_columns<float>), 256)
NXRT_KERNEL(columns_double, CumulativeParams, (scan_columns<double>), 256)
NXRT_KERNEL(columns_integer, CumulativeParams, (scan_columns<int64_t>), 256)
