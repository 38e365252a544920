// Many rows on tensor cores, by expert: a pipeline of chunks through shared memory as in kernels/cuda/gemm.cuh, weights decoded
// in registers, blocks scaled in float.
#pragma once

#include "experts.cuh"

namespace nxrt {

// A block of 2 x 2 warps, for the rows of one item. A warp multiplies TILES tiles of weights with ROWS rows of activations: every
// other strip of eight, so that few rows keep both busy.
template <class T, class F, int TILES, int ROWS>
struct ExpertGemm {
    static constexpr int kThreads = 128;
    static constexpr int kStages = 3;
    static constexpr int kBits = F::kBits;
    static constexpr int kBlockTiles = 2 * TILES;
    static constexpr int kBlockRows = 2 * ROWS;
    static constexpr int kStrips = ROWS / 8;
    static constexpr int kWeightBytes = kBlockTiles * int(chunk_bytes<kBits>());
    static constexpr int kRowBytes = int(kChunk) * 2;
    static constexpr int kStageBytes = kWeightBytes + kBlockRows * kRowBytes;

    const ExpertParams& p;
    Item item;
    Weights w;
    uint8_t* shared;
    const uint32_t* sources;  // rows of x, in shared memory
    uint32_t tile0;
    bool wide;
    int strips;  // of this warp, with rows in them
    float sum[TILES][kStrips][4];

    NXRT_DEVICE ExpertGemm(const ExpertParams& params, const Item& rows) : p(params), item(rows), w(params.expert(rows.expert)) {}

    // As in gemm.cuh: odd rows are turned by half.
    static NXRT_DEVICE int swizzle(int row, int c) { return row * kRowBytes + (c ^ (row & 1) << 2) * 16; }

    NXRT_DEVICE void load_weights(uint8_t* stage, uint32_t chunk) const {
        constexpr int PIECES = int(chunk_bytes<kBits>()) / 16;
#pragma unroll
        for (int piece = int(threadIdx.x); piece < kBlockTiles * PIECES; piece += kThreads) {
            const uint32_t tile = tile0 + piece / PIECES;
            const bool valid = tile < w.tiles;
            cp_async_16(stage + piece * 16, w.chunk<kBits>(valid ? tile : 0, chunk) + piece % PIECES * 16, valid);
        }
    }

    NXRT_DEVICE void load_rows(uint8_t* stage, uint32_t chunk) const {
        const T* x = static_cast<const T*>(p.x);
#pragma unroll
        for (int i = 0; i < kBlockRows * 8 / kThreads; ++i) {
            const int piece = i * kThreads + int(threadIdx.x);
            const int r = piece / 8, c = piece % 8;
            if (i * kThreads / 8 >= int(item.rows)) break;
            const uint32_t k = chunk * kChunk + c * 8;
            const bool valid = uint32_t(r) < item.rows && k < w.k;
            const T* from = valid ? x + uint64_t(sources[r]) * w.k + k : x;
            uint8_t* to = stage + swizzle(r, c);
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
        if (chunk < w.chunks) {
            uint8_t* stage = shared + chunk % kStages * kStageBytes;
            load_weights(stage, chunk);
            load_rows(stage + kWeightBytes, chunk);
        }
        cp_async_commit();
    }

    // What this lane needs of the scales and zero points for one chunk.
    struct Scales {
        typename F::Raw scales[TILES][2];
        uint32_t zeros[TILES][2];
    };

    NXRT_DEVICE void load_scales(Scales& s, uint32_t chunk) const {
        if constexpr (F::kScale != ScaleCode::kNone) {
            const unsigned lane = lane_id();
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const uint32_t tile = min(tile0 + warp_id() / 2 * TILES + t, w.tiles - 1);
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    const uint64_t at = p.pair_index(tile, chunk * kChunk + u * kUnit + lane % 4 * 8, lane / 4);
                    s.scales[t][u] = load_scale<F>(w, at);
                    if (F::kCode == Code::kInt && w.zero_kind == kZeroBytes) s.zeros[t][u] = load_zero_bytes<kBits>(w.zeros, at);
                }
            }
        }
    }

