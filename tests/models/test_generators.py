"""The generated graphs are the exporter's: their inventories equal those taken from real exports, and they run."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.models import dense, qwen35
from tests.models.inventory import differences, inventory
from tests.models.weights import RandomWeights
from tests.models.writer import FLOAT16

CUDA = {"io_dtype": FLOAT16, "accuracy_level": None}
EXPORTS = {
    "llama-tiny-genai-int4-cpu": (dense, dense.SIZES["tiny"]),
    "llama-tiny-genai-int4-cuda": (dense, replace(dense.SIZES["tiny"], **CUDA)),
    "qwen3-tiny-genai-int4-cpu": (dense, dense.SIZES["tiny-qk-norm"]),
    "smollm2-135m-genai-int4-cpu": (dense, dense.SIZES["135m"]),
    "qwen35-tiny-genai-int4-cpu": (qwen35, qwen35.SIZES["tiny"]),
    "qwen35-tiny-genai-int4-cuda": (qwen35, replace(qwen35.SIZES["tiny"], **CUDA)),
    "qwen35moe-tiny-genai-int4-cpu": (qwen35, qwen35.SIZES["moe-tiny"]),
    "qwen35moe-tiny-genai-int4-cuda": (qwen35, replace(qwen35.SIZES["moe-tiny"], **CUDA)),
    "qwen35-0.8b-genai-int4-cpu": (qwen35, qwen35.SIZES["0.8b"]),
}


def exported(name: str) -> dict:
    """The inventory of a real export, as exported (before ORT optimises it)."""
    return json.loads((Path(__file__).parent / "inventories" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", EXPORTS)
def test_inventory_equals_the_real_export(name: str) -> None:
    family, config = EXPORTS[name]
    assert differences(inventory(family.build(config, RandomWeights(config.io_dtype), None)), exported(name)) == []


def test_inventory_sees_a_changed_attribute_input_and_count() -> None:
    config = dense.SIZES["tiny"]
    model = dense.build(config, RandomWeights(config.io_dtype), None)
    norm = next(node for node in model.graph.node if node.op_type == "SkipSimplifiedLayerNormalization")
    norm.attribute[0].f = 1e-3
    attention = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    attention.input[7] = ""
    model.graph.node.remove(next(node for node in model.graph.node if node.op_type == "Sigmoid"))
    found = "\n".join(differences(inventory(model), exported("llama-tiny-genai-int4-cpu")))
    for expected in (
        "attributes/epsilon/0.001",
        "GroupQueryAttention/inputs/7/ABSENT",
        "Sigmoid/count: got 3, expected 4",
    ):
        assert expected in found


@pytest.mark.parametrize(
    ("family", "size"), [(dense, "tiny"), (dense, "tiny-qk-norm"), (qwen35, "tiny"), (qwen35, "moe-tiny")]
)
@pytest.mark.parametrize("changes", [{}, CUDA], ids=["cpu", "cuda"])
def test_tiny_model_runs_and_its_logits_are_sane(tmp_path: Path, family, size: str, changes: dict) -> None:
    config = replace(family.SIZES[size], **changes)
    family.generate(config, tmp_path, seed=3)
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    length = 9
    feeds = {
        value.name: np.zeros(
            [
                {"past_sequence_length": 0, "kv_cache_dim": config.head_size}.get(dim, 1)
                if isinstance(dim, str)
                else dim
                for dim in value.shape
            ],
            np.float16 if "float16" in value.type else np.float32,
        )
        for value in session.get_inputs()
    }
    feeds["input_ids"] = np.arange(3, 3 + length, dtype=np.int64)[None]
    feeds["attention_mask"] = np.ones((1, length), np.int64)
    if "position_ids" in feeds:
        feeds["position_ids"] = np.broadcast_to(np.arange(length), (3, 1, length)).astype(np.int64)
    logits = session.run(["logits"], feeds)[0].astype(np.float64)
    assert logits.shape == (1, length, config.vocab)
    assert np.isfinite(logits).all()
    assert 0.05 < logits.std() < 20
    assert len(set(logits[0].argmax(-1))) > 1


def test_external_data_is_aligned_and_does_not_overlap(tmp_path: Path) -> None:
    qwen35.generate(qwen35.SIZES["tiny"], tmp_path)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    spans = []
    for tensor in model.graph.initializer:
        entry = {item.key: item.value for item in tensor.external_data}
        spans.append((int(entry["offset"]), int(entry["length"])))
        assert int(entry["offset"]) % 64 == 0
    spans.sort()
    assert all(start + length <= after for (start, length), (after, _) in pairwise(spans))
    assert sum(spans[-1]) == (tmp_path / "model.onnx.data").stat().st_size
