// Decode attention of half types on tensor cores. Keys and values go from memory to operands without shared memory: what
// the products sum over may come in any order, so that every lane reads whole 16-byte pieces.
//
// With g = lane / 4 and t = lane % 4, of each 16 keys a lane holds
//   of keys g and g + 8: elements 8 t .. 8 t + 8 of each 32, the rows of A in scores^T = K q^T;
//   of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 the values' elements 8 g .. 8 g + 8 of each 64: columns of A in out^T = V^T weights^T.
// Columns of both products are query heads.
#include "mma.cuh"
#include "swift.cuh"

using namespace nxrt;

template <class T>
struct Pair;
template <>
struct Pair<half> {
    static NXRT_DEVICE uint32_t pack(float a, float b) {
        const half2 x = __floats2half2_rn(a, b);
        return *reinterpret_cast<const uint32_t*>(&x);
    }
};
template <>
struct Pair<bf16> {
    static NXRT_DEVICE uint32_t pack(float a, float b) {
        const __nv_bfloat162 x = __floats2bfloat162_rn(a, b);
        return *reinterpret_cast<const uint32_t*>(&x);
    }
};

// Head sizes up to 64 kBlocks; just that without kTail.
template <class T, int kBlocks, bool kTail>
struct Halves {
    using Type = T;
    static constexpr int kRows = 8, kTile = 16, kWide = 64 * kBlocks;
    using Piece = Vec<uint32_t, 4>;

    const MixerParams& p;
    const T *keys, *values;
    int end, g, t;
    int last;  // of the keys in memory; -1: there is none
    // The key that comes from elsewhere, if any.
    int fresh = -1;
    const T *new_key = nullptr, *new_value = nullptr;
    int rows = kRows;  // queries: the others have no memory
    // Whether the next keys and values are fetched ahead: there are registers for both and the sums.
    static constexpr bool kAhead = kBlocks <= 4;
    Piece k[kAhead ? 2 * kBlocks : 1][2] = {};
    Piece v[kAhead ? kBlocks : 1][4] = {};
    float acc[kBlocks][4][4] = {};
    float top[2] = {kHidden, kHidden}, sum[2] = {};  // of heads 2 t and 2 t + 1

    NXRT_DEVICE Halves(const MixerParams& params, const T* all_keys, const T* all_values, int end_of_keys)
        : p(params), keys(all_keys), values(all_values), end(end_of_keys), g(lane_id() / 4), t(lane_id() % 4), last(end_of_keys - 1) {}

    // Key `row` is not in memory with the others; a row -1 is none.
    NXRT_DEVICE void expect(int row, const T* key, const T* value, int queries) {
        fresh = row;
        new_key = key;
        new_value = value;
        rows = queries;
    }

    // Puts it into the tile that begins at `key`.
    NXRT_DEVICE void replace(int key) {
        if constexpr (kAhead) {
            if (key + g == fresh || key + g + 8 == fresh) {
#pragma unroll
                for (int c = 0; c < 2 * kBlocks; ++c) {
                    const Piece x = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(new_key + c * 32 + t * 8));
                    if (key + g == fresh) k[c][0] = x;
                    if (key + g + 8 == fresh) k[c][1] = x;
                }
            }
            const int at = fresh - key - 2 * t;
            if (at == 0 || at == 1 || at == 8 || at == 9) {
#pragma unroll
                for (int c = 0; c < kBlocks; ++c) {
                    const Piece x = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(new_value + c * 64 + g * 8));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (at == i % 2 + i / 2 * 8) v[c][i] = x;
                    }
                }
            }
        }
    }

    NXRT_DEVICE int size() const { return kTail ? p.dim : kWide; }

    // Rows behind the last are the last: nobody reads beyond it, and they get no weight.
    NXRT_DEVICE const T* row_of(const T* table, int row) const { return table + static_cast<int64_t>(min(row, last)) * size(); }
    static NXRT_DEVICE Piece load(const T* at) { return load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(at)); }

    // Piece c of the keys key + g and key + g + 8.
    NXRT_DEVICE void load_key(Piece (&to)[2], const T* const (&from)[2], int c) const {
        const int d = c * 32 + t * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            to[i] = {};
            if (!kTail || d < static_cast<int>(p.dim)) to[i] = load(from[i] + d);
        }
    }

    NXRT_DEVICE void load_value(Piece (&to)[4], const T* const (&from)[4], int c) const {
        // What lies behind the head is never stored.
        const int d = kTail ? min(c * 64 + g * 8, static_cast<int>(p.dim) - 8) : c * 64 + g * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = load(from[i] + d);
    }

    struct KeyRows {
        const T* at[2];
    };
    struct ValueRows {
        const T* at[4];
    };
    NXRT_DEVICE KeyRows key_rows(int key) const { return {{row_of(keys, key + g), row_of(keys, key + g + 8)}}; }
    NXRT_DEVICE ValueRows value_rows(int key) const {
        const int row = key + 2 * t;
        return {{row_of(values, row), row_of(values, row + 1), row_of(values, row + 8), row_of(values, row + 9)}};
    }

    NXRT_DEVICE void load_keys(int key) {
        if constexpr (kAhead) {
            if (key >= end || last < 0) return;
            const KeyRows from = key_rows(key);
#pragma unroll
            for (int c = 0; c < 2 * kBlocks; ++c) load_key(k[c], from.at, c);
        }
    }

    NXRT_DEVICE void load_values(int key) {
        if constexpr (kAhead) {
            if (key >= end || last < 0) return;
            const ValueRows from = value_rows(key);
#pragma unroll
            for (int c = 0; c < kBlocks; ++c) load_value(v[c], from.at, c);
        }
    }

    NXRT_DEVICE void begin(int key) {
        load_keys(key);
        load_values(key);
    }

    // The keys key .. key + 16, while those at `next` are fetched.
    NXRT_DEVICE void step(const T* query, int pitch, int key, int next) {
        float scores[4][4] = {};
        if (fresh >= key && fresh < key + kTile) replace(key);
        KeyRows from = {};
        if constexpr (!kAhead) from = key_rows(key);
#pragma unroll
        for (int c = 0; c < 2 * kBlocks; ++c) {
            Piece q = {};
            if (g < rows) q = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(query + g * pitch + c * 32 + t * 8));
            Piece(&keys_here)[2] = k[kAhead ? c : 0];
            if constexpr (!kAhead) load_key(keys_here, from.at, c);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t a[4] = {keys_here[0][2 * i], keys_here[1][2 * i], keys_here[0][2 * i + 1], keys_here[1][2 * i + 1]};
                const uint32_t b[2] = {q[2 * i], q[2 * i + 1]};
                mma_m16n8k16<T>(scores[c % 2 * 2 + i], a, b);
            }
        }
        load_keys(next);
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float dot = scores[0][i] + scores[1][i] + (scores[2][i] + scores[3][i]);
            s[i] = key + g + i / 2 * 8 < end ? score_of(p, dot) : kHidden;
        }
        uint32_t weights[2];
        softmax(s, weights);
        ValueRows value_from = {};
        if constexpr (!kAhead) value_from = value_rows(key);
