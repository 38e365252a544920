"""Reads the counters of the library that onnxruntime has loaded, or will load, in this process."""

from __future__ import annotations

import ctypes

# More than there will ever be; the library says how many there are.
_ROOM = 64


def read(library_path: str) -> dict[str, int]:
    """Name and value of every counter."""
    # The same path is the same library, so these are the counters of the sessions in this process.
    export = ctypes.CDLL(library_path).nxrt_cuda_counters
    export.restype = ctypes.c_size_t
    export.argtypes = [ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
    names, values = (ctypes.c_char_p * _ROOM)(), (ctypes.c_uint64 * _ROOM)()
    count = min(export(names, values, _ROOM), _ROOM)
    return {names[i].decode(): values[i] for i in range(count)}
