"""onnxruntime sessions with every input and output bound to memory of ours, so that Python is not what is measured."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

CPU = "CPUExecutionProvider"
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


def open_session(model: Path, provider: str, threads: int) -> ort.InferenceSession:
    """A session in which every node runs on `provider`; RuntimeError says where they ran otherwise."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(model, options, providers=[provider])
    record = session.get_provider_graph_assignment_info()
    elsewhere = [
        node.name or node.op_type for group in record if group.ep_name != provider for node in group.get_nodes()
    ]
    if elsewhere:
        raise RuntimeError(
            f"{model}: {len(elsewhere)} nodes do not run on {provider}, first: {', '.join(elsewhere[:5])}"
        )
    return session


def value(array: np.ndarray) -> ort.OrtValue:
    """A CPU OrtValue that holds a copy of `array`."""
    made = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type)
    made.update_inplace(np.ascontiguousarray(array))
    return made


def weight_bytes(model: Path) -> int:
    """Bytes of weights that one decode step reads: initializers of projections, norms and convolutions, each once.

    Gathers read one row and rotary tables one position, so these do not count.
    """
    graph = onnx.load(model, load_external_data=False).graph
    sizes = {
        tensor.name: int(np.prod(tensor.dims)) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in graph.initializer
    }
    skipped = {
        "Gather",
        "GatherBlockQuantized",
        "Reshape",
        "GroupQueryAttention",
        "MRotaryEmbedding",
        "RotaryEmbedding",
    }
    read = {name for node in graph.node if node.op_type not in skipped for name in node.input if name in sizes}
    return sum(sizes[name] for name in read)


@dataclass
class Pass:
    """Seconds of one pass and the logits of its last token."""

    seconds: float
    logits: np.ndarray


class DecoderSession:
    """One decoder with past and present in one buffer each, as onnxruntime-genai drives it (batch 1)."""

    def __init__(self, folder: Path, provider: str, threads: int, capacity: int) -> None:
        self._session = open_session(folder / "model.onnx", provider, threads)
        decoder = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
        sizes = {"batch_size": 1, "past_sequence_length": capacity, "kv_cache_dim": decoder["head_size"]}
        inputs = self._session.get_inputs()
        self._state = {
            item.name: value(
                np.zeros([sizes[dim] if isinstance(dim, str) else dim for dim in item.shape], _DTYPES[item.type])
            )
            for item in inputs
            if item.name.startswith("past")
        }
        self._has_positions = any(item.name == "position_ids" for item in inputs)
        logits = self._session.get_outputs()[0]
        self.vocab, self._dtype = logits.shape[-1], _DTYPES[logits.type]
        self._logits: dict[int, ort.OrtValue] = {}
        self._length = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent and convolution state that every step reads."""
        return sum(state.tensor_size_in_bytes() for name, state in self._state.items() if name.startswith("past."))

    def reset(self) -> None:
        """Forget everything: empty cache, zero states."""
        for state in self._state.values():
            state.update_inplace(np.zeros(state.shape(), self._dtype))
        self._length = 0

    def run(self, chunks: list[np.ndarray]) -> Pass:
        """Feed token chunks [S] one after another, continuing from the current state; only the runs are timed."""
        bindings = [self._bind(ids) for ids in chunks]
        start = time.perf_counter()
        for binding in bindings:
            self._session.run_with_iobinding(binding)
        seconds = time.perf_counter() - start
        return Pass(seconds, self._logits[len(chunks[-1])].numpy()[0, -1].astype(np.float64))

    def _bind(self, ids: np.ndarray) -> ort.IOBinding:
        binding, count = self._session.io_binding(), len(ids)
        positions = np.arange(self._length, self._length + count)
        self._length += count
        binding.bind_ortvalue_input("input_ids", value(ids[None].astype(np.int64)))
        binding.bind_ortvalue_input("attention_mask", value(np.ones((1, self._length), np.int64)))
        if self._has_positions:
            binding.bind_ortvalue_input(
                "position_ids", value(np.broadcast_to(positions, (3, 1, count)).astype(np.int64))
            )
        if count not in self._logits:
            self._logits[count] = value(np.zeros((1, count, self.vocab), self._dtype))
        binding.bind_ortvalue_output("logits", self._logits[count])
        for name, state in self._state.items():
            binding.bind_ortvalue_input(name, state)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present").replace("past.", "present."), state)
        return binding


class MatmulSession:
    """A model of independent MatMulNBits nodes x_i [M, K] -> y_i [M, N]."""

    def __init__(self, model: Path, provider: str, threads: int, inputs: list[np.ndarray], columns: int) -> None:
        self._session = open_session(model, provider, threads)
        self._binding = self._session.io_binding()
        self._outputs = [value(np.zeros((len(x), columns), x.dtype)) for x in inputs]
        for i, (x, y) in enumerate(zip(inputs, self._outputs, strict=True)):
            self._binding.bind_ortvalue_input(f"x{i}", value(x))
            self._binding.bind_ortvalue_output(f"y{i}", y)

    def run(self) -> float:
        """Seconds of one pass over all nodes."""
        start = time.perf_counter()
        self._session.run_with_iobinding(self._binding)
        return time.perf_counter() - start

    def outputs(self) -> list[np.ndarray]:
        """Every node's output of the last pass."""
        return [output.numpy() for output in self._outputs]
