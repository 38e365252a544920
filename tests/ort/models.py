"""The fixture models: unpacking, their recorded traces, and the state that a decoder carries from step to step."""

from __future__ import annotations

import dataclasses
import pathlib
import tarfile

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

import harness

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "models" / "fixtures"
NAMES = (
    "llama-tiny-genai-int4-cpu",
    "llama-tiny-genai-int4-cuda",
    "qwen3-tiny-genai-int4-cpu",
    "qwen35-tiny-genai-fp16-cuda",
    "qwen35-tiny-genai-fp32-cpu",
    "qwen35-tiny-genai-int4-cpu",
    "qwen35-tiny-genai-int4-cuda",
    "qwen35-tiny-genai-int4-cuda-blocksize128",
    "qwen35-tiny-genai-int4-cuda-gdn",
    "qwen35text-tiny-mobius-cuda-f16",
)

# Two implementations of an f32 graph each stay within 1e-5 of the maximum of the exact result (measured for ORT against
# transformers: 4.6e-6), so within 2e-5 of each other. f16 graphs round between nodes: the logits of each stay within 1%
# of the maximum of the exact ones (measured for ORT: 0.993%). Single elements of deep states scatter more (measured for
# ORT against the exact model: 1.13% of the maximum in one key of 576), so states get 1% in relative L2 and 2% an element.
F32_EXACT, F16_EXACT, F16_STATE_ELEMENT = 1e-5, 1e-2, 2e-2
# accuracy_level 4 quantises activations to int8: 1.5e-2 in relative L2 of a token's logits, so twice that between two
# implementations that round differently.
LEVEL_4_L2 = 1.5e-2


def unpack(name: str, folder: pathlib.Path) -> pathlib.Path:
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@dataclasses.dataclass
class Fixture:
    """One unpacked model."""

    name: str
    folder: pathlib.Path

    def __post_init__(self):
        with np.load(self.folder / "trace.npz") as archive:
            trace = {key: archive[key] for key in archive}
        self.steps: list[tuple[dict, dict]] = []
        while f"step{len(self.steps)}/out/logits" in trace:
            head = f"step{len(self.steps)}/"
            both = ({}, {})
            for key, value in trace.items():
                if key.startswith(head):
                    side, tensor = key[len(head) :].split("/", 1)
                    both[side == "out"][tensor] = value
            self.steps.append(both)

    @property
    def path(self) -> str:
        return str(self.folder / "model.onnx")

    @property
    def level_4(self) -> bool:
        """Whether the graph asks for int8 activations."""
        return "int4-cpu" in self.name

    @property
    def half(self) -> bool:
        """Whether the graph computes in f16."""
        return self.name.endswith("f16") or "-cuda" in self.name

    @property
    def relative(self) -> float:
        """Share of the maximum between two implementations of this model."""
        return 2 * (F16_EXACT if self.half else F32_EXACT)

    def exact_twin(self) -> bytes:
        """The same weights and graph in f32 throughout, without accuracy_level: bytes that hold the weights."""
        model = onnx.load(self.path)
        del model.graph.value_info[:]
        for function in model.functions:
            del function.value_info[:]
        for value in [*model.graph.input, *model.graph.output]:
            if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
        for tensor in model.graph.initializer:
            widen(tensor)
        for node in [*model.graph.node, *(n for f in model.functions for n in f.node)]:
            kept = [a for a in node.attribute if a.name != "accuracy_level"]
            for attribute in kept:
                if attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                    attribute.i = TensorProto.FLOAT
                if attribute.type == onnx.AttributeProto.TENSOR:
                    widen(attribute.t)
            del node.attribute[:]
            node.attribute.extend(kept)
        return model.SerializeToString()


def widen(tensor: TensorProto) -> None:
    """f16 to f32 in place; other types stay."""
    if tensor.data_type == TensorProto.FLOAT16:
        values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def state_pairs(session: ort.InferenceSession) -> dict[str, str]:
    """past input -> present output."""
    outputs = {o.name for o in session.get_outputs()}
    pairs = {}
    for given in session.get_inputs():
        for old in ("past_key_values.", "past."):
            present = given.name.replace(old, "present.", 1)
            if given.name.startswith(old) and present in outputs:
                pairs[given.name] = present
    assert pairs, "no states found"
    return pairs


def numpy_type(kind: str) -> np.dtype:
    return np.dtype({"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(int64)": "i8"}[kind])


