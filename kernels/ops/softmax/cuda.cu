// Softmax and LogSoftmax over rows whose elements lie `inner` apart: a row by a thread, a warp or a block.
#include "common.cuh"

using namespace nxrt;

struct SoftmaxParams {
    const void* x;
    void* y;
    uint64_t rows;
    uint64_t n;
    uint64_t inner;
    uint32_t log;
    uint32_t pad;
};

template <class T>
struct Computed {
    using type = float;
    static constexpr float kLowest = -3.402823466e38f;
    static NXRT_DEVICE float load(T x) { return to_float(x); }
    static NXRT_DEVICE T store(float x) { return from_float<T>(x); }
    static NXRT_DEVICE float exponential(float x) { return expf(x); }
    static NXRT_DEVICE float logarithm(float x) { return logf(x); }
};
template <>
struct Computed<double> {
    using type = double;
    static constexpr double kLowest = -1.7976931348623157e308;
    static NXRT_DEVICE double load(double x) { return x; }
    static NXRT_DEVICE double store(double x) { return x; }
    static NXRT_DEVICE double exponential(double x) { return exp(x); }
    static NXRT_DEVICE double logarithm(double x) { return log(x); }
};

enum Scope { kThread, kWarp, kBlock };

// Joins what the threads of a row hold; all of them get it.
template <Scope kScope, class C, class F>
NXRT_DEVICE C join(C x, C* shared32, F f) {
    if constexpr (kScope != kThread) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) x = f(x, __shfl_xor_sync(kFullMask, x, step));
    }
    if constexpr (kScope == kBlock) {
        __syncthreads();
        if (lane_id() == 0) shared32[warp_id()] = x;
        __syncthreads();
        x = shared32[0];
        for (unsigned i = 1; i < warp_count(); ++i) x = f(x, shared32[i]);
    }
    return x;
}

// Three passes; exponentials are computed twice, so that nothing but the row is held anywhere.
template <class T, Scope kScope>
NXRT_DEVICE void softmax(const SoftmaxParams& p) {
    using K = Computed<T>;
    using C = typename K::type;
    NXRT_SHARED C shared[32];
    const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t row = kScope == kThread ? thread : kScope == kWarp ? thread / kWarpSize : blockIdx.x;
    if (row >= p.rows) return;
    const unsigned first = kScope == kThread ? 0 : kScope == kWarp ? lane_id() : threadIdx.x;
    const unsigned step = kScope == kThread ? 1 : kScope == kWarp ? kWarpSize : blockDim.x;
    const uint64_t base = row / p.inner * p.n * p.inner + row % p.inner;
    const T* x = static_cast<const T*>(p.x) + base;
    T* y = static_cast<T*>(p.y) + base;

    C high = K::kLowest;
    for (uint64_t i = first; i < p.n; i += step) high = max(high, K::load(x[i * p.inner]));
    high = join<kScope>(high, shared, [](C a, C b) { return max(a, b); });
    C sum = 0;
    for (uint64_t i = first; i < p.n; i += step) sum += K::exponential(K::load(x[i * p.inner]) - high);
    sum = join<kScope>(sum, shared, [](C a, C b) { return a + b; });
    const C scale = p.log ? K::logarithm(sum) : C(1) / sum;
    for (uint64_t i = first; i < p.n; i += step) {
        const C shifted = K::load(x[i * p.inner]) - high;
        y[i * p.inner] = K::store(p.log ? shifted - scale : K::exponential(shifted) * scale);
    }
}

#define SOFTMAX(type, T)                                                            \
    NXRT_KERNEL(softmax_##type##_thread, SoftmaxParams, (softmax<T, kThread>), 256) \
    NXRT_KERNEL(softmax_##type##_warp, SoftmaxParams, (softmax<T, kWarp>), 256)     \
    NXRT_KERNEL(softmax_##type##_block, SoftmaxParams, (softmax<T, kBlock>), 1024)
SOFTMAX(f32, float)
SOFTMAX(f16, half)
SOFTMAX(bf16, bf16)
SOFTMAX(f64, double)
