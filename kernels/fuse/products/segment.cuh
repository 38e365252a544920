// What the kernels for several products of one input share.
#pragma once

#include "gemv4.cuh"

namespace nxrt {

constexpr unsigned kSegments = 8;

struct Segment {
    const uint8_t* data;
    const void* scales;
    const void* zeros;
    const void* bias;  // [n]; null: none
    void* y;           // [m, n]; gated: both the same
    uint32_t n;
    uint32_t halves;  // weights are 16-bit floats
    uint32_t tiles;
    uint32_t pad[3];
};

// Sum over the block; `shared32` is free again after the next barrier.
NXRT_DEVICE float quick_block_sum(float x, float* shared32) {
    x = warp_sum(x);
    if (lane_id() == 0) shared32[warp_id()] = x;
    __syncthreads();
    float total = 0;
    for (unsigned i = 0; i < warp_count(); ++i) total += shared32[i];
    return total;
}

}  // namespace nxrt
