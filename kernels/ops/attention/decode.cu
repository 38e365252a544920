// Attention of few query rows over many keys: the keys are cut into parts that blocks take side by side, and a second kernel
// joins them. A row of the cache is read by kLanes lanes, kVectors times 16 bytes each; a warp has kWarpSize / kLanes streams
// of keys, every one with a softmax of its own until the block joins them. All query rows of a key head share what is read.
#include "attention.cuh"

using namespace nxrt;

constexpr int kWarps = 4;

template <class T, int kRows, int kLanes, int kVectors>
struct Decode {
    static constexpr int kN = 16 / sizeof(T);
    static constexpr int kStreams = kWarpSize / kLanes;
    // Keys a stream has in flight, and what of their scores a lane then holds.
    static constexpr int kKeys = kVectors == 1 && kRows <= 4 ? 8 : 4;
    static constexpr int kScores = kKeys * kRows;
    static constexpr int kMine = kScores > kLanes ? kScores / kLanes : 1;
    // Lanes per score, where there are more of them.
    static constexpr int kCopies = kScores > kLanes ? 1 : kLanes / kScores;

    struct Shared {
        float weights[kWarps][kStreams][kScores];
        float shrink[kWarps][kStreams][kRows];
        float top[kWarps * kStreams][kRows];
        float sum[kWarps * kStreams][kRows];
        float joined[kWarps][kLanes * kVectors * kN];
    };

    const AttentionParams& p;
    Shared& shared;
    int b, kv_head, split, first;
    Span span;
    KeyRange range;
    int lane, warp, stream, at;  // `at`: lane within its stream
    float query[kRows][kVectors][kN] = {};
    float acc[kRows][kVectors][kN] = {};
    float top = kHidden, sum = 0.0f;  // of the row whose scores this lane gets

    NXRT_DEVICE int group() const { return p.heads / p.kv_heads; }
    NXRT_DEVICE bool present(int r) const { return first + r < group() * static_cast<int>(p.lengths.rows); }
    NXRT_DEVICE int head_of(int r) const { return kv_head * group() + (first + r) % group(); }
    NXRT_DEVICE int row_index(int r) const { return (first + r) / group(); }
    NXRT_DEVICE int column(int v) const { return (v * kLanes + at) * kN; }
    // Number of the first score that this lane holds: row * kKeys + key.
    NXRT_DEVICE int first_score() const { return at / kCopies * kMine; }
    NXRT_DEVICE int my_row() const { return first_score() / kKeys; }

    NXRT_DEVICE void load_queries() {
        const bool aligned = rows_aligned<T>(p.q, p.q_at, 16);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (!present(r)) continue;
            const T* row = row_of<T>(p.q, p.q_at, b, head_of(r), row_index(r));
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const Vec<T, kN> raw = load_part<T, kN>(row, column(v), p.dim, aligned);
#pragma unroll
                for (int i = 0; i < kN; ++i) query[r][v][i] = to_float(raw[i]);
            }
        }
    }

    // One key or value row's part; zeros behind the last key.
    NXRT_DEVICE Vec<T, kN> load(const T* rows, int64_t stride, int key, int v, int dim, bool aligned) const {
        Vec<T, kN> raw;
#pragma unroll
        for (int i = 0; i < kN; ++i) raw[i] = from_float<T>(0.0f);
        if (key < range.end) raw = load_part<T, kN>(rows + key * stride, column(v), dim, aligned);
        return raw;
    }

    // The keys k0 + i * kStreams.
    NXRT_DEVICE void step(int k0, const T* keys, const T* values, bool k_aligned, bool v_aligned) {
        Vec<T, kN> k[kKeys][kVectors], x[kKeys][kVectors];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) k[i][v] = load(keys, p.k_at.row, k0 + i * kStreams, v, p.dim, k_aligned);
        }
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) x[i][v] = load(values, p.v_at.row, k0 + i * kStreams, v, p.v_dim, v_aligned);
        }
        float scores[kScores];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) scores[r * kKeys + i] = 0.0f;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int j = 0; j < kN; ++j) {
                    const float key = to_float(k[i][v][j]);
#pragma unroll
                    for (int r = 0; r < kRows; ++r) scores[r * kKeys + i] += query[r][v][j] * key;
                }
            }
        }
        Scatter<kScores, kLanes / 2>::add(scores, at);
        softmax(k0, scores);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const Vec<float, kKeys> w = load_vec<float, kKeys>(&shared.weights[warp][stream][r * kKeys]);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int j = 0; j < kN; ++j) {
#pragma unroll
                    for (int i = 0; i < kKeys; ++i) acc[r][v][j] += w[i] * to_float(x[i][v][j]);
                }
            }
        }
        __syncwarp();
    }

    // Leaves the weights in shared memory and scales what is there already.
    NXRT_DEVICE void softmax(int k0, float (&scores)[kScores]) {
        const int number = first_score(), r = my_row();
        const bool here = present(r);
        const int s = row_index(r), head = head_of(r);
        const KeyRange seen = here ? seen_by(p, span, s) : KeyRange{0, 0};
        float high = top;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int key = k0 + (number + i) % kKeys * kStreams;
            const bool visible = key >= seen.start && key < seen.end && key < range.end;
            scores[i] = visible ? score_of<T>(p, scores[i], b, head, s, key, span.base) : kHidden;
            high = fmaxf(high, scores[i]);
        }
        // Lanes whose numbers differ in these bits hold other keys of the row.
