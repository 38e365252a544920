"""The process that runs under valgrind: a session for every model of a folder, then one wrong access on purpose.

    python sessions.py LIBRARY FOLDER

FOLDER holds NAME/model.onnx and NAME/values.npz (`in/STEP/INPUT`, `out/STEP/OUTPUT`). Only numpy and onnxruntime are imported:
every import costs seconds here.
"""

import ctypes
import pathlib
import sys

import numpy as np
import onnxruntime as ort

EP_NAME = "NxrtCpuExecutionProvider"
# Bytes of the block that the last session writes past; memcheck.py looks for this number.
SHORT_BLOCK = 4099


def open_session(model: pathlib.Path, tier: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # a block for each tensor, so that its end is known
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    devices = [d for d in ort.get_ep_devices() if d.ep_name == EP_NAME]
    options.add_provider_for_devices(devices, {"tier": tier})
    return ort.InferenceSession(str(model), options)


def run(folder: pathlib.Path, tier: str) -> None:
    session = open_session(folder / "model.onnx", tier)
    with np.load(folder / "values.npz") as archive:
        steps: dict[str, dict[str, dict]] = {}
        for key in archive:
            side, step, name = key.split("/", 2)
            steps.setdefault(step, {"in": {}, "out": {}})[side][name] = archive[key]
    for step in steps.values():
        names = list(step["out"])
        for name, got in zip(names, session.run(names, step["in"])):
            expected = step["out"][name]
            assert got.shape == expected.shape, f"{folder.name} {name}: {got.shape}"
            # Whether it is right is for other tests; here it must have been computed.
            matters = np.isfinite(expected.astype(np.float64))
            error = np.abs(got.astype(np.float64) - expected)[matters].max(initial=0)
            worst = 0.1 * np.abs(expected[matters].astype(np.float64)).max(initial=0) + 1e-3
            assert error <= worst, f"{folder.name} {name}: off by {error}"


def write_past_a_block(path: pathlib.Path) -> None:
    """Says that a block is one byte longer than it is; the EP's last store must be reported."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    count = (SHORT_BLOCK + 1) // 4
    session = open_session(path, "scalar")
    binding = session.io_binding()
    binding.bind_cpu_input("in0", np.ones(count, np.float32))
    binding.bind_output("out0", "cpu", 0, np.float32, (count,), malloc(SHORT_BLOCK))
    session.run_with_iobinding(binding)


def main() -> None:
    library, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    ort.register_execution_provider_library(EP_NAME, library)
    sessions = 0
    for values in sorted(folder.glob("*/values.npz")):
        for tier in ("scalar", "avx2") if values.parent.name.startswith("both_") else ("avx2",):
            run(values.parent, tier)
            sessions += 1
    write_past_a_block(folder / "short_block.onnx")
    ort.unregister_execution_provider_library(EP_NAME)
    print(f"sessions: {sessions + 1}")


if __name__ == "__main__":
    main()
