"""Registers the EP once, seeds the random inputs, and provides the fixtures of the suite."""

from __future__ import annotations

import pathlib
import secrets
import zlib

import numpy as np
import onnxruntime as ort
import pytest

import harness

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIERS = ("scalar", "avx2", "avx512vnni", "auto")
# What Linux calls the features that a tier needs.
TIER_FLAGS = {
    "scalar": set(),
    "auto": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
}


def pytest_addoption(parser):
    group = parser.getgroup("nxrt")
    group.addoption("--ep-library", help="the EP's shared library, when the wheel nxrt-ep-cpu is not installed")
    group.addoption("--device-library", help="the built tests/device_ep, when cargo should not build it")
    group.addoption("--seed", type=int, help="seed of every random input; printed at the start of each run")
    group.addoption(
        "--oracles-only",
        action="store_true",
        help="compare the float64 references with ORT CPU and load no EP: for work on the tests, never for a verdict",
    )


def pytest_configure(config):
    harness.STATE.oracles_only = config.getoption("--oracles-only")
    # pytest-xdist's workers take the seed that the controller printed.
    config.stash_seed = getattr(config, "workerinput", {}).get("nxrt_seed", config.getoption("--seed"))
    if config.stash_seed is None:
        config.stash_seed = secrets.randbits(31)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["nxrt_seed"] = node.config.stash_seed


def pytest_report_header(config):
    lines = [f"random inputs: --seed={config.stash_seed}", f"onnxruntime {ort.__version__}"]
    if harness.oracles_only():
        lines.append("ORACLES ONLY: the EP is NOT tested in this run")
    return lines


def find_library(config) -> str:
    given = config.getoption("--ep-library")
    if given:
        path = pathlib.Path(given)
    else:
        try:
            import nxrt_ep_cpu
        except ImportError:
            path = ROOT / "target" / "release" / "libnxrt_ep_cpu.so"
        else:
            path = pathlib.Path(nxrt_ep_cpu.get_library_path())
    if not path.is_file():
        pytest.fail(
            f"no EP library at {path}: install the wheel (pip install ./python/cpu), build it "
            "(cargo build --release -p ep-cpu) or name it with --ep-library",
            pytrace=False,
        )
    return str(path.resolve())  # ORT looks for a relative path beside itself


@pytest.fixture(scope="session")
def ep_library(request) -> str:
    """Path of the EP's shared library; a missing library is a failure, never a skip."""
    library = find_library(request.config)
    harness.STATE.library = library
    return library


@pytest.fixture(scope="session", autouse=True)
def registered_ep(request):
    """Registers the EP with ORT for the whole run."""
    if harness.oracles_only():
        yield None
        return
    library = request.getfixturevalue("ep_library")
    ort.register_execution_provider_library(harness.EP_NAME, library)
    assert harness.ep_devices(), f"{library} registered but offers no {harness.EP_NAME} device"
    yield library


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random inputs: they differ per run and per test, and --seed repeats a run."""
    return np.random.default_rng([request.config.stash_seed, zlib.crc32(request.node.nodeid.encode())])


def cpu_flags() -> set[str]:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def machine_has(tier: str) -> bool:
    return TIER_FLAGS[tier] <= cpu_flags()


@pytest.fixture(params=TIERS)
def tier(request) -> dict[str, str]:
    """Provider options that force each SIMD tier in turn. A tier that this machine lacks must be refused by name."""
    options = {"tier": request.param}
    if not machine_has(request.param) and not harness.oracles_only():
        model = harness.build_node("Neg", [np.ones(3, np.float32)])
        with pytest.raises(Exception, match="tier"):
            harness.ep_session(model.serialize(), options)
        pytest.skip(f"this CPU has no {request.param}; the EP refuses it by name")
    return options
