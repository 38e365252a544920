// Norms of rows: y = act(gate) (scale norm(x + skip + skip_bias) + bias). Rows in registers where the layout allows
// 16-byte accesses and the row fits; else rows are read once for each statistic.
#include "common.cuh"

using namespace nxrt;

enum Kind : uint32_t { kRms, kLayer, kL1, kL2 };
enum Type : uint32_t { kF32, kF16, kBf16 };
enum Activation : uint32_t { kNone, kSilu, kSigmoid };

constexpr unsigned kMaxDims = 8;

struct NormParams {
    const void* x;          // [rows, n]
    const void* skip;       // [skip_rows, n], repeated; null: none
    const void* skip_bias;  // [n]; null: none
    const void* scale;      // [n], or as scale_strides say; null: 1
    const void* bias;       // as scale; null: 0
    const void* gate;       // [rows, n]; null: none
    void* y;                // null: nobody reads it
    void* sum;              // x + skip + skip_bias; null: nobody reads it
    float* mean;            // of each row; null: nobody reads it
    float* inverse;         // each row's factor; null: nobody reads it
    uint64_t rows;
    uint64_t skip_rows;
    uint32_t n;
    uint32_t lanes;         // threads a row: a power of two up to 32, or the whole block
    uint32_t kind;
    uint32_t type;          // of all but what `out_type` says
    uint32_t out_type;      // of scale, bias and y
    uint32_t activation;
    float epsilon;
    uint32_t dims;          // 0: scale and bias are [n]
    uint32_t shape[kMaxDims];
    uint32_t scale_strides[kMaxDims];
    uint32_t bias_strides[kMaxDims];
};

// This thread's row, and its place in it.
struct Place {
    uint64_t row;
    unsigned lane;
    bool live;
};

NXRT_DEVICE Place place(const NormParams& p) {
    if (p.lanes > kWarpSize) return {blockIdx.x, threadIdx.x, true};
    const int shift = 31 - __clz(static_cast<int>(p.lanes));
    const uint64_t row = uint64_t(blockIdx.x) * (blockDim.x >> shift) + (threadIdx.x >> shift);
    return {row, threadIdx.x & (p.lanes - 1), row < p.rows};
}

// The row of `skip` that belongs to `row`.
NXRT_DEVICE uint64_t skip_row(const NormParams& p, uint64_t row) {
    return row < p.skip_rows ? row : row % p.skip_rows;
}

