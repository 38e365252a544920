"""ONNX Runtime plugin execution provider that runs whole language-model decoders on CPUs.

`register()` makes the execution provider known to onnxruntime, `register_genai()` to onnxruntime-genai; `options()`
lists what a session can set; `explain()` says what it would take of a model.
"""

from . import _native
from ._shared.package import Option, Package

__all__ = [
    "Option",
    "__version__",
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

_package = Package(__file__, _native, "NxrtCpuExecutionProvider", genai_name="NxrtCpuExecutionProvider")

explain = _package.explain
get_ep_name = _package.get_ep_name
get_ep_names = _package.get_ep_names
get_library_path = _package.get_library_path
options = _package.options
register = _package.register
register_genai = _package.register_genai
unregister = _package.unregister
