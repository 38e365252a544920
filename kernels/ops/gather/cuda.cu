#include "number.cuh"
#include "walk.cuh"

using namespace nxrt;

// Rows of `row_units` words at indices along one dim; an index that the dim does not have gives zeros (the CPU reports
// an error).
struct GatherParams {
    const void* x;
    const void* indices;
    void* y;
    uint64_t units;
    uint64_t row_units;
    uint64_t count;  // indices
    uint64_t dim;
    uint32_t index_type;
    uint32_t word;
    uint32_t element;
    uint32_t pad;
};

// An index as a position; false where there is none.
NXRT_DEVICE bool wrap_index(int64_t& index, uint64_t dim) {
    if (index < 0) index += static_cast<int64_t>(dim);
    return index >= 0 && index < static_cast<int64_t>(dim);
}

NXRT_DEVICE void gather_rows(const GatherParams& p) {
    for (uint64_t i = grid_thread(); i < p.units; i += grid_threads()) {
        uint64_t column = i;
        uint64_t at = split_off(column, p.row_units);
        const uint64_t outer = split_off(at, p.count);
        int64_t index = load_index(p.index_type, p.indices, at);
        char* to = static_cast<char*>(p.y) + i * p.word;
        if (wrap_index(index, p.dim)) {
            const uint64_t from = (outer * p.dim + static_cast<uint64_t>(index)) * p.row_units + column;
            copy_word(to, static_cast<const char*>(p.x) + from * p.word, p.word, p.element);
        } else {
            zero_word(to, p.word, p.element);
        }
    }
}

NXRT_KERNEL(gather, GatherParams, gather_rows, 256)

// GatherElements: `walk` has the indices' dims, with the data's strides but for the axis, whose stride is apart.
struct ElementsParams {
    const void* x;
    const void* indices;
    void* y;
    uint64_t n;
    uint64_t dim;
    int64_t stride;
    Walk<1> walk;
    uint32_t index_type;
    uint32_t element;
};

NXRT_DEVICE void gather_each(const ElementsParams& p) {
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        int64_t index = load_index(p.index_type, p.indices, i);
        char* to = static_cast<char*>(p.y) + i * p.element;
        if (wrap_index(index, p.dim)) {
            const int64_t from = locate(p.walk, i) + index * p.stride;
            copy_word(to, static_cast<const char*>(p.x) + from * static_cast<int64_t>(p.element), p.element, p.element);
        } else {
            zero_word(to, p.element, p.element);
        }
    }
}

NXRT_KERNEL(gather_elements, ElementsParams, gather_each, 256)

// GatherND: slices of `inner_units` words at tuples of indices.
struct NdParams {
    const void* x;
    const int64_t* indices;
    void* y;
    uint64_t units;
    uint64_t inner_units;
    uint64_t per_batch;    // tuples in one batch
    uint64_t batch_units;  // words of x in one batch
    uint64_t dims[8];      // that a tuple addresses
    uint32_t depth;
    uint32_t word;
    uint32_t element;
    uint32_t pad;
};

NXRT_DEVICE void gather_slices(const NdParams& p) {
    for (uint64_t i = grid_thread(); i < p.units; i += grid_threads()) {
        uint64_t column = i;
        uint64_t row = split_off(column, p.inner_units);
        uint64_t slice = 0;
        bool present = true;
        for (uint32_t d = 0; d < p.depth; ++d) {
            int64_t index = p.indices[row * p.depth + d];
            present = wrap_index(index, p.dims[d]) && present;
            slice = slice * p.dims[d] + static_cast<uint64_t>(index);
        }
        char* to = static_cast<char*>(p.y) + i * p.word;
        if (present) {
            const uint64_t from = divide(row, p.per_batch) * p.batch_units + slice * p.inner_units + column;
            copy_word(to, static_cast<const char*>(p.x) + from * p.word, p.word, p.element);
        } else {
            zero_word(to, p.word, p.element);
        }
    }
}

NXRT_KERNEL(gather_nd, NdParams, gather_slices, 256)
