#include "driver.h"

#include <cstdio>
#include <cstring>

namespace nxrt::fake {

Driver& driver() {
    // Never destroyed: other libraries' destructors still call in.
    static Driver& driver = *new Driver;
    return driver;
}

uintptr_t next_handle() {
    static uintptr_t handle = 0x10000;
    return handle += 16;
}

namespace {

// Enough for any test; what a long run logs after that is of no use.
constexpr size_t kMaxLog = size_t{8} << 20;

void append(const char* prefix, const char* format, va_list arguments) {
    std::string& log = driver().log;
    char line[1024];
    std::vsnprintf(line, sizeof line, format, arguments);
    log += prefix;
    log += line;
    log += '\n';
}

}  // namespace

void log(const char* format, ...) {
    if (!driver().settings.log_work || driver().log.size() > kMaxLog) return;
    va_list arguments;
    va_start(arguments, format);
    append("", format, arguments);
    va_end(arguments);
}

void log_error(const char* format, ...) {
    ++driver().counters.errors;
    va_list arguments;
    va_start(arguments, format);
    append("error: ", format, arguments);
    va_end(arguments);
}

namespace {

// The failure that a test has ordered for this call, if it is due.
CUresult injected_failure(const std::string& name) {
    auto& injected = driver().injected;
    for (auto it = injected.begin(); it != injected.end(); ++it) {
        const bool same = name == it->call || (name.rfind(it->call + "_v", 0) == 0 && name.size() == it->call.size() + 3);
        if (!same) continue;
        if (it->after-- > 0) continue;
        const CUresult code = it->code;
        injected.erase(it);
        log("injected failure %d in %s", code, name.c_str());
        return code;
    }
    return CUDA_SUCCESS;
}

// Whether some capture under way forbids calls like this on this thread; it is then invalid.
bool forbidden_by_capture() {
    bool forbidden = false;
    for (const auto& capture : driver().captures) {
        if (capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
        if (capture->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && capture->thread != std::this_thread::get_id()) continue;
        capture->invalidated = true;
        forbidden = true;
    }
    return forbidden;
}

}  // namespace

Call::Call(const char* name, unsigned need) : guard_(driver().lock), name_(name) {
    result = injected_failure(name);
    if (result != CUDA_SUCCESS) return;
    if ((need & kInit) != 0 && !driver().initialized) {
        result = error(CUDA_ERROR_NOT_INITIALIZED, "before cuInit");
        return;
    }
    context = current_context();
    if ((need & kContext) == kContext) {
        if (context == nullptr) {
            result = error(CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread");
            return;
        }
        if (context->retained == 0) {
            result = error(CUDA_ERROR_CONTEXT_IS_DESTROYED, "the current context has been released");
            return;
        }
        result = context->sticky;
        if (result != CUDA_SUCCESS) return;
    }
    if ((need & kNoCapture) != 0 && forbidden_by_capture()) {
        result = error(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "not allowed while a stream is being captured");
    }
}

CUresult Call::error(CUresult code, const char* format, ...) const {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    log_error("%s: %d: %s", name_, code, text);
    return code;
}

int attribute(int attribute) {
    const auto& overridden = driver().settings.attributes;
    if (const auto found = overridden.find(attribute); found != overridden.end()) return found->second;
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 0x7fffffff;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 * 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 227 * 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 228 * 1024;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 8;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
        case CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE: return 32 << 20;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: return 1;
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: return 1;
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: return 1;
        case CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID: return 0x233510de;
        // The emulator runs blocks one after another.
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: return 0;
        default: return 0;
    }
}

}  // namespace nxrt::fake
