"""One session on a generated decoder: resident memory after loading and running, and the peak, as JSON.

    python memory_run.py LIBRARY MODEL.onnx

A process of its own, since a peak cannot be taken back. Only numpy and onnxruntime are imported.
"""

import json
import pathlib
import sys

import numpy as np
import onnxruntime as ort

EP_NAME = "NxrtCpuExecutionProvider"
DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


def status(key: str) -> int:
    """Bytes by /proc/self/status."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def feeds(session: ort.InferenceSession, tokens: int, head_size: int) -> dict[str, np.ndarray]:
    """A prompt of `tokens` zeros after empty states."""
    sizes = {"batch_size": 1, "past_sequence_length": 0, "kv_cache_dim": head_size}
    made = {}
    for given in session.get_inputs():
        shape = [d if isinstance(d, int) else sizes.get(d, tokens) for d in given.shape]
        fill = np.ones if given.name == "attention_mask" else np.zeros
        made[given.name] = fill(shape, DTYPES[given.type])
    return made


def main() -> None:
    library, model = sys.argv[1:]
    config = json.loads(pathlib.Path(model).with_name("genai_config.json").read_text())
    head_size = config["model"]["decoder"]["head_size"]
    ort.register_execution_provider_library(EP_NAME, library)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices([d for d in ort.get_ep_devices() if d.ep_name == EP_NAME], {})
    before = status("VmRSS")
    session = ort.InferenceSession(model, options)
    loaded = status("VmRSS")
    for tokens in (16, 1, 1):
        (logits,) = session.run(["logits"], feeds(session, tokens, head_size))
        assert np.isfinite(logits).all()
    print(json.dumps({"before": before, "loaded": loaded, "final": status("VmRSS"), "peak": status("VmHWM")}))


if __name__ == "__main__":
    main()
