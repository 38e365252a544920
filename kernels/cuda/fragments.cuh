// Weight matrices [N, K] in the order in which warps multiply them: see kernels/cuda/fragments.rs, which packs them.
//
// N: rows of the weights (output features), K: columns (input features), M: rows of the activations.
// A tile is 16 rows, a chunk 64 columns, a unit 32 columns, a fragment one 16x16 operand `a` of mma_m16n8k16. Lane (g, q) of a
// warp (g = lane / 4, q = lane % 4) has of unit u, fragment f (0 or 1) rows g and g + 8 at columns 32 u + 8 q + 4 f .. + 4, so
// that the activations that go with both fragments are eight neighbours along K. A lane's bytes of a chunk lie in vectors
// of 16 bytes (8 for 2 bits), lane after lane; chunk after chunk of a tile, tile after tile.
// Scales and float zero points: [tile][block][g] pairs (row g, row g + 8). Integer zero points: [tile][block][g] bytes, row g's
// in the low four bits (8-bit weights: pairs of bytes). Columns past K and rows past N are zero, scales too.
#pragma once

#include "mma.cuh"
#include "pair.cuh"

namespace nxrt {

constexpr unsigned kTileRows = 16;
constexpr unsigned kChunk = 64;
constexpr unsigned kUnit = 32;

// What zero points a matrix has.
enum : uint32_t { kZeroDefault = 0, kZeroBytes = 1, kZeroFloat = 2 };

// Bytes of one chunk of a tile.
template <int BITS>
NXRT_DEVICE constexpr unsigned chunk_bytes() {
    return kWarpSize * 4 * BITS;
}

// This lane's words of a chunk at `chunk`, in global memory.
template <int BITS>
NXRT_DEVICE void load_chunk(uint32_t* w, const uint8_t* chunk, unsigned lane) {
    constexpr int WORDS = BITS < 4 ? BITS : 4;
#pragma unroll
    for (int v = 0; v < BITS / WORDS; ++v) {
        const auto from = reinterpret_cast<const uint32_t*>(chunk) + (v * kWarpSize + lane) * WORDS;
        const Vec<uint32_t, WORDS> x = load_stream<uint32_t, WORDS>(from);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) w[v * WORDS + i] = x[i];
    }
}

// ---- pairs of 16-bit floats in a word ----

template <class T>
NXRT_DEVICE uint32_t pair_sub(uint32_t a, uint32_t b) {
    using P = typename Pair<T>::Type;
    return as_word<P>(__hsub2(reinterpret_cast<const P&>(a), reinterpret_cast<const P&>(b)));
}
template <class T>
NXRT_DEVICE uint32_t pair_mul(uint32_t a, uint32_t b) {
    using P = typename Pair<T>::Type;
    return as_word<P>(__hmul2(reinterpret_cast<const P&>(a), reinterpret_cast<const P&>(b)));
}
// The lower or upper half in both halves.
NXRT_DEVICE uint32_t twice_low(uint32_t x) { return prmt(x, x, 0x1010); }
NXRT_DEVICE uint32_t twice_high(uint32_t x) { return prmt(x, x, 0x3232); }

// ---- integers ----
// q lies in the low bits of a float whose last place is worth one, so that subtracting the float made of zero point and
// the same high bits leaves q - zero exactly.

constexpr uint32_t kHalf1024 = 0x64006400;  // q in bits 0..9
constexpr uint32_t kHalf64 = 0x54005400;    // q in bits 4..9
constexpr uint32_t kBf128 = 0x43004300;     // q in bits 0..6

// What is subtracted from rows g and g + 8.
struct Offsets {
    uint32_t low, high;
};

template <class T, int BITS>
NXRT_DEVICE Offsets offsets(uint32_t low, uint32_t high) {
    if constexpr (std::is_same_v<T, bf16> && BITS < 8) {
        return {kBf128 | low * 0x10001, kBf128 | high * 0x10001};
    } else if constexpr (BITS == 4) {
        return {kHalf1024 | low * 0x10001, kHalf64 | high * 0x100010};
    } else {
        return {kHalf1024 | low * 0x10001, kHalf1024 | high * 0x10001};
    }
}

