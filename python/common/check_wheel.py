"""Checks built wheels: manylinux tag, contents, no dependency, loadable on every CPython found, registrable.

Run by `make wheels` as `python check_wheel.py dist/*.whl`; exits with an error at the first defect.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TAG = "manylinux_2_28"
ORT = "onnxruntime==1.32.0"
# Minor versions of CPython that are tried where they are installed.
MINORS = range(11, 15)

# Libraries that the cdylib may ask the loader for: what every Linux has, of C. A GPU's driver is opened at run time.
NEEDED = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}

# Runs in a fresh environment; argv[1] is the module, argv[2] whether onnxruntime is there.
PROBE = """
import ctypes, importlib, os, sys
module = importlib.import_module(sys.argv[1])
path = module.get_library_path()
library = ctypes.CDLL(path, mode=os.RTLD_NOW)
library.CreateEpFactories, library.ReleaseEpFactory
assert module.options() and module.get_ep_names() == [module.get_ep_name()]
has_device = True
if hasattr(module, "counters"):
    assert module.counters() and not any(module.counters().values())
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        has_device = False  # without a driver there is nothing to offer
if sys.argv[2] == "without":
    try:
        module.register()
    except ImportError as error:
        assert "onnxruntime" in str(error) and "1.24" in str(error), error
    else:
        raise SystemExit("register() without onnxruntime must fail")
else:
    import onnxruntime
    name = module.register()
    assert module.register() == name == module.get_ep_name()
    assert (name in [d.ep_name for d in onnxruntime.get_ep_devices()]) == has_device
    module.unregister()
    module.unregister()
    assert name not in [d.ep_name for d in onnxruntime.get_ep_devices()]
"""


def check(wheel: Path) -> None:
    """Raises SystemExit when `wheel` is not fit to be published."""
    shown = run([sys.executable, "-m", "auditwheel", "show", str(wheel)])
    found = re.search(r'platform tag:\s+"(\w+?)_(?:x86_64|aarch64)"', shown)
    if not found or found[1] not in (TAG, "manylinux_2_17", "manylinux2014"):
        raise SystemExit(f"{wheel.name} is not {TAG}:\n{shown}")
    if TAG not in wheel.name:
        raise SystemExit(f"{wheel.name}: its name lacks the tag {TAG}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
    if "Requires-Dist" in metadata:
        raise SystemExit(f"{wheel.name} has dependencies")
    module = wheel.name.split("-")[0]
    for wanted in (f"{module}/lib{module}.so", f"{module}/py.typed", f"{module}/_shared/registration.py"):
        if wanted not in names:
            raise SystemExit(f"{wheel.name} lacks {wanted}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        other = needed(archive.extract(f"{module}/lib{module}.so", folder)) - NEEDED
    if other:
        raise SystemExit(f"{wheel.name}: its library needs {', '.join(sorted(other))}")
    for interpreter in interpreters():
        probe(wheel, module, interpreter)


def needed(library: str) -> set[str]:
    """What the library asks the loader for."""
    from elftools.elf.elffile import ELFFile  # comes with auditwheel

    with open(library, "rb") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        return {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}


def probe(wheel: Path, module: str, interpreter: str) -> None:
    """Installs `wheel` into an environment of its own and uses it without and with onnxruntime."""
    version = run([interpreter, "-c", "import platform; print(platform.python_version())"]).strip()
    with tempfile.TemporaryDirectory() as folder:
        run([interpreter, "-m", "venv", folder])
        python = f"{folder}/bin/python"
        run([python, "-m", "pip", "install", "--quiet", "--no-index", str(wheel.resolve())])
        run([python, "-c", PROBE, module, "without"], cwd=folder)
        run([python, "-m", "pip", "install", "--quiet", ORT])
        run([python, "-c", PROBE, module, "with"], cwd=folder)
    print(f"{wheel.name}: works on CPython {version} with {ORT}", flush=True)


def interpreters() -> list[str]:
    """The interpreter that runs this, and one of every other version that the machine has."""
    found = {sys.version_info[1]: sys.executable}
    for minor in MINORS:
        pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3"))
        other = str(pyenv[-1]) if pyenv else shutil.which(f"python3.{minor}")
        if other:
            found.setdefault(minor, other)
    return [found[minor] for minor in sorted(found)]


def run(command: list[str], cwd: str | None = None) -> str:
    """Output of `command`; SystemExit with what it printed when it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: check_wheel.py WHEEL...")
    for argument in sys.argv[1:]:
        check(Path(argument))
