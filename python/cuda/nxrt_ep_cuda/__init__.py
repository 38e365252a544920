"""ONNX Runtime plugin execution provider that runs whole language-model decoders on CUDA GPUs.

`register()` makes the execution provider known to onnxruntime, `register_genai()` to onnxruntime-genai; `options()`
lists what a session can set; `explain()` says what it would take of a model; `counters()` says what it has done.
"""

from . import _native
from ._counters import read as _read
from ._shared.package import Option, Package

__all__ = [
    "Option",
    "__version__",
    "counters",
    "explain",
    "get_ep_name",
    "get_ep_names",
    "get_library_path",
    "options",
    "register",
    "register_genai",
    "unregister",
]

__version__: str = _native.VERSION

# onnxruntime-genai keeps its tensors on the GPU, and samples there, only for a provider of this name.
_package = Package(__file__, _native, "NxrtCudaExecutionProvider", genai_name="CUDAExecutionProvider")

explain = _package.explain
get_ep_name = _package.get_ep_name
get_ep_names = _package.get_ep_names
get_library_path = _package.get_library_path
options = _package.options
register = _package.register
register_genai = _package.register_genai
unregister = _package.unregister


def counters() -> dict[str, int]:
    """What the library has done in this process since it was loaded: graphs captured, replayed, bytes moved ..."""
    return _read(get_library_path())
