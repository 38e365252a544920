"""What the figures were measured on, and how fast that machine reads memory."""

from __future__ import annotations

import datetime
import os
import platform
import threading
import time
from pathlib import Path

import numpy as np

PROBE_BYTES = 1 << 30  # more than any last-level cache
PROBE_PASSES = 5


def read_bandwidth(threads: int) -> float:
    """Bytes/s that `threads` threads read from memory together: the best pass of numpy's maximum over 1 GiB."""
    data = np.full(PROBE_BYTES // 8, 1, np.int64)
    parts = np.array_split(data, threads)
    best = 0.0
    for _ in range(PROBE_PASSES):
        workers = [threading.Thread(target=part.max) for part in parts]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, data.nbytes / (time.perf_counter() - start))
    return best


def describe(threads: int, ep_version: str | None) -> dict[str, str]:
    """Machine, versions and date, as printed above the tables."""
    import onnx
    import onnxruntime as ort

    load = os.getloadavg()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} logical CPUs, {threads} intra-op threads",
        "SIMD": " ".join(
            flag
            for flag in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
            if flag in _cpu_field("flags").split()
        ),
        "versions": f"nxrt-ep-cpu {ep_version or 'absent'}, onnxruntime {ort.__version__}, onnx {onnx.__version__}, "
        f"numpy {np.__version__}, Python {platform.python_version()}, Linux {platform.release()}",
        "load": f"{load:.1f} at the start"
        + (" (other work is running: figures are not fit for quoting)" if load > 0.5 else ""),
    }


def _cpu_name() -> str:
    fields = [_cpu_field(key) for key in ("model name", "cpu family", "model")]
    return f"{fields[0] or platform.machine()} (family {fields[1]} model {fields[2]})"


def _cpu_field(name: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
