"""The cases of test_cuda_memory.py. Each runs in a process of its own, on the emulated driver of tests/fake_cuda:

    python cuda_cases.py LIBRARY FAKE_DRIVER CASE

and passes if it exits with 0. The driver's queues are lazy, so that a missing wait shows, and the host cannot touch its
device memory.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import pathlib
import subprocess
import sys

import numpy as np
import onnxruntime as ort
from onnx import GraphProto, TensorProto, helper, numpy_helper

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fake_cuda.control import FakeCuda  # noqa: E402
from reference.quant import matmul_nbits  # noqa: E402

EP = "NxrtCudaExecutionProvider"
LIBRARY, DRIVER = sys.argv[1:3] if len(sys.argv) > 3 else ("", "")
MIB = 1 << 20


def register(name: str = "cuda") -> None:
    ort.register_execution_provider_library(name, LIBRARY)


def devices(name: str = EP) -> list:
    return [device for device in ort.get_ep_devices() if device.ep_name == name]


def fake() -> FakeCuda:
    return FakeCuda(DRIVER)


def in_order(driver: FakeCuda) -> None:
    """Nothing was written beside a block, and the driver found no fault."""
    assert driver.check_guards() == 1
    assert not driver.errors(), driver.errors()


def session(options: dict[str, str] | None = None, ep: str = EP, entries: dict[str, str] | None = None):
    """A session that has the EP, whatever node it takes."""
    info = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"])  # noqa: E731
    nodes = [helper.make_node("Tan", ["a"], ["b"]), helper.make_node("Add", ["b", "a"], ["c"])]
    return session_of(helper.make_graph(nodes, "g", [info("a")], [info("c")]), options, ep, entries)


def session_of(
    graph: GraphProto, options: dict[str, str] | None = None, ep: str = EP, entries: dict[str, str] | None = None
):
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    so = ort.SessionOptions()
    so.log_severity_level = 4
    for key, value in (entries or {}).items():
        so.add_session_config_entry(key, value)
    so.add_provider_for_devices(devices(ep)[:1], options or {})
    return ort.InferenceSession(model.SerializeToString(), so)


def bytes_of(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, n, np.uint8)


def on_device(array: np.ndarray, device: int = 0) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array, "cuda", device)


def empty(n: int, device: int = 0) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_shape_and_type([n], np.uint8, "cuda", device)


def pinned(n: int) -> ort.OrtValue | None:
    """A value in page-locked memory; None where this runtime's Python cannot make one."""
    if "memory_info" not in (ort.OrtValue.ortvalue_from_shape_and_type.__doc__ or ""):
        return None
    info = devices()[0].memory_info(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE)
    return ort.OrtValue.ortvalue_from_shape_and_type([n], np.uint8, memory_info=info)


# --------------------------------------------------------------------------------------------------------------- copies


def bytes_survive_the_way_there_and_back():
    register()
    driver = fake()
    for n in (1, 511, 4096, MIB - 1, MIB + 1, 3 * MIB + 77, 9 * MIB + 1):
        array = bytes_of(n)
        value = on_device(array)
        array[...] = 0  # the copy has read it
        np.testing.assert_array_equal(value.numpy(), bytes_of(n))
    assert on_device(np.zeros(0, np.uint8)).numpy().shape == (0,)
    in_order(driver)


def batches_of_copies():
    register()
    driver = fake()
    sizes = [int(n) for n in np.random.default_rng(5).integers(1, 3 * MIB, 20)] + list(range(1, 30))
    host = [ort.OrtValue.ortvalue_from_numpy(bytes_of(n)) for n in sizes]
    there, twin = [empty(n) for n in sizes], [empty(n) for n in sizes]
    back = [ort.OrtValue.ortvalue_from_numpy(np.zeros(n, np.uint8)) for n in sizes]
    ort.copy_tensors(host, there)
    ort.copy_tensors(there, twin)
    before = driver.counter("synchronizations")
    ort.copy_tensors(twin[-29:], back[-29:])
    waits = driver.counter("synchronizations") - before
    assert waits <= 3, f"29 small fetches, {waits} waits"
    ort.copy_tensors(twin, back)
    for value, n in zip(back, sizes, strict=True):
        np.testing.assert_array_equal(value.numpy(), bytes_of(n))
    in_order(driver)


