// Products of many rows with 16-bit weights in fragments, for Hopper.
#include "wgemm.cuh"

using namespace nxrt;

#define WGEMM(type, T)                                                              \
    NXRT_KERNEL(wgemm_large_##type, ProductParams, (wgemm<T, 16, 2, 2, 128>), 256)  \
    NXRT_KERNEL(wgemm_medium_##type, ProductParams, (wgemm<T, 16, 2, 2, 64>), 256)  \
    NXRT_KERNEL(wgemm_small_##type, ProductParams, (wgemm<T, 16, 1, 1, 64>), 128)

WGEMM(f16, half)
WGEMM(bf16, bf16)
