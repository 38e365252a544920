// Routing: which experts a token goes to and what each counts for, the order of the pairs by expert, and the sums over pairs.
#include "experts.cuh"
#include "number.cuh"

using namespace nxrt;

struct RouteParams {
    const void* logits;   // [T, E]
    const void* weights;  // [T, E], or null
    uint32_t* ids;        // [T, top]
    float* mix;           // [T, top]
    uint32_t dtype, weights_dtype;
    uint32_t tokens, experts, top;
    uint32_t normalize;
    uint32_t sparse;  // the sparse mixer
    uint32_t pad;
};

constexpr int kRouteWarps = 4;
// Logits that a lane keeps in registers.
constexpr int kKept = 16;
// What the sparse mixer counts lies so far below the greatest, relatively, twice.
constexpr float kJitter = 0.01f;

// Numbers of the order of the logits, then of the indices; 0 is before all.
NXRT_DEVICE uint64_t logit_key(float logit, uint32_t index) {
    const uint32_t bits = __float_as_uint(logit + 0.0f);
    return uint64_t(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | index;
}
NXRT_DEVICE uint64_t warp_most(uint64_t key) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const uint64_t other = __shfl_xor_sync(kFullMask, key, step);
        if (other > key) key = other;
    }
    return key;
}

// A token's logits, seen by a warp: the first 32 kKept in registers.
struct Logits {
    const RouteParams& p;
    uint64_t row;
    float kept[kKept];

    NXRT_DEVICE Logits(const RouteParams& params, uint32_t token) : p(params), row(uint64_t(token) * params.experts) {
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            const uint32_t e = i * kWarpSize + lane_id();
            kept[i] = e < p.experts ? at(e) : 0;
        }
    }
    NXRT_DEVICE float at(uint32_t e) const { return load_any<float>(p.dtype, p.logits, row + e); }

    // Calls f(e, logit) for this lane's share.
    template <class F>
    NXRT_DEVICE void each(const F& f) const {
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            const uint32_t e = i * kWarpSize + lane_id();
            if (e < p.experts) f(e, kept[i]);
        }
        for (uint32_t e = kKept * kWarpSize + lane_id(); e < p.experts; e += kWarpSize) f(e, at(e));
    }
};

// Lane j gets the j-th expert and its logit: of equals the later first.
NXRT_DEVICE void choose(const Logits& logits, uint32_t top, uint32_t& id, float& logit) {
    uint64_t last = ~uint64_t{0};
    for (uint32_t j = 0; j < top; ++j) {
        uint64_t most = 0;
        logits.each([&](uint32_t e, float x) {
            const uint64_t key = logit_key(x, e);
            if (key < last && key > most) most = key;
        });
        last = warp_most(most);
        if (lane_id() == j) id = uint32_t(last);
    }
    if (lane_id() < top) logit = logits.at(id);
}

// The sparse mixer: of equals the earlier first; each is weighed among those close to it.
NXRT_DEVICE void mix_two(const Logits& logits, uint32_t& id, float& weight) {
    uint32_t first = ~0u;
    for (uint32_t j = 0; j < 2; ++j) {
        uint64_t most = 0;
        logits.each([&](uint32_t e, float x) {
            const uint64_t key = logit_key(x, ~e);
            if (e != first && key > most) most = key;
        });
        const uint32_t chosen = ~uint32_t(warp_most(most));
        const float greatest = logits.at(chosen);
        float sum = 0;
        logits.each([&](uint32_t e, float x) {
            const bool close = greatest - x <= 2 * kJitter * fmaxf(fabsf(x), greatest);
            if (e != first && close) sum += std::exp(x - greatest);
        });
        sum = warp_sum(sum);
        if (lane_id() == j) {
            id = chosen;
            weight = 1.0f / sum;
        }
        first = chosen;
    }
}

// A warp for each token.
NXRT_DEVICE void route_tokens(const RouteParams& p) {
    const uint32_t token = blockIdx.x * (blockDim.x / kWarpSize) + warp_id();
    if (token >= p.tokens) return;
    const Logits logits(p, token);
    const bool mine = lane_id() < p.top;
    uint32_t id = 0;
    float weight = 0;
    if (p.sparse) mix_two(logits, id, weight);
    else choose(logits, p.top, id, weight);
    if (p.weights) {
        weight = mine ? load_any<float>(p.weights_dtype, p.weights, uint64_t(token) * p.experts + id) : 0.0f;
        if (p.normalize) {
            const float sum = warp_sum(weight);
            weight = sum == 0.0f ? 0.0f : weight / sum;
        }
    } else if (!p.sparse) {
        const float greatest = __shfl_sync(kFullMask, weight, 0);
        weight = mine ? std::exp(weight - greatest) : 0.0f;
        float sum = weight;
        if (!p.normalize) {
            sum = 0;
            logits.each([&](uint32_t, float x) { sum += std::exp(x - greatest); });
        }
        weight /= warp_sum(sum);
    }
    if (mine) {
        p.ids[uint64_t(token) * p.top + lane_id()] = id;
        p.mix[uint64_t(token) * p.top + lane_id()] = weight;
    }
}

