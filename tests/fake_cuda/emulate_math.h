// CUDA's arithmetic built-ins for the emulator: part of emulate.h.
#pragma once

// ---- min and max: as CUDA's overloads, the usual arithmetic conversions decide the type ----

template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
    return T(a) < T(b) ? T(b) : T(a);
}

template <class T>
T __ldg(const T* p) {
    return *p;
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
template <class T>
T __ldcs(const T* p) {
    return *p;
}
template <class T>
void __stcs(T* p, T value) {
    *p = value;
}
template <class T>
void __stcg(T* p, T value) {
    *p = value;
}

// ---- floats: as with nvcc, the unqualified names have overloads for float ----

using std::abs, std::acos, std::acosh, std::asin, std::asinh, std::atan, std::atan2, std::atanh, std::cbrt, std::ceil;
using std::copysign, std::cos, std::cosh, std::erf, std::erfc, std::exp, std::exp2, std::expm1, std::fabs, std::floor;
using std::fma, std::fmax, std::fmin, std::fmod, std::isfinite, std::isinf, std::isnan, std::lgamma, std::log, std::log10;
using std::log1p, std::log2, std::lrint, std::nearbyint, std::pow, std::rint, std::round, std::signbit, std::sin, std::sinh;
using std::sqrt, std::tan, std::tanh, std::tgamma, std::trunc;

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
// Never contracted into a fused multiply-add: the compiler may not look through the empty asm.
inline float __fmul_rn(float x, float y) {
    float r = x * y;
    asm("" : "+x"(r));
    return r;
}
inline float __fadd_rn(float x, float y) {
    asm("" : "+x"(x), "+x"(y));
    return x + y;
}
inline float __fsub_rn(float x, float y) {
    asm("" : "+x"(x), "+x"(y));
    return x - y;
}
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float normcdff(float x) { return 0.5f * std::erfc(x * -0.70710678118654752f); }

// ---- bits ----

namespace nxrt::emulate {
template <class To, class From>
To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(static_cast<void*>(&to), &from, sizeof to);
    return to;
}
// Conversions to integers saturate, and NaN gives 0.
template <class To, class From>
To saturating(From x) {
    if (std::isnan(x)) return 0;
    if (x >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
    if (x <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    return static_cast<To>(x);
}
}  // namespace nxrt::emulate

inline int __float_as_int(float x) { return nxrt::emulate::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return nxrt::emulate::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return nxrt::emulate::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return nxrt::emulate::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return nxrt::emulate::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return nxrt::emulate::bit_cast<double>(x); }
inline int __float2int_rn(float x) { return nxrt::emulate::saturating<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return nxrt::emulate::saturating<int>(std::trunc(x)); }
inline int __float2int_rd(float x) { return nxrt::emulate::saturating<int>(std::floor(x)); }
inline unsigned __float2uint_rn(float x) { return nxrt::emulate::saturating<unsigned>(std::nearbyint(x)); }
inline unsigned __float2uint_rz(float x) { return nxrt::emulate::saturating<unsigned>(std::trunc(x)); }
inline long long __float2ll_rz(float x) { return nxrt::emulate::saturating<long long>(std::trunc(x)); }
inline long long __double2ll_rz(double x) { return nxrt::emulate::saturating<long long>(std::trunc(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
    return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = uint64_t{b} << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = selector >> (4 * i) & 0xf;
        unsigned byte = bytes >> (8 * (pick & 7)) & 0xff;
        if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= byte << (8 * i);
    }
    return r;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
    return c;
}

namespace nxrt::emulate {
// The toolkit's conversions on the host are many times slower.
inline float half_to_float(half x) { return _cvtsh_ss(bit_cast<uint16_t>(x)); }
inline half float_to_half(float x) { return bit_cast<half>(static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))); }
}  // namespace nxrt::emulate

// ---- half and bf16: what the toolkit's headers have on the device only ----

inline half __hfma(half a, half b, half c) {
    // A double holds the product and the sum of any three halves closely enough to round once.
    return __double2half(static_cast<double>(__half2float(a)) * __half2float(b) + __half2float(c));
}
inline half2 __hfma2(half2 a, half2 b, half2 c) {
    return half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __double2bfloat16(static_cast<double>(__bfloat162float(a)) * __bfloat162float(b) + __bfloat162float(c));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return __nv_bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
