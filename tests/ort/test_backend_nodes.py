"""ONNX's own backend node tests for every ai.onnx op that the EP claims."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import harness
import target
from backend_cases import REQUIRED, WELCOME, cases_of, is_single

# Types that a plain buffer can carry: 4-bit types are packed, and numpy has no float8.
PLAIN = {np.dtype(t) for t in "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split()} | {harness.BF16}
LEVEL = ort.GraphOptimizationLevel.ORT_DISABLE_ALL


def feeds_and_results(case, data):
    """(feeds, expected) as numpy arrays, or None for sequences, optionals, strings and packed types."""
    given, expected = data
    names = [i.name for i in case.model.graph.input if i.name not in {t.name for t in case.model.graph.initializer}]
    arrays = []
    for value in [*given, *expected]:
        value = onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
        if not isinstance(value, (np.ndarray, np.generic)) or value.dtype not in PLAIN:
            return None
        arrays.append(np.asarray(value))
    outputs = [o.name for o in case.model.graph.output]
    return dict(zip(names, arrays[: len(given)])), dict(zip(outputs, arrays[len(given) :]))


def try_ort_cpu(model, feeds, outputs):
    """ORT CPU's results, or None where it has no kernel for the op, type or version."""
    try:
        session = harness.cpu_session(model)
        return harness.run_bound(session, feeds, {n: None for n in outputs})
    except Exception:  # noqa: BLE001 - ORT raises many types
        return None


def same(value, reference, case, what):
    assert value.shape == reference.shape, f"{what}: shape {value.shape}, expected {reference.shape}"
    assert value.dtype == reference.dtype, f"{what}: {value.dtype}, expected {reference.dtype}"
    if reference.dtype.kind in "biu":
        assert (value == reference).all(), f"{what}: {value} instead of {reference}"
        return
    lowest = -3.3e38 if reference.dtype.itemsize > 2 else -65504.0  # what ORT CPU writes for a masked score
    a, b = (np.where(harness.as_float64(x) <= lowest, -np.inf, harness.as_float64(x)) for x in (value, reference))
    # The data of a case is itself float32 or float16: rounding of the type, or what the case asks for.
    relative = max(case.rtol, {2: 2e-3, 4: 1e-5, 1: 1e-1}.get(reference.dtype.itemsize, 1e-7))
    if reference.dtype == harness.BF16:
        relative = 1e-2 if is_single(case.model, case.model.graph.node[0].op_type) else 2e-2  # a rounding a node
    np.testing.assert_allclose(a, b, rtol=relative, atol=max(case.atol, 1e-6), err_msg=what)


def run_case(case, op) -> str:
    """'ran', 'declined' (with a reason) or 'left' (not a case of plain tensors)."""
    single = is_single(case.model, op)
    data = [feeds_and_results(case, d) for d in case.data_sets]
    if any(d is None for d in data):
        return "left"
    proto = case.model
    if target.on_cuda():
        # Values that decide shapes come as constants; that ep-cuda declines them as data is tests/ort/test_cuda.py's.
        pinned = [(target.pinned(proto, feeds), expected) for feeds, expected in data[:1]]
        proto, data = pinned[0][0][0], [(feeds, expected) for (_, feeds), expected in pinned]
    model = proto.SerializeToString()
    if harness.oracles_only():
        for feeds, expected in data:
            theirs = try_ort_cpu(model, feeds, expected)
            if theirs is not None and not single:
                continue
            if theirs is not None:
                for name, reference in expected.items():
                    same(theirs[name], reference, case, f"{case.name} {name}: ORT CPU against the case")
        return "ran"
    try:
        session = harness.ep_session(model, fallback=True, level=LEVEL)
    except Exception as error:  # noqa: BLE001
        if try_ort_cpu(model, *data[0]) is not None:
            raise AssertionError(f"{case.name}: ORT CPU takes the model, but not beside the EP: {error}") from error
        session = None
    if session is None or harness.EP_NAME not in harness.placement(session):
        if single:
            reason = harness.explain_text(proto)
            assert op in reason, f"{case.name} is declined without a reason: {reason}"
        return "declined"
    for feeds, expected in data:
        ours = harness.run_bound(session, feeds, {n: (v.shape, v.dtype) for n, v in expected.items()})
        for name, reference in expected.items():
            same(ours[name], reference, case, f"{case.name} {name}")
        theirs = try_ort_cpu(model, feeds, expected)
        if theirs is not None and single:
            for name, reference in theirs.items():
                same(ours[name], reference, case, f"{case.name} {name} against ORT CPU")
    return "ran"


def run_op(op) -> dict[str, list[str]]:
    ended: dict[str, list[str]] = {"ran": [], "declined": [], "left": []}
    failures = []
    for case in cases_of(op):
        try:
            ended[run_case(case, op)].append(case.name)
        except Exception as error:  # noqa: BLE001 - gathered, so that one op's report is whole
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(cases_of(op))} cases:\n" + "\n".join(f[:600] for f in failures)
    return ended


@pytest.mark.parametrize("op", REQUIRED)
def test_required_op(op):
    ended = run_op(op)
    singles = {c.name for c in cases_of(op) if is_single(c.model, op)}
    assert singles & set(ended["ran"]), f"no case of {op} was claimed: {ended}"


@pytest.mark.parametrize("op", WELCOME)
def test_other_op(op):
    run_op(op)
