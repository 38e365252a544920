"""The fixture models: unpacking, their recorded traces, and the state that a decoder carries from step to step."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tarfile

import numpy as np
import onnx
import onnxruntime as ort

import harness
from reference.model import Float64Model

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "models" / "fixtures"
NAMES = (
    "llama-tiny-genai-int4-cpu",
    "llama-tiny-genai-int4-cuda",
    "qwen3-tiny-genai-int4-cpu",
    "qwen35-tiny-genai-fp16-cuda",
    "qwen35-tiny-genai-fp32-cpu",
    "qwen35-tiny-genai-int4-cpu",
    "qwen35-tiny-genai-int4-cuda",
    "qwen35-tiny-genai-int4-cuda-blocksize128",
    "qwen35-tiny-genai-int4-cuda-gdn",
    "qwen35text-tiny-mobius-cuda-f16",
)

# Share of the maximum of the exact (float64) outputs. f32: measured 4.6e-6 for ORT against transformers. f16 graphs round
# between nodes; int8 activations (accuracy_level 4) round each product's input.
F32, F16_LOGITS, F16_STATES, LEVEL_4 = 1e-5, 1e-2, 1.5e-2, 1.5e-2
# These random-weight decoders amplify rounding, by prompt: over random prompts ORT CPU's f32 outputs are off by 4e-6 to
# 1.4e-5, its f16 logits by 5e-3 to 5e-2, its int8 logits by 1e-2 to 1e-1 of the maximum. Each prompt's own amplification
# is measured over all its outputs, with ORT CPU and with DRAWS faithfully rounded float64 runs, and where the largest of
# these errors times ABOVE_HONEST is above the floor, it counts instead. The largest error is heavy-tailed by prompt: of 33
# random prompts one was 1.7 times the largest of all draws, so random prompts get ABOVE_RANDOM for the largest element
# and ABOVE_HONEST for the median row, which no tail moves.
ABOVE_HONEST, ABOVE_RANDOM, DRAWS = 1.5, 4.0, 5
# Relative L2 of the median row of an int8 model's logits.
LEVEL_4_L2 = 1.5e-2


def unpack(name: str, folder: pathlib.Path) -> pathlib.Path:
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@dataclasses.dataclass
class Fixture:
    """One unpacked model."""

    name: str
    folder: pathlib.Path

    def __post_init__(self):
        with np.load(self.folder / "trace.npz") as archive:
            trace = {key: archive[key] for key in archive}
        self.steps: list[tuple[dict, dict]] = []
        while f"step{len(self.steps)}/out/logits" in trace:
            head = f"step{len(self.steps)}/"
            both = ({}, {})
            for key, value in trace.items():
                if key.startswith(head):
                    side, tensor = key[len(head) :].split("/", 1)
                    both[side == "out"][tensor] = value
            self.steps.append(both)

    @property
    def path(self) -> str:
        return str(self.folder / "model.onnx")

    @property
    def level_4(self) -> bool:
        """Whether the graph asks for int8 activations."""
        return "int4-cpu" in self.name

    @functools.cached_property
    def asks_for_int8(self) -> bool:
        """The same of any graph, by its attributes."""
        attributes = (a for node in onnx.load(self.path, load_external_data=False).graph.node for a in node.attribute)
        return any(a.name == "accuracy_level" and a.i == 4 for a in attributes)

    @property
    def rounds_to_int8(self) -> bool:
        """Whether the EP under test does so: on CUDA products take f32 activations as they are."""
        return self.level_4 and not harness.on_cuda()

    @property
    def half(self) -> bool:
        """Whether the graph computes in f16."""
        return "-f16" in self.name or "-cuda" in self.name

    @property
    def floors(self) -> dict[str, float]:
        """Share of the exact maximum that an output may always be off by."""
        if self.rounds_to_int8:
            return {"logits": LEVEL_4, "states": LEVEL_4}
        return {"logits": F16_LOGITS, "states": F16_STATES} if self.half else {"logits": F32, "states": F32}

    @property
    def relative(self) -> float:
        """Share of the maximum between two implementations of this model."""
        return 2 * self.floors["logits"]

    @functools.cached_property
    def ort_cpu(self) -> ort.InferenceSession:
        return harness.cpu_session(self.path, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL)

    @functools.cached_property
    def exact(self) -> Float64Model:
        return Float64Model(onnx.load(self.path))

    @functools.cached_property
    def rounded(self) -> Float64Model:
        rounding = np.random.default_rng(0)
        return Float64Model(onnx.load(self.path), rounding=rounding, keep_accuracy_level=self.rounds_to_int8)

    @functools.cached_property
    def recorded(self) -> Expected:
        """Each recorded step from its recorded inputs."""
        return Expected(self, [self.recorded_step(given, out) for given, out in self.steps])

    def recorded_step(self, given: dict, out: dict) -> Answers:
        batched = {n: np.repeat(v, DRAWS, 1 if v.ndim == 3 and n == "position_ids" else 0) for n, v in given.items()}
        theirs = None if self.asks_for_int8 and not self.rounds_to_int8 else out
        return Answers(self.exact.run(given), theirs, self.rounded.run(batched))

    def recorded_loss(self, out: dict, name: str) -> float:
        """How far a step's recorded output lies off the exact one."""
        number = next(i for i, (_, recorded) in enumerate(self.steps) if recorded is out)
        return median_l2(self.exact_steps[number][name], harness.as_float64(out[name]))

    @functools.cached_property
    def exact_steps(self) -> list[dict[str, np.ndarray]]:
        """The recorded tokens from the exact model's own states."""
        decoder = ExactDecoder(self, self.exact, len(self.steps[0][0]["input_ids"]))
        return [decoder.step(given["input_ids"]) for given, _ in self.steps]

    @functools.cached_property
    def own_states(self) -> Expected:
        """The recorded tokens, each step from the states of the step before."""
        return self.expect([given["input_ids"] for given, _ in self.steps])

    def expect(self, prompts: list[np.ndarray], greedy: int = 0) -> Expected:
        """The answers to these prompts in a row, then to `greedy` tokens of the exact model's choice."""
        batch = prompts[0].shape[0]
        exact = ExactDecoder(self, self.exact, batch)
        theirs = None if self.level_4 and not self.rounds_to_int8 else Decoder(self.ort_cpu, self.steps, batch)
        draws = ExactDecoder(self, self.rounded, batch * DRAWS)
        answers, prompts = [], list(prompts)
        for number in range(len(prompts) + greedy):
            if number == len(prompts):
                prompts.append(answers[-1].exact["logits"][:, -1].argmax(-1)[:, None])
            ids = prompts[number]
            draw = draws.step(np.repeat(ids, DRAWS, 0))
            answers.append(Answers(exact.step(ids), theirs and theirs.step(ids), draw))
        return Expected(self, answers, prompts, ABOVE_RANDOM if greedy else ABOVE_HONEST)


