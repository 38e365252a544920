"""The functions that every wheel's package exports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .explain import main, report
from .registration import Registrar, import_onnxruntime, import_onnxruntime_genai


@dataclass(frozen=True)
class Option:
    """A declared provider option."""

    name: str
    type: str
    """The values that it takes, in words."""
    default: str
    help: str


class Package:
    """One wheel: its execution provider's name and library, and what can be done with them."""

    def __init__(self, init_file: str, native: ModuleType, ep_name: str, genai_name: str) -> None:
        folder = Path(init_file).resolve().parent
        self._module = folder.name
        self._native = native
        self._ep_name = ep_name
        self._genai_name = genai_name
        self._library_path = str(folder / f"lib{folder.name}.so")
        wheel = folder.name.replace("_", "-")
        self._ort = Registrar(wheel, self._library_path, ep_name, import_onnxruntime)
        self._genai = Registrar(wheel, self._library_path, ep_name, import_onnxruntime_genai)

    def get_library_path(self) -> str:
        """Absolute path of the library that onnxruntime or onnxruntime-genai loads."""
        return self._library_path

    def get_ep_name(self) -> str:
        """Name of the execution provider when it is registered by `register()`."""
        return self._ep_name

    def get_ep_names(self) -> list[str]:
        """Names of all execution providers in the library: one."""
        return [self._ep_name]

    def options(self) -> list[Option]:
        """The provider options that `add_provider_for_devices` and genai_config.json accept."""
        return [Option(*option) for option in self._native.options()]

    def register(self, name: str | None = None) -> str:
        """Registers the library with onnxruntime under `name` (default: `get_ep_name()`) unless it already is.

        Returns the execution provider's name: `name` if that ends in "ExecutionProvider", else `get_ep_name()`.
        Raises ImportError when onnxruntime is missing or older than 1.24.
        """
        return self._ort.register(self._ep_name if name is None else name)

    def unregister(self, name: str | None = None) -> None:
        """Undoes `register(name)`, or every `register` when `name` is None. Nothing to undo is no error."""
        self._ort.unregister(name)

    def register_genai(self, name: str | None = None) -> str:
        """Registers the library with onnxruntime-genai under `name` unless it already is.

        Without a name the EP takes the one that makes onnxruntime-genai treat it best. Returns the execution provider's
        name, as `register` does. Raises ImportError when onnxruntime-genai is missing.
        """
        return self._genai.register(self._genai_name if name is None else name)

    def explain(
        self, model: str | os.PathLike[str], provider_options: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Says which nodes of an ONNX model file would be taken in which groups, and why the others would not.

        Needs no onnxruntime and does not load weights. Returns what `python -m MODULE explain --json` prints.
        Raises FileNotFoundError, or ValueError for a damaged model or a bad option.
        """
        return report(self._native.explain, self._ep_name, os.fspath(model), provider_options or {})

    def main(self) -> int:
        """The command line `python -m MODULE`; returns the exit code."""
        return main(self._native.explain, self._module, self._ep_name)
