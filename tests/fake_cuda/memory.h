// Device memory: a range of addresses of which the host may touch nothing, and kernels what is allocated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver.h"

namespace nxrt::fake {

struct Allocation {
    uintptr_t begin = 0;
    size_t bytes = 0;
    uint64_t id = 0;
    std::shared_ptr<Context> context;
};

struct HostBlock {
    size_t bytes = 0;
    // Registered memory belongs to the host.
    bool registered = false;
};

// 0 when the address range is used up.
uintptr_t allocate(size_t bytes, std::shared_ptr<Context> context);
// False when the guards around it have been written to, which is logged. The range is not used again for long.
bool release(const Allocation& allocation);
// Frees what is left of a context's memory; how much there was is logged.
void release_of(const Context& context);

bool is_device_address(uintptr_t address);
// Where the driver and the kernels find the memory of a device address; other addresses are themselves.
unsigned char* memory_at(uintptr_t address);
// The live allocation that holds all these bytes, or null.
const Allocation* find_allocation(uintptr_t address, size_t bytes = 1);
// For a message.
void describe_address(uintptr_t address, char* text, size_t size);

std::map<uintptr_t, HostBlock>& host_blocks();
const std::pair<const uintptr_t, HostBlock>* find_host_block(uintptr_t address, size_t bytes = 1);

// Checks the guards of everything that lives.
bool check_guards();

}  // namespace nxrt::fake
