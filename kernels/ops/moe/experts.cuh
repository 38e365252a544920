// Products with the experts' weights: formats, what the kernels take, and how a product ends.
//
// T: tokens, P: pairs of a token and one of its experts (P = T * top), E: experts, I: inner features, H: the op's features.
// N, K, tiles, chunks, units and fragments are those of fragments.cuh; every expert is a matrix of its own. Where a gate goes
// with each feature, a tile holds eight features: their first halves in rows 0 to 7, the second ones in rows 8 to 15.
// Scales and zero points: [tile][group][g][block] pairs (row g, row g + 8), a group being `together` blocks.
#pragma once

#include "gemv.cuh"

namespace nxrt {

// ---- formats ----

enum class Code { kInt, kE2M1, kE4M3, kFloat };
// A pair of scales (rows g and g + 8): two of the activations' type, two floats, two bytes.
enum class ScaleCode { kNone, kHalves, kFloats, kE8M0, kE4M3 };

namespace detail {
template <ScaleCode S>
struct RawScale {
    using type = uint16_t;
};
template <>
struct RawScale<ScaleCode::kHalves> {
    using type = uint32_t;
};
template <>
struct RawScale<ScaleCode::kFloats> {
    using type = uint2;
};
}  // namespace detail

template <Code C, int BITS, ScaleCode S>
struct Format {
    static constexpr Code kCode = C;
    static constexpr int kBits = BITS;
    static constexpr ScaleCode kScale = S;
    using Raw = typename detail::RawScale<S>::type;
    // Blocks are shorter than what a tensor core adds up: weights are scaled first. Exact for E2M1 by E4M3.
    static constexpr bool kBefore = S == ScaleCode::kE4M3;
};

using Int2 = Format<Code::kInt, 2, ScaleCode::kHalves>;
using Int4 = Format<Code::kInt, 4, ScaleCode::kHalves>;
using Int8 = Format<Code::kInt, 8, ScaleCode::kHalves>;
using Wide8 = Format<Code::kInt, 8, ScaleCode::kFloats>;
using MxFp4 = Format<Code::kE2M1, 4, ScaleCode::kE8M0>;
using NvFp4 = Format<Code::kE2M1, 4, ScaleCode::kE4M3>;
using Fp8 = Format<Code::kE4M3, 8, ScaleCode::kFloats>;
using Dense = Format<Code::kFloat, 16, ScaleCode::kNone>;

// Pairs of halves with the exponents of E4M3 (bias 7) still in place: 2^8 times too small. Codes in the high bytes.
NXRT_DEVICE uint32_t e4m3_small(uint32_t x) { return (x >> 1 & 0x3f803f80) | (x & 0x80008000); }

// The numbers of two E4M3 bytes.
NXRT_DEVICE float2 e4m3_floats(uint32_t pair) {
    const float2 x = Pair<half>::floats(e4m3_small(prmt(pair, 0, 0x1404)));
    const float nan = __uint_as_float(0x7fffffff);
    return make_float2((pair & 0x7f) == 0x7f ? nan : x.x * 256.0f, (pair >> 8 & 0x7f) == 0x7f ? nan : x.y * 256.0f);
}
NXRT_DEVICE float e8m0_float(uint32_t x) {
    // The least is subnormal; all ones are NaN.
    return __uint_as_float(x == 0 ? 0x00400000 : x == 0xff ? 0x7fffffff : x << 23);
}

template <class T, ScaleCode S>
NXRT_DEVICE float2 scale_floats(typename detail::RawScale<S>::type raw) {
    if constexpr (S == ScaleCode::kHalves) return Pair<T>::floats(raw);
    else if constexpr (S == ScaleCode::kFloats) return make_float2(__uint_as_float(raw.x), __uint_as_float(raw.y));
    else if constexpr (S == ScaleCode::kE8M0) return make_float2(e8m0_float(raw & 0xff), e8m0_float(raw >> 8));
    else if constexpr (S == ScaleCode::kE4M3) return e4m3_floats(raw);
    else return make_float2(1, 1);
}

// The scales of a pair as two of T, where they are exact or T's already.
template <class T, ScaleCode S>
NXRT_DEVICE uint32_t scale_pair(typename detail::RawScale<S>::type raw) {
    if constexpr (S == ScaleCode::kHalves) {
        return raw;
    } else {
        const float2 x = scale_floats<T, S>(raw);
        return as_word(Pair<T>::from_floats(x.x, x.y));
    }
}

template <class F>
NXRT_DEVICE typename F::Raw load_scale(const Weights& w, uint64_t at) {
    if constexpr (F::kScale == ScaleCode::kNone) return 0;
    else return __ldg(static_cast<const typename F::Raw*>(w.scales) + at);
}

// Fragment `f` of a chunk's words, not scaled, exactly: integers minus their zero points, or the codes' numbers.
template <class T, class F>
NXRT_DEVICE void decode_codes(uint32_t (&a)[4], const uint32_t* w, int f, Offsets zero) {
    constexpr bool HALF = std::is_same_v<T, half>;
    // What the exponents' place takes away: 2^14 or 2^126 for E2M1, 2^8 or 2^120 for E4M3.
    if constexpr (F::kCode == Code::kE2M1) {
        constexpr uint32_t SCALE = HALF ? 0x74007400 : 0x7e807e80;
        const uint32_t x = w[f];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t y = x >> (4 * i);
            const uint32_t bits = HALF ? (y << 9 & 0x0e000e00) : (y << 6 & 0x01c001c0);
            a[i] = pair_mul<T>(bits | (y << 12 & 0x80008000), SCALE);
        }
    } else if constexpr (F::kCode == Code::kE4M3) {
        constexpr uint32_t SCALE = HALF ? 0x5c005c00 : 0x7b807b80;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t x = prmt(w[2 * f + i / 2], 0, i % 2 ? 0x3424 : 0x1404);
            const uint32_t bits = HALF ? e4m3_small(x) : (x >> 4 & 0x07f007f0) | (x & 0x80008000);
            a[i] = pair_mul<T>(bits, SCALE);
        }
    } else {
        decode<T, F::kBits>(a, w, f, zero);
    }
}

