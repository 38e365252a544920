// One token of each sequence through a linear-attention layer, in one launch: depthwise causal convolution of queries,
// keys and values, norms of queries and keys, gates, the delta rule of delta_rule.cuh, and the gated norm of the output.
// Every part but the rule may be absent.
//
// A block has one key head of one sequence and `heads` of the value heads that read it, kHeadThreads threads for each that
// it works on at a time. With a convolution, `heads` are all of them: no other block then reads or writes the block's
// channels of the convolution's state, and the thread that has a channel reads its past before it writes its present, so
// that both may be one buffer. The recurrent state is its value head's alone, and each element its thread's alone.
#include "mixer.cuh"

using namespace nxrt;
using namespace nxrt::linear_mixer;

constexpr unsigned kHeadThreads = 512;
constexpr unsigned kHeadWarps = kHeadThreads / kWarpSize;
// Value heads that a block works on at a time, at most.
constexpr unsigned kAtOnce = 2;
// D and E at most.
constexpr unsigned kMostSize = 256;
// K at most.
constexpr int kTaps = 8;

// A thread's place: its block's key head, and the value head that it works on in the current pass.
struct Place {
    uint32_t batch, k_head, first, at_once, which, thread;

    NXRT_DEVICE explicit Place(const MixerParams& p) {
        const uint32_t shares = p.v_heads / p.k_heads / p.heads, pair = blockIdx.x / shares;
        batch = pair / p.k_heads;
        k_head = pair % p.k_heads;
        first = k_head * (p.v_heads / p.k_heads) + blockIdx.x % shares * p.heads;
        at_once = blockDim.x / kHeadThreads;
        which = threadIdx.x / kHeadThreads;
        thread = threadIdx.x % kHeadThreads;
    }
    NXRT_DEVICE uint32_t head(uint32_t pass) const { return first + pass + which; }
};

struct Shared {
    float q[kMostSize + 4];              // and zeros up to a multiple of four
    float k[kMostSize + 4];
    float v[kAtOnce * kMostSize];        // [heads at once, dv]
    float update[kAtOnce][kMostSize];    // d over the key's norm
    float out[kAtOnce][kMostSize];
    float squares[kAtOnce][kHeadWarps];  // of `out`, a warp's each

    // Number `i` of the block's inputs.
    NXRT_DEVICE float& input(const MixerParams& p, uint32_t i) {
        return i < p.dk ? q[i] : i < 2 * p.dk ? k[i - p.dk] : v[i - 2 * p.dk];
    }
};

// ---- the convolution ----

// The constants of one channel.
template <class T>
struct Taps {
    T weight[kTaps];  // the newest position's first
    T bias;

    NXRT_DEVICE void load(const MixerParams& p, uint32_t channel) {
        const T* from = static_cast<const T*>(p.conv_weight) + uint64_t(channel) * p.taps;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) weight[j] = j < p.taps ? from[p.taps - 1 - j] : from_float<T>(0.0f);
        bias = p.conv_bias ? static_cast<const T*>(p.conv_bias)[channel] : from_float<T>(0.0f);
    }
};

// One channel's newest input, and which channel that is.
template <class T>
struct Channel {
    const T* x;
    uint32_t channel;

    // Number `i` of the block's: q, k, and the values from head `first` on.
    NXRT_DEVICE Channel(const MixerParams& p, const Place& at, uint32_t first, uint32_t i) {
        const uint64_t batch = at.batch;
        if (i < 2 * p.dk) {
            const bool is_k = i >= p.dk;
            const uint32_t c = at.k_head * p.dk + (is_k ? i - p.dk : i);
            x = static_cast<const T*>(is_k ? p.k : p.q) + batch * (is_k ? p.k_stride : p.q_stride) + c;
            channel = (is_k ? p.k_channel : p.q_channel) + c;
        } else {
            const uint32_t c = first * p.dv + (i - 2 * p.dk);
            x = static_cast<const T*>(p.v) + batch * p.v_stride + c;
            channel = p.v_channel + c;
        }
    }

