"""Tensors in memory of their own with guard bytes around them, on the host and on the GPU, and Runs that are bound to
them: an output that is not written, or written past its end, cannot look right."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import helper

from target import STATE, on_cuda

BF16 = np.dtype(ml_dtypes.bfloat16)
GUARD = 64  # bytes before and after every bound buffer; also keeps cache-line alignment
_POISON = 0xFF  # NaN in every float type, -1 in every signed integer


def onnx_type(dtype) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


class Buffer:
    """A numpy array in memory of its own with guard bytes around it."""

    device = "cpu"

    def __init__(self, shape: Sequence[int], dtype, fill: np.ndarray | None = None):
        self.shape, self.dtype = tuple(int(d) for d in shape), np.dtype(dtype)
        count = int(np.prod(self.shape, dtype=np.int64))
        self.bytes = count * self.dtype.itemsize
        raw = np.full(self.bytes + 3 * GUARD, _POISON, np.uint8)
        self.start = GUARD + (-(raw.ctypes.data + GUARD)) % GUARD
        self.raw = raw
        self.pointer = raw.ctypes.data + self.start
        if fill is not None:
            self.array[...] = fill

    @property
    def array(self) -> np.ndarray:
        return self.raw[self.start : self.start + self.bytes].view(self.dtype).reshape(self.shape)

    def fetch(self) -> None:
        """Makes `array` and the guards what the buffer holds now."""

    def check_guards(self, what: str) -> None:
        outside = np.concatenate([self.raw[: self.start], self.raw[self.start + self.bytes :]])
        assert (outside == _POISON).all(), f"{what}: bytes outside the tensor were written"


class DeviceBuffer(Buffer):
    """The same on the GPU; `raw` is its copy on the host."""

    device = "cuda"

    def __init__(self, shape: Sequence[int], dtype, fill: np.ndarray | None = None):
        super().__init__(shape, dtype, fill)
        self.value = ort.OrtValue.ortvalue_from_numpy(self.raw, "cuda", 0)
        address = self.value.data_ptr()
        assert address % GUARD == 0, f"device memory at {address:#x}"
        # The host's padding need not suit the device's address.
        if self.start != GUARD:
            data = self.raw[self.start : self.start + self.bytes].copy()
            self.raw[:] = _POISON
            self.start = GUARD
            self.raw[self.start : self.start + self.bytes] = data
            self.value.update_inplace(self.raw)
        self.pointer = address + self.start

    def fetch(self) -> None:
        ort.copy_tensors([self.value], [ort.OrtValue.ortvalue_from_numpy(self.raw)])


def read_ortvalue(value: ort.OrtValue) -> np.ndarray:
    """Copies an OrtValue's data out; unlike OrtValue.numpy() it knows bfloat16 and every device."""
    if value.device_name() != "cpu":
        copy = ort.OrtValue.ortvalue_from_shape_and_type(value.shape(), value.element_type(), "cpu")
        if value.tensor_size_in_bytes():
            ort.copy_tensors([value], [copy])
        value = copy
    if value.data_type() != "tensor(bfloat16)":
        return np.array(value.numpy())
    count = int(np.prod(value.shape(), dtype=np.int64))
    raw = ctypes.string_at(value.data_ptr(), count * 2) if count else b""
    return np.frombuffer(raw, BF16).reshape(value.shape()).copy()


def _on_device(session: ort.InferenceSession, outputs, alias, io: str | None) -> bool:
    """Whether a Run's tensors lie on the GPU."""
    io = io or STATE.io
    if not on_cuda() or STATE.ep.name not in session.get_providers():
        return False
    # Both ways of a client: everything of its own on the GPU, or everything on the host and outputs from ORT.
    return io == "device" or io == "mixed" and (bool(alias) or all(outputs.values()))


def run_bound(
    session: ort.InferenceSession,
    feeds: dict[str, np.ndarray],
    outputs: dict[str, tuple[tuple[int, ...], np.dtype] | None],
    alias: dict[str, str] | None = None,
    run_options: ort.RunOptions | None = None,
    io: str | None = None,
) -> dict[str, np.ndarray]:
    """One Run through IOBinding.

    outputs: name -> (shape, dtype) for a poisoned buffer of our own, or None to let ORT allocate.
    alias: output name -> input name, for outputs that share the input's buffer (state updated in place).
    io: where the tensors lie, if not where --io says: host, device, or mixed.
    """
    alias = alias or {}
    kind = DeviceBuffer if _on_device(session, outputs, alias, io) else Buffer
    binding = session.io_binding()
    inputs: dict[str, Buffer] = {}
    bound: dict[str, Buffer] = {}
    for name, value in feeds.items():
        buffer = inputs[name] = kind(value.shape, value.dtype, value)
        binding.bind_input(name, kind.device, 0, onnx_type(value.dtype), buffer.shape, buffer.pointer)
    for name, known in outputs.items():
        if name in alias:
            buffer = bound[name] = inputs[alias[name]]
        elif known is not None:
            buffer = bound[name] = kind(*known)
        else:
            binding.bind_output(name, kind.device)
            continue
        binding.bind_output(name, kind.device, 0, onnx_type(buffer.dtype), buffer.shape, buffer.pointer)
    session.run_with_iobinding(binding, run_options)
    for buffer in {id(b): b for b in (*inputs.values(), *bound.values())}.values():
        buffer.fetch()
    results = {}
    for name, value in zip(outputs, binding.get_outputs()):
        if name in bound:
            bound[name].check_guards(f"output {name}")
            assert tuple(value.shape()) == bound[name].shape, f"output {name}: shape {value.shape()}"
            results[name] = bound[name].array.copy()
        else:
            results[name] = read_ortvalue(value)
    aliased = set(alias.values())
    for name, buffer in inputs.items():
        buffer.check_guards(f"input {name}")
        if name not in aliased:
            same = buffer.array.tobytes() == np.ascontiguousarray(feeds[name]).tobytes()
            assert same, f"input {name} was changed by the run"
    return results
