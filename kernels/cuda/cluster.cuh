// Thread block clusters: blocks that run at the same time and reach each other's shared memory. There are none below
// sm_90. A cluster's blocks have dynamic shared memory alone.
#pragma once

#include "common.cuh"

// NXRT_KERNEL_EARLY for blocks of `max_threads`, of which a multiprocessor is to hold `blocks`, in clusters of `size` along x.
// The grid is whole clusters.
#ifndef NXRT_EMULATE
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define NXRT_KERNEL_CLUSTER(name, Params, function, max_threads, blocks, size)
#else
#define NXRT_KERNEL_CLUSTER(name, Params, function, max_threads, blocks, size)                                               \
    extern "C" __global__ void __cluster_dims__(size, 1, 1) __launch_bounds__(max_threads, blocks)                           \
        name(const __grid_constant__ Params params) {                                                                       \
        function(params);                                                                                                    \
    }
#endif
#endif

namespace nxrt {

#ifdef NXRT_EMULATE

NXRT_DEVICE uint32_t cluster_rank() { return blockIdx.x % emulate::self->block->cluster; }
NXRT_DEVICE void cluster_arrive() { emulate::cluster_arrive(); }
NXRT_DEVICE void cluster_wait() { emulate::cluster_wait(); }

using Inbox = emulate::Inbox;
NXRT_DEVICE void open_inbox(Inbox& box, uint32_t bytes) { box = {bytes, 0}; }
template <class V>
NXRT_DEVICE void send(uint32_t rank, V& to, V x, Inbox& box) {
    emulate::send(rank, &to, &x, sizeof x, &box);
}
NXRT_DEVICE void wait_for(const Inbox& box) { emulate::wait_for(&box); }

#else

NXRT_DEVICE uint32_t cluster_rank() {
    uint32_t x;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}

// The two halves of a barrier of all threads of the cluster. It orders open_inbox() before send(), and nothing else: the order
// of all memory would take a thousand cycles.
NXRT_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
NXRT_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

namespace detail {
NXRT_DEVICE uint32_t cluster_address(uint32_t rank, const void* shared) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(rank));
    return address;
}
}  // namespace detail

// Tells, once, when so many bytes have come from the cluster's blocks.
struct Inbox {
    uint64_t barrier;
};

// By one thread, before the cluster's barrier.
NXRT_DEVICE void open_inbox(Inbox& box, uint32_t bytes) {
    const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(&box));
    asm volatile(
        "mbarrier.init.shared.b64 [%0], 1;\n"
        "fence.mbarrier_init.release.cluster;\n"
        "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at),
        "r"(bytes)
        : "memory");
}

// Stores to where `to` and `box`, of this block's shared memory, are in block `rank`'s.
NXRT_DEVICE void send(uint32_t rank, float& to, float x, Inbox& box) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(detail::cluster_address(rank, &to)),
                 "f"(x), "r"(detail::cluster_address(rank, &box))
                 : "memory");
}
// Until the bytes have come.
NXRT_DEVICE void wait_for(const Inbox& box) {
    const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(&box));
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(at)
            : "memory");
    } while (!done);
}

#endif

}  // namespace nxrt
