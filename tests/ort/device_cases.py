"""The cases of test_device_memory.py. Each runs in a process of its own:

    python device_cases.py LIBRARY CASE [ARGUMENT...]

and passes if it exits with 0. The library is tests/device_ep, an EP whose device addresses fault when the host touches
them, whose fresh memory is poisoned and whose streams are slow.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import pathlib
import subprocess
import sys
import tempfile
import threading

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from device_host import (
    EP,
    MINOR,
    VENDOR,
    chain,
    check,
    devices,
    empty_on_device,
    feeds,
    model_of,
    on_device,
    placement,
    raises,
    register,
    report,
    reset,
    session,
)
from device_reader import compare_node, compare_values, every_kind_of_node

# -------------------------------------------------------------------------------------------------- the emulated device


def host_touch_faults():
    """The emulation itself: reading a device address from the host kills the process."""
    register()
    value = on_device(np.ones((2, 3), np.float32))
    check(value.numpy(), np.ones((2, 3)))
    ctypes.string_at(value.data_ptr(), 4)


def fresh_memory_is_poisoned():
    register()
    value = empty_on_device([8])
    assert (value.numpy().view(np.uint8) == 0xCE).all()


# --------------------------------------------------------------------------------------------------------------- copies


def run_copies_feeds_and_fetches():
    register()
    s = session(chain())
    assert placement(s) == {EP: {"Add", "Mul"}}
    reset()
    f = feeds()
    check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    r = report()
    assert (r["copy_h2d_stream"], r["copy_d2h_stream"]) == (2, 1), r
    assert r["alloc_on_stream"] == 3 and "alloc" not in r, r
    assert (r["input_device"], r["output_device"], r["flush"], r["run_end_sync"]) == (2, 1, 1, 1), r
    assert r["live_blocks"] == 0, r


def empty_tensors():
    register()
    s = session(chain())
    got = s.run(None, feeds(0))[0]
    assert got.shape == (0, 3)
    report()


def bound_device_values_are_not_copied():
    register()
    s = session(chain())
    f = feeds()
    a, b, d = on_device(f["a"]), on_device(f["b"]), empty_on_device([2, 3])
    binding = s.io_binding()
    binding.bind_ortvalue_input("a", a)
    binding.bind_ortvalue_input("b", b)
    binding.bind_ortvalue_output("d", d)
    reset()
    s.run_with_iobinding(binding)
    r = report()
    assert not any(event.startswith(("copy", "alloc", "reserve")) for event in r), r
    check(d.numpy(), (f["a"] + f["b"]) * f["a"])
    # In place: the output takes the first input's buffer, and a new value of the other input counts.
    binding.bind_ortvalue_output("d", a)
    b.update_inplace(f["b"] * 2)
    s.run_with_iobinding(binding)
    check(a.numpy(), (f["a"] + f["b"] * 2) * f["a"])


def output_bound_to_the_device_is_allocated_there():
    register()
    s = session(chain())
    f = feeds()
    reset()
    binding = s.io_binding()
    for name, array in f.items():
        binding.bind_cpu_input(name, array)
    # The public bind_output takes no vendor.
    binding._iobinding.bind_output("d", ort.OrtDevice.make("gpu", 0, VENDOR)._get_c_device())
    s.run_with_iobinding(binding)
    r = report()
    # Old runtimes copy where the input is bound, new ones in the Run.
    assert r.get("copy_h2d_stream", 0) + r.get("copy_h2d_sync", 0) == 2, r
    assert not any(event.startswith("copy_d2h") for event in r), r
    value = binding.get_outputs()[0]
    assert value.device_name() in ("gpu", "cuda"), value.device_name()  # "cuda" before 1.31
    check(value.numpy(), (f["a"] + f["b"]) * f["a"])


def bound_output_of_a_wrong_shape_is_refused():
    register()
    s = session(chain())
    binding = s.io_binding()
    for name, array in feeds().items():
        binding.bind_cpu_input(name, array)
    binding.bind_ortvalue_output("d", empty_on_device([5, 3]))
    with raises("RuntimeError", "shape", "{5,3}", "{2,3}"):
        s.run_with_iobinding(binding)


def copies_between_device_values():
    register()
    source, target = on_device(np.arange(6, dtype=np.float32)), empty_on_device([6])
    host = ort.OrtValue.ortvalue_from_numpy(np.zeros(6, np.float32))
    reset()
    ort.copy_tensors([source], [target])
    ort.copy_tensors([target], [host])
    check(host.numpy(), np.arange(6))
    r = report()
    assert (r["copy_d2d_sync"], r["copy_d2h_sync"]) == (1, 1), r


def host_accessible_values_pass_uncopied():
    if "memory_info" not in (ort.OrtValue.ortvalue_from_shape_and_type.__doc__ or ""):
        return  # this runtime's Python cannot make such a value
    register()
    s = session(chain())
    info = devices()[0].memory_info(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE)
    value = ort.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32, memory_info=info)
    f = feeds()
    value.numpy()[...] = f["a"]
    binding = s.io_binding()
    binding.bind_ortvalue_input("a", value)
    binding.bind_ortvalue_input("b", on_device(f["b"]))
    binding.bind_ortvalue_output("d", empty_on_device([2, 3]))
    reset()
    s.run_with_iobinding(binding)
    r = report()
    assert r["input_pinned"] == 1 and not any(event.startswith("copy") for event in r), r
    check(binding.get_outputs()[0].numpy(), (f["a"] + f["b"]) * f["a"])


def out_of_device_memory():
    register()
    s = session(chain())
    big = np.zeros((30_000_000, 3), np.float32)
    with raises("Fail", "lloca"):  # "Allocation failed", "Failed to allocate memory"...
        s.run(None, {"a": big, "b": big})
    f = feeds()
    check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    report()


# ------------------------------------------------------------------------------------------------ neighbours on the CPU


def input_shared_with_a_cpu_node_arrives_in_host_memory():
    """ORT's Memcpy nodes run on its CPU EP here, and leave the value where it is."""
    register()
    nodes = [("Abs", ["a"], ["e"], {}), ("Add", ["a", "b"], ["c"], {}), ("Mul", ["c", "e"], ["d"], {})]
    s = session(model_of(nodes, ["a", "b"], ["d"]), fallback=True)
    assert placement(s) == {EP: {"Add", "Mul"}, "CPUExecutionProvider": {"Abs"}}, placement(s)
    reset()
    f = feeds()
    check(s.run(None, f)[0], (f["a"] + f["b"]) * np.abs(f["a"]))
    r = report()
    assert r["input_host"] >= 2, r


