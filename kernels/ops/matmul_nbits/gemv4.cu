// Products of few rows with 4-bit weights in the usual blocks. 1024 threads a block stands for 64 registers a thread.
#include "gemv4.cuh"

using namespace nxrt;

#define GEMV4(block, shift, type, T)                                                        \
    NXRT_KERNEL_EARLY(gemv4_##block##_plain_##type, ProductParams, (gemv4<T, shift, false>), 1024) \
    NXRT_KERNEL_EARLY(gemv4_##block##_bytes_##type, ProductParams, (gemv4<T, shift, true>), 1024)

GEMV4(32, 0, f16, half)
GEMV4(64, 1, f16, half)
GEMV4(128, 2, f16, half)
GEMV4(32, 0, bf16, bf16)
GEMV4(64, 1, bf16, bf16)
GEMV4(128, 2, bf16, bf16)
