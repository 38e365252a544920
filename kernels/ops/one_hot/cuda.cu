#include "number.cuh"
#include "walk.cuh"

using namespace nxrt;

struct OneHotParams {
    const void* indices;
    const void* values;  // off and on
    void* y;
    uint64_t n;
    uint64_t depth;
    uint64_t inner;
    uint32_t index_type;
    uint32_t element;
};

// Indices that are not of -depth..depth leave their row off.
NXRT_DEVICE void one_hot_each(const OneHotParams& p) {
    const char* values = static_cast<const char*>(p.values);
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        uint64_t inner = i;
        uint64_t position = split_off(inner, p.inner);
        const uint64_t outer = split_off(position, p.depth);
        // Types wider than f64's mantissa hold no valid index there.
        const double index = trunc(load_any<double>(p.index_type, p.indices, outer * p.inner + inner));
        const double hot = index < 0.0 ? index + static_cast<double>(p.depth) : index;
        const bool on = hot == static_cast<double>(position);
        copy_word(static_cast<char*>(p.y) + i * p.element, values + (on ? p.element : 0), p.element, p.element);
    }
}

NXRT_KERNEL(one_hot, OneHotParams, one_hot_each, 256)
