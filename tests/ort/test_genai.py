"""onnxruntime-genai on the EP: greedy tokens equal to the recorded ones and to a plain ORT loop."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import onnxruntime as ort
import pytest

import harness
import models
import target
from models import Decoder

SCRIPT = pathlib.Path(__file__).with_name("genai_run.py")
TOKENS = 16


@pytest.fixture(scope="module", params=models.NAMES)
def fixture(request, tmp_path_factory):
    return models.Fixture(request.param, models.unpack(request.param, tmp_path_factory.mktemp("model")))


def run_genai(fixture, prompts, **options) -> dict:
    """What genai_run.py prints, from a process of its own."""
    command = [sys.executable, str(SCRIPT), str(fixture.folder), "--prompts", json.dumps(np.asarray(prompts).tolist())]
    if not harness.oracles_only():
        command += ["--ep", harness.STATE.ep.module]
        command += [] if target.on_cuda() else ["--library", harness.STATE.library]
    for name, value in options.items():
        command += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, f"genai ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    said = json.loads(done.stdout.splitlines()[-1])
    if target.on_cuda():
        assert said["device"] == "CUDA"
    return said


def generate(fixture, prompts, **options) -> np.ndarray:
    """Tokens [sequences, TOKENS] from genai."""
    return np.array(run_genai(fixture, prompts, **options)["tokens"])


def plain_loop(fixture, prompts) -> np.ndarray:
    """The same greedy run through plain ORT on the session under test."""
    session = (
        harness.cpu_session(fixture.path, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
        if harness.oracles_only()
        else harness.ep_session(fixture.path)
    )
    ids = np.asarray(prompts)
    capacity = ids.shape[1] + TOKENS
    decoder = Decoder(session, fixture.steps, batch=len(ids), capacity=capacity)
    tokens = []
    for _ in range(TOKENS):
        logits = decoder.step(ids, shared=True)["logits"]
        ids = logits[:, -1].astype(np.float32).argmax(-1)[:, None]
        tokens.append(ids[:, 0])
    return np.array(tokens).T


def assert_greedy_by_ort_cpu(fixture, prompts, tokens) -> None:
    """ORT CPU, fed these very tokens, finds each of them best, or within the tolerance of the best."""
    session = harness.cpu_session(fixture.path, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    decoder = Decoder(session, fixture.steps, batch=len(prompts))
    ids = np.asarray(prompts)
    for number in range(tokens.shape[1]):
        logits = decoder.step(ids)["logits"][:, -1].astype(np.float64)
        relative = 4 * models.LEVEL_4_L2 if fixture.level_4 else fixture.relative
        chosen = np.take_along_axis(logits, tokens[:, number : number + 1], -1)[:, 0]
        short = logits.max(-1) - chosen
        assert (short <= 2 * relative * np.abs(logits).max(-1)).all(), f"token {number}: short of the best by {short}"
        ids = tokens[:, number : number + 1]


def recorded_prompt(fixture):
    return fixture.steps[0][0]["input_ids"]


def test_recorded_tokens(fixture):
    """The prompt of the trace gives the tokens of the trace."""
    recorded = [int(given["input_ids"][0, 0]) for given, _ in fixture.steps[1:]]
    recorded.append(int(fixture.steps[-1][1]["logits"][0, -1].argmax()))
    tokens = generate(fixture, recorded_prompt(fixture))
    if harness.on_cuda() and fixture.level_4:
        # ORT recorded these with int8 activations; on CUDA they are not rounded.
        assert_greedy_by_ort_cpu(fixture, recorded_prompt(fixture), tokens)
    else:
        assert tokens[0, : len(recorded)].tolist() == recorded


@pytest.mark.parametrize("share", ["true", "false"], ids=["shared", "growing"])
def test_equal_to_the_plain_loop(fixture, rng, share):
    prompts = rng.integers(3, 480, (1, 9))
    tokens = generate(fixture, prompts, share=share)
    assert_greedy_by_ort_cpu(fixture, prompts, tokens)
    assert tokens.tolist() == plain_loop(fixture, prompts).tolist()


def test_two_sequences(fixture, rng):
    prompts = rng.integers(3, 480, (2, 7))
    tokens = generate(fixture, prompts)
    assert_greedy_by_ort_cpu(fixture, prompts, tokens)
    assert tokens.tolist() == plain_loop(fixture, prompts).tolist()


def test_prompt_in_two_parts(fixture, rng):
    """append_tokens twice: the second part runs over a filled cache."""
    prompts = rng.integers(3, 480, (1, 9))
    tokens = generate(fixture, prompts[:, :5], append=prompts[0, 5:].tolist())
    assert_greedy_by_ort_cpu(fixture, prompts, tokens)


def test_runs_that_do_not_wait(fixture):
    """genai's own kernels queue up behind a Run that has not ended."""
    prompts = recorded_prompt(fixture)
    for option in ("enable_cuda_graph=0", "enable_cuda_graph=1") if target.on_cuda() else (None,):
        given = {"option": option} if option else {}
        waits = generate(fixture, prompts, tokens=40, **given)
        assert waits.tolist() == generate(fixture, prompts, tokens=40, synchronize="false", **given).tolist()


def test_provider_options_pass_through(fixture, tier):
    if harness.oracles_only():
        return
    given = {"option": "=".join(option) for option in tier.items()}
    tokens = generate(fixture, recorded_prompt(fixture), **given)
    assert_greedy_by_ort_cpu(fixture, recorded_prompt(fixture), tokens)


@pytest.mark.cuda_only("CUDA graphs")
def test_both_drives_of_a_graph(fixture):
    """With genai's own capture, with the EP's and without any: the same tokens, and no more graphs than shapes call for."""
    prompts, tokens = recorded_prompt(fixture), 50
    ours = run_genai(fixture, prompts, tokens=tokens, option="enable_cuda_graph=0")
    off = run_genai(fixture, prompts, tokens=tokens, option="cuda_graph=off")
    assert ours["tokens"] == off["tokens"]
    # One graph for the prompt, one for all tokens, and one more where the mask outgrows its bucket.
    assert ours["counters"]["captures"] <= 3 and ours["counters"]["eager_runs"] == 0
    assert (off["counters"]["captures"], off["counters"]["replays"]) == (0, 0)
    managed = run_genai(fixture, prompts, tokens=tokens, option="enable_cuda_graph=1")
    assert managed["tokens"] == ours["tokens"]
    counters = managed["counters"]
    if fixture.steps[0][0].get("position_ids", np.zeros(0)).ndim == 3:
        # genai 0.18 gives such a model new positions and a longer mask each step: ORT must not replay, but when genai
        # repeats its first one.
        assert counters["captures"] <= 2 and counters["managed_replays"] <= 1
    else:
        # The prompt runs without a graph, and one token captures.
        assert counters["captures"] == 1 and counters["managed_replays"] in (tokens - 2, tokens - 1)
