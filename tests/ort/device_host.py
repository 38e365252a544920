"""What the cases of test_device_memory.py share: the EP's counts, sessions, models, device values."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

EP = "DeviceTestExecutionProvider"
VENDOR = 0xBEEF
MINOR = int(ort.__version__.split(".")[1])
LIBRARY = sys.argv[1] if len(sys.argv) > 1 else ""


def report() -> dict[str, int]:
    library = ctypes.CDLL(LIBRARY)
    library.device_ep_report.restype = ctypes.c_void_p
    library.device_ep_free.argtypes = [ctypes.c_void_p]
    text = library.device_ep_report()
    counts = json.loads(ctypes.string_at(text))
    library.device_ep_free(text)
    assert "bad_free" not in counts, counts
    return counts


def reset() -> None:
    ctypes.CDLL(LIBRARY).device_ep_reset()


def register(name: str = "device", library: str | None = None) -> None:
    ort.register_execution_provider_library(name, library or LIBRARY)


def devices(ep: str = EP):
    return [device for device in ort.get_ep_devices() if device.ep_name == ep]


def session(model, options=None, *, fallback=False, config=None, ep=EP) -> ort.InferenceSession:
    """A session whose claimable nodes are on the EP under test; no fallback to ORT's CPU EP unless asked for."""
    so = ort.SessionOptions()
    so.log_severity_level = 4
    for key, value in (config or {}).items():
        so.add_session_config_entry(key, value)
    if not fallback:
        so.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    so.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    so.add_provider_for_devices(devices(ep)[:1], options or {})
    if not isinstance(model, (str, bytes)):
        model = model.SerializeToString()
    return ort.InferenceSession(model, so)


def placement(s: ort.InferenceSession) -> dict[str, set[str]]:
    """EP name -> op types, without the Memcpy nodes that ORT adds."""
    placed: dict[str, set[str]] = {}
    for subgraph in s.get_provider_graph_assignment_info():
        ops = {node.op_type for node in subgraph.get_nodes()}
        placed.setdefault(subgraph.ep_name, set()).update(ops - {"MemcpyFromHost", "MemcpyToHost"})
    return placed


def model_of(nodes, inputs, outputs, initializers=(), functions=(), shape=("N", 3)) -> onnx.ModelProto:
    info = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)  # noqa: E731
    graph = helper.make_graph(
        [helper.make_node(op, ins, outs, name=f"{op}_{outs[0]}", **attrs) for op, ins, outs, attrs in nodes],
        "g",
        [info(name) for name in inputs],
        [info(name) for name in outputs],
        initializer=list(initializers),
    )
    domains = {function.domain for function in functions}
    opsets = [helper.make_opsetid("", 21), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))


def chain() -> onnx.ModelProto:
    """d = (a + b) * a"""
    return model_of([("Add", ["a", "b"], ["c"], {}), ("Mul", ["c", "a"], ["d"], {})], ["a", "b"], ["d"])


def feeds(n: int = 2, names: str = "ab") -> dict[str, np.ndarray]:
    rng = np.random.default_rng()
    return {name: rng.standard_normal((n, 3)).astype(np.float32) for name in names}


def check(got: np.ndarray, want: np.ndarray) -> None:
    """One rounding a float32 operation, at most four of them."""
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def on_device(array: np.ndarray) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array, "gpu", 0, VENDOR)


def empty_on_device(shape) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, "gpu", 0, VENDOR)


@contextlib.contextmanager
def raises(kind: str, *texts: str):
    try:
        yield
    except Exception as error:  # noqa: BLE001
        assert type(error).__name__ == kind, f"{type(error).__name__}, not {kind}: {error}"
        for text in texts:
            assert text in str(error), f"no {text!r} in: {error}"
    else:
        raise AssertionError(f"no {kind} was raised")
