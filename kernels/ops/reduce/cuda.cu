#include "arithmetic.cuh"
#include "walk.cuh"

using namespace nxrt;

// `cuda.rs` has the same codes.
enum ReduceCode : uint32_t { kSum, kMean, kProd, kMax, kMin, kL1, kSumSquare, kL2, kLogSum, kLogSumExp };
enum ReduceShape : uint32_t { kWarpRows, kBlockRows, kColumns };

struct ReduceParams {
    const void* x;
    void* y;
    uint64_t kept;  // results
    uint64_t n;     // elements that go into each
    Walk<1> kept_walk;
    Walk<1> reduced_walk;
    uint32_t op;
    uint32_t dtype;   // of integers
    uint32_t shape;
    uint32_t vector;  // rows: whether they are read 16 bytes at a time; columns: warps that share one
};

constexpr unsigned kThreads = 256, kWarps = kThreads / kWarpSize;

// Elements of float formats, accumulated in float (double for double).
template <class T>
struct Typed {
    using A = typename std::conditional<std::is_same<T, double>::value, double, float>::type;
    static constexpr int N = 16 / sizeof(T);
    static NXRT_DEVICE A load(const ReduceParams& p, int64_t i) { return computed(static_cast<const T*>(p.x)[i]); }
    static NXRT_DEVICE void load_vector(const ReduceParams& p, int64_t i, A (&xs)[N]) {
        const Vec<T, N> v = load_vec<T, N>(static_cast<const T*>(p.x) + i);
#pragma unroll
        for (int k = 0; k < N; ++k) xs[k] = computed(v[k]);
    }
    static NXRT_DEVICE void store(const ReduceParams& p, uint64_t i, A x) { static_cast<T*>(p.y)[i] = narrow<T>(x); }
};

// Integers of the run-time type, accumulated in the wide type W.
template <class W>
struct Any {
    using A = W;
    static constexpr int N = 1;
    static NXRT_DEVICE A load(const ReduceParams& p, int64_t i) {
        return load_any<W>(p.dtype, p.x, static_cast<uint64_t>(i));
    }
    static NXRT_DEVICE void load_vector(const ReduceParams& p, int64_t i, A (&xs)[1]) { xs[0] = load(p, i); }
    static NXRT_DEVICE void store(const ReduceParams& p, uint64_t i, A x) { store_any<W>(p.dtype, p.y, i, x); }
};

template <class A>
NXRT_DEVICE A empty(uint32_t op) {
    return op == kProd ? A(1) : op == kMax ? lowest<A>() : op == kMin ? highest<A>() : A(0);
}

// Takes N elements in: the switch lies outside of the loop.
template <class A, int N>
NXRT_DEVICE void take(uint32_t op, A& acc, const A (&xs)[N], A shift) {
    auto each = [&](auto f) {
#pragma unroll
        for (int i = 0; i < N; ++i) acc = f(acc, xs[i]);
    };
    switch (op) {
        case kProd: return each([](A acc, A x) { return mul(acc, x); });
        case kMax: return each([](A acc, A x) { return larger(acc, x); });
        case kMin: return each([](A acc, A x) { return smaller(acc, x); });
        case kL1: return each([](A acc, A x) { return add(acc, absolute(x)); });
        case kSumSquare:
        case kL2: return each([](A acc, A x) { return add(acc, mul(x, x)); });
        case kLogSumExp:
            if constexpr (std::is_floating_point<A>::value) {
                each([=](A acc, A x) { return acc + std::exp(x - shift); });
            }
            return;
        default: return each([](A acc, A x) { return add(acc, x); });
    }
}

template <class A>
NXRT_DEVICE A join(uint32_t op, A a, A b) {
    switch (op) {
        case kProd: return mul(a, b);
        case kMax: return larger(a, b);
        case kMin: return smaller(a, b);
        default: return add(a, b);
    }
}

template <class A>
NXRT_DEVICE A finish(uint32_t op, A acc, uint64_t n, A shift) {
    if constexpr (std::is_floating_point<A>::value) {
        switch (op) {
            case kMean: return acc / static_cast<A>(n);
            case kL2: return std::sqrt(acc);
            case kLogSum: return std::log(acc);
            case kLogSumExp: return std::log(acc) + shift;
        }
    } else if (op == kMean) {
        return divided(acc, static_cast<A>(n));
    }
    return acc;
}

template <class A>
NXRT_DEVICE A warp_join(uint32_t op, A x) {
    // A sum in the order of the lanes' distance, as warp_sum's.
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = join(op, x, __shfl_xor_sync(kFullMask, x, step));
    return x;
}

// What one thread, the `lane`th of `lanes`, makes of the row at `base`.
template <class Load, class A = typename Load::A>
NXRT_DEVICE A row_part(const ReduceParams& p, uint32_t op, int64_t base, uint32_t lane, uint32_t lanes, A shift) {
    constexpr int N = Load::N;
    A acc = empty<A>(op);
    if (p.vector && is_aligned(p.x, 16)) {
        for (uint64_t i = uint64_t{lane} * N; i < p.n; i += uint64_t{lanes} * N) {
            A xs[N];
            Load::load_vector(p, base + locate(p.reduced_walk, i), xs);
            take<A, N>(op, acc, xs, shift);
        }
    } else {
        for (uint64_t i = lane; i < p.n; i += lanes) {
            const A xs[1] = {Load::load(p, base + locate(p.reduced_walk, i))};
            take<A, 1>(op, acc, xs, shift);
        }
    }
    return acc;
}

