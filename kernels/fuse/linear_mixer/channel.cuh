// What the kernels for states of kSize x kSize share: a convolution of four taps, and vectors as operands of tensor cores.
#pragma once

#include "mixer.cuh"

namespace nxrt::linear_mixer {

constexpr unsigned kSize = 128;  // D and E
// Of a 16-bit float's error, which is an operand as well: it is stored times this.
constexpr float kRest = 2048.0f;

// x as the sum of two elements.
template <class T>
NXRT_DEVICE void split_in_two(T* to, unsigned pitch, float x) {
    const T rounded = from_float<T>(x);
    to[0] = rounded;
    to[pitch] = from_float<T>((x - to_float(rounded)) * kRest);
}

// One channel of the convolution.
template <class T>
struct Channel {
    Vec<T, 4> weight;
    T bias, past[3], x;
    const T* from;
    uint32_t channel;

    // Element c of what lies at `rows` and is `channel` of the convolution.
    NXRT_DEVICE void locate(const MixerParams& p, uint32_t batch, const void* rows, uint64_t stride, uint32_t first_channel, uint32_t c) {
        from = static_cast<const T*>(rows) + batch * stride + c;
        channel = first_channel + c;
        bias = past[0] = past[1] = past[2] = from_float<T>(0.0f);
        weight = load_vec<T, 4>(static_cast<const T*>(p.conv_weight) + channel * 4);
        if (p.conv_bias) bias = static_cast<const T*>(p.conv_bias)[channel];
    }
    // Of its state.
    NXRT_DEVICE uint64_t first(const MixerParams& p, uint32_t batch) const {
        return uint64_t(batch) * p.channels * 3 + uint64_t(channel) * p.conv_channel;
    }
    NXRT_DEVICE void load_past(const MixerParams& p, uint32_t batch) {
        if (!p.conv_past) return;
        const T* at = static_cast<const T*>(p.conv_past) + first(p, batch);
#pragma unroll
        for (int j = 0; j < 3; ++j) past[j] = at[j * p.conv_step];
    }
    NXRT_DEVICE float convolve(const MixerParams& p) const {
        float sum = fmaf(to_float(weight[0]), to_float(past[0]), to_float(bias));
        sum = fmaf(to_float(weight[1]), to_float(past[1]), sum);
        sum = fmaf(to_float(weight[2]), to_float(past[2]), sum);
        sum = fmaf(to_float(weight[3]), to_float(x), sum);
        return p.conv_silu ? sum * FastMath::sigmoid(sum) : sum;
    }
    NXRT_DEVICE void store(const MixerParams& p, uint32_t batch) const {
        if (!p.conv_present) return;
        T* at = static_cast<T*>(p.conv_present) + first(p, batch);
        at[0] = past[1];
        at[p.conv_step] = past[2];
        at[2 * p.conv_step] = x;
    }
};

NXRT_DEVICE float inverse(uint32_t wanted, float squares, float epsilon) {
    // Zeros stay zeros.
    return !wanted ? 1.0f : squares + epsilon > 0.0f ? rsqrtf(squares + epsilon) : 0.0f;
}

}  // namespace nxrt::linear_mixer