def page_locked_values():
    register()
    driver = fake()
    n = 2 * MIB + 5
    first, second = pinned(n), pinned(n)
    if first is None:
        return
    first.numpy()[...] = bytes_of(n)
    there = empty(n)
    ort.copy_tensors([first], [there])
    ort.copy_tensors([there], [second])
    np.testing.assert_array_equal(second.numpy(), bytes_of(n))
    first.numpy()[...] = 7
    host = ort.OrtValue.ortvalue_from_numpy(np.zeros(n, np.uint8))
    ort.copy_tensors([first], [second])
    ort.copy_tensors([second], [host])
    assert (second.numpy() == 7).all() and (host.numpy() == 7).all()
    in_order(driver)


def copies_between_devices():
    driver = fake()
    driver.set_devices(2)
    register()
    assert len(devices()) == 2
    n = 100_001
    source, target = on_device(bytes_of(n), 0), empty(n, 1)
    ort.copy_tensors([source], [target])
    np.testing.assert_array_equal(target.numpy(), bytes_of(n))
    in_order(driver)


# --------------------------------------------------------------------------------------------------------------- memory


def registration_takes_no_memory():
    driver = fake()
    register()
    assert devices()
    assert (driver.counter("allocs"), driver.counter("host_allocs")) == (0, 0)


def memory_is_flat():
    register()
    driver = fake()
    rng = np.random.default_rng(3)
    sizes = [int(n) for n in rng.integers(1, 5 * MIB, 30)] + [4] * 30

    def round_() -> None:
        kept = []
        for n in sizes:
            value = on_device(np.full(n, 3, np.uint8))
            assert (value.numpy() == 3).all()
            kept.append(value)
            kept = kept[-5:]

    for _ in range(3):
        round_()
    before = [driver.counter(name) for name in ("allocs", "host_allocs", "frees", "live_bytes")]
    for _ in range(5):
        round_()
    assert [driver.counter(name) for name in ("allocs", "host_allocs", "frees", "live_bytes")] == before
    in_order(driver)


def a_limit_holds_as_long_as_its_session():
    register()
    driver = fake()
    s = session({"memory_limit_bytes": str(16 * MIB)})
    kept = empty(10 * MIB)
    try:
        empty(7 * MIB)  # null, and a line in the log
    except Exception as error:  # noqa: BLE001
        assert "lloc" in str(error), error
    assert driver.counter("peak_bytes") <= 16 * MIB, driver.counter("peak_bytes")
    del s
    gc.collect()
    on_device(np.zeros(30 * MIB, np.uint8))
    assert driver.counter("peak_bytes") > 30 * MIB
    del kept


def cached_memory_goes_when_memory_is_short():
    register()
    driver = fake()
    driver.set_memory(64 * MIB)
    for n in (10, 20, 30, 40, 50, 60):
        value = on_device(bytes_of(n * MIB))
        np.testing.assert_array_equal(value.numpy(), bytes_of(n * MIB))
        del value
    assert driver.counter("frees") > 0
    in_order(driver)


# -------------------------------------------------------------------------------------------------------- what there is


def no_gpu_is_no_error():
    fake().set_devices(0)
    register()
    assert not devices()


def an_old_driver_is_no_error():
    fake().set_driver_version(12080)
    register()
    assert not devices()


def many_gpus():
    fake().set_devices(10)
    register()
    assert [device.ep_options["device_id"] for device in devices()] == [str(i) for i in range(8)]
    last = devices()[7]
    assert last.ep_metadata["cuda_device"] == "7" and last.ep_vendor == "nxrt"
    np.testing.assert_array_equal(on_device(bytes_of(100), 7).numpy(), bytes_of(100))


