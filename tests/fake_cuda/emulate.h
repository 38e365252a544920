// CUDA device code as plain C++: what common.cuh includes instead of nvcc's built-ins. Threads are fibers (emulate.cpp).
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace nxrt::emulate {

constexpr unsigned kWarp = 32;
constexpr unsigned kSlotBytes = 64;

struct Block {
    uint3 index;
    dim3 size;
    dim3 grid;
    unsigned cluster;
};

// One CUDA thread.
struct Thread {
    uint3 index;
    unsigned lane;
    unsigned warp;  // of the cluster
    const Block* block;
};

// What one lane brings to a collective operation of its warp, and what it takes away.
struct alignas(kSlotBytes) Slot {
    unsigned char bytes[kSlotBytes];
};

enum class Collective : unsigned char { kSync, kShuffle, kVote, kSum, kMax, kMmaF16, kMmaBf16, kMmaTf32, kLdmatrix };

// The last lane to arrive runs this over the slots of all 32 lanes (0xFF bytes where the warp has no such lane).
using Finish = void (*)(Slot* slots, unsigned argument);

#define NXRT_EMULATE_API __attribute__((visibility("default")))

// The thread that runs on this OS thread. Kernels and driver are one library, so its address is found once a function.
extern __thread Thread* self __attribute__((visibility("hidden")));

// Reached by every lane of the warp, or the kernel fails. Gives the slots, which stay as they are until this lane's next
// collective operation.
NXRT_EMULATE_API Slot* collective(Collective kind, const void* value, unsigned bytes, Finish finish = nullptr,
                                  unsigned argument = 0);
NXRT_EMULATE_API void barrier();
// Ends the kernel with an error of this text.
[[noreturn]] NXRT_EMULATE_API void fail(const char* message);
NXRT_EMULATE_API void* dynamic_shared();
// The halves of a barrier of the cluster.
NXRT_EMULATE_API void cluster_arrive();
NXRT_EMULATE_API void cluster_wait();
// What blocks of the cluster send each other, in dynamic shared memory: bytes that shall come, bytes that have.
struct Inbox {
    uint32_t expected;
    uint32_t received;
};
// To where `to` and `box`, of this block, are in block `rank`.
NXRT_EMULATE_API void send(unsigned rank, void* to, const void* value, unsigned bytes, Inbox* box);
NXRT_EMULATE_API void wait_for(const Inbox* box);

NXRT_EMULATE_API float warp_sum(float x);
NXRT_EMULATE_API float warp_max(float x);
NXRT_EMULATE_API void mma_m16n8k16_f16(float* d, const uint32_t* a, const uint32_t* b);
NXRT_EMULATE_API void mma_m16n8k16_bf16(float* d, const uint32_t* a, const uint32_t* b);
NXRT_EMULATE_API void mma_m16n8k8_tf32(float* d, const float* a, const float* b);
NXRT_EMULATE_API void ldmatrix(uint32_t* r, unsigned matrices, const void* row, bool transposed);
// The copy takes place in cp_async_wait, so that a kernel that does not wait reads stale data.
NXRT_EMULATE_API void cp_async(void* shared, const void* global, unsigned bytes, bool valid);
NXRT_EMULATE_API void cp_async_commit();
NXRT_EMULATE_API void cp_async_wait(unsigned newest);

inline void check_aligned(const void* address, unsigned alignment) {
    if (reinterpret_cast<uintptr_t>(address) % alignment != 0) fail("misaligned vector access");
}

// What the driver finds with dlsym.
struct Kernel {
    void (*run)(const void* params);
    unsigned param_bytes;
    unsigned max_threads;
    unsigned cluster;  // blocks along x that run at the same time
};

template <class T>
T shuffle(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= kSlotBytes && std::is_trivially_copyable_v<T>);
    if (mask != 0xffffffffu) fail("a shuffle with a partial mask");
    const Slot* slots = collective(Collective::kShuffle, &value, sizeof value);
    std::memcpy(&value, slots[source % kWarp].bytes, sizeof value);
    return value;
}

inline uint32_t vote(unsigned mask, bool predicate) {
    if (mask != 0xffffffffu) fail("a vote with a partial mask");
    const unsigned char value = predicate;
    const Slot* slots = collective(Collective::kVote, &value, 1);
    uint32_t set = 0;
    for (unsigned i = 0; i < kWarp; ++i) set |= static_cast<uint32_t>(slots[i].bytes[0] == 1) << i;
    return set;
}

// The lanes that the warp has: a block's last warp may be a partial one.
inline uint32_t present_lanes() {
    const Thread& t = *self;
    const dim3 size = t.block->size;
    const unsigned thread = t.index.x + size.x * (t.index.y + size.y * t.index.z);
    const unsigned left = size.x * size.y * size.z - thread / kWarp * kWarp;
    return left >= kWarp ? 0xffffffffu : (1u << left) - 1;
}

}  // namespace nxrt::emulate

