#include "walk.cuh"

using namespace nxrt;

struct TriluParams {
    const void* x;
    const int64_t* k;  // null: 0
    void* y;
    uint64_t n;
    uint64_t rows;
    uint64_t columns;
    uint32_t upper;
    uint32_t element;
};

NXRT_DEVICE void trilu_each(const TriluParams& p) {
    // A diagonal beyond the matrix's corners is none.
    const int64_t most = static_cast<int64_t>(p.rows + p.columns);
    const int64_t asked = p.k ? *p.k : 0;
    const int64_t k = asked > most ? most : asked < -most ? -most : asked;
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        uint64_t column = i;
        uint64_t row = split_off(column, p.columns);
        split_off(row, p.rows);
        const int64_t right = static_cast<int64_t>(column) - static_cast<int64_t>(row);
        char* to = static_cast<char*>(p.y) + i * p.element;
        if (p.upper ? right >= k : right <= k) {
            copy_word(to, static_cast<const char*>(p.x) + i * p.element, p.element, p.element);
        } else {
            zero_word(to, p.element, p.element);
        }
    }
}

NXRT_KERNEL(trilu, TriluParams, trilu_each, 256)