def state_pairs(session: ort.InferenceSession) -> dict[str, str]:
    """past input -> present output."""
    outputs = {o.name for o in session.get_outputs()}
    pairs = {}
    for given in session.get_inputs():
        for old in ("past_key_values.", "past."):
            present = given.name.replace(old, "present.", 1)
            if given.name.startswith(old) and present in outputs:
                pairs[given.name] = present
    assert pairs, "no states found"
    return pairs


def numpy_type(kind: str) -> np.dtype:
    return np.dtype({"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(int64)": "i8"}[kind])


class Decoder:
    """Feeds a session step by step. capacity = one shared past/present KV buffer of that many rows, None = growing."""

    def __init__(self, session: ort.InferenceSession, steps, batch: int = 1, capacity: int | None = None):
        self.session, self.batch, self.capacity, self.total = session, batch, capacity, 0
        self.pairs = state_pairs(session)
        self.inputs = {i.name: i for i in session.get_inputs()}
        self.outputs = {o.name: numpy_type(o.type) for o in session.get_outputs()}
        first = steps[0][0]
        self.state = {}
        for past in self.pairs:
            shape = [batch, *first[past].shape[1:]]
            if self.is_kv(past):
                shape[2] = capacity or 0
            self.state[past] = np.zeros(shape, first[past].dtype)

    @staticmethod
    def is_kv(name: str) -> bool:
        return name.endswith((".key", ".value"))

    def feeds(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        new = ids.shape[1]
        made = {"input_ids": ids, "attention_mask": np.ones((self.batch, self.total + new), np.int64)}
        if "position_ids" in self.inputs:
            positions = np.broadcast_to(np.arange(self.total, self.total + new), (self.batch, new))
            if len(self.inputs["position_ids"].shape) == 3:
                positions = np.broadcast_to(positions, (3, self.batch, new))
            made["position_ids"] = np.ascontiguousarray(positions)
        return made | self.state

    def step(self, ids: np.ndarray, shared: bool = False) -> dict[str, np.ndarray]:
        """One Run. shared: every state's past and present are one buffer (needs a capacity)."""
        feeds = self.feeds(np.ascontiguousarray(ids, np.int64))
        new = ids.shape[1]
        known, alias = {}, {}
        for past, present in self.pairs.items():
            shape = list(self.state[past].shape)
            if self.is_kv(past) and self.capacity is None:
                shape[2] += new
            known[present] = (tuple(shape), self.state[past].dtype)
            if shared:
                alias[present] = past
        for name, dtype in self.outputs.items():
            if name not in known:
                known[name] = None
        results = harness.run_bound(self.session, feeds, known, alias)
        for past, present in self.pairs.items():
            self.state[past] = results[present]
        self.total += new
        return results

    def trimmed(self, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Results with the unused rows of shared KV buffers cut off."""
        kv = {p for past, p in self.pairs.items() if self.is_kv(past)}
        return {n: v[:, :, : self.total] if n in kv else v for n, v in results.items()}


class ExactDecoder(Decoder):
    """The same in float64, states included."""

    def __init__(self, fixture: Fixture, model: Float64Model, batch: int):
        super().__init__(fixture.ort_cpu, fixture.steps, batch)
        self.model = model

    def step(self, ids: np.ndarray, shared: bool = False) -> dict[str, np.ndarray]:
        results = self.model.run(self.feeds(ids))
        self.state = {past: results[present] for past, present in self.pairs.items()}
        self.total += ids.shape[1]
        return results


@dataclasses.dataclass
class Answers:
    """One step's outputs: exact, ORT CPU's where it rounds no more than the EP under test, and of DRAWS faithfully
    rounded runs (entry b's at b*DRAWS onwards)."""

    exact: dict[str, np.ndarray]
    ort_cpu: dict[str, np.ndarray] | None
    draws: dict[str, np.ndarray]

    def honest_error(self, name: str, measure) -> float:
        exact = self.exact[name]
        draws = (self.draws[name][i::DRAWS] for i in range(DRAWS))
        theirs = [] if self.ort_cpu is None else [self.ort_cpu[name]]
        return max(measure(x, exact) for x in (*theirs, *draws))


class Expected:
    """A run's exact outputs, and how far an implementation may be off them."""

    def __init__(self, fixture: Fixture, answers: list[Answers], prompts=None, above: float = ABOVE_HONEST):
        self.fixture, self.answers, self.prompts = fixture, answers, prompts
        if any(a.ort_cpu is None for a in answers):
            # Draws alone do not bound a tail.
            above = ABOVE_RANDOM
        largest, median = (max(a.honest_error(n, m) for a in answers for n in a.exact) for m in (share, median_row))
        self.allowed = {kind: max(floor, above * largest) for kind, floor in fixture.floors.items()}
        self.allowed_median = {kind: max(floor, ABOVE_HONEST * median) for kind, floor in fixture.floors.items()}

    def check(self, number: int, got: dict, what: str) -> None:
        exact = self.answers[number].exact
        assert set(got) == set(exact)
        for name, reference in exact.items():
            where = f"{self.fixture.name}, {what}, step {number}, {name} against float64"
            harness.assert_close(got[name], reference, harness.Tolerance(self.allowed[kind_of(name)]), where)
            median, bound = median_row(got[name], reference), self.allowed_median[kind_of(name)]
            assert median <= bound, f"{where}: median relative L2 of a row {median:.2e}, allowed {bound:.2e}"


def kind_of(name: str) -> str:
    return "logits" if name == "logits" else "states"


def share(value: np.ndarray, exact: np.ndarray) -> float:
    """The largest error as a share of the exact maximum."""
    return float(np.abs(harness.as_float64(value) - exact).max(initial=0) / max(np.abs(exact).max(initial=0), 1e-30))


def median_row(value: np.ndarray, exact: np.ndarray) -> float:
    """Relative L2 of the median row (last axis); rows below 1% of the maximum count as 1%."""
    error = np.linalg.norm(harness.as_float64(value) - exact, axis=-1)
    size = np.maximum(np.linalg.norm(exact, axis=-1), 1e-2 * np.abs(exact).max(initial=0) + 1e-30)
    return float(np.median(error / size)) if error.size else 0.0


def median_l2(value: np.ndarray, reference: np.ndarray) -> float:
    """Relative L2 of the median row (last axis)."""
    size = np.maximum(np.linalg.norm(reference, axis=-1), 1e-12)
    return float(np.median(np.linalg.norm(value - reference, axis=-1) / size))


def assert_step(fixture: Fixture, got: dict, expected: dict, what: str) -> None:
    """Compares one step's outputs with those that ORT CPU recorded: each may be off by what one model may lose."""
    assert set(got) == set(expected)
    for name, reference in expected.items():
        value, where = got[name], f"{fixture.name}, {what}, {name}"
        assert value.shape == reference.shape, f"{where}: shape {value.shape}, expected {reference.shape}"
        if fixture.level_4:
            a, b = harness.as_float64(value), harness.as_float64(reference)
            error, bound = median_l2(a, b), 2 * LEVEL_4_L2
            # Where the recorded values are further off than that, so is who does not round activations to int8.
            if error > bound and harness.on_cuda():
                bound = LEVEL_4_L2 + max(LEVEL_4_L2, fixture.recorded_loss(expected, name))
            assert error <= bound, f"{where}: median relative L2 {error:.2e}, allowed {bound:.2e}"
            assert np.isfinite(a).all(), f"{where}: not finite"
        else:
            bound = 2 * fixture.floors[kind_of(name)]
            harness.assert_close(value, reference, harness.Tolerance(bound), where)