#pragma unroll
        for (int lanes = kCopies; lanes < kCopies * kKeys / kMine; lanes *= 2) {
            high = fmaxf(high, __shfl_xor_sync(kFullMask, high, lanes));
        }
        const float zero = high == kHidden ? 0.0f : high;
        const float shrink = exp2_approx(top - zero);
        sum *= shrink;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const float weight = exp2_approx(scores[i] - zero);
            sum += weight;
            if (at % kCopies == 0) shared.weights[warp][stream][number + i] = weight;
        }
        const bool moved = high != top;
        top = high;
        const bool any = __any_sync(kFullMask, moved) != 0;
        if (any && number % kKeys == 0 && at % kCopies == 0) shared.shrink[warp][stream][r] = shrink;
        __syncwarp();
        if (!any) return;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            const float by = shared.shrink[warp][stream][row];
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int j = 0; j < kN; ++j) acc[row][v][j] *= by;
            }
        }
    }

    // Joins the streams of the block and writes its result.
    NXRT_DEVICE void join() {
        // The lanes of a row each hold the exponentials of their own keys.
#pragma unroll
        for (int lanes = kCopies; lanes < kCopies * kKeys / kMine; lanes *= 2) {
            sum += __shfl_xor_sync(kFullMask, sum, lanes);
        }
        if (first_score() % kKeys == 0 && at % kCopies == 0) {
            shared.top[warp * kStreams + stream][my_row()] = top;
            shared.sum[warp * kStreams + stream][my_row()] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float high = kHidden, total = 0.0f;
            for (int i = 0; i < kWarps * kStreams; ++i) high = fmaxf(high, shared.top[i][r]);
            const float zero = high == kHidden ? 0.0f : high;
            for (int i = 0; i < kWarps * kStreams; ++i) total += shared.sum[i][r] * exp2_approx(shared.top[i][r] - zero);
            const float by = exp2_approx(shared.top[warp * kStreams + stream][r] - zero);
            __syncthreads();
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int j = 0; j < kN; ++j) {
                    float x = acc[r][v][j] * by;
#pragma unroll
                    for (int lanes = kLanes; lanes < static_cast<int>(kWarpSize); lanes *= 2) {
                        x += __shfl_xor_sync(kFullMask, x, lanes);
                    }
                    if (stream == 0) shared.joined[warp][column(v) + j] = x;
                }
            }
            __syncthreads();
            if (present(r)) write(head_of(r), row_index(r), high, total);
        }
    }

    NXRT_DEVICE void write(int head, int s, float high, float total) const {
        const int width = p.v_dim;
        const bool parts = p.splits > 1;
        float* partial = parts ? partial_of(p, b, head, s, split) : nullptr;
        T* out = static_cast<T*>(p.out) + b * p.out_at.batch + head * p.out_at.head + s * p.out_at.row;
        const float by = parts ? 1.0f : finish_factor<T>(p, head, high, total);
        for (int d = threadIdx.x; d < width; d += kWarps * kWarpSize) {
            float x = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) x += shared.joined[w][d];
            if (parts) {
                partial[d] = x;
            } else {
                out[d] = from_float<T>(x * by);
            }
        }
        if (parts && threadIdx.x == 0) {
            partial[width] = high;
            partial[width + 1] = total;
        }
    }
};

