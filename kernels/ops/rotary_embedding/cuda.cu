// Rotary position embeddings: a warp a head's row.
#include "common.cuh"

using namespace nxrt;

// Which row of the angles a pair takes.
enum Kind : uint32_t {
    kOne = 0,        // positions[token]
    kAscending = 1,  // the first position plus the row, the same for every batch entry
    kStreams = 2,    // positions[stream of the pair][token]
    kToken = 3,      // the token's
};

struct RotaryParams {
    const void* x;
    void* y;
    const void* cos;  // [angles, half]
    const void* sin;
    const int64_t* positions;
    const uint8_t* streams;  // by pair
    int64_t batch_step;      // elements between batch entries, heads and rows
    int64_t head_step;
    int64_t row_step;
    uint32_t batch;
    uint32_t rows;
    uint32_t heads;
    uint32_t dim;
    uint32_t half;
    uint32_t interleaved;
    uint32_t kind;
    uint32_t angles;
};

// Positions beyond the angles are clamped.
NXRT_DEVICE int64_t angle_row(const RotaryParams& p, int64_t token, int s, int pair) {
    int64_t row = token;
    if (p.kind == kOne) row = p.positions[token];
    if (p.kind == kAscending) row = p.positions[0] + s;
    if (p.kind == kStreams) row = p.positions[p.streams[pair] * (static_cast<int64_t>(p.batch) * p.rows) + token];
    return min(max(row, static_cast<int64_t>(0)), static_cast<int64_t>(p.angles) - 1);
}

template <class T>
NXRT_DEVICE void rotate(const RotaryParams& p) {
    const int lane = lane_id(), half = p.angles > 0 ? p.half : 0, dim = p.dim, heads = p.heads, rows = p.rows;
    const int64_t number = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpSize) + warp_id();
    const int64_t token = number / heads;
    if (token >= static_cast<int64_t>(p.batch) * rows) return;
    const int s = static_cast<int>(token % rows);
    const int64_t at = token / rows * p.batch_step + number % heads * p.head_step + s * p.row_step;
    const T* from = static_cast<const T*>(p.x) + at;
    T* to = static_cast<T*>(p.y) + at;
    for (int i = lane; i < half; i += kWarpSize) {
        const int64_t angle = angle_row(p, token, s, i) * p.half + i;
        const float cos = to_float(static_cast<const T*>(p.cos)[angle]), sin = to_float(static_cast<const T*>(p.sin)[angle]);
        const int first = p.interleaved ? 2 * i : i, second = p.interleaved ? 2 * i + 1 : i + half;
        const float a = to_float(from[first]), b = to_float(from[second]);
        to[first] = from_float<T>(a * cos - b * sin);
        to[second] = from_float<T>(a * sin + b * cos);
    }
    for (int d = 2 * half + lane; d < dim; d += kWarpSize) to[d] = from[d];
}

NXRT_KERNEL(rotate_f32, RotaryParams, (rotate<float>), 256)
NXRT_KERNEL(rotate_f16, RotaryParams, (rotate<half>), 256)
NXRT_KERNEL(rotate_bf16, RotaryParams, (rotate<bf16>), 256)