// The zero points of rows g and g + 8 of a block, as stored.
template <int BITS>
NXRT_DEVICE uint32_t load_zero_bytes(const void* zeros, uint64_t index) {
    if constexpr (BITS == 8) return static_cast<const uint16_t*>(zeros)[index];
    return static_cast<const uint8_t*>(zeros)[index];
}
template <class T, int BITS>
NXRT_DEVICE Offsets stored_offsets(uint32_t stored) {
    if constexpr (BITS == 8) return offsets<T, BITS>(stored & 0xff, stored >> 8);
    return offsets<T, BITS>(stored & 0xf, stored >> 4);
}
template <class T, int BITS>
NXRT_DEVICE Offsets default_offsets() {
    return offsets<T, BITS>(1u << (BITS - 1), 1u << (BITS - 1));
}

// Fragment `f` (0..3) of a chunk's words as values minus offsets, exactly; a[0], a[2] are row g's.
template <class T, int BITS>
NXRT_DEVICE void decode(uint32_t (&a)[4], const uint32_t* w, int f, Offsets zero) {
    constexpr bool HALF = std::is_same_v<T, half>;
    if constexpr (BITS == 16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = w[4 * f + i];
        return;
    } else if constexpr (BITS == 8) {
        constexpr uint32_t HIGH = 0x64646464;
        a[0] = pair_sub<half>(prmt(w[2 * f], HIGH, 0x4140), zero.low);
        a[1] = pair_sub<half>(prmt(w[2 * f], HIGH, 0x4342), zero.high);
        a[2] = pair_sub<half>(prmt(w[2 * f + 1], HIGH, 0x4140), zero.low);
        a[3] = pair_sub<half>(prmt(w[2 * f + 1], HIGH, 0x4342), zero.high);
        if constexpr (!HALF) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 x = Pair<half>::floats(a[i]);
                a[i] = as_word(Pair<bf16>::from_floats(x.x, x.y));
            }
        }
    } else if constexpr (BITS == 4 && HALF) {
        const uint32_t x = w[f], y = x >> 8;
        a[0] = pair_sub<T>(lop3<0xEA>(x, 0x000f000f, kHalf1024), zero.low);
        a[1] = pair_sub<T>(lop3<0xEA>(x, 0x00f000f0, kHalf64), zero.high);
        a[2] = pair_sub<T>(lop3<0xEA>(y, 0x000f000f, kHalf1024), zero.low);
        a[3] = pair_sub<T>(lop3<0xEA>(y, 0x00f000f0, kHalf64), zero.high);
    } else {
        constexpr uint32_t MASK = (1u << BITS) - 1;
        constexpr uint32_t HIGH = HALF ? kHalf1024 : kBf128;
        const uint32_t x = BITS == 4 ? w[f] : w[f / 2] >> (f % 2 * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = pair_sub<T>(lop3<0xEA>(x >> (BITS * i), MASK * 0x10001, HIGH), i % 2 ? zero.high : zero.low);
    }
}

// Scales fragments by what each row's block says: `scale` is the pair (row g, row g + 8).
template <class T>
NXRT_DEVICE void scale_fragment(uint32_t (&a)[4], uint32_t scale) {
    const uint32_t low = twice_low(scale), high = twice_high(scale);
    a[0] = pair_mul<T>(a[0], low);
    a[1] = pair_mul<T>(a[1], high);
    a[2] = pair_mul<T>(a[2], low);
    a[3] = pair_mul<T>(a[3], high);
}

// Takes float zero points away: `zero` is the pair (row g, row g + 8).
template <class T>
NXRT_DEVICE void subtract_fragment(uint32_t (&a)[4], uint32_t zero) {
    const uint32_t low = twice_low(zero), high = twice_high(zero);
    a[0] = pair_sub<T>(a[0], low);
    a[1] = pair_sub<T>(a[1], high);
    a[2] = pair_sub<T>(a[2], low);
    a[3] = pair_sub<T>(a[3], high);
}

// A quantised matrix in device memory; the same fields stand in Rust's `Weights`.
struct Weights {
    const uint8_t* data;
    const void* scales;
    const void* zeros;
    uint32_t n, k;
    uint32_t tiles, chunks;
    uint32_t blocks;       // a row, padded to whole chunks
    uint32_t block_shift;  // a block is 1 << block_shift columns
    uint32_t zero_kind;
    uint32_t pad;

    // Index of the pair of scales of rows g, g + 8 at column k.
    NXRT_DEVICE uint64_t pair_index(uint32_t tile, uint32_t k, unsigned g) const {
        return (uint64_t(tile) * blocks + (k >> block_shift)) * 8 + g;
    }
    template <int BITS>
    NXRT_DEVICE const uint8_t* chunk(uint32_t tile, uint32_t chunk) const {
        return data + (uint64_t(tile) * chunks + chunk) * chunk_bytes<BITS>();
    }
};

}  // namespace nxrt
