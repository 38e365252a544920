"""Threads, long service, and models and inputs that are damaged or hostile."""

import gc
import os
import pathlib
import shutil
import threading

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import harness
import models
from models import Decoder, assert_step
from target import STATE

MODEL = "qwen35-tiny-genai-int4-cuda"
ALL_KINDS = ("qwen35-tiny-genai-int4-cpu", "qwen35-tiny-genai-int4-cuda-gdn", "qwen3-tiny-genai-int4-cpu",
             "qwen35text-tiny-mobius-cuda-f16")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    cache = {}

    def get(name):
        if name not in cache:
            cache[name] = models.Fixture(name, models.unpack(name, tmp_path_factory.mktemp("model")))
        return cache[name]

    return get


def open_session(fixture, **how):
    if harness.oracles_only():
        return harness.cpu_session(fixture.path, threads=how.get("threads"))
    session = harness.ep_session(fixture.path, **how)
    harness.assert_all_on_ep(session)
    return session


def resident() -> int:
    """Bytes of resident memory."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "intra_op", [1, *(pytest.param(n, marks=pytest.mark.cpu_only("threads of ORT's pool")) for n in (2, 8))]
)
@pytest.mark.parametrize("name", ALL_KINDS)
def test_eight_threads_on_one_session(name, intra_op, unpacked):
    """Each thread drives a sequence of its own: nothing leaks from one Run into another."""
    fixture = unpacked(name)
    session = open_session(fixture, threads=intra_op)
    failures = []

    def serve(number):
        try:
            for round_ in range(2 if STATE.fake else 4):
                shared = (number + round_) % 2 == 0
                decoder = Decoder(session, fixture.steps, batch=1 + number % 2, capacity=16 if shared else None)
                for step, (given, expected) in enumerate(fixture.steps):
                    ids = np.repeat(given["input_ids"], decoder.batch, 0)
                    got = decoder.trimmed(decoder.step(ids, shared=shared))
                    one = {n: v[-1:] for n, v in got.items()}
                    assert_step(fixture, one, expected, f"thread {number}, step {step}")
        except BaseException as error:  # noqa: BLE001 - carried to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.fixture
def short_log():
    """The fake driver's log does not grow with the work."""
    if STATE.fake:
        STATE.fake.log_work(0)
    yield
    if STATE.fake:
        STATE.fake.log_work(1)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "growing"])
def test_requests_of_varied_length_keep_memory_flat(rng, shared, unpacked, short_log):
    """Requests with prompts of varied length: resident memory after the first half does not grow by the rest."""
    fixture = unpacked(MODEL)
    session = open_session(fixture)
    # Without a GPU long prompts take their time.
    requests, longest = (25, 8) if STATE.fake else (100, 60)

    def serve():
        for _ in range(requests):
            decoder = Decoder(session, fixture.steps, capacity=128 if shared else None)
            decoder.step(rng.integers(3, 480, (1, int(rng.integers(1, longest + 1)))), shared=shared)
            for _ in range(int(rng.integers(1, 6))):
                decoder.step(rng.integers(3, 480, (1, 1)), shared=shared)

    serve()
    before = resident()
    serve()
    assert resident() - before < requests * 40_000, f"grew by {(resident() - before) / 1e6:.1f} MB in {requests} requests"


