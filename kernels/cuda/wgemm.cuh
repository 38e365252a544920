// Products of many rows with weights in fragments on Hopper's tensor cores: weights are decoded in registers, from where wgmma
// takes them; rows of x pass through registers to shared memory. Float accumulates.
#pragma once

#include "tile_output.cuh"
#include "wgmma.cuh"

namespace nxrt {

// A block of GROUPS warpgroups. Each of its warps multiplies TILES tiles of weights with all of the block's ROWS rows of x.
template <class T, int BITS, int GROUPS, int TILES, int ROWS>
struct Wgemm {
    static constexpr int kWarps = 4 * GROUPS;
    static constexpr int kThreads = kWarps * int(kWarpSize);
    static constexpr int kBlockTiles = kWarps * TILES;
    static constexpr int kBlockColumns = kBlockTiles * int(kTileRows);
    static constexpr int kStrips = ROWS / 8;
    static constexpr int kWords = BITS < 16 ? BITS / 2 : 8;  // a lane's words of a unit
    // Chunks of x in shared memory: one is multiplied, one may still be in use by other warps, one is written. A thread has
    // 16-byte pieces of a chunk, kRowStep rows apart.
    static constexpr uint32_t kRowStages = 3;
    static constexpr int kRowBytes = int(kChunk) * 2;
    static constexpr int kRowStageBytes = ROWS * kRowBytes;
    static constexpr int kRowStep = kThreads / 8;
    static constexpr int kPieces = ROWS / kRowStep;
    // Chunks of weights, each with scales and zero points of as many blocks as it may have (four, of pairs of floats).
    static constexpr uint32_t kDepth = BITS < 16 ? 4 : 3;
    static constexpr int kTileBytes = int(chunk_bytes<BITS>());
    static constexpr int kPairBytes = BITS < 16 ? 4 * 32 : 0;
    static constexpr int kScalesAt = kBlockTiles * kTileBytes;
    static constexpr int kZerosAt = kScalesAt + kBlockTiles * kPairBytes;
    static constexpr int kWeightStageBytes = kZerosAt + kBlockTiles * kPairBytes;
    // Output rows in shared memory are padded against bank conflicts.
    static constexpr int kOutRow = kBlockColumns + 8;
    static constexpr int kStageBytes = int(kRowStages) * kRowStageBytes + int(kDepth) * kWeightStageBytes;
    static_assert(kRowStageBytes % 1024 == 0, "wgmma's rows are aligned");
    static_assert(ROWS * kOutRow * 2 <= kStageBytes, "the output fits where the stages were");
    static_assert(TILES * 8 <= int(kWarpSize), "one copy brings a warp's scales");

    using Fragments = uint32_t[TILES][2][4];  // those of a unit

    const ProductParams& p;
    Weights w;
    uint8_t* shared;
    uint32_t tile0, row0;
    uint32_t first, end;  // the chunks of this block's part of K
    // Of chunk 0: this thread's pieces of x, this lane's bytes of the weights, its 16 bytes of the scales.
    const T* rows[kPieces];
    const uint8_t* weights[TILES];
    const uint8_t* scales;
    bool wide;
    uint32_t row_stage;  // that of the chunk being multiplied
    uint32_t pieces[kPieces][4];
    float sum[TILES][kStrips][4];

    NXRT_DEVICE explicit Wgemm(const ProductParams& params) : p(params), w(params.w) {}

    // Which of the block's tiles is this warp's tile t, and where that is in the matrix: past N, the last tile stands in.
    static NXRT_DEVICE int slot(int t) { return t * kWarps + int(warp_id()); }
    NXRT_DEVICE uint32_t tile(int t) const { return min(tile0 + slot(t), w.tiles - 1); }

    NXRT_DEVICE uint8_t* rows_ahead(uint32_t ahead) const {
        const uint32_t i = row_stage + ahead;
        return shared + (i < kRowStages ? i : i - kRowStages) * kRowStageBytes;
    }
    NXRT_DEVICE uint8_t* weight_stage(uint32_t chunk) const {
        return shared + kRowStages * kRowStageBytes + chunk % kDepth * kWeightStageBytes;
    }

