// The kernels of onnxruntime-genai 0.18 that a greedy run launches, for cudart.cpp, which passes them on, and genai.cu,
// which computes them.
#pragma once

#include <cstdint>

namespace genai {

enum class Op : uint32_t { kTop1, kSample, kCheckEnd, kHalfToFloat, kSetScore, kWiden, kAppend, kStaticMask, kGrowMask, kNextPosition, kPositions };

// One block and one thread do it all.
struct Params {
    uint64_t args[9];  // the kernel's arguments, each in a slot of its own
    Op op;
    uint32_t blocks;  // of the launch that this stands for
};

}  // namespace genai
