#include "number.cuh"
#include "walk.cuh"

using namespace nxrt;

struct RangeParams {
    void* y;
    uint64_t n;
    double start;
    double delta;
    int64_t whole_start;  // for integers
    int64_t whole_delta;
    uint32_t dtype;
    uint32_t pad;
};

NXRT_DEVICE void range_of(const RangeParams& p) {
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        if (p.dtype == kF64) {
            static_cast<double*>(p.y)[i] = p.start + p.delta * static_cast<double>(i);
        } else if (p.dtype <= kBF16) {
            // In float and with two roundings, as the CPU has it.
            const float step = __fmul_rn(static_cast<float>(p.delta), static_cast<float>(i));
            store_any<double>(p.dtype, p.y, i, __fadd_rn(static_cast<float>(p.start), step));
        } else {
            const uint64_t step = static_cast<uint64_t>(p.whole_delta) * i;
            store_any<uint64_t>(p.dtype, p.y, i, static_cast<uint64_t>(p.whole_start) + step);
        }
    }
}

NXRT_KERNEL(range, RangeParams, range_of, 256)
