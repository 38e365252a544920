"""Memory, copies, devices and options of the CUDA EP, on the emulated driver.

Each case runs in a process of its own and must exit with 0: a crash in a destructor counts. The cases themselves are in
cuda_cases.py.
"""

from __future__ import annotations

import pytest

import cuda_cases

CASES = [
    "a_limit_holds_as_long_as_its_session",
    "an_old_driver_is_no_error",
    "batches_of_copies",
    "bytes_survive_the_way_there_and_back",
    "cached_memory_goes_when_memory_is_short",
    "copies_between_devices",
    "exit_with_values_alive",
    "gpus_before_hopper_multiply_many_rows",
    "many_gpus",
    "memory_is_flat",
    "no_gpu_is_no_error",
    "options_of_orts_cuda_ep",
    "page_locked_values",
    "registration_takes_no_memory",
    "sessions_come_and_go",
    "users_may_bring_their_stream",
]


pytestmark = pytest.mark.cuda_only("memory and devices of the CUDA EP")


@pytest.fixture
def driver(request) -> str:
    path = request.config.getoption("--fake-cuda")
    return path or pytest.skip("the cases need the controls of the emulated driver")


@pytest.mark.parametrize("case", CASES)
def test_case(ep_library, driver, case):
    child = cuda_cases.run(ep_library, driver, case)
    assert child.returncode == 0, f"exit code {child.returncode}\n{child.stdout}\n{child.stderr}"


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("no_gpu_is_no_error", "no CUDA device: CUDA call cuInit failed: CUDA_ERROR_NO_DEVICE"),
        ("an_old_driver_is_no_error", "no CUDA device: the NVIDIA driver is too old: it supports CUDA 12.8"),
        (
            "a_limit_holds_as_long_as_its_session",
            "could not allocate 7340032 bytes of GPU memory for a tensor on GPU 0: 10485760 bytes of at most 16777216 "
            "are in use",
        ),
    ],
)
def test_the_log_says_what_is_missing(ep_library, driver, case, line):
    child = cuda_cases.run(ep_library, driver, case)
    assert child.returncode == 0 and line in child.stderr, child.stderr


def test_every_case_is_listed():
    assert cuda_cases.cases() == CASES
