// What every CUDA kernel starts from: the kernel and shared-memory macros, conversions, vector access, reductions.
// The same sources run on the CPU under NXRT_EMULATE (tests/fake_cuda), so nothing here but the wrappers knows PTX.
#pragma once

#include <cstdint>

#ifdef NXRT_EMULATE
#include "emulate.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define NXRT_DEVICE __device__ __forceinline__


// `NXRT_SHARED float s[32];` inside a device function.
#define NXRT_SHARED __shared__

// `NXRT_DYNAMIC_SHARED(float, s);` makes `float* s` the start of the launch's dynamic shared memory, aligned to 128.
#define NXRT_DYNAMIC_SHARED(T, name)                                            \
    extern __shared__ __align__(128) unsigned char nxrt_dynamic_shared_bytes[]; \
    T* name = reinterpret_cast<T*>(nxrt_dynamic_shared_bytes)

// A kernel `name` that takes one Params by value: NXRT_KERNEL(rms_norm_f16, RmsNormParams, (rms_norm<half>), 256)
// It may be launched to overlap with its predecessor (LaunchShape::overlap): it waits before it touches memory.
#define NXRT_KERNEL(name, Params, function, max_threads)                                                     \
    extern "C" __global__ void __launch_bounds__(max_threads) name(const __grid_constant__ Params params) { \
        nxrt::grid_dependency_ready();                                                                       \
        function(params);                                                                                    \
    }

// The same for a function that calls nxrt::grid_dependency_ready() itself (or _wait(), and _launch() some time after it), in
// every thread, before it writes and before it reads what its predecessor writes. No kernel lets its successor begin before
// its own predecessor has ended, but for successors that read constants alone before the wait: so constants may be read then,
// and, in every launch of a program but the first, whatever its predecessor does not write.
#define NXRT_KERNEL_EARLY(name, Params, function, max_threads)                                               \
    extern "C" __global__ void __launch_bounds__(max_threads) name(const __grid_constant__ Params params) { \
        function(params);                                                                                    \
    }

#endif

using bf16 = __nv_bfloat16;

namespace nxrt {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// The x-linear lane and warp: blocks are one-dimensional in threads.
NXRT_DEVICE unsigned lane_id() { return threadIdx.x % kWarpSize; }
NXRT_DEVICE unsigned warp_id() { return threadIdx.x / kWarpSize; }
NXRT_DEVICE unsigned warp_count() { return (blockDim.x + kWarpSize - 1) / kWarpSize; }

template <class A, class B>
NXRT_DEVICE constexpr auto ceil_div(A a, B b) {
    return (a + b - 1) / b;
}

// ---- conversions ----

NXRT_DEVICE float to_float(float x) { return x; }
NXRT_DEVICE float to_float(double x) { return static_cast<float>(x); }
#ifdef NXRT_EMULATE
NXRT_DEVICE float to_float(half x) { return emulate::half_to_float(x); }
#else
NXRT_DEVICE float to_float(half x) { return __half2float(x); }
#endif
NXRT_DEVICE float to_float(bf16 x) { return __bfloat162float(x); }

template <class T>
struct FromFloat;
template <>
struct FromFloat<float> {
    static NXRT_DEVICE float convert(float x) { return x; }
};
template <>
struct FromFloat<double> {
    static NXRT_DEVICE double convert(float x) { return x; }
};
template <>
struct FromFloat<half> {
#ifdef NXRT_EMULATE
    static NXRT_DEVICE half convert(float x) { return emulate::float_to_half(x); }
#else
    static NXRT_DEVICE half convert(float x) { return __float2half_rn(x); }
#endif
};
template <>
struct FromFloat<bf16> {
    static NXRT_DEVICE bf16 convert(float x) { return __float2bfloat16_rn(x); }
};

// Rounds to nearest even.
template <class T>
NXRT_DEVICE T from_float(float x) {
    return FromFloat<T>::convert(x);
}

// ---- vectors ----

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
    T v[N];
    NXRT_DEVICE T& operator[](int i) { return v[i]; }
    NXRT_DEVICE const T& operator[](int i) const { return v[i]; }
};

namespace detail {

// The widest access that moves a whole number of times into Bytes.
template <int Bytes>
struct Word {
    static_assert(Bytes % 16 == 0, "a vector has 1, 2, 4, 8 or a multiple of 16 bytes");
    using type = uint4;
};
template <>
struct Word<1> {
    using type = uint8_t;
};
template <>
struct Word<2> {
    using type = uint16_t;
};
template <>
struct Word<4> {
    using type = uint32_t;
};
template <>
struct Word<8> {
    using type = uint2;
};

template <class T, int N>
using WordOf = typename Word<static_cast<int>(sizeof(T)) * N>::type;

template <class T, int N>
NXRT_DEVICE constexpr int word_count() {
    return static_cast<int>(sizeof(T)) * N / static_cast<int>(sizeof(WordOf<T, N>));
}

template <class W>
NXRT_DEVICE const W* words(const void* address) {
#ifdef NXRT_EMULATE
    emulate::check_aligned(address, alignof(W));
#endif
    return static_cast<const W*>(address);
}

#ifdef NXRT_EMULATE
template <class W>
NXRT_DEVICE W stream_word(const W* p) {
    return *p;
}
#else
NXRT_DEVICE uint4 stream_word(const uint4* p) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p));
    return r;
}
NXRT_DEVICE uint2 stream_word(const uint2* p) {
    uint2 r;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
    return r;
}
NXRT_DEVICE uint32_t stream_word(const uint32_t* p) {
    uint32_t r;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(p));
    return r;
}
NXRT_DEVICE uint16_t stream_word(const uint16_t* p) {
    uint16_t r;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(r) : "l"(p));
    return r;
}
NXRT_DEVICE uint8_t stream_word(const uint8_t* p) { return __ldg(p); }
#endif

}  // namespace detail