    // Convolves, and moves the state on by one position.
    NXRT_DEVICE float convolve(const MixerParams& p, uint64_t batch, const Taps<T>& taps) const {
        const uint64_t state = batch * p.channels * (p.taps - 1) + uint64_t(channel) * p.conv_channel;
        const T* past = static_cast<const T*>(p.conv_past);
        T v[kTaps];
        v[0] = *x;
#pragma unroll
        for (int j = 1; j < kTaps; ++j)
            v[j] = past && j < p.taps ? past[state + (p.taps - 1 - j) * p.conv_step] : from_float<T>(0.0f);
        float sum = to_float(taps.bias);
#pragma unroll
        for (int j = 0; j < kTaps; ++j) sum = fmaf(to_float(taps.weight[j]), to_float(v[j]), sum);
        if (T* present = static_cast<T*>(p.conv_present)) {
#pragma unroll
            for (int j = 0; j + 1 < kTaps; ++j)
                if (j + 1 < p.taps) present[state + (p.taps - 2 - j) * p.conv_step] = v[j];
        }
        return p.conv_silu ? sum * ExactMath::sigmoid(sum) : sum;
    }
};

// Channels begin .. end of the block to shared memory. `loaded`: `taps` are those of this thread's first.
template <class T>
NXRT_DEVICE void stage(const MixerParams& p, const Place& at, uint32_t first, uint32_t begin, uint32_t end, bool loaded,
                       Taps<T>& taps, Shared& shared) {
    for (uint32_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const Channel<T> channel(p, at, first, i);
        if (!p.conv_weight) {
            shared.input(p, i) = to_float(*channel.x);
            continue;
        }
        if (!loaded) taps.load(p, channel.channel);
        loaded = false;
        shared.input(p, i) = channel.convolve(p, at.batch, taps);
    }
    if (threadIdx.x < 4) shared.q[p.dk + threadIdx.x] = shared.k[p.dk + threadIdx.x] = 0.0f;
}

// ---- norms of q and k ----

// Over the key dims: q k, and the inverse norms. Every warp adds up for itself.
struct Keys {
    float kq, q_inverse, k_inverse;

    NXRT_DEVICE Keys(const MixerParams& p, const Shared& shared) {
        float kk = 0.0f, qq = 0.0f;
        kq = 0.0f;
        for (uint32_t i = lane_id(); i < p.dk; i += kWarpSize) {
            const float q = shared.q[i], k = shared.k[i];
            kq = fmaf(k, q, kq);
            kk = fmaf(k, k, kk);
            qq = fmaf(q, q, qq);
        }
        kq = warp_sum(kq);
        k_inverse = inverse(p.k_norm, warp_sum(kk), p.k_epsilon);
        q_inverse = inverse(p.q_norm, warp_sum(qq), p.q_epsilon);
    }
    static NXRT_DEVICE float inverse(uint32_t wanted, float squares, float epsilon) {
        if (!wanted) return 1.0f;
        // Zeros stay zeros.
        return squares + epsilon > 0.0f ? 1.0f / sqrtf(squares + epsilon) : 0.0f;
    }
};

// One column's part in the rule, from S^T k and S^T q before the decay.
struct Column {
    float update, out;

    NXRT_DEVICE Column(const MixerParams& p, const Gates& gates, const Keys& keys, float v, float seen, float read) {
        const float d = p.beta ? gates.beta * (v - gates.decay * seen * keys.k_inverse) : v;
        update = d * keys.k_inverse;
        out = p.scale * keys.q_inverse * fmaf(update, keys.kq, gates.decay * read);
    }
};

// ---- the output ----

// A head's element of the norm's scale and gate, on their way.
template <class T>
struct Epilogue {
    T gamma, z;

