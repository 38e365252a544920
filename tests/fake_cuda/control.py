"""The fake CUDA driver from Python: building it, and the controls that tests use."""

import ctypes
import pathlib
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def build(out=ROOT / ".cache" / "emulated", cuda_home=None):
    """Builds the driver with all kernels, if anything has changed, and gives the path of its libcuda.so.1."""
    command = [HERE / "build.sh", out, *([cuda_home] if cuda_home else [])]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return pathlib.Path(out) / "libcuda.so.1"


class FakeCuda:
    """Loads the driver; whoever opens libcuda.so.1 in this process afterwards gets the same one.

    The functions `fake_cuda_NAME` of control.cpp are methods `NAME`.
    """

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._log = self.library.fake_cuda_log
        self._log.restype = ctypes.c_char_p
        self._counter = self.library.fake_cuda_counter
        self._counter.restype = ctypes.c_uint64
        self.library.fake_cuda_set_memory.argtypes = [ctypes.c_uint64]

    def __getattr__(self, name):
        function = getattr(self.library, "fake_cuda_" + name)

        def call(*arguments):
            return function(*(a.encode() if isinstance(a, str) else a for a in arguments))

        return call

    def log(self):
        return self._log().decode()

    def errors(self):
        """What the driver found wrong: bad arguments, kernels that fail, writes outside of allocations."""
        return [line.removeprefix("error: ") for line in self.log().splitlines() if line.startswith("error: ")]

    def kernels(self):
        """Names of the kernels that have run, in order."""
        return [line.split()[1] for line in self.log().splitlines() if line.startswith("kernel ")]

    def overlapping(self):
        """Names of the kernels that were allowed to begin before the one in front had ended."""
        return [line.split()[1] for line in self.log().splitlines() if line.startswith("overlap ")]

    def counter(self, name):
        value = self._counter(name.encode())
        assert value != 2**64 - 1, f"no counter {name}"
        return value
