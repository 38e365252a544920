// Gathers slices of a block-quantised tensor. An index out of range gives zeros, as the op says.
#include "fragments.cuh"

using namespace nxrt;

struct GatherParams {
    const uint8_t* data;
    const void* indices;
    const void* scales;
    const uint8_t* zeros;  // null: none
    void* y;
    uint64_t total;   // elements of y
    uint64_t count;   // indices
    uint64_t size;    // of the gathered axis
    uint64_t slice;   // elements behind the gathered axis
    uint64_t along;   // elements along the quantised axis
    uint64_t inner;   // elements behind the quantised axis
    uint64_t zero_row;  // zero points of a row of blocks, padding included
    uint32_t block;
    uint32_t bits;
    uint32_t is_signed;
    int32_t default_zero;
    uint32_t wide_indices;
    uint32_t pad;
};

// Index i into an axis of `size`; `size` itself where it is out of range.
NXRT_DEVICE uint64_t index_at(const void* indices, bool wide, uint64_t i, uint64_t size) {
    int64_t at = wide ? static_cast<const int64_t*>(indices)[i] : int64_t(static_cast<const int32_t*>(indices)[i]);
    if (at < 0) at += int64_t(size);
    return at < 0 || at >= int64_t(size) ? size : uint64_t(at);
}

NXRT_DEVICE int bits_at(const GatherParams& p, const uint8_t* bytes, uint64_t index) {
    const uint64_t bit = index * p.bits;
    const int v = bytes[bit / 8] >> (bit % 8) & ((1 << p.bits) - 1);
    return p.is_signed && v >> (p.bits - 1) == 1 ? v - (1 << p.bits) : v;
}

// A thread an element.
template <class T>
NXRT_DEVICE void gather(const GatherParams& p) {
    const uint64_t o = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (o >= p.total) return;
    const uint64_t i = o / p.slice;
    const uint64_t at = index_at(p.indices, p.wide_indices, i % p.count, p.size);
    T* y = static_cast<T*>(p.y);
    if (at == p.size) {
        y[o] = from_float<T>(0);
        return;
    }
    const uint64_t index = (i / p.count * p.size + at) * p.slice + o % p.slice;
    const uint64_t rest = index / p.inner, blocks = (p.along + p.block - 1) / p.block;
    const uint64_t pair = (rest / p.along * blocks + rest % p.along / p.block) * p.inner + index % p.inner;
    const int zero = p.zeros ? bits_at(p, p.zeros, pair / blocks * p.zero_row + pair % blocks) : p.default_zero;
    const float scale = to_float(static_cast<const T*>(p.scales)[pair]);
    y[o] = from_float<T>(float(bits_at(p, p.data, index) - zero) * scale);
}

struct PackedParams {
    const void* indices;
    void* y;
    Weights w;
    uint64_t count;
    uint32_t wide_indices;
    uint32_t pad;
};

// Rows of a matrix in fragments; a thread eight neighbours of a row.
template <class T, int BITS>
NXRT_DEVICE void gather_packed(const PackedParams& p) {
    const Weights& w = p.w;
    const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint32_t pieces = ceil_div(w.k, 8u), k = uint32_t(thread % pieces) * 8;
    const uint64_t i = thread / pieces;
    if (i >= p.count) return;
    const uint32_t n = uint32_t(index_at(p.indices, p.wide_indices, i, w.n));
    T* y = static_cast<T*>(p.y) + i * w.k + k;
    Vec<T, 8> out = {};
    if (n < w.n) {
        const uint32_t tile = n / kTileRows, g = n % 8, second = n % kTileRows / 8, lane = g * 4 + k % kUnit / 8;
        const int f0 = int(k % kChunk / kUnit) * 2;
        uint32_t words[BITS];
        load_chunk<BITS>(words, w.chunk<BITS>(tile, k / kChunk), lane);
        const uint64_t pair = w.pair_index(tile, k, g);
        const float scale = to_float(static_cast<const T*>(w.scales)[2 * pair + second]);
        int zero = 1 << (BITS - 1);
        if (w.zero_kind == kZeroBytes) {
            const uint32_t stored = load_zero_bytes<BITS>(w.zeros, pair);
            zero = int(stored >> (second * (BITS == 8 ? 8 : 4)) & ((1u << BITS) - 1));
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int f = j / 4, within = j % 4 / 2 * 2 + int(second), high = j % 2;
            // An index that the compiler knows keeps the words in registers.
            uint32_t q = 0;
#pragma unroll
            for (int base = 0; base < 4; base += 2) {
                if (base != f0) continue;
                const int fragment = base + f;
                if (BITS == 8) q = words[(2 * fragment + j % 4 / 2) % BITS] >> (second * 16 + high * 8);
                if (BITS == 4) q = words[fragment % BITS] >> (high * 16 + within * 4);
                if (BITS == 2) q = words[fragment / 2 % BITS] >> (high * 16 + fragment % 2 * 8 + within * 2);
            }
            out[j] = from_float<T>(float(int(q & ((1u << BITS) - 1)) - zero) * scale);
        }
    }
    if (w.k % 8 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0) {
        store_vec<T, 8>(y, out);
    } else {
        for (uint32_t j = 0; j < 8 && k + j < w.k; ++j) y[j] = out[int(j)];
    }
}

#define GATHER(type, T)                                                         \
    NXRT_KERNEL(gather_##type, GatherParams, gather<T>, 256)                    \
    NXRT_KERNEL(gather_packed_2_##type, PackedParams, (gather_packed<T, 2>), 256) \
    NXRT_KERNEL(gather_packed_4_##type, PackedParams, (gather_packed<T, 4>), 256) \
    NXRT_KERNEL(gather_packed_8_##type, PackedParams, (gather_packed<T, 8>), 256)

GATHER(f32, float)
GATHER(f16, half)
GATHER(bf16, bf16)
