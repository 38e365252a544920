"""Speed beside ONNX Runtime's own CPU execution provider, in one process, in alternating rounds, medians.

`make bench` sets up what this needs and calls it. Models are made with random weights under .cache on the first run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from tests.bench.machine import describe, read_bandwidth  # noqa: E402
from tests.bench.sessions import CPU, DecoderSession, MatmulSession, weight_bytes  # noqa: E402
from tests.models import qwen35, single_op, smollm2  # noqa: E402
from tests.models.gguf_llama import LlamaGguf  # noqa: E402

PROMPTS, DECODE_TOKENS = (128, 512), 32
ROWS = (1, 128, 512)
COLD_BYTES = 320 << 20  # weights of the M=1 measurement together: more than the last-level cache keeps
MOST_COPIES = 256
ROUND_SECONDS = 0.5  # a round repeats a short pass for about this long
SETTLE_SECONDS = 0.02  # lets the other session's threads go to sleep
SUITES = ("hybrid", "twin", "matmul")


@dataclass
class Row:
    """One line of the result: rates of each provider, ours first."""

    name: str
    unit: str
    rates: dict[str, float]
    bandwidth: float | None = None
    difference: float | None = None

    def ratio(self) -> float | None:
        """Ours over theirs; None when only one provider ran."""
        rates = list(self.rates.values())
        return rates[0] / rates[1] if len(rates) == 2 else None


@dataclass
class Bench:
    """Settings and results of one run."""

    providers: list[str]
    threads: int
    rounds: int
    cache: Path
    bandwidth: float
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Keep a row and print it."""
        self.rows.append(row)
        rates = "".join(f"{rate:12.1f}" for rate in row.rates.values())
        ratio, fraction, difference = row.ratio(), row.bandwidth, row.difference
        print(
            f"{row.name:44}{row.unit:>9}{rates}"
            + (f"{ratio:8.2f}x" if ratio else "")
            + (f"{fraction:8.0%}" if fraction is not None else f"{'':8}")
            + (f"{difference:12.1e}" if difference is not None else ""),
            flush=True,
        )

    def head(self, title: str) -> None:
        """Print a table's head."""
        names = "".join(f"{name.removesuffix('ExecutionProvider'):>12}" for name in self.providers)
        pair = len(self.providers) == 2
        print(
            f"\n{title}\n{'':44}{'':9}{names}{'ratio':>9}{'of bw':>8}{'rel. diff.':>12}"
            if pair
            else f"\n{title}\n{'':53}{names}{'of bw':>8}"
        )


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Distance of two results in the L2 norm, relative to the second."""
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def bench_decoder(bench: Bench, title: str, folder: Path) -> None:
    """Prefill of each prompt length from an empty cache, then decode after the shortest."""
    sessions = {
        name: DecoderSession(folder, name, bench.threads, max(PROMPTS) + DECODE_TOKENS) for name in bench.providers
    }
    step_bytes = weight_bytes(folder / "model.onnx") + next(iter(sessions.values())).state_bytes
    vocab = next(iter(sessions.values())).vocab
    ids = np.random.default_rng(0).integers(0, vocab, max(PROMPTS) + DECODE_TOKENS)
    seconds: dict[tuple[str, str], list[float]] = {}
    logits: dict[tuple[str, str], np.ndarray] = {}
    for turn in range(bench.rounds + 1):
        for name, session in sessions.items():
            time.sleep(SETTLE_SECONDS)
            passes = {}
            for length in sorted(PROMPTS, reverse=True):
                session.reset()
                passes[f"prefill {length}"] = session.run([ids[:length]])
            tokens = ids[length : length + DECODE_TOKENS]
            passes["decode"] = session.run([tokens[i : i + 1] for i in range(DECODE_TOKENS)])
            for what, done in passes.items():
                logits[name, what] = done.logits
                if turn:  # the first turn warms up
                    seconds.setdefault((name, what), []).append(done.seconds)
    bench.head(f"{title}: {step_bytes / 1e6:.0f} MB read for each decoded token")
    for what, count in {"decode": DECODE_TOKENS, **{f"prefill {n}": n for n in PROMPTS}}.items():
        rates = {name: count / statistics.median(seconds[name, what]) for name in bench.providers}
        fraction = next(iter(rates.values())) * step_bytes / bench.bandwidth if what == "decode" else None
        pair = [logits[name, what] for name in bench.providers]
        bench.add(Row(what, "tokens/s", rates, fraction, relative(*pair) if len(pair) == 2 else None))


def projections(config: qwen35.HybridConfig) -> Counter[tuple[int, int]]:
    """(N, K) of every MatMulNBits of a decoder, with how often it occurs."""
    model = qwen35.build(config, qwen35.RandomWeights(config.io_dtype), None)
    found: Counter[tuple[int, int]] = Counter()
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            sizes = {attribute.name: attribute.i for attribute in node.attribute}
            found[sizes["N"], sizes["K"]] += 1
    return found


def bench_matmul(bench: Bench, sizes: list[str], rows: list[int]) -> None:
    """MatMulNBits alone over the shapes of the given decoders, and the sum over each decoder's nodes."""
    shapes = {size: projections(qwen35.SIZES[size]) for size in sizes}
    milliseconds: dict[tuple[int, int, int, str], float] = {}
    bench.head(
        "MatMulNBits alone, 4 bits, block 32, accuracy_level 4 (GOP/s = 2MNK/s; 'of bw' counts codes and scales)"
    )
    for n, k in sorted(set().union(*shapes.values()), key=lambda shape: (shape[1], shape[0])):
        for m in rows:
            seconds, difference = measure_matmul(bench, m, n, k)
            weights = n * k // 2 + n * k // 32 * 4
            rates = {name: 2e-9 * m * n * k / value for name, value in seconds.items()}
            fraction = weights / next(iter(seconds.values())) / bench.bandwidth if m == 1 else None
            bench.add(Row(f"N={n} K={k} M={m}", "GOP/s", rates, fraction, difference))
            milliseconds |= {(m, n, k, name): 1e3 * value for name, value in seconds.items()}
    bench.head("All MatMulNBits of one forward pass")
    for size, counts in shapes.items():
        for m in rows:
            total = {
                name: sum(count * milliseconds[m, n, k, name] for (n, k), count in counts.items())
                for name in bench.providers
            }
            bench.add(Row(f"{size} M={m}", "tokens/s", {name: 1e3 * m / value for name, value in total.items()}))