    // Rows past M are the last one again: nobody looks at what comes of them.
    NXRT_DEVICE void fetch_rows(uint32_t chunk) {
        const uint32_t k = chunk * kChunk + threadIdx.x % 8 * 8;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            Vec<uint32_t, 4> v = {};
            if (k < w.k) v = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(rows[i] + chunk * kChunk));
#pragma unroll
            for (int j = 0; j < 4; ++j) pieces[i][j] = v[j];
        }
    }
    // The same for rows that 16-byte vectors do not fit.
    NXRT_DEVICE void fetch_narrow_rows(uint32_t chunk) {
        const uint32_t k = chunk * kChunk + threadIdx.x % 8 * 8;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const auto halves = reinterpret_cast<const uint16_t*>(rows[i] + chunk * kChunk);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                pieces[i][j] = k + 2 * j < w.k ? halves[2 * j] : 0;
                if (k + 2 * j + 1 < w.k) pieces[i][j] |= uint32_t(halves[2 * j + 1]) << 16;
            }
        }
    }
    NXRT_DEVICE void fetch(uint32_t chunk) {
        if (chunk >= end) return;
        if (wide) {
            fetch_rows(chunk);
        } else {
            fetch_narrow_rows(chunk);
        }
    }

    // Of 8 neighbours along K a fragment has two pairs, where wgmma takes all of them as half of its K. So the pairs of a unit are
    // transposed on their way: pair j of piece c becomes pair c of piece j.
    NXRT_DEVICE void put_rows(uint8_t* stage) const {
        const int c = int(threadIdx.x % 8), row = int(threadIdx.x / 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint8_t* to = stage + wgmma_piece(row, c / 4 * 4 + j) + c % 4 * 4;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) *reinterpret_cast<uint32_t*>(to + i * kRowStep * kRowBytes) = pieces[i][j];
        }
    }

    // Each warp brings what its own tiles need.
    NXRT_DEVICE void load_weights(uint32_t chunk) const {
        if (chunk < end) {
            const uint32_t lane = lane_id();
            uint8_t* stage = weight_stage(chunk);
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const uint8_t* from = weights[t] + chunk * uint64_t(kTileBytes);
                uint8_t* to = stage + slot(t) * kTileBytes + lane * 16;
#pragma unroll
                for (int at = 0; at < kTileBytes; at += 512)
                    if (at + int(lane) * 16 < kTileBytes) cp_async_16(to + at, from + at);
            }
            if constexpr (BITS < 16) load_scales(stage, chunk);
        }
        cp_async_commit();
    }

    NXRT_DEVICE void load_scales(uint8_t* stage, uint32_t chunk) const {
        const uint32_t lane = lane_id(), block = chunk * kChunk >> w.block_shift;
        const uint32_t blocks = max(kChunk >> w.block_shift, 1u);  // in this chunk
        const int t = int(lane / 8), piece = int(lane % 8);
        if (t < TILES && uint32_t(piece) < blocks * 2)
            cp_async_16(stage + kScalesAt + slot(t) * kPairBytes + piece * 16, scales + uint64_t(block) * 32);
        if (w.zero_kind == kZeroDefault) return;
        const uint32_t bytes = w.zero_kind == kZeroFloat ? 32 : BITS == 8 ? 16 : 8;  // a block
        if (lane * 4 >= blocks * bytes) return;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const uint64_t at = (uint64_t(tile(i)) * w.blocks + block) * bytes + lane * 4;
            cp_async_4(stage + kZerosAt + slot(i) * kPairBytes + lane * 4, static_cast<const uint8_t*>(w.zeros) + at);
        }
    }

    // This lane's words of a unit.
    static NXRT_DEVICE void load_words(uint32_t (&words)[kWords], const uint8_t* tile, int u) {
        constexpr int WIDTH = kWords < 4 ? kWords : 4, VECTORS = kWords / WIDTH;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int lane = int(lane_id()), at = BITS < 8 ? (lane * 2 + u) * WIDTH * 4 : ((u * VECTORS + v) * 32 + lane) * 16;
            const auto from = load_vec<uint32_t, WIDTH>(reinterpret_cast<const uint32_t*>(tile + at));
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) words[v * WIDTH + i] = from[i];
        }
    }

    // Fragments of unit u less what `offset` says for each tile.
    template <class F>
    NXRT_DEVICE void decode_less(Fragments& a, const uint8_t* stage, int u, F offset) const {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            uint32_t words[kWords];
            load_words(words, stage + slot(t) * kTileBytes, u);
            const Offsets zero = offset(t);
#pragma unroll
            for (int f = 0; f < 2; ++f) decode<T, BITS>(a[t][f], words, f, zero);
        }
    }

    NXRT_DEVICE void decode_unit(Fragments& a, uint32_t chunk, int u) const {
        const uint8_t* stage = weight_stage(chunk);
        if constexpr (BITS == 16) {
            decode_less(a, stage, u, [](int) { return Offsets{}; });
            return;
        } else {
            // This lane's pair among those of the chunk.
            const uint32_t pair = ((u * kUnit + lane_id() % 4 * 8) >> min(w.block_shift, 6u)) * 8 + lane_id() / 4;
            const auto words = [&](int at, int t) {
                return reinterpret_cast<const uint32_t*>(stage + at + slot(t) * kPairBytes)[pair];
            };
            if (w.zero_kind == kZeroFloat) {
                decode_less(a, stage, u, [](int) { return offsets<T, BITS>(0, 0); });
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const uint32_t zero = words(kZerosAt, t);
#pragma unroll
                    for (int f = 0; f < 2; ++f) subtract_fragment<T>(a[t][f], zero);
                }
            } else if (w.zero_kind == kZeroBytes) {
                decode_less(a, stage, u, [&](int t) {
                    return stored_offsets<T, BITS>(load_zero_bytes<BITS>(stage + kZerosAt + slot(t) * kPairBytes, pair));
                });
            } else {
                decode_less(a, stage, u, [](int) { return default_offsets<T, BITS>(); });
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const uint32_t scale = words(kScalesAt, t);
#pragma unroll
                for (int f = 0; f < 2; ++f) scale_fragment<T>(a[t][f], scale);
            }
        }
    }

    // Multiplies a unit of the current chunk, and waits for the unit in front of it.
    NXRT_DEVICE void multiply_unit(Fragments& a, int u) {
        const uint8_t* stage = rows_ahead(0);
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int f = 0; f < 2; ++f) wgmma_pin(a[t][f]);
        wgmma_begin();
