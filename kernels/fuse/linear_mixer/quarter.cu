// square.cu's work where each value head has a key head of its own, by clusters of blocks: a block has a quarter of the columns
// of a head's state, and few threads with few registers, so that there is room for it beside the kernel in front. What that does
// not write is read by the time it ends.
//
// A thread keeps four columns of eight rows in registers, as operands of products on tensor cores: a warp has 32 rows of the
// block's 32 columns, and multiplies them, transposed, with the key and the query. Each of these is the sum of two 16-bit
// floats, the second one the first one's error.
#include "channel.cuh"
#include "cluster.cuh"
#include "fragments.cuh"

using namespace nxrt;
using namespace nxrt::linear_mixer;

constexpr unsigned kBlocks = 4;  // of a cluster
constexpr unsigned kColumns = kSize / kBlocks;
constexpr unsigned kThreads = kSize, kWarps = kThreads / kWarpSize;
// The key, its rest, the query, its rest: elements from one to the next, padded so that the lanes of an access meet in no bank.
constexpr unsigned kVector = kSize + 16;
// Sums of a warp: of the key's products with the columns, of the query's.
constexpr unsigned kSums = kColumns + 8, kSlice = 2 * kSums;

template <class T>
struct Shared {
    alignas(16) T operands[4 * kVector];
    alignas(16) float key[kSize];
    alignas(16) float value[kColumns];
    alignas(16) float update[kColumns];
    alignas(16) float sums[kWarps * kSlice];
    // Products of the key with itself, of the key with the query, of the query with itself: a warp's, and then its rests'.
    alignas(16) float gram[3][2 * kWarps];
    // The whole head's, by block and warp.
    alignas(16) float squares[kBlocks * kWarps];
    Inbox inbox;  // for them
    float decay;
    float beta;
};

// A thread's part of a state, of element type T: rows first .. + 4 and first + 16 .. + 4, columns column .. + 4 of the block's.
// Word j of a pair of rows has both rows' element of column j.
template <class T>
struct Tile {
    uint32_t pairs[4][4];
    unsigned first, column;

    NXRT_DEVICE explicit Tile(unsigned warp) : first(warp * 32 + lane_id() % 4 * 4), column(lane_id() / 4 * 4) {}

    static NXRT_DEVICE unsigned row(int n) { return n / 4 * 16 + n % 4; }

    // `from`: where the block's first column is.
    NXRT_DEVICE void load(const T* from) {
        from += first * kSize + column;
        Vec<uint32_t, 2> rows[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) rows[n] = load_vec<uint32_t, 2>(reinterpret_cast<const uint32_t*>(from + row(n) * kSize));
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[n][j] = prmt(rows[2 * n][j / 2], rows[2 * n + 1][j / 2], j % 2 ? 0x7632 : 0x5410);
    }
    NXRT_DEVICE void clear() {
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[n][j] = 0;
    }

    // Adds this warp's rows up: S^T k in lanes with even lane % 4, S^T q in the others, of all four columns.
    NXRT_DEVICE void multiply(const uint32_t (&operands)[2][2], float (&sums)[4]) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float d[4] = {};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t a[4] = {pairs[2 * i][j], pairs[2 * i][j + 2], pairs[2 * i + 1][j], pairs[2 * i + 1][j + 2]};
                mma_m16n8k16<T>(d, a, operands[i]);
            }
            sums[j] = fmaf(d[1], 1.0f / kRest, d[0]);
            sums[j + 2] = fmaf(d[3], 1.0f / kRest, d[2]);
        }
    }

    // S = f S + k d^T
    NXRT_DEVICE void store(T* to, const float* key, const float* update, float decay) const {
        const Vec<float, 4> u = load_vec<float, 4>(update + column);
        to += first * kSize + column;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Vec<float, 4> k = load_vec<float, 4>(key + first + i * 16);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const uint32_t(&pair)[4] = pairs[2 * i + n / 2];
                Vec<uint32_t, 2> made;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float2 even = Pair<T>::floats(pair[2 * j]), odd = Pair<T>::floats(pair[2 * j + 1]);
                    const float a = fmaf(k[n], u[2 * j], decay * (n % 2 ? even.y : even.x));
                    const float b = fmaf(k[n], u[2 * j + 1], decay * (n % 2 ? odd.y : odd.x));
                    made[j] = as_word(Pair<T>::from_floats(a, b));
                }
                store_vec<uint32_t, 2>(reinterpret_cast<uint32_t*>(to + row(4 * i + n) * kSize), made);
            }
        }
    }
};

// Over the key dims: k k, k q, q q.
struct Gram {
    float kk, kq, qq;

