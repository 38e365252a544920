// The walk over the chunks of a sequence: what depends on the state.
#include "chunks.cuh"
#include "pair.cuh"

using namespace nxrt;

// Chunks in shared memory: one that is worked on, the others on their way.
constexpr unsigned kStages = 3;
// Columns of the state that a pair of warps holds, and that a block does.
constexpr unsigned kColumns = 8, kPairs = 2;
// Those warps' threads; one more warp copies.
constexpr unsigned kThreads = 2 * kPairs * kWarpSize;

// x = big + small: what tf32 holds of it, and the rest.
struct Split {
    float big, small;
};
NXRT_DEVICE Split split(float x) {
    const float big = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
    return {big, x - big};
}

// The sums d += a b, all parts but the product of both small ones. Several sums: more products under way.
NXRT_DEVICE void multiply(float (&d)[3][4], const Vec<float, 4>& a, const float (&b)[2]) {
    const Split a0 = split(a[0]), a1 = split(a[1]), a2 = split(a[2]), a3 = split(a[3]);
    const Split b0 = split(b[0]), b1 = split(b[1]);
    mma_m16n8k8(d[0], {a0.big, a1.big, a2.big, a3.big}, {b0.big, b1.big});
    mma_m16n8k8(d[1], {a0.big, a1.big, a2.big, a3.big}, {b0.small, b1.small});
    mma_m16n8k8(d[2], {a0.small, a1.small, a2.small, a3.small}, {b0.big, b1.big});
}

// Columns of a product of tf32. A lane's slots t and t + 4 of a tile stand for rows 2 t and 2 t + 1, which in the left
// operands are neighbours; here they lie four rows apart, so that no two lanes' elements are in one bank.
using Rows = float[kChunk][kColumns];
NXRT_DEVICE unsigned place(unsigned row) { return row / kTile * kTile + row % kTile / 2 + row % 2 * 4; }

// Rows g and g + 8 of a strip.
NXRT_DEVICE void store_rows(Rows& to, unsigned strip, const float (&x)[4]) {
    const unsigned g = lane_id() / 4, t = lane_id() % 4;
    store_vec<float, 2>(&to[place(strip * kStrip + g)][2 * t], {x[0], x[1]});
    store_vec<float, 2>(&to[place(strip * kStrip + 8 + g)][2 * t], {x[2], x[3]});
}

// A warp's numbers times a power of two, such that 16-bit floats hold their parts.
struct Scale {
    float up = 1.0f, down = 1.0f;

    // Anew only for numbers that have left the range; `most` is the greatest of this lane's magnitudes.
    NXRT_DEVICE void fit(float most) {
        constexpr float kMost = 32768.0f, kUp = 0x1p100f;
        if (!__any_sync(kFullMask, most * up > kMost) && __any_sync(kFullMask, most * up >= 1.0f)) return;
        const float ratio = fminf(kMost / 2 / warp_max(most), kUp);
        up = __uint_as_float(__float_as_uint(ratio) & 0x7f800000u);
        down = 1.0f / up;
    }
};

// Columns of a product of T, in parts: scaled, big + small.
template <class T, unsigned ROWS>
struct alignas(16) Parts {
    T big[ROWS][kColumns], small[ROWS][kColumns];
    float down[2];  // of either half of the rows

    // Rows g and g + 8 of 16 from `first` on.
    NXRT_DEVICE void store(unsigned first, const float (&x)[4], float up) {
        const unsigned g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
        for (unsigned i = 0; i < 2; ++i) {
            const float a = x[2 * i] * up, b = x[2 * i + 1] * up;
            const uint32_t high = as_word(Pair<T>::from_floats(a, b));
            const float2 exact = Pair<T>::floats(high);
            const uint32_t low = as_word(Pair<T>::from_floats(a - exact.x, b - exact.y));
            reinterpret_cast<uint32_t&>(big[first + i * 8 + g][2 * t]) = high;
            reinterpret_cast<uint32_t&>(small[first + i * 8 + g][2 * t]) = low;
        }
    }
    // 32 rows from `first` on as right operands of two products.
    NXRT_DEVICE void load(uint32_t (&high)[4], uint32_t (&low)[4], unsigned first) const {
        ldmatrix_x4_trans(high, big[first + lane_id()]);
        ldmatrix_x4_trans(low, small[first + lane_id()]);
    }
};

// d += a b for both parts of b.
template <class T>
NXRT_DEVICE void multiply_parts(float (&d)[2][4], const uint32_t (&a)[4], const uint32_t* big, const uint32_t* small) {
    mma_m16n8k16<T>(d[0], a, {big[0], big[1]});
    mma_m16n8k16<T>(d[1], a, {small[0], small[1]});
}

