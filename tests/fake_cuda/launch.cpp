// Libraries, functions and kernel launches.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cctype>
#include <cstring>

#include "grid.h"
#include "memory.h"

namespace nxrt::fake {

namespace {

constexpr char kImageMark[] = "NXRT_EMULATED ";

// Kernels are linked into this library; it may have been opened with local symbols.
void* own_library() {
    static void* const library = [] {
        Dl_info info;
        return dladdr(reinterpret_cast<void*>(&own_library), &info) == 0 ? nullptr : dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    return library;
}

bool is_mapped(uintptr_t address) {
    unsigned char resident;
    return mincore(reinterpret_cast<void*>(address & ~uintptr_t{4095}), 1, &resident) == 0;
}

// Words of the parameters that look like pointers have to be of device memory that is still there.
bool check_pointers(const KernelCall& call) {
    bool good = true;
    for (size_t offset = 0; offset + 8 <= call.params.size(); offset += 8) {
        uintptr_t word;
        std::memcpy(&word, call.params.data() + offset, sizeof word);
        if (is_device_address(word)) {
            if (find_allocation(word, 0) != nullptr) continue;
            log_error("%s: the parameter at byte %zu points to device memory that is not allocated", call.function->name.c_str(),
                      offset);
            good = false;
        } else if (word >= uintptr_t{0x500000000000} && word < uintptr_t{0x800000000000} && is_mapped(word)) {
            if (find_host_block(word, 0) != nullptr) continue;
            log_error("%s: the parameter at byte %zu points to host memory", call.function->name.c_str(), offset);
            good = false;
        }
    }
    return good;
}

// The parameters with pointers to where the memory is.
std::vector<unsigned char> moved(std::vector<unsigned char> params) {
    for (size_t offset = 0; offset + 8 <= params.size(); offset += 8) {
        uintptr_t word;
        std::memcpy(&word, params.data() + offset, sizeof word);
        if (!is_device_address(word) || find_allocation(word, 0) == nullptr) continue;
        const unsigned char* memory = memory_at(word);
        std::memcpy(params.data() + offset, &memory, sizeof memory);
    }
    return params;
}

std::shared_ptr<Function> find_function(CUfunction function, CUkernel kernel = nullptr) {
    return driver().functions.get(function != nullptr ? function : reinterpret_cast<CUfunction>(kernel));
}

}  // namespace

CUresult make_kernel_call(const Call& call, const CUDA_KERNEL_NODE_PARAMS& p, KernelCall* made) {
    const auto function = find_function(p.func, p.kern);
    NXRT_REQUIRE(function != nullptr && !function->unloaded, CUDA_ERROR_INVALID_HANDLE, "not a kernel");
    const char* name = function->name.c_str();
    const unsigned grid[] = {p.gridDimX, p.gridDimY, p.gridDimZ};
    const unsigned block[] = {p.blockDimX, p.blockDimY, p.blockDimZ};
    for (int i = 0; i < 3; ++i) {
        NXRT_REQUIRE(grid[i] != 0 && grid[i] <= unsigned(attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i)),
                     CUDA_ERROR_INVALID_VALUE, "%s: a grid of %u x %u x %u", name, grid[0], grid[1], grid[2]);
        NXRT_REQUIRE(block[i] != 0 && block[i] <= unsigned(attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i)),
                     CUDA_ERROR_INVALID_VALUE, "%s: a block of %u x %u x %u", name, block[0], block[1], block[2]);
    }
    const unsigned threads = block[0] * block[1] * block[2];
    NXRT_REQUIRE(threads <= function->kernel->max_threads && threads <= 1024, CUDA_ERROR_INVALID_VALUE,
                 "%s: %u threads a block, compiled for %u", name, threads, function->kernel->max_threads);
    const unsigned cluster = function->kernel->cluster;
    NXRT_REQUIRE(grid[0] % cluster == 0 && (cluster == 1 || (threads % emulate::kWarp == 0 && cluster * threads <= emulate::kMaxThreads)),
                 CUDA_ERROR_INVALID_VALUE, "%s: %u blocks of %u threads in x, in clusters of %u", name, grid[0], threads, cluster);
    NXRT_REQUIRE(p.sharedMemBytes <= unsigned(function->max_dynamic_shared), CUDA_ERROR_INVALID_VALUE,
                 "%s: %u bytes of dynamic shared memory, %d are allowed", name, p.sharedMemBytes, function->max_dynamic_shared);
    const size_t bytes = function->kernel->param_bytes;
    const void* params = nullptr;
    if (p.kernelParams != nullptr) {
        NXRT_REQUIRE(p.extra == nullptr, CUDA_ERROR_INVALID_VALUE, "%s: both kernelParams and extra", name);
        params = p.kernelParams[0];
    } else if (p.extra != nullptr) {
        for (void** extra = p.extra; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
            if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) params = extra[1];
            if (*extra != CU_LAUNCH_PARAM_BUFFER_SIZE) continue;
            const size_t given = *static_cast<const size_t*>(extra[1]);
            NXRT_REQUIRE(given == bytes, CUDA_ERROR_INVALID_VALUE, "%s: %zu bytes of parameters, it takes %zu", name, given, bytes);
        }
    }
    NXRT_REQUIRE(params != nullptr, CUDA_ERROR_INVALID_VALUE, "%s: no parameters", name);
    made->function = function;
    made->grid = dim3(grid[0], grid[1], grid[2]);
    made->block = dim3(block[0], block[1], block[2]);
    made->shared_bytes = p.sharedMemBytes;
    const auto* from = static_cast<const unsigned char*>(params);
    made->params.assign(from, from + bytes);
    return CUDA_SUCCESS;
}

