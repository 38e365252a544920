"""Memory of a session on a model of half a gigabyte: weights are packed once and not held twice, not even on the way."""

import json
import pathlib
import subprocess
import sys

import onnx
import pytest

pytestmark = pytest.mark.cpu_only("resident memory of the packed weights")
ROOT = pathlib.Path(__file__).resolve().parents[2]
# For the process itself, python, numpy and onnxruntime included, beside the packed weights.
FACTOR, EXTRA = 1.15, 150e6


@pytest.fixture(scope="module", params=["0.8b", "moe-small"])
def large_model(request) -> pathlib.Path:
    """An int4 hybrid decoder of 0.8e9 parameters, generated once; with experts or without."""
    folder = ROOT / ".cache" / "models" / f"qwen35-{request.param}"
    done = folder / "done"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.models.qwen35", request.param, str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
        done.touch()
    return folder / "model.onnx"


def weight_bytes(path: pathlib.Path) -> int:
    """Every initializer of the model, once."""
    graph = onnx.load(path, load_external_data=False).graph
    total = 0
    for tensor in graph.initializer:
        count = 1
        for d in tensor.dims:
            count *= d
        total += count * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return total


def test_resident_memory_of_a_large_model(ep_library, large_model):
    packed = weight_bytes(large_model)
    assert packed > 400e6, packed
    command = [sys.executable, str(pathlib.Path(__file__).with_name("memory_run.py")), ep_library, str(large_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    allowed = FACTOR * packed + EXTRA
    told = ", ".join(f"{key} {value / 1e6:.0f} MB" for key, value in found.items())
    print(f"weights {packed / 1e6:.0f} MB, {told}")
    assert found["final"] <= allowed, f"allowed {allowed / 1e6:.0f} MB; {told}"
    assert found["peak"] <= allowed, f"allowed {allowed / 1e6:.0f} MB; {told}"
