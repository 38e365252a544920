// Arithmetic on the types of computation, as kernels/cpu/arithmetic.rs does it: integers wrap, NaN wins, and the
// remainder may follow either sign. Integer division by zero gives 0 (the CPU reports an error).
#pragma once

#include "number.cuh"

namespace nxrt {

namespace detail {
// Wide enough that products of narrow unsigned types are not promoted to a signed type that overflows.
template <class C>
using Wrapping = typename std::conditional<sizeof(C) == 8, uint64_t, uint32_t>::type;
template <class C>
constexpr bool kReal = std::is_floating_point<C>::value;
}  // namespace detail

template <class C>
NXRT_DEVICE bool is_negative(C a) {
    if constexpr (std::is_unsigned<C>::value) return false;
    else return a < C(0);
}
template <class C>
NXRT_DEVICE C add(C a, C b) {
    if constexpr (detail::kReal<C>) return a + b;
    else return static_cast<C>(detail::Wrapping<C>(a) + detail::Wrapping<C>(b));
}
template <class C>
NXRT_DEVICE C sub(C a, C b) {
    if constexpr (detail::kReal<C>) return a - b;
    else return static_cast<C>(detail::Wrapping<C>(a) - detail::Wrapping<C>(b));
}
template <class C>
NXRT_DEVICE C mul(C a, C b) {
    if constexpr (detail::kReal<C>) return a * b;
    else return static_cast<C>(detail::Wrapping<C>(a) * detail::Wrapping<C>(b));
}
template <class C>
NXRT_DEVICE C neg(C a) {
    if constexpr (detail::kReal<C>) return -a;
    else return static_cast<C>(detail::Wrapping<C>(0) - detail::Wrapping<C>(a));
}
template <class C>
NXRT_DEVICE C divided(C a, C b) {
    if constexpr (detail::kReal<C>) {
        return a / b;
    } else {
        if (b == C(0)) return C(0);
        // The lowest number has no positive counterpart: it stays.
        if (std::is_signed<C>::value && b == static_cast<C>(-1)) return neg(a);
        return static_cast<C>(a / b);
    }
}
// The remainder with the dividend's sign.
template <class C>
NXRT_DEVICE C rem(C a, C b) {
    if constexpr (std::is_same<C, float>::value) {
        return fmodf(a, b);
    } else if constexpr (std::is_same<C, double>::value) {
        return fmod(a, b);
    } else {
        if (b == C(0) || (std::is_signed<C>::value && b == static_cast<C>(-1))) return C(0);
        return static_cast<C>(a % b);
    }
}
// The remainder with the divisor's sign.
template <class C>
NXRT_DEVICE C modulo(C a, C b) {
    const C r = rem(a, b);
    if constexpr (std::is_unsigned<C>::value) return r;
    else return r != C(0) && is_negative(r) != is_negative(b) ? add(r, b) : r;
}
template <class C>
NXRT_DEVICE C absolute(C a) {
    if constexpr (std::is_same<C, float>::value) return fabsf(a);
    else if constexpr (std::is_same<C, double>::value) return fabs(a);
    else if constexpr (std::is_unsigned<C>::value) return a;
    else return is_negative(a) ? neg(a) : a;
}
// -1, 0 or 1; zero and NaN stay.
template <class C>
NXRT_DEVICE C sign(C a) {
    if constexpr (std::is_unsigned<C>::value) return a > C(0) ? C(1) : a;
    else return a > C(0) ? C(1) : a < C(0) ? static_cast<C>(-1) : a;
}
// The larger; NaN when either is.
template <class C>
NXRT_DEVICE C larger(C a, C b) {
    return a > b || a != a ? a : b;
}
template <class C>
NXRT_DEVICE C smaller(C a, C b) {
    return a < b || a != a ? a : b;
}
template <class C>
NXRT_DEVICE C lowest() {
    if constexpr (std::is_same<C, float>::value) return __int_as_float(static_cast<int>(0xff800000u));
    else if constexpr (std::is_same<C, double>::value) return __longlong_as_double(static_cast<long long>(0xfff0000000000000ull));
    else if constexpr (std::is_unsigned<C>::value) return C(0);
    else return static_cast<C>(C(1) << (8 * sizeof(C) - 1));
}
template <class C>
NXRT_DEVICE C highest() {
    if constexpr (detail::kReal<C>) return -lowest<C>();
    else return static_cast<C>(~lowest<C>());
}
// 0 when `by` is as wide as the type.
template <class C>
NXRT_DEVICE C shift_left(C a, C by) {
    constexpr C kBits = 8 * sizeof(C);
    return !is_negative(by) && by < kBits ? static_cast<C>(detail::Wrapping<C>(a) << by) : C(0);
}
// As shift_left; keeps the sign.
template <class C>
NXRT_DEVICE C shift_right(C a, C by) {
    constexpr C kBits = 8 * sizeof(C);
    if (!is_negative(by) && by < kBits) return static_cast<C>(a >> by);
    return is_negative(a) ? static_cast<C>(-1) : C(0);
}
// For a whole, non-negative exponent: exact (wrapping) for integers, cheap for small exponents of floats.
template <class C>
NXRT_DEVICE C power_of_whole(C base, uint64_t exponent) {
    C result = C(1);
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result = mul(result, base);
        base = mul(base, base);
    }
    return result;
}

}  // namespace nxrt
