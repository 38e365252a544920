#include "arithmetic.cuh"
#include "walk.cuh"

using namespace nxrt;

// `cuda.rs` has the same codes.
enum UnaryCode : uint32_t {
    kNeg, kAbs, kSign, kRelu, kBitwiseNot, kClip,  // all numbers
    kSqrt, kReciprocal, kFloor, kCeil, kRound, kExp, kLog, kErf, kTanh, kSigmoid, kSoftplus, kSoftsign, kHardSigmoid,
    kHardSwish, kLeakyRelu, kThresholdedRelu, kSwish, kErfGelu, kTanhGelu,  // floats
    kRare,  // and those of `rare`
    kSin = kRare, kCos, kTan, kAsin, kAcos, kAtan, kSinh, kCosh, kAsinh, kAcosh, kAtanh, kElu, kSelu, kCelu, kMish,
    kIsNan, kIsInf, kNot,  // to bool
};

struct UnaryParams {
    const void* x;
    const void* low;  // null: none
    const void* high;
    void* y;
    uint64_t n;
    double p[2];
    float q[2];  // p, rounded
    uint32_t op;
    uint32_t bounds;  // whether `low` and `high` take the place of p
};

template <class C>
NXRT_DEVICE C sigmoid(C x) {
    return C(1) / (C(1) + std::exp(-x));
}

// ln(1 + e^x) without overflow.
template <class C>
NXRT_DEVICE C softplus(C x) {
    const C linear = x > C(0) || x != x ? x : C(0);
    return linear + std::log1p(std::exp(-absolute(x)));
}

template <class C>
NXRT_DEVICE C hard_sigmoid(C x, const C (&p)[2]) {
    return smaller(larger(x * p[0] + p[1], C(0)), C(1));
}

// Functions that are worth no vector loop.
template <class C>
NXRT_DEVICE C rare(uint32_t op, C x, const C (&p)[2]) {
    switch (op) {
        case kSin: return std::sin(x);
        case kCos: return std::cos(x);
        case kTan: return std::tan(x);
        case kAsin: return std::asin(x);
        case kAcos: return std::acos(x);
        case kAtan: return std::atan(x);
        case kSinh: return std::sinh(x);
        case kCosh: return std::cosh(x);
        case kAsinh: return std::asinh(x);
        case kAcosh: return std::acosh(x);
        case kAtanh: return std::atanh(x);
        case kElu: return x < C(0) ? p[0] * std::expm1(x) : x;
        case kSelu: return p[1] * (x > C(0) ? x : p[0] * std::expm1(x));
        case kCelu: return larger(x, C(0)) + smaller(p[0] * std::expm1(x / p[0]), C(0));
        default: return x * std::tanh(softplus(x));
    }
}

// y[i] = op(x[i]): the switch lies outside of the loop.
template <class T, int N>
NXRT_DEVICE void apply(uint32_t op, const Vec<T, N>& x, Vec<T, N>& y, const Computed<T> (&p)[2]) {
    using C = Computed<T>;
    auto each = [&](auto f) {
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = stored<T>(f(computed(x[i])));
    };
    const C p0 = p[0], p1 = p[1];
    switch (op) {
        case kNeg: return each([](C x) { return neg(x); });
        case kAbs: return each([](C x) { return absolute(x); });
        case kSign: return each([](C x) { return sign(x); });
        case kRelu: return each([](C x) { return larger(x, C(0)); });
        case kClip: return each([=](C x) { return smaller(larger(x, p0), p1); });
    }
    if constexpr (std::is_floating_point<C>::value) {
        switch (op) {
            case kSqrt: return each([](C x) { return std::sqrt(x); });
            case kReciprocal: return each([](C x) { return C(1) / x; });
            case kFloor: return each([](C x) { return std::floor(x); });
            case kCeil: return each([](C x) { return std::ceil(x); });
            case kRound: return each([](C x) { return std::rint(x); });
            case kExp: return each([](C x) { return std::exp(x); });
            case kLog: return each([](C x) { return std::log(x); });
            case kErf: return each([](C x) { return std::erf(x); });
            case kTanh: return each([](C x) { return std::tanh(x); });
            case kSigmoid: return each([](C x) { return sigmoid(x); });
            case kSoftplus: return each([](C x) { return softplus(x); });
            case kSoftsign: return each([](C x) { return x / (C(1) + absolute(x)); });
            case kHardSigmoid: return each([&](C x) { return hard_sigmoid(x, p); });
            case kHardSwish: return each([&](C x) { return x * hard_sigmoid(x, p); });
            case kLeakyRelu: return each([=](C x) { return x < C(0) ? x * p0 : x; });
            case kThresholdedRelu: return each([=](C x) { return x > p0 ? x : C(0); });
            case kSwish: return each([=](C x) { return x * sigmoid(x * p0); });
            case kErfGelu: return each([=](C x) { return p1 * x * (C(1) + std::erf(x * p0)); });
            // 1/2 (1 + tanh u) is sigmoid(2 u).
            case kTanhGelu: return each([=](C x) { return x * sigmoid(p0 * (x + p1 * x * x * x)); });
        }
    } else if (op == kBitwiseNot) {
        each([](C x) { return static_cast<C>(~x); });
    }
}

