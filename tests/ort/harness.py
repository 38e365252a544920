"""Runs one-node models and whole graphs on the EP under test and on ORT's own CPU EP.

Outputs whose shape is known are bound to poisoned buffers with guard bytes on both sides, so that an output that is
not written, or written past its end, cannot look right. Every run on the EP under test forbids the CPU fallback and
asserts, by ORT's own record, that every node was placed on the EP.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import target
from buffers import BF16, onnx_type, run_bound
from target import STATE, on_cuda

F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)

# Share of the largest reference value that an output may be off by, at accuracy_level 0. Inputs are exact in their
# dtype and the reference is float64, so what is left is rounding: f32 keeps 2^-24 a step and sums a few hundred terms;
# f16 and bf16 add their final rounding (2^-11 and 2^-9 of the value) to an f32 accumulation.
RELATIVE = {F32: 1e-5, F16: 1e-3, BF16: 8e-3, np.dtype(np.float64): 1e-12}
# int8 activations with one scale a block: 1/254 of the block's maximum a term, averaged over K terms.
RELATIVE_ACCURACY_LEVEL_4 = 1.5e-2


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """|got - reference| <= absolute + relative * max|reference|."""

    relative: float
    absolute: float = 1e-30  # an all-zero reference allows only zeros (and denormals)

    def bound(self, reference: np.ndarray) -> float:
        finite = np.abs(reference[np.isfinite(reference)])
        return self.absolute + self.relative * float(finite.max(initial=0.0))


def tolerance_for(dtype: np.dtype) -> Tolerance:
    dtype = np.dtype(dtype)
    return Tolerance(RELATIVE[dtype]) if dtype in RELATIVE else Tolerance(0.0, 0.0)


FLOATS = (F32, F16, BF16)


def name_of(dtype) -> str:
    """Test id of a dtype."""
    return {F32: "f32", F16: "f16", BF16: "bf16"}.get(np.dtype(dtype), np.dtype(dtype).name)


def normal(rng: np.random.Generator, shape, dtype=F32, scale: float = 1.0) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape) * scale).astype(dtype)


# ----------------------------------------------------------------------------------------------------------- sessions


def session_options(**entries: str) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # Tests run side by side: threads that wait leave the cores to others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def ep_devices() -> list:
    return [d for d in ort.get_ep_devices() if d.ep_name == STATE.ep.name]


def ep_session(
    model: bytes | str,
    provider_options: dict[str, str] | None = None,
    *,
    fallback: bool = False,
    level: ort.GraphOptimizationLevel | None = None,
    threads: int | None = None,
    entries: dict[str, str] | None = None,
) -> ort.InferenceSession:
    """A session on the EP under test. fallback=True lets ORT's CPU EP take the nodes that the EP declines."""
    options = session_options()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if not fallback:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    if level is not None:
        options.graph_optimization_level = level
    if threads is not None:
        options.intra_op_num_threads = threads
    devices = ep_devices()
    assert devices, f"no device of {STATE.ep.name}: is the EP registered?"
    options.add_provider_for_devices(devices, {k: str(v) for k, v in (provider_options or {}).items()})
    return ort.InferenceSession(model, options)


def cpu_session(model: bytes | str, *, level=None, threads: int | None = None) -> ort.InferenceSession:
    """A session on ORT's own CPU EP, by default without graph rewrites: the op's kernel itself is the oracle."""
    options = session_options()
    options.graph_optimization_level = (
        ort.GraphOptimizationLevel.ORT_DISABLE_ALL if level is None else level
    )
    if threads is not None:
        options.intra_op_num_threads = threads
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def placement(session: ort.InferenceSession) -> dict[str, list[str]]:
    """EP name -> the ops it was given, by ORT's assignment record (fused groups list their original nodes)."""
    found: dict[str, list[str]] = {}
    for group in session.get_provider_graph_assignment_info():
        ops = [f"{node.domain or 'ai.onnx'}::{node.op_type}" for node in group.get_nodes()]
        found.setdefault(group.ep_name, []).extend(ops)
    return found


