"""Registering, unregistering and leaving in any order: each order in a process of its own, which must end with 0."""

import subprocess
import sys
import textwrap

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import harness

PRELUDE = f"""
import gc, sys, threading
import numpy as np
import onnxruntime as ort
NAME = {harness.EP_NAME!r}
library, model = sys.argv[1:3]
x = np.arange(8, dtype=np.float32)

def register(name=NAME):
    ort.register_execution_provider_library(name, library)

def devices(name=NAME):
    return [d for d in ort.get_ep_devices() if d.ep_name == name]

def session(name=NAME):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices(devices(name), {{}})
    return ort.InferenceSession(model, options)

def check(s):
    (y,) = s.run(None, {{"x": x}})
    assert np.array_equal(y, -x), y
"""

ORDERS = {
    "register": "register()",
    "register_unregister": "register(); ort.unregister_execution_provider_library(NAME)",
    "devices_are_listed": "register(); assert len(devices()) == 1, devices()",
    "leave_with_a_session": "register(); s = session(); check(s)",
    "drop_the_session_first": "register(); s = session(); check(s); del s; gc.collect(); "
    "ort.unregister_execution_provider_library(NAME)",
    "unregister_under_a_session": "register(); s = session(); check(s); "
    "ort.unregister_execution_provider_library(NAME); check(s); del s; gc.collect()",
    "leave_after_unregister_under_a_session": "register(); s = session(); "
    "ort.unregister_execution_provider_library(NAME); check(s)",
    "register_again": """
        for _ in range(3):
            register()
            s = session()
            check(s)
            del s
            gc.collect()
            ort.unregister_execution_provider_library(NAME)
            assert not devices()
    """,
    "register_again_over_a_live_session": """
        register()
        old = session()
        ort.unregister_execution_provider_library(NAME)
        register()
        new = session()
        check(old)
        check(new)
    """,
    "same_name_twice": """
        register()
        try:
            register()
        except Exception as error:
            assert "already registered" in str(error), error
        else:
            raise AssertionError("the second registration went through")
        check(session())
    """,
    "two_names": """
        register()
        register("OtherExecutionProvider")
        check(session())
        check(session("OtherExecutionProvider"))
        ort.unregister_execution_provider_library(NAME)
        check(session("OtherExecutionProvider"))
    """,
    "a_name_that_is_no_provider": """
        register("nxrt")
        check(session())
        ort.unregister_execution_provider_library("nxrt")
        assert not devices()
    """,
    "unregister_what_was_never_registered": """
        try:
            ort.unregister_execution_provider_library(NAME)
        except Exception:
            pass
        else:
            raise AssertionError("nothing was registered")
        register()
        check(session())
    """,
    "many_sessions": """
        register()
        kept = [session() for _ in range(20)]
        for s in kept:
            check(s)
        for s in kept[::2]:
            del s
        gc.collect()
        for s in kept[1::2]:
            check(s)
    """,
    # A thread still inside ORT when Python exits aborts the process with ORT's own CPU EP too: join it.
    "leave_after_a_thread_ran": """
        register()
        s = session()
        started, stop = threading.Event(), threading.Event()

        def until_stopped():
            while not stop.is_set():
                check(s)
                started.set()

        thread = threading.Thread(target=until_stopped)
        thread.start()
        started.wait()
        stop.set()
        thread.join()
    """,
    "threads_open_and_close_sessions": """
        register()
        failures = []

        def work():
            try:
                for _ in range(5):
                    check(session())
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not failures, failures
    """,
    "sys_exit": "register(); s = session(); check(s); sys.exit(0)",
    "fork": """
        import os
        register()
        pid = os.fork()
        if pid == 0:
            check(session())
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        check(session())
    """,
}


@pytest.fixture(scope="module")
def negation(tmp_path_factory):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])], "g", [value("x", TensorProto.FLOAT, ["n"])],
        [value("y", TensorProto.FLOAT, ["n"])],
    )
    path = tmp_path_factory.mktemp("lifecycle") / "neg.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return str(path)


# A CUDA context does not survive a fork.
FORKS = pytest.mark.cpu_only("a forked process goes on")


@pytest.mark.parametrize("order", [pytest.param(o, marks=FORKS) if o == "fork" else o for o in ORDERS])
def test_order(order, negation):
    if harness.oracles_only():
        compile(PRELUDE + textwrap.dedent(ORDERS[order]), order, "exec")
        return
    script = PRELUDE + textwrap.dedent(ORDERS[order])
    done = subprocess.run(
        [sys.executable, "-c", script, harness.STATE.library, negation], capture_output=True, text=True, timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "panicked" not in done.stderr, done.stderr


def test_registering_something_else(tmp_path):
    """A file that is no EP is an error of register, and the process goes on."""
    import onnxruntime as ort

    nothing = tmp_path / "nothing.so"
    nothing.write_bytes(b"not a library")
    with pytest.raises(Exception):
        ort.register_execution_provider_library("nothing", str(nothing))


@pytest.mark.cpu_only("its options")
@pytest.mark.parametrize(
    "options, words",
    [
        ({"teir": "auto"}, ("teir", "tier")),
        ({"tier": "sse"}, ("tier", "sse", "scalar")),
        ({"chunks": "many"}, ("chunks", "many")),
        ({"chunks": "-1"}, ("chunks", "-1")),
        ({"no_such_option": "1"}, ("no_such_option",)),
    ],
    ids=str,
)
def test_options_that_do_not_exist(options, words):
    """An unknown option or value is an error that says what would be right."""
    if harness.oracles_only():
        return
    model = harness.build_node("Neg", [np.ones(3, np.float32)])
    with pytest.raises(Exception) as caught:
        harness.ep_session(model.serialize(), options)
    for word in words:
        assert word in str(caught.value)