struct OrderParams {
    const uint32_t* ids;  // [P]
    uint32_t* order;      // [P]
    Item* items;
    uint32_t pairs, experts;
    uint32_t rows;   // an item at most
    uint32_t slots;  // items there is room for
};

constexpr int kOrderThreads = 1024;

// One block sorts the pairs by expert and cuts them into items; slots that are left over get none. Pairs of an expert come in
// any order: no product depends on it. Dynamic shared memory: two numbers an expert.
NXRT_DEVICE void order_pairs(const OrderParams& p) {
    NXRT_DYNAMIC_SHARED(uint32_t, first);
    NXRT_SHARED uint32_t used;
    uint32_t* first_item = first + p.experts;
    for (uint32_t e = threadIdx.x; e < p.experts; e += blockDim.x) first[e] = 0;
    __syncthreads();
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < p.pairs; i += blockDim.x) atomicAdd(&first[p.ids[i]], 1u);
    __syncthreads();
    // Sums of those in front: of pairs and of items.
    if (warp_id() == 0) {
        uint32_t pairs = 0, items = 0;
        for (uint32_t e0 = 0; e0 < p.experts; e0 += kWarpSize) {
            const uint32_t e = e0 + lane_id(), own = e < p.experts ? first[e] : 0, own_items = ceil_div(own, p.rows);
            uint32_t sum = own, sum_items = own_items;
#pragma unroll
            for (unsigned step = 1; step < kWarpSize; step *= 2) {
                const uint32_t before = __shfl_up_sync(kFullMask, sum, step);
                const uint32_t before_items = __shfl_up_sync(kFullMask, sum_items, step);
                if (lane_id() >= step) {
                    sum += before;
                    sum_items += before_items;
                }
            }
            if (e < p.experts) {
                first[e] = pairs + sum - own;
                first_item[e] = items + sum_items - own_items;
            }
            pairs += __shfl_sync(kFullMask, sum, kWarpSize - 1);
            items += __shfl_sync(kFullMask, sum_items, kWarpSize - 1);
        }
        if (lane_id() == 0) used = items;
    }
    __syncthreads();
    for (uint32_t e = warp_id(); e < p.experts; e += warp_count()) {
        const bool last = e + 1 == p.experts;
        const uint32_t end = last ? p.pairs : first[e + 1], items = (last ? used : first_item[e + 1]) - first_item[e];
        for (uint32_t i = lane_id(); i < items; i += kWarpSize) {
            const uint32_t at = first[e] + i * p.rows;
            p.items[first_item[e] + i] = {e, at, min(p.rows, end - at), 0};
        }
    }
    for (uint32_t i = used + threadIdx.x; i < p.slots; i += blockDim.x) p.items[i] = {0, 0, 0, 0};
    __syncthreads();
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < p.pairs; i += blockDim.x) p.order[atomicAdd(&first[p.ids[i]], 1u)] = i;
}

struct CombineParams {
    const float* sums;  // [T, top, H]
    const float* mix;   // [T, top]
    void* y;            // [T, H]
    uint32_t tokens, top, hidden, pad;
};

// N elements of a token a thread.
template <class T, int N>
NXRT_DEVICE void combine_some(const CombineParams& p, uint32_t token, uint32_t n) {
    float total[N] = {};
    const float* mix = p.mix + uint64_t(token) * p.top;
    const float* from = p.sums + uint64_t(token) * p.top * p.hidden + n;
#pragma unroll 4
    for (uint32_t j = 0; j < p.top; ++j) {
        const Vec<float, N> x = load_vec<float, N>(from + uint64_t(j) * p.hidden);
#pragma unroll
        for (int i = 0; i < N; ++i) total[i] += mix[j] * x[i];
    }
    Vec<T, N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = from_float<T>(total[i]);
    store_vec<T, N>(static_cast<T*>(p.y) + uint64_t(token) * p.hidden + n, y);
}

template <class T>
NXRT_DEVICE void combine(const CombineParams& p) {
    const bool wide = p.hidden % 4 == 0 && reinterpret_cast<uintptr_t>(p.y) % (4 * sizeof(T)) == 0;
    for (uint32_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        if (wide) {
            for (uint32_t n = threadIdx.x * 4; n < p.hidden; n += blockDim.x * 4) combine_some<T, 4>(p, token, n);
        } else {
            for (uint32_t n = threadIdx.x; n < p.hidden; n += blockDim.x) combine_some<T, 1>(p, token, n);
        }
    }
}

NXRT_KERNEL(route, RouteParams, route_tokens, kRouteWarps * 32)
NXRT_KERNEL(order, OrderParams, order_pairs, kOrderThreads)
NXRT_KERNEL(combine_f32, CombineParams, combine<float>, 256)
NXRT_KERNEL(combine_f16, CombineParams, combine<half>, 256)
NXRT_KERNEL(combine_bf16, CombineParams, combine<bf16>, 256)
