// Every number format that ONNX ops hold, the type each is computed in, and conversions as the CPU kernels do them.
#pragma once

#include <type_traits>

#include "common.cuh"

namespace nxrt {

// An ONNX bool: one byte, 0 or not.
struct Bool {
    uint8_t v;
};

// The types in parameters; `number.rs` has the same codes.
enum DTypeCode : uint32_t { kF32, kF16, kBF16, kF64, kI8, kI16, kI32, kI64, kU8, kU16, kU32, kU64, kBool };

template <class T>
constexpr bool kIsHalf = std::is_same<T, half>::value || std::is_same<T, bf16>::value;

// float for the half floats, T itself otherwise.
template <class T>
using Computed = typename std::conditional<kIsHalf<T>, float, T>::type;

// To the type of the computation; exact.
template <class T>
NXRT_DEVICE Computed<T> computed(T x) {
    if constexpr (kIsHalf<T>) {
        return to_float(x);
    } else {
        return x;
    }
}

// From the type of the computation; rounds to nearest even.
template <class T>
NXRT_DEVICE T stored(Computed<T> x) {
    if constexpr (kIsHalf<T>) {
        return from_float<T>(x);
    } else {
        return x;
    }
}

constexpr double kTwo63 = 9223372036854775808.0;

// A float that does not fit becomes the lowest i32 or i64, as x86's conversions make it.
NXRT_DEVICE int32_t narrow_i32(double x) {
    // Truncation brings everything above -2^31 - 1 in.
    return x > -2147483649.0 && x < 2147483648.0 ? static_cast<int32_t>(x) : INT32_MIN;
}
NXRT_DEVICE int64_t narrow_i64(double x) { return x >= -kTwo63 && x < kTwo63 ? static_cast<int64_t>(x) : INT64_MIN; }
NXRT_DEVICE uint64_t narrow_u64(double x) {
    if (x >= kTwo63) return static_cast<uint64_t>(narrow_i64(x - kTwo63)) ^ (uint64_t{1} << 63);
    return static_cast<uint64_t>(narrow_i64(x));
}

// From a wide type (float, double, int64_t, uint64_t): floats round to nearest even, integers keep the low bits.
template <class T, class W>
NXRT_DEVICE T narrow(W x) {
    if constexpr (std::is_same<T, Bool>::value) {
        return Bool{static_cast<uint8_t>(x != W(0))};
    } else if constexpr (kIsHalf<T>) {
        return from_float<T>(static_cast<float>(x));
    } else if constexpr (std::is_floating_point<T>::value || !std::is_floating_point<W>::value) {
        return static_cast<T>(x);
    } else if constexpr (std::is_same<T, int64_t>::value) {
        return narrow_i64(x);
    } else if constexpr (std::is_same<T, uint64_t>::value) {
        return narrow_u64(x);
    } else if constexpr (std::is_same<T, uint32_t>::value) {
        return static_cast<T>(narrow_i64(x));
    } else {
        return static_cast<T>(narrow_i32(x));
    }
}

// To a wide type that holds every number of T.
template <class W, class T>
NXRT_DEVICE W widen(T x) {
    if constexpr (std::is_same<T, Bool>::value) {
        return x.v != 0 ? W(1) : W(0);
    } else if constexpr (kIsHalf<T>) {
        return static_cast<W>(to_float(x));
    } else {
        return static_cast<W>(x);
    }
}

// Calls f with a null pointer of the type that `code` names: the type in run-time (block-uniform) form.
template <class F>
NXRT_DEVICE void with_integer(uint32_t code, F f) {
    switch (code) {
        case kI8: return f(static_cast<int8_t*>(nullptr));
        case kI16: return f(static_cast<int16_t*>(nullptr));
        case kI32: return f(static_cast<int32_t*>(nullptr));
        case kI64: return f(static_cast<int64_t*>(nullptr));
        case kU8: return f(static_cast<uint8_t*>(nullptr));
        case kU16: return f(static_cast<uint16_t*>(nullptr));
        case kU32: return f(static_cast<uint32_t*>(nullptr));
        case kU64: return f(static_cast<uint64_t*>(nullptr));
        case kBool: return f(static_cast<Bool*>(nullptr));
    }
}
template <class F>
NXRT_DEVICE void with_real(uint32_t code, F f) {
    switch (code) {
        case kF32: return f(static_cast<float*>(nullptr));
        case kF16: return f(static_cast<half*>(nullptr));
        case kBF16: return f(static_cast<bf16*>(nullptr));
        case kF64: return f(static_cast<double*>(nullptr));
    }
}

// Element i of a tensor of run-time type as a wide number; integer W take no floats.
template <class W>
NXRT_DEVICE W load_any(uint32_t code, const void* p, uint64_t i) {
    W r = W(0);
    auto read = [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        r = widen<W>(static_cast<const T*>(p)[i]);
    };
    if constexpr (std::is_floating_point<W>::value) {
        if (code <= kF64) {
            with_real(code, read);
            return r;
        }
    }
    with_integer(code, read);
    return r;
}

template <class W>
NXRT_DEVICE void store_any(uint32_t code, void* p, uint64_t i, W x) {
    auto write = [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        static_cast<T*>(p)[i] = narrow<T>(x);
    };
    if (code <= kF64) {
        with_real(code, write);
    } else {
        with_integer(code, write);
    }
}

// An index tensor's element i (int32 or int64).
NXRT_DEVICE int64_t load_index(uint32_t code, const void* p, uint64_t i) {
    return code == kI32 ? static_cast<const int32_t*>(p)[i] : static_cast<const int64_t*>(p)[i];
}

// A number of the same order as element i; NaN is above all, and the zeros are equal.
NXRT_DEVICE uint64_t order_key(uint32_t code, const void* p, uint64_t i) {
    constexpr uint64_t kTop = uint64_t{1} << 63;
    if (code == kF64) {
        const double x = static_cast<const double*>(p)[i] + 0.0;
        if (x != x) return ~uint64_t{0};
        const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(x));
        return bits & kTop ? ~bits : bits | kTop;
    }
    if (code <= kBF16) {
        const float x = load_any<float>(code, p, i) + 0.0f;
        if (x != x) return ~uint64_t{0};
        const uint32_t bits = __float_as_uint(x);
        return bits >> 31 ? ~bits : bits | 0x80000000u;
    }
    if (code >= kU8) return load_any<uint64_t>(code, p, i);
    return static_cast<uint64_t>(load_any<int64_t>(code, p, i)) + kTop;
}

}  // namespace nxrt
