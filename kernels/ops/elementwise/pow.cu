#include "arithmetic.cuh"
#include "walk.cuh"

using namespace nxrt;

struct PowParams {
    const void* x;
    const void* y;
    void* out;
    uint64_t n;
    Walk<2> walk;
    uint32_t exponent;  // y's type
    uint32_t pad;
};

// Whole exponents are exact for integer bases and cheap for small ones.
template <class C, class E>
NXRT_DEVICE C power(C x, E y) {
    if constexpr (std::is_floating_point<C>::value) {
        if (y == E(1)) return x;
        if (y == E(2)) return x * x;
        if (y == E(3)) return x * x * x;
        return std::pow(x, y);
    } else {
        if (y >= 0.0 && y == trunc(y) && y < 9e15) return power_of_whole(x, static_cast<uint64_t>(y));
        const double r = std::pow(static_cast<double>(x), y);
        // NaN becomes 0, and what does not fit saturates.
        if (!(r == r)) return C(0);
        if (r >= static_cast<double>(highest<C>())) return highest<C>();
        return r <= static_cast<double>(lowest<C>()) ? lowest<C>() : static_cast<C>(r);
    }
}

template <class T>
NXRT_DEVICE void pow_of(const PowParams& p) {
    using C = Computed<T>;
    // What a float's exponent loses by rounding to float, its power does not show.
    using E = typename std::conditional<std::is_same<C, float>::value, float, double>::type;
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        int64_t at[2];
        locate(p.walk, i, at);
        const C x = computed(static_cast<const T*>(p.x)[at[0]]);
        static_cast<T*>(p.out)[i] = stored<T>(power<C, E>(x, load_any<E>(p.exponent, p.y, at[1])));
    }
}

NXRT_KERNEL(pow_f32, PowParams, (pow_of<float>), 256)
NXRT_KERNEL(pow_f16, PowParams, (pow_of<half>), 256)
NXRT_KERNEL(pow_bf16, PowParams, (pow_of<bf16>), 256)
NXRT_KERNEL(pow_f64, PowParams, (pow_of<double>), 256)
NXRT_KERNEL(pow_i32, PowParams, (pow_of<int32_t>), 256)
NXRT_KERNEL(pow_i64, PowParams, (pow_of<int64_t>), 256)
