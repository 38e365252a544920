// The end of a product whose columns were shared out among blocks: y = alpha (sum of the parts) + beta c.
#include "common.cuh"

using namespace nxrt;

struct PartsParams {
    const float* parts;  // [count, m, n]
    const void* c;       // null: none
    void* y;             // [m, n]
    uint32_t count;
    uint32_t m, n;
    uint32_t c_row, c_column;  // elements
    float alpha, beta;
    uint32_t pad;
};

template <class T>
NXRT_DEVICE void add_parts(const PartsParams& p) {
    const uint64_t size = uint64_t(p.m) * p.n;
    for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += uint64_t(gridDim.x) * blockDim.x) {
        float total = 0;
        for (uint32_t part = 0; part < p.count; ++part) total += p.parts[part * size + i];
        total *= p.alpha;
        if (p.c) total += p.beta * to_float(static_cast<const T*>(p.c)[i / p.n * p.c_row + i % p.n * p.c_column]);
        static_cast<T*>(p.y)[i] = from_float<T>(total);
    }
}

NXRT_KERNEL(add_parts_f16, PartsParams, add_parts<half>, 256)
NXRT_KERNEL(add_parts_bf16, PartsParams, add_parts<bf16>, 256)