// N elements from an address aligned to their size (16 at most), in 16-byte accesses where there are that many bytes.
template <class T, int N>
NXRT_DEVICE Vec<T, N> load_vec(const T* p) {
    using W = detail::WordOf<T, N>;
    Vec<T, N> r;
    const W* from = detail::words<W>(p);
    W* to = reinterpret_cast<W*>(&r);
#pragma unroll
    for (int i = 0; i < detail::word_count<T, N>(); ++i) to[i] = from[i];
    return r;
}

template <class T, int N>
NXRT_DEVICE void store_vec(T* p, const Vec<T, N>& x) {
    using W = detail::WordOf<T, N>;
    W* to = const_cast<W*>(detail::words<W>(p));
    const W* from = reinterpret_cast<const W*>(&x);
#pragma unroll
    for (int i = 0; i < detail::word_count<T, N>(); ++i) to[i] = from[i];
}

// load_vec for what is read once and never written while the kernel runs (weights): leaves L1 to the rest.
template <class T, int N>
NXRT_DEVICE Vec<T, N> load_stream(const T* p) {
    using W = detail::WordOf<T, N>;
    Vec<T, N> r;
    const W* from = detail::words<W>(p);
    W* to = reinterpret_cast<W*>(&r);
#pragma unroll
    for (int i = 0; i < detail::word_count<T, N>(); ++i) to[i] = detail::stream_word(from + i);
    return r;
}

// ---- reductions: every lane or thread gets the result; whole warps only ----

#ifdef NXRT_EMULATE
NXRT_DEVICE float warp_sum(float x) { return emulate::warp_sum(x); }
NXRT_DEVICE float warp_max(float x) { return emulate::warp_max(x); }
#else
NXRT_DEVICE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kFullMask, x, step);
    return x;
}
NXRT_DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
    return x;
}
#endif

// Reductions over a block of whole warps; `shared32` is 32 floats of shared memory, free again for the next call.
NXRT_DEVICE float block_sum(float x, float* shared32) {
    x = warp_sum(x);
    if (blockDim.x <= kWarpSize) return x;
    __syncthreads();
    if (lane_id() == 0) shared32[warp_id()] = x;
    __syncthreads();
    return warp_sum(lane_id() < warp_count() ? shared32[lane_id()] : 0.0f);
}

NXRT_DEVICE float block_max(float x, float* shared32) {
    x = warp_max(x);
    if (blockDim.x <= kWarpSize) return x;
    __syncthreads();
    if (lane_id() == 0) shared32[warp_id()] = x;
    __syncthreads();
    // Some warp's value stands in for the absent ones, so NaN and infinities need no neutral element.
    return warp_max(shared32[lane_id() < warp_count() ? lane_id() : 0]);
}

NXRT_DEVICE float2 warp_sum2(float a, float b) { return make_float2(warp_sum(a), warp_sum(b)); }

// Two sums for the barriers of one; `shared64` is 64 floats.
NXRT_DEVICE float2 block_sum2(float a, float b, float* shared64) {
    float2 sum = warp_sum2(a, b);
    if (blockDim.x <= kWarpSize) return sum;
    __syncthreads();
    if (lane_id() == 0) {
        shared64[warp_id()] = sum.x;
        shared64[kWarpSize + warp_id()] = sum.y;
    }
    __syncthreads();
    const bool present = lane_id() < warp_count();
    return warp_sum2(present ? shared64[lane_id()] : 0.0f, present ? shared64[kWarpSize + lane_id()] : 0.0f);
}

// Has the 128 bytes at `p` brought to L2, or not: a hint.
NXRT_DEVICE void prefetch_l2(const void* p) {
#ifndef NXRT_EMULATE
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// ---- programmatic dependent launch: nothing below sm_90 ----

// Waits until the kernels this one depends on have finished and their writes can be seen.
NXRT_DEVICE void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start once all blocks of this one have said so (or ended). Before the wait only where the next
// kernel is known not to mind: see NXRT_KERNEL_EARLY.
NXRT_DEVICE void grid_dependency_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both, for whom nothing lies between them.
NXRT_DEVICE void grid_dependency_ready() {
    grid_dependency_wait();
    grid_dependency_launch();
}

}  // namespace nxrt
