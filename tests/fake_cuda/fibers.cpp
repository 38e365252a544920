#include "fibers.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

// Saves the callee-saved registers and the stack pointer, and goes on where another stack was left (or begins).
extern "C" void nxrt_fake_switch(void** save, void* load);
asm(R"(
    .text
    .type nxrt_fake_switch, @function
    .hidden nxrt_fake_switch
nxrt_fake_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size nxrt_fake_switch, . - nxrt_fake_switch

    .type nxrt_fake_fiber_entry, @function
    .hidden nxrt_fake_fiber_entry
nxrt_fake_fiber_entry:
    movq %r12, %rdi
    callq *%r13
    ud2
    .size nxrt_fake_fiber_entry, . - nxrt_fake_fiber_entry
)");
extern "C" void nxrt_fake_fiber_entry();

namespace nxrt::emulate {

__thread Thread* self = nullptr;
__thread Processor* Processor::running = nullptr;

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kStackStride = kStackBytes + kPage;
// Lies before and behind a block's dynamic shared memory.
constexpr size_t kSharedGuard = 128;
constexpr unsigned char kGuardByte = 0xA7;

unsigned char* map(size_t bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        std::perror("fake CUDA: mmap");
        std::abort();
    }
    return static_cast<unsigned char*>(p);
}

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

constexpr size_t kSharedMapping = round_up(kMaxShared + 2 * kSharedGuard, kPage);

}  // namespace

Processor::Processor()
    : fibers_(new Fiber[kMaxThreads]), warps_(new Warp[kMaxWarps]), stacks_(map(kMaxThreads * kStackStride, PROT_NONE)) {
    // Each stack's lowest page stays out of reach.
    for (unsigned i = 0; i < kMaxThreads; ++i) {
        mprotect(stacks_ + i * kStackStride + kPage, kStackBytes, PROT_READ | PROT_WRITE);
    }
    shared_mapping_ = map(kSharedMapping + kPage, PROT_READ | PROT_WRITE);
    mprotect(shared_mapping_ + kSharedMapping, kPage, PROT_NONE);
}

Processor::~Processor() {
    munmap(stacks_, kMaxThreads * kStackStride);
    munmap(shared_mapping_, kSharedMapping + kPage);
}

bool Processor::is_stack_guard(uintptr_t address) const {
    const uintptr_t offset = address - reinterpret_cast<uintptr_t>(stacks_);
    return offset < kMaxThreads * kStackStride && offset % kStackStride < kPage;
}

void Processor::prepare(const Launch& launch, bool descending) {
    launch_ = &launch;
    descending_ = descending;
    block_.size = launch.block;
    block_.grid = launch.grid;
    threads_ = launch.block.x * launch.block.y * launch.block.z;
    for (unsigned i = 0; i < threads_; ++i) {
        Fiber& fiber = fibers_[i];
        fiber.index = {i % launch.block.x, i / launch.block.x % launch.block.y, i / (launch.block.x * launch.block.y)};
        fiber.lane = i % kWarp;
        fiber.warp = i / kWarp;
        fiber.block = &block_;
        fiber.processor = this;
    }
    shared_ = shared_mapping_ + kSharedMapping - kSharedGuard - round_up(launch.shared_bytes, 128);
    std::memset(shared_ - kSharedGuard, kGuardByte, kSharedGuard);
    std::memset(shared_ + launch.shared_bytes, kGuardByte, shared_mapping_ + kSharedMapping - shared_ - launch.shared_bytes);
}

bool Processor::run_block(uint3 index) {
    block_.index = index;
    finished_ = 0;
    at_barrier_ = 0;
    ready_warps_ = 0;
    stacks_used_ = 0;
    free_stacks_.clear();
    message_.clear();
    for (unsigned w = 0; w * kWarp < threads_; ++w) {
        const unsigned lanes = threads_ - w * kWarp;
        Warp& warp = warps_[w];
        warp.present = lanes >= kWarp ? 0xffffffffu : (1u << lanes) - 1;
        warp.ready = warp.present;
        warp.arrived = 0;
        ready_warps_ |= 1u << w;
    }
    for (unsigned i = 0; i < threads_; ++i) {
        fibers_[i].started = false;
        fibers_[i].group = 0;
        fibers_[i].copies.clear();
    }
    std::memset(shared_, 0xff, launch_->shared_bytes);

    running = this;
    self_ = &self;
    start_or_resume(*next_ready(descending_ ? kMaxWarps - 1 : 0), &main_stack_pointer_);
    running = nullptr;
    self = nullptr;
    return message_.empty() && check_shared_guards();
}

bool Processor::check_shared_guards() {
    const unsigned char* end = shared_mapping_ + kSharedMapping;
    for (const unsigned char* p = shared_ - kSharedGuard; p < end; ++p) {
        if (p == shared_) p += launch_->shared_bytes;
        if (p < end && *p != kGuardByte) {
            message_ = "a write outside of the dynamic shared memory, at byte " + std::to_string(p - shared_) + " of " +
                       std::to_string(launch_->shared_bytes);
            return false;
        }
    }
    return true;
}