    NXRT_DEVICE void load_constants(const MixerParams& p, const Place& at) {
        gamma = p.gamma && at.thread < p.dv ? static_cast<const T*>(p.gamma)[at.thread] : from_float<T>(0.0f);
    }
    static NXRT_DEVICE uint64_t element(const MixerParams& p, const Place& at, uint32_t head) {
        return (uint64_t(at.batch) * p.v_heads + head) * p.dv + at.thread;
    }
    NXRT_DEVICE void load(const MixerParams& p, const Place& at, uint32_t head, bool live) {
        const bool wanted = p.gamma && live && at.thread < p.dv;
        z = wanted ? static_cast<const T*>(p.z)[element(p, at, head)] : from_float<T>(0.0f);
    }
    // Behind a barrier that ends the writing of `out` and `squares`.
    NXRT_DEVICE void store(const MixerParams& p, const Place& at, uint32_t head, bool live, const Shared& shared) const {
        if (!live || at.thread >= p.dv) return;
        float out = shared.out[at.which][at.thread];
        if (p.gamma) {
            float squares = 0.0f;
#pragma unroll
            for (unsigned w = 0; w < kHeadWarps; ++w) squares += shared.squares[at.which][w];
            const float gate = to_float(z);
            out *= 1.0f / sqrtf(squares / static_cast<float>(p.dv) + p.epsilon) * to_float(gamma);
            out *= (p.activation == kSilu ? gate : 1.0f) * ExactMath::sigmoid(gate);
        }
        static_cast<T*>(p.y)[element(p, at, head)] = from_float<T>(out);
    }
};

// ---- the states: both hold 32 elements a thread in registers, and go over larger states in sweeps ----

// Whether rows of `row` elements can be moved N at a time.
template <class S, int N>
NXRT_DEVICE bool is_wide(const MixerParams& p, uint32_t row) {
    const uintptr_t both = reinterpret_cast<uintptr_t>(p.past) | reinterpret_cast<uintptr_t>(p.present);
    return both % (N * sizeof(S)) == 0 && row % N == 0;
}

// `count` elements, zeros beyond; WIDE: all N or none.
template <bool WIDE, class S, int N>
NXRT_DEVICE Vec<S, N> load_some(const S* from, int count) {
    Vec<S, N> r = {};
    if constexpr (WIDE) {
        if (count > 0) r = load_vec<S, N>(from);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < count) r[i] = from[i];
    }
    return r;
}
template <bool WIDE, class S, int N>
NXRT_DEVICE void store_some(S* to, const Vec<S, N>& x, int count) {
    if constexpr (WIDE) {
        if (count > 0) store_vec<S, N>(to, x);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < count) to[i] = x[i];
    }
}

// [D, E]: a thread has the same 16 bytes of every so many rows.
template <class S, bool WIDE>
struct KMajor {
    static constexpr int kWidth = 16 / sizeof(S), kRows = 32 / kWidth;
    Vec<S, kWidth> state[kRows];
    uint32_t column, slice, slices;

    NXRT_DEVICE KMajor(const MixerParams& p, const Place& at) {
        column = (at.thread & ((1u << p.group_bits) - 1)) * kWidth;
        slice = at.thread >> p.group_bits;
        slices = kHeadThreads >> p.group_bits;
    }
    NXRT_DEVICE int count(const MixerParams& p) const { return static_cast<int>(p.dv) - static_cast<int>(column); }

    // Row n of the sweep that begins at `row0`, if it is there.
    NXRT_DEVICE bool row(const MixerParams& p, uint32_t row0, int n, uint32_t& row) const {
        row = row0 + slice + n * slices;
        return row < p.dk && column < p.dv;
    }

    NXRT_DEVICE void load(const MixerParams& p, uint64_t head, uint32_t row0, bool live) {
        const S* past = static_cast<const S*>(p.past) + head * p.dk * p.dv;
#pragma unroll
        for (int n = 0; n < kRows; ++n) {
            uint32_t at;
            const bool there = row(p, row0, n, at) && live && p.past;
            state[n] = load_some<WIDE, S, kWidth>(past + at * p.dv + column, there ? count(p) : 0);
        }
    }

