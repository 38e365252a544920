"""Op inventories: what a graph is made of, in a form that two graphs can be compared by.

`python -m tests.models.inventory MODEL.onnx` prints one as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import onnx
from onnx import AttributeProto, TensorProto, helper

from .writer import MICROSOFT

Inventory = dict[str, object]


def inventory(model: onnx.ModelProto) -> Inventory:
    """Per op: how many, which attribute values, which kind of value each input slot reads, which outputs are used.

    Graph inputs and outputs are counted by name (layer number left out), type and shape.
    Kinds: `graph_input:<dtype>`, `init<shape>:<dtype>`, `Constant:<dtype>`, `dyn:<dtype>`, ABSENT (an empty name).
    """
    kinds = _kinds(model.graph)
    ops: dict[str, dict] = {}
    for node in model.graph.node:
        domain = MICROSOFT if node.domain == MICROSOFT else "ai.onnx"
        op = ops.setdefault(
            f"{domain}::{node.op_type}",
            {"count": 0, "attributes": defaultdict(Counter), "inputs": defaultdict(Counter), "outputs": Counter()},
        )
        op["count"] += 1
        for attribute in node.attribute:
            op["attributes"][attribute.name][_attribute(attribute)] += 1
        for slot, name in enumerate(node.input):
            op["inputs"][str(slot)][kinds[name] if name else "ABSENT"] += 1
        op["outputs"]["".join("1" if name else "0" for name in node.output)] += 1
    initializers = Counter(_dtype(tensor.data_type) for tensor in model.graph.initializer)
    return json.loads(
        json.dumps(
            {
                "ops": ops,
                "inputs": Counter(map(_signature, model.graph.input)),
                "outputs": Counter(map(_signature, model.graph.output)),
                "initializers": initializers,
            },
            sort_keys=True,
        )
    )


def differences(got: Inventory, expected: Inventory) -> list[str]:
    """One line for each leaf that differs, empty when the two are the same."""
    return list(_walk("", got, expected))


def _walk(path: str, got: object, expected: object):
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in sorted(got.keys() | expected.keys()):
            yield from _walk(f"{path}/{key}", got.get(key, "nothing"), expected.get(key, "nothing"))
    elif got != expected:
        yield f"{path}: got {got}, expected {expected}"


def _kinds(graph: onnx.GraphProto) -> dict[str, str]:
    kinds = {
        value.name: f"dyn:{_dtype(value.type.tensor_type.elem_type)}" for value in [*graph.value_info, *graph.output]
    }
    kinds |= {value.name: f"graph_input:{_dtype(value.type.tensor_type.elem_type)}" for value in graph.input}
    kinds |= {tensor.name: f"init{list(tensor.dims)}:{_dtype(tensor.data_type)}" for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            kinds[node.output[0]] = f"Constant:{_dtype(node.attribute[0].t.data_type)}"
    return kinds


def _attribute(attribute: AttributeProto) -> str:
    if attribute.type == AttributeProto.TENSOR:
        return f"<tensor {_dtype(attribute.t.data_type)} {list(attribute.t.dims)}>"
    value = helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else f"{value:.6g}" if isinstance(value, float) else str(value)


def _dtype(dtype: int) -> str:
    return TensorProto.DataType.Name(dtype).lower()


def _signature(value: onnx.ValueInfoProto) -> str:
    """Name with its layer number left out, type and shape: states of all layers count as one."""
    tensor, name = value.type.tensor_type, re.sub(r"\.\d+\.", ".%d.", value.name)
    dims = ", ".join(str(dim.dim_param or dim.dim_value) for dim in tensor.shape.dim)
    return f"{name}: {_dtype(tensor.elem_type)}[{dims}]"


def main() -> None:
    """Print the inventory of a model file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=Path)
    print(
        json.dumps(inventory(onnx.load(parser.parse_args().model, load_external_data=False)), indent=1, sort_keys=True)
    )


if __name__ == "__main__":
    main()
