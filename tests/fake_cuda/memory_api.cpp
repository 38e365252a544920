// The entry points for memory: allocation, copies, memsets, pools, pointer attributes.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "memory.h"

using namespace nxrt::fake;

namespace {

CUresult allocate_device(const Call& call, CUdeviceptr* pointer, size_t bytes) {
    NXRT_REQUIRE(pointer != nullptr && bytes != 0, CUDA_ERROR_INVALID_VALUE, "%zu bytes", bytes);
    Counters& counters = driver().counters;
    *pointer = 0;
    // No error of the caller's: what it does then is its business.
    if (bytes > driver().settings.memory || counters.live_bytes > driver().settings.memory - bytes) {
        log("out of memory: %zu bytes asked for, %llu in use", bytes, (unsigned long long)counters.live_bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *pointer = allocate(bytes, call.context);
    if (*pointer == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    ++counters.allocs;
    counters.live_bytes += bytes;
    counters.peak_bytes = std::max(counters.peak_bytes, counters.live_bytes);
    return CUDA_SUCCESS;
}

const Allocation* allocation_at(CUdeviceptr pointer) {
    const Allocation* a = find_allocation(uintptr_t{pointer}, 0);
    return a != nullptr && a->begin == pointer ? a : nullptr;
}

void free_device(const Allocation& a) {
    Counters& counters = driver().counters;
    ++counters.frees;
    counters.live_bytes -= a.bytes;
    release(a);
}

// Where the bytes of a copy lie, as the caller says.
enum class Place { kDevice, kHost, kAny };

CUresult check_place(const Call& call, uintptr_t address, size_t bytes, Place place, const char* what) {
    if (is_device_address(address)) {
        NXRT_REQUIRE(place != Place::kHost, CUDA_ERROR_INVALID_VALUE, "the %s is device memory", what);
        NXRT_REQUIRE(find_allocation(address, bytes) != nullptr, CUDA_ERROR_INVALID_VALUE,
                     "the %s, %zu bytes, is not all in one allocation", what, bytes);
        return CUDA_SUCCESS;
    }
    NXRT_REQUIRE(address != 0 || bytes == 0, CUDA_ERROR_INVALID_VALUE, "the %s is null", what);
    // Pinned memory is the device's, too.
    NXRT_REQUIRE(place != Place::kDevice || find_host_block(address, bytes) != nullptr, CUDA_ERROR_INVALID_VALUE,
                 "the %s is no device memory", what);
    return CUDA_SUCCESS;
}

struct Copied {
    uintptr_t to;
    Place to_place;
    uintptr_t from;
    Place from_place;
    size_t bytes;
};

CUresult copy(const Call& call, const Copied& c, CUstream stream_handle, bool wait) {
    const auto stream = find_stream(*call.context, stream_handle);
    NXRT_REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a stream: %p", static_cast<void*>(stream_handle));
    if (const CUresult e = check_place(call, c.to, c.bytes, c.to_place, "destination"); e != CUDA_SUCCESS) return e;
    if (const CUresult e = check_place(call, c.from, c.bytes, c.from_place, "source"); e != CUDA_SUCCESS) return e;
    if (c.bytes == 0) return CUDA_SUCCESS;
    const CUresult result = submit(call, *stream, CopyCall{c.to, c.from, c.bytes, nullptr});
    if (result != CUDA_SUCCESS || stream->capture != nullptr) return result;
    // A copy to memory that is not pinned is over when the call returns.
    const bool pageable = !is_device_address(c.to) && find_host_block(c.to) == nullptr;
    return wait || pageable ? drain(*stream) : CUDA_SUCCESS;
}

CUresult fill(const Call& call, CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count, CUstream stream_handle) {
    const auto stream = find_stream(*call.context, stream_handle);
    NXRT_REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a stream: %p", static_cast<void*>(stream_handle));
    NXRT_REQUIRE(to % element_bytes == 0, CUDA_ERROR_INVALID_VALUE, "the destination is not aligned");
    NXRT_REQUIRE(find_allocation(uintptr_t{to}, count * element_bytes) != nullptr, CUDA_ERROR_INVALID_VALUE,
                 "%zu bytes are not all in one allocation", count * element_bytes);
    if (count == 0) return CUDA_SUCCESS;
    return submit(call, *stream, FillCall{uintptr_t{to}, value, element_bytes, count});
}

uintptr_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

CUresult pointer_attribute(const Call& call, void* data, CUpointer_attribute attribute, CUdeviceptr pointer, bool lenient) {
    const Allocation* device = find_allocation(uintptr_t{pointer}, 0);
    const auto* host = find_host_block(uintptr_t{pointer}, 0);
    const bool known = device != nullptr || host != nullptr;
    NXRT_REQUIRE(known || lenient, CUDA_ERROR_INVALID_VALUE, "a pointer that the driver does not know");
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            *static_cast<CUcontext*>(data) = device != nullptr ? device->context->handle : nullptr;
            break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(data) = device != nullptr ? CU_MEMORYTYPE_DEVICE : known ? CU_MEMORYTYPE_HOST : 0;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(data) = known ? pointer : 0; break;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            *static_cast<void**>(data) = host != nullptr ? reinterpret_cast<void*>(pointer) : nullptr;
            break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID: *static_cast<unsigned long long*>(data) = device != nullptr ? device->id : 0; break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<unsigned*>(data) = 0; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *static_cast<int*>(data) = device != nullptr ? device->context->device : known ? 0 : -2;
            break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            *static_cast<CUdeviceptr*>(data) = device != nullptr ? device->begin : host != nullptr ? host->first : 0;
            break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            *static_cast<size_t*>(data) = device != nullptr ? device->bytes : host != nullptr ? host->second.bytes : 0;
            break;
        default: return call.error(CUDA_ERROR_INVALID_VALUE, "pointer attribute %d is not emulated", attribute);
    }
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuMemGetInfo(size_t* free, size_t* total) {
    NXRT_CALL(kContext);
    *total = driver().settings.memory;
    *free = *total - std::min<size_t>(*total, driver().counters.live_bytes);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* pointer, size_t bytes) {
    NXRT_CALL(kContext | kNoCapture);
    return allocate_device(call, pointer, bytes);
}

// Waits for everything, as the real one does.
CUresult CUDAAPI cuMemFree(CUdeviceptr pointer) {
    NXRT_CALL(kContext | kNoCapture);
    if (pointer == 0) return CUDA_SUCCESS;
    const CUresult result = drain_all(call.context.get());
    const Allocation* a = allocation_at(pointer);
    NXRT_REQUIRE(a != nullptr, CUDA_ERROR_INVALID_VALUE, "not the start of an allocation (freed twice?)");
    free_device(*a);
    return result;
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
    NXRT_CALL(kContext);
    const Allocation* a = find_allocation(uintptr_t{pointer});
    NXRT_REQUIRE(a != nullptr, CUDA_ERROR_NOT_FOUND, "not device memory");
    if (base != nullptr) *base = a->begin;
    if (bytes != nullptr) *bytes = a->bytes;
    return CUDA_SUCCESS;
}

// ---- pinned host memory ----

CUresult CUDAAPI cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
    NXRT_CALL(kContext | kNoCapture);
    NXRT_REQUIRE(pointer != nullptr && bytes != 0, CUDA_ERROR_INVALID_VALUE, "%zu bytes", bytes);
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memset(p, 0xff, bytes);
    host_blocks()[address(p)] = {bytes, false};
    ++driver().counters.host_allocs;
    *pointer = p;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocHost(void** pointer, size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }

CUresult CUDAAPI cuMemFreeHost(void* pointer) {
    NXRT_CALL(kContext | kNoCapture);
    const CUresult result = drain_all(call.context.get());
    const auto found = host_blocks().find(address(pointer));
    NXRT_REQUIRE(found != host_blocks().end() && !found->second.registered, CUDA_ERROR_INVALID_VALUE, "no pinned memory (freed twice?)");
    munmap(pointer, found->second.bytes);
    host_blocks().erase(found);
    ++driver().counters.host_frees;
    return result;
}

CUresult CUDAAPI cuMemHostRegister(void* pointer, size_t bytes, unsigned) {
    NXRT_CALL(kContext | kNoCapture);
    NXRT_REQUIRE(pointer != nullptr && bytes != 0, CUDA_ERROR_INVALID_VALUE, "%zu bytes", bytes);
    NXRT_REQUIRE(find_host_block(address(pointer)) == nullptr, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "registered already");
    host_blocks()[address(pointer)] = {bytes, true};
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostUnregister(void* pointer) {
    NXRT_CALL(kContext | kNoCapture);
    const CUresult result = drain_all(call.context.get());
    const auto found = host_blocks().find(address(pointer));
    NXRT_REQUIRE(found != host_blocks().end() && found->second.registered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "not registered");
    host_blocks().erase(found);
    return result;
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr* device, void* pointer, unsigned) {
    NXRT_CALL(kContext);
    NXRT_REQUIRE(find_host_block(address(pointer)) != nullptr, CUDA_ERROR_INVALID_VALUE, "no pinned memory");
    *device = address(pointer);
    return CUDA_SUCCESS;
}

// ---- copies ----

CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    NXRT_CALL(kContext | kNoCapture);
    return copy(call, {uintptr_t{to}, Place::kAny, uintptr_t{from}, Place::kAny, bytes}, nullptr, true);
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
    NXRT_CALL(kContext | kNoCapture);
    return copy(call, {uintptr_t{to}, Place::kDevice, address(from), Place::kHost, bytes}, nullptr, true);
}

CUresult CUDAAPI cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
    NXRT_CALL(kContext | kNoCapture);
    return copy(call, {address(to), Place::kHost, uintptr_t{from}, Place::kDevice, bytes}, nullptr, true);
}

CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    NXRT_CALL(kContext | kNoCapture);
    return copy(call, {uintptr_t{to}, Place::kDevice, uintptr_t{from}, Place::kDevice, bytes}, nullptr, false);
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    NXRT_CALL(kContext);
    return copy(call, {uintptr_t{to}, Place::kAny, uintptr_t{from}, Place::kAny, bytes}, stream, false);
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    NXRT_CALL(kContext);
    return copy(call, {uintptr_t{to}, Place::kDevice, address(from), Place::kHost, bytes}, stream, false);
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    NXRT_CALL(kContext);
    return copy(call, {address(to), Place::kHost, uintptr_t{from}, Place::kDevice, bytes}, stream, false);
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    NXRT_CALL(kContext);
    return copy(call, {uintptr_t{to}, Place::kDevice, uintptr_t{from}, Place::kDevice, bytes}, stream, false);
}

// ---- memsets: none of them waits ----

CUresult CUDAAPI cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
    NXRT_CALL(kContext | kNoCapture);
    return fill(call, to, value, 1, count, nullptr);
}
CUresult CUDAAPI cuMemsetD16(CUdeviceptr to, unsigned short value, size_t count) {
    NXRT_CALL(kContext | kNoCapture);
    return fill(call, to, value, 2, count, nullptr);
}
CUresult CUDAAPI cuMemsetD32(CUdeviceptr to, unsigned value, size_t count) {
    NXRT_CALL(kContext | kNoCapture);
    return fill(call, to, value, 4, count, nullptr);
}
CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    NXRT_CALL(kContext);
    return fill(call, to, value, 1, count, stream);
}
CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
    NXRT_CALL(kContext);
    return fill(call, to, value, 2, count, stream);
}
CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    NXRT_CALL(kContext);
    return fill(call, to, value, 4, count, stream);
}

