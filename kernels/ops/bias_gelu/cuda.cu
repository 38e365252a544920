// Gelu of X plus a bias along its last dim, by erf or by tanh: 16 bytes a thread.
#include "walk.cuh"

using namespace nxrt;

struct GeluParams {
    const void* x;
    const void* bias;  // [n]; null: none
    void* y;
    uint64_t elements;
    uint64_t n;
    uint32_t fast;  // by tanh
    uint32_t pad;
};

NXRT_DEVICE float gelu(float x, bool fast) {
    const float inner = fast ? tanhf(fmaf(0.79788456f, x, 0.03567741f * x * x * x)) : erff(x * 0.70710678f);
    return 0.5f * x * (1.0f + inner);
}

template <class T>
NXRT_DEVICE void bias_gelu(const GeluParams& p) {
    constexpr int N = 16 / sizeof(T);
    const T* x = static_cast<const T*>(p.x);
    const T* bias = static_cast<const T*>(p.bias);
    T* y = static_cast<T*>(p.y);
    const bool wide = (!bias || (p.n % N == 0 && is_aligned(bias, 16))) && is_aligned(x, 16) && is_aligned(y, 16);
    for (uint64_t i = grid_thread() * N; i < p.elements; i += grid_threads() * N) {
        uint64_t column = i;
        if (bias) split_off(column, p.n);
        if (wide && i + N <= p.elements) {
            Vec<T, N> v = load_vec<T, N>(x + i), b = {};
            if (bias) b = load_vec<T, N>(bias + column);
#pragma unroll
            for (int j = 0; j < N; ++j) v[j] = from_float<T>(gelu(to_float(v[j]) + to_float(b[j]), p.fast));
            store_vec<T, N>(y + i, v);
            continue;
        }
        for (uint64_t j = i; j < i + N && j < p.elements; ++j) {
            const float b = bias ? to_float(bias[column]) : 0.0f;
            y[j] = from_float<T>(gelu(to_float(x[j]) + b, p.fast));
            if (bias && ++column == p.n) column = 0;
        }
    }
}

NXRT_KERNEL(bias_gelu_f32, GeluParams, (bias_gelu<float>), 256)
NXRT_KERNEL(bias_gelu_f16, GeluParams, (bias_gelu<half>), 256)
NXRT_KERNEL(bias_gelu_bf16, GeluParams, (bias_gelu<bf16>), 256)
