// What the products y = alpha x w^T + beta c take, whatever computes them; the same fields stand in kernels/cuda/product.rs.
#pragma once

#include "fragments.cuh"

namespace nxrt {

// Batches of products whose operands broadcast.
constexpr unsigned kBatchRank = 6;

struct Batch {
    uint64_t x_matrix;         // elements of a left operand
    uint32_t rank;
    uint32_t first;            // the product of blockIdx.z 0
    uint32_t dims[kBatchRank];
    uint32_t x[kBatchRank], w[kBatchRank];  // matrices from one index to the next

    // This block's product.
    NXRT_DEVICE uint32_t index() const { return first + blockIdx.z; }

    // Which left (x) and right (y) operand this block's product takes.
    NXRT_DEVICE uint2 operands() const {
        uint2 at = make_uint2(0, 0);
        uint32_t i = index();
        for (unsigned d = rank; d-- > 0;) {
            const uint32_t index = i % dims[d];
            i /= dims[d];
            at.x += index * x[d];
            at.y += index * w[d];
        }
        return at;
    }
};

struct ProductParams {
    const void* x;
    const void* c;  // null: none
    void* y;
    Weights w;
    Batch batch;
    uint64_t x_row;  // elements from one row to the next
    uint32_t m;
    uint32_t c_row, c_column;  // elements
    float alpha, beta;
    uint32_t pad;
};

// Moves on to the operands and the results of this block's product of a batch, whose weights are 16-bit floats.
template <class T>
NXRT_DEVICE void take_from_batch(const ProductParams& p, const T*& x, Weights& w, T*& y) {
    const uint2 at = p.batch.operands();
    x += at.x * p.batch.x_matrix;
    w.data += uint64_t(at.y) * w.tiles * w.chunks * chunk_bytes<16>();
    y += uint64_t(p.batch.index()) * p.m * w.n;
}

}  // namespace nxrt
