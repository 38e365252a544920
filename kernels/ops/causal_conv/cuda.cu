// Depthwise causal convolution along time, with a carried state. B batch, C channels, T new positions, K taps,
// L = (K - 1) dilation; X is the past state followed by the input.
//
// The present state may be the past one's buffer: one thread (or one block, behind a barrier) reads a channel's past
// and then writes its present, and nobody else touches either.
#include "common.cuh"

using namespace nxrt;

struct ConvParams {
    const void* input;   // [B, C, T], or [B, T, C] with channels last
    const void* weight;  // [C, K]
    const void* bias;    // [C]; null: zeros
    const void* past;    // [B, C, L] or [B, L, C]; null: zeros
    void* present;       // null: nobody reads it
    void* output;        // null: nobody reads it
    uint64_t channels;
    uint32_t tokens;
    uint32_t length;
    uint32_t dilation;
    uint32_t taps;
    uint32_t chunk;  // positions of a block or thread, L at least
    uint32_t silu;
};

// Outputs and taps whose operands are loaded together.
constexpr int kOutputs = 4;
constexpr unsigned kTaps = 4;
// Neighbours along a row that a thread reads and writes at once.
constexpr unsigned kNeighbours = 8;

NXRT_DEVICE float activate(const ConvParams& p, float x) { return p.silu ? x / (1.0f + expf(-x)) : x; }

// One channel of one batch.
template <class T>
struct Channel {
    const T* x;     // position t at x[t * stride]
    const T* past;  // null: zeros
    T* present;     // null: nobody reads it
    T* y;           // null: nobody reads it
    const T* weight;
    float bias;
    uint64_t stride;

    NXRT_DEVICE Channel(const ConvParams& p, uint64_t batch, uint64_t channel, bool last) {
        const uint64_t row = batch * p.channels + channel;
        const uint64_t at = last ? batch * p.tokens * p.channels + channel : row * p.tokens;
        const uint64_t state = last ? batch * p.length * p.channels + channel : row * p.length;
        stride = last ? p.channels : 1;
        x = static_cast<const T*>(p.input) + at;
        past = p.past ? static_cast<const T*>(p.past) + state : nullptr;
        present = p.present ? static_cast<T*>(p.present) + state : nullptr;
        y = p.output ? static_cast<T*>(p.output) + at : nullptr;
        weight = static_cast<const T*>(p.weight) + channel * p.taps;
        bias = p.bias ? to_float(static_cast<const T*>(p.bias)[channel]) : 0.0f;
    }

    // Position i of X, or zero where not `wanted`.
    NXRT_DEVICE T at(const ConvParams& p, uint32_t i, bool wanted) const {
        const bool fresh = i >= p.length;
        const T* from = fresh ? x + (i - p.length) * stride : past + i * stride;
        return wanted && (fresh || past) ? *from : from_float<T>(0.0f);
    }

    // Outputs first, first + step, ... below end, with taps from `tap` on added to `sums`.
    NXRT_DEVICE void add(const ConvParams& p, uint32_t first, uint32_t step, uint32_t end, uint32_t tap,
                         const float (&w)[kTaps], float (&sums)[kOutputs]) const {
        T v[kOutputs][kTaps];
#pragma unroll
        for (int o = 0; o < kOutputs; ++o)
#pragma unroll
            for (unsigned j = 0; j < kTaps; ++j) {
                const uint32_t t = first + o * step;
                v[o][j] = at(p, t + (tap + j) * p.dilation, t < end && tap + j < p.taps);
            }
#pragma unroll
        for (int o = 0; o < kOutputs; ++o)
#pragma unroll
            for (unsigned j = 0; j < kTaps; ++j) sums[o] = fmaf(w[j], to_float(v[o][j]), sums[o]);
    }

    NXRT_DEVICE void weights(const ConvParams& p, uint32_t tap, float (&w)[kTaps]) const {
#pragma unroll
        for (unsigned j = 0; j < kTaps; ++j) w[j] = tap + j < p.taps ? to_float(weight[tap + j]) : 0.0f;
    }

    // Outputs first, first + step, ... below end.
    NXRT_DEVICE void outputs(const ConvParams& p, uint32_t first, uint32_t step, uint32_t end) const {
        float w[kTaps];
        weights(p, 0, w);
        for (; first < end; first += kOutputs * step) {
            float sums[kOutputs];
#pragma unroll
            for (int o = 0; o < kOutputs; ++o) sums[o] = bias;
            add(p, first, step, end, 0, w, sums);
            for (uint32_t tap = kTaps; tap < p.taps; tap += kTaps) {
                float more[kTaps];
                weights(p, tap, more);
                add(p, first, step, end, tap, more, sums);
            }
#pragma unroll
            for (int o = 0; o < kOutputs; ++o) {
                const uint32_t t = first + o * step;
                if (t < end) y[t * stride] = from_float<T>(activate(p, sums[o]));
            }
        }
    }

