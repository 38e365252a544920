"""CUDA graphs: one Run is one step of in-place state, whatever the addresses, shapes, threads and captures are.

The oracle is the same decoder on ORT's CPU EP, fed step by step from separate buffers.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import harness
import models
import target

pytestmark = pytest.mark.cuda_only("CUDA graphs")

HYBRID = "qwen35-tiny-genai-int4-cuda"
FLOAT = "qwen35-tiny-genai-fp32-cpu"
CAPACITY = 64
STEPS = 12
# f16 graphs against ORT CPU's f16: the bound of the traces' logits.
TOLERANCE = harness.Tolerance(models.F16_LOGITS * 2)


@pytest.fixture(scope="module")
def fixture(tmp_path_factory):
    return models.Fixture(HYBRID, models.unpack(HYBRID, tmp_path_factory.mktemp("hybrid")))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(7)
    return [rng.integers(10, 400, (1, n)) for n in (5, *[1] * STEPS)]


@pytest.fixture(scope="module")
def expected(fixture, prompts):
    """Logits of every step from ORT CPU."""
    decoder = models.Decoder(fixture.ort_cpu, fixture.steps)
    return [decoder.step(ids)["logits"] for ids in prompts]


def counters() -> dict[str, int]:
    return target.package().counters()


def grown(before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in counters().items()}


def on_device(value: np.ndarray) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value), "cuda", 0)


def empty(shape, dtype) -> ort.OrtValue:
    """Device memory full of NaN."""
    return on_device(np.full(shape, np.nan, dtype) if np.issubdtype(dtype, np.floating) else np.zeros(shape, dtype))


class DeviceDecoder(models.Decoder):
    """A decoder whose tensors all lie on the device.

    how: "in_place" one buffer for past and present, "moving" new buffers for everything each Run, "alternating" two sets.
    static: the attention mask has the capacity's length from the start, as onnxruntime-genai gives it to a captured graph.
    """

    def __init__(self, session, steps, how="in_place", capacity=CAPACITY, static=False, run_options=None):
        super().__init__(session, steps, capacity=capacity)
        self.how, self.static, self.run_options = how, static, run_options
        # What no step has written yet must never be read.
        for past in self.pairs:
            if self.is_kv(past):
                self.state[past][:] = np.nan
        self.device = {past: on_device(value) for past, value in self.state.items()}
        self.spare = {past: empty(value.shape, value.dtype) for past, value in self.state.items()}
        self.bound = {}

    def tensors(self, ids):
        new = ids.shape[1]
        length = self.capacity if self.static else self.total + new
        mask = np.zeros((1, length), np.int64)
        mask[:, : self.total + new] = 1
        positions = np.arange(self.total, self.total + new)
        made = {"input_ids": ids.astype(np.int64), "attention_mask": mask}
        if "position_ids" in self.inputs:
            made["position_ids"] = np.broadcast_to(positions, (3, 1, new))
        return made

    def step(self, ids):
        io = self.session.io_binding()
        made = self.tensors(ids)
        fixed = self.how == "in_place"
        for name, value in made.items():
            held = self.bound.get((name, value.shape)) if fixed else None
            if held is None:
                held = self.bound[name, value.shape] = on_device(value)
            else:
                held.update_inplace(np.ascontiguousarray(value))
            io.bind_ortvalue_input(name, held)
        new_state = {}
        for past, present in self.pairs.items():
            old = self.device[past]
            if self.how == "in_place":
                new = old
            elif self.how == "alternating":
                new = self.spare[past]
                self.spare[past] = old
            else:
                new = empty(tuple(old.shape()), self.state[past].dtype)
            io.bind_ortvalue_input(past, old)
            io.bind_ortvalue_output(present, new)
            new_state[past] = new
        shape = (1, ids.shape[1], self.vocabulary())
        key = ("logits", shape)
        if not fixed or key not in self.bound:
            self.bound[key] = empty(shape, self.outputs["logits"])
        io.bind_ortvalue_output("logits", self.bound[key])
        self.session.run_with_iobinding(io, self.run_options)
        self.device = new_state
        self.total += ids.shape[1]
        return self.bound[key].numpy()

    def vocabulary(self):
        shape = {o.name: o.shape for o in self.session.get_outputs()}["logits"]
        return shape[-1]


def options(**entries):
    made = ort.RunOptions()
    for key, value in entries.items():
        made.add_run_config_entry(key, value)
    return made


def session_for(fixture, **provider_options):
    session = harness.ep_session(fixture.path, provider_options)
    harness.assert_all_on_ep(session)
    return session


def check(got, expected, what):
    harness.assert_close(got, expected, TOLERANCE, what)


@pytest.mark.parametrize("mode", ("auto", "off"))
@pytest.mark.parametrize("static", (False, True), ids=("growing_mask", "static_mask"))
@pytest.mark.parametrize("how", ("in_place", "moving", "alternating"))
def test_every_run_is_one_step(fixture, prompts, expected, how, static, mode):
    decoder = DeviceDecoder(session_for(fixture, cuda_graph=mode), fixture.steps, how, static=static)
    before = counters()
    for number, (ids, reference) in enumerate(zip(prompts, expected, strict=True)):
        check(decoder.step(ids), reference, f"{how}, {mode}, step {number}")
    done = grown(before)
    if mode == "off":
        assert (done["captures"], done["eager_runs"]) == (0, len(prompts))
    else:
        # One graph for prompts, one for single tokens; all else are updates of these.
        assert (done["captures"], done["replays"], done["eager_runs"]) == (2, len(prompts), 0)
        steady = counters()
        if how == "in_place" and static:
            decoder.step(prompts[-1])
            assert grown(steady)["updates"] == 0


def test_a_growing_cache_is_one_graph(fixture, prompts, expected):
    """Past and present of growing length, as a client without shared buffers has them."""
    session = session_for(fixture)
    decoder = models.Decoder(session, fixture.steps)
    before = counters()
    for number, (ids, reference) in enumerate(zip(prompts, expected, strict=True)):
        check(decoder.step(ids)["logits"], reference, f"step {number}")
    assert grown(before)["captures"] == 2


@pytest.mark.parametrize("shared", (True, False), ids=("shared_cache", "growing_cache"))
def test_500_tokens_take_a_graph_a_bucket_of_lengths(tmp_path, shared):
    """The mask grows with each token, and so does the cache where it is not shared."""
    fixture = models.Fixture(FLOAT, models.unpack(FLOAT, tmp_path))
    tokens, rng = 500, np.random.default_rng(11)
    theirs = models.Decoder(fixture.ort_cpu, fixture.steps)
    session = session_for(fixture)
    ours = DeviceDecoder(session, fixture.steps, capacity=512) if shared else models.Decoder(session, fixture.steps)
    before = counters()
    for number in range(1 + tokens):
        ids = rng.integers(10, 400, (1, 5 if number == 0 else 1))
        reference, got = theirs.step(ids)["logits"], ours.step(ids)
        check(got if shared else got["logits"], reference, f"step {number}")
    done = grown(before)
    buckets = 1 if shared else 7  # 8, 16, ... 512
    assert done["captures"] <= 1 + buckets and done["replays"] == 1 + tokens


def test_shapes_may_alternate(fixture):
    """Two sequences in one session, whose prompts and tokens take turns."""
    session = session_for(fixture)
    rng = np.random.default_rng(3)
    lengths = [(4, 7), (1, 3), (2, 1), (1, 1), (5, 1), (1, 5)]
    theirs = [models.Decoder(fixture.ort_cpu, fixture.steps) for _ in range(2)]
    ours = [DeviceDecoder(session, fixture.steps, how) for how in ("in_place", "moving")]
    for turn, pair in enumerate(lengths):
        for which, length in enumerate(pair):
            ids = rng.integers(10, 400, (1, length))
            reference = theirs[which].step(ids)["logits"]
            check(ours[which].step(ids), reference, f"turn {turn}, sequence {which}")


def test_two_threads_share_a_session(fixture, prompts, expected):
    session = session_for(fixture)
    failures = []

    def work(how):
        try:
            for _ in range(3):
                decoder = DeviceDecoder(session, fixture.steps, how)
                for number, (ids, reference) in enumerate(zip(prompts, expected, strict=True)):
                    check(decoder.step(ids), reference, f"{how}, step {number}")
        except BaseException as error:  # noqa: BLE001  (a thread's failure must reach the test)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(how,)) for how in ("in_place", "moving")]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures


def test_two_sessions_share_a_device(fixture, prompts, expected):
    decoders = [DeviceDecoder(session_for(fixture), fixture.steps) for _ in range(2)]
    for number, (ids, reference) in enumerate(zip(prompts, expected, strict=True)):
        for decoder in decoders:
            check(decoder.step(ids), reference, f"step {number}")


def test_a_session_may_go_while_work_is_queued(fixture, prompts, expected):
    """The Run does not wait; the session goes; the device's results are still right."""
    run_options = options(disable_synchronize_execution_providers="1")
    decoder = DeviceDecoder(session_for(fixture), fixture.steps, run_options=run_options)
    decoder.step(prompts[0])
    logits = decoder.bound["logits", (1, prompts[0].shape[1], decoder.vocabulary())]
    del decoder.session
    check(logits.numpy(), expected[0], "after the session")


