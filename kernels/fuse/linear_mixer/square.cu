// mixer.cu's work for 16-bit states [D, E] with D = E = 128, a convolution of four taps, and one or two value heads a key head.
//
// A block has one key head of one sequence and its value heads, kHeadThreads threads for each. A thread keeps eight columns
// of four rows of its head's state in registers, as operands of products on tensor cores: a warp has 16 rows of 64 columns,
// and multiplies them, transposed, with the key and the query. Each of these is the sum of two 16-bit floats, the second one
// the first one's error.
#include "channel.cuh"
#include "fragments.cuh"

using namespace nxrt;
using namespace nxrt::linear_mixer;

constexpr unsigned kHeadThreads = 512;
constexpr unsigned kHeadWarps = kHeadThreads / kWarpSize;
constexpr unsigned kMostHeads = 2;
// Warps along D.
constexpr unsigned kSlices = 8;
// The key, its rest, the query, its rest: elements from one to the next. What follows is padded as well, so that the lanes of
// an access meet in no bank.
constexpr unsigned kVector = kSize + 16;
// Sums of a slice: of the key's products with the columns, of the query's.
constexpr unsigned kSums = kSize + 16, kSlice = 2 * kSums + 8;

template <class T>
struct Shared {
    alignas(16) T operands[4 * kVector];
    alignas(16) float key[kSize];
    alignas(16) float value[kMostHeads][kSize];
    alignas(16) float update[kMostHeads][kSize];
    alignas(16) float squares[kMostHeads][kHeadWarps];
    // Products of the key with itself, of the key with the query, of the query with itself: a slice's, and then its rests'.
    float gram[3][2 * kSlices];
    float decay[kMostHeads];
    float beta[kMostHeads];
};

// A thread's part of a state, of element type T: rows first .. + 4, columns column .. + 8. Word j of a pair of rows has both
// rows' element of column j.
template <class T>
struct Tile {
    uint32_t pairs[2][8];
    unsigned first, column;

    NXRT_DEVICE explicit Tile(unsigned warp)
        : first(warp % kSlices * 16 + lane_id() % 4 * 4), column(warp / kSlices * 64 + lane_id() / 4 * 8) {}

    NXRT_DEVICE void load(const MixerParams& p, uint64_t head) {
        const T* from = static_cast<const T*>(p.past) + (head * kSize + first) * kSize + column;
        Vec<uint32_t, 4> row[4] = {};
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (p.past) row[n] = load_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(from + n * kSize));
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 8; ++j) pairs[n][j] = prmt(row[2 * n][j / 2], row[2 * n + 1][j / 2], j % 2 ? 0x7632 : 0x5410);
    }

    // Adds this warp's rows up: S^T k in lanes with even lane % 4, S^T q in the others, of all eight columns.
    NXRT_DEVICE void multiply(const uint32_t (&operand)[2], float (&sums)[8]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t a[4] = {pairs[0][j], pairs[0][j + 4], pairs[1][j], pairs[1][j + 4]};
            float d[4] = {};
            mma_m16n8k16<T>(d, a, operand);
            sums[j] = fmaf(d[1], 1.0f / kRest, d[0]);
            sums[j + 4] = fmaf(d[3], 1.0f / kRest, d[2]);
        }
    }

    // S = f S + k d^T
    NXRT_DEVICE void store(const MixerParams& p, uint64_t head, const Vec<float, 4>& key, const float* update, float decay) const {
        const Vec<float, 8> u = load_vec<float, 8>(update + column);
        T* to = static_cast<T*>(p.present) + (head * kSize + first) * kSize + column;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            Vec<uint32_t, 4> made;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 even = Pair<T>::floats(pairs[n / 2][2 * i]), odd = Pair<T>::floats(pairs[n / 2][2 * i + 1]);
                const float a = fmaf(key[n], u[2 * i], decay * (n % 2 ? even.y : even.x));
                const float b = fmaf(key[n], u[2 * i + 1], decay * (n % 2 ? odd.y : odd.x));
                made[i] = as_word(Pair<T>::from_floats(a, b));
            }
            store_vec<uint32_t, 4>(reinterpret_cast<uint32_t*>(to + n * kSize), made);
        }
    }
};

