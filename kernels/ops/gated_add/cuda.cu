// X + round(Y gate) over [rows, n], a gate a row: 16 bytes a thread.
#include "walk.cuh"

using namespace nxrt;

struct GatedAddParams {
    const void* x;
    const void* y;
    const void* gate;  // [rows]
    void* out;
    uint64_t elements;
    uint64_t n;
};

template <class T>
NXRT_DEVICE void gated_add(const GatedAddParams& p) {
    constexpr int N = 16 / sizeof(T);
    const T* x = static_cast<const T*>(p.x);
    const T* y = static_cast<const T*>(p.y);
    const T* gate = static_cast<const T*>(p.gate);
    T* out = static_cast<T*>(p.out);
    auto one = [](T x, T y, float gate) {
        return from_float<T>(to_float(x) + to_float(from_float<T>(to_float(y) * gate)));
    };
    // Rows of whole vectors, so that a vector has one gate.
    const bool wide = p.n % N == 0 && is_aligned(x, 16) && is_aligned(y, 16) && is_aligned(out, 16);
    for (uint64_t i = grid_thread() * N; i < p.elements; i += grid_threads() * N) {
        if (!wide) {
            for (uint64_t j = i; j < i + N && j < p.elements; ++j) out[j] = one(x[j], y[j], to_float(gate[divide(j, p.n)]));
            continue;
        }
        const Vec<T, N> a = load_vec<T, N>(x + i), b = load_vec<T, N>(y + i);
        const float factor = to_float(gate[divide(i, p.n)]);
        Vec<T, N> sum;
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = one(a[j], b[j], factor);
        store_vec<T, N>(out + i, sum);
    }
}

NXRT_KERNEL(gated_add_f32, GatedAddParams, (gated_add<float>), 256)
NXRT_KERNEL(gated_add_f16, GatedAddParams, (gated_add<half>), 256)
NXRT_KERNEL(gated_add_bf16, GatedAddParams, (gated_add<bf16>), 256)
