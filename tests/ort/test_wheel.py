"""The Python package: what it says of itself, registration in any order, and the command line."""

import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import harness
import target
from target import STATE, package


def check(code: str, *arguments: str) -> str:
    """Runs `code`, where `the_wheel` is the package, in a process of its own, which must end well; its output."""
    command = [sys.executable, "-c", textwrap.dedent(code).replace("the_wheel", STATE.ep.module), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names():
    ep = package()
    assert ep.get_ep_names() == [ep.get_ep_name()] == [harness.EP_NAME]
    device = harness.ep_devices()[0]
    assert device.ep_metadata["version"] == ep.__version__


def test_options_are_what_sessions_accept():
    model = harness.build_node("Neg", [np.ones(3, np.float32)]).serialize()
    options = package().options()
    assert len({o.name for o in options}) == len(options) > 0
    assert all(o.type and o.help for o in options)
    harness.ep_session(model, {o.name: o.default for o in options})
    with pytest.raises(Exception, match="no_such_option"):
        harness.ep_session(model, {"no_such_option": "1"})


def test_readme_lists_the_options():
    readme = (pathlib.Path(__file__).resolve().parents[2] / "README.md").read_text()
    kind = "CUDA" if target.on_cuda() else "CPU"
    table = readme.split(f"| {kind} option |")[1].split("\n\n")[0]
    listed = {row.split("`")[1]: row.split("|")[3].strip() for row in table.splitlines() if row.startswith("| `")}
    assert listed == {option.name: option.default for option in package().options()}


def test_registration_is_idempotent():
    check("""
        import onnxruntime as ort, the_wheel as ep
        names = lambda: [d.ep_name for d in ort.get_ep_devices()]
        ep.unregister()
        assert ep.register() == ep.register() == ep.get_ep_name()
        assert names().count(ep.get_ep_name()) == 1
        assert ep.register("CPUFirstExecutionProvider") == "CPUFirstExecutionProvider"
        assert "CPUFirstExecutionProvider" in names()
        ep.unregister("CPUFirstExecutionProvider")
        ep.unregister("CPUFirstExecutionProvider")
        assert "CPUFirstExecutionProvider" not in names()
        assert ep.register("mine") == ep.get_ep_name()
        ep.unregister()
        ep.unregister()
        assert ep.get_ep_name() not in names()
        assert ep.register() == ep.get_ep_name()
    """)


def test_a_library_that_others_registered_counts_as_registered():
    check("""
        import onnxruntime as ort, the_wheel as ep
        ort.register_execution_provider_library(ep.get_ep_name(), ep.get_library_path())
        assert ep.register() == ep.get_ep_name()
        ep.unregister()  # not ours to undo
        assert ep.get_ep_name() in [d.ep_name for d in ort.get_ep_devices()]
    """)


@pytest.mark.parametrize(
    "stub", ["raise ImportError('no such library')", "__version__ = '1.23.2'"], ids=["missing", "old"]
)
def test_onnxruntime_missing_or_old(tmp_path, stub):
    (tmp_path / "onnxruntime.py").write_text(stub + "\n")
    out = check(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        import the_wheel as ep
        ep.unregister()
        try:
            ep.register()
        except ImportError as error:
            print(error)
        """,
        str(tmp_path),
    )
    assert f"{STATE.ep.module.replace('_', '-')} needs onnxruntime 1.24 or newer" in out and "pip install" in out
    assert "1.23.2" in out or "cannot be imported" in out


def test_importing_needs_no_onnxruntime():
    assert check("import sys, the_wheel; print('onnxruntime' in sys.modules)").strip() == "False"


def test_a_session_by_provider_name(tmp_path):
    check(
        """
        import sys
        import numpy as np, onnxruntime as ort, the_wheel as ep
        session = ort.InferenceSession(sys.argv[1], providers=[(ep.register(), {"fusion": "0"})])
        x = np.arange(4, dtype=np.float32)
        assert np.array_equal(session.run(None, {"x": x})[0], -x)
        assert ep.get_ep_name() in session.get_providers()
        """,
        negation(tmp_path),
    )


def negation(folder) -> str:
    """Path of a model with one Neg."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "main",
        [value("x", TensorProto.FLOAT, ["n"])],
        [value("y", TensorProto.FLOAT, ["n"])],
    )
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10), path)
    return str(path)
