"""MoE and QMoE whose experts do not all fit `expert_memory_limit_bytes`.

The oracle is the same session without the limit, bit for bit, whose own results other tests compare with float64.
"""

from __future__ import annotations

import ctypes
import gc
import re
import threading

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import harness
import models
import target
from harness import F16, F32, normal
from reference.moe import pack_columns
from test_cuda_replay import user_stream
from test_moe import MS, Sizes, float4, int_attrs, ints, node
from tests.models import qwen35

pytestmark = pytest.mark.cuda_only("experts in page-locked memory")

LIMIT = "expert_memory_limit_bytes"
SIZES = Sizes(E=8, H=128, I=64, k=3)


def grown(before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in target.package().counters().items()}


def experts(before: dict[str, int]) -> tuple[int, int, int]:
    """Hits, misses and bytes since then."""
    done = grown(before)
    return done["expert_hits"], done["expert_misses"], done["expert_bytes_fetched"]


def least(model: bytes) -> int:
    """The least limit that a session of this model takes: the error says it."""
    with pytest.raises(Exception, match=LIMIT) as failure:
        harness.ep_session(model, {LIMIT: 1})
    return int(re.search(r"at least (\d+) for this model", str(failure.value))[1])


@pytest.fixture
def made(rng):
    """A model of one node, and the bytes of one of its experts."""

    def make(make=ints(scale=F16), attrs=int_attrs(weights_prepacked=0), sizes=SIZES, dtype=F16, inputs=(), **how):
        n = node(rng, make, sizes, dtype=dtype, **attrs, **how)
        constants = tuple(slot for slot in n.constants if slot not in inputs)
        model = harness.build_node(n.op, n.inputs, n.attrs, domain=MS, initializers=constants)
        return n, model, least(model.serialize()) // sizes.k

    return make


def session_of(model, slots: int | None, bytes_: int, **options):
    session = harness.ep_session(model.serialize(), options | ({} if slots is None else {LIMIT: slots * bytes_}))
    harness.assert_all_on_ep(session)
    return session


def feeds(model, rng, tokens: int, experts: list[list[int]] | None = None):
    """Other tokens; `experts`: where each of them goes, the best first."""
    x, logits = (model.feeds[name] for name in ("in0", "in1"))
    chosen = normal(rng, (tokens, logits.shape[1]), logits.dtype, 3.0)
    for row, wanted in zip(chosen, experts or []):
        row[:] = -20
        row[wanted] = np.arange(len(wanted), 0, -1)
    return model.feeds | {"in0": normal(rng, (tokens, x.shape[1]), x.dtype), "in1": chosen}


KINDS = {
    "QMoE int4": {},
    "QMoE int4 f32": dict(dtype=F32, make=ints(zero_points="packed"), bias=False),
    "QMoE int4, biases of the run": dict(inputs=(4, 7)),
    "QMoE fp4": dict(make=float4("fp4", pack_columns), attrs=dict(quant_type="fp4")),
    "MoE f32": dict(make=None, attrs={}, dtype=F32),
    "MoE f16, FC3": dict(make=None, attrs={}, activation="silu", fusion=0, fc3=True),
    "MoE f16, halves": dict(make=None, attrs={}, fusion=2, sizes=Sizes(E=8, H=36, I=20, k=3)),
}
SLOTS = (3, 4, 5, 7)
TOKENS = (1, 4, 8, 9, 70)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_all_experts(rng, made, kind):
    """One token, few and many; the experts of k tokens at the least, all but one at the most."""
    n, model, bytes_ = made(**KINDS[kind])
    whole = session_of(model, None, bytes_)
    limited = [session_of(model, slots, bytes_) for slots in SLOTS]
    got = limited[0].run(None, model.feeds)[0]
    harness.assert_close(got, n.reference, harness.tolerance_for(n.inputs[0].dtype), f"{n.op} against float64")
    for tokens in TOKENS * 2:
        given = feeds(model, rng, tokens)
        wanted = whole.run(None, given)[0]
        for slots, session in zip(SLOTS, limited, strict=True):
            np.testing.assert_array_equal(session.run(None, given)[0], wanted, f"{tokens} tokens, {slots} slots")


def test_more_tokens_than_one_pass(rng, made):
    _, model, bytes_ = made(make=None, attrs={}, sizes=Sizes(E=5, H=16, I=8, k=2))
    given = feeds(model, rng, 4500)
    wanted = session_of(model, None, bytes_).run(None, given)[0]
    for slots in (2, 4):
        np.testing.assert_array_equal(session_of(model, slots, bytes_).run(None, given)[0], wanted)


