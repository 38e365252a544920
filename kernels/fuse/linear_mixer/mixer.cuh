// What the kernels of a linear-attention layer's token share: their parameters, and the gates.
#pragma once

#include "common.cuh"

namespace nxrt::linear_mixer {

enum Gate : uint32_t { kGiven, kSoftplus, kLogSoftplus, kLogSigmoid };
enum Activation : uint32_t { kNone, kSilu, kSigmoid };

struct MixerParams {
    const void* q;            // [batch, k_heads, dk], tokens q_stride elements apart
    const void* k;            // [batch, k_heads, dk]
    const void* v;            // [batch, v_heads, dv]
    const void* conv_weight;  // [channels, taps]; null: no convolution
    const void* conv_bias;    // [channels]; null: zeros
    const void* conv_past;    // [batch, channels, taps - 1] in the order of conv_step and conv_channel; null: zeros
    void* conv_present;       // null: nobody reads it
    const void* decay;        // [batch, v_heads]; null: no decay
    const void* beta;         // [batch, beta_heads]; null: no delta
    const float* gate_factor; // [v_heads]
    const float* gate_bias;   // [v_heads]
    const void* past;         // states; null: zeros
    void* present;            // null: nobody reads it
    const void* gamma;        // [dv]; null: the output is not normalised
    const void* z;            // [batch, v_heads, dv]
    void* y;                  // [batch, v_heads, dv]
    uint64_t q_stride;
    uint64_t k_stride;
    uint64_t v_stride;
    uint32_t k_heads;
    uint32_t v_heads;
    uint32_t heads;         // value heads of a block
    uint32_t dk;
    uint32_t dv;
    uint32_t group_bits;    // log2 of the threads along a state's row
    uint32_t part_bits;     // log2 of the threads that add up one column
    uint32_t channels;
    uint32_t taps;
    uint32_t conv_step;     // elements from position to position of the convolution's state
    uint32_t conv_channel;  // elements from channel to channel
    uint32_t q_channel;     // the first channel of the queries
    uint32_t k_channel;
    uint32_t v_channel;
    uint32_t conv_silu;
    uint32_t beta_heads;
    uint32_t gate;          // log decay: 0: decay; 1: factor softplus(decay + bias);
                            // 2: -exp(factor) softplus(decay + bias); 3: lower_bound sigmoid(exp(factor) (decay + bias))
    uint32_t decay_f32;     // whatever the query is
    uint32_t beta_f32;
    uint32_t sigmoid_beta;
    uint32_t q_norm;        // queries are divided by sqrt(squares + q_epsilon)
    uint32_t k_norm;
    float q_epsilon;
    float k_epsilon;
    float scale;
    float lower_bound;
    float epsilon;          // of the output's norm
    uint32_t activation;    // of its gate
    uint32_t columns;       // dv, rounded up to a thread's elements of a row
    uint32_t stride;        // floats of a slot of sums
    uint32_t early;         // past and conv_past are what the kernel in front does not write: see NXRT_KERNEL_EARLY
    uint32_t pad;
};

struct ExactMath {
    static NXRT_DEVICE float exp(float x) { return expf(x); }
    static NXRT_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
    static NXRT_DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
};
// For what ends in 16 bits: errors of some 2^-20.
struct FastMath {
    static NXRT_DEVICE float exp(float x) { return __expf(x); }
    static NXRT_DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
    static NXRT_DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + __logf(1.0f + __expf(-fabsf(x))); }
};

// ---- gates ----

template <class T>
NXRT_DEVICE float gate_element(const void* from, bool f32, uint64_t i) {
    return f32 ? static_cast<const float*>(from)[i] : to_float(static_cast<const T*>(from)[i]);
}

// What a head's gates are made of.
struct Gates {
    float decay, beta, factor, bias;

    template <class Math>
    NXRT_DEVICE void load_constants(const MixerParams& p, uint32_t head) {
        factor = p.gate ? p.gate_factor[head] : 0.0f;
        bias = p.gate ? p.gate_bias[head] : 0.0f;
        if (p.gate >= kLogSoftplus) factor = Math::exp(factor);
    }
    template <class T>
    NXRT_DEVICE void load(const MixerParams& p, uint64_t batch, uint32_t head) {
        decay = p.decay ? gate_element<T>(p.decay, p.decay_f32, batch * p.v_heads + head) : 0.0f;
        const uint32_t beta_head = p.beta_heads == 1 ? 0 : head;
        beta = p.beta ? gate_element<T>(p.beta, p.beta_f32, batch * p.beta_heads + beta_head) : 1.0f;
    }
    // Turns them into the state's factor and the update's.
    template <class Math>
    NXRT_DEVICE void finish(const MixerParams& p) {
        const float raw = decay + bias;
        switch (p.decay ? p.gate : kGiven) {
            case kGiven: break;
            case kSoftplus: decay = factor * Math::softplus(raw); break;
            case kLogSoftplus: decay = -factor * Math::softplus(raw); break;
            default: decay = p.lower_bound * Math::sigmoid(factor * raw);
        }
        decay = Math::exp(decay);
        if (p.beta && p.sigmoid_beta) beta = Math::sigmoid(beta);
    }
};

}  // namespace nxrt::linear_mixer
