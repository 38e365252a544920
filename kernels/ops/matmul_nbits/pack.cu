// Weights that arrive with the run go into fragments, as kernels/quant/fragments.rs does it for constants.
#include "fragments.cuh"

using namespace nxrt;

struct PackParams {
    const uint8_t* b;       // [N, blocks, blob]
    const uint8_t* scales;  // [N, blocks]
    const uint8_t* zeros;   // [N, blocks], or bytes [N, ceil(blocks * bits / 8)]
    Weights w;              // where the packed parts go
    uint32_t row_bytes;     // of b
    uint32_t blocks;        // of a row of the model
};

// `len` bytes at `at` of row n, zeros past the matrix.
NXRT_DEVICE uint32_t source_bytes(const PackParams& p, uint32_t n, uint32_t at, unsigned len) {
    uint32_t word = 0;
    for (unsigned i = 0; i < len; ++i) {
        if (n < p.w.n && at + i < p.row_bytes) word |= uint32_t(p.b[uint64_t(n) * p.row_bytes + at + i]) << (8 * i);
    }
    return word;
}

// A thread writes one lane's words of a chunk.
template <int BITS>
NXRT_DEVICE void pack_weights(const PackParams& p) {
    constexpr int WORDS = BITS < 4 ? BITS : 4;
    const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t index = thread / kWarpSize;
    const unsigned lane = thread % kWarpSize;
    if (index >= uint64_t(p.w.tiles) * p.w.chunks) return;
    const uint32_t tile = uint32_t(index / p.w.chunks), chunk = uint32_t(index % p.w.chunks);
    uint32_t words[BITS] = {};
#pragma unroll
    for (int f = 0; f < 4; ++f) {
        const uint32_t k = chunk * kChunk + f / 2 * kUnit + lane % 4 * 8 + f % 2 * 4;
        const uint32_t low = source_bytes(p, tile * kTileRows + lane / 4, k * BITS / 8, BITS / 2);
        const uint32_t high = source_bytes(p, tile * kTileRows + lane / 4 + 8, k * BITS / 8, BITS / 2);
        if constexpr (BITS == 8) {
            words[2 * f] = (low & 0xffff) | high << 16;
            words[2 * f + 1] = low >> 16 | (high & 0xffff0000u);
        } else if constexpr (BITS == 4) {
            words[f] = (low & 0x0f0f) | (high & 0x0f0f) << 4 | ((low >> 4 & 0x0f0f) | (high & 0xf0f0)) << 16;
        } else {
            const uint32_t word = (low & 0x33) | (high & 0x33) << 2 | ((low >> 2 & 0x33) | (high & 0xcc)) << 16;
            words[f / 2] |= word << (f % 2 * 8);
        }
    }
    uint8_t* out = const_cast<uint8_t*>(p.w.chunk<BITS>(tile, chunk));
#pragma unroll
    for (int v = 0; v < BITS / WORDS; ++v) {
        Vec<uint32_t, WORDS> x;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) x[i] = words[v * WORDS + i];
        store_vec<uint32_t, WORDS>(reinterpret_cast<uint32_t*>(out) + (v * kWarpSize + lane) * WORDS, x);
    }
}

// A thread writes the pair of one block: scales of type T, and zero points.
template <class T, int BITS>
NXRT_DEVICE void pack_blocks(const PackParams& p) {
    const uint64_t pair = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (pair >= uint64_t(p.w.tiles) * p.w.blocks * 8) return;
    const uint32_t g = pair % 8, block = pair / 8 % p.w.blocks, tile = uint32_t(pair / 8 / p.w.blocks);
    uint32_t bytes = 0;
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t n = tile * kTileRows + g + 8 * h;
        const bool inside = n < p.w.n && block < p.blocks;
        const uint64_t from = uint64_t(n) * p.blocks + block;
        T* scales = static_cast<T*>(const_cast<void*>(p.w.scales));
        scales[2 * pair + h] = inside ? reinterpret_cast<const T*>(p.scales)[from] : T(0);
        if (p.w.zero_kind == kZeroFloat) {
            T* zeros = static_cast<T*>(const_cast<void*>(p.w.zeros));
            zeros[2 * pair + h] = inside ? reinterpret_cast<const T*>(p.zeros)[from] : T(0);
        }
        if (p.w.zero_kind == kZeroBytes && inside) {
            const uint32_t row = (p.blocks * BITS + 7) / 8, bit = block * BITS;
            const uint32_t value = p.zeros[uint64_t(n) * row + bit / 8] >> (bit % 8) & ((1u << BITS) - 1);
            bytes |= value << (h * (BITS == 8 ? 8 : 4));
        }
    }
    if (p.w.zero_kind == kZeroBytes) {
        uint8_t* zeros = static_cast<uint8_t*>(const_cast<void*>(p.w.zeros));
        if constexpr (BITS == 8) {
            zeros[2 * pair] = uint8_t(bytes);
            zeros[2 * pair + 1] = uint8_t(bytes >> 8);
        } else {
            zeros[pair] = uint8_t(bytes);
        }
    }
}

// Scales move as integers of their size.
#define PACK(bits)                                                                            \
    NXRT_KERNEL(pack_weights_##bits, PackParams, (pack_weights<bits>), 256)                   \
    NXRT_KERNEL(pack_blocks_##bits##_2, PackParams, (pack_blocks<uint16_t, bits>), 256)       \
    NXRT_KERNEL(pack_blocks_##bits##_4, PackParams, (pack_blocks<uint32_t, bits>), 256)

PACK(2)
PACK(4)
PACK(8)
