"""Writes opsets.txt, what the reader knows of every op: its since-versions and the types of its outputs.

    python abi/src/onnx/opsets.py > abi/src/onnx/opsets.txt

Taken from the newest supported onnxruntime, since its view decides what a node's since-version is. One line an op:

    [com.microsoft::]Name since-version... : output...

An output, as the newest version has it: `2` has the type of input 2, `2=` its shape too (found by trial, for ops of
the default domain), `#7` is of element type 7, `?` depends on more. Outputs past the last known one are left out.
"""

import collections

import onnx
import onnxruntime
from onnx import TensorProto, helper, shape_inference
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

CODES = {
    "tensor(float)": 1, "tensor(uint8)": 2, "tensor(int8)": 3, "tensor(int32)": 6, "tensor(int64)": 7,
    "tensor(string)": 8, "tensor(bool)": 9, "tensor(float16)": 10, "tensor(double)": 11,
}  # fmt: skip


def rules(schema) -> list[str]:
    """A rule for each output of one op schema."""
    allowed = {c.type_param_str: list(c.allowed_type_strs) for c in schema.type_constraints}
    first = {}
    for index, formal in enumerate(schema.inputs):
        first.setdefault(formal.typeStr, index)

    def rule(formal) -> str:
        kind = formal.typeStr
        types = allowed.get(kind, [kind])
        if len(types) == 1 and types[0] in CODES:
            return f"#{CODES[types[0]]}"
        return str(first[kind]) if kind in first else "?"

    found = [rule(formal) for formal in schema.outputs]
    if found and found[0] == "0" and schema.domain == "" and keeps_shape(schema):
        found[0] = "0="
    while found and found[-1] == "?":
        found.pop()
    return found


def keeps_shape(schema) -> bool:
    """Whether ONNX's shape inference gives output 0 the shape of input 0, whatever that is."""
    if schema.min_input != 1 or any(a.required for a in schema.attributes.values()):
        return False
    for shape in ([5], [2, 3], [4, 1, 3, 2]):
        graph = helper.make_graph(
            [helper.make_node(schema.name, ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_empty_tensor_value_info("y")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())])
        try:
            output = shape_inference.infer_shapes(model, strict_mode=True).graph.output[0].type.tensor_type
        except Exception:  # the op does not take such an input
            return False
        if not output.HasField("shape") or [d.dim_value for d in output.shape.dim] != shape:
            return False
    return True


schemas = collections.defaultdict(dict)
for each in get_all_operator_schema():
    if each.domain in ("", "com.microsoft"):
        schemas[(each.domain, each.name)][each.since_version] = each
print(f"# Made by opsets.py from onnxruntime {onnxruntime.__version__} and onnx {onnx.__version__}.")
for (domain, name), versions in sorted(schemas.items()):
    words = [f"{domain}::{name}" if domain else name, *map(str, sorted(versions))]
    outputs = rules(versions[max(versions)])
    print(*words, *([":", *outputs] if outputs else []))
