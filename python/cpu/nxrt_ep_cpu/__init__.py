"""ONNX Runtime plugin execution provider that runs whole language-model decoders on CPUs.

`register()` makes the execution provider known to onnxruntime; `options()` lists what a session can set;
`explain()` says what it would take of a model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _native
from ._shared.explain import report as _report
from ._shared.registration import Registrar as _Registrar

__all__ = [
    "Option",
    "__version__",
    "explain",
    "get_ep_name",
    "get_ep_names",
    "get_library_path",
    "options",
    "register",
    "unregister",
]

__version__: str = _native.VERSION

_EP_NAME = "NxrtCpuExecutionProvider"
_LIBRARY_PATH = str(Path(__file__).resolve().parent / "libnxrt_ep_cpu.so")
_registrar = _Registrar("nxrt-ep-cpu", _LIBRARY_PATH, _EP_NAME)


@dataclass(frozen=True)
class Option:
    """A declared provider option."""

    name: str
    type: str
    """The values that it takes, in words."""
    default: str
    help: str


def get_library_path() -> str:
    """Absolute path of the library that onnxruntime or onnxruntime-genai loads."""
    return _LIBRARY_PATH


def get_ep_name() -> str:
    """Name of the execution provider when it is registered by `register()`."""
    return _EP_NAME


def get_ep_names() -> list[str]:
    """Names of all execution providers in the library: one."""
    return [_EP_NAME]


def options() -> list[Option]:
    """The provider options that `add_provider_for_devices` and genai_config.json accept."""
    return [Option(*option) for option in _native.options()]


def register(name: str | None = None) -> str:
    """Registers the library with onnxruntime under `name` (default: `get_ep_name()`) unless it already is.

    Returns the execution provider's name: `name` if that ends in "ExecutionProvider", else `get_ep_name()`.
    Raises ImportError when onnxruntime is missing or older than 1.24.
    """
    return _registrar.register(name)


def unregister(name: str | None = None) -> None:
    """Undoes `register(name)`, or every `register` when `name` is None. Nothing to undo is no error."""
    _registrar.unregister(name)


def explain(model: str | os.PathLike[str], provider_options: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Says which nodes of an ONNX model file would be taken in which groups, and why the others would not.

    Needs no onnxruntime and does not load weights. Returns what `python -m nxrt_ep_cpu explain --json` prints.
    Raises FileNotFoundError, or ValueError for a damaged model or a bad option.
    """
    return _report(_native.explain, _EP_NAME, os.fspath(model), provider_options or {})
