// Products with 16-bit weights in fragments.
#include "gemm.cuh"
#include "gemv.cuh"

using namespace nxrt;

#define PRODUCT(type, T)                                                                                        \
    NXRT_KERNEL(gemv_##type, ProductParams, (gemv<T, 16, Scaling::kNone>), kGemvWarps * kWarpSize)              \
    NXRT_KERNEL(gemm_large_##type, ProductParams, (gemm<T, 16, 4, 64>), 128)                                    \
    NXRT_KERNEL(gemm_small_##type, ProductParams, (gemm<T, 16, 2, 32>), 128)

PRODUCT(f16, half)
PRODUCT(bf16, bf16)
