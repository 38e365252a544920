// What tests call besides the driver's own entry points.
#include <cstring>

#include "memory.h"

using namespace nxrt::fake;

namespace {

using Guard = std::lock_guard<std::recursive_mutex>;

struct CounterName {
    const char* name;
    uint64_t Counters::*member;
};

constexpr CounterName kCounters[] = {
    {"allocs", &Counters::allocs},
    {"frees", &Counters::frees},
    {"live_bytes", &Counters::live_bytes},
    {"peak_bytes", &Counters::peak_bytes},
    {"host_allocs", &Counters::host_allocs},
    {"host_frees", &Counters::host_frees},
    {"launches", &Counters::launches},
    {"kernels", &Counters::kernels},
    {"graph_launches", &Counters::graph_launches},
    {"node_updates", &Counters::node_updates},
    {"instantiations", &Counters::instantiations},
    {"graph_updates", &Counters::graph_updates},
    {"captures", &Counters::captures},
    {"copies", &Counters::copies},
    {"fills", &Counters::fills},
    {"synchronizations", &Counters::synchronizations},
    {"library_loads", &Counters::library_loads},
    {"errors", &Counters::errors},
};

}  // namespace

extern "C" {

// Begins anew with the log and the counters (but for the bytes in use), settings, ordered failures and sticky errors.
// What the host holds - memory, streams, graphs, libraries - stays.
void fake_cuda_reset() {
    const Guard guard(driver().lock);
    drain_all();
    Driver& d = driver();
    d.settings = {};
    d.injected.clear();
    d.log.clear();
    const uint64_t live = d.counters.live_bytes;
    d.counters = {};
    d.counters.live_bytes = d.counters.peak_bytes = live;
    for (const auto& entry : d.contexts) entry.second->sticky = CUDA_SUCCESS;
}

// Valid until the thread's next call.
const char* fake_cuda_log() {
    static thread_local std::string copy;
    const Guard guard(driver().lock);
    copy = driver().log;
    return copy.c_str();
}

void fake_cuda_clear_log() {
    const Guard guard(driver().lock);
    driver().log.clear();
}

// UINT64_MAX for a name that is none.
uint64_t fake_cuda_counter(const char* name) {
    const Guard guard(driver().lock);
    for (const CounterName& counter : kCounters) {
        if (std::strcmp(counter.name, name) == 0) return driver().counters.*counter.member;
    }
    return UINT64_MAX;
}

// Runs all queued work, then gives 1 if nothing was written outside of any live allocation.
int fake_cuda_check_guards() {
    const Guard guard(driver().lock);
    drain_all();
    return check_guards();
}

void fake_cuda_set_memory(uint64_t bytes) {
    const Guard guard(driver().lock);
    driver().settings.memory = bytes;
}

void fake_cuda_set_attribute(int attribute, int value) {
    const Guard guard(driver().lock);
    driver().settings.attributes[attribute] = value;
}

void fake_cuda_set_shared_limit(int bytes) {
    fake_cuda_set_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, bytes);
    fake_cuda_set_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, bytes + 1024);
}

void fake_cuda_set_capability(int major, int minor) {
    fake_cuda_set_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, major);
    fake_cuda_set_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, minor);
}

void fake_cuda_set_devices(int count) {
    const Guard guard(driver().lock);
    driver().settings.devices = count;
    // cuInit tells the difference.
    if (count == 0) driver().initialized = false;
}

void fake_cuda_set_driver_version(int version) {
    const Guard guard(driver().lock);
    driver().settings.driver_version = version;
}

// The call of this name (with or without its _v2) fails, after `after` calls that do not.
void fake_cuda_fail_after(const char* name, unsigned after, int code) {
    const Guard guard(driver().lock);
    driver().injected.push_back({name, after, static_cast<CUresult>(code)});
}

void fake_cuda_fail_next(const char* name, int code) { fake_cuda_fail_after(name, 0, code); }

// 1: work runs at the call that submits it. 0: it waits until something needs it.
void fake_cuda_eager(int on) {
    const Guard guard(driver().lock);
    if (on) drain_all();
    driver().settings.eager = on != 0;
}

// 1: blocks and threads run from the last to the first, which changes what a kernel does that lacks a barrier.
void fake_cuda_descending(int on) {
    const Guard guard(driver().lock);
    driver().settings.descending = on != 0;
}

// 0: the log holds only what is wrong.
void fake_cuda_log_work(int on) {
    const Guard guard(driver().lock);
    driver().settings.log_work = on != 0;
}

// 0: parameters that look like stale or host pointers are not looked at.
void fake_cuda_check_params(int on) {
    const Guard guard(driver().lock);
    driver().settings.check_params = on != 0;
}

}  // extern "C"