class Decoder:
    """Feeds a session step by step. capacity = one shared past/present KV buffer of that many rows, None = growing."""

    def __init__(self, session: ort.InferenceSession, steps, batch: int = 1, capacity: int | None = None):
        self.session, self.batch, self.capacity, self.total = session, batch, capacity, 0
        self.pairs = state_pairs(session)
        self.inputs = {i.name: i for i in session.get_inputs()}
        self.outputs = {o.name: numpy_type(o.type) for o in session.get_outputs()}
        first = steps[0][0]
        self.state = {}
        for past in self.pairs:
            shape = [batch, *first[past].shape[1:]]
            if self.is_kv(past):
                shape[2] = capacity or 0
            self.state[past] = np.zeros(shape, first[past].dtype)

    @staticmethod
    def is_kv(name: str) -> bool:
        return name.endswith((".key", ".value"))

    def feeds(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        new = ids.shape[1]
        made = {"input_ids": ids, "attention_mask": np.ones((self.batch, self.total + new), np.int64)}
        if "position_ids" in self.inputs:
            positions = np.broadcast_to(np.arange(self.total, self.total + new), (self.batch, new))
            if len(self.inputs["position_ids"].shape) == 3:
                positions = np.broadcast_to(positions, (3, self.batch, new))
            made["position_ids"] = np.ascontiguousarray(positions)
        return made | self.state

    def step(self, ids: np.ndarray, shared: bool = False) -> dict[str, np.ndarray]:
        """One Run. shared: every state's past and present are one buffer (needs a capacity)."""
        feeds = self.feeds(np.ascontiguousarray(ids, np.int64))
        new = ids.shape[1]
        known, alias = {}, {}
        for past, present in self.pairs.items():
            shape = list(self.state[past].shape)
            if self.is_kv(past) and self.capacity is None:
                shape[2] += new
            known[present] = (tuple(shape), self.state[past].dtype)
            if shared:
                alias[present] = past
        for name, dtype in self.outputs.items():
            if name not in known:
                known[name] = None
        results = harness.run_bound(self.session, feeds, known, alias)
        for past, present in self.pairs.items():
            self.state[past] = results[present]
        self.total += new
        return results

    def trimmed(self, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Results with the unused rows of shared KV buffers cut off."""
        kv = {p for past, p in self.pairs.items() if self.is_kv(past)}
        return {n: v[:, :, : self.total] if n in kv else v for n, v in results.items()}


def assert_step(fixture: Fixture, got: dict, expected: dict, what: str, random: bool = False) -> None:
    """Compares one step's outputs with ORT CPU's. random: prompts that differ per run, see assert_rows."""
    assert set(got) == set(expected)
    for name, reference in expected.items():
        value, where = got[name], f"{fixture.name}, {what}, {name}"
        assert value.shape == reference.shape, f"{where}: shape {value.shape}, expected {reference.shape}"
        if name != "logits" and (fixture.level_4 or random):
            assert_whole(value, reference, 0.3 if fixture.level_4 else 0.1 if fixture.half else 1e-3, where)
        elif fixture.level_4:
            assert_rows(value, reference, 2 * LEVEL_4_L2, where)
        elif random:
            assert_rows(value, reference, fixture.relative, where, worst=0.7 if fixture.half else 1e-3)
        else:
            assert_exact(fixture, name, value, reference, 2, where)


def assert_rows(value, reference, median: float, where: str, worst: float = 0.7) -> None:
    """Relative L2 of each token's logits: the median token's, and no token that is another.

    These random-weight decoders amplify rounding in a few tokens: over random prompts ORT CPU's own f16 logits are off by
    1e-3 in the median row and up to 5e-2 in the worst, its int8 ones by 1.4e-2 and 0.27 (measured against f32). Rows of
    unrelated values are off by 1.4.
    """
    a, b = harness.as_float64(value), harness.as_float64(reference)
    assert np.isfinite(a).all(), f"{where}: not finite"
    if not a.size:
        return
    error = np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-12)
    assert np.median(error) <= median, f"{where}: median relative L2 {np.median(error):.2e}, allowed {median:.2e}"
    assert error.max() <= worst, f"{where}: relative L2 of a row {error.max():.2e}"


def assert_exact(fixture: Fixture, name: str, value, reference, times: int, where: str) -> None:
    """times = 1 against the exact model, 2 between two implementations that may each be off."""
    if not fixture.half:
        harness.assert_close(value, reference, harness.Tolerance(times * F32_EXACT), where)
    elif name == "logits":
        harness.assert_close(value, reference, harness.Tolerance(times * F16_EXACT), where)
    else:
        harness.assert_close(value, reference, harness.Tolerance(times * F16_STATE_ELEMENT), where)
        a, b = harness.as_float64(value), harness.as_float64(reference)
        error = np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30)
        assert error <= times * F16_EXACT, f"{where}: relative L2 {error:.2e}, allowed {times * F16_EXACT:.2e}"


def assert_whole(value, reference, bound: float, where: str) -> None:
    """Relative L2 of a whole state: for ORT CPU against f32 up to 0.028 in f16 and 0.16 with int8 activations."""
    a, b = harness.as_float64(value), harness.as_float64(reference)
    assert np.isfinite(a).all(), f"{where}: not finite"
    error = np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12)
    assert error <= bound, f"{where}: relative L2 {error:.2e}, allowed {bound:.2e}"
