// Strided tensors: from the number of an element in output order to offsets, and copies of words.
#pragma once

#include "common.cuh"

namespace nxrt {

// Dims (innermost last, one at least) that K operands are walked in, with a stride for each. `walk.rs` fills it in.
template <int K, int Dims = 8>
struct Walk {
    uint64_t dims[Dims];
    int64_t strides[K][Dims];
    uint32_t rank;
    uint32_t pad;
};

// Quotient by 32-bit arithmetic where that will do, which is nearly always.
NXRT_DEVICE uint64_t divide(uint64_t a, uint64_t b) {
    if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return a / b;
}

// Splits index `i` of a dim off the front: i becomes the index within `inner`, the result the one before.
NXRT_DEVICE uint64_t split_off(uint64_t& i, uint64_t inner) {
    const uint64_t q = divide(i, inner);
    i -= q * inner;
    return q;
}

// Each operand's offset of element `index` of the walk.
template <int K, int Dims>
NXRT_DEVICE void locate(const Walk<K, Dims>& walk, uint64_t index, int64_t (&at)[K]) {
#pragma unroll
    for (int k = 0; k < K; ++k) at[k] = 0;
    for (uint32_t d = walk.rank - 1; d > 0; --d) {
        const uint64_t q = divide(index, walk.dims[d]);
        const int64_t r = static_cast<int64_t>(index - q * walk.dims[d]);
#pragma unroll
        for (int k = 0; k < K; ++k) at[k] += r * walk.strides[k][d];
        index = q;
    }
#pragma unroll
    for (int k = 0; k < K; ++k) at[k] += static_cast<int64_t>(index) * walk.strides[k][0];
}

template <int Dims>
NXRT_DEVICE int64_t locate(const Walk<1, Dims>& walk, uint64_t index) {
    int64_t at[1];
    locate(walk, index, at);
    return at[0];
}

// The grid's threads, for loops that cover any number of elements.
NXRT_DEVICE uint64_t grid_thread() { return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
NXRT_DEVICE uint64_t grid_threads() { return static_cast<uint64_t>(gridDim.x) * blockDim.x; }

NXRT_DEVICE bool is_aligned(const void* p, uint32_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

namespace detail {
NXRT_DEVICE void copy_aligned(void* to, const void* from, uint32_t word) {
    switch (word) {
        case 1: *static_cast<uint8_t*>(to) = *static_cast<const uint8_t*>(from); return;
        case 2: *static_cast<uint16_t*>(to) = *static_cast<const uint16_t*>(from); return;
        case 4: *static_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from); return;
        case 8: *static_cast<uint2*>(to) = *static_cast<const uint2*>(from); return;
        default: *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
    }
}
}  // namespace detail

// Copies a word of 1, 2, 4, 8 or 16 bytes between addresses that are aligned to it or, if not, to `element` bytes.
NXRT_DEVICE void copy_word(void* to, const void* from, uint32_t word, uint32_t element) {
    if (word > element && !(is_aligned(to, word) && is_aligned(from, word))) {
        for (uint32_t i = 0; i < word; i += element) {
            detail::copy_aligned(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, element);
        }
        return;
    }
    detail::copy_aligned(to, from, word);
}

// As copy_word, of zeros.
NXRT_DEVICE void zero_word(void* to, uint32_t word, uint32_t element) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const uint32_t step = is_aligned(to, word) ? word : element;
    for (uint32_t i = 0; i < word; i += step) detail::copy_aligned(static_cast<char*>(to) + i, &zero, step);
}

}  // namespace nxrt