# ------------------------------------------------------------------------------------------------- ORT-managed replay


def managed(fixture, how="in_place", **entries):
    session = session_for(fixture, enable_cuda_graph="1")
    return DeviceDecoder(session, fixture.steps, how, static=True, run_options=options(**entries))


def test_managed_replay_equals_ours(fixture, prompts, expected):
    """The prompt without a graph, then one id for all tokens: the first Run of the id runs once and captures."""
    decoder = managed(fixture, gpu_graph_id="-1")
    check(decoder.step(prompts[0]), expected[0], "the prompt")
    decoder.run_options = options(gpu_graph_id="11")
    before = counters()
    for number, (ids, reference) in enumerate(zip(prompts[1:], expected[1:], strict=True), 1):
        check(decoder.step(ids), reference, f"step {number}")
    done = grown(before)
    assert (done["captures"], done["managed_replays"]) == (1, len(prompts) - 2)
    assert done["updates"] == 0


@pytest.mark.parametrize("which", ["everything", "position_ids"])
def test_buffers_may_go_under_managed_replay(fixture, prompts, expected, which):
    """onnxruntime-genai makes some inputs anew for each token: the graph of the id then follows them, and is not made
    anew."""
    decoder = managed(fixture, "moving" if which == "everything" else "in_place", gpu_graph_id="-1")
    check(decoder.step(prompts[0]), expected[0], "the prompt")
    decoder.run_options = options(gpu_graph_id="11")
    before = counters()
    for number, (ids, reference) in enumerate(zip(prompts[1:], expected[1:], strict=True), 1):
        for name, shape in list(decoder.bound):
            if name == which:
                # The old one lives until the new one is there, so that it lies elsewhere.
                decoder.bound[name, shape] = on_device(decoder.bound[name, shape].numpy())
        check(decoder.step(ids), reference, f"step {number}")
    done = grown(before)
    assert (done["captures"], done["managed_replays"]) == (1, 0)
    assert done["updates"] > 0


