"""Registers an execution provider library with ONNX Runtime, whatever was registered before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

MINIMUM_ORT = (1, 24)


def import_onnxruntime(wheel: str) -> ModuleType:
    """The `onnxruntime` module; ImportError with what to do when it is missing or too old."""
    floor = ".".join(map(str, MINIMUM_ORT))
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            f"{wheel} needs onnxruntime {floor} or newer, and it cannot be imported ({error}): "
            f"pip install 'onnxruntime>={floor}'"
        ) from error
    version = onnxruntime.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_ORT:
        raise ImportError(
            f"{wheel} needs onnxruntime {floor} or newer, found {version}: "
            f"pip install --upgrade 'onnxruntime>={floor}'"
        )
    return onnxruntime


def import_onnxruntime_genai(wheel: str) -> ModuleType:
    """The `onnxruntime_genai` module; ImportError with what to do when it is missing or too old."""
    try:
        import onnxruntime_genai
    except ImportError as error:
        raise ImportError(
            f"{wheel} cannot import onnxruntime_genai ({error}): pip install onnxruntime-genai"
            f"{'-cuda' if 'cuda' in wheel else ''}"
        ) from error
    if not hasattr(onnxruntime_genai, "register_execution_provider_library"):
        raise ImportError(
            f"{wheel} needs an onnxruntime-genai that loads execution provider libraries: "
            "pip install --upgrade onnxruntime-genai"
        )
    return onnxruntime_genai


class Registrar:
    """Keeps track of the names under which one library is registered with one runtime in this process."""

    def __init__(self, wheel: str, library_path: str, ep_name: str, runtime: Callable[[str], ModuleType]) -> None:
        self._wheel = wheel
        self._library_path = library_path
        self._ep_name = ep_name
        self._runtime = runtime
        self._names: list[str] = []
        self._lock = threading.Lock()

    def register(self, registration: str) -> str:
        """Registers the library under this name unless it already is.

        Returns the name that the execution provider then has, which is `registration` if that ends in
        "ExecutionProvider" and the EP's own name otherwise.
        """
        if not registration:
            raise ValueError("the registration name must not be empty")
        runtime = self._runtime(self._wheel)
        with self._lock:
            if registration not in self._names:
                try:
                    runtime.register_execution_provider_library(registration, self._library_path)
                except Exception as error:
                    # Somebody else may have registered this very library under this name.
                    if "already registered" not in str(error) or not self._is_ours(runtime, registration):
                        raise
                else:
                    self._names.append(registration)
        return self._resulting_name(registration)

    def unregister(self, name: str | None = None) -> None:
        """Undoes `register(name)`, or every `register` when `name` is None; nothing to undo is no error."""
        with self._lock:
            names = list(self._names) if name is None else [n for n in self._names if n == name]
            if not names:
                return
            runtime = self._runtime(self._wheel)
            for registration in names:
                runtime.unregister_execution_provider_library(registration)
                self._names.remove(registration)

    def _resulting_name(self, registration: str) -> str:
        return registration if registration.endswith("ExecutionProvider") else self._ep_name

    def _is_ours(self, runtime: ModuleType, registration: str) -> bool:
        wanted = self._resulting_name(registration)
        devices = getattr(runtime, "get_ep_devices", list)()
        return any(
            device.ep_name == wanted and device.ep_metadata.get("library_path") == self._library_path
            for device in devices
        )