template <class T, unsigned D>
struct alignas(16) Stage {
    Tokens<T, D> k, q;
    T v[kChunk][kColumns * kPairs];
    float record[kRecord];
};

// What the two warps of a pair exchange.
template <class T, unsigned D>
struct Exchange {
    Parts<T, D> state;
    Parts<T, kChunk> change;  // diag(F_last / F) D
    Rows rest;                // V - diag(F) K S
    Rows d;
};

template <class T, unsigned D>
struct Shared {
    Stage<T, D> stages[kStages];
    Exchange<T, D> pairs[kPairs];
    float zeros[kOperand];  // the operands that strip 0 of a lower triangular matrix lacks
};

// One block's work: columns from `column` on of a sequence's head.
struct Task {
    uint32_t head, sequence_head, column, chunks;
    Span tokens;
    uint64_t record;  // the first one's

    NXRT_DEVICE explicit Task(const DeltaParams& p) {
        const uint32_t blocks = p.dv / (kColumns * kPairs);
        sequence_head = blockIdx.x / blocks;
        head = sequence_head % p.v_heads;
        column = blockIdx.x % blocks * kColumns * kPairs;
        const uint32_t sequence = sequence_head / p.v_heads;
        tokens = span(p, sequence);
        chunks = ceil_div(tokens.end - tokens.begin, kChunk);
        record = uint64_t(first_chunk(tokens, sequence, kChunk)) * p.v_heads + head;
    }
};

// What the warp that copies does.
template <class T, unsigned D>
struct Copies {
    const DeltaParams& p;
    const Task& task;
    Shared<T, D>& shared;
    const bool wide = aligned_16(p);

    // Each starts the copies of a part of a chunk, if there is that chunk; `rest` is the last one.
    NXRT_DEVICE void keys(uint32_t chunk) const {
        if (chunk >= task.chunks) return;
        const T* from = k_row<T>(p, first(chunk), task.head);
        copy_rows<kWarpSize, D>(stage(chunk).k, from, p.k_stride, rows(chunk), wide);
    }
    NXRT_DEVICE void queries(uint32_t chunk) const {
        if (chunk >= task.chunks) return;
        const T* from = q_row<T>(p, first(chunk), task.head * p.q_heads / p.v_heads);
        copy_rows<kWarpSize, D>(stage(chunk).q, from, p.q_stride, rows(chunk), wide);
    }
    NXRT_DEVICE void rest(uint32_t chunk) const {
        if (chunk < task.chunks) {
            const T* values = v_row<T>(p, first(chunk), task.head) + task.column;
            copy_rows<kWarpSize, kColumns * kPairs>(stage(chunk).v, values, p.v_stride, rows(chunk), wide);
            const float* record = p.scratch + (task.record + uint64_t(chunk) * p.v_heads) * kRecord;
#pragma unroll
            for (unsigned i = 4 * lane_id(); i < kRecord; i += 4 * kWarpSize)
                cp_async_16(stage(chunk).record + i, record + i);
        }
        cp_async_commit();
    }

    // The barriers are those of Walk::run; what they part takes this warp about as long as the others.
    NXRT_DEVICE void run() const {
        for (unsigned i = lane_id(); i < kOperand; i += kWarpSize) shared.zeros[i] = 0.0f;
        for (unsigned chunk = 0; chunk < kStages - 1; ++chunk) {
            keys(chunk);
            queries(chunk);
            rest(chunk);
        }
        for (uint32_t chunk = 0; chunk < task.chunks; ++chunk) {
            cp_async_wait<kStages - 2>();
            __syncthreads();
            // Into the stage that the last step has read.
            keys(chunk + kStages - 1);
            __syncthreads();
            queries(chunk + kStages - 1);
            __syncthreads();
            rest(chunk + kStages - 1);
        }
    }

    NXRT_DEVICE Stage<T, D>& stage(uint32_t chunk) const { return shared.stages[chunk % kStages]; }
    NXRT_DEVICE uint32_t first(uint32_t chunk) const { return task.tokens.begin + chunk * kChunk; }
    NXRT_DEVICE uint32_t rows(uint32_t chunk) const { return task.tokens.end - first(chunk); }
};

// A pair of warps has 8 columns; of the pair, each has half of the state's rows and half of each chunk's tokens.
template <class T, unsigned D>
struct Walk {
    static constexpr unsigned kStrips = D / (2 * kStrip);