template <class T>
NXRT_DEVICE void parameters(const UnaryParams& u, Computed<T> (&p)[2]) {
    using C = Computed<T>;
    if (u.bounds) {
        p[0] = u.low ? computed(*static_cast<const T*>(u.low)) : lowest<C>();
        p[1] = u.high ? computed(*static_cast<const T*>(u.high)) : highest<C>();
    } else if constexpr (std::is_same<C, double>::value) {
        p[0] = u.p[0], p[1] = u.p[1];
    } else if constexpr (std::is_same<C, float>::value) {
        p[0] = u.q[0], p[1] = u.q[1];
    } else {
        p[0] = p[1] = C(0);
    }
}

// 16 bytes a thread.
template <class T>
NXRT_DEVICE void unary(const UnaryParams& u) {
    constexpr int N = 16 / sizeof(T);
    const T* x = static_cast<const T*>(u.x);
    T* y = static_cast<T*>(u.y);
    Computed<T> p[2];
    parameters<T>(u, p);
    uint64_t done = 0;
    if (is_aligned(x, 16) && is_aligned(y, 16)) {
        for (uint64_t i = grid_thread(); i < u.n / N; i += grid_threads()) {
            Vec<T, N> out;
            apply<T, N>(u.op, load_vec<T, N>(x + i * N), out, p);
            store_vec<T, N>(y + i * N, out);
        }
        done = u.n / N * N;
    }
    for (uint64_t i = done + grid_thread(); i < u.n; i += grid_threads()) {
        Vec<T, 1> out;
        apply<T, 1>(u.op, Vec<T, 1>{{x[i]}}, out, p);
        y[i] = out[0];
    }
}

template <class T>
NXRT_DEVICE void unary_rare(const UnaryParams& u) {
    const T* x = static_cast<const T*>(u.x);
    T* y = static_cast<T*>(u.y);
    Computed<T> p[2];
    parameters<T>(u, p);
    for (uint64_t i = grid_thread(); i < u.n; i += grid_threads()) y[i] = stored<T>(rare(u.op, computed(x[i]), p));
}

// IsNaN, and IsInf of the signs whose `p` is not 0.
template <class T>
NXRT_DEVICE void is_special(const UnaryParams& u) {
    using C = Computed<T>;
    const T* x = static_cast<const T*>(u.x);
    uint8_t* y = static_cast<uint8_t*>(u.y);
    for (uint64_t i = grid_thread(); i < u.n; i += grid_threads()) {
        const C v = computed(x[i]);
        const bool infinite = (v == lowest<C>() && u.q[0] != 0.0f) || (v == highest<C>() && u.q[1] != 0.0f);
        y[i] = u.op == kIsNan ? v != v : infinite;
    }
}

NXRT_DEVICE void not_of_each(const UnaryParams& u) {
    const uint8_t* x = static_cast<const uint8_t*>(u.x);
    uint8_t* y = static_cast<uint8_t*>(u.y);
    for (uint64_t i = grid_thread(); i < u.n; i += grid_threads()) y[i] = x[i] == 0;
}

#define NXRT_UNARY_REAL(suffix, T)                                             \
    NXRT_KERNEL(unary_##suffix, UnaryParams, (unary<T>), 256)                  \
    NXRT_KERNEL(unary_rare_##suffix, UnaryParams, (unary_rare<T>), 256)        \
    NXRT_KERNEL(is_special_##suffix, UnaryParams, (is_special<T>), 256)

NXRT_UNARY_REAL(f32, float)
NXRT_UNARY_REAL(f16, half)
NXRT_UNARY_REAL(bf16, bf16)
NXRT_UNARY_REAL(f64, double)
NXRT_KERNEL(unary_i8, UnaryParams, (unary<int8_t>), 256)
NXRT_KERNEL(unary_i16, UnaryParams, (unary<int16_t>), 256)
NXRT_KERNEL(unary_i32, UnaryParams, (unary<int32_t>), 256)
NXRT_KERNEL(unary_i64, UnaryParams, (unary<int64_t>), 256)
NXRT_KERNEL(unary_u8, UnaryParams, (unary<uint8_t>), 256)
NXRT_KERNEL(unary_u16, UnaryParams, (unary<uint16_t>), 256)
NXRT_KERNEL(unary_u32, UnaryParams, (unary<uint32_t>), 256)
NXRT_KERNEL(unary_u64, UnaryParams, (unary<uint64_t>), 256)
NXRT_KERNEL(logical_not, UnaryParams, not_of_each, 256)
