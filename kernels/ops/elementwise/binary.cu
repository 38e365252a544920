#include "arithmetic.cuh"
#include "broadcast.cuh"

using namespace nxrt;

// `cuda.rs` has the same codes.
enum BinaryCode : uint32_t {
    kAdd, kSub, kMul, kDiv, kModulo, kRem, kMax, kMin, kPRelu, kSwiGlu,
    kAnd, kOr, kXor, kShiftLeft, kShiftRight,
    kEqual, kLess, kLessOrEqual, kGreater, kGreaterOrEqual,
};

struct BinaryParams {
    const void* a;
    const void* b;
    void* y;
    uint64_t n;
    Walk<2> walk;
    uint32_t op;
    uint32_t vector;
    float alpha;  // of SwiGLU
    uint32_t pad;
};

template <class T, class R, int N>
struct Block {
    const Vec<T, N>& a;
    const Vec<T, N>& b;
    Vec<R, N>& y;

    template <class F>
    NXRT_DEVICE void each(F f) const {
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = stored<R>(f(computed(a[i]), computed(b[i])));
    }
};

template <class C>
NXRT_DEVICE C swiglu(C a, C b, C alpha) {
    if constexpr (std::is_same<C, float>::value) return a / (1.0f + expf(-alpha * a)) * b;
    else return a / (1.0 + exp(-alpha * a)) * b;
}

// Functions that keep the type.
struct Keeping {
    template <class T>
    using Result = T;

    template <class T, int N>
    static NXRT_DEVICE void apply(const BinaryParams& p, const Vec<T, N>& a, const Vec<T, N>& b, Vec<T, N>& y) {
        using C = Computed<T>;
        const Block<T, T, N> block{a, b, y};
        switch (p.op) {
            case kAdd: return block.each([](C a, C b) { return add(a, b); });
            case kSub: return block.each([](C a, C b) { return sub(a, b); });
            case kMul: return block.each([](C a, C b) { return mul(a, b); });
            case kDiv: return block.each([](C a, C b) { return divided(a, b); });
            case kModulo: return block.each([](C a, C b) { return modulo(a, b); });
            case kRem: return block.each([](C a, C b) { return rem(a, b); });
            case kMax: return block.each([](C a, C b) { return larger(a, b); });
            case kMin: return block.each([](C a, C b) { return smaller(a, b); });
            case kPRelu: return block.each([](C a, C b) { return is_negative(a) ? mul(a, b) : a; });
        }
        if constexpr (std::is_floating_point<C>::value) {
            const C alpha = p.alpha;
            if (p.op == kSwiGlu) block.each([=](C a, C b) { return swiglu(a, b, alpha); });
        } else {
            switch (p.op) {
                case kAnd: return block.each([](C a, C b) { return static_cast<C>(a & b); });
                case kOr: return block.each([](C a, C b) { return static_cast<C>(a | b); });
                case kXor: return block.each([](C a, C b) { return static_cast<C>(a ^ b); });
                case kShiftLeft: return block.each([](C a, C b) { return shift_left(a, b); });
                case kShiftRight: return block.each([](C a, C b) { return shift_right(a, b); });
            }
        }
    }
};

// Comparisons.
struct Comparing {
    template <class T>
    using Result = uint8_t;

    template <class T, int N>
    static NXRT_DEVICE void apply(const BinaryParams& p, const Vec<T, N>& a, const Vec<T, N>& b, Vec<uint8_t, N>& y) {
        using C = Computed<T>;
        const Block<T, uint8_t, N> block{a, b, y};
        switch (p.op) {
            case kEqual: return block.each([](C a, C b) { return static_cast<uint8_t>(a == b); });
            case kLess: return block.each([](C a, C b) { return static_cast<uint8_t>(a < b); });
            case kLessOrEqual: return block.each([](C a, C b) { return static_cast<uint8_t>(a <= b); });
            case kGreater: return block.each([](C a, C b) { return static_cast<uint8_t>(a > b); });
            case kGreaterOrEqual: return block.each([](C a, C b) { return static_cast<uint8_t>(a >= b); });
        }
    }
};

// Functions of truth values, which are bytes of 0 or not.
struct Logic {
    template <class T>
    using Result = uint8_t;

    template <class T, int N>
    static NXRT_DEVICE void apply(const BinaryParams& p, const Vec<T, N>& a, const Vec<T, N>& b, Vec<uint8_t, N>& y) {
        const Block<T, uint8_t, N> block{a, b, y};
        switch (p.op) {
            case kAnd: return block.each([](T a, T b) { return static_cast<uint8_t>(a != 0 && b != 0); });
            case kOr: return block.each([](T a, T b) { return static_cast<uint8_t>(a != 0 || b != 0); });
            case kXor: return block.each([](T a, T b) { return static_cast<uint8_t>((a != 0) != (b != 0)); });
        }
    }
};

template <class T, class Op>
NXRT_DEVICE void binary(const BinaryParams& p) {
    using R = typename Op::template Result<T>;
    constexpr int N = 16 / sizeof(T);
    const T* a = static_cast<const T*>(p.a);
    const T* b = static_cast<const T*>(p.b);
    R* y = static_cast<R*>(p.y);
    const int64_t step_a = p.walk.strides[0][p.walk.rank - 1], step_b = p.walk.strides[1][p.walk.rank - 1];
    const bool wide = p.vector && fits(p.walk, 0, a, 16) && fits(p.walk, 1, b, 16) && is_aligned(y, N * sizeof(R));
    for_each_unit<N>(
        p.walk, p.n, wide,
        [&](uint64_t first, const int64_t(&at)[2]) {
            Vec<R, N> out;
            Op::apply(p, fetch<T, N>(a + at[0], step_a), fetch<T, N>(b + at[1], step_b), out);
            store_vec<R, N>(y + first, out);
        },
        [&](uint64_t i, const int64_t(&at)[2]) {
            Vec<R, 1> out;
            Op::apply(p, Vec<T, 1>{{a[at[0]]}}, Vec<T, 1>{{b[at[1]]}}, out);
            y[i] = out[0];
        });
}

#define NXRT_BINARY(suffix, T)                                                    \
    NXRT_KERNEL(binary_##suffix, BinaryParams, (binary<T, Keeping>), 256)         \
    NXRT_KERNEL(compare_##suffix, BinaryParams, (binary<T, Comparing>), 256)

NXRT_BINARY(f32, float)
NXRT_BINARY(f16, half)
NXRT_BINARY(bf16, bf16)
NXRT_BINARY(f64, double)
NXRT_BINARY(i8, int8_t)
NXRT_BINARY(i16, int16_t)
NXRT_BINARY(i32, int32_t)
NXRT_BINARY(i64, int64_t)
NXRT_BINARY(u8, uint8_t)
NXRT_BINARY(u16, uint16_t)
NXRT_BINARY(u32, uint32_t)
NXRT_BINARY(u64, uint64_t)
NXRT_KERNEL(logic, BinaryParams, (binary<uint8_t, Logic>), 256)
