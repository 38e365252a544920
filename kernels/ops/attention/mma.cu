// Attention on tensor cores for half types and head sizes that are multiples of 8: a block holds 64 query rows, 16 a warp, and
// passes over the keys 64 at a time. Keys arrive while the values before them are used, and the other way round.
#include "attention.cuh"
#include "mma.cuh"

using namespace nxrt;

constexpr int kWarps = 4;
constexpr int kRows = 16 * kWarps;
constexpr int kKeys = 64;
constexpr int kPiece = 8;  // elements of 16 bytes

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

// Rows of kDim elements, whose 16-byte pieces change places by row: ldmatrix then meets no bank twice.
template <class T, int kDim>
NXRT_DEVICE T* piece_at(T* tile, int row, int piece) {
    return tile + row * kDim + ((piece ^ (row & 7)) * kPiece);
}

// Begins to copy one piece, zeros where it is not valid.
template <class T>
NXRT_DEVICE void copy_piece(T* to, const T* from, bool valid, bool aligned) {
    if (aligned) {
        cp_async_16(to, from, valid);
        return;
    }
    Vec<T, kPiece> x;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x[i] = valid ? from[i] : from_float<T>(0.0f);
    store_vec<T, kPiece>(to, x);
}

template <class T, int kDim>
struct Tile {
    static constexpr int kSteps = kDim / 16;
    static constexpr int kPieces = kDim / kPiece;
    static constexpr int kThreads = kWarps * kWarpSize;

    const AttentionParams& p;
    int b, kv_head, split, first, lane, warp;
    Span span;
    KeyRange range;
    T *query, *keys, *values;
    float acc[kDim / 8][4] = {};
    float top[2] = {kHidden, kHidden}, sum[2] = {};
    KeyRange seen[2] = {};

    NXRT_DEVICE int group() const { return p.heads / p.kv_heads; }
    NXRT_DEVICE int all_rows() const { return group() * static_cast<int>(p.lengths.rows); }
    // This lane's row h of two.
    NXRT_DEVICE int row(int h) const { return first + warp * 16 + lane / 4 + h * 8; }