def test_batches(rng, made):
    """[batch, sequence, H]"""
    _, model, bytes_ = made(tokens=(2, 3))
    wanted = session_of(model, None, bytes_).run(None, model.feeds)[0]
    assert wanted.shape == (2, 3, SIZES.H)
    np.testing.assert_array_equal(session_of(model, 4, bytes_).run(None, model.feeds)[0], wanted)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_counters_follow_the_routing(rng, made, mode):
    """Four slots, that begin with experts 0 to 3."""
    _, model, bytes_ = made()
    whole, session = session_of(model, None, bytes_), session_of(model, 4, bytes_, cuda_graph=mode)
    script = [
        ([[0, 1, 2]], 3, 0),
        # 3 is the one that was not used.
        ([[2, 4, 1]], 2, 1),
        ([[2, 4, 1]], 3, 0),
        # 0 is the one used longest ago.
        ([[5, 1, 4]], 2, 1),
        # There are 1, 2, 4, 5.
        ([[1, 2, 4], [2, 4, 5]], 4, 0),
        # The second token does not fit beside the first: 0 comes, then 6 and 7.
        ([[1, 2, 0], [0, 6, 7]], 2 + 1, 1 + 2),
        # Ten tokens go to seven experts, of which 0, 2, 6 and 7 are there.
        ([[0, 6, 7], [0, 6, 5]] * 2 + [[1, 2, 3]] * 6, 4, 3),
    ]
    for number, (wanted, hits, misses) in enumerate(script):
        given = feeds(model, rng, len(wanted), wanted)
        before = target.package().counters()
        got = session.run(None, given)[0]
        assert experts(before) == (hits, misses, misses * bytes_), f"run {number}"
        ran = grown(before)
        assert (ran["eager_runs"], ran["captures"], ran["replays"]) == (1, 0, 0)
        np.testing.assert_array_equal(got, whole.run(None, given)[0], f"run {number}")


@pytest.mark.parametrize("slots", SLOTS)
def test_memory_stays_under_the_limit(made, slots):
    _, model, bytes_ = made()
    gc.collect()  # sessions of other tests
    start = target.package().counters()
    whole = session_of(model, None, bytes_)
    held = grown(start)["bytes_in_use"]
    assert held >= SIZES.E * bytes_
    start = target.package().counters()
    limited = session_of(model, slots, bytes_)
    assert grown(start)["bytes_in_use"] == held - (SIZES.E - slots) * bytes_
    del whole, limited


def test_a_limit_that_all_fit_changes_nothing(rng, made):
    """Not even under `cuda_graph=strict`."""
    _, model, bytes_ = made()
    session = session_of(model, SIZES.E, bytes_, cuda_graph="strict")
    before = target.package().counters()
    for _ in range(3):
        session.run(None, feeds(model, rng, 1))
    done = grown(before)
    assert (done["captures"], done["replays"], done["eager_runs"]) == (1, 3, 0)
    assert experts(before) == (0, 0, 0)


def test_strict_is_refused_with_the_reason(made):
    _, model, bytes_ = made()
    with pytest.raises(Exception, match=LIMIT) as failure:
        session_of(model, SIZES.E - 1, bytes_, cuda_graph="strict")
    text = str(failure.value)
    words = ("cuda_graph", "strict", "QMoE_under_test", str((SIZES.E - 1) * bytes_), "cannot fetch")
    assert all(word in text for word in words), text


def test_bad_limits(made):
    _, model, bytes_ = made()
    with pytest.raises(Exception, match=LIMIT) as failure:
        session_of(model, None, bytes_, **{LIMIT: SIZES.k * bytes_ - 1})
    text = str(failure.value)
    words = (f"at least {SIZES.k * bytes_}", "QMoE_under_test", "2 experts on the device", f"go to {SIZES.k}")
    assert all(word in text for word in words), text
    for value in ("-1", "1.5", "half", str(1 << 64)):
        with pytest.raises(Exception, match=f"{LIMIT}.*a whole number from 0"):
            session_of(model, None, bytes_, **{LIMIT: value})


def bound(session, given):
    """A binding of device memory, and the output's."""
    io = session.io_binding()
    for name, value in given.items():
        io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0))
    out = ort.OrtValue.ortvalue_from_numpy(np.full(given["in0"].shape, np.nan, F16), "cuda", 0)
    io.bind_ortvalue_output("out0", out)
    return io, out


def test_runs_that_ort_would_replay(rng, made):
    """With `enable_cuda_graph` ORT repeats a Run until there is a graph; here it must not."""
    _, model, bytes_ = made()
    whole, session = session_of(model, None, bytes_), session_of(model, 4, bytes_, enable_cuda_graph="1")
    for _ in range(4):
        given = feeds(model, rng, 2)
        io, out = bound(session, given)
        before = target.package().counters()
        session.run_with_iobinding(io)
        np.testing.assert_array_equal(out.numpy(), whole.run(None, given)[0])
        done = grown(before)
        assert (done["eager_runs"], done["managed_replays"]) == (1, 0)


