"""Whole decoders: one fused node, and agreement with the recorded traces and with the same graph in float64, in every
way a client drives them."""

import numpy as np
import onnxruntime as ort
import pytest

import harness
import models
from models import Decoder, assert_step

LEVELS = {
    "as_exported": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """name -> Fixture, unpacked once a worker."""
    cache = {}

    def get(name):
        if name not in cache:
            cache[name] = models.Fixture(name, models.unpack(name, tmp_path_factory.mktemp("model")))
        return cache[name]

    return get


@pytest.fixture(params=models.NAMES)
def fixture(request, unpacked):
    return unpacked(request.param)


def open_session(fixture, provider_options=None, **how):
    """The session under test; in an oracles-only run ORT CPU stands in, to test the tests."""
    if harness.oracles_only():
        return harness.cpu_session(fixture.path, level=how.get("level"))
    return harness.ep_session(fixture.path, provider_options, **how)


def feed_of(session, recorded):
    names = {i.name for i in session.get_inputs()}
    return {n: v for n, v in recorded.items() if n in names}


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS.keys())
def test_one_fused_node_holds_every_node(fixture, level):
    session = open_session(fixture, level=level)
    if harness.oracles_only():
        return
    harness.assert_all_on_ep(session)
    assert harness.fused_groups(session) == 1


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS.keys())
def test_every_recorded_step(fixture, level):
    """The recorded inputs of each step, prefill and decode, into poisoned outputs."""
    session = open_session(fixture, level=level)
    for number, (given, expected) in enumerate(fixture.steps):
        known = {n: (v.shape, v.dtype) for n, v in expected.items()}
        order = [o.name for o in session.get_outputs()]
        got = harness.run_bound(session, feed_of(session, given), {n: known[n] for n in order})
        assert_step(fixture, got, expected, f"step {number}")
        fixture.recorded.check(number, got, "recorded states")


def test_greedy_run_that_feeds_its_own_states(fixture):
    decoder = Decoder(open_session(fixture), fixture.steps)
    for number, (given, expected) in enumerate(fixture.steps):
        got = decoder.step(given["input_ids"])
        check_step(fixture, number, got, "own states")
        same_choice(fixture, got["logits"], expected["logits"])


def check_step(fixture, number, got, what):
    """Step `number` of the recorded tokens, from the decoder's own states."""
    assert_step(fixture, got, fixture.steps[number][1], f"{what}, step {number}")
    fixture.own_states.check(number, got, what)


def same_choice(fixture, got, expected):
    """The greedy token agrees wherever the reference's margin is larger than the tolerance."""
    last, reference = harness.as_float64(got[:, -1]), harness.as_float64(expected[:, -1])
    relative = 2 * models.LEVEL_4_L2 if fixture.level_4 else fixture.relative
    for row, other in zip(last, reference):
        second, best = np.sort(other)[-2:]
        if best - second > 2 * relative * np.abs(other).max():
            assert row.argmax() == other.argmax()


@pytest.mark.parametrize("capacity", [16, 32])
def test_past_and_present_in_one_buffer(fixture, capacity):
    """KV, convolution and recurrent states written in place, as onnxruntime-genai drives a decoder."""
    decoder = Decoder(open_session(fixture), fixture.steps, capacity=capacity)
    for number, (given, _) in enumerate(fixture.steps):
        got = decoder.trimmed(decoder.step(given["input_ids"], shared=True))
        check_step(fixture, number, got, "shared buffers")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "growing"])
@pytest.mark.parametrize("chunks", [(5, 4), (1, 8), (8, 1), (3, 3, 3), (2, 7)], ids=str)
def test_chunked_prefill(fixture, chunks, shared):
    """A prompt in pieces leaves the states of the prompt in one piece."""
    decoder = Decoder(open_session(fixture), fixture.steps, capacity=16 if shared else None)
    given, _ = fixture.steps[0]
    start, logits = 0, []
    for size in chunks:
        got = decoder.trimmed(decoder.step(given["input_ids"][:, start : start + size], shared=shared))
        logits.append(got["logits"])
        start += size
    got["logits"] = np.concatenate(logits, 1)
    check_step(fixture, 0, got, f"chunks {chunks}")
    got = decoder.trimmed(decoder.step(fixture.steps[1][0]["input_ids"], shared=shared))
    check_step(fixture, 1, got, f"the token after chunks {chunks}")


@pytest.mark.parametrize("batch", [2, 3])
def test_batches(fixture, rng, batch):
    """Different random prompts side by side, with and without shared buffers."""
    expected = fixture.expect([rng.integers(3, 480, (batch, 9))], greedy=3)
    for capacity in (None, 16):
        decoder = Decoder(open_session(fixture), fixture.steps, batch, capacity)
        for number, ids in enumerate(expected.prompts):
            got = decoder.trimmed(decoder.step(ids, shared=capacity is not None))
            expected.check(number, got, f"batch {batch}, capacity {capacity}")


def test_a_batch_of_the_trace_repeats_it(fixture):
    decoder = Decoder(open_session(fixture), fixture.steps, batch=2)
    for number, (given, _) in enumerate(fixture.steps):
        got = decoder.step(np.repeat(given["input_ids"], 2, 0))
        for row in range(2):
            one = {n: v[row : row + 1] for n, v in got.items()}
            check_step(fixture, number, one, f"row {row}")


def test_every_tier(fixture, tier):
    decoder = Decoder(open_session(fixture, tier), fixture.steps)
    for number, (given, _) in enumerate(fixture.steps):
        check_step(fixture, number, decoder.step(given["input_ids"]), str(tier))


@pytest.mark.cpu_only("threads of ORT's pool")
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_threads(fixture, threads):
    decoder = Decoder(open_session(fixture, threads=threads), fixture.steps, capacity=16)
    for number, (given, _) in enumerate(fixture.steps):
        got = decoder.trimmed(decoder.step(given["input_ids"], shared=True))
        check_step(fixture, number, got, f"{threads} threads")


def test_runs_repeat_to_the_bit(fixture):
    """Same inputs, same bits, whatever the threads did in between."""
    session = open_session(fixture)
    given = feed_of(session, fixture.steps[0][0])
    names = [o.name for o in session.get_outputs()]
    first = session.run(names, given)
    for _ in range(5):
        for name, a, b in zip(names, first, session.run(names, given)):
            assert a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize("name", [n for n in models.NAMES if "int4-cpu" in n])
def test_int8_activations_against_the_exact_model(name, unpacked):
    """accuracy_level 4 against the same weights in float64: within 1.5e-2 in relative L2 of the median token's logits."""
    fixture = unpacked(name)
    session = open_session(fixture)
    errors = []
    for (given, _), answers in zip(fixture.steps, fixture.recorded.answers):
        a = harness.as_float64(session.run(["logits"], feed_of(session, given))[0])
        b = answers.exact["logits"]
        errors.extend((np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).ravel())
    assert np.median(errors) <= models.LEVEL_4_L2, f"median {np.median(errors):.2e}, worst {np.max(errors):.2e}"


def test_long_prompt(fixture, rng):
    """Longer than any tile: 200 random tokens at once, then two steps."""
    expected = fixture.expect([rng.integers(3, 480, (1, 200))], greedy=2)
    decoder = Decoder(open_session(fixture), fixture.steps)
    for number, ids in enumerate(expected.prompts):
        expected.check(number, decoder.step(ids), "200 tokens")
