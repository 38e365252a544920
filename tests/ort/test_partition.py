"""Groups that are not the whole graph: what surrounds an unclaimed op is still claimed, and never non-convex."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import harness
from harness import F32, normal

# An op outside the EP's table; float to float of the same shape.
FOREIGN = "Hardmax"


def node(op, inputs, output):
    return helper.make_node(op, inputs, [output], name=f"{op}_{output}")


def build(nodes, inputs, outputs):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value(n, TensorProto.FLOAT, ["rows", "columns"]) for n in inputs],
        [value(n, TensorProto.FLOAT, ["rows", "columns"]) for n in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def compare(model, feeds, outputs, level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL):
    """Runs beside ORT's CPU EP and returns the session on both EPs."""
    expected = harness.run_bound(harness.cpu_session(model), feeds, {n: None for n in outputs})
    if harness.oracles_only():
        return None
    session = harness.ep_session(model, fallback=True, level=level)
    got = harness.run_bound(session, feeds, {n: (expected[n].shape, F32) for n in outputs})
    for name in outputs:
        harness.assert_close(got[name], expected[name], harness.Tolerance(1e-5), name)
    return session


def ops_on_ep(session):
    return sorted(op.split("::")[1] for op in harness.placement(session).get(harness.EP_NAME, []))


def test_a_foreign_op_in_a_chain(rng):
    chain = ["Neg", "Exp", "Sqrt", FOREIGN, "Tanh", "Neg", "Sigmoid"]
    nodes = [node(op, [f"v{i}"], f"v{i + 1}") for i, op in enumerate(chain)]
    session = compare(build(nodes, ["v0"], ["v7"]), {"v0": normal(rng, (3, 5))}, ["v7"])
    if session is None:
        return
    assert ops_on_ep(session) == sorted(op for op in chain if op != FOREIGN)
    assert harness.fused_groups(session) == 2


def test_a_foreign_op_on_one_branch(rng):
    """a -> foreign -> b and a -> b: a and b in one group would make a cycle."""
    nodes = [
        node("Neg", ["x"], "a"), node(FOREIGN, ["a"], "f"), node("Add", ["a", "f"], "b"), node("Tanh", ["b"], "y")
    ]
    session = compare(build(nodes, ["x"], ["y"]), {"x": normal(rng, (3, 5))}, ["y"])
    if session is None:
        return
    assert ops_on_ep(session) == ["Add", "Neg", "Tanh"]
    assert harness.fused_groups(session) == 2


def test_a_foreign_op_beside_the_path(rng):
    """The foreign op only reads the group's result: one group holds all the rest."""
    nodes = [
        node("Neg", ["x"], "a"), node("Tanh", ["a"], "y"), node(FOREIGN, ["a"], "z"), node("Exp", ["y"], "w")
    ]
    session = compare(build(nodes, ["x"], ["w", "z"]), {"x": normal(rng, (3, 5))}, ["w", "z"])
    if session is None:
        return
    assert ops_on_ep(session) == ["Exp", "Neg", "Tanh"]
    assert harness.fused_groups(session) == 1


def test_two_foreign_ops_that_interleave(rng):
    """Two chains that cross through foreign ops in opposite order."""
    nodes = [
        node("Neg", ["x"], "a0"), node(FOREIGN, ["a0"], "a1"), node("Exp", ["y"], "b0"), node("Add", ["a1", "b0"], "b1"),
        node(FOREIGN, ["b1"], "b2"), node("Mul", ["b2", "a0"], "c"), node("Sub", ["c", "b0"], "d"),
    ]
    feeds = {"x": normal(rng, (3, 5)), "y": normal(rng, (3, 5))}
    session = compare(build(nodes, ["x", "y"], ["d"]), feeds, ["d"])
    if session is None:
        return
    assert ops_on_ep(session) == ["Add", "Exp", "Mul", "Neg", "Sub"]


def test_an_intermediate_that_is_also_an_output(rng):
    nodes = [node("Neg", ["x"], "a"), node("Tanh", ["a"], "y")]
    session = compare(build(nodes, ["x"], ["a", "y"]), {"x": normal(rng, (3, 5))}, ["a", "y"])
    if session is not None:
        harness.assert_all_on_ep(session)
        assert harness.fused_groups(session) == 1


def test_an_input_used_twice_and_an_output_given_twice(rng):
    nodes = [node("Mul", ["x", "x"], "a"), node("Add", ["a", "x"], "y"), node("Identity", ["y"], "z")]
    session = compare(build(nodes, ["x"], ["y", "z"]), {"x": normal(rng, (3, 5))}, ["y", "z"])
    if session is not None:
        harness.assert_all_on_ep(session)


def test_a_graph_input_that_is_an_output(rng):
    nodes = [node("Identity", ["x"], "y"), node("Neg", ["x"], "z")]
    compare(build(nodes, ["x"], ["y", "z"]), {"x": normal(rng, (3, 5))}, ["y", "z"])


def test_a_shape_from_another_group(rng):
    """What decides a shape comes from before a foreign op, its consumer stands behind it."""
    nodes = [
        node("Shape", ["x"], "s"), node("Neg", ["x"], "n"), node(FOREIGN, ["n"], "h"), node("Reshape", ["h", "s"], "r"),
        node("Exp", ["r"], "y"),
    ]
    session = compare(build(nodes, ["x"], ["y"]), {"x": normal(rng, (3, 5))}, ["y"])
    if session is not None:
        assert {"Neg", "Exp"} <= set(ops_on_ep(session))


def test_a_view_of_a_shape_is_read_as_a_number(rng):
    """A dim of the input, a scalar by Squeeze without axes, goes into arithmetic on tensors."""
    nodes = [
        helper.make_node("Shape", ["x"], ["d"], start=1), node("Squeeze", ["d"], "scalar"),
        helper.make_node("Cast", ["scalar"], ["f"], to=TensorProto.FLOAT), node("Mul", ["x", "f"], "y"),
    ]  # fmt: skip
    compare(build(nodes, ["x"], ["y"]), {"x": normal(rng, (3, 5))}, ["y"])


@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_random_graphs(rng, share, number):
    """Any mixture runs, and every op that the EP knows is on the EP or in a group that was not worth it."""
    values, nodes = ["x0", "x1"], []
    for i in range(int(rng.integers(4, 25))):
        if rng.random() < share:
            op, arity = FOREIGN, 1
        else:
            op, arity = [("Neg", 1), ("Tanh", 1), ("Sigmoid", 1), ("Add", 2), ("Sub", 2), ("Mul", 2)][rng.integers(6)]
        picked = [values[int(k)] for k in rng.integers(max(0, len(values) - 6), len(values), arity)]
        nodes.append(node(op, picked, f"v{i}"))
        values.append(f"v{i}")
    used = {n for x in nodes for n in x.input}
    outputs = [v for v in values[2:] if v not in used] or [values[-1]]
    feeds = {n: normal(rng, (2, 3)) for n in ("x0", "x1") if n in used}
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        session = compare(build(nodes, list(feeds), outputs), feeds, outputs, level)
        if session is not None:
            others = [op for ep, ops in harness.placement(session).items() if ep != harness.EP_NAME for op in ops]
            known = [op for op in others if not op.endswith(FOREIGN)]
            assert len(known) <= len(nodes) // 2, f"left to ORT CPU: {known}"