    template <class T>
    static NXRT_DEVICE void share(const uint32_t (&operands)[2][2], Shared<T>& shared, unsigned warp) {
        const unsigned g = lane_id() / 4, t = lane_id() % 4;
        float d[4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t twice[4] = {operands[i][0], operands[i][0], operands[i][1], operands[i][1]};
            mma_m16n8k16<T>(d, twice, operands[i]);
        }
        // Row g with the key where t is even, else with the query.
        const float x = fmaf(d[1], 1.0f / kRest, d[0]) * (g % 2 ? 1.0f / kRest : 1.0f);
        if (g < 4 && t < 2 && (g < 2 || t == 1)) shared.gram[g / 2 + t][warp + g % 2 * kWarps] = x;
    }
    template <class T>
    NXRT_DEVICE explicit Gram(const Shared<T>& shared) {
        float sums[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const Vec<float, 8> x = load_vec<float, 8>(shared.gram[i]);
            sums[i] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
        }
        kk = sums[0];
        kq = sums[1];
        qq = sums[2];
    }
};

// Where a thread's work is.
struct Place {
    uint32_t rank, batch, head;
    uint64_t corner;  // of the block's part of the state
    uint64_t output;  // of the thread's
    unsigned column;  // of the output, from the block's first on

    NXRT_DEVICE explicit Place(const MixerParams& p) {
        rank = cluster_rank();
        const uint32_t sequence_head = blockIdx.x / kBlocks;
        batch = sequence_head / p.v_heads;
        head = sequence_head % p.v_heads;
        column = warp_id() * 8 + lane_id() / 4;
        corner = uint64_t(sequence_head) * kSize * kSize + rank * kColumns;
        output = uint64_t(sequence_head) * kSize + rank * kColumns + column;
    }
};

// The convolution's channels of a thread: one of the key and of the query, and one of the value in the first warp.
template <class T>
struct Channels {
    Channel<T> key, query, value;
    bool has_value;

    NXRT_DEVICE Channels(const MixerParams& p, const Place& at) {
        const unsigned i = threadIdx.x;
        has_value = i < kColumns;
        key.locate(p, at.batch, p.k, p.k_stride, p.k_channel, at.head * kSize + i);
        query.locate(p, at.batch, p.q, p.q_stride, p.q_channel, at.head * kSize + i);
        if (has_value) value.locate(p, at.batch, p.v, p.v_stride, p.v_channel, at.head * kSize + at.rank * kColumns + i);
    }
    NXRT_DEVICE void load_past(const MixerParams& p, const Place& at) {
        key.load_past(p, at.batch);
        query.load_past(p, at.batch);
        if (has_value) value.load_past(p, at.batch);
    }
    NXRT_DEVICE void load() {
        key.x = *key.from;
        query.x = *query.from;
        if (has_value) value.x = *value.from;
    }
    NXRT_DEVICE void convolve(const MixerParams& p, Shared<T>& shared) const {
        const unsigned i = threadIdx.x;
        const float k = key.convolve(p), q = query.convolve(p);
        split_in_two(shared.operands + i, kVector, k);
        split_in_two(shared.operands + 2 * kVector + i, kVector, q);
        shared.key[i] = k;
        if (has_value) shared.value[i] = value.convolve(p);
    }
    // Of keys and queries, a quarter is each block's to keep. Not before all blocks of the cluster have read the past, which may
    // be the same memory.
    NXRT_DEVICE void store(const MixerParams& p, const Place& at) const {
        if (threadIdx.x / kColumns == at.rank) {
            key.store(p, at.batch);
            query.store(p, at.batch);
        }
        if (has_value) value.store(p, at.batch);
    }
};

// This warp's sums over its rows, to shared memory.
template <class T>
NXRT_DEVICE void multiply(const Tile<T>& tile, Shared<T>& shared) {
    const unsigned lane = lane_id(), warp = warp_id(), t = lane % 4;
    uint32_t operands[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const T* from = shared.operands + lane / 4 % 4 * kVector + tile.first + i * 16;
        const Vec<uint32_t, 2> operand = load_vec<uint32_t, 2>(reinterpret_cast<const uint32_t*>(from));
        operands[i][0] = operand[0];
        operands[i][1] = operand[1];
    }
    float mine[4];
    tile.multiply(operands, mine);
    Gram::share<T>(operands, shared, warp);
    // Lanes t and t + 2 have the same sums, and store half of them each.
    const bool upper = t >= 2;
    float* to = shared.sums + warp * kSlice + t % 2 * kSums + tile.column + (upper ? 2 : 0);
    store_vec<float, 2>(to, {upper ? mine[2] : mine[0], upper ? mine[3] : mine[1]});
}

