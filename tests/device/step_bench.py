"""Times a decoder on a GPU without onnxruntime-genai: loading, memory of the weights, and synchronous steps of one token on fixed
addresses (run_with_iobinding, a cache of 1024 positions that is updated in place).

    python tests/device/step_bench.py MODEL_FOLDER [--option KEY=VALUE ...]

Needs onnxruntime and the package nxrt_ep_cuda.
"""

import argparse
import json
import pathlib
import time

import numpy as np
import onnxruntime as ort

import nxrt_ep_cuda

CAPACITY, WARM, STEPS = 1024, 20, 200
TYPES = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


def on_device(value, fill, head_size: int) -> ort.OrtValue:
    """A tensor for a graph input or output: one token of one sequence; lengths of the past are CAPACITY."""
    dims = {"batch_size": 1, "sequence_length": 1, "past_sequence_length": CAPACITY, "total_sequence_length": CAPACITY}
    shape = [dim if isinstance(dim, int) else dims.get(dim, head_size) for dim in value.shape]
    return ort.OrtValue.ortvalue_from_numpy(np.full(shape, fill, TYPES[value.type]), "cuda", 0)


def bind(session: ort.InferenceSession, head_size: int) -> ort.IOBinding:
    """Every present tensor is its past one."""
    binding = session.io_binding()
    states = {}
    for value in session.get_inputs():
        # Ids and the mask are ones, positions the last of the cache.
        fill = {"position_ids": CAPACITY - 1}.get(value.name, 0 if value.name.startswith("past") else 1)
        tensor = on_device(value, fill, head_size)
        binding.bind_ortvalue_input(value.name, tensor)
        states[value.name.replace("past_key_values", "present").replace("past", "present")] = tensor
    for value in session.get_outputs():
        tensor = states[value.name] if value.name in states else on_device(value, 0, head_size)
        binding.bind_ortvalue_output(value.name, tensor)
    return binding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--option", action="append", default=[])
    given = parser.parse_args()
    size = sum(path.stat().st_size for path in given.folder.glob("model.onnx*"))
    name = nxrt_ep_cuda.register()
    options = ort.SessionOptions()
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    options.add_provider_for_devices(devices[:1], dict(option.split("=", 1) for option in given.option))
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    start = time.perf_counter()
    session = ort.InferenceSession(given.folder / "model.onnx", options)
    seconds = time.perf_counter() - start
    held = nxrt_ep_cuda.counters()["bytes_in_use"]
    print(f"load: {seconds:.2f} s; {held / 2**20:.0f} MiB on the device, {held / size:.3f} of the model's files")
    config = json.loads((given.folder / "genai_config.json").read_text())
    binding = bind(session, config["model"]["decoder"]["head_size"])
    times = []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        times.append(1e3 * (time.perf_counter() - start))
    median = float(np.median(times[WARM:]))
    print(f"step: {median:.3f} ms, median of {STEPS}; {nxrt_ep_cuda.counters()}")


if __name__ == "__main__":
    main()