    const DeltaParams& p;
    const Task& task;
    Shared<T, D>& shared;
    Exchange<T, D>& pair;
    const unsigned side = warp_id() % 2, g = lane_id() / 4;
    const unsigned local_column = warp_id() / 2 * kColumns + lane_id() % 4 * 2;
    float state[kStrips][4] = {};
    Scale state_scale, change_scale;

    NXRT_DEVICE Walk(const DeltaParams& p, const Task& task, Shared<T, D>& shared)
        : p(p), task(task), shared(shared), pair(shared.pairs[warp_id() / 2]) {}

    NXRT_DEVICE unsigned state_row(unsigned n) const { return (side * kStrips + n) * kStrip; }
    NXRT_DEVICE uint64_t place_of(unsigned n, unsigned i) const {
        return state_at(p, task.sequence_head, state_row(n) + i / 2 * 8 + g, task.column + local_column + i % 2);
    }
    template <class S>
    NXRT_DEVICE void load_states(const S* from) {
#pragma unroll
        for (unsigned n = 0; n < kStrips; ++n)
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) state[n][i] = to_float(from[place_of(n, i)]);
    }
    template <class S>
    NXRT_DEVICE void store_states(S* to) const {
#pragma unroll
        for (unsigned n = 0; n < kStrips; ++n)
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) to[place_of(n, i)] = from_float<S>(state[n][i]);
    }
    NXRT_DEVICE void share_state() {
        float most = 0.0f;
#pragma unroll
        for (unsigned n = 0; n < kStrips; ++n)
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) most = fmaxf(most, fabsf(state[n][i]));
        state_scale.fit(most);
