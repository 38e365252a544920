#include "broadcast.cuh"

using namespace nxrt;

struct SelectParams {
    const uint8_t* condition;
    const void* x;
    const void* y;
    void* out;
    uint64_t n;
    Walk<3> walk;
    uint32_t vector;
    uint32_t pad;
};

// Where, over words of the element's size.
template <class W>
NXRT_DEVICE void select(const SelectParams& p) {
    constexpr int N = 16 / sizeof(W);
    const W* x = static_cast<const W*>(p.x);
    const W* y = static_cast<const W*>(p.y);
    W* out = static_cast<W*>(p.out);
    const uint32_t last = p.walk.rank - 1;
    const bool wide = p.vector && fits(p.walk, 0, p.condition, N) && fits(p.walk, 1, x, 16) && fits(p.walk, 2, y, 16) &&
                      is_aligned(out, 16);
    for_each_unit<N>(
        p.walk, p.n, wide,
        [&](uint64_t first, const int64_t(&at)[3]) {
            const Vec<uint8_t, N> c = fetch<uint8_t, N>(p.condition + at[0], p.walk.strides[0][last]);
            const Vec<W, N> a = fetch<W, N>(x + at[1], p.walk.strides[1][last]);
            const Vec<W, N> b = fetch<W, N>(y + at[2], p.walk.strides[2][last]);
            Vec<W, N> r;
#pragma unroll
            for (int i = 0; i < N; ++i) r[i] = c[i] != 0 ? a[i] : b[i];
            store_vec<W, N>(out + first, r);
        },
        [&](uint64_t i, const int64_t(&at)[3]) { out[i] = p.condition[at[0]] != 0 ? x[at[1]] : y[at[2]]; });
}

NXRT_KERNEL(select_8, SelectParams, (select<uint8_t>), 256)
NXRT_KERNEL(select_16, SelectParams, (select<uint16_t>), 256)
NXRT_KERNEL(select_32, SelectParams, (select<uint32_t>), 256)
NXRT_KERNEL(select_64, SelectParams, (select<uint64_t>), 256)