def cpu_node_in_the_middle():
    register()
    nodes = [("Add", ["a", "b"], ["c"], {}), ("Exp", ["c"], ["e"], {}), ("Mul", ["e", "c"], ["d"], {})]
    s = session(model_of(nodes, ["a", "b"], ["d"]), fallback=True)
    assert placement(s) == {EP: {"Add", "Mul"}, "CPUExecutionProvider": {"Exp"}}, placement(s)
    reset()
    for _ in range(5):
        f = feeds()
        c = f["a"] + f["b"]
        check(s.run(None, f)[0], np.exp(c) * c)
    r = report()
    assert r["run"] == 10 and r["wait_on_device_null"] + r.get("wait_on_host", 0) >= 5, r
    assert r["input_host"] >= 5, r


def memcpy_kernels_bring_values_to_the_device():
    """With kernels of the EP's own, the Memcpy nodes copy: nothing arrives in host memory."""
    register()
    nodes = [("Abs", ["a"], ["e"], {}), ("Add", ["a", "b"], ["c"], {}), ("Mul", ["c", "e"], ["d"], {})]
    s = session(model_of(nodes, ["a", "b"], ["d"]), {"memcpy": "1"}, fallback=True)
    assert placement(s) == {EP: {"Add", "Mul"}, "CPUExecutionProvider": {"Abs"}}, placement(s)
    reset()
    f = feeds()
    check(s.run(None, f)[0], (f["a"] + f["b"]) * np.abs(f["a"]))
    r = report()
    assert (r["run"], r["input_device"]) == (2, 4) and "input_host" not in r, r
    # There and back: what the CPU node reads must be waited for, and its result must arrive before the buffer goes.
    nodes = [("Add", ["a", "b"], ["c"], {}), ("Exp", ["c"], ["e"], {}), ("Mul", ["e", "c"], ["d"], {})]
    s = session(model_of(nodes, ["a", "b"], ["d"]), {"memcpy": "1"}, fallback=True)
    reset()
    for i in range(20):
        f = feeds(1 + i % 5)
        c = f["a"] + f["b"]
        check(s.run(None, f)[0], np.exp(c) * c)
    r = report()
    assert r["run"] == 40 and r["input_device"] == 80 and "input_host" not in r, r
    assert r["live_blocks"] == 0, r