def fused_groups(session: ort.InferenceSession) -> int:
    return sum(1 for group in session.get_provider_graph_assignment_info() if group.ep_name == STATE.ep.name)


def assert_all_on_ep(session: ort.InferenceSession) -> None:
    found = placement(session)
    others = {ep: ops for ep, ops in found.items() if ep != STATE.ep.name}
    assert not others, f"nodes on other EPs: {others}"
    assert found.get(STATE.ep.name), "the assignment record is empty"


# ------------------------------------------------------------------------------------------------------ one-node model


@dataclasses.dataclass
class NodeModel:
    """One node, its feeds and the names of its inputs and outputs."""

    proto: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    input_names: list[str]
    output_names: list[str]

    def serialize(self) -> bytes:
        return self.proto.SerializeToString()

    def pinned(self) -> NodeModel:
        """On CUDA: the same with constants for the inputs that decide shapes."""
        if not on_cuda():
            return self
        proto, feeds = target.pinned(self.proto, self.feeds)
        return dataclasses.replace(self, proto=proto, feeds=feeds)


def build_node(
    op: str,
    inputs: Sequence[np.ndarray | onnx.TensorProto | None],
    attrs: dict | None = None,
    *,
    outputs: int | Sequence[bool] = 1,
    out_types: dict[int, np.dtype | int] | None = None,
    domain: str = "",
    opset: int = 24,
    initializers: Sequence[int] = (),
    dynamic: bool = True,
) -> NodeModel:
    """inputs: None is an absent optional; a TensorProto, or an index in `initializers`, becomes an initializer.

    outputs: how many, or a flag for each slot (False = absent). Types default to the first floating input's.
    dynamic: graph inputs get symbolic dimensions, as exporters write them; False gives static shapes.
    """
    attrs, out_types = attrs or {}, out_types or {}
    wanted = [True] * outputs if isinstance(outputs, int) else list(outputs)
    input_names = [f"in{i}" if x is not None else "" for i, x in enumerate(inputs)]
    while input_names and not input_names[-1]:
        input_names.pop()
    output_names = [f"out{i}" if w else "" for i, w in enumerate(wanted)]
    while output_names and not output_names[-1]:
        output_names.pop()
    graph_inputs, constants, feeds = [], [], {}
    for i, (name, value) in enumerate(zip(input_names, inputs)):
        if value is None:
            continue
        if isinstance(value, onnx.TensorProto):
            tensor = onnx.TensorProto()
            tensor.CopyFrom(value)
            tensor.name = name
            constants.append(tensor)
        elif i in initializers:
            constants.append(onnx.numpy_helper.from_array(np.ascontiguousarray(value), name))
        else:
            shape = [f"{name}_{d}" for d in range(value.ndim)] if dynamic else list(value.shape)
            graph_inputs.append(helper.make_tensor_value_info(name, onnx_type(value.dtype), shape))
            feeds[name] = value
    first = next(
        (x.dtype for x in inputs if isinstance(x, np.ndarray) and np.dtype(x.dtype) in RELATIVE), F32
    )
    graph_outputs = []
    for i, name in enumerate(output_names):
        if name:
            kind = out_types.get(i, first)
            kind = kind if isinstance(kind, int) else onnx_type(kind)
            graph_outputs.append(helper.make_tensor_value_info(name, kind, None))
    node = helper.make_node(op, input_names, output_names, name=f"{op}_under_test", domain=domain, **attrs)
    proto = helper.make_model(
        helper.make_graph([node], "one_node", graph_inputs, graph_outputs, constants),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)],
        ir_version=11 if opset < 26 else 13,
    )
    return NodeModel(proto, feeds, input_names, output_names)