    // S^T k and S^T q for four or eight columns, over this thread's rows.
    NXRT_DEVICE void add(const MixerParams& p, const Shared& shared, uint32_t row0, float (&seen)[kWidth],
                         float (&read)[kWidth]) const {
#pragma unroll
        for (int n = 0; n < kRows; ++n) {
            uint32_t at;
            if (!row(p, row0, n, at)) continue;
            const float q = shared.q[at], k = shared.k[at];
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                const float s = to_float(state[n][i]);
                seen[i] = fmaf(k, s, seen[i]);
                read[i] = fmaf(q, s, read[i]);
            }
        }
    }

    // Leaves each column's update and output in shared memory. The first sweep's rows are loaded.
    NXRT_DEVICE void reduce(const MixerParams& p, const Place& at, uint64_t head, bool live, const Gates& gates,
                            const Keys& keys, Shared& shared, float* partial) {
        const uint32_t sweep = slices * kRows;
        float seen[kWidth] = {}, read[kWidth] = {};
        add(p, shared, 0, seen, read);
        for (uint32_t row0 = sweep; row0 < p.dk; row0 += sweep) {
            load(p, head, row0, live);
            add(p, shared, row0, seen, read);
        }
        for (unsigned step = 1u << p.group_bits; step < kWarpSize; step *= 2)
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                seen[i] += __shfl_xor_sync(kFullMask, seen[i], step);
                read[i] += __shfl_xor_sync(kFullMask, read[i], step);
            }
        const uint32_t slots = min(slices, kHeadWarps), slot = at.thread * slots / kHeadThreads;
        partial += at.which * slots * p.stride;
        if (column < p.dv && (slice * slots) % slices == 0) {
            float* to = partial + slot * p.stride + column;
#pragma unroll
            for (int i = 0; i < kWidth; i += 4) {
                store_vec<float, 4>(to + i, {seen[i], seen[i + 1], seen[i + 2], seen[i + 3]});
                store_vec<float, 4>(to + p.columns + i, {read[i], read[i + 1], read[i + 2], read[i + 3]});
            }
        }
        __syncthreads();
        const uint32_t c = at.thread >> p.part_bits, parts = 1u << p.part_bits, part = at.thread & (parts - 1);
        float all_seen = 0.0f, all_read = 0.0f, squares = 0.0f;
        for (uint32_t i = c < p.dv ? part : slots; i < slots; i += parts) {
            all_seen += partial[i * p.stride + c];
            all_read += partial[i * p.stride + p.columns + c];
        }
        for (unsigned step = 1; step < parts; step *= 2) {
            all_seen += __shfl_xor_sync(kFullMask, all_seen, step);
            all_read += __shfl_xor_sync(kFullMask, all_read, step);
        }
        if (part == 0 && c < p.dv) {
            const float v = shared.v[at.which * p.dv + c];
            const Column made(p, gates, keys, live ? v : 0.0f, all_seen, all_read);
            shared.update[at.which][c] = made.update;
            shared.out[at.which][c] = made.out;
            squares = made.out * made.out;
        }
        squares = warp_sum(squares);
        if (lane_id() == 0) shared.squares[at.which][at.thread / kWarpSize] = squares;
    }

    // Behind a barrier: S = f S + k d^T.
    NXRT_DEVICE void store(const MixerParams& p, const Place& at, uint64_t head, bool live, const Gates& gates,
                           const Shared& shared) {
        if (!p.present || !live || column >= p.dv) return;
        const uint32_t sweep = slices * kRows;
        S* present = static_cast<S*>(p.present) + head * p.dk * p.dv;
        for (uint32_t row0 = 0; row0 < p.dk; row0 += sweep) {
            if (sweep < p.dk) load(p, head, row0, live);
#pragma unroll
            for (int n = 0; n < kRows; ++n) {
                uint32_t r;
                if (!row(p, row0, n, r)) continue;
                const float k = shared.k[r];
#pragma unroll
                for (int i = 0; i < kWidth; ++i)
                    state[n][i] = from_float<S>(
                        fmaf(k, shared.update[at.which][column + i], gates.decay * to_float(state[n][i])));
                store_some<WIDE, S, kWidth>(present + r * p.dv + column, state[n], count(p));
            }
        }
    }
};