def test_sessions_give_their_memory_back(unpacked, short_log):
    fixture = unpacked(MODEL)
    sessions = 10 if STATE.fake else 20
    for _ in range(sessions // 2):
        open_session(fixture).run(None, feed_of(fixture))
    before = resident()
    for _ in range(sessions):
        open_session(fixture).run(None, feed_of(fixture))
    assert resident() - before < 4 << 20, f"grew by {(resident() - before) / 1e6:.1f} MB in {sessions} sessions"


def feed_of(fixture, step=0):
    return dict(fixture.steps[step][0])


# ------------------------------------------------------------------------------------------------------ hostile inputs


def hostile_feeds(fixture):
    """name -> (feeds, words of which one must be in the error)."""
    good = feed_of(fixture, 1)
    vocabulary = fixture.steps[0][1]["logits"].shape[-1]

    def change(**new):
        return {**good, **new}

    kv = next(n for n in good if n.endswith(".key"))
    cases = {
        "mask_longer_than_the_cache": change(attention_mask=np.ones((1, 64), np.int64)),
        "mask_shorter_than_the_cache": change(attention_mask=np.ones((1, 3), np.int64)),
        "mask_of_another_batch": change(attention_mask=np.ones((3, good["attention_mask"].shape[1]), np.int64)),
        "ids_of_another_batch": change(input_ids=np.zeros((2, 1), np.int64)),
        "state_of_another_batch": change(**{kv: np.zeros((2, *good[kv].shape[1:]), good[kv].dtype)}),
        "empty_mask": change(attention_mask=np.ones((1, 0), np.int64)),
        "token_beyond_the_vocabulary": change(input_ids=np.full((1, 1), vocabulary, np.int64)),
        "huge_token": change(input_ids=np.full((1, 1), 2**40, np.int64)),
        "very_negative_token": change(input_ids=np.full((1, 1), -(2**40), np.int64)),
        "mask_that_sums_to_a_huge_length": change(
            attention_mask=np.full_like(good["attention_mask"], 2**33)
        ),
        "mask_that_sums_to_a_negative_length": change(attention_mask=-good["attention_mask"]),
    }
    for name in good:
        if name.endswith((".conv", "conv_state", ".recurrent", "recurrent_state")):
            cases[f"two_rows_of_{name}"] = change(**{name: np.repeat(good[name], 2, 0)})
            break
    return cases


# Where the definition gives an answer, it is as good: GatherBlockQuantized has zeros for a row out of range, and a
# cache with more rows than the mask asks for is a shared buffer.
MAY_ANSWER = ("mask_shorter_than_the_cache", "token_beyond_the_vocabulary", "huge_token", "very_negative_token")
# A GPU cannot report what a tensor holds: these lengths must only do no harm.
MAY_ANSWER_ON_CUDA = ("mask_that_sums_to_a_huge_length", "mask_that_sums_to_a_negative_length")


@pytest.mark.parametrize("name", ALL_KINDS)
def test_hostile_inputs_are_errors_and_lose_nothing(name, unpacked):
    fixture = unpacked(name)
    session = open_session(fixture)
    if harness.oracles_only():
        return
    failures = []
    for what, feeds in hostile_feeds(fixture).items():
        try:
            session.run(None, feeds)
        except Exception as error:  # noqa: BLE001 - ORT raises many types
            text = str(error)
            named = "node '" in text or "nvalid" in text or "Got invalid dimensions" in text
            if not named or "internal error" in text or "panic" in text:
                failures.append(f"{what}: the error names no node: {text[:300]}")
        else:
            if what not in MAY_ANSWER and not (harness.on_cuda() and what in MAY_ANSWER_ON_CUDA):
                failures.append(f"{what}: no error")
        got = dict(zip([o.name for o in session.get_outputs()], session.run(None, feed_of(fixture))))
        assert_step(fixture, got, fixture.steps[0][1], f"after {what}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ALL_KINDS)
def test_an_empty_step_keeps_the_states(name, unpacked):
    """T = 0: no logits, every state as it was. ORT CPU refuses such a step."""
    fixture = unpacked(name)
    decoder = Decoder(open_session(fixture), fixture.steps)
    if harness.oracles_only():
        return
    decoder.step(fixture.steps[0][0]["input_ids"])
    before = {n: v.copy() for n, v in decoder.state.items()}
    try:
        got = decoder.step(np.zeros((1, 0), np.int64))
    except Exception as error:  # noqa: BLE001 - a Reshape or GQA may name the empty dimension; a crash may not
        assert "node '" in str(error) and "internal" not in str(error), str(error)
    else:
        assert got["logits"].shape[1] == 0
        for name_, value in before.items():
            assert np.array_equal(decoder.state[name_], value), name_
    decoder.state, decoder.total = before, 9
    given, expected = fixture.steps[1]
    assert_step(fixture, decoder.step(given["input_ids"]), expected, "after an empty step")


# ------------------------------------------------------------------------------------------------------ damaged models


def copy_of(fixture, folder) -> pathlib.Path:
    target = folder / "copy"
    shutil.copytree(fixture.folder, target)
    return target


def expect_error(path, *words):
    """Opening (or running) fails with an error that holds one of the words; nothing crashes."""
    with pytest.raises(Exception) as caught:
        if harness.oracles_only():
            harness.cpu_session(str(path))
        else:
            harness.ep_session(str(path))
    text = str(caught.value)
    assert "panic" not in text and "internal error" not in text, text
    assert not words or any(word in text for word in words), text


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_model(tmp_path, share, unpacked):
    folder = copy_of(unpacked(MODEL), tmp_path)
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[: int(share * len(content))])
    expect_error(folder / "model.onnx")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_data(tmp_path, share, unpacked):
    folder = copy_of(unpacked(MODEL), tmp_path)
    data = folder / "model.onnx.data"
    os.truncate(data, int(share * data.stat().st_size))
    expect_error(folder / "model.onnx", "model.onnx.data", "external", "External", "initializer")


def test_missing_data(tmp_path, unpacked):
    folder = copy_of(unpacked(MODEL), tmp_path)
    (folder / "model.onnx.data").unlink()
    expect_error(folder / "model.onnx", "model.onnx.data")


def test_random_bytes(tmp_path, rng):
    path = tmp_path / "model.onnx"
    for size in (1, 10, 1000, 100000):
        path.write_bytes(rng.bytes(size))
        expect_error(path)


def damage(model, how):
    nodes = {op: [n for n in model.graph.node if n.op_type == op] for op in {n.op_type for n in model.graph.node}}
    weights = {t.name: t for t in model.graph.initializer}
    matmul = nodes["MatMulNBits"][0]
    if how == "weights_of_another_shape":
        weights[matmul.input[1]].dims[0] += 1
    elif how == "offset_beyond_the_file":
        entry = next(e for e in weights[matmul.input[1]].external_data if e.key == "offset")
        entry.value = str(1 << 40)
    elif how == "negative_offset":
        entry = next(e for e in weights[matmul.input[1]].external_data if e.key == "offset")
        entry.value = "-4096"
    elif how == "huge_dimension":
        weights[matmul.input[1]].dims[0] = 1 << 60
    elif how == "negative_dimension":
        weights[matmul.input[1]].dims[0] = -1
    elif how == "wrong_K":
        next(a for a in matmul.attribute if a.name == "K").i += 32
    elif how == "huge_N":
        next(a for a in matmul.attribute if a.name == "N").i = 1 << 60
    elif how == "wrong_head_count":
        next(a for a in nodes["GroupQueryAttention"][0].attribute if a.name == "num_heads").i = 7
    elif how == "cycle":
        matmul.input[0] = model.graph.node[-1].output[0]
    elif how == "unknown_input":
        matmul.input[0] = "no_such_value"
    elif how == "duplicate_output":
        nodes["MatMulNBits"][1].output[0] = matmul.output[0]
    return model


@pytest.mark.parametrize(
    "how",
    ["weights_of_another_shape", "offset_beyond_the_file", "negative_offset", "huge_dimension", "negative_dimension",
     "wrong_K", "huge_N", "wrong_head_count", "cycle", "unknown_input", "duplicate_output"],
)
def test_damaged_graph(tmp_path, how, unpacked):
    fixture = unpacked(MODEL)
    folder = copy_of(fixture, tmp_path)
    model = damage(onnx.load(folder / "model.onnx", load_external_data=False), how)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(Exception) as caught:
        session = harness.cpu_session(str(folder / "model.onnx")) if harness.oracles_only() else harness.ep_session(
            str(folder / "model.onnx")
        )
        session.run(None, feed_of(fixture))
    text = str(caught.value)
    assert "panic" not in text and "internal error" not in text, text


def test_flipped_bytes_never_crash(tmp_path, rng, unpacked):
    """Random damage to the graph: an error or an answer, never the end of the process."""
    fixture = unpacked(MODEL)
    folder = copy_of(fixture, tmp_path)
    content = np.frombuffer((folder / "model.onnx").read_bytes(), np.uint8)
    opened = 0
    for _ in range(60):
        broken = content.copy()
        places = rng.integers(0, content.size, int(rng.integers(1, 6)))
        broken[places] = rng.integers(0, 256, places.size)
        (folder / "model.onnx").write_bytes(broken.tobytes())
        try:
            path = str(folder / "model.onnx")
            session = harness.cpu_session(path) if harness.oracles_only() else harness.ep_session(path, fallback=True)
            session.run(None, feed_of(fixture))
            opened += 1
        except Exception:  # noqa: BLE001 - any error will do
            pass
    assert opened < 60


def test_level_of_optimisation_does_not_matter_to_errors(unpacked):
    """A wrong shape is named at every optimisation level."""
    fixture = unpacked(MODEL)
    if harness.oracles_only():
        return
    feeds = feed_of(fixture, 1) | {"attention_mask": np.ones((1, 64), np.int64)}
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        with pytest.raises(Exception, match="GroupQueryAttention"):
            harness.ep_session(fixture.path, level=level).run(None, feeds)
