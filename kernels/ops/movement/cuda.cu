#include "walk.cuh"

using namespace nxrt;

// ---- one strided view: Slice, Expand, Tile, Transpose with contiguous runs ----

struct StridedParams {
    const void* x;
    void* y;
    uint64_t units;
    Walk<1, 16> walk;  // strides in bytes
    uint32_t word;     // bytes of a unit
    uint32_t element;
};

NXRT_DEVICE void strided_copy(const StridedParams& p) {
    for (uint64_t i = grid_thread(); i < p.units; i += grid_threads()) {
        copy_word(static_cast<char*>(p.y) + i * p.word, static_cast<const char*>(p.x) + locate(p.walk, i), p.word, p.element);
    }
}

NXRT_KERNEL(strided, StridedParams, strided_copy, 256)

// ---- a view whose innermost dim is another than the one whose elements are neighbours ----

struct TransposeParams {
    const void* x;
    void* y;
    uint64_t rows;        // the dim along which x is contiguous
    uint64_t columns;     // the dim along which y is
    uint64_t x_stride;    // elements of x from one column to the next
    uint64_t y_stride;    // elements of y from one row to the next
    Walk<2, 16> batch;    // the other dims, in x and in y
};

// A tile goes through shared memory, so that both sides are read and written along their runs.
template <class W, int Tile>
NXRT_DEVICE void transpose(const TransposeParams& p) {
    // One column more, so that a column's words lie in different banks.
    NXRT_SHARED W tile[Tile][Tile + 1];
    const uint64_t across = ceil_div(p.columns, uint64_t{Tile});
    uint64_t block = blockIdx.x;
    uint64_t down = split_off(block, across);
    const uint64_t batch = split_off(down, ceil_div(p.rows, uint64_t{Tile}));
    const uint64_t row = down * Tile, column = block * Tile;
    int64_t at[2];
    locate(p.batch, batch, at);
    const W* x = static_cast<const W*>(p.x) + at[0];
    W* y = static_cast<W*>(p.y) + at[1];
    for (uint32_t i = threadIdx.x; i < Tile * Tile; i += blockDim.x) {
        const uint32_t r = i % Tile, c = i / Tile;
        if (row + r < p.rows && column + c < p.columns) tile[r][c] = x[(column + c) * p.x_stride + row + r];
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < Tile * Tile; i += blockDim.x) {
        const uint32_t r = i / Tile, c = i % Tile;
        if (row + r < p.rows && column + c < p.columns) y[(row + r) * p.y_stride + column + c] = tile[r][c];
    }
}

NXRT_KERNEL(transpose_8, TransposeParams, (transpose<uint8_t, 64>), 256)
NXRT_KERNEL(transpose_16, TransposeParams, (transpose<uint16_t, 64>), 256)
NXRT_KERNEL(transpose_32, TransposeParams, (transpose<uint32_t, 32>), 256)
NXRT_KERNEL(transpose_64, TransposeParams, (transpose<uint64_t, 32>), 256)

// ---- Concat and Split: rows of a whole, and pieces of them ----

constexpr int kPieces = 16;

struct PiecesParams {
    void* whole;             // at the first piece's first byte
    void* pieces[kPieces];   // null: nobody reads it
    uint64_t ends[kPieces];  // where each ends within a row, in bytes behind the first one's start
    uint64_t units;
    uint64_t row_units;
    uint64_t row_bytes;  // of the whole
    uint32_t word;
    uint32_t element;
    uint32_t split;  // whether the pieces are written, else the whole is
    uint32_t pad;
};

NXRT_DEVICE void copy_pieces(const PiecesParams& p) {
    for (uint64_t i = grid_thread(); i < p.units; i += grid_threads()) {
        uint64_t column = i;
        const uint64_t row = split_off(column, p.row_units);
        column *= p.word;
        uint32_t k = 0;
        uint64_t start = 0;
        while (column >= p.ends[k]) start = p.ends[k++];
        if (!p.pieces[k]) continue;
        char* whole = static_cast<char*>(p.whole) + row * p.row_bytes + column;
        char* piece = static_cast<char*>(p.pieces[k]) + row * (p.ends[k] - start) + column - start;
        copy_word(p.split ? piece : whole, p.split ? whole : piece, p.word, p.element);
    }
}

NXRT_KERNEL(pieces, PiecesParams, copy_pieces, 256)

// ---- one element over and over: ConstantOfShape ----

struct FillParams {
    void* y;
    uint64_t bytes;
    uint64_t pattern[2];  // 16 bytes of the element, repeated
};

NXRT_DEVICE void fill_pattern(const FillParams& p) {
    const char* pattern = reinterpret_cast<const char*>(p.pattern);
    char* y = static_cast<char*>(p.y);
    uint64_t done = 0;
    if (is_aligned(y, 16)) {
        const Vec<uint64_t, 2> word = {{p.pattern[0], p.pattern[1]}};
        uint64_t* words = static_cast<uint64_t*>(p.y);
        for (uint64_t i = grid_thread(); i < p.bytes / 16; i += grid_threads()) store_vec<uint64_t, 2>(words + 2 * i, word);
        done = p.bytes / 16 * 16;
    }
    for (uint64_t i = done + grid_thread(); i < p.bytes; i += grid_threads()) y[i] = pattern[i % 16];
}

NXRT_KERNEL(fill, FillParams, fill_pattern, 256)
