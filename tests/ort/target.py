"""The execution provider under test: which it is, where its inputs and outputs lie, and what its devices cannot do.

conftest.py fills STATE once, from the command line.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
from types import ModuleType

import onnx

from tests.fake_cuda.control import FakeCuda


@dataclasses.dataclass(frozen=True)
class Ep:
    """An execution provider and its wheel."""

    name: str
    module: str
    project: str

    @property
    def library(self) -> str:
        return f"lib{self.module}.so"


EPS = {
    "cpu": Ep("NxrtCpuExecutionProvider", "nxrt_ep_cpu", "./python/cpu"),
    "cuda": Ep("NxrtCudaExecutionProvider", "nxrt_ep_cuda", "./python/cuda"),
}


@dataclasses.dataclass
class RunState:
    """Set once by conftest.py from the command line."""

    ep: Ep = EPS["cpu"]
    io: str = "host"
    oracles_only: bool = False
    library: str | None = None
    fake: FakeCuda | None = None


STATE = RunState()


def on_cuda() -> bool:
    return STATE.ep is EPS["cuda"]


def package() -> ModuleType:
    """The Python package of the wheel under test."""
    try:
        return importlib.import_module(STATE.ep.module)
    except ImportError as error:
        raise AssertionError(
            f"{STATE.ep.module} cannot be imported ({error}): install {STATE.ep.project}, or put the folder that "
            "`make cuda-emulated` fills on PYTHONPATH"
        ) from error


def load_fake_driver(path: str) -> FakeCuda:
    """Makes the library at `path` the CUDA driver of this process and of those that it starts."""
    path = pathlib.Path(path).resolve()
    others = os.environ.get("LD_LIBRARY_PATH")
    # In cudart lies what onnxruntime-genai's CUDA library links.
    folders = [str(path.parent), str(path.parent / "cudart"), *([others] if others else [])]
    os.environ["LD_LIBRARY_PATH"] = ":".join(folders)
    # dlopen("libcuda.so.1") finds a library of this name that is loaded already.
    return FakeCuda(path)


# Inputs whose values decide the shapes of outputs. A GPU's captured work cannot wait for tensor data, so ep-cuda takes
# such a node only where the value is constant or follows from the inputs' shapes.
SHAPE_INPUTS = {
    "Compress": (1,), "ConstantOfShape": (0,), "Expand": (1,), "GroupQueryAttention": (6,), "NonZero": (0,),
    "OneHot": (1,), "Pad": (1, 3), "Range": (0, 1, 2), "Reshape": (1,), "Slice": (1, 2, 3, 4), "Split": (1,),
    "Squeeze": (1,), "Tile": (1,), "TopK": (1,), "Unsqueeze": (1,),
} | {f"Reduce{kind}": (1,) for kind in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()}  # fmt: skip


def fed_shapes(proto: onnx.ModelProto, feeds) -> list[str]:
    """Fed inputs that decide a shape: with them, ep-cuda declines the node."""
    found = []
    for node in proto.graph.node:
        slots = SHAPE_INPUTS.get(node.op_type, ())
        found += [name for slot, name in enumerate(node.input) if slot in slots and name in feeds]
    return sorted(set(found))


def pinned(proto: onnx.ModelProto, feeds) -> tuple[onnx.ModelProto, dict]:
    """The model with such inputs as constants, and what is left to feed."""
    names = fed_shapes(proto, feeds)
    if not names:
        return proto, feeds
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    kept = [value for value in changed.graph.input if value.name not in names]
    del changed.graph.input[:]
    changed.graph.input.extend(kept)
    changed.graph.initializer.extend(onnx.numpy_helper.from_array(feeds[name], name) for name in names)
    return changed, {name: value for name, value in feeds.items() if name not in names}