    NXRT_DEVICE void load_queries() const {
        const bool aligned = rows_aligned<T>(p.q, p.q_at, 16);
        const int pieces = p.dim / kPiece;
        for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
            const int r = i / kPieces, piece = i % kPieces;
            if (piece >= 2 * ((static_cast<int>(p.dim) + 15) / 16)) continue;
            const int number = min(first + r, all_rows() - 1);
            const bool valid = first + r < all_rows() && piece < pieces;
            const T* from = row_of<T>(p.q, p.q_at, b, kv_head * group() + number % group(), number / group());
            copy_piece(piece_at<T, kDim>(query, r, piece), from + (valid ? piece * kPiece : 0), valid, aligned);
        }
    }

    // Rows k0.. of keys or values; zeros behind the last.
    NXRT_DEVICE void load(T* tile, const T* from, int64_t stride, int k0, int dim, bool aligned) const {
        const int pieces = dim / kPiece;
#pragma unroll
        for (int i = 0; i < kKeys * kPieces / kThreads; ++i) {
            const int number = threadIdx.x + i * kThreads, key = number / kPieces, piece = number % kPieces;
            if (piece >= 2 * ((dim + 15) / 16)) continue;
            const bool valid = k0 + key < range.end && piece < pieces;
            copy_piece(piece_at<T, kDim>(tile, key, piece), from + (valid ? (k0 + key) * stride + piece * kPiece : 0), valid, aligned);
        }
    }

    NXRT_DEVICE void scores(float (&s)[kKeys / 8][4]) const {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
        }
        const int steps = (p.dim + 15) / 16;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step >= steps) break;
            uint32_t a[4];
            // Matrices: rows 0-7 and 8-15 of dims 0-7, then of dims 8-15.
            ldmatrix_x4(a, piece_at<T, kDim>(query, warp * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                uint32_t k[4];
                // Keys 0-7 with dims 0-7 and 8-15, then keys 8-15.
                ldmatrix_x4(k, piece_at<T, kDim>(keys, n * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
                const uint32_t low[2] = {k[0], k[1]}, high[2] = {k[2], k[3]};
                mma_m16n8k16<T>(s[2 * n], a, low);
                mma_m16n8k16<T>(s[2 * n + 1], a, high);
            }
        }
    }

    // Scores become weights.
    NXRT_DEVICE void softmax(int k0, float (&s)[kKeys / 8][4]) {
        const bool plain = p.softcap <= 0.0f && p.mask_kind == kNoMask;
        const float scale = p.scale * kLog2e;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const bool whole = seen[h].start <= k0 && k0 + kKeys <= min(seen[h].end, range.end);
            const int number = row(h), head = kv_head * group() + number % group(), at = number / group();
            float high = top[h];
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = s[n][2 * h + i];
                    if (plain) {
                        x *= scale;
                    }
                    if (!plain || !whole) {
                        const int key = k0 + n * 8 + lane % 4 * 2 + i;
                        const bool visible = key >= seen[h].start && key < seen[h].end && key < range.end;
                        if (!visible) {
                            x = kHidden;
                        } else if (!plain) {
                            x = score_of<T>(p, x, b, head, at, key, span.base);
                        }
                    }
                    high = fmaxf(high, x);
                }
            }
            high = fmaxf(high, __shfl_xor_sync(kFullMask, high, 1));
            high = fmaxf(high, __shfl_xor_sync(kFullMask, high, 2));
            const float zero = high == kHidden ? 0.0f : high, shrink = exp2_approx(top[h] - zero);
            top[h] = high;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = s[n][2 * h + i];
                    x = exp2_approx(x - zero);
                    total += x;
                }
            }
            sum[h] = sum[h] * shrink + total;
#pragma unroll
            for (int n = 0; n < kDim / 8; ++n) {
                acc[n][2 * h] *= shrink;
                acc[n][2 * h + 1] *= shrink;
            }
        }
    }

    NXRT_DEVICE void add_values(const float (&s)[kKeys / 8][4]) {
        const int steps = (p.v_dim + 15) / 16;
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
            const float(&low)[4] = s[2 * step];
            const float(&high)[4] = s[2 * step + 1];
            const uint32_t a[4] = {Pair<T>::pack(low[0], low[1]), Pair<T>::pack(low[2], low[3]), Pair<T>::pack(high[0], high[1]),
                                   Pair<T>::pack(high[2], high[3])};
#pragma unroll
            for (int n = 0; n < kSteps; ++n) {
                if (n >= steps) break;
                uint32_t v[4];
                // Dims 0-7 with keys 0-7 and 8-15, then dims 8-15.
                ldmatrix_x4_trans(v, piece_at<T, kDim>(values, step * 16 + lane % 16, n * 2 + lane / 16));
                const uint32_t left[2] = {v[0], v[1]}, right[2] = {v[2], v[3]};
                mma_m16n8k16<T>(acc[2 * n], a, left);
                mma_m16n8k16<T>(acc[2 * n + 1], a, right);
            }
        }
    }

    NXRT_DEVICE void store() {
        const int width = p.v_dim;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(kFullMask, sum[h], 1);
            sum[h] += __shfl_xor_sync(kFullMask, sum[h], 2);
            const int number = row(h), head = kv_head * group() + number % group(), at = number / group();
            if (number >= all_rows()) continue;
            if (p.splits > 1) {
                float* to = partial_of(p, b, head, at, split);
#pragma unroll
                for (int n = 0; n < kDim / 8; ++n) {
                    const int d = n * 8 + lane % 4 * 2;
                    if (d >= width) break;
                    store_vec<float, 2>(to + d, {acc[n][2 * h], acc[n][2 * h + 1]});
                }
                if (lane % 4 == 0) store_vec<float, 2>(to + width, {top[h], sum[h]});
                continue;
            }
            T* to = static_cast<T*>(p.out) + b * p.out_at.batch + head * p.out_at.head + at * p.out_at.row;
            const bool aligned = rows_aligned<T>(p.out, p.out_at, 4);
            const float by = finish_factor<T>(p, head, top[h], sum[h]);
#pragma unroll
            for (int n = 0; n < kDim / 8; ++n) {
                const int d = n * 8 + lane % 4 * 2;
                if (d >= width) break;
                const Vec<T, 2> x = {from_float<T>(acc[n][2 * h] * by), from_float<T>(acc[n][2 * h + 1] * by)};
                if (aligned) {
                    store_vec<T, 2>(to + d, x);
                } else {
                    to[d] = x[0];
                    to[d + 1] = x[1];
                }
            }
        }
    }
};

