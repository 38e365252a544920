// What every program may need: payloads of the launch itself, and plain copies.
#include "common.cuh"

template <int WORDS>
struct UploadParams {
    uint8_t* to;
    uint64_t bytes;
    uint64_t payload[WORDS];
};

template <int WORDS>
NXRT_DEVICE void upload(const UploadParams<WORDS>& p) {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(p.payload);
    for (uint64_t i = threadIdx.x; i < p.bytes; i += blockDim.x) p.to[i] = from[i];
}

struct CopyParams {
    const uint8_t* from;
    uint8_t* to;
    uint64_t bytes;
};

NXRT_DEVICE void copy_bytes_body(const CopyParams& p) {
    const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
    const bool wide = (reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to)) % 16 == 0;
    const uint64_t vectors = wide ? p.bytes / 16 : 0;
    for (uint64_t i = thread; i < vectors; i += threads)
        reinterpret_cast<uint4*>(p.to)[i] = reinterpret_cast<const uint4*>(p.from)[i];
    for (uint64_t i = vectors * 16 + thread; i < p.bytes; i += threads) p.to[i] = p.from[i];
}

NXRT_KERNEL(upload_small, UploadParams<8>, (upload<8>), 64)
NXRT_KERNEL(upload_large, UploadParams<480>, (upload<480>), 256)
NXRT_KERNEL(copy_bytes, CopyParams, copy_bytes_body, 256)