def memcpy_kernels_outlive_the_registration():
    register()
    nodes = [("Add", ["a", "b"], ["c"], {}), ("Exp", ["c"], ["e"], {}), ("Mul", ["e", "c"], ["d"], {})]
    sessions = [session(model_of(nodes, ["a", "b"], ["d"]), {"memcpy": "1"}, fallback=True) for _ in range(2)]
    ort.unregister_execution_provider_library("device")
    while sessions:
        f = feeds()
        c = f["a"] + f["b"]
        check(sessions[-1].run(None, f)[0], np.exp(c) * c)
        sessions.pop()
        gc.collect()


def bodies_of_control_flow_are_not_claimed():
    register()
    info = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)  # noqa: E731
    body = lambda op: helper.make_graph([helper.make_node(op, ["c", "b"], ["r"])], op, [], [info("r")])  # noqa: E731
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    model = model_of([("Add", ["a", "b"], ["c"], {})], ["a", "b"], ["d"])
    model.graph.input.append(flag)
    model.graph.node.append(
        helper.make_node("If", ["flag"], ["d"], then_branch=body("Add"), else_branch=body("Mul"))
    )
    s = session(model, fallback=True)
    f = feeds()
    c = f["a"] + f["b"]
    check(s.run(None, {**f, "flag": np.array(True)})[0], c + f["b"])
    check(s.run(None, {**f, "flag": np.array(False)})[0], c * f["b"])
    assert report()["claim"] >= 3


# ------------------------------------------------------------------------------------------------- graphs and constants


def functions_are_offered_before_inlining():
    """GetCapability comes several times for one graph; what it says each time must fit."""
    register()
    function = helper.make_function(
        "local", "Square", ["x"], ["y"], [helper.make_node("Mul", ["x", "x"], ["y"])], [helper.make_opsetid("", 21)]
    )
    nodes = [("Square", ["a"], ["s"], {"domain": "local"}), ("Add", ["s", "b"], ["d"], {})]
    s = session(model_of(nodes, ["a", "b"], ["d"], functions=[function]))
    f = feeds()
    check(s.run(None, f)[0], f["a"] ** 2 + f["b"])
    assert report()["claim"] >= 2


def constants_inline_and_in_a_file():
    register()
    rng = np.random.default_rng()
    w, v = (rng.standard_normal((2, 3)).astype(np.float32) for _ in range(2))
    nodes = [("Add", ["a", "w"], ["c"], {}), ("Mul", ["c", "v"], ["d"], {})]
    initializers = [onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(v, "v")]
    model = model_of(nodes, ["a"], ["d"], initializers)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "deep").mkdir()
        offset = 4096
        (folder / "deep" / "w.bin").write_bytes(bytes(offset) + w.tobytes())
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "deep/w.bin", "offset": offset, "length": w.nbytes}.items():
            tensor.external_data.add(key=key, value=str(value))
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        a = feeds(names="a")
        from_file = session(str(folder / "model.onnx"))
        r = report()
        assert (r["constant_external"], r["constant_inline"]) == (1, 1), r
        key = "session.model_external_initializers_file_folder_path"
        from_bytes = session(model, config={key: str(folder)})
        assert report()["constant_external"] == 2
        for s in (from_file, from_bytes):
            assert [i.name for i in s.get_inputs()] == ["a"]
            check(s.run(None, a)[0], (a["a"] + w) * v)


def many_groups():
    register()
    nodes = [("Add", ["a", "b"], ["c0"], {})]
    nodes += [("Mul" if i % 2 else "Add", [f"c{i}", "b"], [f"c{i + 1}"], {}) for i in range(9)]
    s = session(model_of(nodes, ["a", "b"], ["c9"]), {"fuse": "0"})
    f = feeds()
    want = f["a"] + f["b"]
    for i in range(9):
        want = want * f["b"] if i % 2 else want + f["b"]
    reset()
    np.testing.assert_allclose(s.run(None, f)[0], want, rtol=1e-5, atol=1e-5)
    assert report()["run"] == 10


def optional_graph_inputs_stay_inputs():
    """An initializer that callers may override is no constant."""
    register()
    w = np.full((2, 3), 2, np.float32)
    nodes = [("Add", ["a", "w"], ["d"], {})]
    s = session(model_of(nodes, ["a", "w"], ["d"], [onnx.numpy_helper.from_array(w, "w")]))
    f = feeds(names="aw")
    check(s.run(None, {"a": f["a"]})[0], f["a"] + 2)
    check(s.run(None, f)[0], f["a"] + f["w"])


