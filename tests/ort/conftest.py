"""Registers the EP once, seeds the random inputs, and provides the fixtures of the suite."""

from __future__ import annotations

import collections
import pathlib
import secrets
import zlib

import numpy as np
import onnxruntime as ort
import pytest

import harness
import target
from target import STATE

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIERS = ("scalar", "avx2", "avx512vnni", "auto")
# On CUDA a kernel's variants are chosen by what the GPU has: a default session, and one that takes this one for a small
# GPU.
CUDA_TIERS = {"default": {}, "small": {"shared_memory_limit": "49152"}}
# What Linux calls the features that a tier needs.
TIER_FLAGS = {
    "scalar": set(),
    "auto": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
}


def pytest_addoption(parser):
    group = parser.getgroup("nxrt")
    group.addoption("--ep", choices=target.EPS, default="cpu", help="the EP under test")
    group.addoption("--ep-library", help="the EP's shared library, when its wheel is not installed")
    group.addoption("--fake-cuda", metavar="PATH", help="the built libcuda.so.1 of tests/fake_cuda, in a GPU's stead")
    group.addoption(
        "--io", choices=("host", "device", "mixed"), default="mixed",
        help="on CUDA, where inputs and outputs lie; mixed: on the GPU where the shapes of all outputs are known",
    )
    group.addoption("--device-library", help="the built tests/device_ep, when cargo should not build it")
    group.addoption("--more-models", metavar="FOLDER", type=pathlib.Path, help="decoders for test_more_traces.py")
    group.addoption("--seed", type=int, help="seed of every random input; printed at the start of each run")
    group.addoption(
        "--oracles-only",
        action="store_true",
        help="compare the float64 references with ORT CPU and load no EP: for work on the tests, never for a verdict",
    )


def pytest_configure(config):
    STATE.oracles_only = config.getoption("--oracles-only")
    STATE.ep = target.EPS[config.getoption("--ep")]
    STATE.io = config.getoption("--io")
    if config.getoption("--fake-cuda"):
        STATE.fake = target.load_fake_driver(config.getoption("--fake-cuda"))
    for marker, _ in MARKERS.values():
        config.addinivalue_line("markers", marker)
    config.stash_deselected = collections.Counter()
    # pytest-xdist's workers take the seed that the controller printed.
    config.stash_seed = getattr(config, "workerinput", {}).get("nxrt_seed", config.getoption("--seed"))
    if config.stash_seed is None:
        config.stash_seed = secrets.randbits(31)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["nxrt_seed"] = node.config.stash_seed


# Marker -> how pytest shows it, and whether a run leaves its tests out.
MARKERS = {
    "cpu_only": ("cpu_only(why): about the CPU EP alone", lambda config: config.getoption("--ep") != "cpu"),
    "cuda_only": ("cuda_only(why): about the CUDA EP alone", lambda config: config.getoption("--ep") != "cuda"),
    "gpu_only": ("gpu_only(why): needs a GPU's speed or its driver", lambda config: config.getoption("--fake-cuda")),
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out what is about another EP; the summary says how many tests that are, and why."""
    left_out = {}
    for item in items:
        for name, (_, leaves_out) in MARKERS.items():
            marker = item.get_closest_marker(name)
            if marker and leaves_out(config):
                left_out[item] = f"{name}: {marker.args[0]}"
    config.stash_deselected.update(left_out.values())
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["nxrt_deselected"] = dict(session.config.stash_deselected)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    # Every worker collects all tests: one worker's count is the run's.
    node.config.stash_deselected = collections.Counter(getattr(node, "workeroutput", {}).get("nxrt_deselected"))


def pytest_terminal_summary(terminalreporter, config):
    counts = config.stash_deselected
    if counts:
        terminalreporter.write_line(f"{counts.total()} tests are not for this run (--ep {config.getoption('--ep')}):")
        for why, count in sorted(counts.items()):
            terminalreporter.write_line(f"  {count:5} {why}")


def pytest_ignore_collect(collection_path, config):
    if collection_path.name == "test_more_traces.py" and not config.getoption("--more-models"):
        return True
    return None


def pytest_generate_tests(metafunc):
    if "more_model" in metafunc.fixturenames:
        folders = sorted(path.parent for path in metafunc.config.getoption("--more-models").glob("*/trace.npz"))
        assert folders, "--more-models holds no decoder"
        metafunc.parametrize("more_model", folders, ids=lambda folder: folder.name)
    if "tier" in metafunc.fixturenames:
        on_cuda = metafunc.config.getoption("--ep") == "cuda"
        metafunc.parametrize("tier", CUDA_TIERS if on_cuda else TIERS, indirect=True)


def pytest_report_header(config):
    lines = [f"random inputs: --seed={config.stash_seed}", f"onnxruntime {ort.__version__}, {STATE.ep.name}"]
    if config.getoption("--fake-cuda"):
        lines.append(f"the CUDA driver is {config.getoption('--fake-cuda')}: no GPU")
    if harness.oracles_only():
        lines.append("ORACLES ONLY: the EP is NOT tested in this run")
    return lines


def find_library(config) -> str:
    given = config.getoption("--ep-library")
    if given:
        path = pathlib.Path(given)
    else:
        try:
            path = pathlib.Path(target.package().get_library_path())
        except AssertionError:
            path = ROOT / "target" / "release" / STATE.ep.library
    if not path.is_file():
        pytest.fail(
            f"no EP library at {path}: install the wheel (pip install {STATE.ep.project}), build it or name it with "
            "--ep-library",
            pytrace=False,
        )
    return str(path.resolve())  # ORT looks for a relative path beside itself


@pytest.fixture(scope="session")
def ep_library(request) -> str:
    """Path of the EP's shared library; a missing library is a failure, never a skip."""
    library = find_library(request.config)
    STATE.library = library
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


@pytest.fixture(autouse=True)
def driver_faults(request):
    """With the fake driver: what it found wrong during a test fails the test."""
    driver = STATE.fake
    if driver is None:
        yield
        return
    driver.clear_log()
    yield
    faults = driver.errors()
    assert not faults, f"the driver found {len(faults)} faults: {faults[:5]}"
    assert driver.check_guards() == 1, "bytes beside a block of device memory were written"


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


@pytest.fixture
def tier(request) -> dict[str, str]:
    """Provider options that force each SIMD tier in turn. A tier that this machine lacks must be refused by name.

    On CUDA, those that force each class of GPU.
    """
    if target.on_cuda():
        return CUDA_TIERS[request.param]
    options = {"tier": request.param}
    if not machine_has(request.param) and not harness.oracles_only():
        model = harness.build_node("Neg", [np.ones(3, np.float32)])
        with pytest.raises(Exception, match="tier"):
            harness.ep_session(model.serialize(), options)
        pytest.skip(f"this CPU has no {request.param}; the EP refuses it by name")
    return options