CUresult run_kernel(const KernelCall& call) {
    const char* name = call.function->name.c_str();
    ++driver().counters.kernels;
    log("kernel %s grid %ux%ux%u block %ux%ux%u shared %u", name, call.grid.x, call.grid.y, call.grid.z, call.block.x,
        call.block.y, call.block.z, call.shared_bytes);
    if (driver().settings.check_params && !check_pointers(call)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    const std::vector<unsigned char> params = moved(call.params);
    emulate::Launch launch{call.function->kernel, call.function->name, params.data(), call.grid, call.block, call.shared_bytes};
    const emulate::Outcome outcome = emulate::run_grid(launch, driver().settings.descending);
    if (outcome.failure == emulate::Failure::kNone) return CUDA_SUCCESS;
    log_error("%s: %s", name, outcome.message.c_str());
    return outcome.failure == emulate::Failure::kIllegalAddress ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_ERROR_LAUNCH_FAILED;
}

}  // namespace nxrt::fake

using namespace nxrt::fake;

namespace {

CUresult load(const Call& call, const void* image, CUlibrary* library) {
    NXRT_REQUIRE(image != nullptr && library != nullptr, CUDA_ERROR_INVALID_VALUE, "null arguments");
    const char* text = static_cast<const char*>(image);
    NXRT_REQUIRE(std::strncmp(text, kImageMark, sizeof kImageMark - 1) == 0, CUDA_ERROR_NO_BINARY_FOR_GPU,
                 "the image is not of an emulated build");
    const char* stem = text + sizeof kImageMark - 1;
    const char* end = std::strchr(stem, '\n');
    NXRT_REQUIRE(end != nullptr, CUDA_ERROR_INVALID_IMAGE, "an emulated image without an end");
    auto made = std::make_shared<Library>();
    made->stem.assign(stem, end);
    for (char& c : made->stem) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
    *library = driver().libraries.add(made);
    ++driver().counters.library_loads;
    log("library %s", made->stem.c_str());
    return CUDA_SUCCESS;
}

CUresult unload(const Call& call, CUlibrary handle) {
    const auto library = driver().libraries.get(handle);
    NXRT_REQUIRE(library != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a library");
    drain_all();
    for (const auto& entry : library->functions) {
        entry.second->unloaded = true;
        driver().functions.remove(entry.second->function_handle);
        driver().functions.remove(reinterpret_cast<CUfunction>(entry.second->kernel_handle));
    }
    driver().libraries.remove(handle);
    return CUDA_SUCCESS;
}

CUresult look_up(const Call& call, CUlibrary handle, const char* name, std::shared_ptr<Function>* function) {
    const auto library = driver().libraries.get(handle);
    NXRT_REQUIRE(library != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a library");
    auto& known = library->functions[name];
    if (known == nullptr) {
        const std::string symbol = "nxrt_emulated_" + library->stem + "__" + name;
        const void* kernel = dlsym(own_library(), symbol.c_str());
        NXRT_REQUIRE(kernel != nullptr, CUDA_ERROR_NOT_FOUND, "no kernel %s in %s", name, library->stem.c_str());
        known = std::make_shared<Function>();
        known->name = name;
        known->kernel = static_cast<const nxrt::emulate::Kernel*>(kernel);
        known->function_handle = driver().functions.add(known);
        known->kernel_handle = reinterpret_cast<CUkernel>(driver().functions.add(known));
    }
    *function = known;
    return CUDA_SUCCESS;
}

#define NXRT_FUNCTION(variable, handle)                 \
    const auto variable = driver().functions.get(handle); \
    NXRT_REQUIRE(variable != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a kernel")

CUresult get_attribute(const Call& call, const Function& f, CUfunction_attribute attribute, int* value) {
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = int(f.kernel->max_threads); break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = f.max_dynamic_shared; break;
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = f.carveout; break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
        case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = 0; break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 90; break;
        default: return call.error(CUDA_ERROR_INVALID_VALUE, "unknown attribute %d", attribute);
    }
    return CUDA_SUCCESS;
}

CUresult set_attribute(const Call& call, Function& f, CUfunction_attribute attribute, int value) {
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: {
            const int limit = nxrt::fake::attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
            NXRT_REQUIRE(value >= 0 && value <= limit, CUDA_ERROR_INVALID_VALUE,
                         "%s: %d bytes of dynamic shared memory, the device has %d", f.name.c_str(), value, limit);
            f.max_dynamic_shared = value;
            return CUDA_SUCCESS;
        }
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: f.carveout = value; return CUDA_SUCCESS;
        default: return call.error(CUDA_ERROR_INVALID_VALUE, "attribute %d cannot be set", attribute);
    }
}

CUresult param_info(const Call& call, const Function& f, size_t index, size_t* offset, size_t* bytes) {
    // Past the one parameter there is nothing, which is how callers count them.
    if (index != 0) return CUDA_ERROR_INVALID_VALUE;
    NXRT_REQUIRE(offset != nullptr, CUDA_ERROR_INVALID_VALUE, "null arguments");
    *offset = 0;
    if (bytes != nullptr) *bytes = f.kernel->param_bytes;
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*,
                                   void**, unsigned) {
    NXRT_CALL(kInit | kNoCapture);
    return load(call, code, library);
}

CUresult CUDAAPI cuLibraryUnload(CUlibrary library) {
    NXRT_CALL(kInit | kNoCapture);
    return unload(call, library);
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
    NXRT_CALL(kInit);
    std::shared_ptr<Function> function;
    const CUresult result = look_up(call, library, name, &function);
    if (result == CUDA_SUCCESS) *kernel = function->kernel_handle;
    return result;
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    NXRT_CALL(kContext);
    NXRT_FUNCTION(f, reinterpret_cast<CUfunction>(kernel));
    *function = f->function_handle;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel kernel, CUdevice) {
    NXRT_CALL(kInit);
    NXRT_FUNCTION(f, reinterpret_cast<CUfunction>(kernel));
    return get_attribute(call, *f, attribute, value);
}

CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice) {
    NXRT_CALL(kInit);
    NXRT_FUNCTION(f, reinterpret_cast<CUfunction>(kernel));
    return set_attribute(call, *f, attribute, value);
}

CUresult CUDAAPI cuKernelGetName(const char** name, CUkernel kernel) {
    NXRT_CALL(kInit);
    NXRT_FUNCTION(f, reinterpret_cast<CUfunction>(kernel));
    *name = f->name.c_str();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* bytes) {
    NXRT_CALL(kInit);
    NXRT_FUNCTION(f, reinterpret_cast<CUfunction>(kernel));
    return param_info(call, *f, index, offset, bytes);
}

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
    NXRT_CALL(kContext | kNoCapture);
    return load(call, image, reinterpret_cast<CUlibrary*>(module));
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
    NXRT_CALL(kContext | kNoCapture);
    return unload(call, reinterpret_cast<CUlibrary>(module));
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    NXRT_CALL(kContext);
    std::shared_ptr<Function> found;
    const CUresult result = look_up(call, reinterpret_cast<CUlibrary>(module), name, &found);
    if (result == CUDA_SUCCESS) *function = found->function_handle;
    return result;
}

