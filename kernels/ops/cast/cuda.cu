#include "number.cuh"
#include "walk.cuh"

using namespace nxrt;

struct CastParams {
    const void* x;
    void* y;
    uint64_t n;
    uint32_t from;
    uint32_t to;
};

// Between float formats of 32 and 16 bits: what models are full of. 16 bytes of the narrower one a thread.
template <class T, class R>
NXRT_DEVICE void cast_direct(const CastParams& p) {
    constexpr int N = 16 / (sizeof(T) < sizeof(R) ? sizeof(T) : sizeof(R));
    const T* x = static_cast<const T*>(p.x);
    R* y = static_cast<R*>(p.y);
    uint64_t done = 0;
    if (is_aligned(x, 16) && is_aligned(y, 16)) {
        for (uint64_t i = grid_thread(); i < p.n / N; i += grid_threads()) {
            // Wider vectors than 16 bytes need no wider alignment: they are moved 16 bytes at a time.
            constexpr int NT = 16 / sizeof(T), NR = 16 / sizeof(R);
            float wide[N];
#pragma unroll
            for (int k = 0; k < N; k += NT) {
                const Vec<T, NT> part = load_vec<T, NT>(x + i * N + k);
#pragma unroll
                for (int j = 0; j < NT; ++j) wide[k + j] = to_float(part[j]);
            }
#pragma unroll
            for (int k = 0; k < N; k += NR) {
                Vec<R, NR> part;
#pragma unroll
                for (int j = 0; j < NR; ++j) part[j] = from_float<R>(wide[k + j]);
                store_vec<R, NR>(y + i * N + k, part);
            }
        }
        done = p.n / N * N;
    }
    for (uint64_t i = done + grid_thread(); i < p.n; i += grid_threads()) y[i] = from_float<R>(to_float(x[i]));
}

// Any pair, by way of a wide type that holds the input exactly.
NXRT_DEVICE void cast_any_pair(const CastParams& p) {
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        if (p.from <= kF64) {
            store_any<double>(p.to, p.y, i, load_any<double>(p.from, p.x, i));
        } else if (p.from >= kU8) {
            store_any<uint64_t>(p.to, p.y, i, load_any<uint64_t>(p.from, p.x, i));
        } else {
            store_any<int64_t>(p.to, p.y, i, load_any<int64_t>(p.from, p.x, i));
        }
    }
}

NXRT_KERNEL(cast_f32_f16, CastParams, (cast_direct<float, half>), 256)
NXRT_KERNEL(cast_f32_bf16, CastParams, (cast_direct<float, bf16>), 256)
NXRT_KERNEL(cast_f16_f32, CastParams, (cast_direct<half, float>), 256)
NXRT_KERNEL(cast_bf16_f32, CastParams, (cast_direct<bf16, float>), 256)
NXRT_KERNEL(cast_f16_bf16, CastParams, (cast_direct<half, bf16>), 256)
NXRT_KERNEL(cast_bf16_f16, CastParams, (cast_direct<bf16, half>), 256)
NXRT_KERNEL(cast_any, CastParams, cast_any_pair, 256)
