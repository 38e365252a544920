// Loops over tensors that broadcast. A unit is 16 bytes of the widest operand where `vector` says that the layout has
// such runs and the addresses are aligned, else one element.
#pragma once

#include "walk.cuh"

namespace nxrt {

// Whether operand k may be read in vectors: its run is contiguous and aligned, or one element all along.
template <int K>
NXRT_DEVICE bool fits(const Walk<K>& walk, int k, const void* p, uint32_t bytes) {
    return walk.strides[k][walk.rank - 1] == 0 || is_aligned(p, bytes);
}

// N elements from p on, whose run has stride 0 or 1.
template <class T, int N>
NXRT_DEVICE Vec<T, N> fetch(const T* p, int64_t stride) {
    if (stride != 0) return load_vec<T, N>(p);
    Vec<T, N> r;
    const T x = *p;
#pragma unroll
    for (int i = 0; i < N; ++i) r[i] = x;
    return r;
}

// Calls `vectors(first element, offsets)` for whole units of N elements where `wide`, and `single(element, offsets)` for
// what is left (everything, where not). A walk of more than one dim has no partial unit, as the host has seen to.
template <int N, int K, class Vectors, class Single>
NXRT_DEVICE void for_each_unit(const Walk<K>& walk, uint64_t n, bool wide, Vectors vectors, Single single) {
    int64_t at[K];
    uint64_t done = 0;
    if (wide) {
        for (uint64_t unit = grid_thread(); unit < n / N; unit += grid_threads()) {
            locate(walk, unit * N, at);
            vectors(unit * N, at);
        }
        done = n / N * N;
    }
    for (uint64_t i = done + grid_thread(); i < n; i += grid_threads()) {
        locate(walk, i, at);
        single(i, at);
    }
}

}  // namespace nxrt