// The output's column before its norm; leaves the state's update in shared memory, and sends the sum of squares to the cluster.
template <class T>
NXRT_DEVICE float make_column(const MixerParams& p, const Place& at, Shared<T>& shared) {
    const Gram gram(shared);
    float seen = 0.0f, read = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < kWarps; ++i) {
        seen += shared.sums[i * kSlice + at.column];
        read += shared.sums[i * kSlice + kSums + at.column];
    }
    const float decay = shared.decay, v = shared.value[at.column];
    const float k_inverse = inverse(p.k_norm, gram.kk, p.k_epsilon), q_inverse = inverse(p.q_norm, gram.qq, p.q_epsilon);
    const float update = (p.beta ? shared.beta * (v - decay * k_inverse * seen) : v) * k_inverse;
    const float out = p.scale * q_inverse * fmaf(update, gram.kq, decay * read);
    if (lane_id() % 4 == 0) shared.update[at.column] = update;
    float squares = out * out;
    squares += __shfl_xor_sync(kFullMask, squares, 4);
    squares += __shfl_xor_sync(kFullMask, squares, 8);
    squares += __shfl_xor_sync(kFullMask, squares, 16);
    if (lane_id() < kBlocks) send(lane_id(), shared.squares[at.rank * kWarps + warp_id()], squares, shared.inbox);
    return out;
}

NXRT_DEVICE float mean_of(const float (&squares)[kBlocks * kWarps]) {
    const Vec<float, 16> s = load_vec<float, 16>(squares);
    float all[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) all[i] = (s[i] + s[i + 4]) + (s[i + 8] + s[i + 12]);
    return ((all[0] + all[1]) + (all[2] + all[3])) * (1.0f / kSize);
}

template <class T>
NXRT_DEVICE void quarter(const MixerParams& p) {
    NXRT_DYNAMIC_SHARED(Shared<T>, room);
    Shared<T>& shared = *room;
    if (threadIdx.x == 0) open_inbox(shared.inbox, sizeof shared.squares);
    cluster_arrive();
    const Place at(p);
    // The last warp has no channel of the value.
    const bool gating = warp_id() == kWarps - 1;
    Channels<T> channels(p, at);
    Gates gates = {};
    if (gating) gates.load_constants<FastMath>(p, at.head);
    T gamma = from_float<T>(0.0f), z = gamma;
    if (p.gamma) gamma = static_cast<const T*>(p.gamma)[at.rank * kColumns + at.column];
    if (!p.early) grid_dependency_wait();
    channels.load_past(p, at);
    Tile<T> tile(warp_id());
    if (p.past) {
        tile.load(static_cast<const T*>(p.past) + at.corner);
    } else {
        tile.clear();
    }
    cluster_wait();

    grid_dependency_wait();
    channels.load();
    if (gating) gates.load<T>(p, at.batch, at.head);
    if (p.gamma) z = static_cast<const T*>(p.z)[at.output];
    channels.convolve(p, shared);
    if (gating) {
        gates.finish<FastMath>(p);
        shared.decay = gates.decay;
        shared.beta = gates.beta;
    }
    __syncthreads();
    // Not earlier: the next kernel reads weights at once, and these loads would come behind them.
    grid_dependency_launch();
    multiply(tile, shared);
    __syncthreads();
    float out = make_column(p, at, shared);
    float gate = 1.0f;
    if (p.gamma) {
        const float x = to_float(z);
        gate = to_float(gamma) * (p.activation == kSilu ? x : 1.0f) * FastMath::sigmoid(x);
    }
    __syncthreads();
    // While the others' squares come.
    if (p.present) tile.store(static_cast<T*>(p.present) + at.corner, shared.key, shared.update, shared.decay);
    wait_for(shared.inbox);
    if (p.gamma) out *= gate * rsqrtf(mean_of(shared.squares) + p.epsilon);
    if (lane_id() % 4 == 0) static_cast<T*>(p.y)[at.output] = from_float<T>(out);
    channels.store(p, at);
}

// As launch.rs says.
static_assert(sizeof(Shared<half>) == 3376 && sizeof(Shared<bf16>) == 3376, "the block's shared memory");

NXRT_KERNEL_CLUSTER(k_major_quarter_f16, MixerParams, (quarter<half>), kThreads, 8, kBlocks)
NXRT_KERNEL_CLUSTER(k_major_quarter_bf16, MixerParams, (quarter<bf16>), kThreads, 8, kBlocks)
