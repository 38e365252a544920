"""`explain` against ORT's own record of what it assigned, and its answers to damage."""

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, parser

import harness
import models
from target import STATE, package

OFF = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
ON = ort.GraphOptimizationLevel.ORT_ENABLE_ALL

# Hardmax and Det stand for ops that only ORT's CPU EP has.
SPLIT = """
    <ir_version: 10, opset_import: ["": 22]>
    main (float[b, 8] x, float[b, 8] z) => (float[b, 8] y, float[b, 8] e) {
        a = Neg(x)  half = Constant <value_float = 0.5> ()  m = Mul(a, half)
        d = Det(square)  square = Constant <value = float[1, 2, 2] {1.0, 2.0, 3.0, 4.0}> ()
        h = Hardmax(m)  s = Add(h, z)  t = Sigmoid(s)  y = Add(t, d)
        e = Hardmax(z)
    }
"""
BODIES = """
    <ir_version: 10, opset_import: ["": 22]>
    main (float[b, 4] x, bool c) => (float[b, 4] y) {
        one = Constant <value_float = 1.0> ()  w = Mul(x, x)
        v = If (c) <
            then_branch = t () => (float[b, 4] p) { p = Add(w, one) },
            else_branch = e () => (float[b, 4] q) { r = Hardmax(w)  q = Neg(r) }
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
    Inner (a) => (o) { m = Hardmax(a)  o = Neg(m) }
"""


def onnx_bytes(text: str) -> bytes:
    return parser.parse_model(text).SerializeToString()


def save(text: str, folder) -> str:
    path = folder / "model.onnx"
    path.write_bytes(onnx_bytes(text))
    return str(path)


def record(model: str, level) -> dict[str, Counter]:
    """EP name -> how often each op was assigned to it."""
    session = harness.ep_session(model, fallback=True, level=level)
    return {ep: Counter(ops) for ep, ops in harness.placement(session).items()}


def explained(model: str) -> tuple[Counter, Counter, int]:
    """Ops claimed, ops declined, number of groups."""
    said = package().explain(model)
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
    path = save(text, tmp_path)
    check_same(path)
    _, declined, _ = explained(path)
    left = sum((ops for ep, ops in record(path, ON).items() if ep != harness.EP_NAME), Counter())
    # ORT folds what is constant before it asks.
    assert left <= declined and "ai.onnx::Hardmax" in left


def test_bodies_give_their_nodes_a_reason(tmp_path):
    path = save(BODIES, tmp_path)
    reasons = {node["op"]: node["reason"] for node in package().explain(path)["declined"]}
    assert reasons["ai.onnx::If"] == "node '(unnamed)' (ai.onnx::If) has no kernel here"
    assert "in the body of node '(unnamed)' (ai.onnx::If)" in reasons["ai.onnx::Add"]


def test_weights_are_not_needed(tmp_path):
    """Neither onnxruntime nor the external data: the answer is the same without them."""
    folder = models.unpack("qwen3-tiny-genai-int4-cpu", tmp_path)
    whole = package().explain(folder / "model.onnx")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    alone = tmp_path / "alone"
    alone.mkdir()
    # Constants of shape arithmetic are small and are read.
    large = [t for t in model.graph.initializer if np.prod(t.dims) > 4096]
    assert large
    with open(folder / "model.onnx.data", "rb") as data:
        for tensor in model.graph.initializer:
            if np.prod(tensor.dims) > 4096:
                continue
            where = {entry.key: entry.value for entry in tensor.external_data}
            data.seek(int(where["offset"]))
            tensor.raw_data = data.read(int(where["length"]))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    (alone / "model.onnx").write_bytes(model.SerializeToString())
    code = "import json, sys; sys.modules['onnxruntime'] = None; "
    code += f"import {STATE.ep.module} as ep; print(json.dumps(ep.explain(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(alone / "model.onnx")], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["claimed"] == found["nodes"] > 0
    assert {**found, "model": ""} == {**whole, "model": ""}


def command(*arguments: str) -> subprocess.CompletedProcess:
    """Runs `python -m` with the package."""
    return subprocess.run(
        [sys.executable, "-m", STATE.ep.module, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_command_line(tmp_path):
    path = save(SPLIT, tmp_path)
    done = command("explain", path, "--json")
    assert done.returncode == 0 and json.loads(done.stdout) == package().explain(path)
    done = command("explain", path)
    assert done.returncode == 0
    assert f"{harness.EP_NAME} takes" in done.stdout and "(ai.onnx::Hardmax) has no kernel here" in done.stdout
    assert command("explain", path, "--option", "fusion=0").returncode == 0
    done = command("explain", path, "--option", "fusoin=0")
    assert done.returncode == 1 and "fusion" in done.stderr and not done.stdout
    assert command("explain", path, "--option", "fusion").returncode == 2
    assert command().returncode == 2


DAMAGE = {
    "missing": (None, "no such model"),
    "empty": (b"", "holds no graph"),
    "noise": (bytes(range(1, 200)), "is not an ONNX model"),
    "cut": (onnx_bytes(SPLIT)[:-20], "model:"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind, tmp_path):
    content, part = DAMAGE[kind]
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    done = command("explain", str(path))
    assert done.returncode == 1 and done.stderr.startswith("error: ") and part in done.stderr
    assert "Traceback" not in done.stderr


def test_external_data_outside_the_folder_is_refused(tmp_path):
    model = parser.parse_model(SPLIT)
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret")
    model.graph.initializer.append(tensor)
    (tmp_path / "secret").write_bytes(bytes(8))
    (tmp_path / "inside").mkdir()
    path = tmp_path / "inside" / "model.onnx"
    onnx.save(model, path)
    with pytest.raises(ValueError, match="'w'.*'../secret', which is not inside the model's folder"):
        package().explain(path)
