"""Times greedy onnxruntime-genai on a GPU: the prompt in ms, then tokens/s, for CUDA graphs by ORT (1) and without (0), and for
Runs that wait for their end, which is genai's default, and that do not.

    python tests/device/genai_bench.py MODEL_FOLDER [--ep-library LIBRARY]

Without LIBRARY the provider "cuda" is ORT's own CUDA EP (onnxruntime-gpu), with it the EP in that library: run both on one
machine, one after the other. Needs onnxruntime-genai-cuda and the CUDA libraries that it links; PyTorch brings them.
"""

import argparse
import itertools
import json
import pathlib
import time

import numpy as np
import torch  # noqa: F401 - loads the CUDA libraries that genai links
import onnxruntime_genai as og

PROMPTS, WARM, TOKENS, REPEATS = (64, 4096), 9, 191, 3


def once(model: og.Model, prompt: np.ndarray) -> tuple[float, float]:
    """Milliseconds of the prompt and its first token, and tokens/s of those that come after the warm-up."""
    params = og.GeneratorParams(model)
    length = len(prompt) + 1 + WARM + TOKENS
    params.set_search_options(do_sample=False, max_length=length, min_length=length)
    generator = og.Generator(model, params)
    start = time.perf_counter()
    generator.append_tokens(prompt)
    generator.generate_next_token()
    first = time.perf_counter() - start
    for _ in range(WARM):
        generator.generate_next_token()
    start = time.perf_counter()
    for _ in range(TOKENS):
        generator.generate_next_token()
    return 1e3 * first, TOKENS / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--ep-library", help="registered as CUDAExecutionProvider")
    given = parser.parse_args()
    if given.ep_library:
        og.register_execution_provider_library("CUDAExecutionProvider", given.ep_library)
    vocabulary = json.loads((given.folder / "genai_config.json").read_text())["model"]["vocab_size"]
    for graph, waits in itertools.product("10", (True, False)):
        config = og.Config(str(given.folder))
        config.clear_providers()
        config.append_provider("cuda")
        config.set_provider_option("cuda", "enable_cuda_graph", graph)
        entries = {} if waits else {"disable_synchronize_execution_providers": "1"}
        config.overlay(json.dumps({"model": {"decoder": {"run_options": entries}}}))
        model = og.Model(config)
        for length in PROMPTS:
            prompt = np.random.default_rng(0).integers(10, min(vocabulary, 400), length, np.int32)
            runs = [once(model, prompt) for _ in range(REPEATS)]
            prefill, decode = min(ms for ms, _ in runs), max(rate for _, rate in runs)
            how = f"enable_cuda_graph={graph} {'waits' if waits else 'does not wait'} prompt={length}"
            print(f"{how}: {prefill:.1f} ms, {decode:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
