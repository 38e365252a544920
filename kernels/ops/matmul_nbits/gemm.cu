// Products of many rows with quantised weights.
#include "gemm.cuh"

using namespace nxrt;

#define GEMM(bits, type, T)                                                              \
    NXRT_KERNEL(gemm_##bits##_large_##type, ProductParams, (gemm<T, bits, 4, 64>), 128)  \
    NXRT_KERNEL(gemm_##bits##_small_##type, ProductParams, (gemm<T, bits, 2, 32>), 128)

GEMM(2, f16, half)
GEMM(4, f16, half)
GEMM(8, f16, half)
GEMM(2, bf16, bf16)
GEMM(4, bf16, bf16)
GEMM(8, bf16, bf16)
