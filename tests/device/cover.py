"""Chooses the tests that compute-sanitizer runs: few, and all that run some kernel which the others do not.

pytest plugin: with the fake driver, `-p tests.device.cover --kernel-log FILE` appends a JSON line a test to FILE: its name
and the kernels that it ran. Afterwards

    python -m tests.device.cover FILE... > tests/device/sanitized.txt

writes one test a line: every kernel that some test ran is in one of them, or in two if it can.
"""

from __future__ import annotations

import collections
import fcntl
import json
import pathlib
import re
import sys

import pytest

# A second test finds what the first one's sizes hide.
TWICE = 2
# Under the sanitizer these take minutes: many threads, or thousands of Runs.
SLOW = re.compile(r"test_eight_threads|test_flipped_bytes")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def pytest_addoption(parser):
    parser.getgroup("device").addoption("--kernel-log", help="the file that gets a JSON line a test")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    import target

    yield
    path, driver = item.config.getoption("--kernel-log"), target.STATE.fake
    if path and driver is not None:
        name = item.path.relative_to(ROOT).as_posix() + item.nodeid[item.nodeid.index("::") :]
        line = {"test": name, "kernels": sorted(set(driver.kernels()))}
        with open(path, "a") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            print(json.dumps(line), file=log, flush=True)


def choose(tests: dict[str, frozenset[str]]) -> list[str]:
    """Greedily: the test that runs most of what is still wanted, of two such the shorter name."""
    wanted = collections.Counter()
    for kernels in tests.values():
        wanted.update(kernels)
    wanted = collections.Counter({kernel: min(count, TWICE) for kernel, count in wanted.items()})
    left, chosen = dict(tests), []
    while +wanted:
        best = min(left, key=lambda test: (-sum(wanted[k] > 0 for k in left[test]), len(test), test))
        wanted.subtract(k for k in left.pop(best) if wanted[k] > 0)
        chosen.append(best)
    return chosen


def main(paths: list[str]) -> None:
    lines = [json.loads(line) for path in paths for line in pathlib.Path(path).read_text().splitlines()]
    fast = [line for line in lines if line["kernels"] and not SLOW.search(line["test"])]
    print(*choose({line["test"]: frozenset(line["kernels"]) for line in fast}), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