// Stays in the current warp while it has a lane to run.
Fiber* Processor::next_ready(unsigned current_warp) {
    if (ready_warps_ == 0) return nullptr;
    unsigned warp = current_warp;
    if ((ready_warps_ >> warp & 1) == 0) warp = descending_ ? 31 - __builtin_clz(ready_warps_) : __builtin_ctz(ready_warps_);
    Warp& w = warps_[warp];
    const unsigned lane = descending_ ? 31 - __builtin_clz(w.ready) : __builtin_ctz(w.ready);
    w.ready &= ~(1u << lane);
    if (w.ready == 0) ready_warps_ &= ~(1u << warp);
    return &fibers_[warp * kWarp + lane];
}

void Processor::start_or_resume(Fiber& next, void** leave) {
    *self_ = &next;
    if (!next.started) {
        unsigned stack = stacks_used_;
        if (free_stacks_.empty()) {
            ++stacks_used_;
        } else {
            stack = free_stacks_.back();
            free_stacks_.pop_back();
        }
        next.stack = stack;
        // Stacks begin at different cache sets.
        const size_t colour = stack % 32 * 192;
        void** top = reinterpret_cast<void**>(stacks_ + (stack + 1) * kStackStride - colour - 64);
        const auto entry = reinterpret_cast<void*>(&nxrt_fake_fiber_entry);
        const auto main = reinterpret_cast<void*>(&Processor::fiber_main);
        // What nxrt_fake_switch pops, r15 first; behind its return address the stack is aligned to 16.
        void* const frame[] = {nullptr, nullptr, main, this, nullptr, nullptr, entry, nullptr, nullptr};
        top -= sizeof frame / sizeof *frame;
        std::memcpy(top, frame, sizeof frame);
        next.stack_pointer = top;
    }
    nxrt_fake_switch(leave, next.stack_pointer);
}

// Threads that never wait run one after another on one stack.
void Processor::run_fibers() {
    void* dead;
    Fiber* fiber = &current();
    const unsigned stack = fiber->stack;
    for (;;) {
        fiber->started = true;
        launch_->kernel->run(launch_->params);
        ++finished_;
        fiber = next_ready(fiber->warp);
        if (fiber == nullptr) break;
        if (fiber->started) {
            free_stacks_.push_back(stack);
            start_or_resume(*fiber, &dead);
        }
        fiber->stack = stack;
        *self_ = fiber;
    }
    if (finished_ != threads_) {
        abandon("threads wait in __syncthreads or in an operation of their warp that others do not reach");
    }
    nxrt_fake_switch(&dead, main_stack_pointer_);
}

void Processor::fiber_main(Processor* processor) { processor->run_fibers(); }

// Leaves the running thread, which waits, for another.
void Processor::leave(Fiber& fiber) {
    Fiber* next = next_ready(fiber.warp);
    if (next == nullptr) {
        abandon("threads wait in __syncthreads or in an operation of their warp that others do not reach");
    }
    start_or_resume(*next, &fiber.stack_pointer);
}

void* Processor::abandoned_at(const char* message) {
    message_ = message;
    return main_stack_pointer_;
}

void Processor::abandon(const char* message) {
    void* dead;
    nxrt_fake_switch(&dead, abandoned_at(message));
    __builtin_unreachable();
}

Slot* Processor::collective(Fiber& fiber, Collective kind, const void* value, unsigned bytes, Finish finish,
                            unsigned argument) {
    Warp& warp = warps_[fiber.warp];
    Slot* slots = warp.slots[warp.half];
    const uint32_t bit = 1u << fiber.lane;
    if (warp.arrived == 0) {
        warp.kind = kind;
        if (warp.present != 0xffffffffu) std::memset(slots, 0xff, sizeof warp.slots[0]);
    } else if (warp.kind != kind) {
        abandon("the lanes of a warp are in different operations of the warp");
    }
    if (bytes != 0) std::memcpy(slots[fiber.lane].bytes, value, bytes);
    warp.arrived |= bit;
    if (warp.arrived != warp.present) {
        leave(fiber);
        return slots;
    }
    if (finish != nullptr) finish(slots, argument);
    warp.arrived = 0;
    warp.half ^= 1;
    warp.ready = warp.present & ~bit;
    if (warp.ready != 0) ready_warps_ |= 1u << fiber.warp;
    return slots;
}

void Processor::barrier(Fiber& fiber) {
    if (++at_barrier_ != threads_) return leave(fiber);
    at_barrier_ = 0;
    for (unsigned w = 0; w * kWarp < threads_; ++w) {
        warps_[w].ready = warps_[w].present;
        ready_warps_ |= 1u << w;
    }
    Warp& own = warps_[fiber.warp];
    own.ready &= ~(1u << fiber.lane);
    if (own.ready == 0) ready_warps_ &= ~(1u << fiber.warp);
}

Slot* collective(Collective kind, const void* value, unsigned bytes, Finish finish, unsigned argument) {
    Fiber& fiber = current();
    return fiber.processor->collective(fiber, kind, value, bytes, finish, argument);
}
void barrier() {
    Fiber& fiber = current();
    fiber.processor->barrier(fiber);
}
void fail(const char* message) { current().processor->abandon(message); }
void* dynamic_shared() { return current().processor->dynamic_shared(); }

}  // namespace nxrt::emulate