def run_node(
    model: NodeModel,
    *,
    provider_options: dict[str, str] | None = None,
    known: dict[str, tuple[tuple[int, ...], np.dtype]] | None = None,
    alias: dict[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Runs the model on the EP under test and asserts that the node ran there."""
    model = model.pinned()
    session = ep_session(model.serialize(), provider_options)
    assert_all_on_ep(session)
    names = [n for n in model.output_names if n]
    return run_bound(session, model.feeds, {n: (known or {}).get(n) for n in names}, alias)


def run_ort_cpu(model: NodeModel) -> dict[str, np.ndarray]:
    session = cpu_session(model.serialize())
    return run_bound(session, model.feeds, {n: None for n in model.output_names if n})


# ------------------------------------------------------------------------------------------------------------- checks


def as_float64(value: np.ndarray) -> np.ndarray:
    return np.asarray(value).astype(np.float64)


def assert_close(got: np.ndarray, reference: np.ndarray, tolerance: Tolerance, what: str) -> None:
    """reference NaN = the definition leaves the value open; everything else must agree, infinities exactly."""
    assert got.shape == reference.shape, f"{what}: shape {got.shape}, expected {reference.shape}"
    got, reference = as_float64(got), as_float64(reference)
    matters = ~np.isnan(reference)
    if not matters.any():
        return
    with np.errstate(invalid="ignore"):
        error = np.array(np.abs(got - reference))
        error[got == reference] = 0.0
    error = np.where(np.isnan(error), np.inf, error)
    error[~matters] = 0.0
    bound = tolerance.bound(reference[matters])
    worst = np.unravel_index(int(error.argmax()), error.shape)
    assert error.max() <= bound, (
        f"{what}: off by {error.max():.3e} (allowed {bound:.3e}, max |reference| "
        f"{np.abs(reference[matters & np.isfinite(reference)]).max(initial=0):.3e}) at {tuple(map(int, worst))}: "
        f"got {got[worst]:.7g}, expected {reference[worst]:.7g}; {int((error > bound).sum())} of {error.size} off"
    )


def check(
    op: str,
    inputs: Sequence[np.ndarray | onnx.TensorProto | None],
    reference: Sequence[np.ndarray | None],
    attrs: dict | None = None,
    *,
    domain: str = "",
    opset: int = 24,
    outputs: int | Sequence[bool] | None = None,
    out_types: dict[int, np.dtype] | None = None,
    initializers: Sequence[int] = (),
    tolerance: Tolerance | None = None,
    ort_cpu: str = "agrees",
    ort_tolerance: Tolerance | None = None,
    alias: dict[int, int] | None = None,
    provider_options: dict[str, str] | None = None,
    dynamic: bool = True,
    may_decline: str | None = None,
) -> None:
    """Compares the EP with `reference` (float64, one array an output, NaN where the definition leaves a value open)
    and with ORT's CPU EP.

    ort_cpu: 'agrees', or 'refuses' where ORT CPU rejects the case (that it does is asserted).
    ort_tolerance: where ORT CPU itself is less exact than we ask of ourselves.
    alias: output slot -> input slot of the same buffer; the case also runs without sharing.
    may_decline: a corner that the EP may decline by name: then `explain` must hold this word.
    """
    how = dict(
        outputs=[r is not None for r in reference] if outputs is None else outputs,
        out_types=out_types,
        domain=domain,
        opset=opset,
        initializers=initializers,
    )
    model = build_node(op, inputs, attrs, dynamic=dynamic, **how)
    # Some ops run on ORT CPU only through a function body, which needs static shapes.
    oracle = build_node(op, inputs, attrs, dynamic=False, **how)
    declared = {o.name: o.type.tensor_type.elem_type for o in model.proto.graph.output}
    expected = {f"out{i}": as_float64(r) for i, r in enumerate(reference) if r is not None}
    dtypes = {n: np.dtype(helper.tensor_dtype_to_np_dtype(declared[n])) for n in expected}
    bounds = {n: tolerance or tolerance_for(dtypes[n]) for n in expected}
    ort_bounds = {n: ort_tolerance or bounds[n] for n in expected}

    if ort_cpu == "refuses":
        with pytest.raises(Exception):  # noqa: B017 - which of ORT's many exception types is not the point
            run_ort_cpu(oracle)
        theirs = None
    else:
        assert ort_cpu == "agrees", ort_cpu
        theirs = run_ort_cpu(oracle)
        for name, value in expected.items():
            assert_close(theirs[name], value, ort_bounds[name], f"{op} {name}: ORT CPU against float64")

    if oracles_only():
        return
    if check_fed_shapes(model, may_decline):
        return
    model = model.pinned()
    if may_decline and is_declined(model):
        check_declined(model, op, may_decline)
        return
    known = {n: (expected[n].shape, dtypes[n]) for n in expected}
    runs = {"fresh outputs": (known, None), "outputs allocated by ORT": ({}, None)}
    if alias:
        runs["past and present in one buffer"] = (
            known,
            {f"out{o}": f"in{i}" for o, i in alias.items()},
        )
    for how, (shapes, shared) in runs.items():
        ours = run_node(model, provider_options=provider_options, known=shapes, alias=shared)
        for name, value in expected.items():
            assert ours[name].dtype == dtypes[name]
            assert_close(ours[name], value, bounds[name], f"{op} {name}, {how}: EP against float64")
            if theirs is not None:
                own, oracle_bound = bounds[name], ort_bounds[name]
                both = Tolerance(own.relative + oracle_bound.relative, own.absolute + oracle_bound.absolute)
                other = np.where(np.isnan(value), np.nan, as_float64(theirs[name]))
                assert_close(ours[name], other, both, f"{op} {name}, {how}: EP against ORT CPU")


def check_fed_shapes(model: NodeModel, may_decline: str | None) -> bool:
    """On CUDA: a node whose shapes tensor data decide is declined for that reason. Whether nothing is left to run."""
    fed = on_cuda() and target.fed_shapes(model.proto, model.feeds)
    if not fed:
        return False
    with pytest.raises(Exception, match=LEFT_ALONE):
        ep_session(model.serialize())
    sentence = explain_text(model.proto)
    assert "captured CUDA graph" in sentence or may_decline and may_decline.lower() in sentence.lower(), sentence
    return len(fed) == len(model.feeds)


# ORT's words for a node that is left to its CPU EP, and for one that no EP takes.
LEFT_ALONE = "fallback|Provider type for .* is not set"


def is_declined(model: NodeModel) -> bool:
    try:
        ep_session(model.serialize())
    except Exception as error:  # noqa: BLE001 - ORT raises many types
        return re.search(LEFT_ALONE, str(error)) is not None
    return False


def check_declined(model: NodeModel | onnx.ModelProto, *mentions: str) -> None:
    """The EP leaves the node alone, and `explain` says why in a sentence that holds every word of `mentions`."""
    if oracles_only():
        return
    proto = model.proto if isinstance(model, NodeModel) else model
    with pytest.raises(Exception, match=LEFT_ALONE):
        ep_session(proto.SerializeToString())
    sentence = explain_text(proto)
    for word in mentions:
        assert word.lower() in sentence.lower(), f"'{word}' is missing from the reason: {sentence}"


def check_hostile(
    model: NodeModel, *mentions: str, provider_options: dict[str, str] | None = None, data: bool = False
) -> None:
    """Bad input gives an error that names the node and holds every word of `mentions`.

    Where ORT's own schema inference rejects the model first, its message names the node too and is as good.
    data: it is the values of a tensor that are bad. A GPU cannot report those: see check_contained.
    """
    if oracles_only():
        return
    if data and on_cuda():
        check_contained(model)
        return
    model = model.pinned()
    # A constant may be seen to be bad before any Run.
    if on_cuda() and is_declined(model):
        check_declined(model, *mentions)
        return
    with pytest.raises(Exception) as caught:
        session = ep_session(model.serialize(), provider_options)
        assert_all_on_ep(session)
        run_bound(session, model.feeds, {n: None for n in model.output_names if n})
    text = str(caught.value)
    assert "AssertionError" not in repr(caught.type), text
    op = model.proto.graph.node[0].op_type
    assert op in text, f"the error does not name the op {op}: {text}"
    assert "internal error" not in text and "panic" not in text, text
    if "InferenceError" in text:
        return
    for word in mentions:
        assert word.lower() in text.lower(), f"'{word}' is missing from the error: {text}"


def check_contained(model: NodeModel) -> None:
    """A Run over bad values writes nothing outside of its outputs, and the session still works."""
    model = model.pinned()
    session = ep_session(model.serialize())
    assert_all_on_ep(session)
    names = [n for n in model.output_names if n]
    first = run_bound(session, model.feeds, {n: None for n in names}, io="host")
    known = {n: (first[n].shape, first[n].dtype) for n in names}
    for _ in range(2):
        run_bound(session, model.feeds, known, io="device")


def check_rejected(model: NodeModel, *mentions: str, data: bool = False) -> None:
    """The node breaks its schema: either the EP declines it or session creation (or the run) fails, by name."""
    if oracles_only():
        return
    if is_declined(model):
        check_declined(model, *mentions)
    else:
        check_hostile(model, *mentions, data=data)


def check_graph(
    nodes: Sequence[onnx.NodeProto],
    feeds: dict[str, np.ndarray],
    reference: dict[str, np.ndarray],
    initializers: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 24,
    out_dtypes: dict[str, np.dtype] | None = None,
    tolerance: Tolerance | None = None,
    ort_tolerance: Tolerance | None = None,
    ort_cpu: str = "agrees",
    provider_options: dict[str, str] | None = None,
) -> None:
    """As `check`, for a small graph; the EP runs it as it is and after ORT's rewrites."""
    dtypes = {name: np.dtype((out_dtypes or {}).get(name, F32)) for name in reference}
    graph_inputs = [
        helper.make_tensor_value_info(n, onnx_type(x.dtype), [f"{n}_{d}" for d in range(x.ndim)])
        for n, x in feeds.items()
    ]
    graph_outputs = [helper.make_tensor_value_info(n, onnx_type(dtypes[n]), None) for n in reference]
    graph = helper.make_graph(list(nodes), "graph", graph_inputs, graph_outputs, list(initializers))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=11 if opset < 26 else 13).SerializeToString()
    theirs = None
    if ort_cpu == "refuses":
        with pytest.raises(Exception):  # noqa: B017
            run_bound(cpu_session(model), feeds, {n: None for n in reference})
    else:
        theirs = run_bound(cpu_session(model), feeds, {n: None for n in reference})
    for name, value in reference.items():
        bound = tolerance or tolerance_for(dtypes[name])
        if theirs is not None:
            assert_close(theirs[name], value, ort_tolerance or bound, f"{name}: ORT CPU against float64")
    if oracles_only():
        return
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        session = ep_session(model, provider_options, level=level)
        assert_all_on_ep(session)
        known = {n: (value.shape, dtypes[n]) for n, value in reference.items()}
        ours = run_bound(session, feeds, known)
        for name, value in reference.items():
            bound = tolerance or tolerance_for(dtypes[name])
            assert_close(ours[name], value, bound, f"{name} at {level}: EP against float64")


def explain_text(proto: onnx.ModelProto) -> str:
    """What `explain` says about a model, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        onnx.save(proto, path)
        try:
            said = target.package().explain(path)
        except ValueError as error:
            return str(error)
    return "\n".join(node["reason"] for node in said["declined"])


def oracles_only() -> bool:
    """--oracles-only: the references are compared with ORT CPU and the EP is not loaded."""
    return STATE.oracles_only


def __getattr__(name: str) -> str:
    if name == "EP_NAME":
        return STATE.ep.name
    raise AttributeError(name)
