#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace nxrt::fake {

namespace {

constexpr size_t kPage = 4096;
// cuMemAlloc promises no more.
constexpr size_t kAlignment = 256;
constexpr unsigned char kGuardByte = 0xA7;

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// What the host knows as device memory is `bytes` of addresses that nobody can touch. The memory itself lies as many bytes
// behind: only the driver knows it, and the kernels, whose parameters it moves there.
struct Range {
    uintptr_t begin = 0;
    size_t bytes = 0;
    uintptr_t next = 0;
};

const Range& range();

Range reserve() {
    // Addresses are plentiful: with none used twice, a stale pointer hits nothing.
    for (size_t bytes = size_t{1} << 41; bytes >= size_t{1} << 32; bytes /= 2) {
        void* p = mmap(nullptr, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p != MAP_FAILED) return {reinterpret_cast<uintptr_t>(p), bytes, reinterpret_cast<uintptr_t>(p) + kPage};
    }
    std::perror("fake CUDA: mmap of device addresses");
    std::abort();
}

Range& mutable_range() {
    static Range range = reserve();
    return range;
}
const Range& range() { return mutable_range(); }

std::map<uintptr_t, Allocation> live;

// An allocation ends on a page's end, but for its alignment; a page on either side of it is never accessible.
struct Pages {
    uintptr_t begin;
    uintptr_t end;
};
Pages pages_of(const Allocation& a) {
    return {a.begin / kPage * kPage, round_up(a.begin + a.bytes, kPage)};
}

bool guards_hold(const Allocation& a) {
    const Pages pages = pages_of(a);
    const auto intact = [&](uintptr_t from, uintptr_t to) {
        for (uintptr_t p = from; p < to; ++p) {
            if (*memory_at(p) == kGuardByte) continue;
            log_error("a write outside of allocation %llu (%zu bytes), at its byte %lld", (unsigned long long)a.id, a.bytes,
                      (long long)(p - a.begin));
            return false;
        }
        return true;
    };
    return intact(pages.begin, a.begin) && intact(a.begin + a.bytes, pages.end);
}

}  // namespace

uintptr_t allocate(size_t bytes, std::shared_ptr<Context> context) {
    static uint64_t next_id = 0;
    Range& r = mutable_range();
    const size_t aligned = round_up(bytes, kAlignment);
    const size_t pages = round_up(aligned, kPage);
    if (r.next + pages + kPage > r.begin + r.bytes) return 0;
    Allocation a;
    a.begin = r.next + pages - aligned;
    a.bytes = bytes;
    a.id = ++next_id;
    a.context = std::move(context);
    r.next += pages + kPage;
    const Pages p = pages_of(a);
    mprotect(memory_at(p.begin), p.end - p.begin, PROT_READ | PROT_WRITE);
    std::memset(memory_at(p.begin), kGuardByte, a.begin - p.begin);
    std::memset(memory_at(a.begin), 0xff, bytes);
    std::memset(memory_at(a.begin + bytes), kGuardByte, p.end - a.begin - bytes);
    live[a.begin] = a;
    return a.begin;
}

bool release(const Allocation& allocation) {
    const Allocation a = allocation;
    const bool intact = guards_hold(a);
    const Pages pages = pages_of(a);
    // A new mapping gives the memory back, and keeps the addresses.
    mmap(memory_at(pages.begin), pages.end - pages.begin, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    live.erase(a.begin);
    return intact;
}

void release_of(const Context& context) {
    size_t bytes = 0;
    for (auto it = live.begin(); it != live.end();) {
        const Allocation& a = (it++)->second;
        if (a.context.get() != &context) continue;
        bytes += a.bytes;
        driver().counters.live_bytes -= a.bytes;
        release(a);
    }
    if (bytes != 0) log("device %d: %zu bytes were never freed", context.device, bytes);
}

bool is_device_address(uintptr_t address) { return address - range().begin < range().bytes; }

unsigned char* memory_at(uintptr_t address) {
    return reinterpret_cast<unsigned char*>(is_device_address(address) ? address + range().bytes : address);
}

const Allocation* find_allocation(uintptr_t address, size_t bytes) {
    auto found = live.upper_bound(address);
    if (found == live.begin()) return nullptr;
    const Allocation& a = (--found)->second;
    return address - a.begin <= a.bytes && bytes <= a.bytes - (address - a.begin) ? &a : nullptr;
}

void describe_address(uintptr_t address, char* text, size_t size) {
    if (is_device_address(address - range().bytes)) address -= range().bytes;
    if (!is_device_address(address)) {
        std::snprintf(text, size, "%#llx, which is no device memory", (unsigned long long)address);
        return;
    }
    auto above = live.upper_bound(address);
    if (above == live.begin()) {
        std::snprintf(text, size, "%#llx, where nothing is allocated", (unsigned long long)address);
        return;
    }
    const Allocation& a = (--above)->second;
    std::snprintf(text, size, "%#llx, byte %llu of allocation %llu of %zu bytes", (unsigned long long)address,
                  (unsigned long long)(address - a.begin), (unsigned long long)a.id, a.bytes);
}

bool check_guards() {
    bool intact = true;
    for (const auto& entry : live) intact &= guards_hold(entry.second);
    return intact;
}

std::map<uintptr_t, HostBlock>& host_blocks() {
    static std::map<uintptr_t, HostBlock> blocks;
    return blocks;
}

const std::pair<const uintptr_t, HostBlock>* find_host_block(uintptr_t address, size_t bytes) {
    auto found = host_blocks().upper_bound(address);
    if (found == host_blocks().begin()) return nullptr;
    --found;
    const uintptr_t offset = address - found->first;
    return offset <= found->second.bytes && bytes <= found->second.bytes - offset ? &*found : nullptr;
}

}  // namespace nxrt::fake