#pragma unroll
        for (int f = 0; f < 2; ++f)
#pragma unroll
            for (int t = 0; t < TILES; ++t) wgmma<T, ROWS>(sum[t], a[t][f], stage, 2 * u + f);
        wgmma_commit();
        wgmma_wait<1>();
    }

    // While the tensor cores have one unit to multiply, the next is decoded.
    NXRT_DEVICE void multiply() {
        Fragments a[2];
        row_stage = 0;
        for (uint32_t i = 0; i < kDepth; ++i) load_weights(first + i);
        fetch(first);
        put_rows(rows_ahead(0));
        fetch(first + 1);
        cp_async_wait<kDepth - 1>();
        __syncwarp();
        decode_unit(a[0], first, 0);
#pragma unroll 1
        for (uint32_t chunk = first; chunk < end; ++chunk) {
            wgmma_visible();
            __syncthreads();
            multiply_unit(a[0], 0);
            decode_unit(a[1], chunk, 1);
            multiply_unit(a[1], 1);
            // Every warp has passed the barrier above, so all are done with the chunk in front of the last one.
            put_rows(rows_ahead(1));
            fetch(chunk + 2);
            load_weights(chunk + kDepth);
            cp_async_wait<kDepth - 1>();
            __syncwarp();
            // Of the chunk behind the last one, too: nothing takes it.
            decode_unit(a[0], chunk + 1, 0);
            row_stage = row_stage + 1 < kRowStages ? row_stage + 1 : 0;
        }
        wgmma_wait<0>();
        cp_async_wait<0>();
        __syncthreads();
    }

    // Calls f(sums of a tile and two strips, row, column) with the place of the first sum in the block's tile of y.
    template <class F>
    NXRT_DEVICE void for_sums(F f) {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < kStrips; ++i)
                f(sum[t][i], i * 8 + int(lane_id() % 4) * 2, slot(t) * int(kTileRows) + int(lane_id() / 4));
    }

    // Turns the values round through shared memory, so that rows are stored in vectors.
    NXRT_DEVICE void store(const TileOutput& output, T* y) {
        for_sums([&](float(&d)[4], int, int) { output.scale(d); });
        if (p.c) for_sums([&](float(&d)[4], int r, int c) { output.add_c<T>(d, r, c); });
        T* out = reinterpret_cast<T*>(shared);
        const int lane = int(lane_id());
        T* own = out + (lane / 16 * 8 + lane % 8) * kOutRow + lane / 8 % 2 * 8;
        const auto pair = [](float a, float b) { return as_word(Pair<T>::from_floats(a, b)); };
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < kStrips; i += 2) {
                const auto &d = sum[t][i], &e = sum[t][i + 1];
                const uint32_t r[4] = {pair(d[0], d[1]), pair(d[2], d[3]), pair(e[0], e[1]), pair(e[2], e[3])};
                stmatrix_x4_trans(r, own + i * 8 * kOutRow + slot(t) * int(kTileRows));
            }
        __syncthreads();
        output.store<T, ROWS, kBlockColumns, kOutRow, kThreads>(out, y);
    }

    NXRT_DEVICE void run() {
        NXRT_DYNAMIC_SHARED(uint8_t, bytes);
        shared = bytes;
        const uint32_t row_blocks = ceil_div(p.m, uint32_t(ROWS));
        row0 = blockIdx.x % row_blocks * ROWS;
        tile0 = blockIdx.x / row_blocks * kBlockTiles;
        const T* x = static_cast<const T*>(p.x);
        T* y = static_cast<T*>(p.y);
        if constexpr (BITS == 16) take_from_batch(p, x, w, y);
        const uint32_t lane = lane_id();
        wide = (reinterpret_cast<uintptr_t>(x) | p.x_row * 2 | w.k * 2) % 16 == 0;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            rows[i] = x + min(row0 + i * kRowStep + threadIdx.x / 8, p.m - 1) * p.x_row + threadIdx.x % 8 * 8;
#pragma unroll
        for (int t = 0; t < TILES; ++t) weights[t] = w.chunk<BITS>(tile(t), 0) + lane * 16;
        const uint32_t scaled = tile(int(min(lane / 8, uint32_t(TILES - 1))));
        scales = static_cast<const uint8_t*>(w.scales) + uint64_t(scaled) * w.blocks * 32 + lane % 8 * 16;
        for_sums([](float(&d)[4], int, int) { d[0] = d[1] = d[2] = d[3] = 0; });

        // blockIdx.y: parts of K, of which none is empty.
        const uint32_t part = ceil_div(w.chunks, gridDim.y);
        first = blockIdx.y * part;
        end = min(first + part, w.chunks);
        multiply();
        const TileOutput output{p, row0, tile0 * kTileRows};
        if (gridDim.y > 1) {
            for_sums([&](const float(&d)[4], int r, int c) { output.store_part(d, r, c); });
        } else {
            store(output, y);
        }
    }
};

template <class T, int BITS, int GROUPS, int TILES, int ROWS>
NXRT_DEVICE void wgemm(const ProductParams& p) {
    // The host launches nothing here on another device.
#if defined(NXRT_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    Wgemm<T, BITS, GROUPS, TILES, ROWS>(p).run();
#endif
}

}  // namespace nxrt