def test_the_first_step_may_run_twice(fixture, prompts, expected):
    """onnxruntime-genai saves the state, runs a new id, restores the state, and runs it again."""
    decoder = managed(fixture, gpu_graph_id="-1")
    decoder.step(prompts[0])
    saved = {past: value.numpy().copy() for past, value in decoder.device.items()}
    decoder.run_options = options(gpu_graph_id="3")
    check(decoder.step(prompts[1]), expected[1], "the first time")
    for past, value in saved.items():
        decoder.device[past].update_inplace(value)
    decoder.total -= 1
    check(decoder.step(prompts[1]), expected[1], "the second time")
    check(decoder.step(prompts[2]), expected[2], "the step after")


def test_ids_are_apart(fixture, prompts, expected):
    """Two ids on two sets of buffers; runs without an id between them leave both alone."""
    session = session_for(fixture, enable_cuda_graph="1")
    decoders = [
        DeviceDecoder(session, fixture.steps, static=True, run_options=options(gpu_graph_id="-1")) for _ in range(3)
    ]
    for decoder in decoders:
        decoder.step(prompts[0])
    for number, decoder in enumerate(decoders[:2]):
        decoder.run_options = options(gpu_graph_id=str(number))
    for number, (ids, reference) in enumerate(zip(prompts[1:5], expected[1:5], strict=True), 1):
        for which, decoder in enumerate(decoders):
            check(decoder.step(ids), reference, f"step {number}, decoder {which}")


def test_a_bad_graph_id_is_an_error(fixture, prompts):
    decoder = managed(fixture, gpu_graph_id="seven")
    with pytest.raises(Exception, match="gpu_graph_id|graph annotation|integer"):
        decoder.step(prompts[0])


# ------------------------------------------------------------------------------------------------------ the user's stream


def driver():
    return ctypes.CDLL("libcuda.so.1")


def user_stream():
    """A stream in the primary context of device 0."""
    cuda = driver()
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
    return stream


