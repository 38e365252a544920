// Decode attention in f32. A key is read by a whole warp, kVectors times 16 bytes a lane, eight keys at a time; their 32
// scores for four query heads end up one in each lane.
#include "mixer.cuh"

using namespace nxrt;

template <int kVectors>
struct Floats {
    using Type = float;
    static constexpr int kRows = 4, kTile = 8, kWide = 128 * kVectors;
    static constexpr int kScores = kRows * kTile;
    static_assert(kScores == static_cast<int>(kWarpSize), "a score a lane");
    using Piece = Vec<float, 4>;

    const MixerParams& p;
    const float *keys, *values;
    int end, lane;
    Piece k[kTile][kVectors], v[kTile][kVectors];
    float acc[kRows][kVectors][4] = {};
    float top = kHidden, sum = 0.0f;  // of row lane / kTile; the lane's own keys only

    NXRT_DEVICE Floats(const MixerParams& params, const float* all_keys, const float* all_values, int end_of_keys)
        : p(params), keys(all_keys), values(all_values), end(end_of_keys), lane(lane_id()) {}

    NXRT_DEVICE int column(int piece) const { return (piece * static_cast<int>(kWarpSize) + lane) * 4; }

    // Rows behind the last are the last: nobody reads beyond it, and they get no weight.
    NXRT_DEVICE void load(Piece (&to)[kTile][kVectors], const float* rows, int key) const {
        if (key >= end) return;
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
            const float* row = rows + static_cast<int64_t>(min(key + i, end - 1)) * p.dim;
#pragma unroll
            for (int c = 0; c < kVectors; ++c) {
                to[i][c] = {};
                if (column(c) < static_cast<int>(p.dim)) to[i][c] = load_vec<float, 4>(row + column(c));
            }
        }
    }

    NXRT_DEVICE void begin(int key) {
        load(k, keys, key);
        load(v, values, key);
    }

    // The keys key .. key + 8, while those at `next` are fetched.
    NXRT_DEVICE void step(const float* query, int pitch, int key, int next) {
        float scores[kScores] = {};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kVectors; ++c) {
                const Piece q = load_vec<float, 4>(query + r * pitch + column(c));
#pragma unroll
                for (int i = 0; i < kTile; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) scores[r * kTile + i] += q[j] * k[i][c][j];
                }
            }
        }
        load(k, keys, next);
        Scatter<kScores, static_cast<int>(kWarpSize) / 2>::add(scores, lane);
        const float s = key + lane % kTile < end ? score_of(p, scores[0]) : kHidden;
        float high = s;
#pragma unroll
        for (int lanes = 1; lanes < kTile; lanes *= 2) high = fmaxf(high, __shfl_xor_sync(kFullMask, high, lanes));
        high = fmaxf(high, top);
        const float shrink = shrink_of(top, high), weight = shrink_of(s, high);
        top = high;
        sum = sum * shrink + weight;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float by = __shfl_sync(kFullMask, shrink, r * kTile);
            float w[kTile];
#pragma unroll
            for (int i = 0; i < kTile; ++i) w[i] = __shfl_sync(kFullMask, weight, r * kTile + i);
#pragma unroll
            for (int c = 0; c < kVectors; ++c) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float x = acc[r][c][j] * by;
#pragma unroll
                    for (int i = 0; i < kTile; ++i) x += w[i] * v[i][c][j];
                    acc[r][c][j] = x;
                }
            }
        }
        load(v, values, next);
    }

    NXRT_DEVICE void publish(float* tops, float* totals) {
#pragma unroll
        for (int lanes = 1; lanes < kTile; lanes *= 2) sum += __shfl_xor_sync(kFullMask, sum, lanes);
        if (lane % kTile == 0) {
            tops[lane / kTile] = top;
            totals[lane / kTile] = sum;
        }
    }

    template <class To, class Factor>
    NXRT_DEVICE void put(To to, Factor factor) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float* row = to(r);
            if (row == nullptr) continue;
            const float by = factor(r);
#pragma unroll
            for (int c = 0; c < kVectors; ++c) {
                if (column(c) >= static_cast<int>(p.dim)) continue;
                const float(&x)[4] = acc[r][c];
                *reinterpret_cast<float4*>(row + column(c)) = make_float4(x[0] * by, x[1] * by, x[2] * by, x[3] * by);
            }
        }
    }
};

NXRT_KERNEL(mix_f32_to_128, MixerParams, (mix<Floats<1>>), kThreads)
NXRT_KERNEL(mix_f32_to_256, MixerParams, (mix<Floats<2>>), kThreads)
