// Products of float activations with quantised weights, decoded to float.
#include "gemv.cuh"
#include "sgemm.cuh"

using namespace nxrt;

// Rows g and g + 8 of a fragment, four columns each.
struct FloatFragment {
    float low[4], high[4];
};

// A block's scales and zero points for rows g and g + 8.
struct FloatBlock {
    float2 scale, zero;
    Offsets offset;

    template <int BITS>
    NXRT_DEVICE void load(const Weights& w, uint32_t tile, uint32_t k, unsigned g) {
        const uint64_t at = w.pair_index(tile, k, g);
        scale = static_cast<const float2*>(w.scales)[at];
        zero = make_float2(0, 0);
        offset = default_offsets<half, BITS>();
        if (w.zero_kind == kZeroBytes) offset = stored_offsets<half, BITS>(load_zero_bytes<BITS>(w.zeros, at));
        if (w.zero_kind == kZeroFloat) {
            offset = offsets<half, BITS>(0, 0);
            zero = static_cast<const float2*>(w.zeros)[at];
        }
    }

    // Values minus zero points, not scaled.
    template <int BITS>
    NXRT_DEVICE FloatFragment decode_floats(const uint32_t* words, int f) const {
        uint32_t a[4];
        decode<half, BITS>(a, words, f, offset);
        FloatFragment out;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 low = Pair<half>::floats(a[2 * i]), high = Pair<half>::floats(a[2 * i + 1]);
            out.low[2 * i] = low.x - zero.x;
            out.low[2 * i + 1] = low.y - zero.x;
            out.high[2 * i] = high.x - zero.y;
            out.high[2 * i + 1] = high.y - zero.y;
        }
        return out;
    }
};

// Four activations from column k on; zeros past the matrix.
NXRT_DEVICE Vec<float, 4> load_four(const float* row, bool inside, uint32_t k, uint32_t columns, bool wide) {
    Vec<float, 4> x = {};
    if (!inside || k >= columns) return x;
    if (wide) return load_vec<float, 4>(row + k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (k + i < columns) x[i] = row[k + i];
    }
    return x;
}

// As gemv, ROWS rows at a time.
template <int BITS, int ROWS>
NXRT_DEVICE void gemv_float(const ProductParams& p) {
    NXRT_SHARED float shared[2][kGemvWarps * kGemvRows * kTileRows];
    const unsigned lane = lane_id(), g = lane / 4, warps = warp_count();
    const uint32_t m0 = blockIdx.y * ROWS;
    const unsigned rows = min(p.m - m0, unsigned(ROWS));
    const Weights& w = p.w;
    const float* x = static_cast<const float*>(p.x) + m0 * p.x_row;
    const bool wide = (reinterpret_cast<uintptr_t>(p.x) | p.x_row * 4 | w.k * 4) % 16 == 0;
    unsigned parity = 0;
    for (uint32_t tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
        float sum[2][ROWS] = {};
        for (uint32_t chunk = warp_id(); chunk < w.chunks; chunk += warps) {
            uint32_t words[BITS];
            load_chunk<BITS>(words, w.chunk<BITS>(tile, chunk), lane);
#pragma unroll
            for (int f = 0; f < 4; ++f) {
                const uint32_t k = chunk * kChunk + f / 2 * kUnit + lane % 4 * 8 + f % 2 * 4;
                FloatBlock block;
                block.load<BITS>(w, tile, k, g);
                const FloatFragment a = block.decode_floats<BITS>(words, f);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const Vec<float, 4> v = load_four(x + r * p.x_row, unsigned(r) < rows, k, w.k, wide);
                    float low = 0, high = 0;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        low += a.low[i] * v[i];
                        high += a.high[i] * v[i];
                    }
                    sum[0][r] += low * block.scale.x;
                    sum[1][r] += high * block.scale.y;
                }
            }
        }
        float* mine = shared[parity] + warp_id() * (kGemvRows * kTileRows);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float v = sum[h][r];
                v += __shfl_xor_sync(kFullMask, v, 1);
                v += __shfl_xor_sync(kFullMask, v, 2);
                if (lane % 4 == 0) mine[r * kTileRows + h * 8 + g] = v;
            }
        reduce_and_store<float>(p, static_cast<float*>(p.y), tile, m0, rows, shared[parity]);
        parity ^= 1;
    }
}

template <int BITS>
NXRT_DEVICE void gemm_float(const ProductParams& p) {
    const Weights& w = p.w;
    const float* x = static_cast<const float*>(p.x);
    const float* c = static_cast<const float*>(p.c);
    float* y = static_cast<float*>(p.y);
    float_product(
        p.m, w.chunks == 0 ? 0 : w.k,
        [&](auto& to, uint32_t row0, uint32_t k0) {
            load_float_tile<FloatTile::kRows>(to, x, p.x_row, 1, row0, p.m, k0, w.k);
        },
        [&](auto& to, uint32_t column0, uint32_t k0) {
            // Four tiles, two fragments of one unit a lane.
            const unsigned lane = lane_id(), g = lane / 4, t = threadIdx.x / kWarpSize % 4, f = threadIdx.x / 128;
            const uint32_t tile = column0 / kTileRows + t, k = k0 + lane % 4 * 8 + f * 4;
            FloatFragment a = {};
            FloatBlock block = {};
            if (tile < w.tiles) {
                uint32_t words[BITS];
                load_chunk<BITS>(words, w.chunk<BITS>(tile, k0 / kChunk), lane);
                block.load<BITS>(w, tile, k, g);
                const int fragment = int(k0 / kUnit % 2 * 2 + f);
                // An index that the compiler knows keeps the words in registers.
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (i == fragment) a = block.decode_floats<BITS>(words, i);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                to[lane % 4 * 8 + f * 4 + i][t * kTileRows + g] = a.low[i] * block.scale.x;
                to[lane % 4 * 8 + f * 4 + i][t * kTileRows + g + 8] = a.high[i] * block.scale.y;
            }
        },
        [&](uint32_t m, uint32_t n, float total) {
            if (m >= p.m || n >= w.n) return;
            total *= p.alpha;
            if (c) total += p.beta * c[uint64_t(m) * p.c_row + uint64_t(n) * p.c_column];
            y[uint64_t(m) * w.n + n] = total;
        });
}

#define FLOAT(bits)                                                                                         \
    NXRT_KERNEL(gemv_##bits##_1_f32, ProductParams, (gemv_float<bits, 1>), kGemvWarps * kWarpSize)          \
    NXRT_KERNEL(gemv_##bits##_4_f32, ProductParams, (gemv_float<bits, 4>), kGemvWarps * kWarpSize)          \
    NXRT_KERNEL(gemm_##bits##_f32, ProductParams, gemm_float<bits>, FloatTile::kThreads)

FLOAT(2)
FLOAT(4)
FLOAT(8)
