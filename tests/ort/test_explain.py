"""`explain` against ORT's own record of what it assigned, and its answers to damage."""

import json
import subprocess
import sys
from collections import Counter

import nxrt_ep_cpu
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, parser

import harness
import models

OFF = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
ON = ort.GraphOptimizationLevel.ORT_ENABLE_ALL

# One op that no EP but ORT's CPU EP has between two parts that are claimed, and one at the end.
SPLIT = """
    <ir_version: 10, opset_import: ["": 22]>
    main (float[b, 8] x, float[b, 8] z) => (float[b, 8] y, float[b, 8] e) {
        a = Neg(x)  half = Constant <value_float = 0.5> ()  m = Mul(a, half)
        d = Det(square)  square = Constant <value = float[1, 2, 2] {1.0, 2.0, 3.0, 4.0}> ()
        h = Celu(m)  s = Add(h, z)  t = Sigmoid(s)  y = Add(t, d)
        e = Celu(z)
    }
"""
BODIES = """
    <ir_version: 10, opset_import: ["": 22]>
    main (float[b, 4] x, bool c) => (float[b, 4] y) {
        one = Constant <value_float = 1.0> ()  w = Mul(x, x)
        v = If (c) <
            then_branch = t () => (float[b, 4] p) { p = Add(w, one) },
            else_branch = e () => (float[b, 4] q) { r = Celu(w)  q = Neg(r) }
        >
        y = Neg(v)
    }
"""
FUNCTIONS = """
    <ir_version: 10, opset_import: ["": 22, "local": 1]>
    main (float[b, 4] x) => (float[b, 4] y) { h = local.Outer <axis = 1> (x)  y = Neg(h) }
    <domain: "local", opset_import: ["": 22, "local": 1]>
    Outer <axis: int = 0> (a) => (o) { t = Softmax <axis: int = @axis> (a)  o = local.Inner(t) }
    <domain: "local", opset_import: ["": 22]>
    Inner (a) => (o) { m = Celu(a)  o = Neg(m) }
"""


def record(model: str, level) -> dict[str, Counter]:
    """EP name -> how often each op was assigned to it."""
    session = harness.ep_session(model, fallback=True, level=level)
    return {ep: Counter(ops) for ep, ops in harness.placement(session).items()}


def explained(model: str) -> tuple[Counter, Counter, int]:
    """Ops claimed, ops declined, number of groups."""
    said = nxrt_ep_cpu.explain(model)
    claimed = Counter(node["op"] for group in said["groups"] for node in group)
    declined = Counter(node["op"] for node in said["declined"])
    assert said["claimed"] == claimed.total() and said["nodes"] == claimed.total() + declined.total()
    return claimed, declined, len(said["groups"])


def check_same(model: str) -> None:
    """`explain` names exactly what ORT assigns when it does not rewrite the graph."""
    claimed, declined, groups = explained(model)
    session = harness.ep_session(model, fallback=True, level=OFF)
    found = {ep: Counter(ops) for ep, ops in harness.placement(session).items()}
    assert claimed == found.pop(harness.EP_NAME, Counter())
    assert declined == sum(found.values(), Counter())
    assert groups == harness.fused_groups(session)


@pytest.mark.parametrize("name", models.NAMES)
def test_fixtures_like_ort(name, tmp_path_factory):
    path = str(models.unpack(name, tmp_path_factory.mktemp("explain")) / "model.onnx")
    check_same(path)
    # With its optimisers on ORT makes other nodes, but as many of them are left to it: none.
    _, declined, groups = explained(path)
    optimised = record(path, ON)
    assert not declined and groups == 1
    assert set(optimised) == {harness.EP_NAME}


@pytest.mark.parametrize("text", [SPLIT, BODIES, FUNCTIONS], ids=["split", "bodies", "functions"])
def test_partly_claimed_like_ort(text, tmp_path):
    path = str(tmp_path / "model.onnx")
    onnx.save(parser.parse_model(text), path)
    check_same(path)
    _, declined, _ = explained(path)
    left = sum((ops for ep, ops in record(path, ON).items() if ep != harness.EP_NAME), Counter())
    # ORT folds what is constant before it asks.
    assert left <= declined and "ai.onnx::Celu" in left
