// decay = decay_scale softplus(a + dt_bias), beta = sigmoid(b), over [..., H].
#include "walk.cuh"

using namespace nxrt;

struct GateParams {
    const void* a;
    const void* b;             // null: no beta
    const float* dt_bias;      // [H]
    const float* decay_scale;  // [H]
    void* decay;               // null: nobody reads it
    void* beta;                // null: nobody reads it
    uint64_t n;
    uint64_t heads;
};

template <class T>
NXRT_DEVICE void gates(const GateParams& p) {
    const T* a = static_cast<const T*>(p.a);
    const T* b = static_cast<const T*>(p.b);
    T* decay = static_cast<T*>(p.decay);
    T* beta = static_cast<T*>(p.beta);
    for (uint64_t i = grid_thread(); i < p.n; i += grid_threads()) {
        if (decay) {
            uint64_t head = i;
            split_off(head, p.heads);
            const float x = to_float(a[i]) + p.dt_bias[head];
            decay[i] = from_float<T>(p.decay_scale[head] * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))));
        }
        if (b && beta) beta[i] = from_float<T>(1.0f / (1.0f + expf(-to_float(b[i]))));
    }
}

NXRT_KERNEL(gates_f32, GateParams, (gates<float>), 256)
NXRT_KERNEL(gates_f16, GateParams, (gates<half>), 256)
NXRT_KERNEL(gates_bf16, GateParams, (gates<bf16>), 256)