#pragma unroll
        for (int c = 0; c < kBlocks; ++c) {
            Piece(&x)[4] = v[kAhead ? c : 0];
            if constexpr (!kAhead) load_value(x, value_from.at, c);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t a[4] = {prmt(x[0][i], x[1][i], 0x5410), prmt(x[0][i], x[1][i], 0x7632),
                                       prmt(x[2][i], x[3][i], 0x5410), prmt(x[2][i], x[3][i], 0x7632)};
                mma_m16n8k16<T>(acc[c][i], a, weights);
            }
        }
        load_values(next);
    }

    // Scores of keys g and g + 8 for two heads become weights of keys 2 t, ... for head g.
    NXRT_DEVICE void softmax(const float (&s)[4], uint32_t (&weights)[2]) {
        float w[4], shrink[2];
        bool moved = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float high = fmaxf(s[h], s[h + 2]);
#pragma unroll
            for (int lanes = 4; lanes < static_cast<int>(kWarpSize); lanes *= 2) high = fmaxf(high, __shfl_xor_sync(kFullMask, high, lanes));
            high = fmaxf(high, top[h]);
            shrink[h] = shrink_of(top[h], high);
            moved |= high != top[h];
            top[h] = high;
#pragma unroll
            for (int i = h; i < 4; i += 2) w[i] = shrink_of(s[i], high);
            sum[h] = sum[h] * shrink[h] + (w[h] + w[h + 2]);
        }
        weights[0] = transpose_8x8(Pair<T>::pack(w[0], w[1]));
        weights[1] = transpose_8x8(Pair<T>::pack(w[2], w[3]));
        if (!__any_sync(kFullMask, moved)) return;
#pragma unroll
        for (int c = 0; c < kBlocks; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[c][i][j] *= shrink[j % 2];
            }
        }
    }

    NXRT_DEVICE void publish(float* tops, float* totals, int stride = 1) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int lanes = 4; lanes < static_cast<int>(kWarpSize); lanes *= 2) sum[h] += __shfl_xor_sync(kFullMask, sum[h], lanes);
            if (g == 0) {
                tops[(2 * t + h) * stride] = top[h];
                totals[(2 * t + h) * stride] = sum[h];
            }
        }
    }

    template <class To, class Factor>
    NXRT_DEVICE void put(To to, Factor factor) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float* row = to(2 * t + h);
            if (row == nullptr) continue;
            const float by = factor(2 * t + h);
#pragma unroll
            for (int c = 0; c < kBlocks; ++c) {
                const int d = c * 64 + g * 8;
                if (kTail && d >= static_cast<int>(p.dim)) continue;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float(&low)[4] = acc[c][2 * i], (&high)[4] = acc[c][2 * i + 1];
                    *reinterpret_cast<float4*>(row + d + 4 * i) =
                        make_float4(low[h] * by, low[h + 2] * by, high[h] * by, high[h + 2] * by);
                }
            }
        }
    }
};

#define MIXER(type, T, blocks, tail, name) NXRT_KERNEL(mix_##type##_##name, MixerParams, (mix<Halves<T, blocks, tail>>), kThreads)
#define SWIFT(type, T, blocks, name) NXRT_KERNEL_EARLY(mix_##type##_##name, MixerParams, (mix_swiftly<Halves<T, blocks, false>>), kThreads)
#define TYPE(type, T)            \
    SWIFT(type, T, 1, 64)         \
    SWIFT(type, T, 2, 128)        \
    SWIFT(type, T, 4, 256)        \
    MIXER(type, T, 4, true, to_256) \
    MIXER(type, T, 8, true, to_512)
TYPE(f16, half)
TYPE(bf16, bf16)
