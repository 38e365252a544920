"""Runs sessions on the EP under valgrind and fails on errors in the EP's library: `python tests/ort/memcheck.py`.

One process makes every fixture model's session, feeds it a prompt and single tokens, makes sessions that fail, and
unregisters. Python and ONNX Runtime are not clean under valgrind, so what counts is an error whose innermost
frame outside libc is the EP's, and memory that the EP allocated and lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MAX_SESSIONS = 60
FAILING_SESSIONS = 20
# Objects whose frames say nothing about who made the error.
NEUTRAL = ("/libc.so", "/libc-", "/libm.so", "/ld-linux", "vgpreload_memcheck", "/libgcc_s", "/libpthread")


def work(library: str) -> None:
    """What runs under valgrind."""
    import numpy as np
    import onnxruntime as ort

    import harness
    import models

    ort.register_execution_provider_library(harness.EP_NAME, library)
    sessions = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in models.NAMES:
            fixture = models.Fixture(name, models.unpack(name, Path(folder)))
            session = harness.ep_session(fixture.path, threads=2)
            sessions += 1
            harness.assert_all_on_ep(session)
            decoder = models.Decoder(session, fixture.steps)
            for ids in ([[1, 2, 3, 4, 5]], [[6]], [[7]]):
                decoder.step(np.array(ids))
            print(f"{name}: 3 steps", flush=True)
            del session, decoder
    model = harness.build_node("Neg", [np.ones(3, np.float32)])
    for index in range(FAILING_SESSIONS):
        options = {"tier": "none"} if index % 2 else {"no_such_option": "1"}
        try:
            harness.ep_session(model.serialize(), options)
        except Exception:  # noqa: BLE001 - that it fails is asserted elsewhere
            pass
        sessions += 1
    assert sessions <= MAX_SESSIONS
    ort.unregister_execution_provider_library(harness.EP_NAME)
    print(f"{sessions} sessions", flush=True)


def is_ours(error: ElementTree.Element, library: str) -> bool:
    """Whether the EP made the error."""
    stack = error.find("stack")
    objects = [frame.findtext("obj") or "" for frame in (stack.findall("frame") if stack is not None else [])]
    kind = error.findtext("kind") or ""
    if kind.startswith("Leak_"):
        return kind == "Leak_DefinitelyLost" and library in objects
    telling = [o for o in objects if not any(part in o for part in NEUTRAL)]
    return bool(telling) and telling[0] == library


def describe(error: ElementTree.Element) -> str:
    what = error.findtext("what") or error.findtext("xwhat/text") or ""
    frames = [f"    {f.findtext('fn') or '?'} ({f.findtext('obj')})" for f in error.findall("stack/frame")[:12]]
    return "\n".join([f"{error.findtext('kind')}: {what}", *frames])


def main() -> int:
    import nxrt_ep_cpu

    library = os.path.realpath(nxrt_ep_cpu.get_library_path())
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "valgrind.xml"
        command = ["valgrind", "--xml=yes", f"--xml-file={log}", "--leak-check=full", "--num-callers=30"]
        command += ["--show-leak-kinds=definite", "--error-limit=no", "--quiet"]
        command += [sys.executable, __file__, "--work", library]
        done = subprocess.run(command, env={**os.environ, "PYTHONMALLOC": "malloc"}, check=False)
        if done.returncode:
            print(f"the process under valgrind ended with {done.returncode}", file=sys.stderr)
            return 1
        errors = ElementTree.parse(log).getroot().findall("error")
    ours = [error for error in errors if is_ours(error, library)]
    for error in ours:
        print(describe(error), file=sys.stderr)
    print(f"valgrind: {len(ours)} errors in {Path(library).name} ({len(errors) - len(ours)} elsewhere, not counted)")
    return 1 if ours else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        sys.exit(main())
