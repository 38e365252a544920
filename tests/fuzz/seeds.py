"""Writes small models for the fuzz target `model_reader` to start from: `python tests/fuzz/seeds.py FOLDER`."""

import sys
from pathlib import Path

import numpy as np
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

MODELS = {
    "function": """
        <ir_version: 10, opset_import: ["": 22, "local": 1]>
        main (float[b, 4] x, float[4] w) => (float[b, 4] y) { h = local.F <axis = 1> (x, w)  y = Relu(h) }
        <domain: "local", opset_import: ["": 22, "local": 1]>
        F <axis: int = 0> (a, s) => (o) { t = Softmax <axis: int = @axis> (a)  o = local.G(t, s) }
        <domain: "local", opset_import: ["": 22]>
        G (a, s) => (o) { o = Mul(a, s) }
    """,
    "branch": """
        <ir_version: 10, opset_import: ["": 22]>
        main (float[b, 4] x, bool c) => (float[b, 4] y) {
            one = Constant <value_float = 1.0> ()
            y = If (c) <
                then_branch = t () => (float[b, 4] p) { p = Add(x, one) },
                else_branch = e () => (float[b, 4] q) { q = Identity(x) }
            >
        }
    """,
    "shapes": """
        <ir_version: 10, opset_import: ["": 22, "com.microsoft": 1]>
        main (float[b, s, 8] x) => (float[b, t, 4] y)
        <int64[3] target = {0, -1, 4}, int64[1] axes = {0}> {
            size = Shape(x)  first = Gather <axis = 0> (size, axes)  wide = Unsqueeze(first, axes)
            r = Reshape(x, target)  n = SimplifiedLayerNormalization <axis = -1> (r, scale)  y = Cast <to = 1> (n)
        }
    """,
}


def quantised() -> onnx.ModelProto:
    """MatMulNBits with initializers in raw, typed and external form."""
    weight = numpy_helper.from_array(np.arange(64, dtype=np.uint8).reshape(4, 1, 16), "w")
    scale = helper.make_tensor("s", TensorProto.FLOAT, [4], [0.5, 1.0, 2.0, 4.0])
    outside = TensorProto(name="z", data_type=TensorProto.UINT8, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "model.data"), ("offset", "4"), ("length", "4")):
        outside.external_data.add(key=key, value=value)
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s", "z"], ["y"], domain="com.microsoft", K=32, N=4, bits=4, block_size=32
    )
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "main",
        [value("x", TensorProto.FLOAT, ["b", 32])],
        [value("y", TensorProto.FLOAT, ["b", 4])],
        [weight, scale, outside],
    )
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    models = {name: onnx.parser.parse_model(text) for name, text in MODELS.items()}
    models["quantised"] = quantised()
    for name, model in models.items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
