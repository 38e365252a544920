"""Makes one table, and a list of failures, of what the stages of run.sh logged: report.py LOGS OUT"""

from __future__ import annotations

import collections
import ctypes
import json
import pathlib
import re
import sys

from tests.device.watch import NO_TIME


def main(logs: pathlib.Path, out: pathlib.Path) -> None:
    stages = collections.defaultdict(list)
    for line in (logs / "stages").read_text().splitlines():
        name, code, seconds = line.split()
        stages[name.split("-")[0]].append((name, int(code), int(seconds)))
    lines = [f"Device suite on {device()}", "", "| stage | passed | failed | skipped | no time left | seconds | |"]
    lines += ["|---|---|---|---|---|---|---|"]
    failures = []
    for stage, runs in stages.items():
        tests = [test for name, _, _ in runs for test in results(logs / f"{name}.jsonl")]
        count = collections.Counter(kind(test) for test in tests)
        numbers = [count["passed"], count["failed"], count["skipped"], count["late"], max(run[2] for run in runs)]
        lines.append(f"| {stage} | " + " | ".join(map(str, numbers)) + f" | {note(logs, runs)} |")
        failures += [(stage, test) for test in tests if kind(test) == "failed"]
    table = "\n".join(lines)
    (out / "table.txt").write_text(table + "\n")
    (out / "failures.txt").write_text("".join(f"=== {s}: {t['test']} ({t['when']})\n{t['text']}\n" for s, t in failures))
    print_failures(failures)
    print(table)


def device() -> str:
    """What the driver says of GPU 0."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no GPU ({error})"
    name, version, handle = ctypes.create_string_buffer(100), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), 0):
        return "no GPU"
    cuda.cuDeviceGetName(name, 100, handle)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return f"{name.value.decode()}, driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def results(path: pathlib.Path) -> list[dict]:
    """One line a test: of a test that failed in several phases, the first; one that never ended is unfinished."""
    seen: dict[str, dict] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        test = json.loads(line)
        before = seen.get(test["test"])
        if before is None or before["outcome"] in ("passed", "unfinished"):
            seen[test["test"]] = test
    return list(seen.values())


def kind(test: dict) -> str:
    return "late" if test["outcome"] == "skipped" and NO_TIME in test["text"] else test["outcome"]


def note(logs: pathlib.Path, runs) -> str:
    """Whatever the tests' outcomes do not say: a run that was ended, and the sanitizer's findings."""
    said = []
    for name, code, _ in runs:
        ends = [test["test"] for test in results(logs / f"{name}.jsonl") if test["outcome"] == "unfinished"]
        if ends:
            said.append(f"{name} was in {ends[-1]}")
        if code not in (0, 1):
            said.append(f"{name} ended with {code}")
    found = [path for name, _, _ in runs for path in [logs / f"{name}.sanitizer"] if path.exists()]
    if found:
        errors = [re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", path.read_text(errors="replace")) for path in found]
        said.append(f"findings: {sum(int(n) for e in errors for n in e)}")
        said += [f"{path.stem} has no summary" for path, e in zip(found, errors, strict=True) if not e]
    return "; ".join(said)


def print_failures(failures, most: int = 40) -> None:
    """The failures that differ in more than their parameters, shortest form."""
    groups = collections.defaultdict(list)
    for stage, test in failures:
        groups[stage, test["test"].split("[")[0]].append(test)
    for (stage, name), tests in list(groups.items())[:most]:
        last = [line for line in tests[0]["text"].splitlines() if line.startswith("E ")] or tests[0]["text"].splitlines()
        case = tests[0]["test"].removeprefix(name)[:60]
        print(f"FAILED {stage} {name} x {len(tests)}, first {case}: {(last or [''])[0][:300]}")
    if len(groups) > most:
        print(f"... and {len(groups) - most} more: failures.txt")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