// [E, D] in f32, D up to 32 kSteps: eight threads have a row, four elements of each 32.
template <int kSteps, bool WIDE>
struct VMajor {
    static constexpr int kRows = 8 / kSteps;
    static constexpr uint32_t kSlices = kHeadThreads / 8;
    Vec<float, 4> state[kRows][kSteps];
    uint32_t slice, element;

    NXRT_DEVICE VMajor(const MixerParams&, const Place& at) : slice(at.thread / 8), element(at.thread % 8 * 4) {}
    NXRT_DEVICE int count(const MixerParams& p, uint32_t e) const { return static_cast<int>(p.dk) - static_cast<int>(e); }

    NXRT_DEVICE void load(const MixerParams& p, uint64_t head, uint32_t row0, bool live) {
        const float* past = static_cast<const float*>(p.past) + head * p.dk * p.dv;
#pragma unroll
        for (int n = 0; n < kRows; ++n)
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                const uint32_t row = row0 + slice + n * kSlices, e = element + j * 32;
                const bool there = live && p.past && row < p.dv;
                state[n][j] = load_some<WIDE, float, 4>(past + row * p.dk + e, there ? count(p, e) : 0);
            }
    }

    // Leaves each column's output in shared memory, and stores the states. The first sweep's rows are loaded.
    NXRT_DEVICE void reduce(const MixerParams& p, const Place& at, uint64_t head, bool live, const Gates& gates,
                            const Keys& keys, Shared& shared, float*) {
        float squares = 0.0f;
        for (uint32_t row0 = 0; row0 < p.dv; row0 += kSlices * kRows) {
            if (row0 > 0) load(p, head, row0, live);
#pragma unroll
            for (int n = 0; n < kRows; ++n) {
                const uint32_t row = row0 + slice + n * kSlices;
                const float out = step(p, at, head, live && row < p.dv, gates, keys, row, state[n], shared);
                squares = fmaf(out, out, squares);
            }
        }
        squares = warp_sum(squares);
        if (lane_id() == 0) shared.squares[at.which][at.thread / kWarpSize] = squares;
    }

    // One row. Its output, in one of its threads alone.
    NXRT_DEVICE float step(const MixerParams& p, const Place& at, uint64_t head, bool live, const Gates& gates,
                           const Keys& keys, uint32_t row, Vec<float, 4> (&s)[kSteps], Shared& shared) const {
        float seen = 0.0f, read = 0.0f;
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
            const uint32_t e = element + j * 32;
            if (e >= p.dk) continue;
            const Vec<float, 4> q = load_vec<float, 4>(shared.q + e), k = load_vec<float, 4>(shared.k + e);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                seen = fmaf(k[i], s[j][i], seen);
                read = fmaf(q[i], s[j][i], read);
            }
        }
#pragma unroll
        for (unsigned step = 1; step < 8; step *= 2) {
            seen += __shfl_xor_sync(kFullMask, seen, step);
            read += __shfl_xor_sync(kFullMask, read, step);
        }
        if (!live) return 0.0f;
        const Column made(p, gates, keys, shared.v[at.which * p.dv + row], seen, read);
        if (element == 0) shared.out[at.which][row] = made.out;
        float* present = static_cast<float*>(p.present) + head * p.dk * p.dv + row * p.dk;
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
            const uint32_t e = element + j * 32;
            if (e >= p.dk || !p.present) continue;
            const Vec<float, 4> k = load_vec<float, 4>(shared.k + e);
#pragma unroll
            for (int i = 0; i < 4; ++i) s[j][i] = fmaf(k[i], made.update, gates.decay * s[j][i]);
            store_some<WIDE, float, 4>(present + e, s[j], count(p, e));
        }
        return element == 0 ? made.out : 0.0f;
    }

    NXRT_DEVICE void store(const MixerParams&, const Place&, uint64_t, bool, const Gates&, const Shared&) {}
};

