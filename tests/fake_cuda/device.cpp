// Initialisation, devices, contexts, errors, and what has no better place.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "grid.h"
#include "memory.h"

namespace nxrt::fake {

namespace {

std::vector<std::shared_ptr<Context>>& context_stack() {
    static thread_local std::vector<std::shared_ptr<Context>> stack;
    return stack;
}

std::shared_ptr<Context> find_context(CUcontext handle) {
    for (const auto& entry : driver().contexts) {
        if (entry.second->handle == handle) return entry.second;
    }
    return nullptr;
}

std::shared_ptr<Context> primary_context(Device device) {
    auto& context = driver().contexts[device];
    if (context == nullptr) {
        context = std::make_shared<Context>();
        context->device = device;
        context->handle = reinterpret_cast<CUcontext>(next_handle());
        context->legacy = new_stream(context, 0, 0);
    }
    return context;
}

// What the last release or a reset takes away.
void destroy(Context& context) {
    drain_all(&context);
    release_of(context);
    context.sticky = CUDA_SUCCESS;
}

struct ErrorName {
    CUresult code;
    const char* name;
    const char* text;
};

#define NXRT_ERROR(code, text) {code, #code, text}
constexpr ErrorName kErrors[] = {
    NXRT_ERROR(CUDA_SUCCESS, "no error"),
    NXRT_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    NXRT_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    NXRT_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    NXRT_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    NXRT_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    NXRT_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    NXRT_ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    NXRT_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    NXRT_ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    NXRT_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    NXRT_ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    NXRT_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    NXRT_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    NXRT_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    NXRT_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    NXRT_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    NXRT_ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    NXRT_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    NXRT_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    NXRT_ERROR(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "system has unsupported display driver / cuda driver combination"),
    NXRT_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    NXRT_ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    NXRT_ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    NXRT_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    NXRT_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    NXRT_ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    NXRT_ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing blocking stream"),
    NXRT_ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a thread-local capture sequence from another thread"),
    NXRT_ERROR(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "the graph update was not performed because it violated constraints"),
    NXRT_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

CUresult find_error(CUresult code, const char** text, const char* ErrorName::*member) {
    for (const ErrorName& error : kErrors) {
        if (error.code != code) continue;
        *text = error.*member;
        return CUDA_SUCCESS;
    }
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

std::shared_ptr<Context> current_context() { return context_stack().empty() ? nullptr : context_stack().back(); }

}  // namespace nxrt::fake

using namespace nxrt::fake;

#define NXRT_DEVICE_ORDINAL(device) \
    NXRT_REQUIRE((device) >= 0 && (device) < driver().settings.devices, CUDA_ERROR_INVALID_DEVICE, "no device %d", (device))

extern "C" {

CUresult CUDAAPI cuInit(unsigned flags) {
    NXRT_CALL(kNothing);
    NXRT_REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE, "flags");
    if (driver().settings.devices == 0) return CUDA_ERROR_NO_DEVICE;
    nxrt::emulate::install_signal_handlers(describe_address, is_device_address);
    driver().initialized = true;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
    NXRT_CALL(kNothing);
    *version = driver().settings.driver_version;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) { return find_error(error, text, &ErrorName::text); }
CUresult CUDAAPI cuGetErrorName(CUresult error, const char** name) { return find_error(error, name, &ErrorName::name); }

// ---- devices ----

CUresult CUDAAPI cuDeviceGetCount(int* count) {
    NXRT_CALL(kInit);
    *count = driver().settings.devices;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char* name, int length, CUdevice device) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(device);
    std::snprintf(name, size_t(length), "Emulated CUDA device %d", device);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(device);
    std::memset(uuid, 0x4e, sizeof *uuid);
    uuid->bytes[15] = static_cast<char>(device);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(device);
    std::snprintf(id, size_t(length), "0000:%02x:00.0", device + 1);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceTotalMem(size_t* bytes, CUdevice device) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(device);
    *bytes = driver().settings.memory;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(device);
    if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
        *value = device + 1;
    } else {
        *value = nxrt::fake::attribute(attribute);
    }
    return CUDA_SUCCESS;
}

// ---- contexts ----

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* handle, CUdevice device) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(device);
    const auto context = primary_context(device);
    ++context->retained;
    *handle = context->handle;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(device);
    const auto context = primary_context(device);
    NXRT_REQUIRE(context->retained > 0, CUDA_ERROR_INVALID_CONTEXT, "the primary context is not retained");
    if (--context->retained == 0) destroy(*context);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice device) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(device);
    destroy(*primary_context(device));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(device);
    *flags = primary_context(device)->flags;
    *active = primary_context(device)->retained > 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
    NXRT_CALL(kInit);
    NXRT_DEVICE_ORDINAL(device);
    primary_context(device)->flags = flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext handle) {
    NXRT_CALL(kInit);
    auto& stack = context_stack();
    if (handle == nullptr) {
        if (!stack.empty()) stack.pop_back();
        return CUDA_SUCCESS;
    }
    const auto context = find_context(handle);
    NXRT_REQUIRE(context != nullptr, CUDA_ERROR_INVALID_CONTEXT, "not a context");
    if (stack.empty()) {
        stack.push_back(context);
    } else {
        stack.back() = context;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* handle) {
    NXRT_CALL(kInit);
    *handle = call.context != nullptr ? call.context->handle : nullptr;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext handle) {
    NXRT_CALL(kInit);
    const auto context = find_context(handle);
    NXRT_REQUIRE(context != nullptr, CUDA_ERROR_INVALID_CONTEXT, "not a context");
    context_stack().push_back(context);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* handle) {
    NXRT_CALL(kInit);
    NXRT_REQUIRE(call.context != nullptr, CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread");
    if (handle != nullptr) *handle = call.context->handle;
    context_stack().pop_back();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
    NXRT_CALL(kContext);
    *device = call.context->device;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetFlags(unsigned* flags) {
    NXRT_CALL(kContext);
    *flags = call.context->flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSynchronize() {
    NXRT_CALL(kContext | kNoCapture);
    ++driver().counters.synchronizations;
    return drain_all(call.context.get());
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    NXRT_CALL(kContext);
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetLimit(size_t* value, CUlimit) {
    NXRT_CALL(kContext);
    *value = 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetLimit(CUlimit, size_t) {
    NXRT_CALL(kContext);
    return CUDA_SUCCESS;
}

// ---- entry points by name ----

CUresult CUDAAPI cuGetProcAddress(const char* symbol, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
    Dl_info info;
    void* library = dladdr(reinterpret_cast<void*>(&cuInit), &info) == 0 ? nullptr : dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = nullptr;
    for (const char* suffix : {"_v3", "_v2", ""}) {
        if (*function == nullptr && library != nullptr) *function = dlsym(library, (std::string(symbol) + suffix).c_str());
    }
    if (library != nullptr) dlclose(library);
    const bool found = *function != nullptr;
    if (status != nullptr) *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
