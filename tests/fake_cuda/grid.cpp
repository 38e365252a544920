#include "grid.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>

namespace nxrt::emulate {

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction previous[NSIG];
Describe describe_address;
bool (*is_device)(uintptr_t);

// Set before a block is abandoned in the handler.
__thread bool address_fault = false;

void pass_on(int signal, siginfo_t* info, void* context) {
    struct sigaction& old = previous[signal];
    if (old.sa_flags & SA_SIGINFO) {
        old.sa_sigaction(signal, info, context);
    } else if (old.sa_handler == SIG_DFL || old.sa_handler == SIG_IGN) {
        // The instruction faults again, then as if this handler had never been.
        sigaction(signal, &old, nullptr);
    } else {
        old.sa_handler(signal);
    }
}

void on_signal(int signal, siginfo_t* info, void* context) {
    char text[512];
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    Processor* processor = Processor::running;
    if (processor == nullptr) {
        if (signal == SIGSEGV && is_device(address)) {
            const int n = std::snprintf(text, sizeof text, "fake CUDA: the host touches device memory: ");
            describe_address(address, text + n, sizeof text - n - 1);
            std::fprintf(stderr, "%s\n", text);
        }
        return pass_on(signal, info, context);
    }
    address_fault = signal == SIGSEGV || signal == SIGBUS;
    if (address_fault && processor->is_stack_guard(address)) {
        address_fault = false;
        std::snprintf(text, sizeof text, "a thread's local variables overflow its stack");
    } else if (address_fault) {
        const int n = std::snprintf(text, sizeof text, "access to ");
        describe_address(address, text + n, sizeof text - n);
    } else {
        std::snprintf(text, sizeof text, "%s", signal == SIGFPE ? "an integer division by zero" : "an illegal instruction");
    }
    // Goes on in run_block, as if the fiber had switched there: the frame of nxrt_fake_switch lies on its stack.
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const auto* frame = static_cast<const greg_t*>(processor->abandoned_at(text));
    registers[REG_R15] = frame[0];
    registers[REG_R14] = frame[1];
    registers[REG_R13] = frame[2];
    registers[REG_R12] = frame[3];
    registers[REG_RBX] = frame[4];
    registers[REG_RBP] = frame[5];
    registers[REG_RIP] = frame[6];
    registers[REG_RSP] = reinterpret_cast<greg_t>(frame + 7);
}

// Handlers must not run on a fiber's stack, which may be what has overflowed.
struct SignalStack {
    SignalStack() {
        stack_t current;
        if (sigaltstack(nullptr, &current) == 0 && (current.ss_flags & SS_DISABLE) == 0) return;
        memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        stack_t own{};
        own.ss_sp = memory;
        own.ss_size = kBytes;
        sigaltstack(&own, nullptr);
    }
    ~SignalStack() {
        if (memory == nullptr) return;
        stack_t none{};
        none.ss_flags = SS_DISABLE;
        sigaltstack(&none, nullptr);
        munmap(memory, kBytes);
    }
    static constexpr size_t kBytes = 64 * 1024;
    void* memory = nullptr;
};

// The clusters of one launch, handed out to the OS threads one by one.
struct Work {
    const Launch* launch;
    bool descending;
    uint64_t clusters;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    std::mutex lock;
    Outcome outcome;

    void run(Processor& processor) {
        processor.prepare(*launch, descending);
        const dim3 grid = launch->grid;
        const unsigned size = launch->kernel->cluster, along = grid.x / size;
        while (!failed.load(std::memory_order_relaxed)) {
            uint64_t i = next.fetch_add(1, std::memory_order_relaxed);
            if (i >= clusters) return;
            if (descending) i = clusters - 1 - i;
            const uint3 index = {static_cast<unsigned>(i % along) * size, static_cast<unsigned>(i / along % grid.y),
                                 static_cast<unsigned>(i / along / grid.y)};
            address_fault = false;
            if (processor.run_cluster(index)) continue;
            const std::lock_guard guard(lock);
            if (failed.exchange(true)) return;
            outcome.failure = address_fault ? Failure::kIllegalAddress : Failure::kKernel;
            outcome.message = "block (" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
                              std::to_string(index.z) + "): " + processor.message();
        }
    }
};

// The second OS thread. It lives as long as the process, which may end while it waits.
class Helper {
public:
    // Null in a child of fork, where the thread does not exist.
    static Helper& instance() {
        static std::mutex lock;
        static Helper* helper = nullptr;
        static pid_t process = 0;
        const std::lock_guard guard(lock);
        if (process != getpid()) {
            helper = new Helper;
            process = getpid();
        }
        return *helper;
    }

    void begin(Work* work) {
        {
            const std::lock_guard guard(lock_);
            work_ = work;
        }
        wake_.notify_one();
    }

    // Takes the work back, if it has not begun, or waits until it has ended.
    void end() {
        std::unique_lock guard(lock_);
        work_ = nullptr;
        idle_.wait(guard, [this] { return !busy_; });
    }

private:
    Helper() {
        std::thread([this] { loop(); }).detach();
    }

    void loop() {
        // Signals meant for the process are for the host's threads.
        sigset_t all;
        sigfillset(&all);
        for (const int signal : kSignals) sigdelset(&all, signal);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
        const SignalStack signal_stack;
        Processor processor;
        std::unique_lock guard(lock_);
        for (;;) {
            wake_.wait(guard, [this] { return work_ != nullptr; });
            Work* work = work_;
            work_ = nullptr;
            busy_ = true;
            guard.unlock();
            work->run(processor);
            guard.lock();
            busy_ = false;
            idle_.notify_one();
        }
    }

    std::mutex lock_;
    std::condition_variable wake_;
    std::condition_variable idle_;
    Work* work_ = nullptr;
    bool busy_ = false;
};

}  // namespace

void install_signal_handlers(Describe describe, bool (*is_device_address)(uintptr_t)) {
    describe_address = describe;
    is_device = is_device_address;
    for (const int signal : kSignals) {
        struct sigaction current;
        if (sigaction(signal, nullptr, &current) != 0 || current.sa_sigaction == on_signal) continue;
        previous[signal] = current;
        struct sigaction own {};
        own.sa_sigaction = on_signal;
        own.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&own.sa_mask);
        sigaction(signal, &own, nullptr);
    }
}

Outcome run_grid(const Launch& launch, bool descending) {
    static thread_local SignalStack signal_stack;
    (void)signal_stack.memory;
    // Kernels run one at a time, on whichever thread of the host waits for them.
    static Processor& processor = *new Processor;
    Work work;
    work.launch = &launch;
    work.descending = descending;
    work.clusters = uint64_t{launch.grid.x} / launch.kernel->cluster * launch.grid.y * launch.grid.z;
    const bool shared = work.clusters > 1;
    if (shared) Helper::instance().begin(&work);
    work.run(processor);
    if (shared) Helper::instance().end();
    return work.outcome;
}

}  // namespace nxrt::emulate
