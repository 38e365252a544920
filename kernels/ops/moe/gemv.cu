// Few rows, formats and blocks of every kind.
#include "stream.cuh"

using namespace nxrt;

#define STREAM(name, F)                                                                                                \
    NXRT_KERNEL_EARLY(stream_##name##_f16, ExpertParams, (stream_row<half, F, -1, -1>), kGemvWarps * kWarpSize)    \
    NXRT_KERNEL_EARLY(stream_##name##_bf16, ExpertParams, (stream_row<bf16, F, -1, -1>), kGemvWarps * kWarpSize)

STREAM(int2, Int2)
STREAM(int4, Int4)
STREAM(int8, Int8)
STREAM(wide8, Wide8)
STREAM(mxfp4, MxFp4)
STREAM(nvfp4, NvFp4)
STREAM(fp8, Fp8)
STREAM(dense, Dense)
