// Pairs of 16-bit floats in a word.
#pragma once

#include "common.cuh"

namespace nxrt {

template <class T>
struct Pair;

template <>
struct Pair<half> {
    using Type = __half2;
    static NXRT_DEVICE float2 floats(uint32_t x) { return __half22float2(reinterpret_cast<const __half2&>(x)); }
    static NXRT_DEVICE __half2 from_floats(float a, float b) { return __floats2half2_rn(a, b); }
};

template <>
struct Pair<bf16> {
    using Type = __nv_bfloat162;
    static NXRT_DEVICE float2 floats(uint32_t x) {
        return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
    }
    static NXRT_DEVICE __nv_bfloat162 from_floats(float a, float b) { return __floats2bfloat162_rn(a, b); }
};

template <class P>
NXRT_DEVICE uint32_t as_word(P pair) {
    static_assert(sizeof(P) == 4, "a pair of 16-bit floats");
    return reinterpret_cast<const uint32_t&>(pair);
}

}  // namespace nxrt
