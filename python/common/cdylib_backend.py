"""PEP 517 backend shared by the wheels: maturin, plus a plain cdylib as package data.

maturin packages the pyo3 module of the project. Before that, this backend builds the execution provider's
cdylib with cargo and copies it, and the Python files that all wheels share, into the package folder.

Config settings (`pip wheel -C manylinux=2_28 ...`):
  manylinux   glibc floor such as `2_28`: link with zig against that glibc and tag the wheel for it.
              Without it the wheel is built with the machine's own linker and tagged `linux`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

_ZIG_REQUIREMENTS = ["ziglang==0.17.1", "cargo-zigbuild==0.24.0"]
_MATURIN_ARGS = "MATURIN_PEP517_ARGS"

Settings = dict[str, Any] | None


class CdylibBackend:
    """The PEP 517 hooks of one wheel.

    project: folder of its pyproject.toml, inside the cargo workspace
    package: cargo package of the cdylib
    library: file name of the cdylib, also inside the wheel
    module:  import name of the Python package
    """

    def __init__(self, project: Path, package: str, library: str, module: str) -> None:
        self.project = project
        self.workspace = project.parents[1]
        self.package = package
        self.library = library
        self.package_dir = project / module

    def get_requires_for_build_wheel(self, config_settings: Settings = None) -> list[str]:
        import maturin

        requires = list(maturin.get_requires_for_build_wheel(config_settings))
        return requires + (_ZIG_REQUIREMENTS if _glibc(config_settings) else [])

    def prepare_metadata_for_build_wheel(self, metadata_directory: str, config_settings: Settings = None) -> str:
        import maturin

        return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)

    def build_wheel(
        self, wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
    ) -> str:
        import maturin

        glibc = _glibc(config_settings)
        self._stage(glibc)
        arguments = "--locked --compatibility linux"
        if glibc:
            arguments = f"--locked --zig --compatibility manylinux_{glibc} --target {_host_triple()}"
        previous = os.environ.get(_MATURIN_ARGS)
        os.environ[_MATURIN_ARGS] = arguments
        try:
            return maturin.build_wheel(wheel_directory, None, metadata_directory)
        finally:
            if previous is None:
                del os.environ[_MATURIN_ARGS]
            else:
                os.environ[_MATURIN_ARGS] = previous

    def build_sdist(self, sdist_directory: str, config_settings: Settings = None) -> str:
        raise SystemExit(
            "a source distribution of one wheel would lack the rest of the cargo workspace: "
            "install from a clone with `pip install ./python/...`, or build a wheel"
        )

    def _stage(self, glibc: str | None) -> None:
        """Puts the cdylib and the shared Python files into the package folder."""
        built = self._cargo_build(glibc)
        # A new file, not new bytes in the old one: a running process may have the old one mapped.
        target = self.package_dir / self.library
        partial = target.with_suffix(".partial")
        shutil.copyfile(built, partial)
        os.replace(partial, target)
        shared = self.package_dir / "_shared"
        shutil.rmtree(shared, ignore_errors=True)
        shutil.copytree(
            Path(__file__).parent / "shared", shared, ignore=shutil.ignore_patterns("__pycache__")
        )

    def _cargo_build(self, glibc: str | None) -> Path:
        """Builds the cdylib and returns its path."""
        if shutil.which("cargo") is None:
            raise SystemExit("cargo is needed to build this wheel: install Rust (https://rustup.rs) first")
        target_dir = Path(os.environ.get("CARGO_TARGET_DIR", self.workspace / "target"))
        command = ["cargo", "build"]
        if glibc:
            # cargo-zigbuild finds the zig of the `ziglang` package through this interpreter.
            os.environ.setdefault("CARGO_ZIGBUILD_PYTHON_PATH", sys.executable)
            triple = _host_triple()
            command = ["cargo-zigbuild", "zigbuild", "--target", f"{triple}.{glibc.replace('_', '.')}"]
            target_dir /= triple
        command += ["--release", "--locked", "-p", self.package]
        print("+", *command, file=sys.stderr, flush=True)
        # stdout of a PEP 517 hook belongs to the front end.
        done = subprocess.run(command, cwd=self.workspace, stdout=sys.stderr, check=False)
        if done.returncode:
            raise SystemExit(f"`{' '.join(command)}` failed with exit status {done.returncode}")
        return target_dir / "release" / self.library


def _glibc(config_settings: Settings) -> str | None:
    """The `manylinux` config setting, e.g. `2_28`."""
    return (config_settings or {}).get("manylinux")


def _host_triple() -> str:
    """The triple that rustc compiles for, e.g. `x86_64-unknown-linux-gnu`."""
    out = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    return next(line.split()[1] for line in out.splitlines() if line.startswith("host:"))
