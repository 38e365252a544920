// CUDA's runtime library for onnxruntime-genai's CUDA provider, on top of the fake driver: what that provider calls, and
// its kernels by name, each run by the kernel `genai_kernel` of genai.cu. A kernel that is not known is an error.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "kernels.h"

namespace {

std::mutex mutex;
// A kernel's stub in the program -> its mangled name.
std::map<const void*, std::string>& kernels() {
    static std::map<const void*, std::string> map;
    return map;
}
thread_local cudaError_t last = cudaSuccess;

cudaError_t said(CUresult code) { return last = code ? cudaErrorUnknown : cudaSuccess; }

// The primary context of device 0, current in this thread, as the runtime makes it.
void context() {
    CUcontext current = nullptr;
    cuInit(0);
    cuCtxGetCurrent(&current);
    if (current) return;
    static CUcontext primary = [] {
        CUcontext made = nullptr;
        cuDevicePrimaryCtxRetain(&made, 0);
        return made;
    }();
    cuCtxSetCurrent(primary);
}

CUfunction genai_function() {
    static CUfunction function = [] {
        CUlibrary library = nullptr;
        CUkernel kernel = nullptr;
        CUfunction found = nullptr;
        cuLibraryLoadData(&library, "NXRT_EMULATED genai\n", nullptr, nullptr, 0, nullptr, nullptr, 0);
        cuLibraryGetKernel(&kernel, library, "genai_kernel");
        cuKernelGetFunction(&found, kernel);
        if (!found) fprintf(stderr, "fake cudart: the fake driver lacks genai_kernel\n"), abort();
        return found;
    }();
    return function;
}

// A kernel of genai's by a part of its mangled name, and its arguments' sizes.
struct Known {
    const char* part;
    genai::Op op;
    const char* sizes;
};
constexpr Known kKnown[] = {
    {"select_sort13GetTop1Kernel", genai::Op::kTop1, "88844"},
    {"FusedSamplingKernel", genai::Op::kSample, "888444488"},
    {"CheckForEOSAndPad", genai::Op::kCheckEnd, "8488448"},
    {"ConvertFp16ToFp32", genai::Op::kHalfToFloat, "884"},
    {"SetScoreProcessor", genai::Op::kSetScore, "84444"},
    {"ConvertInt32ToInt64", genai::Op::kWiden, "884"},
    {"AppendNextTokensToSequences", genai::Op::kAppend, "884444"},
    // Of 64-bit masks and positions.
    {"UpdateAttentionMaskStaticIlEEv", genai::Op::kStaticMask, "84444"},
    {"CopyAndUpdateAttentionMaskIlEEv", genai::Op::kGrowMask, "88444"},
    {"UpdatePositionIdsIlEEvPT_ii", genai::Op::kPositions, "844"},
    {"UpdatePositionIdsIlEEvPT_i", genai::Op::kNextPosition, "84"},
};

template <typename T>
T argument(void** args, int i) {
    T value;
    memcpy(&value, args[i], sizeof value);
    return value;
}

// Kernels that the driver has an entry for; false for any other.
bool moved(const std::string& name, void** args, cudaStream_t stream, CUresult* code) {
    const auto is = [&](const char* part) { return name.find(part) != std::string::npos; };
    if (is("StoreBytesKernelILi")) {
        *code = cuMemcpyHtoDAsync(argument<CUdeviceptr>(args, 1), args[0], argument<int>(args, 2), stream);
    } else if (is("CopyBytesKernel")) {
        *code = cuMemcpyAsync(argument<CUdeviceptr>(args, 1), argument<CUdeviceptr>(args, 0), argument<size_t>(args, 2), stream);
    } else if (is("ZeroBytesKernel")) {
        *code = cuMemsetD8Async(argument<CUdeviceptr>(args, 0), 0, argument<size_t>(args, 1), stream);
    } else {
        // Nothing draws at random in a greedy run.
        *code = CUDA_SUCCESS;
        return is("InitCurandStatesKernel");
    }
    return true;
}

cudaError_t launch(const void* stub, dim3 grid, void** args, cudaStream_t stream) {
    context();
    std::string name;
    {
        std::lock_guard<std::mutex> lock(mutex);
        name = kernels()[stub];
    }
    CUresult code = CUDA_SUCCESS;
    if (moved(name, args, stream, &code)) return said(code);
    for (const Known& known : kKnown) {
        if (name.find(known.part) == std::string::npos) continue;
        genai::Params params = {};
        params.op = known.op;
        params.blocks = grid.x;
        for (int i = 0; known.sizes[i]; ++i) memcpy(&params.args[i], args[i], known.sizes[i] - '0');
        void* pointers[] = {&params};
        return said(cuLaunchKernel(genai_function(), 1, 1, 1, 1, 1, 1, 0, stream, pointers, nullptr));
    }
    fprintf(stderr, "fake cudart: no kernel %s\n", name.c_str());
    return last = cudaErrorInvalidDeviceFunction;
}

struct Pending {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
thread_local Pending pending;

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* image) {
    static void* handle;
    handle = image;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    std::lock_guard<std::mutex> lock(mutex);
    kernels()[stub] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
    pending = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pending.grid, *block = pending.block, *shared = pending.shared;
    *static_cast<void**>(stream) = pending.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3, void** args, size_t, cudaStream_t stream) {
    return launch(kernel, grid, args, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub, void** args) {
    return launch(stub, config->gridDim, args, config->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3 grid, dim3, void** args, size_t, cudaStream_t stream) {
    return launch(stub, grid, args, stream);
}

cudaError_t cudaMalloc(void** memory, size_t size) {
    context();
    CUdeviceptr made = 0;
    if (said(cuMemAlloc(&made, size))) return last = cudaErrorMemoryAllocation;
    *memory = reinterpret_cast<void*>(made);
    return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
    context();
    return memory ? said(cuMemFree(reinterpret_cast<CUdeviceptr>(memory))) : cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned flags) {
    context();
    return said(cuMemHostAlloc(memory, size, flags));
}
cudaError_t cudaFreeHost(void* memory) {
    context();
    return memory ? said(cuMemFreeHost(memory)) : cudaSuccess;
}
static CUdeviceptr pointer(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
    context();
    return size ? said(cuMemcpyAsync(pointer(to), pointer(from), size, stream)) : cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    context();
    return size ? said(cuMemcpy(pointer(to), pointer(from), size)) : cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; ++row) {
        auto* target = static_cast<char*>(to) + row * to_pitch;
        if (cudaMemcpyAsync(target, static_cast<const char*>(from) + row * from_pitch, width, kind, stream)) return last;
    }
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t size, cudaStream_t stream) {
    context();
    return size ? said(cuMemsetD8Async(pointer(memory), static_cast<unsigned char>(value), size, stream)) : cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    context();
    return said(cuMemGetInfo(free, total));
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    context();
    return said(cuStreamCreate(stream, CU_STREAM_DEFAULT));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return said(cuStreamDestroy(stream)); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    context();
    return said(cuStreamSynchronize(stream));
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    context();
    const CUresult code = cuStreamQuery(stream);
    return code == CUDA_ERROR_NOT_READY ? cudaErrorNotReady : said(code);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    context();
    CUstreamCaptureStatus found = CU_STREAM_CAPTURE_STATUS_NONE;
    const cudaError_t code = said(cuStreamIsCapturing(stream, &found));
    *status = static_cast<cudaStreamCaptureStatus>(found);
    return code;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    context();
    return said(cuEventCreate(event, flags));
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return said(cuEventDestroy(event)); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    context();
    return said(cuEventRecord(event, stream));
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return said(cuEventSynchronize(event)); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
    const CUresult code = cuEventQuery(event);
    return code == CUDA_ERROR_NOT_READY ? cudaErrorNotReady : said(code);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return said(cuEventElapsedTime(milliseconds, start, end));
}

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
    cuInit(0);
    return said(cuDeviceGetCount(count));
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cuInit(0);
    return said(cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), device));
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    memset(properties, 0, sizeof *properties);
    cuInit(0);
    const auto attribute = [device](CUdevice_attribute which) {
        int value = 0;
        cuDeviceGetAttribute(&value, which, device);
        return value;
    };
    cuDeviceGetName(properties->name, sizeof properties->name, device);
    cuDeviceTotalMem(&properties->totalGlobalMem, device);
    properties->major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    properties->minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    properties->multiProcessorCount = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    properties->sharedMemPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    attributes->binaryVersion = 90;
    attributes->ptxVersion = 90;
    attributes->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    return *blocks = 1, cudaSuccess;
}
cudaError_t cudaGetLastError() {
    const cudaError_t code = last;
    last = cudaSuccess;
    return code;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorString(cudaError_t code) { return code == cudaErrorInvalidDeviceFunction ? "no such kernel" : code ? "an error of the fake driver" : "no error"; }

}
