// Products of many rows with quantised weights, for Hopper.
#include "wgemm.cuh"

using namespace nxrt;

#define WGEMM(bits, type, T)                                                                   \
    NXRT_KERNEL(wgemm_##bits##_large_##type, ProductParams, (wgemm<T, bits, 2, 2, 128>), 256)  \
    NXRT_KERNEL(wgemm_##bits##_medium_##type, ProductParams, (wgemm<T, bits, 2, 2, 64>), 256)  \
    NXRT_KERNEL(wgemm_##bits##_small_##type, ProductParams, (wgemm<T, bits, 1, 1, 64>), 128)

WGEMM(2, f16, half)
WGEMM(4, f16, half)
WGEMM(8, f16, half)
WGEMM(2, bf16, bf16)
WGEMM(4, bf16, bf16)
WGEMM(8, bf16, bf16)