def test_the_users_stream_is_used(fixture, prompts, expected):
    stream = user_stream()
    decoder = DeviceDecoder(session_for(fixture, user_compute_stream=str(stream.value)), fixture.steps)
    for number, (ids, reference) in enumerate(zip(prompts, expected, strict=True)):
        check(decoder.step(ids), reference, f"step {number}")


def test_a_caller_may_capture_a_run(fixture, prompts, expected):
    """A Run within the caller's own capture is recorded and not executed; replaying the capture is the step."""
    cuda, stream = driver(), user_stream()
    run_options = options(disable_synchronize_execution_providers="1")
    session = session_for(fixture, user_compute_stream=str(stream.value))
    decoder = DeviceDecoder(session, fixture.steps, static=True)
    check(decoder.step(prompts[0]), expected[0], "the prompt")
    check(decoder.step(prompts[1]), expected[1], "a token, so that its shapes are known")
    decoder.run_options = run_options
    # Inputs of the captured step are in place before the capture begins.
    for name, value in decoder.tensors(prompts[2]).items():
        decoder.bound[name, value.shape].update_inplace(np.ascontiguousarray(value))
    io = session.io_binding()
    for name, value in decoder.tensors(prompts[2]).items():
        io.bind_ortvalue_input(name, decoder.bound[name, value.shape])
    for past, present in decoder.pairs.items():
        io.bind_ortvalue_input(past, decoder.device[past])
        io.bind_ortvalue_output(present, decoder.device[past])
    logits = empty((1, 1, decoder.vocabulary()), decoder.outputs["logits"])
    io.bind_ortvalue_output("logits", logits)
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuStreamBeginCapture_v2(stream, 2) == 0
    session.run_with_iobinding(io, run_options)
    assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0 and graph.value
    assert cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)) == 0
    assert cuda.cuGraphLaunch(executable, stream) == 0
    assert cuda.cuStreamSynchronize(stream) == 0
    check(logits.numpy(), expected[2], "the captured step")
    decoder.total += 1
    decoder.run_options = None
    check(decoder.step(prompts[3]), expected[3], "the step after")


# ------------------------------------------------------------------------------------------------------------- strict


def test_strict_takes_a_whole_model(fixture, prompts, expected):
    decoder = DeviceDecoder(session_for(fixture, cuda_graph="strict"), fixture.steps)
    check(decoder.step(prompts[0]), expected[0], "the prompt")


def test_strict_names_the_node_that_is_not_claimed():
    nodes = [
        helper.make_node("Neg", ["x"], ["a"], "before"),
        helper.make_node("Det", ["a"], ["b"], "the_determinant"),
        helper.make_node("Neg", ["b"], ["y"], "after"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [2, 2])], [value("y", TensorProto.FLOAT, [])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(Exception, match="the_determinant.*Det"):
        harness.ep_session(model.SerializeToString(), {"cuda_graph": "strict"})


# ------------------------------------------------------------------------------------------------------------- memory


def test_memory_is_flat(fixture):
    """Requests of varied length, after a warm-up with the same lengths."""
    session = session_for(fixture)
    rng = np.random.default_rng(5)
    # Without a GPU long prompts take their time.
    requests, longest = (50, 12) if target.STATE.fake else (200, 40)
    lengths = rng.integers(1, longest, requests)

    def request(length):
        decoder = models.Decoder(session, fixture.steps)
        decoder.step(rng.integers(10, 400, (1, length)))
        decoder.step(rng.integers(10, 400, (1, 1)))

    for length in range(1, longest):
        request(length)
    before = counters()["bytes_in_use"]
    for length in lengths:
        request(int(length))
    assert counters()["bytes_in_use"] == before


def test_a_memory_limit_is_an_error_that_loses_nothing(fixture, prompts, expected):
    decoder = DeviceDecoder(session_for(fixture), fixture.steps)
    check(decoder.step(prompts[0]), expected[0], "without a limit")
    limit = counters()["bytes_in_use"] + (8 << 20)
    session = session_for(fixture, memory_limit_bytes=str(limit))
    small = models.Decoder(session, fixture.steps)
    check(small.step(prompts[0])["logits"], expected[0], "within the limit")
    large = models.Decoder(session, fixture.steps)
    with pytest.raises(Exception) as failure:
        large.step(np.full((1, 60_000), 11))
    text = str(failure.value)
    # The traceback holds the session, whose limit would stay in force.
    del failure
    assert str(limit) in text and "free" in text and "use" in text, text
    check(small.step(prompts[1])["logits"], expected[1], "after the failure")