// Shared memory: (kRows + 2 * kKeys) * kDim elements.
template <class T, int kDim>
NXRT_DEVICE void attend(const AttentionParams& p) {
    NXRT_DYNAMIC_SHARED(T, shared);
    const int split = blockIdx.x % p.splits, place = blockIdx.x / p.splits;
    const int heads = p.batch * p.kv_heads, kv_heads = p.kv_heads;
    // Last rows first: under a causal mask they take longest.
    const int first = (p.row_tiles - 1 - place / heads) * kRows, b = place % heads / kv_heads, kv_head = place % heads % kv_heads;
    const Span span = span_of(p.lengths, b);
    const KeyRange range = part_of(p, seen_by_tile(p, span, first, kRows), split);
    if (p.splits > 1 && range.start >= range.end) return;

    T* keys = shared + kRows * kDim;
    Tile<T, kDim> t = {p, b, kv_head, split, first, static_cast<int>(lane_id()), static_cast<int>(warp_id()), span, range, shared, keys,
                       keys + kKeys * kDim};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (t.row(h) < t.all_rows()) t.seen[h] = seen_by(p, span, t.row(h) / t.group());
    }
    // Warps behind the last row only help to copy.
    const bool works = first + t.warp * 16 < t.all_rows();
    const T* k = row_of<T>(p.k, p.k_at, b, kv_head, 0);
    const T* v = row_of<T>(p.v, p.v_at, b, kv_head, 0);
    const bool k_aligned = rows_aligned<T>(p.k, p.k_at, 16), v_aligned = rows_aligned<T>(p.v, p.v_at, 16);
    if (range.start < range.end) {
        t.load_queries();
        t.load(t.keys, k, p.k_at.row, range.start, p.dim, k_aligned);
        cp_async_commit();
    }
    for (int k0 = range.start; k0 < range.end; k0 += kKeys) {
        cp_async_wait<0>();
        __syncthreads();
        t.load(t.values, v, p.v_at.row, k0, p.v_dim, v_aligned);
        cp_async_commit();
        float s[kKeys / 8][4];
        if (works) {
            t.scores(s);
            t.softmax(k0, s);
        }
        cp_async_wait<0>();
        __syncthreads();
        if (k0 + kKeys < range.end) t.load(t.keys, k, p.k_at.row, k0 + kKeys, p.dim, k_aligned);
        cp_async_commit();
        if (works) t.add_values(s);
    }
    t.store();
}

NXRT_KERNEL(attend_f16_64, AttentionParams, (attend<half, 64>), 128)
NXRT_KERNEL(attend_f16_128, AttentionParams, (attend<half, 128>), 128)
NXRT_KERNEL(attend_f16_256, AttentionParams, (attend<half, 256>), 128)
NXRT_KERNEL(attend_bf16_64, AttentionParams, (attend<bf16, 64>), 128)
NXRT_KERNEL(attend_bf16_128, AttentionParams, (attend<bf16, 128>), 128)
NXRT_KERNEL(attend_bf16_256, AttentionParams, (attend<bf16, 256>), 128)
