// Streams as queues: work waits until something needs it, so that a missing synchronisation shows.
#include <cstring>

#include "driver.h"
#include "memory.h"

namespace nxrt::fake {

namespace {

// A real driver blocks, too, when that much is under way.
constexpr size_t kMaxQueue = 4096;

std::vector<std::shared_ptr<Stream>>& all_streams() {
    static std::vector<std::shared_ptr<Stream>> streams;
    return streams;
}

std::shared_ptr<Stream> thread_stream(const Context& context) {
    static thread_local std::map<const Context*, std::shared_ptr<Stream>> streams;
    auto& stream = streams[&context];
    if (stream == nullptr) stream = new_stream(driver().contexts.at(context.device), 0, 0);
    return stream;
}

CUresult run_copy(const CopyCall& copy) {
    ++driver().counters.copies;
    const auto check = [&](uintptr_t address) {
        return !is_device_address(address) || find_allocation(address, copy.bytes) != nullptr;
    };
    if (!check(copy.to) || !check(copy.from)) {
        log_error("a copy of %zu bytes reads or writes outside of allocated memory", copy.bytes);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    const void* from = copy.staged != nullptr ? copy.staged->data() : memory_at(copy.from);
    std::memmove(memory_at(copy.to), from, copy.bytes);
    return CUDA_SUCCESS;
}

CUresult run_fill(const FillCall& fill) {
    ++driver().counters.fills;
    if (find_allocation(fill.to, fill.count * fill.element_bytes) == nullptr) {
        log_error("a memset of %zu bytes outside of allocated memory", fill.count * fill.element_bytes);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    unsigned char* to = memory_at(fill.to);
    for (size_t i = 0; i < fill.count; ++i) std::memcpy(to + i * fill.element_bytes, &fill.value, fill.element_bytes);
    return CUDA_SUCCESS;
}

}  // namespace

CUresult run_work(const Work& work) {
    if (const auto* kernel = std::get_if<KernelCall>(&work)) return run_kernel(*kernel);
    if (const auto* copy = std::get_if<CopyCall>(&work)) return run_copy(*copy);
    if (const auto* fill = std::get_if<FillCall>(&work)) return run_fill(*fill);
    if (const auto* host = std::get_if<HostCall>(&work)) host->function(host->data);
    return CUDA_SUCCESS;
}

std::shared_ptr<Stream> new_stream(std::shared_ptr<Context> context, unsigned flags, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->context = std::move(context);
    stream->flags = flags;
    stream->blocking = (flags & CU_STREAM_NON_BLOCKING) == 0;
    stream->priority = priority;
    all_streams().push_back(stream);
    return stream;
}

void drop_stream(Stream& stream) {
    auto& streams = all_streams();
    for (auto it = streams.begin(); it != streams.end(); ++it) {
        if (it->get() != &stream) continue;
        streams.erase(it);
        return;
    }
}

std::shared_ptr<Stream> find_stream(const Context& context, CUstream handle) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY) return context.legacy;
    if (handle == CU_STREAM_PER_THREAD) return thread_stream(context);
    return driver().streams.get(handle);
}

bool is_done(const Point& point) { return point.stream == nullptr || point.stream->completed >= point.sequence; }

void invalidate(Capture& capture) { capture.invalidated = true; }

CUresult enqueue(Stream& stream, Operation operation, Point* place) {
    // The legacy stream waits for what the blocking streams have to do, and they for it.
    if (&stream == stream.context->legacy.get()) {
        for (const auto& other : all_streams()) {
            if (other.get() == &stream || !other->blocking || other->context != stream.context) continue;
            if (!other->queue.empty()) operation.after.push_back({other, other->submitted});
        }
    } else if (stream.blocking && !stream.context->legacy->queue.empty()) {
        operation.after.push_back({stream.context->legacy, stream.context->legacy->submitted});
    }
    stream.queue.push_back(std::move(operation));
    ++stream.submitted;
    if (place != nullptr) *place = {stream.shared_from_this(), stream.submitted};
    if (driver().settings.eager) return drain(stream);
    if (stream.queue.size() > kMaxQueue) return drain(stream, stream.completed + kMaxQueue / 2);
    return CUDA_SUCCESS;
}

CUresult drain(Stream& stream, uint64_t sequence) {
    if (stream.completed >= sequence) return stream.context->sticky;
    const auto keep = stream.shared_from_this();
    while (stream.completed < sequence && !stream.queue.empty()) {
        Operation operation = std::move(stream.queue.front());
        stream.queue.pop_front();
        for (const Point& point : operation.after) {
            if (!is_done(point)) drain(*point.stream, point.sequence);
        }
        CUresult& sticky = stream.context->sticky;
        const CUresult result = sticky == CUDA_SUCCESS ? operation.run() : sticky;
        if (sticky == CUDA_SUCCESS) sticky = result;
        ++stream.completed;
    }
    return stream.context->sticky;
}

CUresult drain_all(const Context* context) {
    const auto streams = all_streams();
    for (const auto& stream : streams) {
        if (context == nullptr || stream->context.get() == context) drain(*stream);
    }
    return context == nullptr ? CUDA_SUCCESS : context->sticky;
}

CUresult submit(const Call& call, Stream& stream, Work work) {
    if (stream.capture != nullptr) {
        Capture& capture = *stream.capture;
        NXRT_REQUIRE(!capture.invalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the stream's capture is invalid");
        std::vector<Edge> edges;
        for (Node* node : stream.capture_tail) edges.push_back({node, {}});
        stream.capture_tail = {add_node(*capture.graph, std::move(work), std::move(edges))};
        return CUDA_SUCCESS;
    }
    if (&stream == stream.context->legacy.get()) {
        for (const auto& capture : driver().captures) {
            if (!capture->origin->blocking || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
            capture->invalidated = true;
            return call.error(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "work on the legacy stream, which a captured stream waits for");
        }
    }
    // Copies whose source is the host's own memory read it now.
    if (auto* copy = std::get_if<CopyCall>(&work)) {
        if (!is_device_address(copy->from) && find_host_block(copy->from) == nullptr) {
            const auto* from = reinterpret_cast<const unsigned char*>(copy->from);
            copy->staged = std::make_shared<std::vector<unsigned char>>(from, from + copy->bytes);
        }
    }
    return enqueue(stream, {[work = std::move(work)] { return run_work(work); }, {}});
}

}  // namespace nxrt::fake

using namespace nxrt::fake;

namespace {

#define NXRT_STREAM(variable, handle)                            \
    const auto variable = find_stream(*call.context, (handle)); \
    NXRT_REQUIRE(variable != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a stream: %p", static_cast<void*>(handle))

// Synchronising calls are no part of a capture.
CUresult forbid_capture(const Call& call, Stream& stream) {
    if (stream.capture == nullptr) return CUDA_SUCCESS;
    invalidate(*stream.capture);
    return call.error(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the stream is being captured");
}

CUstreamCaptureMode& thread_mode() {
    static thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    return mode;
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
    NXRT_CALL(kContext);
    NXRT_REQUIRE(stream != nullptr && flags <= 1, CUDA_ERROR_INVALID_VALUE, "bad arguments");
    auto made = new_stream(call.context, flags, priority);
    *stream = made->handle = driver().streams.add(made);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
    NXRT_CALL(kInit);
    const auto stream = driver().streams.get(handle);
    NXRT_REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a stream: %p", static_cast<void*>(handle));
    if (stream->capture != nullptr) invalidate(*stream->capture);
    const CUresult result = drain(*stream);
    drop_stream(*stream);
    driver().streams.remove(handle);
    return result;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    if (const CUresult e = forbid_capture(call, *stream); e != CUDA_SUCCESS) return e;
    ++driver().counters.synchronizations;
    return drain(*stream);
}

// What is under way when asked for is done when asked for again.
CUresult CUDAAPI cuStreamQuery(CUstream handle) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    if (const CUresult e = forbid_capture(call, *stream); e != CUDA_SUCCESS) return e;
    const bool done = stream->queue.empty();
    const CUresult result = drain(*stream);
    return result != CUDA_SUCCESS ? result : done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuStreamGetFlags(CUstream handle, unsigned* flags) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetPriority(CUstream handle, int* priority) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext* context) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    *context = stream->context->handle;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetDevice(CUstream handle, CUdevice* device) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    *device = stream->context->device;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    const auto event = driver().events.get(event_handle);
    NXRT_REQUIRE(event != nullptr, CUDA_ERROR_INVALID_HANDLE, "not an event: %p", static_cast<void*>(event_handle));
    if (event->capture != nullptr) {
        NXRT_REQUIRE(stream->capture == nullptr || stream->capture == event->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE,
                     "the event belongs to another capture");
        stream->capture = event->capture;
        auto& tail = stream->capture_tail;
        tail.insert(tail.end(), event->capture_tail.begin(), event->capture_tail.end());
        return CUDA_SUCCESS;
    }
    if (stream->capture != nullptr) {
        invalidate(*stream->capture);
        return call.error(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "a captured stream waits for an event from outside");
    }
    if (is_done(event->recorded)) return CUDA_SUCCESS;
    return enqueue(*stream, {[] { return CUDA_SUCCESS; }, {event->recorded}});
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    return submit(call, *stream, HostCall{function, data});
}

// ---- events ----

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned flags) {
    NXRT_CALL(kContext);
    auto made = std::make_shared<Event>();
    made->context = call.context;
    made->flags = flags;
    *event = driver().events.add(made);
    return CUDA_SUCCESS;
}

#define NXRT_EVENT(variable, handle)                   \
    const auto variable = driver().events.get(handle); \
    NXRT_REQUIRE(variable != nullptr, CUDA_ERROR_INVALID_HANDLE, "not an event: %p", static_cast<void*>(handle))

CUresult CUDAAPI cuEventDestroy(CUevent handle) {
    NXRT_CALL(kInit);
    NXRT_EVENT(event, handle);
    driver().events.remove(handle);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecordWithFlags(CUevent handle, CUstream stream_handle, unsigned) {
    NXRT_CALL(kContext);
    NXRT_EVENT(event, handle);
    NXRT_STREAM(stream, stream_handle);
    NXRT_REQUIRE(event->context == stream->context, CUDA_ERROR_INVALID_HANDLE, "event and stream are of different contexts");
    if (stream->capture != nullptr) {
        event->capture = stream->capture;
        event->capture_tail = stream->capture_tail;
        return CUDA_SUCCESS;
    }
    event->capture = nullptr;
    auto when = std::make_shared<std::chrono::steady_clock::time_point>();
    event->when = when;
    const auto run = [when] {
        *when = std::chrono::steady_clock::now();
        return CUDA_SUCCESS;
    };
    return enqueue(*stream, {run, {}}, &event->recorded);
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) { return cuEventRecordWithFlags(event, stream, 0); }

CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
    NXRT_CALL(kContext | kNoCapture);
    NXRT_EVENT(event, handle);
    ++driver().counters.synchronizations;
    return event->recorded.stream == nullptr ? CUDA_SUCCESS : drain(*event->recorded.stream, event->recorded.sequence);
}

CUresult CUDAAPI cuEventQuery(CUevent handle) {
    NXRT_CALL(kContext | kNoCapture);
    NXRT_EVENT(event, handle);
    if (is_done(event->recorded)) return CUDA_SUCCESS;
    const CUresult result = drain(*event->recorded.stream, event->recorded.sequence);
    return result == CUDA_SUCCESS ? CUDA_ERROR_NOT_READY : result;
}

CUresult CUDAAPI cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
    NXRT_CALL(kContext);
    NXRT_EVENT(start, start_handle);
    NXRT_EVENT(end, end_handle);
    NXRT_REQUIRE(start->when != nullptr && end->when != nullptr, CUDA_ERROR_INVALID_HANDLE, "an event was never recorded");
    NXRT_REQUIRE(((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) == 0, CUDA_ERROR_INVALID_HANDLE,
                 "an event without timing");
    if (!is_done(start->recorded) || !is_done(end->recorded)) return CUDA_ERROR_NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(*end->when - *start->when).count();
    return CUDA_SUCCESS;
}

// ---- capture ----

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    NXRT_CALL(kInit);
    std::swap(*mode, thread_mode());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    NXRT_REQUIRE(stream != call.context->legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the legacy stream is not captured");
    NXRT_REQUIRE(stream->capture == nullptr, CUDA_ERROR_ILLEGAL_STATE, "the stream is being captured already");
    auto graph = std::make_shared<Graph>();
    graph->handle = driver().graphs.add(graph);
    auto capture = std::make_shared<Capture>();
    capture->graph = graph;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->id = driver().next_capture_id++;
    capture->origin = stream.get();
    stream->capture = capture;
    stream->capture_tail.clear();
    driver().captures.push_back(capture);
    ++driver().counters.captures;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    *graph = nullptr;
    const auto capture = stream->capture;
    NXRT_REQUIRE(capture != nullptr, CUDA_ERROR_ILLEGAL_STATE, "the stream is not being captured");
    NXRT_REQUIRE(capture->origin == stream.get(), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "the capture began on another stream");
    NXRT_REQUIRE(capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture->thread == std::this_thread::get_id(),
                 CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "the capture began on another thread");
    // Streams that joined have to have come back: every node must lie before the origin's tail.
    std::vector<const Node*> reached(stream->capture_tail.begin(), stream->capture_tail.end());
    for (size_t i = 0; i < reached.size(); ++i) {
        for (const Edge& edge : reached[i]->edges) {
            bool known = false;
            for (const Node* node : reached) known |= node == edge.from;
            if (!known) reached.push_back(edge.from);
        }
    }
    bool joined = true;
    for (const auto& node : capture->graph->nodes) {
        bool known = false;
        for (const Node* other : reached) known |= other == node.get();
        joined &= known;
    }
    for (const auto& other : all_streams()) {
        if (other->capture != capture) continue;
        other->capture = nullptr;
        other->capture_tail.clear();
    }
    auto& captures = driver().captures;
    for (auto it = captures.begin(); it != captures.end(); ++it) {
        if (*it != capture) continue;
        captures.erase(it);
        break;
    }
    if (capture->invalidated || !joined) {
        driver().graphs.remove(capture->graph->handle);
        return call.error(joined ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                          joined ? "something that is not allowed happened during the capture" : "a stream was not joined");
    }
    *graph = capture->graph->handle;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    *status = stream->capture == nullptr       ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                             : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                        const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
    const CUresult result = cuStreamIsCapturing(handle, status);
    if (result != CUDA_SUCCESS || *status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return result;
    NXRT_CALL(kContext);
    NXRT_STREAM(stream, handle);
    stream->tail_handles.clear();
    for (const Node* node : stream->capture_tail) stream->tail_handles.push_back(node->handle);
    if (id != nullptr) *id = stream->capture->id;
    if (graph != nullptr) *graph = stream->capture->graph->handle;
    if (dependencies != nullptr) *dependencies = stream->tail_handles.data();
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = stream->tail_handles.size();
    return CUDA_SUCCESS;
}

}  // extern "C"