// Over the key dims: k k, k q, q q.
struct Gram {
    float kk, kq, qq;

    template <class T>
    static NXRT_DEVICE void share(const uint32_t (&operand)[2], Shared<T>& shared, unsigned slice) {
        const unsigned g = lane_id() / 4, t = lane_id() % 4;
        const uint32_t twice[4] = {operand[0], operand[0], operand[1], operand[1]};
        float d[4] = {};
        mma_m16n8k16<T>(d, twice, operand);
        // Row g with the key where t is even, else with the query.
        const float x = fmaf(d[1], 1.0f / kRest, d[0]) * (g % 2 ? 1.0f / kRest : 1.0f);
        const unsigned which = g / 2 + t;
        if (g < 4 && t < 2 && (g < 2 || t == 1)) shared.gram[which][slice + g % 2 * kSlices] = x;
    }
    template <class T>
    NXRT_DEVICE explicit Gram(const Shared<T>& shared) {
        const unsigned lane = lane_id(), which = min(lane / 8, 2u);
        float x = shared.gram[which][lane % 8] + shared.gram[which][lane % 8 + kSlices];
#pragma unroll
        for (int step = 1; step < 8; step *= 2) x += __shfl_xor_sync(kFullMask, x, step);
        kk = __shfl_sync(kFullMask, x, 0);
        kq = __shfl_sync(kFullMask, x, 8);
        qq = __shfl_sync(kFullMask, x, 16);
    }
};

