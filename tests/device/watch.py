"""pytest plugin of the device suite (`-p tests.device.watch`).

--device-log FILE writes a JSON line a test as soon as it is done, so that a killed run still says what it did. After
--device-seconds no further test starts: what then is left is counted, not failed. --device-tests FILE takes the tests that
FILE names, in its order. --device-shard I/N takes every N-th of these.
"""

from __future__ import annotations

import json
import os
import pathlib
import time

import pytest

# After one of these, every later call of the process fails, whatever it does.
STICKY = ("ILLEGAL_ADDRESS", "LAUNCH_FAILED", "MISALIGNED_ADDRESS", "ILLEGAL_INSTRUCTION", "HARDWARE_STACK_ERROR",
          "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_TIMEOUT", "CUDA_ERROR_ASSERT")  # fmt: skip
NO_TIME = "no time left on the device"


def pytest_addoption(parser):
    group = parser.getgroup("device")
    group.addoption("--device-log", help="the file that gets a JSON line a test")
    group.addoption("--device-seconds", type=float, default=1e9, help="start no test after this time")
    group.addoption("--device-tests", type=pathlib.Path, help="a file with the name of a test a line")
    group.addoption("--device-shard", default="0/1", help="I/N: every N-th test, from the I-th on")


def pytest_configure(config):
    # All workers of pytest-xdist measure from the controller's start.
    start = getattr(config, "workerinput", {}).get("device_start", time.time())
    config.pluginmanager.register(Watch(config, start), "device-watch")


class Watch:
    def __init__(self, config, start: float):
        self.config, self.start = config, start
        self.sticky = False
        self.is_worker = hasattr(config, "workerinput")
        path = config.getoption("--device-log")
        self.log = open(path, "a") if path and not self.is_worker else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["device_start"] = self.start

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if listed := self.config.getoption("--device-tests"):
            wanted, found = listed.read_text().splitlines(), {item.nodeid: item for item in items}
            gone = [name for name in wanted if name not in found]
            if gone:
                raise pytest.UsageError(f"{listed} names {len(gone)} tests that are not there: {gone[:3]}")
            items[:] = [found[name] for name in wanted]
        number, shards = map(int, self.config.getoption("--device-shard").split("/"))
        items[:] = items[number::shards]

    def pytest_runtest_setup(self, item):
        if time.time() - self.start > self.config.getoption("--device-seconds"):
            pytest.skip(NO_TIME)
        if self.sticky and self.is_worker:
            os._exit(3)  # xdist starts a new worker, with a context that works

    def pytest_runtest_logstart(self, nodeid):
        self.write({"test": nodeid, "outcome": "unfinished", "when": "start", "seconds": 0, "text": ""})

    def pytest_runtest_logreport(self, report):
        text = report.longreprtext if report.outcome != "passed" else ""
        if report.failed and any(word in text for word in STICKY):
            self.sticky = True
        if report.when == "call" or report.outcome != "passed":
            line = {"test": report.nodeid, "outcome": report.outcome, "when": report.when}
            self.write(line | {"seconds": round(report.duration, 3), "text": text[-6000:]})

    def write(self, line: dict) -> None:
        if self.log:
            print(json.dumps(line), file=self.log, flush=True)
