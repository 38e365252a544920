// The fake driver's state and its parts' interfaces. Everything here is used with the driver's lock held.
#pragma once

#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <cstdarg>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

#include "emulate.h"

namespace nxrt::fake {

using Device = int;

struct Stream;
struct Graph;
struct Node;

struct Context {
    CUcontext handle = nullptr;
    Device device = 0;
    unsigned retained = 0;
    unsigned flags = 0;
    // A kernel's failure: what every later call gives.
    CUresult sticky = CUDA_SUCCESS;
    std::shared_ptr<Stream> legacy;
};

// A kernel of a loaded library; CUkernel and CUfunction are two handles to one of these.
struct Function {
    std::string name;
    const emulate::Kernel* kernel = nullptr;
    int max_dynamic_shared = 48 * 1024;
    int carveout = -1;
    CUkernel kernel_handle = nullptr;
    CUfunction function_handle = nullptr;
    bool unloaded = false;
};

struct Library {
    std::string stem;
    std::map<std::string, std::shared_ptr<Function>> functions;
};

// ---- work ----

struct KernelCall {
    std::shared_ptr<Function> function;
    dim3 grid;
    dim3 block;
    unsigned shared_bytes = 0;
    std::vector<unsigned char> params;
};
struct CopyCall {
    uintptr_t to = 0;
    uintptr_t from = 0;
    size_t bytes = 0;
    // The source as it was at the call, for pageable memory.
    std::shared_ptr<std::vector<unsigned char>> staged;
};
struct FillCall {
    uintptr_t to = 0;
    unsigned value = 0;
    unsigned element_bytes = 1;
    size_t count = 0;
};
struct HostCall {
    CUhostFn function = nullptr;
    void* data = nullptr;
};
using Work = std::variant<std::monostate, KernelCall, CopyCall, FillCall, HostCall>;

CUresult run_work(const Work& work);

// A place in a stream's order: done when that many of its operations are.
struct Point {
    std::shared_ptr<Stream> stream;
    uint64_t sequence = 0;
};

struct Operation {
    std::function<CUresult()> run;
    std::vector<Point> after;
};

struct Capture {
    std::shared_ptr<Graph> graph;
    CUstreamCaptureMode mode{};
    std::thread::id thread;
    bool invalidated = false;
    uint64_t id = 0;
    Stream* origin = nullptr;
};

struct Stream : std::enable_shared_from_this<Stream> {
    CUstream handle = nullptr;
    std::shared_ptr<Context> context;
    bool blocking = true;
    unsigned flags = 0;
    int priority = 0;
    std::deque<Operation> queue;
    uint64_t submitted = 0;
    uint64_t completed = 0;
    std::shared_ptr<Capture> capture;
    std::vector<Node*> capture_tail;
    std::vector<CUgraphNode> tail_handles;
};

struct Event {
    std::shared_ptr<Context> context;
    unsigned flags = 0;
    Point recorded;
    std::shared_ptr<std::chrono::steady_clock::time_point> when;
    std::shared_ptr<Capture> capture;
    std::vector<Node*> capture_tail;
};

struct Edge {
    Node* from = nullptr;
    CUgraphEdgeData data{};
};
struct Node {
    CUgraphNode handle = nullptr;
    Graph* graph = nullptr;
    Work work;
    std::vector<Edge> edges;
    // What cuGraphKernelNodeGetParams points into.
    std::vector<void*> param_pointers;
};
struct Graph {
    CUgraph handle = nullptr;
    std::vector<std::shared_ptr<Node>> nodes;
};

struct GraphExec {
    // Parallel arrays, in the order of execution; an update replaces a work, launches under way keep the old one.
    std::vector<CUgraphNode> nodes;
    std::vector<std::shared_ptr<const Work>> works;
    std::vector<std::vector<size_t>> edges;
    unsigned long long flags = 0;
    Point last_launch;
};

// ---- handles: never given out twice, so that stale ones are noticed ----

uintptr_t next_handle();

template <class Handle, class Object>
class Table {
public:
    Handle add(std::shared_ptr<Object> object) {
        const auto handle = reinterpret_cast<Handle>(next_handle());
        objects_[handle] = std::move(object);
        return handle;
    }
    // Null for a handle that is not, or no longer, one of these.
    std::shared_ptr<Object> get(Handle handle) const {
        const auto found = objects_.find(handle);
        return found == objects_.end() ? nullptr : found->second;
    }
    bool remove(Handle handle) { return objects_.erase(handle) != 0; }
    void clear() { objects_.clear(); }
    const std::unordered_map<Handle, std::shared_ptr<Object>>& all() const { return objects_; }

private:
    std::unordered_map<Handle, std::shared_ptr<Object>> objects_;
};

struct Settings {
    int devices = 1;
    int driver_version = 13000;
    size_t memory = size_t{16} << 30;
    std::map<int, int> attributes;
    bool eager = false;
    bool descending = false;
    bool check_params = true;
    bool log_work = true;
};

struct Counters {
    uint64_t allocs = 0, frees = 0, live_bytes = 0, peak_bytes = 0, host_allocs = 0, host_frees = 0, launches = 0, kernels = 0;
    uint64_t graph_launches = 0, node_updates = 0, instantiations = 0, graph_updates = 0, captures = 0, copies = 0, fills = 0;
    uint64_t synchronizations = 0, library_loads = 0, errors = 0;
};

struct InjectedFailure {
    std::string call;
    unsigned after = 0;
    CUresult code = CUDA_SUCCESS;
};

struct Driver {
    std::recursive_mutex lock;
    bool initialized = false;
    Settings settings;
    Counters counters;
    std::string log;
    std::vector<InjectedFailure> injected;

