// Graphs. Nodes that no edge orders run in the reverse of the order in which they were added, so that a missing edge shows.
#include <algorithm>
#include <cstring>

#include "driver.h"

namespace nxrt::fake {

Node* add_node(Graph& graph, Work work, std::vector<Edge> edges) {
    auto node = std::make_shared<Node>();
    node->graph = &graph;
    node->work = std::move(work);
    node->edges = std::move(edges);
    node->handle = driver().nodes.add(node);
    graph.nodes.push_back(node);
    return node.get();
}

namespace {

// The nodes in an order that their edges allow; empty when there is a cycle.
std::vector<const Node*> order_nodes(const Graph& graph) {
    const size_t count = graph.nodes.size();
    std::unordered_map<const Node*, size_t> position;
    for (size_t i = 0; i < count; ++i) position[graph.nodes[i].get()] = i;
    std::vector<size_t> waiting(count);
    std::vector<std::vector<size_t>> dependents(count);
    std::vector<size_t> ready;
    for (size_t i = 0; i < count; ++i) {
        waiting[i] = graph.nodes[i]->edges.size();
        for (const Edge& edge : graph.nodes[i]->edges) dependents[position.at(edge.from)].push_back(i);
        if (waiting[i] == 0) ready.push_back(i);
    }
    std::vector<const Node*> order;
    std::make_heap(ready.begin(), ready.end());
    while (!ready.empty()) {
        std::pop_heap(ready.begin(), ready.end());
        const size_t i = ready.back();
        ready.pop_back();
        order.push_back(graph.nodes[i].get());
        for (const size_t next : dependents[i]) {
            if (--waiting[next] != 0) continue;
            ready.push_back(next);
            std::push_heap(ready.begin(), ready.end());
        }
    }
    if (order.size() != count) order.clear();
    return order;
}

CUresult instantiate(const Call& call, CUgraph graph_handle, unsigned long long flags, CUgraphExec* exec) {
    const auto graph = driver().graphs.get(graph_handle);
    NXRT_REQUIRE(graph != nullptr && exec != nullptr, CUDA_ERROR_INVALID_VALUE, "not a graph");
    const auto order = order_nodes(*graph);
    NXRT_REQUIRE(order.size() == graph->nodes.size(), CUDA_ERROR_INVALID_VALUE, "the graph has a cycle");
    auto made = std::make_shared<GraphExec>();
    made->flags = flags;
    std::unordered_map<const Node*, size_t> position;
    for (const Node* node : order) {
        position[node] = made->nodes.size();
        made->nodes.push_back(node->handle);
        made->works.push_back(std::make_shared<const Work>(node->work));
        std::vector<size_t> edges;
        for (const Edge& edge : node->edges) edges.push_back(position.at(edge.from));
        made->edges.push_back(std::move(edges));
    }
    *exec = driver().graph_execs.add(made);
    ++driver().counters.instantiations;
    log("instantiate %zu nodes", order.size());
    return CUDA_SUCCESS;
}

CUresult edges_of(const Call& call, const Graph& graph, const CUgraphNode* dependencies, const CUgraphEdgeData* data,
                  size_t count, std::vector<Edge>* edges) {
    for (size_t i = 0; i < count; ++i) {
        const auto from = driver().nodes.get(dependencies[i]);
        NXRT_REQUIRE(from != nullptr && from->graph == &graph, CUDA_ERROR_INVALID_VALUE, "a dependency that is no node of the graph");
        Edge edge{from.get(), data != nullptr ? data[i] : CUgraphEdgeData{}};
        NXRT_REQUIRE(edge.data.from_port == CU_GRAPH_KERNEL_NODE_PORT_DEFAULT || std::holds_alternative<KernelCall>(from->work),
                     CUDA_ERROR_INVALID_VALUE, "a port of a node that is no kernel");
        NXRT_REQUIRE(edge.data.from_port <= CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER && edge.data.to_port == 0 &&
                         edge.data.type <= CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC,
                     CUDA_ERROR_INVALID_VALUE, "bad edge data");
        NXRT_REQUIRE(edge.data.type == CU_GRAPH_DEPENDENCY_TYPE_DEFAULT ||
                         edge.data.from_port != CU_GRAPH_KERNEL_NODE_PORT_DEFAULT,
                     CUDA_ERROR_INVALID_VALUE, "a programmatic edge from the default port");
        for (const Edge& other : *edges) {
            NXRT_REQUIRE(other.from != edge.from, CUDA_ERROR_INVALID_VALUE, "a dependency named twice");
        }
        edges->push_back(edge);
    }
    return CUDA_SUCCESS;
}

CUresult copy_work(const Call& call, const CUDA_MEMCPY3D& p, Work* work) {
    NXRT_REQUIRE(p.Height <= 1 && p.Depth <= 1 && p.srcXInBytes == 0 && p.dstXInBytes == 0, CUDA_ERROR_NOT_SUPPORTED,
                 "only one-dimensional copies are emulated");
    CopyCall copy;
    copy.bytes = p.WidthInBytes;
    copy.from = p.srcMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<uintptr_t>(p.srcHost) : uintptr_t{p.srcDevice};
    copy.to = p.dstMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<uintptr_t>(p.dstHost) : uintptr_t{p.dstDevice};
    *work = copy;
    return CUDA_SUCCESS;
}

CUresult fill_work(const Call& call, const CUDA_MEMSET_NODE_PARAMS_v2& p, Work* work) {
    NXRT_REQUIRE(p.height <= 1, CUDA_ERROR_NOT_SUPPORTED, "only one-dimensional memsets are emulated");
    NXRT_REQUIRE(p.elementSize == 1 || p.elementSize == 2 || p.elementSize == 4, CUDA_ERROR_INVALID_VALUE,
                 "elements of %u bytes", p.elementSize);
    *work = FillCall{uintptr_t{p.dst}, p.value, p.elementSize, p.width};
    return CUDA_SUCCESS;
}

CUresult kernel_work(const Call& call, const CUDA_KERNEL_NODE_PARAMS& p, Work* work) {
    KernelCall kernel;
    const CUresult result = make_kernel_call(call, p, &kernel);
    if (result == CUDA_SUCCESS) *work = std::move(kernel);
    return result;
}

CUresult any_work(const Call& call, const CUgraphNodeParams& p, Work* work) {
    switch (p.type) {
        case CU_GRAPH_NODE_TYPE_KERNEL: {
            static_assert(sizeof(CUDA_KERNEL_NODE_PARAMS_v3) == sizeof(CUDA_KERNEL_NODE_PARAMS));
            CUDA_KERNEL_NODE_PARAMS kernel;
            std::memcpy(&kernel, &p.kernel, sizeof kernel);
            return kernel_work(call, kernel, work);
        }
        case CU_GRAPH_NODE_TYPE_MEMCPY: return copy_work(call, p.memcpy.copyParams, work);
        case CU_GRAPH_NODE_TYPE_MEMSET: return fill_work(call, p.memset, work);
        case CU_GRAPH_NODE_TYPE_HOST: *work = HostCall{p.host.fn, p.host.userData}; return CUDA_SUCCESS;
        case CU_GRAPH_NODE_TYPE_EMPTY: *work = std::monostate{}; return CUDA_SUCCESS;
        default: return call.error(CUDA_ERROR_NOT_SUPPORTED, "nodes of type %d are not emulated", p.type);
    }
}

CUresult add(const Call& call, CUgraphNode* node, CUgraph graph_handle, const CUgraphNode* dependencies,
             const CUgraphEdgeData* data, size_t count, CUresult made, Work work) {
    if (made != CUDA_SUCCESS) return made;
    const auto graph = driver().graphs.get(graph_handle);
    NXRT_REQUIRE(graph != nullptr && node != nullptr, CUDA_ERROR_INVALID_VALUE, "not a graph");
    std::vector<Edge> edges;
    const CUresult result = edges_of(call, *graph, dependencies, data, count, &edges);
    if (result == CUDA_SUCCESS) *node = add_node(*graph, std::move(work), std::move(edges))->handle;
    return result;
}

CUresult set_exec(const Call& call, CUgraphExec exec_handle, CUgraphNode node, CUresult made, Work work) {
    if (made != CUDA_SUCCESS) return made;
    const auto exec = driver().graph_execs.get(exec_handle);
    NXRT_REQUIRE(exec != nullptr, CUDA_ERROR_INVALID_VALUE, "not an executable graph");
    const auto found = std::find(exec->nodes.begin(), exec->nodes.end(), node);
    NXRT_REQUIRE(found != exec->nodes.end(), CUDA_ERROR_INVALID_VALUE, "not a node of the executable graph");
    auto& old = exec->works[size_t(found - exec->nodes.begin())];
    NXRT_REQUIRE(old->index() == work.index(), CUDA_ERROR_INVALID_VALUE, "the node is of another type");
    old = std::make_shared<const Work>(std::move(work));
    ++driver().counters.node_updates;
    return CUDA_SUCCESS;
}

CUresult set_node(const Call& call, CUgraphNode handle, CUresult made, Work work) {
    if (made != CUDA_SUCCESS) return made;
    const auto node = driver().nodes.get(handle);
    NXRT_REQUIRE(node != nullptr, CUDA_ERROR_INVALID_VALUE, "not a node");
    NXRT_REQUIRE(node->work.index() == work.index(), CUDA_ERROR_INVALID_VALUE, "the node is of another type");
    node->work = std::move(work);
    return CUDA_SUCCESS;
}

// What an update from another graph may not change.
const char* difference(const GraphExec& exec, const std::vector<const Node*>& order) {
    if (order.size() != exec.nodes.size()) return "another number of nodes";
    std::unordered_map<const Node*, size_t> position;
    for (size_t i = 0; i < order.size(); ++i) {
        position[order[i]] = i;
        if (order[i]->work.index() != exec.works[i]->index()) return "a node of another type";
        std::vector<size_t> edges;
        for (const Edge& edge : order[i]->edges) edges.push_back(position.at(edge.from));
        if (edges != exec.edges[i]) return "other edges";
    }
    return nullptr;
}

}  // namespace

}  // namespace nxrt::fake

