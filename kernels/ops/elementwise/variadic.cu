#include "arithmetic.cuh"
#include "walk.cuh"

using namespace nxrt;

constexpr int kMost = 16;

// `cuda.rs` has the same codes.
enum VariadicCode : uint32_t { kMax, kMin, kSum, kMean };

struct VariadicParams {
    const void* inputs[kMost];
    void* y;
    uint64_t n;
    Walk<kMost> walk;
    uint32_t count;
    uint32_t op;
};

// A left fold over the inputs, rounded once.
template <class T>
NXRT_DEVICE void variadic(const VariadicParams& p) {
    using C = Computed<T>;
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        C acc = C(0);
        for (uint32_t k = 0; k < p.count; ++k) {
            uint64_t rest = i;
            int64_t at = 0;
            for (uint32_t d = p.walk.rank - 1; d > 0; --d) {
                const uint64_t q = divide(rest, p.walk.dims[d]);
                at += static_cast<int64_t>(rest - q * p.walk.dims[d]) * p.walk.strides[k][d];
                rest = q;
            }
            at += static_cast<int64_t>(rest) * p.walk.strides[k][0];
            const C x = computed(static_cast<const T*>(p.inputs[k])[at]);
            if (k == 0) {
                acc = x;
            } else {
                acc = p.op == kMax ? larger(acc, x) : p.op == kMin ? smaller(acc, x) : add(acc, x);
            }
        }
        if (p.op == kMean) acc = divided(acc, static_cast<C>(p.count));
        static_cast<T*>(p.y)[i] = stored<T>(acc);
    }
}

NXRT_KERNEL(variadic_f32, VariadicParams, (variadic<float>), 256)
NXRT_KERNEL(variadic_f16, VariadicParams, (variadic<half>), 256)
NXRT_KERNEL(variadic_bf16, VariadicParams, (variadic<bf16>), 256)
NXRT_KERNEL(variadic_f64, VariadicParams, (variadic<double>), 256)
NXRT_KERNEL(variadic_i8, VariadicParams, (variadic<int8_t>), 256)
NXRT_KERNEL(variadic_i16, VariadicParams, (variadic<int16_t>), 256)
NXRT_KERNEL(variadic_i32, VariadicParams, (variadic<int32_t>), 256)
NXRT_KERNEL(variadic_i64, VariadicParams, (variadic<int64_t>), 256)
NXRT_KERNEL(variadic_u8, VariadicParams, (variadic<uint8_t>), 256)
NXRT_KERNEL(variadic_u16, VariadicParams, (variadic<uint16_t>), 256)
NXRT_KERNEL(variadic_u32, VariadicParams, (variadic<uint32_t>), 256)
NXRT_KERNEL(variadic_u64, VariadicParams, (variadic<uint64_t>), 256)
