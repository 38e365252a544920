"""Whole decoders: one fused node, and agreement with the recorded traces in every way a client drives them."""

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


def oracle(fixture):
    return harness.cpu_session(fixture.path, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL)


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


def test_greedy_run_that_feeds_its_own_states(fixture):
    decoder = Decoder(open_session(fixture), fixture.steps)
    for number, (given, expected) in enumerate(fixture.steps):
        got = decoder.step(given["input_ids"])
        assert_step(fixture, got, expected, f"own states, step {number}")
        same_choice(fixture, got["logits"], expected["logits"])


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
    for number, (given, expected) in enumerate(fixture.steps):
        got = decoder.trimmed(decoder.step(given["input_ids"], shared=True))
        assert_step(fixture, got, expected, f"shared buffers, step {number}")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "growing"])
@pytest.mark.parametrize("chunks", [(5, 4), (1, 8), (8, 1), (3, 3, 3), (2, 7)], ids=str)
def test_chunked_prefill(fixture, chunks, shared):
    """A prompt in pieces leaves the states of the prompt in one piece."""
    decoder = Decoder(open_session(fixture), fixture.steps, capacity=16 if shared else None)
    given, expected = fixture.steps[0]
    start, logits = 0, []
    for size in chunks:
        got = decoder.trimmed(decoder.step(given["input_ids"][:, start : start + size], shared=shared))
        logits.append(got["logits"])
        start += size
    got["logits"] = np.concatenate(logits, 1)
    assert_step(fixture, got, expected, f"chunks {chunks}")
    given, expected = fixture.steps[1]
    got = decoder.trimmed(decoder.step(given["input_ids"], shared=shared))
    assert_step(fixture, got, expected, f"the token after chunks {chunks}")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "growing"])
@pytest.mark.parametrize("batch", [2, 3])
def test_batches(fixture, rng, batch, shared):
    """Different prompts side by side: each row is what ORT CPU gives for the batch."""
    capacity = 16 if shared else None
    ours = Decoder(open_session(fixture), fixture.steps, batch, capacity)
    theirs = Decoder(oracle(fixture), fixture.steps, batch, capacity)
    ids = rng.integers(3, 480, (batch, 9))
    for number in range(4):
        expected = theirs.trimmed(theirs.step(ids))
        got = ours.trimmed(ours.step(ids, shared=shared))
        assert_step(fixture, got, expected, f"batch {batch}, step {number}", random=True)
        ids = expected["logits"][:, -1].argmax(-1)[:, None]


def test_a_batch_of_the_trace_repeats_it(fixture):
    decoder = Decoder(open_session(fixture), fixture.steps, batch=2)
    for number, (given, expected) in enumerate(fixture.steps):
        got = decoder.step(np.repeat(given["input_ids"], 2, 0))
        for row in range(2):
            one = {n: v[row : row + 1] for n, v in got.items()}
            assert_step(fixture, one, expected, f"row {row}, step {number}")


def test_every_tier(fixture, tier):
    decoder = Decoder(open_session(fixture, tier), fixture.steps)
    for number, (given, expected) in enumerate(fixture.steps):
        assert_step(fixture, decoder.step(given["input_ids"]), expected, f"{tier}, step {number}")


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_threads(fixture, threads):
    decoder = Decoder(open_session(fixture, threads=threads), fixture.steps, capacity=16)
    for number, (given, expected) in enumerate(fixture.steps):
        got = decoder.trimmed(decoder.step(given["input_ids"], shared=True))
        assert_step(fixture, got, expected, f"{threads} threads, step {number}")


def test_runs_repeat_to_the_bit(fixture):
    """Same inputs, same bits, whatever the threads did in between."""
    session = open_session(fixture)
    given = feed_of(session, fixture.steps[0][0])
    names = [o.name for o in session.get_outputs()]
    first = session.run(names, given)
    for _ in range(5):
        for name, a, b in zip(names, first, session.run(names, given)):
            assert a.tobytes() == b.tobytes(), name


def test_against_the_exact_model(fixture):
    """The same weights in f32 throughout on ORT CPU: rounding to f16 or int8 stays within what one model may lose."""
    exact = harness.cpu_session(fixture.exact_twin())
    session = open_session(fixture)
    names = [o.name for o in session.get_outputs()]
    errors = []
    for number, (given, _) in enumerate(fixture.steps):
        wide = {n: v.astype(np.float32) if v.dtype == np.float16 else v for n, v in feed_of(session, given).items()}
        got = dict(zip(names, session.run(names, feed_of(session, given))))
        expected = dict(zip(names, exact.run(names, wide)))
        if fixture.level_4:
            a, b = (harness.as_float64(x["logits"]) for x in (got, expected))
            errors.extend((np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).ravel())
            continue
        for name in names:
            where = f"{fixture.name}, step {number}, {name}"
            models.assert_exact(fixture, name, got[name], expected[name], 1, where)
    if fixture.level_4:
        assert np.median(errors) <= models.LEVEL_4_L2, f"median {np.median(errors):.2e}, worst {np.max(errors):.2e}"


def test_long_prompt(fixture, rng):
    """Longer than any tile: 200 tokens at once, then two steps."""
    ours, theirs = Decoder(open_session(fixture), fixture.steps), Decoder(oracle(fixture), fixture.steps)
    ids = rng.integers(3, 480, (1, 200))
    for number in range(3):
        expected = theirs.step(ids)
        assert_step(fixture, ours.step(ids), expected, f"200 tokens, step {number}", random=True)
        ids = expected["logits"][:, -1].argmax(-1)[:, None]
