// Products of many rows with weights in fragments on tensor cores: an asynchronous pipeline of chunks through shared memory,
// weights decoded in registers, float accumulates. Hopper has wgemm.cuh instead.
#pragma once

#include "tile_output.cuh"

namespace nxrt {

constexpr int kStages = 3;

// A block of 2 x 2 warps; each multiplies TILES tiles of weights with ROWS rows of activations.
template <class T, int BITS, int TILES, int ROWS>
struct Gemm {
    static constexpr int kThreads = 128;
    static constexpr int kBlockTiles = 2 * TILES;
    static constexpr int kBlockColumns = kBlockTiles * int(kTileRows);
    static constexpr int kBlockRows = 2 * ROWS;
    static constexpr int kStrips = ROWS / 8;
    static constexpr int kWeightBytes = kBlockTiles * int(chunk_bytes<BITS>());
    static constexpr int kRowBytes = int(kChunk) * 2;
    static constexpr int kStageBytes = kWeightBytes + kBlockRows * kRowBytes;
    // Output rows in shared memory are padded against bank conflicts.
    static constexpr int kOutRow = kBlockColumns + 8;

    const ProductParams& p;
    Weights w;
    const T* x;
    uint8_t* shared;
    uint32_t tile0, row0;
    uint32_t first, end;  // the chunks of this block's part of K
    bool wide;
    float sum[TILES][kStrips][4];

    NXRT_DEVICE explicit Gemm(const ProductParams& params) : p(params), w(params.w) {}

    // Which 16 bytes of a row of activations in shared memory hold columns 8 c .. 8 c + 8: odd rows are turned by half, so that
    // two rows' worth of a quarter warp's loads hits every bank once.
    static NXRT_DEVICE int swizzle(int row, int c) { return row * kRowBytes + (c ^ (row & 1) << 2) * 16; }

    NXRT_DEVICE void load_weights(uint8_t* stage, uint32_t chunk) const {
        constexpr int PIECES = int(chunk_bytes<BITS>()) / 16;
#pragma unroll
        for (int piece = int(threadIdx.x); piece < kBlockTiles * PIECES; piece += kThreads) {
            const uint32_t tile = tile0 + piece / PIECES;
            const bool valid = tile < w.tiles;
            const uint8_t* from = w.chunk<BITS>(valid ? tile : 0, chunk) + piece % PIECES * 16;
            cp_async_16(stage + piece * 16, from, valid);
        }
    }

    NXRT_DEVICE void load_rows(uint8_t* stage, uint32_t chunk) const {
#pragma unroll
        for (int i = 0; i < kBlockRows * 8 / kThreads; ++i) {
            const int piece = i * kThreads + int(threadIdx.x);
            const int r = piece / 8, c = piece % 8;
            const uint32_t row = row0 + r, k = chunk * kChunk + c * 8;
            uint8_t* to = stage + swizzle(r, c);
            const bool valid = row < p.m && k < w.k;
            const T* from = valid ? x + row * p.x_row + k : x;
            if (wide) {
                cp_async_16(to, from, valid);
            } else {
                Vec<uint16_t, 8> v = {};
                for (uint32_t j = 0; valid && j < 8 && k + j < w.k; ++j)
                    v[int(j)] = reinterpret_cast<const uint16_t*>(from)[j];
                store_vec<uint16_t, 8>(reinterpret_cast<uint16_t*>(to), v);
            }
        }
    }

    NXRT_DEVICE void load(uint32_t chunk) const {
        if (chunk < end) {
            uint8_t* stage = shared + chunk % kStages * kStageBytes;
            load_weights(stage, chunk);
            load_rows(stage + kWeightBytes, chunk);
        }
        cp_async_commit();
    }

    // What this lane needs of the scales and zero points for one chunk.
    struct Scales {
        uint32_t scales[TILES][2];
        uint32_t zeros[TILES][2];
    };

