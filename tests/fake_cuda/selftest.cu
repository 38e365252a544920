// Kernels that test the emulator (test_fake_cuda.py): right ones, and the wrong ones that it has to report.
#include "cluster.cuh"
#include "mma.cuh"

using namespace nxrt;

namespace {

struct Params {
    const void* in;
    void* out;
    uint32_t n;
    uint32_t mode;
};

// Every thread tells who it is.
NXRT_DEVICE void identify(const Params& p) {
    const uint64_t block = blockIdx.x + uint64_t(gridDim.x) * (blockIdx.y + uint64_t(gridDim.y) * blockIdx.z);
    const uint64_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const uint64_t threads = blockDim.x * blockDim.y * blockDim.z;
    static_cast<uint64_t*>(p.out)[block * threads + thread] =
        uint64_t(blockIdx.z) << 40 | uint64_t(blockIdx.y) << 32 | blockIdx.x << 16 | threadIdx.z << 12 | threadIdx.y << 8 | threadIdx.x;
}

// Reverses each block through shared memory, several times over, so that every barrier counts.
NXRT_DEVICE void reverse(const Params& p) {
    NXRT_DYNAMIC_SHARED(uint32_t, shared);
    NXRT_SHARED uint32_t fixed[256];
    const uint32_t* in = static_cast<const uint32_t*>(p.in) + blockIdx.x * blockDim.x;
    uint32_t value = in[threadIdx.x];
    for (uint32_t i = 0; i < p.n; ++i) {
        shared[threadIdx.x] = value;
        __syncthreads();
        value = shared[blockDim.x - 1 - threadIdx.x] + 1;
        fixed[threadIdx.x] = value;
        __syncthreads();
        value = fixed[(threadIdx.x + 1) % blockDim.x];
    }
    static_cast<uint32_t*>(p.out)[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

// Hands each block's values to the block p.n behind it in its cluster of four. Modes: 1 does not wait for all blocks to have begun,
// 2 expects too little.
NXRT_DEVICE void pass_on(const Params& p) {
    NXRT_DYNAMIC_SHARED(float, shared);
    float* values = shared + 4;
    Inbox& inbox = *reinterpret_cast<Inbox*>(shared);
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x == 0) open_inbox(inbox, blockDim.x * sizeof(float) / (p.mode == 2 ? 2 : 1));
    cluster_arrive();
    if (p.mode != 1) cluster_wait();
    send((cluster_rank() + p.n) % 4, values[threadIdx.x], static_cast<const float*>(p.in)[i], inbox);
    wait_for(inbox);
    static_cast<float*>(p.out)[i] = values[blockDim.x - 1 - threadIdx.x] + 1;
}

// One warp-wide result a lane, of the operation that `mode` names.
NXRT_DEVICE void warp_operations(const Params& p) {
    const int lane = int(threadIdx.x);
    const int value = static_cast<const int*>(p.in)[lane];
    const int argument = int(p.n);
    int r = 0;
    switch (p.mode) {
        case 0: r = __shfl_sync(kFullMask, value, (lane * argument) % 32); break;
        case 1: r = __shfl_xor_sync(kFullMask, value, argument); break;
        case 2: r = __shfl_down_sync(kFullMask, value, argument); break;
        case 3: r = __shfl_up_sync(kFullMask, value, argument); break;
        case 4: r = __shfl_down_sync(kFullMask, value, argument, 8); break;
        case 5: r = int(__ballot_sync(kFullMask, value % argument == 0)); break;
        case 6: r = __any_sync(kFullMask, value == argument); break;
        case 7: r = __all_sync(kFullMask, value < argument); break;
        case 8: r = int(__shfl_xor_sync(kFullMask, double(value), argument)); break;
        case 9: r = int(__shfl_xor_sync(kFullMask, uint64_t(value) << 32, argument) >> 32); break;
        default: break;
    }
    __syncwarp();
    static_cast<int*>(p.out)[lane] = r;
}

// Out: the sum, the maximum, and both sums of two of each block, from every thread.
NXRT_DEVICE void reductions(const Params& p) {
    NXRT_SHARED float shared[64];
    const float x = static_cast<const float*>(p.in)[blockIdx.x * blockDim.x + threadIdx.x];
    const float sum = block_sum(x, shared);
    const float most = block_max(x, shared);
    const float2 two = block_sum2(x, x * x, shared);
    const Vec<float, 4> r = {{sum, most, two.x, two.y}};
    store_vec(static_cast<float*>(p.out) + (blockIdx.x * blockDim.x + threadIdx.x) * 4, r);
}

// D = A B for A 16x16 (row major) and B 16x8 (row major), through shared memory as attention does it.
template <class T>
NXRT_DEVICE void product(const Params& p) {
    NXRT_SHARED __align__(16) T a[16 * 16];
    NXRT_SHARED __align__(16) T b[16 * 8];
    const T* in = static_cast<const T*>(p.in);
    const int lane = int(threadIdx.x);
    cp_async_16(a + lane * 8, in + lane * 8);
    if (lane < 16) cp_async_16(b + lane * 8, in + 256 + lane * 8);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    uint32_t af[4], bf[2];
    ldmatrix_x4(af, a + lane % 16 * 16 + lane / 16 * 8);
    // B's rows are what the instruction takes as columns.
    ldmatrix_x2_trans(bf, b + lane % 16 * 8);
    float d[4] = {};
    mma_m16n8k16<T>(d, af, bf);
    mma_m16n8k16<T>(d, af, bf);
    float* out = static_cast<float*>(p.out);
    const int row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + column + i % 2] = d[i];
}

// D = A B for A 16x8 (row major) and B 8x8 (row major), of tf32.
NXRT_DEVICE void product_f32(const Params& p) {
    const float *a = static_cast<const float*>(p.in), *b = a + 16 * 8;
    const int row = int(threadIdx.x) / 4, t = int(threadIdx.x) % 4;
    float d[4] = {};
    mma_m16n8k8(d, {a[row * 8 + t], a[(row + 8) * 8 + t], a[row * 8 + t + 4], a[(row + 8) * 8 + t + 4]},
                {b[t * 8 + row], b[(t + 4) * 8 + row]});
    float* out = static_cast<float*>(p.out);
    for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

// Copies with some chunks invalid; mode 1 does not wait for them.
NXRT_DEVICE void zero_fill(const Params& p) {
    NXRT_DYNAMIC_SHARED(uint32_t, shared);
    const uint32_t* in = static_cast<const uint32_t*>(p.in);
    for (int i = 0; i < 4; ++i) shared[threadIdx.x * 4 + i] = 7;
    cp_async_16(shared + threadIdx.x * 4, in + threadIdx.x * 4, threadIdx.x < p.n);
    cp_async_commit();
    if (p.mode == 0) {
        cp_async_wait<0>();
    } else {
        cp_async_wait<1>();
    }
    __syncthreads();
    for (int i = 0; i < 4; ++i) static_cast<uint32_t*>(p.out)[threadIdx.x * 4 + i] = shared[threadIdx.x * 4 + i];
}

// lop3 of (a & b) | c, a byte permutation, and what else turns bits over.
NXRT_DEVICE void bits(const Params& p) {
    const uint32_t* in = static_cast<const uint32_t*>(p.in);
    uint32_t* out = static_cast<uint32_t*>(p.out) + threadIdx.x * 4;
    const uint32_t a = in[threadIdx.x * 3], b = in[threadIdx.x * 3 + 1], c = in[threadIdx.x * 3 + 2];
    out[0] = lop3<0xea>(a, b, c);
    out[1] = prmt(a, b, 0x6240);
    out[2] = unsigned(__popc(a)) << 8 | unsigned(__clz(int(b)));
    out[3] = __funnelshift_r(a, b, c % 32);
}

NXRT_DEVICE void count(const Params& p) {
    atomicAdd(static_cast<int*>(p.out), 1);
    atomicMax(static_cast<int*>(p.out) + 1, int(blockIdx.x));
    atomicAdd(static_cast<float*>(p.out) + 2, 0.5f);
}

// out = in * 3 + 1, element by element.
NXRT_DEVICE void affine(const Params& p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) static_cast<float*>(p.out)[i] = static_cast<const float*>(p.in)[i] * 3.0f + 1.0f;
}

NXRT_DEVICE void wrong(const Params& p) {
    NXRT_DYNAMIC_SHARED(uint32_t, shared);
    uint8_t* out = static_cast<uint8_t*>(p.out);
    const int lane = int(threadIdx.x);
    switch (p.mode) {
        case 0:
            if (lane < 40) __syncthreads();
            break;
        case 1:
            if (lane % 32 < 16) out[0] = uint8_t(__shfl_sync(kFullMask, lane, 0));
            break;
        case 2:
            if (lane % 32 < 16) {
                out[0] = uint8_t(__shfl_sync(kFullMask, lane, 0));
            } else {
                out[0] = uint8_t(__any_sync(kFullMask, lane));
            }
            break;
        case 3: out[p.n] = 1; break;
        case 4: out[-1] = 1; break;
        case 5: out[size_t(1) << 33] = 1; break;
        case 6: shared[p.n] = 1; break;
        case 7: load_vec<float, 4>(reinterpret_cast<const float*>(out + 4)); break;
        case 8: *static_cast<volatile int*>(nullptr) = lane; break;
        default: break;
    }
}

}  // namespace

NXRT_KERNEL(identify_kernel, Params, identify, 1024)
NXRT_KERNEL(reverse_kernel, Params, reverse, 256)
NXRT_KERNEL_CLUSTER(pass_on_kernel, Params, pass_on, 128, 1, 4)
NXRT_KERNEL(warp_kernel, Params, warp_operations, 32)
NXRT_KERNEL(reduce_kernel, Params, reductions, 1024)
NXRT_KERNEL(product_f16, Params, (product<half>), 32)
NXRT_KERNEL(product_bf16, Params, (product<bf16>), 32)
NXRT_KERNEL(product_tf32, Params, product_f32, 32)
NXRT_KERNEL(zero_fill_kernel, Params, zero_fill, 128)
NXRT_KERNEL(bits_kernel, Params, bits, 256)
NXRT_KERNEL(count_kernel, Params, count, 256)
NXRT_KERNEL(affine_kernel, Params, affine, 256)
NXRT_KERNEL(wrong_kernel, Params, wrong, 256)