using namespace nxrt::fake;

extern "C" {

CUresult CUDAAPI cuGraphCreate(CUgraph* graph, unsigned flags) {
    NXRT_CALL(kInit);
    NXRT_REQUIRE(graph != nullptr && flags == 0, CUDA_ERROR_INVALID_VALUE, "bad arguments");
    auto made = std::make_shared<Graph>();
    *graph = made->handle = driver().graphs.add(made);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphDestroy(CUgraph handle) {
    NXRT_CALL(kInit);
    const auto graph = driver().graphs.get(handle);
    NXRT_REQUIRE(graph != nullptr, CUDA_ERROR_INVALID_VALUE, "not a graph");
    for (const auto& node : graph->nodes) driver().nodes.remove(node->handle);
    driver().graphs.remove(handle);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                      const CUDA_KERNEL_NODE_PARAMS* params) {
    NXRT_CALL(kContext);
    Work work;
    const CUresult made = kernel_work(call, *params, &work);
    return add(call, node, graph, dependencies, nullptr, count, made, std::move(work));
}

CUresult CUDAAPI cuGraphAddMemcpyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                      const CUDA_MEMCPY3D* params, CUcontext) {
    NXRT_CALL(kContext);
    Work work;
    const CUresult made = copy_work(call, *params, &work);
    return add(call, node, graph, dependencies, nullptr, count, made, std::move(work));
}

CUresult CUDAAPI cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                      const CUDA_MEMSET_NODE_PARAMS* p, CUcontext context) {
    NXRT_CALL(kContext);
    Work work;
    const CUresult made =
        fill_work(call, {p->dst, p->pitch, p->value, p->elementSize, p->width, p->height, context}, &work);
    return add(call, node, graph, dependencies, nullptr, count, made, std::move(work));
}

