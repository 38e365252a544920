// The recurrence of LinearAttention and GatedDeltaNet as their kernels see it. For each sequence and value head, with S
// the state [D, E], token by token:
//
//   S' = diag(f) S                rules with decay
//   d  = beta (v - S'^T k)        rules with delta; else d = v
//   S  = S' + k d^T
//   o  = scale S^T q              for each query head that reads this state
//
// N tokens of all sequences; Hq query, Hk key, Hv value heads; D key size, E value size. Columns of S are independent.
#pragma once

#include "common.cuh"

namespace nxrt {

struct DeltaParams {
    const void* q;              // [N, Hq, D], tokens q_stride elements apart
    const void* k;              // [N, Hk, D]
    const void* v;              // [N, Hv, E]
    const void* decay;          // [N, Hv] or [N, Hv, D]; null: no decay
    const void* beta;           // [N, Hv] or [N, 1]; null: no delta
    const float* a_log;         // [Hv]
    const float* dt_bias;       // [Hv] or [Hv, D]
    const int32_t* cu_seqlens;  // [sequences + 1]; null: sequences of one length
    const void* past;           // states; null: zeros
    void* present;              // perhaps the past's buffer; null: nobody reads it
    void* out;                  // [N, max(Hq, Hv), E]; null: nobody reads it
    float* scratch;
    uint64_t q_stride;
    uint64_t k_stride;
    uint64_t v_stride;
    uint32_t tokens;
    uint32_t sequences;
    uint32_t q_heads;
    uint32_t k_heads;
    uint32_t v_heads;
    uint32_t dk;
    uint32_t dv;
    uint32_t beta_heads;
    uint32_t state_type;    // 0: f32, 1: f16, 2: bf16
    uint32_t v_major;       // states are [E, D], not [D, E]
    uint32_t per_key;       // decay has an element for each key dim
    uint32_t f32_gates;     // decay and beta are f32, whatever the query is
    uint32_t gate;          // log f: 0: decay; 1: -exp(a_log) softplus(decay + dt_bias);
                            // 2: lower_bound sigmoid(exp(a_log) (decay + dt_bias))
    uint32_t bias_per_key;  // dt_bias has an element for each key dim
    uint32_t sigmoid_beta;
    uint32_t l2_norm;       // k and q are divided by their norms
    float scale;
    float lower_bound;
};

// As ORT's kernels have it.
constexpr float kL2Epsilon = 1e-12f;

NXRT_DEVICE float inverse_norm(const DeltaParams& p, float squares) {
    return p.l2_norm ? 1.0f / sqrtf(squares + kL2Epsilon) : 1.0f;
}

NXRT_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
NXRT_DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// ---- tokens ----

struct Span {
    uint32_t begin;
    uint32_t end;
};

// A sequence's tokens; bounds that are no rising numbers up to N are clamped.
NXRT_DEVICE Span span(const DeltaParams& p, uint32_t sequence) {
    if (!p.cu_seqlens) {
        const uint32_t each = p.tokens / p.sequences;
        return {sequence * each, (sequence + 1) * each};
    }
    const int begin = min(max(p.cu_seqlens[sequence], 0), static_cast<int>(p.tokens));
    const int end = min(max(p.cu_seqlens[sequence + 1], begin), static_cast<int>(p.tokens));
    return {static_cast<uint32_t>(begin), static_cast<uint32_t>(end)};
}

// Tokens are numbered in chunks: a sequence's first chunk, such that no two sequences share one.
NXRT_DEVICE uint32_t first_chunk(const Span& tokens, uint32_t sequence, uint32_t chunk_size) {
    return tokens.begin / chunk_size + sequence;
}
NXRT_DEVICE uint32_t chunk_count(const DeltaParams& p, uint32_t chunk_size) {
    return p.tokens / chunk_size + p.sequences;
}

// The tokens of a chunk, perhaps none.
NXRT_DEVICE Span chunk_span(const DeltaParams& p, uint32_t chunk, uint32_t chunk_size) {
    uint32_t sequence = 0;
    for (uint32_t end = p.sequences; end - sequence > 1;) {
        const uint32_t middle = sequence + (end - sequence) / 2;
        if (first_chunk(span(p, middle), middle, chunk_size) <= chunk) sequence = middle;
        else end = middle;
    }
    const Span tokens = span(p, sequence);
    const uint32_t first = tokens.begin + (chunk - first_chunk(tokens, sequence, chunk_size)) * chunk_size;
    return {min(first, tokens.end), min(first + chunk_size, tokens.end)};
}

template <class T>
NXRT_DEVICE float gate_element(const DeltaParams& p, const void* from, uint64_t i) {
    return p.f32_gates ? static_cast<const float*>(from)[i] : to_float(static_cast<const T*>(from)[i]);
}

// f of a token's head; of key dim `key` where the decay has one for each.
template <class T>
NXRT_DEVICE float decay_factor(const DeltaParams& p, uint64_t token, uint32_t head, uint32_t key) {
    if (!p.decay) return 1.0f;
    const uint64_t at = token * p.v_heads + head;
    float log = gate_element<T>(p, p.decay, p.per_key ? at * p.dk + key : at);
    if (p.gate) {
        const float biased = log + p.dt_bias[p.bias_per_key ? head * p.dk + key : head];
        const float a = expf(p.a_log[head]);
        log = p.gate == 1 ? -a * softplus(biased) : p.lower_bound * sigmoid(a * biased);
    }
    return expf(log);
}

template <class T>
NXRT_DEVICE float beta_factor(const DeltaParams& p, uint64_t token, uint32_t head) {
    if (!p.beta) return 1.0f;
    const float raw = gate_element<T>(p, p.beta, token * p.beta_heads + (p.beta_heads == 1 ? 0 : head));
    return p.sigmoid_beta ? sigmoid(raw) : raw;
}

template <class T>
NXRT_DEVICE const T* q_row(const DeltaParams& p, uint64_t token, uint32_t q_head) {
    return static_cast<const T*>(p.q) + token * p.q_stride + q_head * p.dk;
}
template <class T>
NXRT_DEVICE const T* k_row(const DeltaParams& p, uint64_t token, uint32_t head) {
    return static_cast<const T*>(p.k) + token * p.k_stride + head * p.k_heads / p.v_heads * p.dk;
}
template <class T>
NXRT_DEVICE const T* v_row(const DeltaParams& p, uint64_t token, uint32_t head) {
    return static_cast<const T*>(p.v) + token * p.v_stride + head * p.dv;
}

// ---- four elements ----

// Whether rows that start `base + n * step` (step in elements) can be read four elements at a time.
template <class T>
NXRT_DEVICE bool fours(const void* base, uint64_t step) {
    return reinterpret_cast<uintptr_t>(base) % (4 * sizeof(T)) == 0 && step % 4 == 0;
}

// `count` elements (none when negative), zeros beyond. `wide`: all four or none, aligned.
template <class T>
NXRT_DEVICE Vec<T, 4> load_four(const T* from, int count, bool wide) {
    Vec<T, 4> r = {};
    if (wide) {
        if (count > 0) r = load_vec<T, 4>(from);
        return r;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < count) r[i] = from[i];
    return r;
}

template <class T>
NXRT_DEVICE void store_four(T* to, const Vec<T, 4>& x, int count, bool wide) {
    if (wide) {
        if (count > 0) store_vec<T, 4>(to, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < count) to[i] = x[i];
}

template <class T>
NXRT_DEVICE Vec<float, 4> widen(const Vec<T, 4>& x) {
    Vec<float, 4> r;
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = to_float(x[i]);
    return r;
}
template <class T>
NXRT_DEVICE Vec<T, 4> narrow(const Vec<float, 4>& x) {
    Vec<T, 4> r;
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = from_float<T>(x[i]);
    return r;
}

// ---- states ----

// Element (row, column) of a head's state.
NXRT_DEVICE uint64_t state_at(const DeltaParams& p, uint64_t sequence_head, uint32_t row, uint32_t column) {
    return sequence_head * p.dk * p.dv + (p.v_major ? uint64_t(column) * p.dk + row : uint64_t(row) * p.dv + column);
}

NXRT_DEVICE float load_state(const DeltaParams& p, uint64_t i) {
    if (!p.past) return 0.0f;
    switch (p.state_type) {
        case 0: return static_cast<const float*>(p.past)[i];
        case 1: return to_float(static_cast<const half*>(p.past)[i]);
        default: return to_float(static_cast<const bf16*>(p.past)[i]);
    }
}
NXRT_DEVICE void store_state(const DeltaParams& p, uint64_t i, float x) {
    switch (p.state_type) {
        case 0: static_cast<float*>(p.present)[i] = x; break;
        case 1: static_cast<half*>(p.present)[i] = from_float<half>(x); break;
        default: static_cast<bf16*>(p.present)[i] = from_float<bf16>(x); break;
    }
}

// Whether four elements that follow each other in memory can be moved at once; a row of them has `step` elements.
NXRT_DEVICE bool state_fours(const DeltaParams& p, uint64_t step) {
    const uintptr_t both = reinterpret_cast<uintptr_t>(p.past) | reinterpret_cast<uintptr_t>(p.present);
    return both % (p.state_type == 0 ? 16 : 8) == 0 && step % 4 == 0;
}
NXRT_DEVICE Vec<float, 4> load_state_four(const DeltaParams& p, uint64_t i, int count, bool wide) {
    if (!p.past) return {};
    switch (p.state_type) {
        case 0: return load_four(static_cast<const float*>(p.past) + i, count, wide);
        case 1: return widen(load_four(static_cast<const half*>(p.past) + i, count, wide));
        default: return widen(load_four(static_cast<const bf16*>(p.past) + i, count, wide));
    }
}
NXRT_DEVICE void store_state_four(const DeltaParams& p, uint64_t i, const Vec<float, 4>& x, int count, bool wide) {
    switch (p.state_type) {
        case 0: store_four(static_cast<float*>(p.present) + i, x, count, wide); break;
        case 1: store_four(static_cast<half*>(p.present) + i, narrow<half>(x), count, wide); break;
        default: store_four(static_cast<bf16*>(p.present) + i, narrow<bf16>(x), count, wide); break;
    }
}

}  // namespace nxrt