    NXRT_DEVICE void load_scales(Scales& s, uint32_t chunk) const {
        if constexpr (BITS < 16) {
            const unsigned lane = lane_id();
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const uint32_t tile = min(tile0 + warp_id() / 2 * TILES + t, w.tiles - 1);
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    const uint64_t at = w.pair_index(tile, chunk * kChunk + u * kUnit + lane % 4 * 8, lane / 4);
                    s.scales[t][u] = __ldg(static_cast<const uint32_t*>(w.scales) + at);
                    if (w.zero_kind == kZeroBytes) s.zeros[t][u] = load_zero_bytes<BITS>(w.zeros, at);
                    if (w.zero_kind == kZeroFloat) s.zeros[t][u] = __ldg(static_cast<const uint32_t*>(w.zeros) + at);
                }
            }
        }
    }

    // The products of one chunk.
    NXRT_DEVICE void multiply(const uint8_t* stage, const Scales& s) {
        const unsigned lane = lane_id(), warp = warp_id();
        const uint8_t* weights = stage + warp / 2 * TILES * chunk_bytes<BITS>();
        const uint8_t* rows = stage + kWeightBytes;
        const int r0 = int(warp % 2 * ROWS + lane / 4);
        uint32_t words[TILES][BITS < 16 ? BITS : 1];
        if constexpr (BITS < 16) {
#pragma unroll
            for (int t = 0; t < TILES; ++t) load_words(words[t], weights + t * chunk_bytes<BITS>());
        }
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            uint32_t x[kStrips][4];
#pragma unroll
            for (int i = 0; i < kStrips; ++i) {
                const auto v = load_vec<uint32_t, 4>(
                    reinterpret_cast<const uint32_t*>(rows + swizzle(r0 + 8 * i, u * 4 + int(lane % 4))));
#pragma unroll
                for (int j = 0; j < 4; ++j) x[i][j] = v[j];
            }
#pragma unroll
            for (int f = 0; f < 2; ++f) {
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    uint32_t a[4];
                    if constexpr (BITS == 16) {
                        load_fragment(a, weights + t * chunk_bytes<BITS>(), 2 * u + f);
                    } else {
                        Offsets offset = default_offsets<T, BITS>();
                        if (w.zero_kind == kZeroBytes) offset = stored_offsets<T, BITS>(s.zeros[t][u]);
                        if (w.zero_kind == kZeroFloat) offset = offsets<T, BITS>(0, 0);
                        decode<T, BITS>(a, words[t], 2 * u + f, offset);
                        if (w.zero_kind == kZeroFloat) subtract_fragment<T>(a, s.zeros[t][u]);
                        scale_fragment<T>(a, s.scales[t][u]);
                    }
#pragma unroll
                    for (int i = 0; i < kStrips; ++i) {
                        const uint32_t b[2] = {x[i][2 * f], x[i][2 * f + 1]};
                        mma_m16n8k16<T>(sum[t][i], a, b);
                    }
                }
            }
        }
    }

    // Fragment `f` of 16-bit weights.
    static NXRT_DEVICE void load_fragment(uint32_t (&a)[4], const uint8_t* chunk, int f) {
        const auto x = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(chunk) + (f * kWarpSize + lane_id()) * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = x[i];
    }

    // This lane's words of a chunk.
    static NXRT_DEVICE void load_words(uint32_t* words, const uint8_t* chunk) {
        constexpr int WORDS = BITS < 4 ? BITS : 4;
#pragma unroll
        for (int v = 0; v < BITS / WORDS; ++v) {
            const auto from = reinterpret_cast<const uint32_t*>(chunk) + (v * kWarpSize + lane_id()) * WORDS;
            const auto x = load_vec<uint32_t, WORDS>(from);
#pragma unroll
            for (int i = 0; i < WORDS; ++i) words[v * WORDS + i] = x[i];
        }
    }

    // Calls f(sums, row, column) with the place of the first sum in the block's tile of y.
    template <class F>
    NXRT_DEVICE void for_sums(F f) {
        const int lane = int(lane_id()), warp = int(warp_id());
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < kStrips; ++i)
                f(sum[t][i], warp % 2 * ROWS + i * 8 + lane % 4 * 2, (warp / 2 * TILES + t) * int(kTileRows) + lane / 4);
    }

    // Turns the sums round through shared memory, so that rows are stored in vectors.
    NXRT_DEVICE void store(const TileOutput& output, T* y) {
        T* out = reinterpret_cast<T*>(shared);
        for_sums([&](float(&d)[4], int r, int c) {
            output.scale(d);
            if (p.c) output.add_c<T>(d, r, c);
#pragma unroll
            for (int j = 0; j < 4; ++j) out[(r + j % 2) * kOutRow + c + j / 2 * 8] = from_float<T>(d[j]);
        });
        __syncthreads();
        output.store<T, kBlockRows, kBlockColumns, kOutRow, kThreads>(out, y);
    }

    NXRT_DEVICE void run() {
        NXRT_DYNAMIC_SHARED(uint8_t, bytes);
        shared = bytes;
        const uint32_t row_blocks = ceil_div(p.m, uint32_t(kBlockRows));
        row0 = blockIdx.x % row_blocks * kBlockRows;
        tile0 = blockIdx.x / row_blocks * kBlockTiles;
        x = static_cast<const T*>(p.x);
        T* y = static_cast<T*>(p.y);
        if constexpr (BITS == 16) take_from_batch(p, x, w, y);
        wide = (reinterpret_cast<uintptr_t>(x) | p.x_row * 2 | w.k * 2) % 16 == 0;
        for_sums([](float(&d)[4], int, int) { d[0] = d[1] = d[2] = d[3] = 0; });

        // blockIdx.y: parts of K, of which none is empty.
        const uint32_t part = ceil_div(w.chunks, gridDim.y);
        first = blockIdx.y * part;
        end = min(first + part, w.chunks);
        Scales scales, next_scales;
        load_scales(scales, min(first, w.chunks - 1));
        for (int i = 0; i < kStages - 1; ++i) load(first + i);
        for (uint32_t chunk = first; chunk < end; ++chunk) {
            cp_async_wait<kStages - 2>();
            __syncthreads();
            load(chunk + kStages - 1);
            load_scales(next_scales, min(chunk + 1, end - 1));
            multiply(shared + chunk % kStages * kStageBytes, scales);
            scales = next_scales;
        }
        cp_async_wait<0>();
        __syncthreads();
        const TileOutput output{p, row0, tile0 * kTileRows};
        if (gridDim.y > 1) {
            for_sums([&](const float(&d)[4], int r, int c) { output.store_part(d, r, c); });
        } else {
            store(output, y);
        }
    }
};

template <class T, int BITS, int TILES, int ROWS>
NXRT_DEVICE void gemm(const ProductParams& p) {
    Gemm<T, BITS, TILES, ROWS>(p).run();
}

}  // namespace nxrt
