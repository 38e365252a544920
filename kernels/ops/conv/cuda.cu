// Direct convolution: a thread for each output, computed as the CPU does and rounded once. N batch, C channels, M feature
// maps, then spatial dims, of which the first are 1 where there are fewer.
#include "number.cuh"
#include "walk.cuh"

using namespace nxrt;

constexpr int kSpatial = 6;

struct ConvParams {
    const void* x;     // [N, C, spatial]
    const void* w;     // [M, C / groups, kernel]
    const void* bias;  // [M]; null: zeros
    void* y;           // [N, M, out]
    uint64_t elements;
    uint32_t channels;
    uint32_t maps;
    uint32_t per_group;   // input channels of a group
    uint32_t group_maps;  // feature maps of a group
    uint32_t dims[kSpatial];
    uint32_t out[kSpatial];
    uint32_t kernel[kSpatial];
    uint32_t stride[kSpatial];
    uint32_t dilation[kSpatial];
    uint32_t before[kSpatial];  // zeros before the input
    uint32_t taps;              // the product of `kernel`
    uint32_t line;              // all dims of the kernel but the last are 1
};

// Where a kernel element meets the input along one dim.
NXRT_DEVICE bool meets(const ConvParams& p, int d, uint32_t out, uint32_t k, uint64_t& at) {
    const int64_t i = int64_t(uint64_t(out) * p.stride[d] + uint64_t(k) * p.dilation[d]) - int64_t(p.before[d]);
    at = at * p.dims[d] + uint64_t(i);
    return i >= 0 && i < int64_t(p.dims[d]);
}

template <class T>
NXRT_DEVICE void conv(const ConvParams& p) {
    using C = Computed<T>;
    const T* x = static_cast<const T*>(p.x);
    const T* bias = static_cast<const T*>(p.bias);
    uint64_t size = 1;
#pragma unroll
    for (int d = 0; d < kSpatial; ++d) size *= p.dims[d];
    for (uint64_t i = grid_thread(); i < p.elements; i += grid_threads()) {
        uint32_t at[kSpatial];
        uint64_t rest = i;
#pragma unroll
        for (int d = kSpatial - 1; d >= 0; --d) {
            const uint64_t q = divide(rest, p.out[d]);
            at[d] = static_cast<uint32_t>(rest - q * p.out[d]);
            rest = q;
        }
        const uint64_t batch = divide(rest, p.maps);
        const uint32_t map = static_cast<uint32_t>(rest - batch * p.maps);
        const T* from = x + (batch * p.channels + map / p.group_maps * p.per_group) * size;
        const T* w = static_cast<const T*>(p.w) + uint64_t(map) * p.per_group * p.taps;
        C sum = bias ? computed(bias[map]) : C(0);
        for (uint32_t c = 0; c < p.per_group; ++c, from += size, w += p.taps) {
            for (uint32_t tap = 0; tap < p.taps; ++tap) {
                uint32_t k[kSpatial] = {};
                uint32_t left = tap;
                if (p.line) {
                    k[kSpatial - 1] = tap;
                } else {
#pragma unroll
                    for (int d = kSpatial - 1; d >= 0; --d) {
                        k[d] = left % p.kernel[d];
                        left /= p.kernel[d];
                    }
                }
                uint64_t offset = 0;
                bool within = true;
#pragma unroll
                for (int d = 0; d < kSpatial; ++d) within = meets(p, d, at[d], k[d], offset) && within;
                if (within) sum += computed(w[tap]) * computed(from[offset]);
            }
        }
        static_cast<T*>(p.y)[i] = stored<T>(sum);
    }
}

NXRT_KERNEL(conv_f32, ConvParams, (conv<float>), 256)
NXRT_KERNEL(conv_f16, ConvParams, (conv<half>), 256)
NXRT_KERNEL(conv_bf16, ConvParams, (conv<bf16>), 256)
NXRT_KERNEL(conv_f64, ConvParams, (conv<double>), 256)