    std::map<Device, std::shared_ptr<Context>> contexts;
    Table<CUstream, Stream> streams;
    Table<CUevent, Event> events;
    Table<CUlibrary, Library> libraries;
    Table<CUfunction, Function> functions;
    Table<CUgraph, Graph> graphs;
    Table<CUgraphNode, Node> nodes;
    Table<CUgraphExec, GraphExec> graph_execs;
    Table<CUmemoryPool, Device> pools;
    std::map<Device, CUmemoryPool> default_pools;
    std::vector<std::shared_ptr<Capture>> captures;
    uint64_t next_capture_id = 1;
};

Driver& driver();

// A line of the log.
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));
// A line of the log that begins with "error: ", and is counted.
void log_error(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The context that is current on this thread, or null.
std::shared_ptr<Context> current_context();
int attribute(int attribute);

// What a call needs before it may begin.
enum Need : unsigned { kNothing = 0, kInit = 1, kContext = 2 | kInit, kNoCapture = 4 };

// Holds the lock while one entry point runs.
class Call {
public:
    Call(const char* name, unsigned need);
    CUresult error(CUresult code, const char* format, ...) const __attribute__((format(printf, 3, 4)));

    CUresult result = CUDA_SUCCESS;
    std::shared_ptr<Context> context;

private:
    std::lock_guard<std::recursive_mutex> guard_;
    const char* name_;
};

#define NXRT_CALL(need)          \
    Call call(__func__, (need)); \
    if (call.result != CUDA_SUCCESS) return call.result

#define NXRT_REQUIRE(condition, code, ...) \
    if (!(condition)) return call.error(code, __VA_ARGS__)

// ---- streams (queue.cpp) ----

// The stream of a handle, also of the default streams; null for a bad one.
std::shared_ptr<Stream> find_stream(const Context& context, CUstream handle);
std::shared_ptr<Stream> new_stream(std::shared_ptr<Context> context, unsigned flags, int priority);
void drop_stream(Stream& stream);
// Records work in a capture or queues it.
CUresult submit(const Call& call, Stream& stream, Work work);
// Queues an operation and gives its place; runs it when streams are eager.
CUresult enqueue(Stream& stream, Operation operation, Point* place = nullptr);
CUresult drain(Stream& stream, uint64_t sequence);
inline CUresult drain(Stream& stream) { return drain(stream, stream.submitted); }
// Everything that any stream of the context still has to do.
CUresult drain_all(const Context* context = nullptr);
bool is_done(const Point& point);
void invalidate(Capture& capture);

// ---- graphs (graph.cpp) ----

Node* add_node(Graph& graph, Work work, std::vector<Edge> edges);

// ---- launches (launch.cpp) ----

CUresult make_kernel_call(const Call& call, const CUDA_KERNEL_NODE_PARAMS& params, KernelCall* made);
CUresult run_kernel(const KernelCall& kernel);

}  // namespace nxrt::fake
