"""The fake driver's rules: order, memory, capture, graphs, and what it reports."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from . import control
from .conftest import Params

NOT_READY, INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE, NOT_FOUND = 600, 1, 2, 400, 500
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_IMPLICIT = 900, 901, 904, 906


class Pinned:
    """An array in pinned memory."""

    def __init__(self, cuda, count):
        self.address = cuda.out(ctypes.c_void_p, "cuMemHostAlloc", ctypes.c_size_t(4 * count), 0)
        self.array = np.ctypeslib.as_array((ctypes.c_float * count).from_address(self.address))


def size(n):
    return ctypes.c_size_t(n)


def ones(cuda, count=64):
    return cuda.upload(np.ones(count, np.float32))


def affine(cuda, pointer, stream, count=64):
    cuda.launch("affine_kernel", 1, 64, Params(pointer, pointer, count), stream=ctypes.c_void_p(stream))


def test_work_waits_until_something_needs_it(cuda):
    a, b = cuda.stream(), cuda.stream()
    pointer = ones(cuda)
    affine(cuda, pointer, a)
    assert cuda.kernels() == []
    cuda.check("cuStreamSynchronize", b)
    assert cuda.kernels() == []
    assert cuda.call("cuStreamQuery", a) == NOT_READY
    assert cuda.call("cuStreamQuery", a) == 0
    assert cuda.kernels() == ["affine_kernel"]
    cuda.eager(1)
    affine(cuda, pointer, a)
    assert cuda.counter("kernels") == 2
    assert cuda.call("cuStreamQuery", a) == 0


def test_a_launch_copies_its_parameters(cuda):
    stream, pointer = cuda.stream(), ones(cuda)
    params = Params(pointer, pointer, 64)
    cuda.launch("affine_kernel", 1, 64, params, stream=ctypes.c_void_p(stream))
    params.n = 0
    cuda.check("cuStreamSynchronize", stream)
    assert (cuda.download(pointer, np.empty(64, np.float32)) == 4).all()


@pytest.mark.parametrize("pinned", [False, True])
def test_pageable_sources_are_read_at_the_call(cuda, pinned):
    stream, pointer = cuda.stream(), cuda.alloc(256)
    source = Pinned(cuda, 64).array if pinned else np.empty(64, np.float32)
    source[:] = 1
    cuda.check("cuMemcpyHtoDAsync_v2", pointer, ctypes.c_void_p(source.ctypes.data), size(256), stream)
    source[:] = 2
    cuda.check("cuStreamSynchronize", stream)
    assert (cuda.download(pointer, np.empty(64, np.float32)) == (2 if pinned else 1)).all()


def test_copies_to_pinned_memory_need_a_synchronization(cuda):
    stream, pointer, to = cuda.stream(), ones(cuda), Pinned(cuda, 64)
    assert np.isnan(to.array).all(), "fresh memory is NaN"
    cuda.check("cuMemcpyDtoHAsync_v2", to.address, pointer, size(256), stream)
    assert np.isnan(to.array).all()
    cuda.check("cuStreamSynchronize", stream)
    assert (to.array == 1).all()


def test_events_order_streams(cuda):
    a, b = cuda.stream(), cuda.stream()
    pointer = ones(cuda)
    event = cuda.out(ctypes.c_void_p, "cuEventCreate", 0)
    end = cuda.out(ctypes.c_void_p, "cuEventCreate", 0)
    affine(cuda, pointer, a)
    cuda.check("cuEventRecord", event, a)
    affine(cuda, pointer, a)
    cuda.check("cuStreamWaitEvent", b, event, 0)
    cuda.check("cuMemsetD8Async", pointer, 0, size(128), b)
    cuda.check("cuStreamSynchronize", b)
    assert cuda.counter("kernels") == 1, "what follows the event is not waited for"
    cuda.check("cuEventRecord", end, a)
    assert cuda.call("cuEventQuery", end) == NOT_READY
    assert cuda.call("cuEventQuery", end) == 0
    assert cuda.out(ctypes.c_float, "cuEventElapsedTime_v2", event, end) >= 0
    got = cuda.download(pointer, np.empty(64, np.float32))
    assert (got[:32] == 1).all() and (got[32:] == 13).all()


@pytest.mark.parametrize("flags, expected", [(0, 1), (1, 0)])
def test_the_legacy_stream_waits_for_blocking_streams(cuda, flags, expected):
    stream, pointer = cuda.stream(flags), ones(cuda)
    affine(cuda, pointer, stream)
    cuda.download(pointer, np.empty(64, np.float32))
    assert cuda.counter("kernels") == expected


def test_memory_is_counted_and_limited(cuda):
    before = cuda.counter("live_bytes")
    pointer = cuda.alloc(1000)
    assert pointer % 256 == 0 and cuda.counter("live_bytes") == before + 1000
    assert np.isnan(cuda.download(pointer, np.empty(250, np.float32))).all()
    cuda.set_memory(before + 1500)
    total, free = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.check("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    assert (free.value, total.value) == (500, before + 1500)
    assert cuda.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_void_p()), size(501)) == OUT_OF_MEMORY
    assert cuda.errors() == []
    cuda.check("cuMemFree_v2", pointer)
    assert cuda.counter("live_bytes") == before
    assert cuda.call("cuMemFree_v2", pointer) == INVALID_VALUE
    assert "freed twice?" in cuda.errors()[0]


def test_copies_are_checked(cuda):
    pointer, host = cuda.alloc(100), np.zeros(200, np.uint8)
    data = ctypes.c_void_p(host.ctypes.data)
    assert cuda.call("cuMemcpyHtoD_v2", pointer, data, size(101)) == INVALID_VALUE
    assert cuda.call("cuMemcpyHtoD_v2", pointer + 1, data, size(100)) == INVALID_VALUE
    assert cuda.call("cuMemcpyDtoD_v2", pointer, data, size(10)) == INVALID_VALUE
    assert cuda.call("cuMemsetD32Async", pointer, 0, size(26), None) == INVALID_VALUE
    cuda.check("cuMemsetD32Async", pointer, 0x01020304, size(25), None)
    cuda.check("cuMemcpyDtoH_v2", data, pointer, size(100))
    assert (host[:100].view(np.uint32) == 0x01020304).all()


def test_bad_launches_are_refused(cuda):
    pointer, stream = cuda.alloc(256), cuda.stream()
    params = Params(pointer, pointer, 1)
    for grid, block, shared in [(0, 1, 0), ((1, 65536), 1, 0), (1, 0, 0), (1, 257, 0), (1, 1, 49153)]:
        assert cuda.try_launch("affine_kernel", grid, block, params, shared) == INVALID_VALUE
    assert len(cuda.errors()) == 5 and all("affine_kernel" in e for e in cuda.errors())
    function = cuda.function("affine_kernel")
    cuda.set_shared_limit(100 * 1024)
    assert cuda.call("cuFuncSetAttribute", function, 8, 100 * 1024 + 1) == INVALID_VALUE
    cuda.check("cuFuncSetAttribute", function, 8, 100 * 1024)
    cuda.launch("affine_kernel", 1, 1, params, 100 * 1024)
    cuda.check("cuFuncSetAttribute", function, 8, 48 * 1024)
    assert cuda.call("cuLaunchKernel", stream, 1, 1, 1, 1, 1, 1, 0, None, None, None) == INVALID_HANDLE
    kernel = ctypes.byref(ctypes.c_void_p())
    assert cuda.call("cuLibraryGetKernel", kernel, cuda.kernels_of_selftest, b"none") == NOT_FOUND
    cuda.check("cuStreamDestroy_v2", stream)
    assert cuda.call("cuStreamSynchronize", stream) == INVALID_HANDLE


def test_the_parameter_size_is_known_and_checked(cuda):
    offset, bytes_ = ctypes.c_size_t(), ctypes.c_size_t()
    function, pointer = cuda.function("affine_kernel"), cuda.alloc(256)
    cuda.check("cuFuncGetParamInfo", function, size(0), ctypes.byref(offset), ctypes.byref(bytes_))
    assert (offset.value, bytes_.value) == (0, ctypes.sizeof(Params))
    assert cuda.call("cuFuncGetParamInfo", function, size(1), ctypes.byref(offset), ctypes.byref(bytes_)) == INVALID_VALUE
    params = Params(pointer, pointer, 1)
    for given, expected in [(24, 0), (32, INVALID_VALUE)]:
        length = ctypes.c_size_t(given)
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(params), 2, ctypes.addressof(length), 0)
        assert cuda.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, extra) == expected


class KernelNode(ctypes.Structure):
    _fields_ = [
        ("func", ctypes.c_void_p),
        ("dims", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


def kernel_node(cuda, pointer, count=64):
    params = Params(pointer, pointer, count)
    array = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    node = KernelNode(cuda.function("affine_kernel"), (1, 1, 1, 64, 1, 1), 0, ctypes.addressof(array))
    node.keep = params, array
    return node


def test_graphs_and_updates_of_their_nodes(cuda):
    stream, first, second = cuda.stream(), ones(cuda), ones(cuda)
    graph = cuda.out(ctypes.c_void_p, "cuGraphCreate", 0)
    nodes = []
    for _ in range(2):
        before = (ctypes.c_void_p * 1)(*nodes[-1:])
        params = kernel_node(cuda, first)
        nodes.append(
            cuda.out(ctypes.c_void_p, "cuGraphAddKernelNode_v2", graph, before, size(len(nodes)), ctypes.byref(params))
        )
    executable = cuda.out(ctypes.c_void_p, "cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    cuda.check("cuGraphDestroy", graph)
    cuda.check("cuGraphLaunch", executable, stream)
    # Launches under way keep their parameters.
    cuda.check("cuGraphExecKernelNodeSetParams_v2", executable, nodes[1], ctypes.byref(kernel_node(cuda, second)))
    assert cuda.kernels() == []
    cuda.check("cuGraphLaunch", executable, stream)
    cuda.check("cuStreamSynchronize", stream)
    assert (cuda.download(first, np.empty(64, np.float32)) == 40).all()
    assert (cuda.download(second, np.empty(64, np.float32)) == 4).all()
    counts = [cuda.counter(n) for n in ("graph_launches", "node_updates", "instantiations", "kernels")]
    assert counts == [2, 1, 1, 4]
    bad = ctypes.byref(kernel_node(cuda, second))
    assert cuda.call("cuGraphExecKernelNodeSetParams_v2", executable, graph, bad) == INVALID_VALUE
    # A node's memory may be gone at the launch.
    cuda.check("cuMemFree_v2", second)
    cuda.check("cuGraphLaunch", executable, stream)
    assert cuda.call("cuStreamSynchronize", stream) == 700
    assert "not allocated" in cuda.errors()[-1]


def test_nodes_without_an_edge_run_backwards(cuda):
    graph = cuda.out(ctypes.c_void_p, "cuGraphCreate", 0)
    pointer = ones(cuda)
    for count in (64, 32):
        params = kernel_node(cuda, pointer, count)
        params.dims[3] = count
        cuda.out(ctypes.c_void_p, "cuGraphAddKernelNode_v2", graph, None, size(0), ctypes.byref(params))
    executable = cuda.out(ctypes.c_void_p, "cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    cuda.check("cuGraphLaunch", executable, None)
    cuda.check("cuCtxSynchronize")
    assert [line.split()[5] for line in cuda.log().splitlines() if line.startswith("kernel")] == ["32x1x1", "64x1x1"]


def test_a_capture_becomes_a_graph(cuda):
    stream, other, pointer = cuda.stream(), cuda.stream(), ones(cuda)
    fork, join = (cuda.out(ctypes.c_void_p, "cuEventCreate", 0) for _ in range(2))
    cuda.check("cuStreamBeginCapture_v2", stream, 0)
    affine(cuda, pointer, stream)
    cuda.check("cuEventRecord", fork, stream)
    cuda.check("cuStreamWaitEvent", other, fork, 0)
    affine(cuda, pointer, other)
    cuda.check("cuEventRecord", join, other)
    cuda.check("cuStreamWaitEvent", stream, join, 0)
    graph = ctypes.c_void_p()
    cuda.check("cuStreamEndCapture", stream, ctypes.byref(graph))
    assert cuda.kernels() == []
    executable = cuda.out(ctypes.c_void_p, "cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    cuda.check("cuGraphLaunch", executable, stream)
    cuda.check("cuStreamSynchronize", stream)
    assert (cuda.download(pointer, np.empty(64, np.float32)) == 13).all()


FORBIDDEN = {
    "alloc": ("cuMemAlloc_v2", ctypes.byref(ctypes.c_void_p()), size(4)),
    "free": ("cuMemFree_v2", 2**40),
    "synchronize": ("cuCtxSynchronize",),
    "copy": ("cuMemcpyDtoD_v2", 0, 0, size(0)),
    "library": ("cuLibraryLoadData", ctypes.byref(ctypes.c_void_p()), b"NXRT_EMULATED x\n", None, None, 0, None, None, 0),
}


@pytest.mark.parametrize("what", [*FORBIDDEN, "stream synchronize", "unjoined", "legacy"])
def test_captures_are_invalidated(cuda, what):
    blocking = what == "legacy"
    stream, pointer = cuda.stream(0 if blocking else 1), ones(cuda)
    cuda.check("cuStreamBeginCapture_v2", stream, 0)
    affine(cuda, pointer, stream)
    expected = CAPTURE_INVALIDATED
    if what in FORBIDDEN:
        assert cuda.call(*FORBIDDEN[what]) == CAPTURE_UNSUPPORTED
    elif what == "stream synchronize":
        assert cuda.call("cuStreamSynchronize", stream) == CAPTURE_UNSUPPORTED
    elif what == "legacy":
        assert cuda.call("cuMemsetD8Async", pointer, 0, size(4), None) == CAPTURE_IMPLICIT
    else:
        event, other = cuda.out(ctypes.c_void_p, "cuEventCreate", 0), cuda.stream()
        cuda.check("cuEventRecord", event, stream)
        cuda.check("cuStreamWaitEvent", other, event, 0)
        affine(cuda, pointer, other)
        expected = CAPTURE_UNJOINED
    graph = ctypes.c_void_p()
    assert cuda.call("cuStreamEndCapture", stream, ctypes.byref(graph)) == expected
    assert graph.value is None
    # Afterwards all is as before.
    cuda.check("cuCtxSynchronize")
    assert cuda.kernels() == []


def test_ordered_failures(cuda):
    cuda.fail_after("cuMemAlloc", 1, OUT_OF_MEMORY)
    cuda.alloc(4)
    assert cuda.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_void_p()), size(4)) == OUT_OF_MEMORY
    cuda.alloc(4)
    cuda.fail_next("cuStreamSynchronize", 719)
    assert cuda.call("cuStreamSynchronize", None) == 719


def test_a_thread_needs_a_context(cuda):
    cuda.check("cuCtxPopCurrent_v2", None)
    assert cuda.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_void_p()), size(4)) == 201
    cuda.check("cuCtxPushCurrent_v2", cuda.context)
    cuda.alloc(4)


def test_pointer_attributes(cuda):
    pointer, pinned = cuda.alloc(100), Pinned(cuda, 4)
    for address, kind in [(pointer + 99, 2), (pinned.address, 1)]:
        assert cuda.out(ctypes.c_uint, "cuPointerGetAttribute", 2, address) == kind
    host = ctypes.create_string_buffer(64)
    out = ctypes.byref(ctypes.c_uint())
    assert cuda.call("cuPointerGetAttribute", out, 2, ctypes.addressof(host)) == INVALID_VALUE


SCRIPT = """
import ctypes, sys
sys.path.insert(0, {root!r})
from tests.fake_cuda import control
fake = control.FakeCuda({library!r})
cuda, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
{body}
"""


def run(cuda, body):
    script = SCRIPT.format(root=str(control.ROOT), library=cuda.library._name, body=body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_other_machines(cuda):
    done = run(
        cuda,
        "fake.set_devices(0); assert cuda.cuInit(0) == 100\n"
        "fake.set_driver_version(12090); assert cuda.cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value == 12090\n"
        "fake.set_devices(3); assert cuda.cuDeviceGetCount(ctypes.byref(number)) == 3 and cuda.cuInit(0) == 0\n"
        "assert cuda.cuDeviceGetCount(ctypes.byref(number)) == 0 and number.value == 3\n"
        "fake.set_capability(7, 5); assert cuda.cuDeviceGetAttribute(ctypes.byref(number), 75, 2) == 0 and number.value == 7\n",
    )
    assert done.returncode == 0, done.stderr


def test_the_host_cannot_read_device_memory(cuda):
    done = run(
        cuda,
        "pointer, context = ctypes.c_void_p(), ctypes.c_void_p()\n"
        "assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0\n"
        "assert cuda.cuCtxSetCurrent(context) == 0 and cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64)) == 0\n"
        "ctypes.string_at(pointer.value, 1)\n",
    )
    assert done.returncode == -11
    assert "the host touches device memory" in done.stderr and "byte 0 of allocation 1 of 64 bytes" in done.stderr
