// Float activations: weights of every format decoded to float, products and sums in float.
#include "sgemm.cuh"
#include "experts.cuh"

using namespace nxrt;

using FloatInt2 = Format<Code::kInt, 2, ScaleCode::kFloats>;
using FloatInt4 = Format<Code::kInt, 4, ScaleCode::kFloats>;
using FloatInt8 = Format<Code::kInt, 8, ScaleCode::kFloats>;
using FloatDense = Format<Code::kFloat, 32, ScaleCode::kNone>;

// A lane's share of a fragment, scaled: rows g and g + 8, four columns each.
struct FloatFragment {
    float low[4], high[4];

    // Fragment `f` of a chunk.
    template <class F>
    NXRT_DEVICE void load(const ExpertParams& p, const Weights& w, uint32_t tile, uint32_t chunk, int f) {
        const unsigned lane = lane_id();
        if constexpr (F::kBits == 32) {
            // Row g's four, lane by lane, then row g + 8's.
            const float* from = reinterpret_cast<const float*>(w.chunk<F::kBits>(tile, chunk)) + (2 * f * kWarpSize + lane) * 4;
            const Vec<float, 4> a = load_stream<float, 4>(from), b = load_stream<float, 4>(from + 4 * kWarpSize);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                low[i] = a[i];
                high[i] = b[i];
            }
        } else {
            uint32_t words[F::kBits], a[4] = {};
            load_chunk<F::kBits>(words, w.chunk<F::kBits>(tile, chunk), lane);
            const uint64_t at = p.pair_index(tile, chunk * kChunk + f / 2 * kUnit + lane % 4 * 8 + f % 2 * 4, lane / 4);
            Offsets offset = {};
            if constexpr (F::kCode == Code::kInt) {
                offset = default_offsets<half, F::kBits>();
                if (w.zero_kind == kZeroBytes) offset = stored_offsets<half, F::kBits>(load_zero_bytes<F::kBits>(w.zeros, at));
            }
            // An index that the compiler knows keeps the words in registers.
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i == f) decode_codes<half, F>(a, words, i, offset);
            }
            const float2 scale = scale_floats<half, F::kScale>(load_scale<F>(w, at));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 x = Pair<half>::floats(a[2 * i]), y = Pair<half>::floats(a[2 * i + 1]);
                low[2 * i] = x.x * scale.x;
                low[2 * i + 1] = x.y * scale.x;
                high[2 * i] = y.x * scale.y;
                high[2 * i + 1] = y.y * scale.y;
            }
        }
    }
};

// Four activations from column k on; zeros past the row.
NXRT_DEVICE Vec<float, 4> load_four(const float* row, uint32_t k, uint32_t columns, bool wide) {
    Vec<float, 4> x = {};
    if (wide && k < columns) return load_vec<float, 4>(row + k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (k + i < columns) x[i] = row[k + i];
    }
    return x;
}

constexpr unsigned kFloatWarps = 8;

// Few rows: a block takes tile after tile of the output's row blockIdx.y, a warp chunks of any of the parts.
template <class F>
NXRT_DEVICE void stream_float(const ExpertParams& p) {
    NXRT_SHARED float shared[2][kFloatWarps * kTileRows];
    const unsigned lane = lane_id(), g = lane / 4;
    const uint32_t row = blockIdx.y, chunks = p.w.chunks, jobs = chunks * p.parts;
    const bool wide = (reinterpret_cast<uintptr_t>(p.x) | p.w.k * 4) % 16 == 0;
    unsigned parity = 0;
    for (uint32_t tile = blockIdx.x; tile < p.w.tiles; tile += gridDim.x) {
        float low = 0, high = 0;
        for (uint32_t job = warp_id(); job < jobs; job += warp_count()) {
            const uint32_t part = job / chunks, chunk = job - part * chunks;
            const uint64_t pair = uint64_t(row) * p.parts + part;
            const uint32_t e = p.ids[pair];
            const Weights w = p.expert(e);
            const float* x = static_cast<const float*>(p.x) + pair / p.share * w.k;
            float a = 0, b = 0;
#pragma unroll
            for (int f = 0; f < 4; ++f) {
                FloatFragment fragment;
                fragment.load<F>(p, w, tile, chunk, f);
                const Vec<float, 4> v = load_four(x, chunk * kChunk + f / 2 * kUnit + lane % 4 * 8 + f % 2 * 4, w.k, wide);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a += fragment.low[i] * v[i];
                    b += fragment.high[i] * v[i];
                }
            }
            const float factor = p.mix_of(pair) * p.global(e);
            low += a * factor;
            high += b * factor;
        }
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            low += __shfl_xor_sync(kFullMask, low, step);
            high += __shfl_xor_sync(kFullMask, high, step);
        }
        float* mine = shared[parity] + warp_id() * kTileRows;
        if (lane % 4 == 0) {
            mine[g] = low;
            mine[g + 8] = high;
        }
        __syncthreads();
        if (warp_id() == 0) {
            const unsigned r = lane % kTileRows;
            float total = 0;
            for (unsigned warp = 0; warp < warp_count(); ++warp) total += shared[parity][warp * kTileRows + r];
            for (uint32_t part = 0; (p.bias || p.up_bias) && part < p.parts; ++part) {
                const uint64_t pair = uint64_t(row) * p.parts + part;
                total += p.mix_of(pair) * p.row_bias<float>(p.ids[pair], tile, r);
            }
            const float up = __shfl_xor_sync(kFullMask, total, 8);
            const uint32_t feature = p.feature(tile, r);
            if (lane < (p.paired ? kTileRows / 2 : kTileRows) && feature < p.outputs)
                static_cast<float*>(p.y)[uint64_t(row) * p.outputs + feature] = activate(p, total, p.paired ? up : 1.0f);
        }
        parity ^= 1;
    }
}