// Dynamic shared memory: kSlices * kSlice floats for each of the block's value heads.
template <class T>
NXRT_DEVICE void square(const MixerParams& p) {
    NXRT_SHARED Shared<T> shared;
    NXRT_DYNAMIC_SHARED(float, sums);
    const uint32_t heads = blockDim.x / kHeadThreads, which = threadIdx.x / kHeadThreads;
    const uint32_t batch = blockIdx.x / p.k_heads, k_head = blockIdx.x % p.k_heads;
    const uint32_t sequence_head = batch * p.v_heads + k_head * heads + which;
    const unsigned warp = threadIdx.x % kHeadThreads / kWarpSize, lane = lane_id(), t = lane % 4;
    const unsigned slice = warp % kSlices;
    // Of the output.
    const unsigned column = warp * 8 + lane / 4;
    // The last warp has no channel.
    const bool gating = threadIdx.x >= blockDim.x - kWarpSize;
    const uint32_t gate_head = k_head * heads + lane % heads;
    sums += which * (kSlices * kSlice);

    const bool live = threadIdx.x < (2 + heads) * kSize;
    Channel<T> channel;
    if (threadIdx.x < kSize) {
        channel.locate(p, batch, p.q, p.q_stride, p.q_channel, k_head * kSize + threadIdx.x);
    } else if (threadIdx.x < 2 * kSize) {
        channel.locate(p, batch, p.k, p.k_stride, p.k_channel, k_head * kSize + threadIdx.x - kSize);
    } else if (live) {
        channel.locate(p, batch, p.v, p.v_stride, p.v_channel, k_head * heads * kSize + threadIdx.x - 2 * kSize);
    }
    Gates gates = {};
    if (gating) gates.load_constants<FastMath>(p, gate_head);
    T gamma = from_float<T>(0.0f), z = gamma;
    if (p.gamma) gamma = static_cast<const T*>(p.gamma)[column];
    if (!p.early) grid_dependency_wait();
    Tile<T> tile(warp);
    if (live) channel.load_past(p, batch);
    tile.load(p, sequence_head);

    grid_dependency_wait();
    if (live) channel.x = *channel.from;
    if (gating) gates.load<T>(p, batch, gate_head);
    if (p.gamma) z = static_cast<const T*>(p.z)[sequence_head * kSize + column];
    if (live) {
        const float x = channel.convolve(p);
        const unsigned i = threadIdx.x % kSize;
        if (threadIdx.x < 2 * kSize) {
            const bool is_k = threadIdx.x >= kSize;
            split_in_two(shared.operands + (is_k ? 0 : 2 * kVector) + i, kVector, x);
            if (is_k) shared.key[i] = x;
        } else {
            shared.value[threadIdx.x / kSize - 2][i] = x;
        }
    }
    if (gating) {
        gates.finish<FastMath>(p);
        shared.decay[lane % heads] = gates.decay;
        shared.beta[lane % heads] = gates.beta;
    }
    __syncthreads();

    {
        const T* from = shared.operands + lane / 4 % 4 * kVector + tile.first;
        const Vec<uint32_t, 2> operand = load_vec<uint32_t, 2>(reinterpret_cast<const uint32_t*>(from));
        float mine[8];
        tile.multiply(operand.v, mine);
        if (warp < kSlices) Gram::share<T>(operand.v, shared, slice);
        // Lanes t and t + 2 have the same sums, and store half of them each.
        const bool upper = t >= 2;
        float* to = sums + slice * kSlice + t % 2 * kSums + tile.column + (upper ? 4 : 0);
        store_vec<float, 4>(to, {upper ? mine[4] : mine[0], upper ? mine[5] : mine[1], upper ? mine[6] : mine[2],
                                 upper ? mine[7] : mine[3]});
    }
    const float decay = shared.decay[which];
    float gate = 1.0f;
    if (p.gamma) {
        const float x = to_float(z);
        gate = to_float(gamma) * (p.activation == kSilu ? x : 1.0f) * FastMath::sigmoid(x);
    }
    __syncthreads();
    // Not earlier: the next kernel reads weights at once, and these loads would come behind them.
    grid_dependency_launch();
    const Gram gram(shared);
    float mine = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < kSlices; i += 2) mine += sums[(i + t / 2) * kSlice + t % 2 * kSums + column];
    mine += __shfl_xor_sync(kFullMask, mine, 2);
    const float other = __shfl_xor_sync(kFullMask, mine, 1);
    const float seen = t % 2 ? other : mine, read = t % 2 ? mine : other;
    const float k_inverse = inverse(p.k_norm, gram.kk, p.k_epsilon), q_inverse = inverse(p.q_norm, gram.qq, p.q_epsilon);
    const float v = shared.value[which][column];
    const float update = (p.beta ? shared.beta[which] * (v - decay * k_inverse * seen) : v) * k_inverse;
    float out = p.scale * q_inverse * fmaf(update, gram.kq, decay * read);
    if (t == 0) shared.update[which][column] = update;
    float squares = out * out;
    squares += __shfl_xor_sync(kFullMask, squares, 4);
    squares += __shfl_xor_sync(kFullMask, squares, 8);
    squares += __shfl_xor_sync(kFullMask, squares, 16);
    if (lane == 0) shared.squares[which][warp] = squares;
    const Vec<float, 4> key = load_vec<float, 4>(shared.key + tile.first);
    __syncthreads();
    if (p.present) tile.store(p, sequence_head, key, shared.update[which], decay);
    if (p.gamma) {
        const Vec<float, 16> s = load_vec<float, 16>(shared.squares[which]);
        float all[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) all[i] = (s[i] + s[i + 4]) + (s[i + 8] + s[i + 12]);
        out *= gate * rsqrtf(fmaf((all[0] + all[1]) + (all[2] + all[3]), 1.0f / kSize, p.epsilon));
    }
    if (t == 0) static_cast<T*>(p.y)[sequence_head * kSize + column] = from_float<T>(out);
    if (live) channel.store(p, batch);
}

NXRT_KERNEL_EARLY(k_major_square_f16, MixerParams, (square<half>), 1024)
NXRT_KERNEL_EARLY(k_major_square_bf16, MixerParams, (square<bf16>), 1024)
