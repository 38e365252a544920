#include "arithmetic.cuh"
#include "walk.cuh"

using namespace nxrt;

// `cuda.rs` has the same codes.
enum Reduction : uint32_t { kReplace, kAdd, kMul, kMax, kMin };

// Updates of a copy of the data that an earlier launch has made. An index that the dim does not have is skipped (the
// CPU reports an error); which of several replacements of one element stays is open, as in ONNX.
struct ScatterParams {
    void* y;
    const void* indices;
    const void* updates;
    uint64_t n;       // elements of updates (ScatterElements), or words of them (ScatterND)
    uint64_t length;  // indices along the axis, or index tuples
    uint64_t inner;   // words of updates that a tuple names
    int64_t stride;   // the axis's in y
    uint64_t dims[8]; // the axis's, or those that a tuple addresses
    Walk<1> walk;     // elements: the indices' dims with y's strides, none along the axis
    Walk<1> lines;    // elements: the same without the axis, with the indices' strides
    int64_t line_stride;
    uint32_t index_type;
    uint32_t word;
    uint32_t element;
    uint32_t depth;
    uint32_t reduction;
    uint32_t pad;
};

NXRT_DEVICE bool wrap_index(int64_t& index, uint64_t dim) {
    if (index < 0) index += static_cast<int64_t>(dim);
    return index >= 0 && index < static_cast<int64_t>(dim);
}

// ScatterElements that replaces.
NXRT_DEVICE void replace_each(const ScatterParams& p) {
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        int64_t index = load_index(p.index_type, p.indices, i);
        if (!wrap_index(index, p.dims[0])) continue;
        const int64_t to = (locate(p.walk, i) + index * p.stride) * static_cast<int64_t>(p.element);
        copy_word(static_cast<char*>(p.y) + to, static_cast<const char*>(p.updates) + i * p.element, p.element, p.element);
    }
}

// The slice of y that tuple `row` names, in slices; false where there is none.
NXRT_DEVICE bool slice_of(const ScatterParams& p, uint64_t row, uint64_t& slice) {
    bool present = true;
    slice = 0;
    for (uint32_t d = 0; d < p.depth; ++d) {
        int64_t index = static_cast<const int64_t*>(p.indices)[row * p.depth + d];
        present = wrap_index(index, p.dims[d]) && present;
        slice = slice * p.dims[d] + static_cast<uint64_t>(index);
    }
    return present;
}

// ScatterND that replaces.
NXRT_DEVICE void replace_slices(const ScatterParams& p) {
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        uint64_t column = i, slice;
        const uint64_t row = split_off(column, p.inner);
        if (!slice_of(p, row, slice)) continue;
        char* to = static_cast<char*>(p.y) + (slice * p.inner + column) * p.word;
        copy_word(to, static_cast<const char*>(p.updates) + i * p.word, p.word, p.element);
    }
}

template <class C>
NXRT_DEVICE C combine(uint32_t reduction, C a, C b) {
    switch (reduction) {
        case kAdd: return add(a, b);
        case kMul: return mul(a, b);
        case kMax: return larger(a, b);
        default: return smaller(a, b);
    }
}

// Elements that updates of different lines (or columns of slices) name are different, so that each thread combines its
// own in order.
template <class T>
NXRT_DEVICE void combine_in_order(const ScatterParams& p) {
    T* y = static_cast<T*>(p.y);
    const T* updates = static_cast<const T*>(p.updates);
    auto one = [&](uint64_t to, uint64_t from) {
        y[to] = stored<T>(combine(p.reduction, computed(y[to]), computed(updates[from])));
    };
    if (p.depth > 0) {
        for (uint64_t column = grid_thread(); column < p.inner; column += grid_threads()) {
            for (uint64_t row = 0; row < p.length; ++row) {
                uint64_t slice;
                if (slice_of(p, row, slice)) one(slice * p.inner + column, row * p.inner + column);
            }
        }
        return;
    }
    for (uint64_t line = grid_thread(); line < p.n / p.length; line += grid_threads()) {
        const int64_t first = locate(p.lines, line);
        for (uint64_t i = 0; i < p.length; ++i) {
            const uint64_t from = static_cast<uint64_t>(first + static_cast<int64_t>(i) * p.line_stride);
            int64_t index = load_index(p.index_type, p.indices, from);
            if (wrap_index(index, p.dims[0])) one(static_cast<uint64_t>(locate(p.walk, from) + index * p.stride), from);
        }
    }
}

NXRT_KERNEL(scatter_elements, ScatterParams, replace_each, 256)
NXRT_KERNEL(scatter_nd, ScatterParams, replace_slices, 256)
NXRT_KERNEL(combine_f32, ScatterParams, (combine_in_order<float>), 256)
NXRT_KERNEL(combine_f16, ScatterParams, (combine_in_order<half>), 256)
NXRT_KERNEL(combine_bf16, ScatterParams, (combine_in_order<bf16>), 256)
NXRT_KERNEL(combine_f64, ScatterParams, (combine_in_order<double>), 256)
NXRT_KERNEL(combine_i8, ScatterParams, (combine_in_order<int8_t>), 256)
NXRT_KERNEL(combine_i16, ScatterParams, (combine_in_order<int16_t>), 256)
NXRT_KERNEL(combine_i32, ScatterParams, (combine_in_order<int32_t>), 256)
NXRT_KERNEL(combine_i64, ScatterParams, (combine_in_order<int64_t>), 256)
NXRT_KERNEL(combine_u8, ScatterParams, (combine_in_order<uint8_t>), 256)
NXRT_KERNEL(combine_u16, ScatterParams, (combine_in_order<uint16_t>), 256)
NXRT_KERNEL(combine_u32, ScatterParams, (combine_in_order<uint32_t>), 256)
NXRT_KERNEL(combine_u64, ScatterParams, (combine_in_order<uint64_t>), 256)
