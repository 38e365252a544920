// The threads of one block, or of a cluster's blocks, as fibers of one OS thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "emulate.h"

namespace nxrt::emulate {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxWarps = kMaxThreads / kWarp;
constexpr unsigned kMaxShared = 227 * 1024;
constexpr unsigned kMaxCluster = 8;

struct Launch {
    const Kernel* kernel;
    std::string name;
    const void* params;
    dim3 grid;
    dim3 block;
    unsigned shared_bytes;
};

// A cp.async that has not happened yet.
struct Copy {
    void* to;
    const void* from;
    unsigned bytes;
    bool valid;
    unsigned group;
};

class Processor;

struct Fiber : Thread {
    Processor* processor = nullptr;
    // Where to go on, once the thread has left the OS thread in a collective operation.
    void* stack_pointer = nullptr;
    unsigned stack = 0;
    bool started = false;
    unsigned group = 0;
    unsigned rank = 0;  // of its block in the cluster
    // Barriers of the cluster that it has arrived at.
    unsigned arrivals = 0;
    std::vector<Copy> copies;
};

struct Warp {
    // A bit a lane: those that exist, that can run, and that wait in the warp's collective operation.
    uint32_t present = 0;
    uint32_t ready = 0;
    uint32_t arrived = 0;
    // Those that wait for blocks of the cluster.
    uint32_t waiting = 0;
    Collective kind = Collective::kSync;
    // A lane reads one half while a faster lane already fills the other.
    unsigned half = 0;
    Slot slots[2][kWarp];
};

// What a block of the cluster has for itself.
struct Room {
    Block block{};
    unsigned at_barrier = 0;
    unsigned char* mapping = nullptr;
    unsigned char* shared = nullptr;
};

// Runs clusters (of one block, mostly) one after another; there is one for each OS thread that runs kernels.
class Processor {
public:
    Processor();
    ~Processor();
    Processor(const Processor&) = delete;
    Processor& operator=(const Processor&) = delete;

    // To be called before the blocks of a launch. `descending` runs threads from the last to the first.
    void prepare(const Launch& launch, bool descending);
    // Runs the cluster whose first block is `index`. False when it failed: see message().
    bool run_cluster(uint3 index);
    const std::string& message() const { return message_; }
    // Ends what runs; called by a fiber, or in a signal handler with the context that goes back to run_cluster.
    [[noreturn]] void abandon(const char* message);
    void* abandoned_at(const char* message);

    Slot* collective(Fiber& fiber, Collective kind, const void* value, unsigned bytes, Finish finish, unsigned argument);
    void barrier(Fiber& fiber);
    void cluster_arrive(Fiber& fiber);
    void cluster_wait(Fiber& fiber);
    void send(Fiber& fiber, unsigned rank, void* to, const void* value, unsigned bytes, Inbox* box);
    void wait_for(Fiber& fiber, const Inbox* box);
    void* dynamic_shared(const Fiber& fiber) const { return rooms_[fiber.rank].shared; }
    // Whether the address is in a guard page of a fiber's stack.
    bool is_stack_guard(uintptr_t address) const;

    // The processor whose block runs on this OS thread, or null.
    static __thread Processor* running __attribute__((visibility("hidden")));

private:
    Fiber* next_ready(unsigned current_warp);
    void start_or_resume(Fiber& next, void** leave);
    void leave(Fiber& fiber);
    void run_fibers();
    static void fiber_main(Processor* processor);
    void wake(unsigned first_warp, unsigned warps, uint32_t Warp::*lanes);
    void wake_waiting();
    void wait(Fiber& fiber);
    unsigned char* in_block(const Fiber& fiber, unsigned rank, void* shared);
    bool check_shared_guards(const Room& room);

    const Launch* launch_ = nullptr;
    // Where this OS thread has `self`.
    Thread** self_ = nullptr;
    bool descending_ = false;
    Room rooms_[kMaxCluster];
    unsigned cluster_ = 1;
    // Of a block, and of all blocks.
    unsigned threads_ = 0;
    unsigned all_threads_ = 0;
    unsigned finished_ = 0;
    // Threads at the cluster's barrier, and barriers that all have arrived at.
    unsigned at_cluster_ = 0;
    unsigned cluster_barriers_ = 0;
    // A bit a warp: those with lanes that can run.
    uint32_t ready_warps_ = 0;
    void* main_stack_pointer_ = nullptr;
    std::string message_;
    std::unique_ptr<Fiber[]> fibers_;
    std::unique_ptr<Warp[]> warps_;
    unsigned char* stacks_ = nullptr;
    unsigned stacks_used_ = 0;
    std::vector<unsigned> free_stacks_;
};

// The thread that calls.
inline Fiber& current() { return *static_cast<Fiber*>(self); }

}  // namespace nxrt::emulate
