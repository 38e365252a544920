// Runs a whole launch.
#pragma once

#include <string>

#include "fibers.h"

namespace nxrt::emulate {

enum class Failure { kNone, kKernel, kIllegalAddress };

struct Outcome {
    Failure failure = Failure::kNone;
    std::string message;
};

// Tells what lies at an address that a kernel or the host may not touch; called in a signal handler.
using Describe = void (*)(uintptr_t address, char* text, size_t size);

// Signals of kernels become failures of the launch; others are passed on, after a message if they concern device memory.
void install_signal_handlers(Describe describe, bool (*is_device_address)(uintptr_t));

// One launch at a time. `descending` runs the blocks and threads from the last to the first.
Outcome run_grid(const Launch& launch, bool descending);

}  // namespace nxrt::emulate