#pragma unroll
        for (unsigned n = 0; n < kStrips; ++n) pair.state.store(state_row(n), state[n], state_scale.up);
        if (lane_id() == 0) pair.state.down[side] = state_scale.down;
    }

    // K S and Q S for this warp's tokens.
    NXRT_DEVICE void read_state(const Stage<T, D>& stage, float (&seen)[4], float (&read)[4]) const {
        const unsigned row = side * kStrip + lane_id() % 16, column = lane_id() / 16 * 8;
        float ks[2][2][4] = {}, qs[2][2][4] = {};
#pragma unroll
        for (unsigned n = 0; n < D / 32; ++n) {
            constexpr unsigned kHalf = D / 64;
            uint32_t big[4], small[4];
            pair.state.load(big, small, n * 32);
#pragma unroll
            for (unsigned i = 0; i < 2; ++i) {
                uint32_t k[4], q[4];
                ldmatrix_x4(k, &stage.k[row][n * 32 + i * 16 + column]);
                ldmatrix_x4(q, &stage.q[row][n * 32 + i * 16 + column]);
                multiply_parts<T>(ks[n / kHalf], k, big + 2 * i, small + 2 * i);
                multiply_parts<T>(qs[n / kHalf], q, big + 2 * i, small + 2 * i);
            }
        }
        const float down[2] = {pair.state.down[0], pair.state.down[1]};
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
            seen[i] = down[0] * (ks[0][0][i] + ks[0][1][i]) + down[1] * (ks[1][0][i] + ks[1][1][i]);
            read[i] = down[0] * (qs[0][0][i] + qs[0][1][i]) + down[1] * (qs[1][0][i] + qs[1][1][i]);
        }
    }

    // This warp's strip of a lower triangular matrix, and x += it times rows.
    struct Lower {
        Vec<float, 4> tiles[kChunk / kTile];
    };
    NXRT_DEVICE void load_lower(Lower& lower, const float* matrix) const {
#pragma unroll
        for (unsigned tile = 0; tile < kChunk / kTile; ++tile) {
            const float* from = tile < 2 || side == 1 ? matrix + (2 * side + tile) * kOperand : shared.zeros;
            lower.tiles[tile] = load_vec<float, 4>(from + 4 * lane_id());
        }
    }
    NXRT_DEVICE void multiply_lower(float (&x)[4], const Lower& lower, const Rows& rows) const {
        float sums[3][4] = {};
#pragma unroll
        for (unsigned tile = 0; tile < kChunk / kTile; ++tile) {
            const unsigned row = tile * kTile + lane_id() % 4;
            multiply(sums, lower.tiles[tile], {rows[row][g], rows[row + 4][g]});
        }
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) x[i] += sums[0][i] + (sums[1][i] + sums[2][i]);
    }

    NXRT_DEVICE void update_state(const Stage<T, D>& stage) {
        const unsigned row = lane_id() / 16 * 8 + lane_id() % 8, column = lane_id() / 8 % 2 * 8;
        const float last = stage.record[kLast], down[2] = {pair.change.down[0], pair.change.down[1]};
        uint32_t big[4], small[4];
        pair.change.load(big, small, 0);
#pragma unroll
        for (unsigned n = 0; n < kStrips; ++n) {
            float sums[2][2][4] = {};
#pragma unroll
            for (unsigned i = 0; i < 2; ++i) {
                uint32_t k[4];
                ldmatrix_x4_trans(k, &stage.k[i * kStrip + row][state_row(n) + column]);
                multiply_parts<T>(sums[i], k, big + 2 * i, small + 2 * i);
            }
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) {
                const float first = sums[0][0][i] + sums[0][1][i], second = sums[1][0][i] + sums[1][1][i];
                state[n][i] = fmaf(last, state[n][i], fmaf(down[0], first, down[1] * second));
            }
        }
    }

    NXRT_DEVICE void store_outputs(uint32_t chunk, const float (&out)[4]) const {
        if (!p.out) return;
        const uint32_t first = task.tokens.begin + chunk * kChunk + side * kStrip + g;
        T* to = static_cast<T*>(p.out) + (uint64_t(first) * p.v_heads + task.head) * p.dv + task.column + local_column;
        const uint64_t eight_rows = uint64_t(8) * p.v_heads * p.dv;
#pragma unroll
        for (unsigned i = 0; i < 2; ++i) {
            const Vec<T, 2> two = {from_float<T>(out[2 * i]), from_float<T>(out[2 * i + 1])};
            if (first + 8 * i < task.tokens.end) store_vec<T, 2>(to + i * eight_rows, two);
        }
    }

    NXRT_DEVICE void step(uint32_t chunk) {
        const Stage<T, D>& stage = shared.stages[chunk % kStages];
        // Elements 0 and 1 of results are in this row of the chunk, 2 and 3 in the eighth one after it.
        const unsigned row = side * kStrip + g;
        const float* factors = stage.record + row;
        Lower lower;
        load_lower(lower, stage.record + kInner);
        float x[4], out[4];
        read_state(stage, x, out);
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
            x[i] = fmaf(-factors[kA + i / 2 * 8], x[i], to_float(stage.v[row + i / 2 * 8][local_column + i % 2]));
            out[i] *= factors[kR + i / 2 * 8];
        }
        store_rows(pair.rest, side, x);
        __syncthreads();

        float d[4] = {}, change[4], most = 0.0f;
        multiply_lower(d, lower, pair.rest);
        load_lower(lower, stage.record + kOuter);
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
            change[i] = d[i] * factors[kW + i / 2 * 8];
            most = fmaxf(most, fabsf(change[i]));
        }
        store_rows(pair.d, side, d);
        change_scale.fit(most);
        pair.change.store(side * kStrip, change, change_scale.up);
        if (lane_id() == 0) pair.change.down[side] = change_scale.down;
        __syncthreads();

        update_state(stage);
        multiply_lower(out, lower, pair.d);
        share_state();
        store_outputs(chunk, out);
    }

    NXRT_DEVICE void run() {
        if (p.past) {
            if (p.state_type == 0) load_states(static_cast<const float*>(p.past));
            else if (p.state_type == 1) load_states(static_cast<const half*>(p.past));
            else load_states(static_cast<const bf16*>(p.past));
        }
        share_state();
        for (uint32_t chunk = 0; chunk < task.chunks; ++chunk) {
            __syncthreads();
            step(chunk);
        }
        if (!p.present) return;
        if (p.state_type == 0) store_states(static_cast<float*>(p.present));
        else if (p.state_type == 1) store_states(static_cast<half*>(p.present));
        else store_states(static_cast<bf16*>(p.present));
    }
};

template <class T, unsigned D>
NXRT_DEVICE void walk(const DeltaParams& p) {
    using S = Shared<T, D>;
    NXRT_DYNAMIC_SHARED(S, shared);
    const Task task(p);
    if (threadIdx.x < kThreads) Walk<T, D>(p, task, *shared).run();
    else Copies<T, D>{p, task, *shared}.run();
}

NXRT_KERNEL(walk_64_f16, DeltaParams, (walk<half, 64>), 160)
NXRT_KERNEL(walk_64_bf16, DeltaParams, (walk<bf16, 64>), 160)
NXRT_KERNEL(walk_128_f16, DeltaParams, (walk<half, 128>), 160)
NXRT_KERNEL(walk_128_bf16, DeltaParams, (walk<bf16, 128>), 160)
NXRT_KERNEL(walk_256_f16, DeltaParams, (walk<half, 256>), 160)
NXRT_KERNEL(walk_256_bf16, DeltaParams, (walk<bf16, 256>), 160)