// Many rows: a block takes an item's rows, FloatTile::kRows at most, and four tiles of weights.
template <class F>
NXRT_DEVICE void gemm_float(const ExpertParams& p) {
    NXRT_SHARED uint32_t sources[FloatTile::kRows];
    const Item item = p.items[blockIdx.y];
    if (item.rows == 0) return;
    for (uint32_t r = threadIdx.x; r < item.rows; r += blockDim.x)
        sources[r] = p.share == 0 ? item.first + r : p.order[item.first + r] / p.share;
    __syncthreads();
    const Weights w = p.expert(item.expert);
    const float factor = p.global(item.expert);
    const float* x = static_cast<const float*>(p.x);
    const uint32_t* source = sources;
    float gate = 0;
    float_product(
        item.rows, w.k,
        [&](auto& to, uint32_t, uint32_t k0) {
#pragma unroll 4
            for (int i = int(threadIdx.x); i < FloatTile::kRows * FloatTile::kDepth; i += FloatTile::kThreads) {
                const uint32_t r = i / FloatTile::kDepth, d = i % FloatTile::kDepth;
                to[d][r] = r < item.rows && k0 + d < w.k ? x[uint64_t(source[r]) * w.k + k0 + d] : 0.0f;
            }
        },
        [&](auto& to, uint32_t column0, uint32_t k0) {
            // Four tiles, two fragments of one unit a lane. A feature's gate and its factor become neighbours.
            const unsigned lane = lane_id(), g = lane / 4, t = warp_id() % 4, f = warp_id() / 4;
            const uint32_t tile = column0 / kTileRows + t;
            FloatFragment a = {};
            if (tile < w.tiles) a.load<F>(p, w, tile, k0 / kChunk, int(k0 / kUnit % 2 * 2 + f));
            const uint32_t low = t * kTileRows + (p.paired ? 2 * g : g), high = t * kTileRows + (p.paired ? 2 * g + 1 : g + 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                to[lane % 4 * 8 + f * 4 + i][low] = a.low[i];
                to[lane % 4 * 8 + f * 4 + i][high] = a.high[i];
            }
        },
        [&](uint32_t row, uint32_t column, float total) {
            const uint32_t tile = column / kTileRows, c = column % kTileRows, r = p.paired ? c / 2 + c % 2 * 8 : c;
            if (row >= item.rows || tile >= w.tiles) return;
            total = total * factor + p.row_bias<float>(item.expert, tile, r);
            const uint32_t feature = p.feature(tile, r), at = item.first + row;
            // Columns come in pairs.
            if (p.paired && c % 2 == 0) gate = total;
            if (feature >= p.outputs || (p.paired && c % 2 == 0)) return;
            float* y = static_cast<float*>(p.y) + uint64_t(p.sums ? p.order[at] : at) * p.outputs;
            y[feature] = p.sums ? total : p.paired ? activate(p, gate, total) : activate(p, total, 1.0f);
        });
}

#define FLOAT(name, F)                                                                              \
    NXRT_KERNEL(stream_##name##_f32, ExpertParams, (stream_float<F>), kFloatWarps * kWarpSize)      \
    NXRT_KERNEL(gemm_##name##_f32, ExpertParams, (gemm_float<F>), FloatTile::kThreads)

FLOAT(int2, FloatInt2)
FLOAT(int4, FloatInt4)
FLOAT(int8, FloatInt8)
FLOAT(mxfp4, MxFp4)
FLOAT(nvfp4, NvFp4)
FLOAT(fp8, Fp8)
FLOAT(dense, FloatDense)