def test_groups_share_the_limit(rng, made):
    """Two groups with the same experts, a node of ORT's between them: each has slots of its own, within one limit."""
    _, model, bytes_ = made()
    first = model.proto.graph.node[0]
    second, shrink = onnx.NodeProto(), helper.make_node("Shrink", ["out0"], ["small"], "between", lambd=0.0)
    second.CopyFrom(first)
    second.name, second.input[0], second.output[0] = "second", "small", "out1"
    model.proto.graph.node.extend([shrink, second])
    model.proto.graph.output[0].name = "out1"
    gc.collect()  # sessions of other tests
    start = target.package().counters()
    session = harness.ep_session(model.serialize(), {LIMIT: 9 * bytes_}, fallback=True)
    assert harness.fused_groups(session) == 2
    # Eight slots, and a little for biases.
    assert 8 * bytes_ <= grown(start)["bytes_in_use"] <= 9 * bytes_
    whole = harness.ep_session(model.serialize(), fallback=True)
    for tokens in (1, 5, 30):
        given = feeds(model, rng, tokens)
        np.testing.assert_array_equal(session.run(None, given)[0], whole.run(None, given)[0])


@pytest.mark.parametrize("calls", range(4))
def test_a_failed_fetch_loses_nothing(rng, made, calls):
    """The Run that it happens in is an error, the next one fetches all it needs."""
    if target.STATE.fake is None:
        pytest.skip("a GPU does not fail when it is told to")
    _, model, bytes_ = made()
    whole, session = session_of(model, None, bytes_), session_of(model, 4, bytes_)
    given = feeds(model, rng, 1, [[5, 6, 7]])
    io, out = bound(session, given)
    # The tables' copy is the first, then come those of the experts.
    target.STATE.fake.fail_after("cuMemcpyHtoDAsync", calls, 999)
    with pytest.raises(Exception, match="cuMemcpyHtoDAsync"):
        session.run_with_iobinding(io)
    before = target.package().counters()
    session.run_with_iobinding(io)
    np.testing.assert_array_equal(out.numpy(), whole.run(None, given)[0])
    assert experts(before) == (0, 3, 3 * bytes_)


def test_threads_share_the_slots(rng, made):
    """Every Run has a stream of its own, and the experts of all go through the same slots."""
    _, model, bytes_ = made()
    whole, session = session_of(model, None, bytes_), session_of(model, 3, bytes_)
    work = [feeds(model, rng, tokens) for tokens in (1, 2, 20, 1) * 8]
    wanted = [whole.run(None, given)[0] for given in work]
    got: list = [None] * len(work)

    def run(first: int) -> None:
        for at in range(first, len(work), 4):
            got[at] = session.run(None, work[at])[0]

    threads = [threading.Thread(target=run, args=(first,)) for first in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_callers_capture_is_refused(rng, made):
    _, model, bytes_ = made()
    stream = user_stream()
    session = session_of(model, 4, bytes_, user_compute_stream=str(stream.value))
    io, _ = bound(session, feeds(model, rng, 1))
    run_options = ort.RunOptions()
    run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    session.run_with_iobinding(io, run_options)
    cuda, graph = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert cuda.cuStreamBeginCapture_v2(stream, 2) == 0
    with pytest.raises(Exception, match=f"{LIMIT}.*capture"):
        session.run_with_iobinding(io, run_options)
    assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
    session.run_with_iobinding(io, run_options)


def test_a_whole_decoder(tmp_path, request):
    """Several nodes with experts between nodes with state, prompt and tokens: every node has its part of the limit."""
    seed = request.config.stash_seed
    qwen35.generate(qwen35.SIZES["moe-tiny"], tmp_path, seed=seed)
    path = str(tmp_path / "model.onnx")
    limit = least(path)
    sessions = [harness.ep_session(path, options) for options in ({}, {LIMIT: limit}, {LIMIT: 2 * limit})]
    harness.assert_all_on_ep(sessions[1])
    decoders = [models.Decoder(session, [(first_states(session), {})]) for session in sessions]
    draws = np.random.default_rng(seed)
    for tokens in (9, 1, 1, 3, 1):
        ids = draws.integers(0, 1024, (1, tokens))
        steps = []
        for number, decoder in enumerate(decoders):
            before = target.package().counters()
            steps.append(decoder.step(ids))
            assert grown(before)["eager_runs"] == (number > 0)
            assert any(experts(before)) == (number > 0)
        for name, wanted in steps[0].items():
            for got in steps[1:]:
                np.testing.assert_array_equal(got[name], wanted, name)


def first_states(session) -> dict[str, np.ndarray]:
    """Any states; the decoder looks at their shapes."""
    past = [given for given in session.get_inputs() if given.name.startswith("past")]
    size = lambda d: d if isinstance(d, int) else {"kv_cache_dim": 64}.get(d, 1)  # noqa: E731
    return {p.name: np.zeros([size(d) for d in p.shape], models.numpy_type(p.type)) for p in past}
