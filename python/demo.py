"""Runs a real checkpoint on the execution provider, from conversion to streamed text, and shows where every node ran.

`make demo` sets up what this needs and calls it. Exit code 0 means: the text says Paris and no node ran elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the converter is a package of this repository, not of a wheel

PROMPT, ANSWER = "The capital of France is", "Paris"
CPU = "CPUExecutionProvider"
ROUNDS, SPEED_PROMPT, SPEED_TOKENS = 3, 128, 48


class DemoError(Exception):
    """Something the reader must know or do; printed without a traceback."""


@dataclass(frozen=True)
class Run:
    """One generation: the text, tokens/s of the prompt and tokens/s after it."""

    text: str
    prefill: float
    decode: float


def step(text: str) -> None:
    """A progress line."""
    print(f"\n==> {text}", flush=True)


def convert(cache: Path) -> dict[str, Path]:
    """The exact model and its twin, converted once for each version of the converter and the checkpoint."""
    from tests.models import smollm2
    from tests.models.gguf_llama import LlamaGguf

    try:
        source = smollm2.find_gguf()
    except FileNotFoundError as error:
        raise DemoError(str(error)) from error
    digest = hashlib.sha256(f"{source.name} {source.stat().st_size}".encode())
    for file in sorted((ROOT / "tests/models").glob("*.py")):
        if not file.name.startswith("test_"):
            digest.update(file.read_bytes())
    folder = cache / f"smollm2-{digest.hexdigest()[:16]}"
    if not folder.exists():
        # Written beside its place and moved there whole: an interrupted conversion leaves nothing that looks done.
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        gguf = LlamaGguf(source)
        for name, variant in smollm2.VARIANTS.items():
            print(f"    {name}: {source.name} -> {folder / name}", flush=True)
            smollm2.convert(gguf, part / name, variant)
        part.rename(folder)
    else:
        print(f"    cached: {folder}")
    return {name: folder / name for name in smollm2.VARIANTS}


def register() -> str:
    """Make the execution provider known to onnxruntime and to onnxruntime-genai, which has its own copy; its name."""
    try:
        import nxrt_ep_cpu
    except ImportError as error:
        raise DemoError(f"the wheel nxrt-ep-cpu is not in this environment ({error}): run `make demo`") from error
    import onnxruntime_genai as og

    name = nxrt_ep_cpu.register()
    og.register_execution_provider_library(name, nxrt_ep_cpu.get_library_path())
    print(f"    nxrt-ep-cpu {nxrt_ep_cpu.__version__}: {name} from {nxrt_ep_cpu.get_library_path()}")
    return name


def placement(model: Path, provider: str) -> tuple[Counter[str], int]:
    """Nodes by the execution provider that runs them, and how many fused nodes are `provider`'s."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(model, options, providers=[provider])
    record = session.get_provider_graph_assignment_info()
    nodes: Counter[str] = Counter()
    for subgraph in record:
        nodes[subgraph.ep_name] += len(subgraph.get_nodes())
    return nodes, sum(subgraph.ep_name == provider for subgraph in record)


def load(folder: Path, provider: str):
    """The model in onnxruntime-genai on one execution provider."""
    import onnxruntime_genai as og

    config = og.Config(str(folder))
    config.clear_providers()
    if provider != CPU:
        config.append_provider(provider)
        # A node that the provider does not take is then an error, not a slow surprise.
        config.overlay(
            json.dumps({"model": {"decoder": {"session_options": {"session.disable_cpu_ep_fallback": "1"}}}})
        )
    return og.Model(config)


def generate(model, ids: list[int], count: int, emit: Callable[[str], None] | None = None) -> Run:
    """Greedy generation of at most `count` tokens; `emit` gets each piece of text as it comes."""
    import numpy as np
    import onnxruntime_genai as og

    tokenizer = og.Tokenizer(model)
    stream, pieces = tokenizer.create_stream(), []
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + count, do_sample=False)
    generator = og.Generator(model, params)
    start = time.perf_counter()
    generator.append_tokens(np.array(ids, np.int32))
    generator.generate_next_token()
    prefill = time.perf_counter() - start
    tokens, decode = 1, 0.0
    while True:
        pieces.append(stream.decode(generator.get_next_tokens()[0]))
        if emit:
            emit(pieces[-1])
        if generator.is_done():
            break
        start = time.perf_counter()
        generator.generate_next_token()
        decode += time.perf_counter() - start
        tokens += 1
    return Run("".join(pieces), len(ids) / prefill, (tokens - 1) / decode if tokens > 1 else 0.0)