// ---- the language ----

#define threadIdx (::nxrt::emulate::self->index)
#define blockIdx (::nxrt::emulate::self->block->index)
#define blockDim (::nxrt::emulate::self->block->size)
#define gridDim (::nxrt::emulate::self->block->grid)

#define NXRT_DEVICE inline __attribute__((always_inline))
// One block runs at a time on an OS thread; those of a cluster have dynamic shared memory alone.
#define NXRT_SHARED static thread_local
#define NXRT_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(::nxrt::emulate::dynamic_shared())

// The file's stem is part of the symbol, as files are separate modules on a GPU.
#ifndef NXRT_EMULATE_STEM
#define NXRT_EMULATE_STEM none
#endif
#define NXRT_EMULATE_PASTE2(stem, name) nxrt_emulated_##stem##__##name
#define NXRT_EMULATE_PASTE(stem, name) NXRT_EMULATE_PASTE2(stem, name)
#define NXRT_EMULATE_SYMBOL(name) NXRT_EMULATE_PASTE(NXRT_EMULATE_STEM, name)

#define NXRT_KERNEL(name, Params, function, max_threads) NXRT_KERNEL_CLUSTER(name, Params, function, max_threads, 1, 1)

#define NXRT_KERNEL_CLUSTER(name, Params, function, max_threads, blocks, size)                                \
    extern "C" {                                                                                              \
    extern NXRT_EMULATE_API const ::nxrt::emulate::Kernel NXRT_EMULATE_SYMBOL(name);                          \
    const ::nxrt::emulate::Kernel NXRT_EMULATE_SYMBOL(name) = {                                               \
        [](const void* params) { function(*static_cast<const Params*>(params)); }, sizeof(Params), max_threads, \
        size};                                                                                                \
    }

#define NXRT_KERNEL_EARLY NXRT_KERNEL

// ---- synchronisation ----

inline void __syncthreads() { nxrt::emulate::barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    if (mask != 0xffffffffu) nxrt::emulate::fail("__syncwarp with a partial mask");
    nxrt::emulate::collective(nxrt::emulate::Collective::kSync, nullptr, 0);
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) {}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned first = nxrt::emulate::self->lane & ~(width - 1u);
    return nxrt::emulate::shuffle(mask, value, first + (source & (width - 1u)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const unsigned lane = nxrt::emulate::self->lane;
    const unsigned source = lane ^ lanes;
    // A source in a later segment is out of range, one in an earlier segment is not.
    return nxrt::emulate::shuffle(mask, value, source <= (lane | (width - 1u)) ? source : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = nxrt::emulate::self->lane;
    return nxrt::emulate::shuffle(mask, value, (lane & (width - 1u)) + delta < unsigned(width) ? lane + delta : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = nxrt::emulate::self->lane;
    return nxrt::emulate::shuffle(mask, value, (lane & (width - 1u)) >= delta ? lane - delta : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return nxrt::emulate::vote(mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return nxrt::emulate::vote(mask, predicate != 0) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
    return nxrt::emulate::vote(mask, predicate != 0) == nxrt::emulate::present_lanes();
}
inline unsigned __activemask() { return nxrt::emulate::present_lanes(); }

// ---- atomics: blocks run on several OS threads ----

namespace nxrt::emulate {

template <class T, class F>
T atomic_update(T* address, F next) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    static_assert(sizeof(T) == sizeof(Bits));
    Bits* bits = reinterpret_cast<Bits*>(address);
    Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED);
    for (;;) {
        T value;
        std::memcpy(&value, &before, sizeof value);
        const T wanted = next(value);
        Bits after;
        std::memcpy(&after, &wanted, sizeof after);
        if (__atomic_compare_exchange_n(bits, &before, after, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) return value;
    }
}

template <class T>
struct Same {
    using type = T;
};
template <class T>
using SameT = typename Same<T>::type;

}  // namespace nxrt::emulate

template <class T>
T atomicAdd(T* address, nxrt::emulate::SameT<T> value) {
    return nxrt::emulate::atomic_update(address, [=](T old) -> T { return old + value; });
}
template <class T>
T atomicMax(T* address, nxrt::emulate::SameT<T> value) {
    return nxrt::emulate::atomic_update(address, [=](T old) -> T { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* address, nxrt::emulate::SameT<T> value) {
    return nxrt::emulate::atomic_update(address, [=](T old) -> T { return value < old ? value : old; });
}
template <class T>
T atomicExch(T* address, nxrt::emulate::SameT<T> value) {
    return nxrt::emulate::atomic_update(address, [=](T) -> T { return value; });
}
template <class T>
T atomicCAS(T* address, nxrt::emulate::SameT<T> expected, nxrt::emulate::SameT<T> value) {
    return nxrt::emulate::atomic_update(address, [=](T old) -> T { return old == expected ? value : old; });
}

#include "emulate_math.h"
