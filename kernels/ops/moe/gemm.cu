// Many rows, all formats: blocks of 64 rows and 64 columns.
#include "gemm.cuh"

using namespace nxrt;

#define SMALL(name, F)                                                                      \
    NXRT_KERNEL(gemm_##name##_small_f16, ExpertParams, (expert_gemm<half, F, 2, 32>), 128)  \
    NXRT_KERNEL(gemm_##name##_small_bf16, ExpertParams, (expert_gemm<bf16, F, 2, 32>), 128)

SMALL(int2, Int2)
SMALL(int4, Int4)
SMALL(int8, Int8)
SMALL(wide8, Wide8)
SMALL(mxfp4, MxFp4)
SMALL(nvfp4, NvFp4)
SMALL(fp8, Fp8)
SMALL(dense, Dense)
