import ctypes

import pytest

from . import control


class Cuda(control.FakeCuda):
    """The driver with a current context and a stream, and arrays going in and out."""

    def __init__(self, library):
        super().__init__(library)
        self.check("cuInit", 0)
        self.context = self.out(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", 0)
        self.check("cuCtxSetCurrent", self.context)
        image = b"NXRT_EMULATED selftest\n"
        self.kernels_of_selftest = self.out(ctypes.c_void_p, "cuLibraryLoadData", image, None, None, 0, None, None, 0)

    def call(self, name, *arguments):
        converted = [ctypes.c_void_p(a) if isinstance(a, int) and abs(a) >= 2**31 else a for a in arguments]
        return getattr(self.library, name)(*converted)

    def check(self, name, *arguments):
        code = self.call(name, *arguments)
        assert code == 0, f"{name}: {code}\n{self.log()}"

    def out(self, kind, name, *arguments):
        value = kind()
        self.check(name, ctypes.byref(value), *arguments)
        return value.value

    def stream(self, flags=1):
        return self.out(ctypes.c_void_p, "cuStreamCreate", flags)

    def alloc(self, size):
        return self.out(ctypes.c_void_p, "cuMemAlloc_v2", ctypes.c_size_t(size))

    def upload(self, array):
        pointer = self.alloc(array.nbytes)
        self.check("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        return pointer

    def download(self, pointer, array):
        """Fills the array."""
        self.check("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), pointer, ctypes.c_size_t(array.nbytes))
        return array

    def function(self, name):
        kernel = self.out(ctypes.c_void_p, "cuLibraryGetKernel", self.kernels_of_selftest, name.encode())
        return self.out(ctypes.c_void_p, "cuKernelGetFunction", kernel)

    def try_launch(self, name, grid, block, params, shared=0, stream=None):
        grid, block = ((*d, 1, 1)[:3] if isinstance(d, tuple) else (d, 1, 1) for d in (grid, block))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        return self.call("cuLaunchKernel", self.function(name), *grid, *block, shared, stream, pointers, None)

    def launch(self, *arguments, **keywords):
        code = self.try_launch(*arguments, **keywords)
        assert code == 0, self.log()


class Params(ctypes.Structure):
    """selftest.cu's."""

    _fields_ = [("input", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_uint32), ("mode", ctypes.c_uint32)]


@pytest.fixture(scope="session")
def cuda_library():
    return Cuda(control.build())


@pytest.fixture
def cuda(cuda_library):
    cuda_library.reset()
    # A kernel's failure in an earlier test may have stuck to the context; a reset takes it away.
    cuda_library.check("cuCtxSetCurrent", cuda_library.context)
    yield cuda_library
    cuda_library.reset()