def reader_sees_what_the_model_says():
    register()
    model = every_kind_of_node()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        tensor = next(t for t in model.graph.initializer if t.name == "file")
        (folder / "w.bin").write_bytes(bytes(8) + tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "w.bin", "offset": 8, "length": 12}.items():
            tensor.external_data.add(key=key, value=str(value))
        path = folder / "model.onnx"
        path.write_bytes(model.SerializeToString())
        so = ort.SessionOptions()
        so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        so.add_provider_for_devices(devices(), {"dump": str(folder)})
        ort.InferenceSession(str(path), so)
        dumps = [json.loads(file.read_text()) for file in folder.glob("claim*.json")]
        compiled = [json.loads(file.read_text()) for file in folder.glob("compile*.json")]
    assert sum(dump["is_body"] for dump in dumps) == 4, "the bodies are offered too"
    (graph,) = [dump for dump in dumps if not dump["is_body"]]
    assert graph["model_path"] == str(path)
    assert graph["inputs"] == ["x", "flag", "words", "image"]
    assert graph["outputs"] == [output.name for output in model.graph.output]
    compare_values(graph["values"], model, folder)
    seen = {tuple(node["outputs"]): node for node in graph["nodes"]}
    assert len(seen) == len(model.graph.node)
    for node in model.graph.node:
        compare_node(seen[tuple(name or None for name in node.output)], node)
    files = [group["values"]["file"]["initializer"] for group in compiled if "file" in group["values"]]
    assert files == [f"{folder}/w.bin@8+12"], files


# ----------------------------------------------------------------------------------------------------- streams, threads


def one_stream_a_thread():
    register()
    s = session(chain())
    s.run(None, feeds())
    reset()
    errors = []
    gate = threading.Barrier(4)

    def work():
        try:
            gate.wait()
            for _ in range(20):
                f = feeds(int(np.random.default_rng().integers(1, 9)))
                check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors, errors
    r = report()
    created = r["stream_create"]
    # 1.24 may give a new thread the main thread's idle stream.
    assert created == 4 or (MINOR == 24 and created == 3), r
    assert r["run_on_stream"] == 80, r
    del s
    gc.collect()
    r = report()
    assert r["stream_release"] == created + 1 and r["live_blocks"] == 0, r


def runs_one_at_a_time_when_asked():
    register()
    s = session(chain(), {"concurrent": "0"})
    threads = []
    for _ in range(3):
        threads.append(threading.Thread(target=lambda: [s.run(None, feeds()) for _ in range(5)]))
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert report()["run"] == 15


def memory_of_the_session():
    """Allocators and streams that come from the session's EP, not from the factory."""
    register()
    s = session(chain(), {"own_memory": "1"})
    made = report()
    f = feeds()
    check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    r = report()
    assert r["session_allocators"] > 1 and r["session_streams"] > made["session_streams"], r
    del s
    gc.collect()
    assert report()["live_blocks"] == 0


def two_eps_in_one_session():
    """A value goes from one EP's node to the other's, both on the device."""
    register()
    register("TwoExecutionProvider")
    so = ort.SessionOptions()
    so.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    so.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    so.add_provider_for_devices(devices(), {"ops": "Add"})
    so.add_provider_for_devices(devices("TwoExecutionProvider"), {"ops": "Mul"})
    s = ort.InferenceSession(chain().SerializeToString(), so)
    assert placement(s) == {EP: {"Add"}, "TwoExecutionProvider": {"Mul"}}, placement(s)
    for _ in range(5):
        f = feeds()
        check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    r = report()
    assert r["run"] == 10 and r["input_device"] == 20, r


def no_streams():
    register("device sync")
    s = session(chain())
    f = feeds()
    check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    r = report()
    assert "stream_create" not in r and r["alloc"] == 3, r


def run_without_synchronisation():
    register()
    s = session(chain())
    f = feeds()
    binding = s.io_binding()
    binding.bind_ortvalue_input("a", on_device(f["a"]))
    binding.bind_ortvalue_input("b", on_device(f["b"]))
    target = empty_on_device([2, 3])
    binding.bind_ortvalue_output("d", target)
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    options.add_run_config_entry("device_ep.mark", "1")
    reset()
    s.run_with_iobinding(binding, options)
    r = report()
    assert "flush" not in r and (r["run_end_async"], r["run_start_marked"]) == (1, 1), r
    s.run_with_iobinding(binding)  # the same stream, waited for
    check(target.numpy(), (f["a"] + f["b"]) * f["a"])


