#include "walk.cuh"

using namespace nxrt;

// Rows of `row_units` words: `total` a prefix in the cache, `new_rows` in the update. Write indices that the cache does
// not have leave their prefix as it was (the CPU reports an error).
struct TensorScatterParams {
    const void* past;
    const void* update;
    const int64_t* starts;  // null: 0
    void* present;
    uint64_t prefixes;
    uint64_t prefixes_per_batch;
    uint64_t total;
    uint64_t new_rows;
    uint64_t row_units;
    uint32_t circular;
    uint32_t word;
    uint32_t element;
    uint32_t pad;
};

NXRT_DEVICE bool start_of(const TensorScatterParams& p, uint64_t prefix, uint64_t& start) {
    const int64_t at = p.starts ? p.starts[divide(prefix, p.prefixes_per_batch)] : 0;
    start = static_cast<uint64_t>(at);
    return at >= 0 && start < (p.circular ? p.total : p.total - p.new_rows + 1);
}

NXRT_DEVICE void tensor_scatter_rows(const TensorScatterParams& p) {
    const char* past = static_cast<const char*>(p.past);
    const char* update = static_cast<const char*>(p.update);
    char* present = static_cast<char*>(p.present);
    uint64_t start;
    if (p.past == p.present) {
        // One buffer for both: the rest of the cache is there already.
        const uint64_t units = p.prefixes * p.new_rows * p.row_units;
        for (uint64_t i = grid_thread(); i < units; i += grid_threads()) {
            uint64_t column = i;
            uint64_t row = split_off(column, p.row_units);
            const uint64_t prefix = split_off(row, p.new_rows);
            if (!start_of(p, prefix, start)) continue;
            uint64_t to = start + row;
            if (to >= p.total) to -= p.total;
            to = (prefix * p.total + to) * p.row_units + column;
            copy_word(present + to * p.word, update + i * p.word, p.word, p.element);
        }
        return;
    }
    const uint64_t units = p.prefixes * p.total * p.row_units;
    for (uint64_t i = grid_thread(); i < units; i += grid_threads()) {
        uint64_t column = i;
        uint64_t row = split_off(column, p.row_units);
        const uint64_t prefix = split_off(row, p.total);
        const char* from = past + i * p.word;
        if (start_of(p, prefix, start)) {
            const uint64_t behind = row >= start ? row - start : row + p.total - start;
            if (behind < p.new_rows) from = update + ((prefix * p.new_rows + behind) * p.row_units + column) * p.word;
        }
        copy_word(present + i * p.word, from, p.word, p.element);
    }
}

NXRT_KERNEL(tensor_scatter, TensorScatterParams, tensor_scatter_rows, 256)
