"""Streams an ONNX model to a folder: the graph in memory, every initializer straight to external data.

Peak memory is one chunk of one initializer, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper

FLOAT, FLOAT16, UINT8, INT32, INT64 = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.UINT8,
    TensorProto.INT32,
    TensorProto.INT64,
)
MICROSOFT = "com.microsoft"
DATA_FILE = "model.onnx.data"
# Small tensors on a SIMD register's boundary, large ones on a page's, so that the mapped file can be used as is.
SMALL_ALIGNMENT, PAGE, LARGE = 64, 4096, 64 * 1024

Shape = Sequence[int | str]


def numpy_dtype(dtype: int) -> np.dtype:
    """The numpy dtype of a TensorProto data type."""
    return helper.tensor_dtype_to_np_dtype(dtype)


@dataclass(frozen=True)
class Tensor:
    """An initializer whose bytes are made when they are written: `chunks()` yields arrays in row-major order."""

    dtype: int
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[np.ndarray]]

    @classmethod
    def of(cls, array: np.ndarray) -> Tensor:
        """A tensor that holds `array`."""
        array = np.asarray(array)
        return cls(helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, lambda: [array])

    @property
    def nbytes(self) -> int:
        """Bytes of the row-major data."""
        return int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize


class ModelWriter:
    """Builds one graph.

    With `folder` None nothing is written and initializers keep only dtype and shape: enough to take an inventory.
    """

    def __init__(self, folder: Path | None, producer: str = "nxrt-ep test models", opset: int = 22) -> None:
        self._folder = folder
        self._producer, self._opset = producer, opset
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._constants: dict[str, str] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._values: list[onnx.ValueInfoProto] = []
        self._data: BinaryIO | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._data = open(folder / DATA_FILE, "wb")

    def input(self, name: str, dtype: int, shape: Shape) -> str:
        """Declare a graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: Shape) -> str:
        """Declare a graph output; some node must write `name`."""
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def initializer(self, name: str, tensor: Tensor | np.ndarray) -> str:
        """Write an initializer's bytes to the data file. A name may be written once."""
        if name in self._initializers:
            raise ValueError(f"initializer '{name}' is written twice")
        if isinstance(tensor, np.ndarray):
            tensor = Tensor.of(tensor)
        proto = TensorProto(name=name, data_type=tensor.dtype, dims=tensor.shape)
        proto.data_location = TensorProto.EXTERNAL
        offset = self._write(name, tensor) if self._data else 0
        for key, value in (("location", DATA_FILE), ("offset", offset), ("length", tensor.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        self._initializers[name] = proto
        return name

    def has_initializer(self, name: str) -> bool:
        """Whether `name` has been written."""
        return name in self._initializers

    def constant(self, array: np.ndarray) -> str:
        """A Constant node, one for each distinct value, named as onnxruntime-genai's exporter names it."""
        kind = helper.tensor_dtype_to_string(helper.np_dtype_to_tensor_dtype(array.dtype)).split(".")[-1]
        name = f"/model/constants/{kind}/{array.tolist()}"
        if name not in self._constants:
            self._constants[name] = name
            value = onnx.numpy_helper.from_array(array, name)
            self.node(
                "Constant",
                [],
                [(name, value.data_type, array.shape)],
                name.replace("constants", "constant_nodes"),
                value=value,
            )
        return name

    def int64s(self, *values: int) -> str:
        """A constant one-dimensional int64 tensor."""
        return self.constant(np.array(values, dtype=np.int64))

    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[tuple[str, int, Shape] | str],
        name: str,
        domain: str = "",
        **attributes: object,
    ) -> list[str]:
        """Append a node. An output is (name, dtype, shape), the name of a graph output, or "" (not used)."""
        names = []
        for value in outputs:
            if isinstance(value, tuple):
                self._values.append(helper.make_tensor_value_info(*value))
                names.append(value[0])
            else:
                names.append(value)
        self._nodes.append(helper.make_node(op_type, list(inputs), names, name=name, domain=domain, **attributes))
        return names

    def op(
        self,
        op_type: str,
        inputs: Sequence[str],
        name: str,
        dtype: int,
        shape: Shape,
        domain: str = "",
        **attributes: object,
    ) -> str:
        """Append a node with the one output `<name>/output_0` and return that output's name."""
        return self.node(op_type, inputs, [(f"{name}/output_0", dtype, shape)], name, domain, **attributes)[0]

    def finish(self) -> onnx.ModelProto:
        """Close the data file, write model.onnx beside it, and return the model without its weights."""
        graph = helper.make_graph(
            self._nodes,
            "main_graph",
            self._inputs,
            self._outputs,
            list(self._initializers.values()),
            value_info=self._values,
        )
        model = helper.make_model(
            graph,
            producer_name=self._producer,
            ir_version=10,
            opset_imports=[helper.make_opsetid("", self._opset), helper.make_opsetid(MICROSOFT, 1)],
        )
        if self._data and self._folder:
            self._data.close()
            self._data = None
            (self._folder / "model.onnx").write_bytes(model.SerializeToString())
        return model

    def _write(self, name: str, tensor: Tensor) -> int:
        assert self._data is not None
        alignment = PAGE if tensor.nbytes >= LARGE else SMALL_ALIGNMENT
        offset = -(-self._data.tell() // alignment) * alignment
        self._data.seek(offset)
        for chunk in tensor.chunks():
            self._data.write(memoryview(np.ascontiguousarray(chunk)).cast("B"))
        written = self._data.tell() - offset
        if written != tensor.nbytes:
            raise ValueError(
                f"initializer '{name}': got {written} bytes, expected {tensor.nbytes} for shape {tensor.shape}"
            )
        return offset