def graphs_are_captured_replayed_and_released():
    if MINOR < 27:
        return  # 1.26 does not wait after a replay, older ones know no graphs
    register()
    s = session(chain(), {"graphs": "1"})
    f = feeds()
    a, b, d = on_device(f["a"]), on_device(f["b"]), empty_on_device([2, 3])
    binding = s.io_binding()
    binding.bind_ortvalue_input("a", a)
    binding.bind_ortvalue_input("b", b)
    binding.bind_ortvalue_output("d", d)

    def run(graph, want):
        reset()
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        s.run_with_iobinding(binding, options)
        r = report()
        seen = r.get("run", 0), r.get("replay", 0), r.get("sync", 0)
        assert seen == want, (seen, want)
        check(d.numpy(), (f["a"] + f["b"]) * f["a"])

    for graph in (7, 8):
        run(graph, (3, 0, 0))  # warm-up Runs inside one Run of the user
        f["b"] = f["b"] * 2
        b.update_inplace(f["b"])
        run(graph, (0, 1, 1))
    run(-1, (1, 0, 0))
    if hasattr(s, "release_captured_graph"):
        s.release_captured_graph(7)
        assert report()["release_graph"] == 1
        run(7, (3, 0, 0))
    run(8, (0, 1, 1))


# --------------------------------------------------------------------------------------------------------------- errors