CUresult CUDAAPI cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
    NXRT_CALL(kInit);
    NXRT_FUNCTION(f, function);
    return get_attribute(call, *f, attribute, value);
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    NXRT_CALL(kInit);
    NXRT_FUNCTION(f, function);
    return set_attribute(call, *f, attribute, value);
}

CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction function, CUfunc_cache) {
    NXRT_CALL(kInit);
    NXRT_FUNCTION(f, function);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetName(const char** name, CUfunction function) {
    NXRT_CALL(kInit);
    NXRT_FUNCTION(f, function);
    *name = f->name.c_str();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* bytes) {
    NXRT_CALL(kInit);
    NXRT_FUNCTION(f, function);
    return param_info(call, *f, index, offset, bytes);
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function, int block_size,
                                                                      size_t shared_bytes, unsigned) {
    NXRT_CALL(kInit);
    NXRT_FUNCTION(f, function);
    NXRT_REQUIRE(block_size > 0, CUDA_ERROR_INVALID_VALUE, "a block of %d threads", block_size);
    const int by_threads = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR) / ((block_size + 31) / 32 * 32);
    const size_t one = shared_bytes + size_t(attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK));
    const int by_shared = int(size_t(attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)) / one);
    *blocks = std::min({by_threads, by_shared, attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR)});
    if (block_size > int(f->kernel->max_threads) || shared_bytes > size_t(f->max_dynamic_shared)) *blocks = 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int block_size,
                                                             size_t shared_bytes) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared_bytes, 0);
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream_handle,
                                void** params, void** extra) {
    NXRT_CALL(kContext);
    const auto stream = find_stream(*call.context, stream_handle);
    NXRT_REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a stream: %p", static_cast<void*>(stream_handle));
    CUDA_KERNEL_NODE_PARAMS p{};
    p.func = function;
    p.gridDimX = grid_x;
    p.gridDimY = grid_y;
    p.gridDimZ = grid_z;
    p.blockDimX = block_x;
    p.blockDimY = block_y;
    p.blockDimZ = block_z;
    p.sharedMemBytes = shared_bytes;
    p.kernelParams = params;
    p.extra = extra;
    KernelCall kernel;
    const CUresult result = make_kernel_call(call, p, &kernel);
    if (result != CUDA_SUCCESS) return result;
    ++driver().counters.launches;
    return submit(call, *stream, std::move(kernel));
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
    {
        NXRT_CALL(kContext);
        NXRT_REQUIRE(config != nullptr, CUDA_ERROR_INVALID_VALUE, "no configuration");
        for (unsigned i = 0; i < config->numAttrs; ++i) {
            const CUlaunchAttributeID id = config->attrs[i].id;
            NXRT_REQUIRE(id == CU_LAUNCH_ATTRIBUTE_IGNORE || id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
                             id == CU_LAUNCH_ATTRIBUTE_PRIORITY || id == CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
                         CUDA_ERROR_NOT_SUPPORTED, "launch attribute %d is not emulated", id);
            if (id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) continue;
            if (const auto f = driver().functions.get(function); f != nullptr) log("overlap %s", f->name.c_str());
        }
    }
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                          config->blockDimZ, config->sharedMemBytes, config->hStream, params, extra);
}

}  // extern "C"