    // Whether `neighbours` serves: four adjacent taps, and aligned vectors.
    NXRT_DEVICE bool in_vectors(const ConvParams& p) const {
        const uintptr_t starts = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(y);
        return starts % 16 == 0 && (p.tokens | p.chunk) % kNeighbours == 0 && p.dilation == 1 && p.taps == kTaps;
    }

    // Outputs first .. first + 8 of a row.
    NXRT_DEVICE void neighbours(const ConvParams& p, uint32_t first) const {
        constexpr unsigned kBefore = kTaps - 1;
        float w[kTaps], v[kBefore + kNeighbours];
        weights(p, 0, w);
#pragma unroll
        for (unsigned j = 0; j < kBefore; ++j) v[j] = to_float(at(p, first + j, true));
        const Vec<T, kNeighbours> own = load_vec<T, kNeighbours>(x + first);
        Vec<T, kNeighbours> out;
#pragma unroll
        for (unsigned i = 0; i < kNeighbours; ++i) v[kBefore + i] = to_float(own[i]);
#pragma unroll
        for (unsigned i = 0; i < kNeighbours; ++i) {
            float sum = bias;
#pragma unroll
            for (unsigned j = 0; j < kTaps; ++j) sum = fmaf(w[j], v[i + j], sum);
            out[i] = from_float<T>(activate(p, sum));
        }
        store_vec<T, kNeighbours>(y + first, out);
    }

    // By one thread, after its outputs: in rising order, no position is written before it is read.
    NXRT_DEVICE void shift(const ConvParams& p) const {
        if (!present) return;
        for (uint32_t first = 0; first < p.length; first += kTaps) {
            T v[kTaps];
#pragma unroll
            for (unsigned j = 0; j < kTaps; ++j) v[j] = at(p, p.tokens + first + j, first + j < p.length);
#pragma unroll
            for (unsigned j = 0; j < kTaps; ++j)
                if (first + j < p.length) present[(first + j) * stride] = v[j];
        }
    }
};

// Channels last, or few positions: a thread for each channel and chunk of positions.
template <class T, bool LAST>
NXRT_DEVICE void conv_channels(const ConvParams& p) {
    const uint32_t blocks = static_cast<uint32_t>(ceil_div(p.channels, uint64_t(blockDim.x)));
    const uint64_t channel = blockIdx.x % blocks * blockDim.x + threadIdx.x;
    const uint32_t chunks = max(1u, ceil_div(p.tokens, p.chunk));
    const uint32_t chunk = blockIdx.x / blocks % chunks;
    if (channel >= p.channels) return;
    const Channel<T> c(p, blockIdx.x / blocks / chunks, channel, LAST);
    if (c.y) c.outputs(p, chunk * p.chunk, 1, min((chunk + 1) * p.chunk, p.tokens));
    // The first chunk alone reads the past, since chunks are no shorter than it.
    if (chunk == 0) c.shift(p);
}

// Channels first, T >= L: a block for each channel and chunk of positions.
template <class T>
NXRT_DEVICE void conv_rows(const ConvParams& p) {
    const uint32_t chunks = ceil_div(p.tokens, p.chunk);
    const uint32_t chunk = blockIdx.x % chunks;
    const uint32_t row = blockIdx.x / chunks;
    const Channel<T> c(p, row / p.channels, row % p.channels, false);
    const uint32_t begin = chunk * p.chunk, end = min((chunk + 1) * p.chunk, p.tokens);
    if (c.y && c.in_vectors(p)) {
        for (uint32_t first = begin + threadIdx.x * kNeighbours; first < end; first += blockDim.x * kNeighbours)
            c.neighbours(p, first);
    } else if (c.y) {
        c.outputs(p, begin + threadIdx.x, blockDim.x, end);
    }
    if (chunk != 0 || !c.present) return;
    // Other threads may still read the past.
    __syncthreads();
    for (uint32_t j = threadIdx.x; j < p.length; j += blockDim.x) c.present[j] = c.x[p.tokens - p.length + j];
}

NXRT_KERNEL(conv_last_f32, ConvParams, (conv_channels<float, true>), 128)
NXRT_KERNEL(conv_last_f16, ConvParams, (conv_channels<half, true>), 128)
NXRT_KERNEL(conv_last_bf16, ConvParams, (conv_channels<bf16, true>), 128)
NXRT_KERNEL(conv_few_f32, ConvParams, (conv_channels<float, false>), 128)
NXRT_KERNEL(conv_few_f16, ConvParams, (conv_channels<half, false>), 128)
NXRT_KERNEL(conv_few_bf16, ConvParams, (conv_channels<bf16, false>), 128)
NXRT_KERNEL(conv_rows_f32, ConvParams, (conv_rows<float>), 128)
NXRT_KERNEL(conv_rows_f16, ConvParams, (conv_rows<half>), 128)
NXRT_KERNEL(conv_rows_bf16, ConvParams, (conv_rows<bf16>), 128)