template <class T, int kRows, int kLanes, int kVectors>
NXRT_DEVICE void decode(const AttentionParams& p) {
    using D = Decode<T, kRows, kLanes, kVectors>;
    NXRT_SHARED typename D::Shared shared;
    const int split = blockIdx.x % p.splits, place = blockIdx.x / p.splits;
    const int tile = place % p.row_tiles, kv_head = place / p.row_tiles % p.kv_heads, b = place / p.row_tiles / p.kv_heads;
    const Span span = span_of(p.lengths, b);
    const KeyRange range = part_of(p, seen_by_tile(p, span, tile * kRows, kRows), split);
    if (p.splits > 1 && range.start >= range.end) return;

    const int lane = lane_id(), warp = warp_id();
    D d = {p, shared, b, kv_head, split, tile * kRows, span, range, lane, warp, lane / kLanes, lane % kLanes};
    d.load_queries();
    const T* keys = row_of<T>(p.k, p.k_at, b, kv_head, 0);
    const T* values = row_of<T>(p.v, p.v_at, b, kv_head, 0);
    const bool k_aligned = rows_aligned<T>(p.k, p.k_at, 16), v_aligned = rows_aligned<T>(p.v, p.v_at, 16);
    constexpr int kStep = D::kKeys * D::kStreams;
    for (int k0 = range.start + warp * kStep; k0 < range.end; k0 += kWarps * kStep) {
        d.step(k0 + lane / kLanes, keys, values, k_aligned, v_aligned);
    }
    d.join();
}

// A block a row: joins the parts that `decode` left.
template <class T>
NXRT_DEVICE void join_parts(const AttentionParams& p) {
    NXRT_SHARED float weights[1024];
    NXRT_SHARED float shared[32];
    const int s = blockIdx.x % p.lengths.rows, head = blockIdx.x / p.lengths.rows % p.heads;
    const int b = blockIdx.x / p.lengths.rows / p.heads, group = p.heads / p.kv_heads, width = p.v_dim;
    const int first = (s * group + head % group) / p.tile_rows * p.tile_rows;
    const KeyRange range = seen_by_tile(p, span_of(p.lengths, b), first, p.tile_rows);
    const int parts = ceil_div(range.end - range.start, part_keys(p, range)), thread = threadIdx.x;
    const float* partial = partial_of(p, b, head, s, 0);

    float high = kHidden;
    for (int i = thread; i < parts; i += blockDim.x) high = fmaxf(high, partial[i * (width + 2) + width]);
    high = block_max(high, shared);
    const float zero = high == kHidden ? 0.0f : high;
    float sum = 0.0f;
    for (int i = thread; i < parts; i += blockDim.x) {
        const float* at = partial + i * (width + 2) + width;
        weights[i] = exp2_approx(at[0] - zero);
        sum += at[1] * weights[i];
    }
    sum = block_sum(sum, shared);
    __syncthreads();
    const float by = finish_factor<T>(p, head, high, sum);
    T* out = static_cast<T*>(p.out) + b * p.out_at.batch + head * p.out_at.head + s * p.out_at.row;
    for (int d = thread; d < width; d += blockDim.x) {
        float x = 0.0f;
#pragma unroll 8
        for (int i = 0; i < parts; ++i) x += weights[i] * partial[i * (width + 2) + d];
        out[d] = from_float<T>(x * by);
    }
}

#define DECODE(type, T, rows, lanes, vectors) \
    NXRT_KERNEL(decode_##type##_##rows##_##lanes##_##vectors, AttentionParams, (decode<T, rows, lanes, vectors>), 128)
#define HALF_TYPE(type, T)          \
    DECODE(type, T, 4, 8, 1)        \
    DECODE(type, T, 4, 16, 1)       \
    DECODE(type, T, 4, 32, 1)       \
    DECODE(type, T, 4, 32, 2)       \
    DECODE(type, T, 8, 8, 1)        \
    DECODE(type, T, 8, 16, 1)       \
    DECODE(type, T, 8, 32, 1)
HALF_TYPE(f16, half)
HALF_TYPE(bf16, bf16)
DECODE(f32, float, 4, 32, 1)
DECODE(f32, float, 4, 32, 2)
DECODE(f32, float, 4, 32, 4)

NXRT_KERNEL(join_parts_f32, AttentionParams, (join_parts<float>), 256)
NXRT_KERNEL(join_parts_f16, AttentionParams, (join_parts<half>), 256)
NXRT_KERNEL(join_parts_bf16, AttentionParams, (join_parts<bf16>), 256)
