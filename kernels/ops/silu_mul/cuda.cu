#include "common.cuh"

using namespace nxrt;

struct SiluMulParams {
    const void* x;
    const void* gate;  // null: none
    void* y;
    uint64_t n;
};

// 16 bytes a thread.
template <class T>
NXRT_DEVICE void silu_mul(const SiluMulParams& p) {
    constexpr int N = 16 / sizeof(T);
    const T* x = static_cast<const T*>(p.x);
    const T* gate = static_cast<const T*>(p.gate);
    T* y = static_cast<T*>(p.y);
    const uint64_t first = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    auto one = [](T x, float gate) {
        const float v = to_float(x);
        return from_float<T>(v / (1.0f + __expf(-v)) * gate);
    };
    const bool aligned = ((reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(gate) | reinterpret_cast<uintptr_t>(y)) % 16) == 0;
    if (aligned && first + N <= p.n) {
        const Vec<T, N> a = load_vec<T, N>(x + first);
        Vec<T, N> g = {}, out;
        if (gate) g = load_vec<T, N>(gate + first);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = one(a[i], gate ? to_float(g[i]) : 1.0f);
        store_vec<T, N>(y + first, out);
        return;
    }
    for (uint64_t i = first; i < first + N && i < p.n; ++i) y[i] = one(x[i], gate ? to_float(gate[i]) : 1.0f);
}

NXRT_KERNEL(silu_mul_f32, SiluMulParams, (silu_mul<float>), 256)
NXRT_KERNEL(silu_mul_f16, SiluMulParams, (silu_mul<half>), 256)
NXRT_KERNEL(silu_mul_bf16, SiluMulParams, (silu_mul<bf16>), 256)
