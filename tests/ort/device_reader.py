"""A model with every kind of node, and how a graph that the EP dumped must look like it."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
from onnx import TensorProto, helper


def describe(tensor: onnx.TensorProto) -> str:
    """A tensor as the EP dumps it."""
    names = {"bfloat16": "bfloat16", "float8_e4m3fn": "float8e4m3fn", "float32": "float", "float64": "double"}
    array = onnx.numpy_helper.to_array(tensor)
    name = names.get(str(array.dtype), str(array.dtype))
    data = tensor.raw_data if tensor.HasField("raw_data") else array.tobytes()
    return f"{name}{list(tensor.dims)}:{data.hex()}"


def typed(name: str, kind: int, values, dims) -> onnx.TensorProto:
    return helper.make_tensor(name, kind, dims, values)


def every_kind_of_node() -> onnx.ModelProto:
    """All kinds of attributes, absent inputs and outputs, bodies, and element types that ORT CPU can cast."""
    info = helper.make_tensor_value_info
    t = TensorProto
    node = helper.make_node
    inner = helper.make_graph([node("Neg", ["r0"], ["r1"])], "inner", [], [info("r1", t.FLOAT, None)])
    other = helper.make_graph([node("Abs", ["r0"], ["r2"])], "other", [], [info("r2", t.FLOAT, None)])
    body = helper.make_graph(
        [
            node("Add", ["x", "one"], ["r0"]),
            node("If", ["flag"], ["r3"], then_branch=inner, else_branch=other, name="if inside"),
        ],
        "body",
        [],
        [info("r3", t.FLOAT, None)],
    )
    plain = helper.make_graph([node("Identity", ["x"], ["p"])], "plain", [], [info("p", t.FLOAT, None)])
    nodes = [
        node("If", ["flag"], ["picked"], then_branch=body, else_branch=plain, name='an "if"'),
        node("Clip", ["x", "", "one"], ["clipped"], name="clip/ä"),
        node("LayerNormalization", ["x", "row"], ["normed", "", "inverse"], axis=-1, epsilon=0.125),
        node("Transpose", ["x"], ["turned"], perm=[1, 0]),
        node("ConstantOfShape", ["two"], ["filled"], value=typed("v", t.INT64, [7], [1])),
        node(
            "LabelEncoder",
            ["words"],
            ["labels"],
            domain="ai.onnx.ml",
            keys_strings=["a", "", "ccc"],
            values_floats=[1.5, -2.0, 0.1],
            default_float=-0.5,
        ),
        node("DepthToSpace", ["image"], ["space"], blocksize=2, mode="CRD"),
        node("Add", ["x", "big"], ["sum"]),
        node("Add", ["x", "file"], ["more"]),
    ]
    initializers = [
        typed("one", t.FLOAT, [1.0], []),
        typed("row", t.FLOAT, [1.0, 2.0, 3.0], [3]),
        typed("two", t.INT64, [1], [1]),
        onnx.numpy_helper.from_array(np.arange(3 * 20_000, dtype=np.float32).reshape(20_000, 3), "big"),
        onnx.numpy_helper.from_array(np.arange(3, dtype=np.float32), "file"),
        typed("i4", t.INT4, [-8, 7, 1], [3]),
        typed("u4", t.UINT4, [15, 0, 1], [3]),
        typed("f16", t.FLOAT16, [0.5, -2.0], [2]),
        typed("bf16", t.BFLOAT16, [0.5, -2.0], [1, 2]),
        typed("f8", t.FLOAT8E4M3FN, [0.5, -2.0], [2]),
        typed("flags", t.BOOL, [True, False, True], [3]),
        typed("f64", t.DOUBLE, [1e300], [1]),
        typed("none", t.INT32, [], [0, 4]),
    ]
    casts = ["i4", "u4", "f16", "bf16", "f8", "flags", "f64", "none"]
    nodes += [node("Cast", [name], [f"cast_{name}"], to=t.FLOAT) for name in casts]
    outputs = [("picked", t.FLOAT), ("clipped", t.FLOAT), ("normed", t.FLOAT), ("inverse", t.FLOAT)]
    outputs += [("turned", t.FLOAT), ("filled", t.INT64), ("labels", t.FLOAT), ("space", t.FLOAT)]
    outputs += [("sum", t.FLOAT), ("more", t.FLOAT), *((f"cast_{name}", t.FLOAT) for name in casts)]
    graph = helper.make_graph(
        nodes,
        "every",
        [
            info("x", t.FLOAT, ["rows", 3]),
            info("flag", t.BOOL, []),
            info("words", t.STRING, [None]),
            info("image", t.FLOAT, None),
        ],
        [info(name, kind, None) for name, kind in outputs],
        initializer=initializers,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 2)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def compare_values(values, model: onnx.ModelProto, folder: pathlib.Path):
    get = lambda name: (values[name]["dtype"], values[name]["shape"])  # noqa: E731
    assert get("x") == ("float", ["rows", 3]) and get("flag") == ("bool", []), values
    assert get("words") == ("string", [None]) and get("image") == ("float", None), values
    assert get("turned") == ("float", [3, "rows"]) and get("filled") == ("int64", [1]), values
    assert all(values[name]["initializer"] is None for name in ("x", "picked"))
    small = ["one", "row", "two", "flags", "f16", "f64", "none", "bf16", "f8"]
    for tensor in model.graph.initializer:
        got = values[tensor.name]["initializer"]
        assert values[tensor.name]["shape"] == list(tensor.dims), tensor.name
        if tensor.name in small:
            assert got == describe(tensor), (tensor.name, got, describe(tensor))
    # Two elements a byte, the first one low.
    assert values["i4"]["initializer"] == "int4[3]:7801" and values["u4"]["initializer"] == "uint4[3]:0f01", values
    assert values["big"]["initializer"] == "unread float[20000, 3]"
    assert values["file"]["initializer"] == "float[3]:" + np.arange(3, dtype=np.float32).tobytes().hex()


def compare_node(got, node: onnx.NodeProto):
    assert (got["name"], got["op_type"]) == (node.name, node.op_type), got
    assert got["domain"] == node.domain and got["since"] >= 1, got
    assert got["inputs"] == [name or None for name in node.input], got
    assert got["outputs"] == [name or None for name in node.output], got
    for attribute in node.attribute:
        want = helper.get_attribute_value(attribute)
        value = got["attrs"][attribute.name]
        if attribute.type == onnx.AttributeProto.GRAPH:
            compare_body(value, want)
        elif attribute.type == onnx.AttributeProto.TENSOR:
            assert value == describe(want), (value, describe(want))
        elif attribute.type in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS):
            value, want = np.atleast_1d(value), np.atleast_1d(want)
            assert [np.float32(x[1:]) for x in value] == [np.float32(x) for x in want], (value, want)
        elif attribute.type == onnx.AttributeProto.STRINGS:
            assert value == [text.decode() for text in want], value
        else:
            want = want.decode() if isinstance(want, bytes) else want
            assert value == want, (attribute.name, value, want)


def compare_body(got, graph: onnx.GraphProto):
    assert got["is_body"] and got["inputs"] == [] and got["outputs"] == [o.name for o in graph.output], got
    assert [node["op_type"] for node in got["nodes"]] == [node.op_type for node in graph.node]
    for seen, node in zip(got["nodes"], graph.node, strict=True):
        compare_node(seen, node)
    if graph.name == "body":
        assert got["nodes"][1]["implicit"] == ["r0"], got