def gpus_before_hopper_multiply_many_rows():
    driver = fake()
    driver.set_capability(8, 9)
    register()
    rng = np.random.default_rng(1)
    K, block_size = 200, 32
    attrs = dict(domain="com.microsoft", K=K, bits=4, block_size=block_size)
    for M, N, tile in ((40, 50, "small"), (300, 1100, "large")):
        a, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((M, K), (K, N)))
        blocks = rng.integers(0, 256, (N, -(-K // block_size), block_size // 2), dtype=np.uint8)
        scales = rng.uniform(0.01, 0.02, blocks.shape[:2]).astype(np.float16)
        nodes = [
            helper.make_node("MatMul", ["a", "w"], ["halves"]),
            helper.make_node("MatMulNBits", ["a", "blocks", "scales"], ["quantised"], N=N, **attrs),
        ]
        info = lambda name, n: helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["M", n])  # noqa: E731
        constants = [numpy_helper.from_array(v, k) for k, v in dict(w=w, blocks=blocks, scales=scales).items()]
        graph = helper.make_graph(nodes, "g", [info("a", K)], [info("halves", N), info("quantised", N)], constants)
        got = session_of(graph).run(None, {"a": a})
        b = matmul_nbits(np.eye(K), blocks, scales, bits=4, block_size=block_size, N=N, K=K)
        for y, right in zip(got, (w.astype(float), b)):
            np.testing.assert_allclose(y, a.astype(float) @ right, atol=2e-3 * np.abs(y).max(), rtol=2e-3)
        assert {f"gemm_{tile}_f16", f"gemm_4_{tile}_f16"} <= set(driver.kernels())
    in_order(driver)


def options_of_orts_cuda_ep():
    register("CUDAExecutionProvider")
    name = "CUDAExecutionProvider"
    known = {"gpu_mem_limit": "1000000000", "arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
    array = np.ones(3, np.float32)
    got = session(known, name).run(None, {"a": array})[0]
    np.testing.assert_allclose(got, np.tan(array) + array, rtol=1e-6)
    register("other")
    for ep, options, text in [
        (EP, known, "did you mean"),
        (name, {"cuda_graph": "maybe"}, "one of auto, off, strict"),
        (EP, {"device_id": "3"}, "the number of one of the 1 GPUs"),
    ]:
        try:
            session(options, ep)
        except Exception as error:  # noqa: BLE001
            assert text in str(error), error
        else:
            raise AssertionError(text)


def sessions_come_and_go():
    register()
    array = np.linspace(-1, 1, 1000, dtype=np.float32)
    for i in range(10):
        s = session()
        np.testing.assert_allclose(s.run(None, {"a": array})[0], np.tan(array) + array, rtol=1e-6)
        if i % 3 == 1:
            del s
            gc.collect()
    ort.unregister_execution_provider_library("cuda")
    np.testing.assert_allclose(s.run(None, {"a": array})[0], np.tan(array) + array, rtol=1e-6)
    in_order(fake())


def users_may_bring_their_stream():
    """As an option, or as onnxruntime-genai does, as a bare session entry. It outlives the session."""
    register()
    driver = fake()
    stream, context = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.library.cuInit(0) == 0
    assert driver.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.library.cuCtxPushCurrent_v2(context) == 0
    assert driver.library.cuStreamCreate(ctypes.byref(stream), 1) == 0
    array = np.linspace(-1, 1, 1000, dtype=np.float32)
    given = {"user_compute_stream": str(stream.value)}
    s = session(given)
    binding = s.io_binding()
    binding.bind_ortvalue_input("a", on_device(array))
    target = on_device(np.zeros_like(array))
    binding.bind_ortvalue_output("c", target)
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    s.run_with_iobinding(binding, options)
    assert driver.library.cuStreamQuery(stream) == 600, "not ready: the work waits in the user's stream"
    # A copy without a stream waits for it all the same.
    np.testing.assert_allclose(target.numpy(), np.tan(array) + array, rtol=1e-6)
    assert driver.library.cuStreamQuery(stream) == 0
    del s, binding
    for sessions in [[session(given), session(entries=given)], [session(given)]]:
        for s in sessions * 2:
            np.testing.assert_allclose(s.run(None, {"a": array})[0], np.tan(array) + array, rtol=1e-6)
        del s, sessions
        gc.collect()
        np.testing.assert_array_equal(on_device(bytes_of(100)).numpy(), bytes_of(100))
    assert driver.library.cuStreamSynchronize(stream) == 0
    assert driver.library.cuStreamDestroy_v2(stream) == 0
    np.testing.assert_array_equal(on_device(bytes_of(100)).numpy(), bytes_of(100))
    in_order(driver)


def exit_with_values_alive():
    global keep
    register()
    keep = on_device(bytes_of(1000)), session(), pinned(100)


_SERVANTS = ("main", "run", "cases", "register", "devices", "fake", "in_order", "session", "session_of", "bytes_of",
             "on_device", "empty", "pinned")  # fmt: skip


def cases() -> list[str]:
    """The names of all cases."""
    functions = inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    return [name for name, f in functions if f.__module__ == __name__ and name not in _SERVANTS]


def main():
    case = sys.argv[3]
    assert case in cases(), case
    globals()[case]()


def run(library: str, driver: str, case: str) -> subprocess.CompletedProcess:
    """Runs a case in a child process."""
    command = [sys.executable, __file__, library, driver, case]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


if __name__ == "__main__":
    FakeCuda(DRIVER)  # before anything opens the driver
    main()