CUresult CUDAAPI cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count) {
    NXRT_CALL(kInit);
    return add(call, node, graph, dependencies, nullptr, count, CUDA_SUCCESS, std::monostate{});
}

CUresult CUDAAPI cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                                const CUgraphEdgeData* data, size_t count, CUgraphNodeParams* params) {
    NXRT_CALL(kContext);
    Work work;
    const CUresult made = any_work(call, *params, &work);
    return add(call, node, graph, dependencies, data, count, made, std::move(work));
}

CUresult CUDAAPI cuGraphAddDependencies(CUgraph graph_handle, const CUgraphNode* from, const CUgraphNode* to,
                                        const CUgraphEdgeData* data, size_t count) {
    NXRT_CALL(kInit);
    const auto graph = driver().graphs.get(graph_handle);
    NXRT_REQUIRE(graph != nullptr, CUDA_ERROR_INVALID_VALUE, "not a graph");
    for (size_t i = 0; i < count; ++i) {
        const auto node = driver().nodes.get(to[i]);
        NXRT_REQUIRE(node != nullptr && node->graph == graph.get(), CUDA_ERROR_INVALID_VALUE, "not a node of the graph");
        const CUresult result = edges_of(call, *graph, from + i, data != nullptr ? data + i : nullptr, 1, &node->edges);
        const auto* kernel = std::get_if<KernelCall>(&node->work);
        if (kernel != nullptr && data != nullptr && data[i].type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
            log("overlap %s", kernel->function->name.c_str());
        if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphDestroyNode(CUgraphNode handle) {
    NXRT_CALL(kInit);
    const auto node = driver().nodes.get(handle);
    NXRT_REQUIRE(node != nullptr, CUDA_ERROR_INVALID_VALUE, "not a node");
    auto& nodes = node->graph->nodes;
    for (const auto& other : nodes) {
        auto& edges = other->edges;
        edges.erase(std::remove_if(edges.begin(), edges.end(), [&](const Edge& e) { return e.from == node.get(); }), edges.end());
    }
    nodes.erase(std::find(nodes.begin(), nodes.end(), node));
    driver().nodes.remove(handle);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
    NXRT_CALL(kInit);
    const auto graph = driver().graphs.get(handle);
    NXRT_REQUIRE(graph != nullptr, CUDA_ERROR_INVALID_VALUE, "not a graph");
    const size_t all = graph->nodes.size();
    for (size_t i = 0; nodes != nullptr && i < *count; ++i) nodes[i] = i < all ? graph->nodes[i]->handle : nullptr;
    *count = nodes != nullptr ? std::min(*count, all) : all;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
    NXRT_CALL(kInit);
    const auto node = driver().nodes.get(handle);
    NXRT_REQUIRE(node != nullptr, CUDA_ERROR_INVALID_VALUE, "not a node");
    constexpr CUgraphNodeType kTypes[] = {CU_GRAPH_NODE_TYPE_EMPTY, CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY,
                                          CU_GRAPH_NODE_TYPE_MEMSET, CU_GRAPH_NODE_TYPE_HOST};
    *type = kTypes[node->work.index()];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphKernelNodeGetParams(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS* params) {
    NXRT_CALL(kInit);
    const auto node = driver().nodes.get(handle);
    NXRT_REQUIRE(node != nullptr, CUDA_ERROR_INVALID_VALUE, "not a node");
    auto* kernel = std::get_if<KernelCall>(&node->work);
    NXRT_REQUIRE(kernel != nullptr, CUDA_ERROR_INVALID_VALUE, "not a kernel node");
    node->param_pointers = {kernel->params.data()};
    *params = {};
    params->func = kernel->function->function_handle;
    params->gridDimX = kernel->grid.x;
    params->gridDimY = kernel->grid.y;
    params->gridDimZ = kernel->grid.z;
    params->blockDimX = kernel->block.x;
    params->blockDimY = kernel->block.y;
    params->blockDimZ = kernel->block.z;
    params->sharedMemBytes = kernel->shared_bytes;
    params->kernelParams = node->param_pointers.data();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* params) {
    NXRT_CALL(kContext);
    Work work;
    const CUresult made = kernel_work(call, *params, &work);
    return set_node(call, node, made, std::move(work));
}

CUresult CUDAAPI cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams* params) {
    NXRT_CALL(kContext);
    Work work;
    const CUresult made = any_work(call, *params, &work);
    return set_node(call, node, made, std::move(work));
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* params) {
    NXRT_CALL(kContext);
    Work work;
    const CUresult made = kernel_work(call, *params, &work);
    return set_exec(call, exec, node, made, std::move(work));
}

CUresult CUDAAPI cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams* params) {
    NXRT_CALL(kContext);
    Work work;
    const CUresult made = any_work(call, *params, &work);
    return set_exec(call, exec, node, made, std::move(work));
}

CUresult CUDAAPI cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D* params, CUcontext) {
    NXRT_CALL(kContext);
    Work work;
    const CUresult made = copy_work(call, *params, &work);
    return set_exec(call, exec, node, made, std::move(work));
}

CUresult CUDAAPI cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* p,
                                                CUcontext context) {
    NXRT_CALL(kContext);
    Work work;
    const CUresult made =
        fill_work(call, {p->dst, p->pitch, p->value, p->elementSize, p->width, p->height, context}, &work);
    return set_exec(call, exec, node, made, std::move(work));
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
    NXRT_CALL(kContext | kNoCapture);
    return instantiate(call, graph, flags, exec);
}

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
    NXRT_CALL(kContext | kNoCapture);
    const CUresult result = instantiate(call, graph, params->flags, exec);
    params->hErrNode_out = nullptr;
    params->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return result;
}

CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec exec_handle, CUgraph graph_handle, CUgraphExecUpdateResultInfo* info) {
    NXRT_CALL(kContext | kNoCapture);
    const auto exec = driver().graph_execs.get(exec_handle);
    const auto graph = driver().graphs.get(graph_handle);
    NXRT_REQUIRE(exec != nullptr && graph != nullptr, CUDA_ERROR_INVALID_VALUE, "not a graph");
    const auto order = order_nodes(*graph);
    const char* why = difference(*exec, order);
    *info = {};
    info->result = why == nullptr ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    if (why != nullptr) {
        log("cuGraphExecUpdate: %s", why);
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
    for (size_t i = 0; i < order.size(); ++i) exec->works[i] = std::make_shared<const Work>(order[i]->work);
    ++driver().counters.graph_updates;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec exec_handle, CUstream stream_handle) {
    NXRT_CALL(kContext);
    NXRT_REQUIRE(driver().graph_execs.get(exec_handle) != nullptr, CUDA_ERROR_INVALID_VALUE, "not an executable graph");
    NXRT_REQUIRE(find_stream(*call.context, stream_handle) != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a stream");
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec exec_handle, CUstream stream_handle) {
    NXRT_CALL(kContext);
    const auto exec = driver().graph_execs.get(exec_handle);
    NXRT_REQUIRE(exec != nullptr, CUDA_ERROR_INVALID_VALUE, "not an executable graph");
    const auto stream = find_stream(*call.context, stream_handle);
    NXRT_REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE, "not a stream");
    NXRT_REQUIRE(stream->capture == nullptr, CUDA_ERROR_NOT_SUPPORTED, "graph launches are not captured here");
    ++driver().counters.graph_launches;
    log("graph of %zu nodes", exec->works.size());
    const auto run = [works = exec->works] {
        for (const auto& work : works) {
            if (const CUresult result = run_work(*work); result != CUDA_SUCCESS) return result;
        }
        return CUDA_SUCCESS;
    };
    // One executable graph does not run beside itself.
    Operation operation{run, {}};
    if (!is_done(exec->last_launch)) operation.after.push_back(exec->last_launch);
    return enqueue(*stream, std::move(operation), &exec->last_launch);
}

CUresult CUDAAPI cuGraphExecGetFlags(CUgraphExec exec_handle, cuuint64_t* flags) {
    NXRT_CALL(kInit);
    const auto exec = driver().graph_execs.get(exec_handle);
    NXRT_REQUIRE(exec != nullptr, CUDA_ERROR_INVALID_VALUE, "not an executable graph");
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec exec) {
    NXRT_CALL(kInit);
    NXRT_REQUIRE(driver().graph_execs.remove(exec), CUDA_ERROR_INVALID_VALUE, "not an executable graph");
    return CUDA_SUCCESS;
}

}  // extern "C"
