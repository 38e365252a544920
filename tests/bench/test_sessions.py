"""What the benchmark times is the real thing: stepwise runs with states in place give the logits of one whole run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.bench.sessions import CPU, DecoderSession, MatmulSession, open_session, weight_bytes
from tests.models import dense, qwen35, single_op


@pytest.mark.parametrize("family", [dense, qwen35])
def test_prefill_then_steps_equal_one_prefill(tmp_path: Path, family) -> None:
    family.generate(family.SIZES["tiny"], tmp_path)
    session = DecoderSession(tmp_path, CPU, 2, 24)
    ids = np.random.default_rng(5).integers(0, session.vocab, 15)
    whole = session.run([ids]).logits
    session.reset()
    session.run([ids[:9]])
    steps = session.run([ids[i : i + 1] for i in range(9, 15)]).logits
    assert np.abs(steps - whole).max() < 1.5e-2 * np.abs(whole).max()
    session.reset()
    assert np.abs(session.run([ids[9:]]).logits - whole).max() > 1.5e-2 * np.abs(whole).max()


def test_matmul_copies_have_weights_of_their_own(tmp_path: Path) -> None:
    single_op.matmul_nbits(64, 96, tmp_path, copies=2)
    x = np.ones((1, 96), np.float32)
    session = MatmulSession(tmp_path / "model.onnx", CPU, 1, [x, x], 64)
    assert session.run() > 0
    first, second = session.outputs()
    assert np.abs(first).max() > 0
    assert not np.array_equal(first, second)


def test_weight_bytes_counts_the_shared_matrix_once_and_no_tables(tmp_path: Path) -> None:
    single_op.matmul_nbits(64, 96, tmp_path / "one", copies=2)
    assert weight_bytes(tmp_path / "one/model.onnx") == 2 * (64 * 96 // 2 + 64 * 3 * 4)
    dense.generate(dense.SIZES["tiny"], tmp_path / "dense")
    config = dense.SIZES["tiny"]
    per_layer = [(256, 128), (128, 128), (256, 128), (256, 128), (128, 256)]
    matrices = config.layers * per_layer + [(config.vocab, config.hidden)]
    expected = sum(n * k // 2 + n * k // 32 * 4 for n, k in matrices) + (2 * config.layers + 1) * config.hidden * 4
    assert weight_bytes(tmp_path / "dense/model.onnx") == expected


def test_a_node_elsewhere_is_an_error(tmp_path: Path) -> None:
    single_op.matmul_nbits(64, 96, tmp_path)
    with pytest.raises((RuntimeError, ValueError), match="NoSuchExecutionProvider"):
        open_session(tmp_path / "model.onnx", "NoSuchExecutionProvider", 1)