// ---- all of it ----

// Dynamic shared memory: KMajor's sums, for each head at once and each slot `stride` floats.
template <class T, class State>
NXRT_DEVICE void mix(const MixerParams& p, Shared& shared) {
    NXRT_DYNAMIC_SHARED(float, partial);
    const Place at(p);
    Taps<T> taps;
    Gates gates;
    Epilogue<T> epilogue;
    State state(p, at);
    // Constants are on their way before the kernels in front have ended.
    if (p.conv_weight && threadIdx.x < 2 * p.dk + min(at.at_once, p.heads) * p.dv)
        taps.load(p, Channel<T>(p, at, at.first, threadIdx.x).channel);
    epilogue.load_constants(p, at);
    grid_dependency_ready();
    for (uint32_t pass = 0; pass < p.heads; pass += at.at_once) {
        const bool live = pass + at.which < p.heads;
        const uint32_t head = live ? at.head(pass) : at.first;
        const uint64_t sequence_head = uint64_t(at.batch) * p.v_heads + head;
        state.load(p, sequence_head, 0, live);
        gates.load_constants<ExactMath>(p, head);
        gates.load<T>(p, at.batch, head);
        epilogue.load(p, at, head, live);
        const uint32_t end = 2 * p.dk + min(at.at_once, p.heads - pass) * p.dv;
        stage<T>(p, at, at.first + pass, pass > 0 ? 2 * p.dk : 0, end, pass == 0, taps, shared);
        // Past this, nobody reads what the last pass left in the rest of the shared memory.
        __syncthreads();
        const Keys keys(p, shared);
        gates.finish<ExactMath>(p);
        state.reduce(p, at, sequence_head, live, gates, keys, shared, partial);
        __syncthreads();
        epilogue.store(p, at, head, live, shared);
        state.store(p, at, sequence_head, live, gates, shared);
    }
}

template <class T, class S>
NXRT_DEVICE void k_major(const MixerParams& p) {
    NXRT_SHARED Shared shared;
    if (is_wide<S, 16 / sizeof(S)>(p, p.dv))
        mix<T, KMajor<S, true>>(p, shared);
    else
        mix<T, KMajor<S, false>>(p, shared);
}
template <class T, int kSteps>
NXRT_DEVICE void v_major(const MixerParams& p) {
    NXRT_SHARED Shared shared;
    if (is_wide<float, 4>(p, p.dk))
        mix<T, VMajor<kSteps, true>>(p, shared);
    else
        mix<T, VMajor<kSteps, false>>(p, shared);
}

// Those for kAtOnce heads have few registers a thread; the states of the others need more.
NXRT_KERNEL_EARLY(k_major_f16_f16, MixerParams, (k_major<half, half>), 1024)
NXRT_KERNEL_EARLY(k_major_bf16_bf16, MixerParams, (k_major<bf16, bf16>), 1024)
NXRT_KERNEL_EARLY(k_major_f32_f32, MixerParams, (k_major<float, float>), 512)
NXRT_KERNEL_EARLY(k_major_f16_f32, MixerParams, (k_major<half, float>), 512)
NXRT_KERNEL_EARLY(k_major_bf16_f32, MixerParams, (k_major<bf16, float>), 512)
NXRT_KERNEL_EARLY(v_major_f32_f32, MixerParams, (v_major<float, 4>), 512)
NXRT_KERNEL_EARLY(v_major_f16_f32, MixerParams, (v_major<half, 4>), 512)
NXRT_KERNEL_EARLY(v_major_bf16_f32, MixerParams, (v_major<bf16, 4>), 512)
NXRT_KERNEL_EARLY(v_major_long_f32_f32, MixerParams, (v_major<float, 8>), 512)
NXRT_KERNEL_EARLY(v_major_long_f16_f32, MixerParams, (v_major<half, 8>), 512)
NXRT_KERNEL_EARLY(v_major_long_bf16_f32, MixerParams, (v_major<bf16, 8>), 512)
