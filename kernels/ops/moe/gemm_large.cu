// Many rows of the same expert: blocks of 128 rows and 128 columns, for the usual formats.
#include "gemm.cuh"

using namespace nxrt;

#define LARGE(name, F)                                                                      \
    NXRT_KERNEL(gemm_##name##_large_f16, ExpertParams, (expert_gemm<half, F, 4, 64>), 128)  \
    NXRT_KERNEL(gemm_##name##_large_bf16, ExpertParams, (expert_gemm<bf16, F, 4, 64>), 128)

LARGE(int4, Int4)
LARGE(int8, Int8)
LARGE(mxfp4, MxFp4)
LARGE(fp8, Fp8)
LARGE(dense, Dense)
