// Few rows, 4 bits in the usual blocks. 1024 threads a block stands for 64 registers a thread.
#include "stream.cuh"

using namespace nxrt;

#define STREAM4(block, shift, type, T)                                                                      \
    NXRT_KERNEL_EARLY(stream4_##block##_plain_##type, ExpertParams, (stream_row<T, Int4, shift, kZeroDefault>), 1024) \
    NXRT_KERNEL_EARLY(stream4_##block##_bytes_##type, ExpertParams, (stream_row<T, Int4, shift, kZeroBytes>), 1024)

STREAM4(32, 0, f16, half)
STREAM4(64, 1, f16, half)
STREAM4(128, 2, f16, half)
STREAM4(32, 0, bf16, bf16)
STREAM4(64, 1, bf16, bf16)
STREAM4(128, 2, bf16, bf16)

NXRT_KERNEL_EARLY(stream4_mxfp4_f16, ExpertParams, (stream_row<half, MxFp4, 0, kZeroDefault>), 1024)
NXRT_KERNEL_EARLY(stream4_mxfp4_bf16, ExpertParams, (stream_row<bf16, MxFp4, 0, kZeroDefault>), 1024)
