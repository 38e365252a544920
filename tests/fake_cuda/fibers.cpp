#include "fibers.h"

#include <sys/mman.h>

#include <algorithm>
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
    for (Room& room : rooms_) {
        room.mapping = map(kSharedMapping + kPage, PROT_READ | PROT_WRITE);
        mprotect(room.mapping + kSharedMapping, kPage, PROT_NONE);
    }
}

Processor::~Processor() {
    munmap(stacks_, kMaxThreads * kStackStride);
    for (Room& room : rooms_) munmap(room.mapping, kSharedMapping + kPage);
}

bool Processor::is_stack_guard(uintptr_t address) const {
    const uintptr_t offset = address - reinterpret_cast<uintptr_t>(stacks_);
    return offset < kMaxThreads * kStackStride && offset % kStackStride < kPage;
}

void Processor::prepare(const Launch& launch, bool descending) {
    launch_ = &launch;
    descending_ = descending;
    cluster_ = launch.kernel->cluster;
    threads_ = launch.block.x * launch.block.y * launch.block.z;
    all_threads_ = cluster_ * threads_;
    for (unsigned i = 0; i < all_threads_; ++i) {
        const unsigned rank = i / threads_, thread = i % threads_;
        Fiber& fiber = fibers_[i];
        fiber.index = {thread % launch.block.x, thread / launch.block.x % launch.block.y, thread / (launch.block.x * launch.block.y)};
        fiber.lane = i % kWarp;
        fiber.warp = i / kWarp;
        fiber.block = &rooms_[rank].block;
        fiber.rank = rank;
        fiber.processor = this;
    }
    for (unsigned rank = 0; rank < cluster_; ++rank) {
        Room& room = rooms_[rank];
        room.block.size = launch.block;
        room.block.grid = launch.grid;
        room.block.cluster = cluster_;
        room.shared = room.mapping + kSharedMapping - kSharedGuard - round_up(launch.shared_bytes, 128);
        std::memset(room.shared - kSharedGuard, kGuardByte, kSharedGuard);
        std::memset(room.shared + launch.shared_bytes, kGuardByte, room.mapping + kSharedMapping - room.shared - launch.shared_bytes);
    }
}

bool Processor::run_cluster(uint3 index) {
    finished_ = 0;
    at_cluster_ = 0;
    cluster_barriers_ = 0;
    ready_warps_ = 0;
    stacks_used_ = 0;
    free_stacks_.clear();
    message_.clear();
    for (unsigned rank = 0; rank < cluster_; ++rank) {
        Room& room = rooms_[rank];
        room.block.index = {index.x + rank, index.y, index.z};
        room.at_barrier = 0;
        std::memset(room.shared, 0xff, launch_->shared_bytes);
    }
    for (unsigned w = 0; w * kWarp < all_threads_; ++w) {
        const unsigned lanes = all_threads_ - w * kWarp;
        Warp& warp = warps_[w];
        warp.present = lanes >= kWarp ? 0xffffffffu : (1u << lanes) - 1;
        warp.ready = warp.present;
        warp.arrived = 0;
        warp.waiting = 0;
        ready_warps_ |= 1u << w;
    }
    for (unsigned i = 0; i < all_threads_; ++i) {
        fibers_[i].started = false;
        fibers_[i].group = 0;
        fibers_[i].arrivals = 0;
        fibers_[i].copies.clear();
    }

    running = this;
    self_ = &self;
    start_or_resume(*next_ready(descending_ ? kMaxWarps - 1 : 0), &main_stack_pointer_);
    running = nullptr;
    self = nullptr;
    const auto good = [this](const Room& room) { return check_shared_guards(room); };
    return message_.empty() && std::all_of(rooms_, rooms_ + cluster_, good);
}

bool Processor::check_shared_guards(const Room& room) {
    const unsigned char* end = room.mapping + kSharedMapping;
    for (const unsigned char* p = room.shared - kSharedGuard; p < end; ++p) {
        if (p == room.shared) p += launch_->shared_bytes;
        if (p < end && *p != kGuardByte) {
            message_ = "a write outside of the dynamic shared memory, at byte " + std::to_string(p - room.shared) + " of " +
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
    if (finished_ != all_threads_) {
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
    Room& room = rooms_[fiber.rank];
    if (++room.at_barrier != threads_) return leave(fiber);
    room.at_barrier = 0;
    const unsigned warps = (threads_ + kWarp - 1) / kWarp;
    wake(fiber.rank * warps, warps, &Warp::present);
    Warp& own = warps_[fiber.warp];
    own.ready &= ~(1u << fiber.lane);
    if (own.ready == 0) ready_warps_ &= ~(1u << fiber.warp);
}

// Lets these lanes of the warps run.
void Processor::wake(unsigned first_warp, unsigned warps, uint32_t Warp::*lanes) {
    for (unsigned w = first_warp; w < first_warp + warps; ++w) {
        warps_[w].ready |= warps_[w].*lanes;
        if (warps_[w].ready != 0) ready_warps_ |= 1u << w;
    }
}

void Processor::wake_waiting() {
    const unsigned warps = (all_threads_ + kWarp - 1) / kWarp;
    wake(0, warps, &Warp::waiting);
    for (unsigned w = 0; w < warps; ++w) warps_[w].waiting = 0;
}

void Processor::wait(Fiber& fiber) {
    warps_[fiber.warp].waiting |= 1u << fiber.lane;
    leave(fiber);
}

void Processor::cluster_arrive(Fiber& fiber) {
    if (fiber.arrivals++ != cluster_barriers_) abandon("a thread arrives at a barrier of the cluster before it has waited for the last");
    if (++at_cluster_ != all_threads_) return;
    at_cluster_ = 0;
    ++cluster_barriers_;
    wake_waiting();
}

void Processor::cluster_wait(Fiber& fiber) {
    while (fiber.arrivals != cluster_barriers_) wait(fiber);
}

unsigned char* Processor::in_block(const Fiber& fiber, unsigned rank, void* shared) {
    const auto offset = static_cast<unsigned char*>(shared) - rooms_[fiber.rank].shared;
    if (rank >= cluster_ || offset < 0 || offset >= launch_->shared_bytes) {
        abandon("something is sent to what is not the dynamic shared memory of a block of the cluster");
    }
    return rooms_[rank].shared + offset;
}

void Processor::send(Fiber& fiber, unsigned rank, void* to, const void* value, unsigned bytes, Inbox* box) {
    if (cluster_barriers_ == 0) abandon("something is sent to a block that may not have begun");
    std::memcpy(in_block(fiber, rank, to), value, bytes);
    reinterpret_cast<Inbox*>(in_block(fiber, rank, box))->received += bytes;
    wake_waiting();
}

void Processor::wait_for(Fiber& fiber, const Inbox* box) {
    while (box->received < box->expected) wait(fiber);
    if (box->received > box->expected) abandon("more was sent to a block than it expects");
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
void* dynamic_shared() { return current().processor->dynamic_shared(current()); }
void cluster_arrive() {
    Fiber& fiber = current();
    fiber.processor->cluster_arrive(fiber);
}
void cluster_wait() {
    Fiber& fiber = current();
    fiber.processor->cluster_wait(fiber);
}
void send(unsigned rank, void* to, const void* value, unsigned bytes, Inbox* box) {
    Fiber& fiber = current();
    fiber.processor->send(fiber, rank, to, value, bytes, box);
}
void wait_for(const Inbox* box) {
    Fiber& fiber = current();
    fiber.processor->wait_for(fiber, box);
}

}  // namespace nxrt::emulate
