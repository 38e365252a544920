"""One process with up to 64 sessions under valgrind; errors and leaks with a frame in the EP's library count.

    python tests/memcheck/memcheck.py [LIBRARY]

ORT and Python are full of reports of their own, so the XML is read here. The process also makes the EP write one byte
past a block, which must be found: else the check sees nothing.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "ort"), str(HERE.parents[1])]

import harness  # noqa: E402
import models  # noqa: E402
import older_cases  # noqa: E402
from sessions import SHORT_BLOCK  # noqa: E402

MOST = 64
LIBRARY = "libnxrt_ep_cpu.so"
FIXTURES = ("llama-tiny-genai-int4-cuda", "qwen35-tiny-genai-fp32-cpu", "qwen35-tiny-genai-int4-cpu")
STEPS = 2
# Standard ops, one for each way that memory is walked.
STANDARD = (
    "ArgMax Cast Compress Conv CumSum GatherElements GatherND Gemm NonZero OneHot Pad ReduceMean ScatterND Slice Softmax "
    "TensorScatter TopK Transpose"
).split()
PLAIN = {f"com.microsoft::{op}" for op in ("Gelu", "FastGelu", "QuickGelu")}  # element by element, like BiasGelu
# Both tiers: products, attention, convolution and recurrence have loops of their own in each.
BOTH = ("gqa_packed_rotary", "linear_attention", "conv", "gdn", "nbits_4", "nbits_level_4", "rotary")
LEAKS = {"Leak_DefinitelyLost"}
OTHER_LEAKS = {"Leak_PossiblyLost", "Leak_StillReachable", "Leak_IndirectlyLost"}
VALGRIND = (
    "valgrind --tool=memcheck --xml=yes --leak-check=full --show-leak-kinds=definite --keep-debuginfo=yes "
    "--num-callers=40 --error-limit=no --read-var-info=no --child-silent-after-fork=yes"
).split()


def save(folder: pathlib.Path, feeds: dict, expected: dict) -> None:
    """Arrays by "STEP/NAME"."""
    arrays = {f"in/{key}": value for key, value in feeds.items()} | {f"out/{k}": v for k, v in expected.items()}
    np.savez(folder / "values.npz", **arrays)


def prepare_case(folder: pathlib.Path, case: older_cases.Case) -> None:
    folder.mkdir()
    (folder / "model.onnx").write_bytes(case.model.SerializeToString())
    save(folder, {f"0/{k}": v for k, v in case.feeds.items()}, {f"0/{k}": v for k, v in case.expected.items()})


def prepare_fixture(folder: pathlib.Path, name: str) -> None:
    fixture = models.Fixture(name, models.unpack(name, folder))
    inputs = {i.name for i in harness.cpu_session(fixture.path).get_inputs()}
    feeds, expected = {}, {}
    for step, (given, wanted) in enumerate(fixture.steps[:STEPS]):
        feeds |= {f"{step}/{k}": v for k, v in given.items() if k in inputs}
        expected |= {f"{step}/{k}": v for k, v in wanted.items()}
    save(fixture.folder, feeds, expected)


def prepare(folder: pathlib.Path) -> int:
    """Writes the models and their values; returns the number of sessions."""
    cases = [c for c in older_cases.cases().values() if c.op in STANDARD or c.op.startswith("com.microsoft")]
    cases = [c for c in cases if c.op not in PLAIN]
    cases = [c for c in cases if all(v.dtype != harness.BF16 for v in c.feeds.values())]  # numpy cannot store it
    both = [c for c in cases if c.name in BOTH]
    assert len(both) == len(BOTH), [c.name for c in both]
    for case in cases:
        prepare_case(folder / (f"both_{case.name}" if case in both else case.name), case)
    for name in FIXTURES:
        prepare_fixture(folder, name)
    short = harness.build_node("Neg", [np.ones(3, np.float32)])
    (folder / "short_block.onnx").write_bytes(short.serialize())
    return len(cases) + len(both) + len(FIXTURES) + 1


def ours(error: ElementTree.Element) -> bool:
    """Whether a frame of the access itself (not of where the block came from) is the library's."""
    return any(LIBRARY in (frame.findtext("obj") or "") for frame in error.find("stack"))


def text(error: ElementTree.Element) -> str:
    kind = error.findtext("kind")
    what = error.findtext("what") or error.findtext("xwhat/text")
    frames = [f"{f.findtext('fn') or f.findtext('ip')} ({f.findtext('obj')})" for f in error.find("stack")]
    return "\n    ".join([f"{kind}: {what}; {error.findtext('auxwhat') or ''}", *frames[:14]])


def judge(report: pathlib.Path) -> list[str]:
    """What is wrong, by valgrind's report."""
    errors = ElementTree.parse(report).getroot().findall("error")
    counted = [e for e in errors if ours(e) and e.findtext("kind") not in OTHER_LEAKS]
    provoked = re.compile(rf"block of size {SHORT_BLOCK:,}\b")
    found = [e for e in counted if provoked.search(e.findtext("auxwhat") or "")]
    wrong = [text(e) for e in counted if e not in found]
    if not any(e.findtext("kind") == "InvalidWrite" for e in found):
        wrong.append("the write past a block was not reported: this check would see nothing")
    print(f"valgrind: {len(errors)} reports, {len(counted)} with a frame in {LIBRARY}, {len(found)} of them provoked")
    return wrong


def main() -> int:
    library = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else __import__("nxrt_ep_cpu").get_library_path()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        sessions = prepare(folder)
        assert sessions <= MOST, sessions
        report = folder / "report.xml"
        command = [*VALGRIND, f"--xml-file={report}", sys.executable, str(HERE / "sessions.py"), library, name]
        environment = os.environ | {"PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
        if done.returncode or f"sessions: {sessions}" not in done.stdout:
            print(done.stdout, done.stderr, f"exit code {done.returncode}", sep="\n")
            return 1
        wrong = judge(report)
    print(*wrong, f"{sessions} sessions, {len(wrong)} errors", sep="\n\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
