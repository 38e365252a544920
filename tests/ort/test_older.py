"""One binary for every supported ONNX Runtime: the fixture models and a case of every op, on whichever one runs.

availability.json says what the running one knows. What it does not know it must refuse to load; everything else must
be one fused node on the EP and right. How many of each kind run on each version is written down here.
"""

import onnx
import onnxruntime as ort
import pytest

import harness
import make_availability
import models
import older_cases
from models import Decoder, assert_step

# Fixture models and op cases that run, of 10 and of 164.
RUN = {"1.24.4": (4, 143), "1.28.0": (4, 149), "1.30.0": (10, 157), "1.32.0": (10, 164)}
pytestmark = pytest.mark.cpu_only("older runtimes")
LEVELS = [ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL]
# The runtime itself makes a constant of this node before any EP is asked.
NO_NODE_LEFT = {"Constant"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def test_the_table_is_what_the_runtime_knows():
    running = make_availability.schemas()
    assert running["opset"] == older_cases.TABLE["opsets"][ort.__version__]
    for op, entry in older_cases.TABLE["ops"].items():
        known = running["ops"].get(op, {"versions": [], "attributes": [], "inputs": 0})
        slots = max([n for runtime, n in entry["inputs"].items() if not older_cases.newer(runtime)], default=0)
        assert sorted(older_cases.known(entry["versions"])) == known["versions"], op
        assert sorted(older_cases.known(entry["attributes"])) == known["attributes"], op
        assert slots == known["inputs"], op


def refuses(model: bytes | str) -> None:
    """The runtime itself does not load the model, with or without the EP."""
    for open_session in (harness.cpu_session, lambda m: harness.ep_session(m, fallback=True)):
        with pytest.raises(Exception):  # noqa: B017 - which of ORT's many exception types is not the point
            open_session(model)


def run_case(case: older_cases.Case) -> None:
    session = harness.ep_session(case.model.SerializeToString(), level=LEVELS[0])
    if case.op in NO_NODE_LEFT:
        assert not harness.placement(session)
    else:
        harness.assert_all_on_ep(session)
    got = harness.run_bound(session, case.feeds, {name: None for name in case.expected})
    for name, reference in case.expected.items():
        tolerance = case.tolerance or harness.tolerance_for(got[name].dtype)
        harness.assert_close(got[name], harness.as_float64(reference), tolerance, f"{case.name} {name}")


def test_a_case_of_every_op():
    ran, failures = 0, []
    for case in older_cases.cases().values():
        try:
            if older_cases.is_known(case.model):
                run_case(case)
                ran += 1
            else:
                refuses(case.model.SerializeToString())
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - gathered: one run tells all
            failures.append(f"{case.name}: {type(error).__name__}: {str(error)[:500]}")
    assert not failures, f"{len(failures)} cases:\n" + "\n".join(failures)
    assert ran == RUN[ort.__version__][1]


def run_model(fixture: models.Fixture) -> None:
    """Every recorded step, from growing states and from shared buffers, in one fused node."""
    for level in LEVELS:
        session = harness.ep_session(fixture.path, level=level)
        harness.assert_all_on_ep(session)
        assert harness.fused_groups(session) == 1
        for capacity in (None, 16):
            decoder = Decoder(session, fixture.steps, capacity=capacity)
            for number, (given, expected) in enumerate(fixture.steps):
                got = decoder.trimmed(decoder.step(given["input_ids"], shared=capacity is not None))
                assert_step(fixture, got, expected, f"step {number}")


@pytest.mark.parametrize("name", models.NAMES)
def test_model(name, folder):
    fixture = models.Fixture(name, models.unpack(name, folder))
    if older_cases.is_known(onnx.load(fixture.path, load_external_data=False)):
        run_model(fixture)
    else:
        refuses(fixture.path)


def test_number_of_models(folder):
    paths = [models.Fixture(name, models.unpack(name, folder)).path for name in models.NAMES]
    known = [older_cases.is_known(onnx.load(path, load_external_data=False)) for path in paths]
    assert sum(known) == RUN[ort.__version__][0]