// Sum over the threads of a row; every thread of the block takes part.
template <class C>
NXRT_DEVICE C row_sum(C x, unsigned lanes, C* shared32) {
    for (unsigned step = lanes < kWarpSize ? lanes / 2 : kWarpSize / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(kFullMask, x, step);
    if (lanes <= kWarpSize) return x;
    __syncthreads();
    if (lane_id() == 0) shared32[warp_id()] = x;
    __syncthreads();
    x = lane_id() < warp_count() ? shared32[lane_id()] : C(0);
    for (unsigned step = kWarpSize / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
    return x;
}

NXRT_DEVICE float root(float x) { return sqrtf(x); }
NXRT_DEVICE double root(double x) { return sqrt(x); }
NXRT_DEVICE float exponential(float x) { return expf(x); }
NXRT_DEVICE double exponential(double x) { return exp(x); }

// A row's mean and factor.
template <class C>
struct Statistics {
    C mean;
    C inverse;
};

// `sum(f)` adds f(x) over the row.
template <class C, class Sum>
NXRT_DEVICE Statistics<C> statistics(const NormParams& p, Sum sum) {
    const C n = C(p.n);
    C mean = 0;
    switch (p.kind) {
        case kLayer:
            mean = sum([](C x) { return x; }) / n;
            [[fallthrough]];
        case kRms:
            return {mean, C(1) / root(sum([=](C x) { return (x - mean) * (x - mean); }) / n + C(p.epsilon))};
        default: {
            const bool squares = p.kind == kL2;
            C norm = sum([=](C x) { return squares ? x * x : (x < C(0) ? -x : x); });
            if (squares) norm = root(norm);
            return {C(0), norm == C(0) ? C(0) : C(1) / norm};
        }
    }
}

template <class C>
NXRT_DEVICE void write_statistics(const NormParams& p, const Place& at, const Statistics<C>& s) {
    if (!at.live || at.lane != 0) return;
    if (p.mean) p.mean[at.row] = static_cast<float>(s.mean);
    if (p.inverse) p.inverse[at.row] = static_cast<float>(s.inverse);
}

template <class C>
NXRT_DEVICE C activate(uint32_t activation, C z) {
    const C denominator = C(1) + exponential(-z);
    return (activation == kSilu ? z : C(1)) / denominator;
}

// ---- any layout: C is float with types at run time, or double for doubles ----

template <class C>
struct Any {
    static NXRT_DEVICE C load(const void* from, uint32_t type, uint64_t i) {
        switch (type) {
            case kF32: return static_cast<const float*>(from)[i];
            case kF16: return to_float(static_cast<const half*>(from)[i]);
            default: return to_float(static_cast<const bf16*>(from)[i]);
        }
    }
    static NXRT_DEVICE void store(void* to, uint32_t type, uint64_t i, C x) {
        switch (type) {
            case kF32: static_cast<float*>(to)[i] = x; break;
            case kF16: static_cast<half*>(to)[i] = from_float<half>(x); break;
            default: static_cast<bf16*>(to)[i] = from_float<bf16>(x); break;
        }
    }
};
template <>
struct Any<double> {
    static NXRT_DEVICE double load(const void* from, uint32_t, uint64_t i) { return static_cast<const double*>(from)[i]; }
    static NXRT_DEVICE void store(void* to, uint32_t, uint64_t i, double x) { static_cast<double*>(to)[i] = x; }
};

// Where element i of X finds its scale or bias.
NXRT_DEVICE uint64_t broadcast(const NormParams& p, const uint32_t (&strides)[kMaxDims], uint64_t i) {
    uint64_t at = 0;
    for (unsigned d = p.dims; d-- > 0;) {
        at += i % p.shape[d] * strides[d];
        i /= p.shape[d];
    }
    return at;
}

template <class C>
NXRT_DEVICE void norm_slow(const NormParams& p, C* shared32) {
    using A = Any<C>;
    const Place at = place(p);
    const uint64_t start = at.row * p.n;
    const uint64_t skip_start = p.skip ? skip_row(p, at.row) * p.n : 0;
    const unsigned n = at.live ? p.n : 0;
    auto value = [&](unsigned i) {
        C x = A::load(p.x, p.type, start + i);
        if (p.skip) x += A::load(p.skip, p.type, skip_start + i);
        if (p.skip_bias) x += A::load(p.skip_bias, p.type, i);
        return x;
    };
    const Statistics<C> s = statistics<C>(p, [&](auto f) {
        C sum = 0;
        for (unsigned i = at.lane; i < n; i += p.lanes) sum += f(value(i));
        return row_sum(sum, p.lanes, shared32);
    });
    write_statistics(p, at, s);
    for (unsigned i = at.lane; i < n; i += p.lanes) {
        const C x = value(i);
        if (p.sum) A::store(p.sum, p.type, start + i, x);
        if (!p.y) continue;
        C y = (x - s.mean) * s.inverse;
        if (p.scale) y *= A::load(p.scale, p.out_type, p.dims ? broadcast(p, p.scale_strides, start + i) : i);
        if (p.bias) y += A::load(p.bias, p.out_type, p.dims ? broadcast(p, p.bias_strides, start + i) : i);
        if (p.gate) y *= activate(p.activation, A::load(p.gate, p.type, start + i));
        A::store(p.y, p.out_type, start + i, y);
    }
}

template <class C>
NXRT_DEVICE void norm_any(const NormParams& p) {
    NXRT_SHARED C shared[kWarpSize];
    norm_slow<C>(p, shared);
}

// ---- rows in registers: one type, n a multiple of N, at most K vectors of N elements a thread ----

NXRT_DEVICE bool aligned(const void* a) { return reinterpret_cast<uintptr_t>(a) % 16 == 0; }

NXRT_DEVICE bool all_aligned(const NormParams& p) {
    return aligned(p.x) && aligned(p.skip) && aligned(p.skip_bias) && aligned(p.scale) && aligned(p.bias) &&
           aligned(p.gate) && aligned(p.y) && aligned(p.sum);
}

// Vectors of one thread; what is absent stays zero.
template <class T, int N, int K>
struct Vectors {
    Vec<T, N> v[K];

    NXRT_DEVICE void load(const void* base, uint64_t start, const Place& at, unsigned lanes, unsigned count) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const unsigned i = at.lane + k * lanes;
            v[k] = {};
            if (base && i < count) v[k] = load_vec<T, N>(static_cast<const T*>(base) + start + uint64_t(i) * N);
        }
    }
    NXRT_DEVICE void store(void* base, uint64_t start, const Place& at, unsigned lanes, unsigned count) const {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const unsigned i = at.lane + k * lanes;
            if (i < count) store_vec<T, N>(static_cast<T*>(base) + start + uint64_t(i) * N, v[k]);
        }
    }
};