def measure_matmul(bench: Bench, m: int, n: int, k: int) -> tuple[dict[str, float], float | None]:
    """Median seconds of one node for each provider, and how far apart their outputs are."""
    copies = min(MOST_COPIES, COLD_BYTES // (n * k * 5 // 8) + 1) if m == 1 else 1
    rng = np.random.default_rng(m)
    inputs = [rng.standard_normal((m, k), np.float32) for _ in range(copies)]
    with tempfile.TemporaryDirectory(dir=bench.cache) as folder:
        single_op.matmul_nbits(n, k, Path(folder), copies)
        sessions = {
            name: MatmulSession(Path(folder) / "model.onnx", name, bench.threads, inputs, n) for name in bench.providers
        }
        once = {name: min(session.run(), session.run()) for name, session in sessions.items()}
        repeat = {name: max(1, int(ROUND_SECONDS / value)) for name, value in once.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sessions}
        for _ in range(bench.rounds):
            for name, session in sessions.items():
                time.sleep(SETTLE_SECONDS)
                seconds[name] += [statistics.median(session.run() for _ in range(repeat[name]))]
        outputs = [session.outputs()[0] for session in sessions.values()]
    difference = relative(*outputs) if len(outputs) == 2 else None
    return {name: statistics.median(values) / copies for name, values in seconds.items()}, difference


def model_folder(cache: Path, name: str, make) -> Path:
    """A generated model, made once and again when its generator is newer."""
    folder = cache / "bench" / name
    newest = max(file.stat().st_mtime for file in (ROOT / "tests/models").glob("*.py"))
    stamp = folder / "genai_config.json"
    if not stamp.exists() or stamp.stat().st_mtime < newest:
        print(f"making {folder}", flush=True)
        make(folder)
    return folder


def register(ort_only: bool) -> tuple[list[str], str | None]:
    """Providers to measure, ours first, and our version."""
    if ort_only:
        return [CPU], None
    import nxrt_ep_cpu

    return [nxrt_ep_cpu.register(), CPU], nxrt_ep_cpu.__version__


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--suite", choices=SUITES, action="append", help="what to measure (may be given more than once; default: all)"
    )
    parser.add_argument("--size", choices=list(qwen35.SIZES), default="0.8b", help="size of the hybrid decoder")
    parser.add_argument(
        "--matmul-size", choices=list(qwen35.SIZES), action="append", help="decoders whose shapes are measured"
    )
    parser.add_argument("--rows", type=int, action="append", help=f"M of MatMulNBits alone (default: {ROWS})")
    parser.add_argument("--threads", type=int, default=2, help="intra-op threads")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds that medians are taken over")
    parser.add_argument("--ort-only", action="store_true", help="measure onnxruntime's CPU execution provider alone")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache")
    parser.add_argument("--json", type=Path, help="write machine and rows here too")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = parse()
    suites = args.suite or SUITES
    args.cache.mkdir(parents=True, exist_ok=True)
    providers, version = register(args.ort_only)
    machine = describe(args.threads, version)
    bench = Bench(providers, args.threads, args.rounds, args.cache, read_bandwidth(args.threads))
    machine["bandwidth"] = (
        f"{bench.bandwidth / 1e9:.1f} GB/s read by {args.threads} threads ('bw' below), {args.rounds} rounds"
    )
    for key, text in machine.items():
        print(f"{key + ':':11}{text}")
    if "hybrid" in suites:
        folder = model_folder(
            args.cache, f"qwen35-{args.size}", lambda path: qwen35.generate(qwen35.SIZES[args.size], path)
        )
        bench_decoder(bench, f"Qwen3.5-{args.size} int4, random weights", folder)
    if "twin" in suites:
        folder = model_folder(
            args.cache, "smollm2-twin", lambda path: smollm2.convert(LlamaGguf(smollm2.find_gguf()), path, smollm2.TWIN)
        )
        bench_decoder(bench, "SmolLM2-135M-Instruct, 4 bits with uint8 zero points", folder)
    if "matmul" in suites:
        bench_matmul(bench, args.matmul_size or ["0.8b", "4b", "9b"], args.rows or list(ROWS))
    if args.json:
        rows = [asdict(row) | {"ratio": row.ratio()} for row in bench.rows]
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    try:
        main()
    except (FileNotFoundError, ImportError, RuntimeError) as error:
        sys.exit(f"the benchmark failed: {error}")
