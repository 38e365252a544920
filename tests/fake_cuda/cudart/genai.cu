// What onnxruntime-genai's own kernels compute in a greedy run; see cudart.cpp.
#include "common.cuh"
#include "cudart/kernels.h"

using namespace nxrt;
using genai::Op;
using genai::Params;

namespace {

template <typename T>
NXRT_DEVICE T* pointer(const Params& p, int slot) {
    return reinterpret_cast<T*>(p.args[slot]);
}

NXRT_DEVICE int number(const Params& p, int slot) { return int(uint32_t(p.args[slot])); }

// scores, best score, its token, sequences, vocabulary
NXRT_DEVICE void top1(const Params& p) {
    const int vocabulary = number(p, 4);
    for (uint32_t row = 0; row < p.blocks; ++row) {
        const float* scores = pointer<const float>(p, 0) + size_t(row) * vocabulary;
        int best = 0;
        for (int i = 1; i < vocabulary; ++i) {
            if (scores[i] > scores[best]) best = i;
        }
        pointer<float>(p, 1)[row] = scores[best];
        pointer<int>(p, 2)[row] = best;
    }
}

// next tokens, scores, tokens, k, ...; of one candidate (k = 1, or the best of sorted ones) nothing is left to chance.
NXRT_DEVICE void sample(const Params& p) {
    const int stride = number(p, 6);
    for (uint32_t row = 0; row < p.blocks; ++row) pointer<int>(p, 0)[row] = pointer<const int>(p, 2)[size_t(row) * stride];
}

// next tokens, sequences, ended, end tokens, their number, padding, whether all have ended
NXRT_DEVICE void check_end(const Params& p) {
    const int sequences = number(p, 1), ends = number(p, 4);
    bool all = true;
    for (int row = 0; row < sequences; ++row) {
        int& token = pointer<int>(p, 0)[row];
        bool& ended = pointer<bool>(p, 2)[row];
        for (int i = 0; i < ends; ++i) ended = ended || token == pointer<const int>(p, 3)[i];
        if (ended) token = number(p, 5);
        all = all && ended;
    }
    if (all) *pointer<bool>(p, 6) = true;
}

// scores, sequences, vocabulary, token, score
NXRT_DEVICE void set_score(const Params& p) {
    const uint32_t bits = uint32_t(p.args[4]);
    for (int row = 0; row < number(p, 1); ++row) {
        pointer<uint32_t>(p, 0)[size_t(row) * number(p, 2) + number(p, 3)] = bits;
    }
}

// new tokens, all tokens, sequences, past length, new length, capacity
NXRT_DEVICE void append(const Params& p) {
    const int past = number(p, 3), fresh = number(p, 4), capacity = number(p, 5);
    for (int row = 0; row < number(p, 2); ++row) {
        for (int i = 0; i < fresh; ++i) {
            pointer<int>(p, 1)[size_t(row) * capacity + past + i] = pointer<const int>(p, 0)[row * fresh + i];
        }
    }
}

// mask, sequences, new length, length, capacity
NXRT_DEVICE void static_mask(const Params& p) {
    for (int row = 0; row < number(p, 1); ++row) {
        int64_t* end = pointer<int64_t>(p, 0) + size_t(row) * number(p, 4) + number(p, 3);
        for (int i = 1; i <= number(p, 2); ++i) end[-i] = 1;
    }
}

// new mask, mask, sequences, new length, length
NXRT_DEVICE void grow_mask(const Params& p) {
    const int length = number(p, 4), past = length - number(p, 3);
    for (int row = 0; row < number(p, 2); ++row) {
        for (int i = 0; i < length; ++i) {
            const int64_t* before = pointer<const int64_t>(p, 1) + size_t(row) * past;
            pointer<int64_t>(p, 0)[size_t(row) * length + i] = i < past ? before[i] : 1;
        }
    }
}

NXRT_DEVICE void run(const Params& p) {
    switch (p.op) {
        case Op::kTop1: top1(p); break;
        case Op::kSample: sample(p); break;
        case Op::kCheckEnd: check_end(p); break;
        case Op::kSetScore: set_score(p); break;
        case Op::kAppend: append(p); break;
        case Op::kStaticMask: static_mask(p); break;
        case Op::kGrowMask: grow_mask(p); break;
        case Op::kNextPosition:  // positions, sequences
            for (int i = 0; i < number(p, 1); ++i) ++pointer<int64_t>(p, 0)[i];
            break;
        case Op::kPositions:  // positions, length, new length
            for (int i = 0; i < number(p, 2); ++i) pointer<int64_t>(p, 0)[i] = number(p, 1) - number(p, 2) + i;
            break;
        case Op::kHalfToFloat:
            for (int i = 0; i < number(p, 2); ++i) pointer<float>(p, 1)[i] = __half2float(pointer<const half>(p, 0)[i]);
            break;
        case Op::kWiden:
            for (int i = 0; i < number(p, 2); ++i) pointer<int64_t>(p, 1)[i] = pointer<const int32_t>(p, 0)[i];
            break;
    }
}

}  // namespace

NXRT_KERNEL(genai_kernel, Params, run, 1)
