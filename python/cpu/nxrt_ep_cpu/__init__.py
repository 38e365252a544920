"""ONNX Runtime plugin execution provider that runs whole language-model decoders on CPUs.

`register()` makes the execution provider known to onnxruntime; see `options()` for what can be set.
"""

from __future__ import annotations

from pathlib import Path

from . import _native
from ._shared.registration import Registrar

__all__ = [
    "__version__",
    "get_ep_name",
    "get_ep_names",
    "get_library_path",
    "register",
    "unregister",
]

__version__: str = _native.VERSION

_EP_NAME = "NxrtCpuExecutionProvider"
_LIBRARY_PATH = str(Path(__file__).resolve().parent / "libnxrt_ep_cpu.so")
_registrar = Registrar("nxrt-ep-cpu", _LIBRARY_PATH, _EP_NAME)


def get_library_path() -> str:
    """Absolute path of the library that onnxruntime or onnxruntime-genai loads."""
    return _LIBRARY_PATH


def get_ep_name() -> str:
    """Name of the execution provider when it is registered by `register()`."""
    return _EP_NAME


def get_ep_names() -> list[str]:
    """Names of all execution providers in the library: one."""
    return [_EP_NAME]


def register(name: str | None = None) -> str:
    """Registers the library with onnxruntime under `name` (default: `get_ep_name()`) unless it already is.

    Returns the execution provider's name: `name` if that ends in "ExecutionProvider", else `get_ep_name()`.
    Raises ImportError when onnxruntime is missing or older than 1.24.
    """
    return _registrar.register(name)


def unregister(name: str | None = None) -> None:
    """Undoes `register(name)`, or every `register` when `name` is None. Nothing to undo is no error."""
    _registrar.unregister(name)
