"""The plugin-EP ABI on a real onnxruntime, by an EP on an emulated device (tests/device_ep): copies, IOBinding,
streams, what neighbours on the CPU do to inputs, errors and panics, and every order of registration, sessions and exit.

Each case runs in a process of its own and must exit with 0: a crash in a destructor counts. The cases themselves are in
device_cases.py; `--device-library` names a built library, else cargo builds it.
"""

from __future__ import annotations

import json
import pathlib
import subprocess

import onnxruntime as ort
import pytest

import device_cases

pytestmark = pytest.mark.cpu_only("the ABI, by an EP of its own")
ROOT = pathlib.Path(__file__).resolve().parents[2]

CASES = [
    "bodies_of_control_flow_are_not_claimed",
    "bound_device_values_are_not_copied",
    "bound_output_of_a_wrong_shape_is_refused",
    "constants_inline_and_in_a_file",
    "context_models_are_refused",
    "copies_between_device_values",
    "cpu_node_in_the_middle",
    "device_shows_what_it_is",
    "dynamic_options_arrive",
    "empty_tensors",
    "errors_of_a_node_name_it",
    "exit_right_after_registration",
    "exit_with_everything_alive",
    "flat_memory",
    "fresh_memory_is_poisoned",
    "functions_are_offered_before_inlining",
    "graphs_are_captured_replayed_and_released",
    "host_accessible_values_pass_uncopied",
    "input_shared_with_a_cpu_node_arrives_in_host_memory",
    "legacy_providers_argument",
    "many_groups",
    "memcpy_kernels_bring_values_to_the_device",
    "memcpy_kernels_outlive_the_registration",
    "memory_of_the_session",
    "no_streams",
    "old_and_new_registration_together",
    "one_stream_a_thread",
    "optional_graph_inputs_stay_inputs",
    "out_of_device_memory",
    "output_bound_to_the_device_is_allocated_there",
    "reader_sees_what_the_model_says",
    "register_and_unregister_again_and_again",
    "registered_name_can_name_the_ep",
    "run_copies_feeds_and_fetches",
    "run_without_synchronisation",
    "runs_one_at_a_time_when_asked",
    "same_name_twice",
    "session_alive_at_exit_after_unregistration",
    "session_outlives_its_registration",
    "two_eps_in_one_session",
    "two_names_of_one_library",
    "unknown_options_are_refused",
    "unregister_then_exit",
]
STAGES = ["create_ep", "claim", "compile", "second_compile", "run", "run_start", "run_end"]


@pytest.fixture(scope="session")
def device_library(request) -> str:
    given = request.config.getoption("--device-library")
    if given:
        assert pathlib.Path(given).is_file(), given
        return given
    command = ["cargo", "build", "--quiet", "--locked", "-p", "device-ep", "--message-format=json"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    artifacts = map(json.loads, built.stdout.splitlines())
    (library,) = [a["filenames"][0] for a in artifacts if a.get("target", {}).get("name") == "device_ep"]
    return library


def passes(library: str, case: str, *arguments: str) -> str:
    """The child's stderr."""
    child = device_cases.run(library, case, *arguments)
    assert child.returncode == 0, f"exit code {child.returncode}\n{child.stdout}\n{child.stderr}"
    return child.stderr


@pytest.mark.parametrize("case", CASES)
def test_case(device_library, case):
    passes(device_library, case)


@pytest.mark.parametrize("how", ["fail", "panic"])
@pytest.mark.parametrize("stage", STAGES)
def test_failing_session(device_library, stage, how):
    passes(device_library, "failing_session", stage, how)


def test_panic_in_a_parallel_task(device_library):
    passes(device_library, "failing_session", "task", "panic")


@pytest.mark.parametrize("callback", ["CreateEpFactories", "GetSupportedDevices", "CreateAllocator", "panic"])
def test_failing_registration(device_library, callback):
    passes(device_library, "failing_registration", callback)


def test_log_lines_reach_the_log(device_library):
    assert "device_ep: a session" in passes(device_library, "session_with_a_talkative_log")
    assert "device_ep: a session" not in passes(device_library, "run_copies_feeds_and_fetches")
    short = "could not allocate 360000000 bytes for a tensor on the emulated device"
    assert short in passes(device_library, "out_of_device_memory")


def test_emulation_faults_on_host_access(device_library):
    """Without this the other cases would prove little: a forgotten copy must not go unnoticed."""
    child = device_cases.run(device_library, "host_touch_faults")
    assert child.returncode == -11, f"exit code {child.returncode}\n{child.stderr}"


def test_every_case_is_listed():
    named = {"failing_session", "failing_registration", "host_touch_faults", "session_with_a_talkative_log"}
    named.add("too_old_a_runtime")  # for 1.23, where no suite runs
    assert set(device_cases.cases()) == set(CASES) | named
    assert int(ort.__version__.split(".")[1]) >= 24