// ---- pools ----

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
    NXRT_CALL(kInit);
    auto& known = driver().default_pools[device];
    if (known == nullptr) known = driver().pools.add(std::make_shared<Device>(device));
    *pool = known;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) { return cuDeviceGetDefaultMemPool(pool, device); }

CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* properties) {
    NXRT_CALL(kInit);
    *pool = driver().pools.add(std::make_shared<Device>(properties->location.id));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool pool) {
    NXRT_CALL(kInit);
    NXRT_REQUIRE(driver().pools.remove(pool), CUDA_ERROR_INVALID_HANDLE, "not a pool");
    return CUDA_SUCCESS;
}

#define NXRT_POOL(pool) NXRT_REQUIRE(driver().pools.get(pool) != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a pool")

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t) {
    NXRT_CALL(kInit);
    NXRT_POOL(pool);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute, void*) {
    NXRT_CALL(kInit);
    NXRT_POOL(pool);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
    NXRT_CALL(kInit);
    NXRT_POOL(pool);
    switch (attribute) {
        case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *static_cast<int*>(value) = 1; break;
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *static_cast<cuuint64_t*>(value) = 0; break;
        default: *static_cast<cuuint64_t*>(value) = driver().counters.live_bytes;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr* pointer, size_t bytes, CUstream stream) {
    NXRT_CALL(kContext | kNoCapture);
    NXRT_REQUIRE(find_stream(*call.context, stream) != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a stream");
    return allocate_device(call, pointer, bytes);
}

CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr* pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    NXRT_CALL(kContext | kNoCapture);
    NXRT_POOL(pool);
    NXRT_REQUIRE(find_stream(*call.context, stream) != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a stream");
    return allocate_device(call, pointer, bytes);
}

// The memory goes in the stream's order.
CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr pointer, CUstream stream_handle) {
    NXRT_CALL(kContext | kNoCapture);
    const auto stream = find_stream(*call.context, stream_handle);
    NXRT_REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a stream");
    NXRT_REQUIRE(allocation_at(pointer) != nullptr, CUDA_ERROR_INVALID_VALUE, "not the start of an allocation (freed twice?)");
    const auto run = [pointer] {
        const Allocation* a = allocation_at(pointer);
        if (a == nullptr) {
            log_error("cuMemFreeAsync: freed twice");
            return CUDA_ERROR_INVALID_VALUE;
        }
        free_device(*a);
        return CUDA_SUCCESS;
    };
    return enqueue(*stream, {run, {}});
}

// ---- pointers ----

CUresult CUDAAPI cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    NXRT_CALL(kContext);
    return pointer_attribute(call, data, attribute, pointer, false);
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr pointer) {
    NXRT_CALL(kContext);
    for (unsigned i = 0; i < count; ++i) {
        const CUresult result = pointer_attribute(call, data[i], attributes[i], pointer, true);
        if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
}

}  // extern "C"
