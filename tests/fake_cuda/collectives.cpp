// What PTX instructions and whole-warp helpers of kernels/cuda do, one warp at a time.
#include <algorithm>

#include "fibers.h"

namespace nxrt::emulate {

namespace {

template <class T>
T read(const Slot& slot, unsigned offset = 0) {
    T value;
    std::memcpy(&value, slot.bytes + offset, sizeof value);
    return value;
}

// The sum in the order of a butterfly of shuffles.
void finish_sum(Slot* slots, unsigned) {
    float values[kWarp];
    for (unsigned i = 0; i < kWarp; ++i) values[i] = read<float>(slots[i]);
    for (unsigned step = kWarp / 2; step > 0; step /= 2) {
        float next[kWarp];
        for (unsigned i = 0; i < kWarp; ++i) next[i] = values[i] + values[i ^ step];
        std::copy(next, next + kWarp, values);
    }
    for (unsigned i = 0; i < kWarp; ++i) std::memcpy(slots[i].bytes, &values[i], sizeof(float));
}

void finish_max(Slot* slots, unsigned) {
    float most = read<float>(slots[0]);
    for (unsigned i = 1; i < kWarp; ++i) most = std::fmax(most, read<float>(slots[i]));
    for (unsigned i = 0; i < kWarp; ++i) std::memcpy(slots[i].bytes, &most, sizeof(float));
}

struct MmaOperands {
    uint32_t a[4];
    uint32_t b[2];
    float d[4];
};

float widen(half x) { return half_to_float(x); }
float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
void unpack(uint32_t pair, float* to) {
    T values[2];
    std::memcpy(static_cast<void*>(values), &pair, sizeof values);
    to[0] = widen(values[0]);
    to[1] = widen(values[1]);
}

// d += a b for all lanes; `b` by columns.
template <unsigned K>
void add_product(Slot* slots, const float (&a)[16][K], const float (&b)[8][K]) {
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        auto o = read<MmaOperands>(slots[lane]);
        for (unsigned i = 0; i < 4; ++i) {
            const float* row = a[lane / 4 + i / 2 * 8];
            const float* column = b[lane % 4 * 2 + i % 2];
            float sum = 0.0f;
            for (unsigned k = 0; k < K; ++k) sum += row[k] * column[k];
            o.d[i] += sum;
        }
        std::memcpy(slots[lane].bytes, &o, sizeof o);
    }
}

template <class T>
void finish_mma(Slot* slots, unsigned) {
    float a[16][16], b[8][16];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        const auto o = read<MmaOperands>(slots[lane]);
        const unsigned g = lane / 4, t = lane % 4 * 2;
        for (unsigned i = 0; i < 4; ++i) unpack<T>(o.a[i], &a[g + i % 2 * 8][t + i / 2 * 8]);
        for (unsigned i = 0; i < 2; ++i) unpack<T>(o.b[i], &b[g][t + i * 8]);
    }
    add_product(slots, a, b);
}

float tf32(uint32_t bits) {
    bits &= 0xffffe000u;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

void finish_mma_tf32(Slot* slots, unsigned) {
    float a[16][8], b[8][8];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        const auto o = read<MmaOperands>(slots[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = tf32(o.a[i]);
        for (unsigned i = 0; i < 2; ++i) b[g][t + i * 4] = tf32(o.b[i]);
    }
    add_product(slots, a, b);
}

// The calling lane's slot.
const Slot& own_slot(Collective kind, const void* value, unsigned bytes, Finish finish, unsigned argument = 0) {
    Fiber& fiber = current();
    return fiber.processor->collective(fiber, kind, value, bytes, finish, argument)[fiber.lane];
}

void mma(float* d, const void* a, const void* b, Collective kind, Finish finish) {
    MmaOperands o;
    std::memcpy(o.a, a, sizeof o.a);
    std::memcpy(o.b, b, sizeof o.b);
    std::copy(d, d + 4, o.d);
    o = read<MmaOperands>(own_slot(kind, &o, sizeof o, finish));
    std::copy(o.d, o.d + 4, d);
}

// The argument is the number of matrices, plus 8 for the transposed ones.
void finish_ldmatrix(Slot* slots, unsigned argument) {
    const unsigned matrices = argument % 8;
    const bool transposed = argument >= 8;
    uint16_t values[4][8][8];
    for (unsigned lane = 0; lane < matrices * 8; ++lane) {
        const auto row = read<const void*>(slots[lane]);
        check_aligned(row, 16);
        std::memcpy(values[lane / 8][lane % 8], row, 16);
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        const unsigned g = lane / 4, t = lane % 4 * 2;
        for (unsigned m = 0; m < matrices; ++m) {
            const auto& matrix = values[m];
            const uint16_t pair[2] = {transposed ? matrix[t][g] : matrix[g][t],
                                      transposed ? matrix[t + 1][g] : matrix[g][t + 1]};
            std::memcpy(slots[lane].bytes + m * sizeof pair, pair, sizeof pair);
        }
    }
}

}  // namespace

float warp_sum(float x) { return read<float>(own_slot(Collective::kSum, &x, sizeof x, finish_sum)); }
float warp_max(float x) { return read<float>(own_slot(Collective::kMax, &x, sizeof x, finish_max)); }

void mma_m16n8k16_f16(float* d, const uint32_t* a, const uint32_t* b) {
    mma(d, a, b, Collective::kMmaF16, finish_mma<half>);
}
void mma_m16n8k16_bf16(float* d, const uint32_t* a, const uint32_t* b) {
    mma(d, a, b, Collective::kMmaBf16, finish_mma<__nv_bfloat16>);
}
void mma_m16n8k8_tf32(float* d, const float* a, const float* b) { mma(d, a, b, Collective::kMmaTf32, finish_mma_tf32); }

void ldmatrix(uint32_t* r, unsigned matrices, const void* row, bool transposed) {
    const unsigned argument = matrices + (transposed ? 8 : 0);
    std::memcpy(r, own_slot(Collective::kLdmatrix, &row, sizeof row, finish_ldmatrix, argument).bytes, matrices * sizeof *r);
}

void cp_async(void* shared, const void* global, unsigned bytes, bool valid) {
    check_aligned(shared, bytes);
    check_aligned(global, bytes);
    Fiber& fiber = current();
    fiber.copies.push_back({shared, global, bytes, valid, fiber.group});
}

void cp_async_commit() { ++current().group; }

void cp_async_wait(unsigned newest) {
    Fiber& fiber = current();
    auto copy = fiber.copies.begin();
    for (; copy != fiber.copies.end() && copy->group + newest < fiber.group; ++copy) {
        if (copy->valid) {
            std::memcpy(copy->to, copy->from, copy->bytes);
        } else {
            std::memset(copy->to, 0, copy->bytes);
        }
    }
    fiber.copies.erase(fiber.copies.begin(), copy);
}

}  // namespace nxrt::emulate