// ---- what the kernels take ----

enum ActivationCode : uint32_t { kRelu, kRelu2, kGelu, kSilu, kIdentity, kSwiglu, kGeglu };

// Rows of one expert that a block takes.
struct Item {
    uint32_t expert;
    uint32_t first;  // place in the order by expert
    uint32_t rows;   // 0: nothing to do
    uint32_t pad;
};

struct ExpertParams {
    const void* x;  // rows of K elements
    void* y;
    const uint32_t* ids;    // [P] experts
    const float* mix;       // [P] factors of the products; null: 1
    const uint32_t* order;  // [P] pairs by expert
    const Item* items;
    const void* bias;     // [E, N] in the model's order of rows; null: none
    const void* up_bias;  // of the second halves, where a gate goes with them
    const float* globals;  // [E] factors of the weights; null: 1
    Weights w;             // of the first expert
    uint64_t expert_bytes;  // from one expert's weights to the next one's
    uint64_t bias_row;      // elements
    uint32_t bias_step;
    uint32_t outputs;  // a row: features
    uint32_t parts;    // products that make a row
    uint32_t share;    // pairs that share a row of x; 0: x is in the order by expert
    uint32_t paired;   // a gate goes with each feature
    uint32_t kind;     // an ActivationCode
    uint32_t limit_after;
    uint32_t early;  // ids were there before the kernel in front began
    uint32_t sums;   // y is float, its rows those of the pairs
    uint32_t together;  // 1, 2 or 4; divides the blocks of a row
    float alpha, beta, limit;
    uint32_t pad;

    NXRT_DEVICE Weights expert(uint32_t e) const {
        Weights at = w;
        const uint64_t offset = e * expert_bytes;
        at.data += offset;
        at.scales = static_cast<const uint8_t*>(at.scales) + offset;
        at.zeros = static_cast<const uint8_t*>(at.zeros) + offset;
        return at;
    }
    // Index of the pair of scales of rows g, g + 8 at column k.
    NXRT_DEVICE uint64_t pair_index(uint32_t tile, uint32_t k, unsigned g) const {
        const uint32_t block = k >> w.block_shift, in = block & (together - 1);
        return (uint64_t(tile) * w.blocks + block - in) * 8 + g * together + in;
    }
    NXRT_DEVICE float global(uint32_t e) const { return globals ? globals[e] : 1.0f; }

    // What a pair's product counts for.
    NXRT_DEVICE float mix_of(uint64_t pair) const { return mix ? mix[pair] : 1.0f; }

    // The feature that row `r` of a tile belongs to.
    NXRT_DEVICE uint32_t feature(uint32_t tile, uint32_t r) const {
        return paired ? tile * (kTileRows / 2) + r % (kTileRows / 2) : tile * kTileRows + r;
    }
    // The bias of row `r` of a tile.
    template <class T>
    NXRT_DEVICE float row_bias(uint32_t e, uint32_t tile, uint32_t r) const {
        const T* from = static_cast<const T*>(paired && r >= kTileRows / 2 ? up_bias : bias);
        const uint32_t i = feature(tile, r);
        return from && i < outputs ? to_float(from[e * bias_row + uint64_t(i) * bias_step]) : 0.0f;
    }
};

// ---- activations ----

// NaN wins.
NXRT_DEVICE float at_most(float x, float limit) { return x > limit ? limit : x; }
NXRT_DEVICE float at_least(float x, float limit) { return x < limit ? limit : x; }
NXRT_DEVICE float logistic(float x) { return 1.0f / (1.0f + std::exp(-x)); }
NXRT_DEVICE float gelu_tanh(float x) {
    // (1 + tanh u) / 2 is the logistic function of 2 u.
    return x * logistic(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

// The activation of g, times l where a gate goes with it (else l is 1).
NXRT_DEVICE float activate(const ExpertParams& p, float g, float l) {
    switch (p.kind) {
        case kRelu: return at_least(g, 0.0f) * l;
        case kRelu2: return at_least(g, 0.0f) * at_least(g, 0.0f) * l;
        case kGelu:
        case kGeglu: return gelu_tanh(g) * l;
        case kSilu: return g * logistic(g) * l;
        case kSwiglu: {
            l = at_least(at_most(l, p.limit), -p.limit) + p.beta;
            if (p.limit_after) return at_most(g * logistic(p.alpha * g), p.limit) * l;
            g = at_most(g, p.limit);
            return g * logistic(p.alpha * g) * l;
        }
        default: return g * l;
    }
}

}  // namespace nxrt