template <class T, int K>
NXRT_DEVICE void norm(const NormParams& p) {
    constexpr int N = 16 / sizeof(T);
    NXRT_SHARED float shared[kWarpSize];
    if (!all_aligned(p)) {
        norm_slow<float>(p, shared);
        return;
    }
    const Place at = place(p);
    const unsigned count = at.live ? p.n / N : 0;
    const uint64_t start = at.row * p.n;
    Vectors<T, N, K> x, scale, bias, gate;
    float values[K][N];
    x.load(p.x, start, at, p.lanes, count);
    auto load_factors = [&] {
        scale.load(p.scale, 0, at, p.lanes, count);
        bias.load(p.bias, 0, at, p.lanes, count);
        gate.load(p.gate, start, at, p.lanes, count);
    };
    // Before the first sum, so that nothing waits twice for memory, where registers allow.
    if (K == 1) load_factors();
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int i = 0; i < N; ++i) values[k][i] = to_float(x.v[k][i]);
    if (p.skip) {
        Vectors<T, N, K> skip, skip_bias;
        skip.load(p.skip, skip_row(p, at.row) * p.n, at, p.lanes, count);
        skip_bias.load(p.skip_bias, 0, at, p.lanes, count);
#pragma unroll
        for (int k = 0; k < K; ++k)
#pragma unroll
            for (int i = 0; i < N; ++i) {
                values[k][i] += to_float(skip.v[k][i]);
                values[k][i] += to_float(skip_bias.v[k][i]);
                x.v[k][i] = from_float<T>(values[k][i]);
            }
    }
    const Statistics<float> s = statistics<float>(p, [&](auto f) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (at.lane + k * p.lanes >= count) continue;
#pragma unroll
            for (int i = 0; i < N; ++i) sum += f(values[k][i]);
        }
        return row_sum(sum, p.lanes, shared);
    });
    write_statistics(p, at, s);
    if (p.sum) x.store(p.sum, start, at, p.lanes, count);
    if (!p.y) return;
    if (K > 1) load_factors();
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float y = (values[k][i] - s.mean) * s.inverse;
            if (p.scale) y *= to_float(scale.v[k][i]);
            y += to_float(bias.v[k][i]);
            if (p.gate) y *= activate(p.activation, to_float(gate.v[k][i]));
            x.v[k][i] = from_float<T>(y);
        }
    x.store(p.y, start, at, p.lanes, count);
}

// ---- Lp norms along any axis: a thread for each column ----

struct LpParams {
    const void* x;  // [outer, n, inner]
    void* y;
    uint64_t columns;  // outer * inner
    uint64_t inner;
    uint64_t n;
    uint32_t kind;
    uint32_t pad;
};

template <class T, class C>
NXRT_DEVICE void lp_columns(const LpParams& p) {
    const uint64_t column = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= p.columns) return;
    const uint64_t start = column / p.inner * p.n * p.inner + column % p.inner;
    const T* x = static_cast<const T*>(p.x) + start;
    T* y = static_cast<T*>(p.y) + start;
    auto wide = [](T x) { return static_cast<C>(x); };
    C norm = 0;
    for (uint64_t i = 0; i < p.n; ++i) {
        const C v = wide(x[i * p.inner]);
        norm += p.kind == kL2 ? v * v : (v < C(0) ? -v : v);
    }
    if (p.kind == kL2) norm = root(norm);
    const C inverse = norm == C(0) ? C(0) : C(1) / norm;
    for (uint64_t i = 0; i < p.n; ++i) y[i * p.inner] = static_cast<T>(wide(x[i * p.inner]) * inverse);
}

NXRT_KERNEL(norm_f32, NormParams, (norm<float, 1>), 512)
NXRT_KERNEL(norm_f16, NormParams, (norm<half, 1>), 512)
NXRT_KERNEL(norm_bf16, NormParams, (norm<bf16, 1>), 512)
NXRT_KERNEL(norm_long_f32, NormParams, (norm<float, 4>), 512)
NXRT_KERNEL(norm_long_f16, NormParams, (norm<half, 4>), 512)
NXRT_KERNEL(norm_long_bf16, NormParams, (norm<bf16, 4>), 512)
NXRT_KERNEL(norm_any, NormParams, (norm_any<float>), 256)
NXRT_KERNEL(norm_f64, NormParams, (norm_any<double>), 256)
NXRT_KERNEL(lp_f32, LpParams, (lp_columns<float, float>), 128)
NXRT_KERNEL(lp_f16, LpParams, (lp_columns<half, float>), 128)
NXRT_KERNEL(lp_bf16, LpParams, (lp_columns<bf16, float>), 128)
NXRT_KERNEL(lp_f64, LpParams, (lp_columns<double, double>), 128)