// A maximum to subtract: the sum of exponentials of infinities needs none.
template <class A>
NXRT_DEVICE A shift_of(A max) {
    return max - max != A(0) ? A(0) : max;
}

template <class Load, class A = typename Load::A>
NXRT_DEVICE void warp_rows(const ReduceParams& p) {
    for (uint64_t row = uint64_t{blockIdx.x} * kWarps + warp_id(); row < p.kept; row += uint64_t{gridDim.x} * kWarps) {
        const int64_t base = locate(p.kept_walk, row);
        A shift = A(0);
        if (p.op == kLogSumExp) {
            shift = shift_of(warp_join<A>(kMax, row_part<Load>(p, kMax, base, lane_id(), kWarpSize, A(0))));
        }
        const A acc = warp_join<A>(p.op, row_part<Load>(p, p.op, base, lane_id(), kWarpSize, shift));
        if (lane_id() == 0) Load::store(p, row, finish<A>(p.op, acc, p.n, shift));
    }
}

// The join of the block's values, for every thread.
template <class A>
NXRT_DEVICE A block_join(uint32_t op, A x, A* shared) {
    x = warp_join<A>(op, x);
    __syncthreads();
    if (lane_id() == 0) shared[warp_id()] = x;
    __syncthreads();
    return warp_join<A>(op, lane_id() < kWarps ? shared[lane_id()] : empty<A>(op));
}

template <class Load, class A = typename Load::A>
NXRT_DEVICE void block_rows(const ReduceParams& p, A* shared) {
    for (uint64_t row = blockIdx.x; row < p.kept; row += gridDim.x) {
        const int64_t base = locate(p.kept_walk, row);
        A shift = A(0);
        if (p.op == kLogSumExp) {
            shift = shift_of(block_join<A>(kMax, row_part<Load>(p, kMax, base, threadIdx.x, kThreads, A(0)), shared));
        }
        const A acc = block_join<A>(p.op, row_part<Load>(p, p.op, base, threadIdx.x, kThreads, shift), shared);
        if (threadIdx.x == 0) Load::store(p, row, finish<A>(p.op, acc, p.n, shift));
    }
}

// The join of the values that the `split` warps of a column hold, for each of them.
template <class A>
NXRT_DEVICE A column_join(uint32_t op, A x, uint32_t split, A* shared) {
    if (split == 1) return x;
    __syncthreads();
    shared[threadIdx.x] = x;
    __syncthreads();
    const uint32_t first = warp_id() / split * split;
    A acc = shared[first * kWarpSize + lane_id()];
    for (uint32_t w = 1; w < split; ++w) acc = join(op, acc, shared[(first + w) * kWarpSize + lane_id()]);
    return acc;
}

// Neighbouring results in neighbouring lanes; `vector` warps share the work of one result.
template <class Load, class A = typename Load::A>
NXRT_DEVICE void columns(const ReduceParams& p, A* shared) {
    const uint32_t split = p.vector, groups = kWarps / split;
    const uint64_t column = (uint64_t{blockIdx.x} * groups + warp_id() / split) * kWarpSize + lane_id();
    const bool present = column < p.kept;
    const int64_t base = locate(p.kept_walk, present ? column : 0);
    auto part = [&](uint32_t op, A shift) {
        A acc = empty<A>(op);
        for (uint64_t i = warp_id() % split; i < p.n; i += split) {
            const A xs[1] = {Load::load(p, base + locate(p.reduced_walk, i))};
            take<A, 1>(op, acc, xs, shift);
        }
        return column_join<A>(op, acc, split, shared);
    };
    const A shift = p.op == kLogSumExp ? shift_of(part(kMax, A(0))) : A(0);
    const A acc = part(p.op, shift);
    if (present && warp_id() % split == 0) Load::store(p, column, finish<A>(p.op, acc, p.n, shift));
}

template <class Load>
NXRT_DEVICE void reduce(const ReduceParams& p) {
    NXRT_SHARED typename Load::A shared[kThreads];
    if (p.shape == kWarpRows) return warp_rows<Load>(p);
    if (p.shape == kBlockRows) return block_rows<Load>(p, shared);
    columns<Load>(p, shared);
}

NXRT_KERNEL(reduce_f32, ReduceParams, (reduce<Typed<float>>), 256)
NXRT_KERNEL(reduce_f16, ReduceParams, (reduce<Typed<half>>), 256)
NXRT_KERNEL(reduce_bf16, ReduceParams, (reduce<Typed<bf16>>), 256)
NXRT_KERNEL(reduce_f64, ReduceParams, (reduce<Typed<double>>), 256)
NXRT_KERNEL(reduce_signed, ReduceParams, (reduce<Any<int64_t>>), 256)
NXRT_KERNEL(reduce_unsigned, ReduceParams, (reduce<Any<uint64_t>>), 256)
NXRT_KERNEL(reduce_as_f64, ReduceParams, (reduce<Any<double>>), 256)