def tell(folder: Path, provider: str, count: int) -> Run:
    """Stream the answer to PROMPT to the terminal."""
    import onnxruntime_genai as og

    model = load(folder, provider)
    ids = list(og.Tokenizer(model).encode(PROMPT))
    print(f"    {PROMPT}", end="", flush=True)
    run = generate(model, ids, count, lambda piece: print(piece.replace("\n", "\n    "), end="", flush=True))
    print(f"\n    [{provider}: {run.decode:.1f} tokens/s]", flush=True)
    return run


def compare_speed(folder: Path, providers: list[str]) -> dict[str, tuple[float, float]]:
    """Median (prefill, decode) tokens/s of each provider, taken in turns so that both see the same machine."""
    models = {provider: load(folder, provider) for provider in providers}
    ids = [504 + i % 997 for i in range(SPEED_PROMPT)]
    runs: dict[str, list[Run]] = {provider: [] for provider in providers}
    for model in models.values():
        generate(model, ids, 4)  # warm up
    for _ in range(ROUNDS):
        for provider, model in models.items():
            runs[provider].append(generate(model, ids, SPEED_TOKENS))
    return {
        provider: (statistics.median(run.prefill for run in done), statistics.median(run.decode for run in done))
        for provider, done in runs.items()
    }


def report_placement(title: str, nodes: Counter[str], fused: int, provider: str) -> list[str]:
    """Print where the nodes ran; what is wrong with it, as sentences."""
    total = sum(nodes.values())
    for name, count in nodes.most_common():
        print(
            f"    {title}: {count} of {total} nodes on {name}"
            + (f", in {fused} fused node(s)" if name == provider else "")
        )
    elsewhere = total - nodes[provider]
    problems = [f"{title}: {elsewhere} of {total} nodes ran on another execution provider"] if elsewhere else []
    if fused != 1:
        problems.append(f"{title}: got {fused} fused nodes, expected 1")
    return problems


def main() -> int:
    """Convert SmolLM2-135M-Instruct, stream text on the execution provider, compare with ONNX Runtime's own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="where conversions are kept")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to stream")
    args = parser.parse_args()

    step(
        "Converting SmolLM2-135M-Instruct (GGUF, Q4_1) exactly, and a twin with uint8 zero points and int8 activations"
    )
    folders = convert(args.cache)
    step("Registering the execution provider")
    provider = register()

    step("Where every node runs")
    problems: list[str] = []
    for name, folder in folders.items():
        problems += report_placement(name, *placement(folder / "model.onnx", provider), provider)
    if problems:
        raise DemoError("\n".join(problems))

    step(f"The exact model on {provider}, through onnxruntime-genai")
    ours = tell(folders["exact"], provider, args.tokens)
    step("The same on ONNX Runtime's own CPU execution provider (its path for float zero points is a slow fallback)")
    theirs = tell(folders["exact"], CPU, args.tokens)
    if ours.text != theirs.text:
        problems.append(f"the exact model says '{ours.text}' on {provider} and '{theirs.text}' on {CPU}")
    step(f"The twin on {provider}")
    twin = tell(folders["twin"], provider, args.tokens)
    problems += [
        f"{name}: '{PROMPT}' must continue with {ANSWER}, got '{run.text}'"
        for name, run in ((f"exact on {provider}", ours), (f"exact on {CPU}", theirs), (f"twin on {provider}", twin))
        if not run.text.strip().startswith(ANSWER)
    ]

    step(f"Speed on the twin: {SPEED_PROMPT} prompt tokens, {SPEED_TOKENS} new, median of {ROUNDS} alternating rounds")
    speed = compare_speed(folders["twin"], [provider, CPU])
    print(f"    {'':28}{'prefill tokens/s':>18}{'decode tokens/s':>18}")
    for name, (prefill, decode) in speed.items():
        print(f"    {name:28}{prefill:18.1f}{decode:18.1f}")
    ratios = [a / b for a, b in zip(speed[provider], speed[CPU], strict=True)]
    print(f"    {'ratio':28}{ratios[0]:17.2f}x{ratios[1]:17.2f}x")
    if problems:
        raise DemoError("\n".join(problems))
    print(f"\nAll nodes ran on {provider}, and the capital of France is {ANSWER}.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoError as error:
        print(f"\nThe demo failed:\n{error}", file=sys.stderr)
        sys.exit(1)