def failing_session(stage: str, how: str):
    register()
    s, f = None, feeds()
    option = {"fail": "fail_at", "panic": "panic_at"}[how]
    text = f"injected {'failure' if how == 'fail' else 'panic'} in {stage}"
    options = {option: stage, "fuse": "0"}
    if stage in ("create_ep", "claim", "compile", "second_compile"):
        for fallback in (False, True):
            with raises("Fail", text):
                session(chain(), options, fallback=fallback)
    else:
        s = session(chain(), options)
        for _ in range(3):
            with raises("Fail", text):
                s.run(None, f)
    # The process is as good as new.
    good = session(chain())
    check(good.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    del s, good
    gc.collect()
    r = report()
    assert r["ep_create"] == r["ep_release"], r
    compiled = r["compile"] - 2 * (stage in ("compile", "second_compile"))
    assert r["compiled_release"] == compiled and r["live_blocks"] == 0, r


def errors_of_a_node_name_it():
    register()
    s = session(model_of([("Add", ["a", "b"], ["d"], {})], ["a", "b"], ["d"], shape=("N", "M")))
    with raises("Fail", "ai.onnx::Add", "[2, 3] and [4, 5]", "equal shapes or a single element"):
        s.run(None, {"a": np.zeros((2, 3), np.float32), "b": np.zeros((4, 5), np.float32)})


def context_models_are_refused():
    register()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.onnx"
        path.write_bytes(chain().SerializeToString())
        with raises("InvalidArgument", "'ep.context_enable': got '1'", "does not write compiled models"):
            session(str(path), config={"ep.context_enable": "1"})


def dynamic_options_arrive():
    register()
    s = session(chain())
    s.set_ep_dynamic_options({"note": "hello"})
    assert report()["dynamic_option"] == 1
    with raises("RuntimeError", "unexpected dynamic options", "other"):
        s.set_ep_dynamic_options({"other": "x"})


def session_with_a_talkative_log():
    register()
    so = ort.SessionOptions()
    so.log_severity_level = 1
    so.add_provider_for_devices(devices(), {})
    ort.InferenceSession(chain().SerializeToString(), so)


def unknown_options_are_refused():
    register()
    with raises("InvalidArgument", "provider option 'concurent'", "did you mean 'concurrent'"):
        session(chain(), {"concurent": "1"})
    with raises("InvalidArgument", "'fail_at': got 'nowhere'", "one of none, create_ep"):
        session(chain(), {"fail_at": "nowhere"})


def failing_registration(callback: str):
    kind = "panic in GetSupportedDevices" if callback == "panic" else f"injected failure in {callback}"
    with raises("Fail", kind):
        register(f"device fail={callback}")
    if callback == "CreateAllocator" and MINOR < 32:
        # These ORTs free the failed registration's devices but go on listing them: get_ep_devices reads freed memory.
        return
    # Nothing is left behind that hurts.
    register("good")
    f = feeds()
    check(session(chain()).run(None, f)[0], (f["a"] + f["b"]) * f["a"])


def too_old_a_runtime():
    """Run on 1.23 alone."""
    with raises("Fail", f"ONNX Runtime {ort.__version__} is not supported, 1.24 or newer is needed"):
        register()


# --------------------------------------------------------------------------------------------------- registration, ends


def device_shows_what_it_is():
    register()
    (device,) = devices()
    assert device.ep_vendor == "nxrt tests" and device.ep_options == {"concurrent": "1"}
    assert device.ep_metadata["emulated"] == "1" and device.ep_metadata["version"].count(".") == 2
    assert device.device.type == ort.OrtHardwareDeviceType.CPU


def registered_name_can_name_the_ep():
    register("MyOwnExecutionProvider")
    assert not devices() and len(devices("MyOwnExecutionProvider")) == 1
    s = session(chain(), {"concurrent": "0"}, ep="MyOwnExecutionProvider")
    f = feeds()
    check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    assert placement(s) == {"MyOwnExecutionProvider": {"Add", "Mul"}}


def exit_with_everything_alive():
    global keep
    register()
    s = session(chain())
    s.run(None, feeds())
    keep = (s, s.io_binding(), on_device(np.ones(3, np.float32)))


def exit_right_after_registration():
    register()


def unregister_then_exit():
    register()
    session(chain()).run(None, feeds())
    gc.collect()
    ort.unregister_execution_provider_library("device")
    assert not devices()


def session_outlives_its_registration():
    register()
    s = session(chain())
    s.run(None, feeds())
    ort.unregister_execution_provider_library("device")
    f = feeds()
    check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    thread = threading.Thread(target=lambda: s.run(None, feeds()))  # a new stream from a released factory
    thread.start()
    thread.join()
    del s
    gc.collect()
    r = report()
    assert r["ep_create"] == r["ep_release"] == 1, r


def session_alive_at_exit_after_unregistration():
    global keep
    register()
    keep = session(chain())
    keep.run(None, feeds())
    ort.unregister_execution_provider_library("device")


def old_and_new_registration_together():
    register()
    old = session(chain())
    ort.unregister_execution_provider_library("device")
    register()
    new = session(chain())
    for s in (old, new, old):
        f = feeds()
        check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    del old
    gc.collect()
    f = feeds()
    check(new.run(None, f)[0], (f["a"] + f["b"]) * f["a"])


def register_and_unregister_again_and_again():
    for i in range(20):
        register(f"device {i % 3}")
        s = session(chain())
        f = feeds()
        check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
        if i % 2:
            del s
            gc.collect()
        ort.unregister_execution_provider_library(f"device {i % 3}")


def same_name_twice():
    register()
    with raises("Fail", "already registered"):
        register()
    f = feeds()
    check(session(chain()).run(None, f)[0], (f["a"] + f["b"]) * f["a"])


def two_names_of_one_library():
    register("one")
    register("TwoExecutionProvider")
    f = feeds()
    for ep in (EP, "TwoExecutionProvider"):
        check(session(chain(), ep=ep).run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    ort.unregister_execution_provider_library("one")
    check(session(chain(), ep="TwoExecutionProvider").run(None, f)[0], (f["a"] + f["b"]) * f["a"])


def legacy_providers_argument():
    if MINOR < 25:
        return  # a plugin EP cannot be named there
    register()
    model = chain().SerializeToString()
    s = ort.InferenceSession(model, providers=[(EP, {"concurrent": "0"})])
    f = feeds()
    check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    assert report()["run"] == 1


def flat_memory():
    """200 Runs and 20 sessions leave nothing behind."""
    register()
    s = session(chain())
    rng = np.random.default_rng()
    for _ in range(200):
        f = feeds(int(rng.integers(1, 64)))
        check(s.run(None, f)[0], (f["a"] + f["b"]) * f["a"])
    for _ in range(20):
        session(chain()).run(None, feeds())
    del s
    gc.collect()
    r = report()
    assert r["live_blocks"] == 0 and r["ep_create"] == r["ep_release"] == 21, r
    assert r["stream_create"] == r["stream_release"], r
    assert r["free"] == r.get("alloc", 0) + r.get("alloc_on_stream", 0) + r.get("reserve", 0), r


_SERVANTS = ("cases", "main", "run")


def cases() -> list[str]:
    """The names of all cases."""
    functions = inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    return [name for name, f in functions if f.__module__ == __name__ and name not in _SERVANTS]


def main():
    case, *arguments = sys.argv[2:]
    assert case in cases(), case
    globals()[case](*arguments)


def run(library: str, case: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a case in a child process."""
    command = [sys.executable, __file__, library, case, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


if __name__ == "__main__":
    main()
