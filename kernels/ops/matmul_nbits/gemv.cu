// Products of few rows with quantised weights.
#include "gemv.cuh"

using namespace nxrt;

#define GEMV(bits, type, T)                                                                                          \
    NXRT_KERNEL_EARLY(gemv_##bits##_after_##type, ProductParams, (gemv<T, bits, Scaling::kAfter>), kGemvWarps * kWarpSize)    \
    NXRT_KERNEL_EARLY(gemv_##bits##_before_##type, ProductParams, (gemv<T, bits, Scaling::kBefore>), kGemvWarps * kWarpSize)

GEMV(2, f16, half)
GEMV(4, f16, half)
GEMV(8, f16, half)
GEMV(2, bf16, bf16)
GEMV(4, bf16, bf16)
GEMV(8, bf16, bf16)