    // This lane's words of fragment `f`, or of all four.
    template <int WORDS>
    static NXRT_DEVICE void load_words(uint32_t* words, const uint8_t* chunk, int first) {
        constexpr int WIDTH = WORDS < 4 ? WORDS : 4;
#pragma unroll
        for (int v = 0; v < WORDS / WIDTH; ++v) {
            const auto from = reinterpret_cast<const uint32_t*>(chunk) + ((first + v) * kWarpSize + lane_id()) * WIDTH;
            const auto x = load_vec<uint32_t, WIDTH>(from);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) words[v * WIDTH + i] = x[i];
        }
    }

    // Fragment `f` of unit `u`, scaled if its block is to be scaled before the product.
    NXRT_DEVICE void fragment(uint32_t (&a)[4], const uint32_t* words, const uint8_t* chunk, int u, int f, const Scales& s, int t) const {
        if constexpr (kBits == 16) {
            load_words<4>(a, chunk, 2 * u + f);
        } else {
            Offsets offset = {};
            if constexpr (F::kCode == Code::kInt) {
                offset = default_offsets<T, kBits>();
                if (w.zero_kind == kZeroBytes) offset = stored_offsets<T, kBits>(s.zeros[t][u]);
            }
            decode_codes<T, F>(a, words, 2 * u + f, offset);
            if (before()) scale_fragment<T>(a, scale_pair<T, F::kScale>(s.scales[t][u]));
        }
    }
    NXRT_DEVICE bool before() const { return F::kBefore || (F::kScale != ScaleCode::kNone && w.block_shift < 5); }

    // The products of one chunk.
    NXRT_DEVICE void multiply(const uint8_t* stage, const Scales& s) {
        const unsigned lane = lane_id(), warp = warp_id();
        const uint8_t* weights = stage + warp / 2 * TILES * chunk_bytes<kBits>();
        const uint8_t* rows = stage + kWeightBytes;
        const int r0 = int(warp % 2 * 8 + lane / 4);
        uint32_t words[TILES][kBits < 16 ? kBits : 1];
        if constexpr (kBits < 16) {
#pragma unroll
            for (int t = 0; t < TILES; ++t) load_words<kBits>(words[t], weights + t * chunk_bytes<kBits>(), 0);
        }
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            uint32_t x[kStrips][4];
#pragma unroll
            for (int i = 0; i < kStrips; ++i) {
                if (i >= strips) break;
                const auto v = load_vec<uint32_t, 4>(
                    reinterpret_cast<const uint32_t*>(rows + swizzle(r0 + 16 * i, u * 4 + int(lane % 4))));
#pragma unroll
                for (int j = 0; j < 4; ++j) x[i][j] = v[j];
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                uint32_t a[2][4];
#pragma unroll
                for (int f = 0; f < 2; ++f) fragment(a[f], words[t], weights + t * chunk_bytes<kBits>(), u, f, s, t);
                float2 scale = make_float2(1, 1);
                if constexpr (F::kScale != ScaleCode::kNone && !F::kBefore) {
                    if (!before()) scale = scale_floats<T, F::kScale>(s.scales[t][u]);
                }
#pragma unroll
                for (int i = 0; i < kStrips; ++i) {
                    if (i >= strips) break;
                    const uint32_t b0[2] = {x[i][0], x[i][1]}, b1[2] = {x[i][2], x[i][3]};
                    if constexpr (F::kScale == ScaleCode::kNone || F::kBefore) {
                        mma_m16n8k16<T>(sum[t][i], a[0], b0);
                        mma_m16n8k16<T>(sum[t][i], a[1], b1);
                    } else {
                        float part[4] = {};
                        mma_m16n8k16<T>(part, a[0], b0);
                        mma_m16n8k16<T>(part, a[1], b1);
                        sum[t][i][0] += part[0] * scale.x;
                        sum[t][i][1] += part[1] * scale.x;
                        sum[t][i][2] += part[2] * scale.y;
                        sum[t][i][3] += part[3] * scale.y;
                    }
                }
            }
        }
    }

    // Column j % 2 of a strip, rows g and g + 8 of a tile.
    NXRT_DEVICE void store(uint32_t tile, uint32_t row, float low, float high, float2 bias) const {
        if (row >= item.rows) return;
        const unsigned g = lane_id() / 4;
        low += bias.x;
        high += bias.y;
        const uint32_t at = item.first + row;
        if (p.sums) {
            float* y = static_cast<float*>(p.y) + uint64_t(p.order[at]) * p.outputs;
            const uint32_t n = tile * kTileRows + g;
            if (n < p.outputs) y[n] = low;
            if (n + 8 < p.outputs) y[n + 8] = high;
            return;
        }
        T* y = static_cast<T*>(p.y) + uint64_t(at) * p.outputs;
        const uint32_t n = p.feature(tile, g);
        if (n < p.outputs) y[n] = from_float<T>(activate(p, low, p.paired ? high : 1.0f));
        if (!p.paired && n + 8 < p.outputs) y[n + 8] = from_float<T>(activate(p, high, 1.0f));
    }

    NXRT_DEVICE void store_all() const {
        const float factor = p.global(item.expert);
        const unsigned g = lane_id() / 4;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const uint32_t tile = tile0 + warp_id() / 2 * TILES + t;
            if (tile >= w.tiles) break;
            const float2 bias = make_float2(
                p.template row_bias<T>(item.expert, tile, g), p.template row_bias<T>(item.expert, tile, g + 8));
#pragma unroll
            for (int i = 0; i < kStrips; ++i) {
                if (i >= strips) break;
                const uint32_t row = i * 16 + warp_id() % 2 * 8 + lane_id() % 4 * 2;
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    store(tile, row + j, sum[t][i][j] * factor, sum[t][i][2 + j] * factor, bias);
            }
        }
    }

    NXRT_DEVICE void run(uint32_t* rows) {
        NXRT_DYNAMIC_SHARED(uint8_t, bytes);
        shared = bytes;
        tile0 = blockIdx.x * kBlockTiles;
        wide = (reinterpret_cast<uintptr_t>(p.x) | w.k * 2) % 16 == 0;
        const int left = int(item.rows) - int(warp_id() % 2) * 8;
        strips = left <= 0 ? 0 : min((left + 15) / 16, kStrips);
        for (uint32_t r = threadIdx.x; r < item.rows; r += kThreads)
            rows[r] = p.share == 0 ? item.first + r : p.order[item.first + r] / p.share;
        sources = rows;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < kStrips; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[t][i][j] = 0;
        __syncthreads();

        Scales scales, next_scales;
        load_scales(scales, 0);
        for (int i = 0; i < kStages - 1; ++i) load(i);
        for (uint32_t chunk = 0; chunk < w.chunks; ++chunk) {
            cp_async_wait<kStages - 2>();
            __syncthreads();
            load(chunk + kStages - 1);
            load_scales(next_scales, min(chunk + 1, w.chunks - 1));
            multiply(shared + chunk % kStages * kStageBytes, scales);
            scales = next_scales;
        }
        store_all();
    }
};

template <class T, class F, int TILES, int ROWS>
NXRT_DEVICE void expert_gemm(const ExpertParams& p) {
    NXRT_SHARED uint32_t rows[2 * ROWS];
    const Item item = p.items[blockIdx.y];
    if (item.rows == 0) return;
    ExpertGemm<T, F, TILES, ROWS>(p, item).run(rows);
}

}  // namespace nxrt
