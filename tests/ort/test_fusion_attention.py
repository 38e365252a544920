"""The attention mixer of a decode step as one kernel: GroupQueryAttention of one token with the splits, norms, casts and
rotary embeddings before it and the sigmoid gate behind it. The oracle is float64 over the whole model, and a session
with fusion off; the emulated driver's log says which kernels ran."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import harness
import target
from buffers import onnx_type, run_bound
from harness import F16, F32, FLOATS, Tolerance, name_of, normal
from reference import f64, sigmoid
from reference.attention import group_query_attention
from reference.norms import rms_norm
from reference.rotary import mrotary, rotary, rotary_by_position

pytestmark = pytest.mark.cuda_only("kernels that a device runs for several nodes")

MS = "com.microsoft"
EPSILON = 1e-6
ANGLES = 96
SECTIONS = {0: [3, 2, 3], 1: [3, 3, 2]}


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A model of one attention, its inputs [B, S, *] being what a projection left."""

    dtype: np.dtype = F16
    heads: int = 4
    kv_heads: int = 1
    dim: int = 64
    norm: bool = True
    # none, own (GroupQueryAttention's), contrib, first (one position), onnx, onnx_rows (a row of angles each), mrope, mrope_interleaved
    rotary: str = "mrope_interleaved"
    cast: bool = True  # rotary embeddings in f32
    interleaved: bool = False
    gate: bool = True
    own_norm: bool = False
    packed: bool = False
    gqa: tuple = ()  # further attributes
    sink: bool = False
    # Ways to not be the pattern, or to be a smaller one.
    change: str = ""

    @property
    def half(self) -> int:
        return 8 if self.rotary.startswith("mrope") else self.dim // 4

    @property
    def width(self) -> int:
        return ((2 if self.gate else 1) * self.heads + 2 * self.kv_heads) * self.dim

    def tables(self):
        rng = np.random.default_rng(3)
        angle = rng.uniform(-3, 3, (ANGLES, self.half))
        kind = F32 if self.cast and self.rotary not in ("own", "none") else self.dtype
        return np.cos(angle).astype(kind), np.sin(angle).astype(kind)

    def weights(self):
        rng = np.random.default_rng(4)
        return [normal(rng, self.dim, self.dtype) for _ in range(2)], normal(rng, self.heads, self.dtype)


class Builder:
    def __init__(self):
        self.nodes, self.constants, self.inputs, self.outputs = [], [], [], []

    def node(self, op, inputs, outputs=1, domain="", **attrs):
        names = [f"{op}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, name=names[0], domain=domain, **attrs))
        return names[0] if outputs == 1 else names

    def constant(self, value):
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def reshape(self, value, shape):
        return self.node("Reshape", [value, self.constant(np.array(shape, np.int64))])


def build(m: Mixer) -> bytes:
    g = Builder()
    n, k, h, t = m.heads, m.kv_heads, m.dim, onnx_type(m.dtype)
    (q_weight, k_weight), sink = m.weights()
    x = g.node("Mul", ["x", g.constant(np.asarray(0.5, m.dtype))])
    outputs = ["y", "present_key", "present_value"]
    gate = None
    if m.packed:
        q, key, value = x, "", ""
    else:
        sizes = np.array([m.width - 2 * k * h, k * h, k * h], np.int64)
        q, key, value = g.node("Split", [x, g.constant(sizes)], 3, axis=-1)
    if m.gate:
        both = g.reshape(q, [0, 0, n, 2 * h])
        q, gate = g.node("Split", [both, g.constant(np.array([h, h], np.int64))], 2, axis=-1)
        q, gate = g.reshape(q, [0, 0, n * h]), g.reshape(gate, [0, 0, n * h])
    if m.change == "split_read":
        outputs.append(gate)
    if m.norm:
        q, key = (normed(g, m, v, c, w) for v, c, w in ((q, n, q_weight), (key, k, k_weight)))
    if m.change == "norm_read":
        outputs.append(q)
    cos, sin = (g.constant(v) for v in m.tables())
    q = rotated(g, m, q, n, cos, sin)
    if m.change == "key_turns_otherwise":
        cos, sin = sin, cos
    key = key if m.packed else rotated(g, m, key, k, cos, sin)
    if m.change == "rotary_read":
        outputs.append(q)
    counted = g.node("ReduceSum", ["mask", g.constant(np.array([1], np.int64))], keepdims=0)
    seqlens = g.node("Cast", [g.node("Sub", [counted, g.constant(np.int64(1))])], to=TensorProto.INT32)
    total = g.node("Gather", [g.node("Shape", ["mask"]), g.constant(np.int64(1))])
    total = g.node("Cast", [total], to=TensorProto.INT32)
    inputs = [q, key, value, "past_key", "past_value", seqlens, total] + [""] * 9
    attrs = dict(num_heads=n, kv_num_heads=k, **dict(m.gqa))
    if m.rotary == "own":
        inputs[7:10] = [cos, sin, "positions"]
        attrs |= dict(do_rotary=1, rotary_interleaved=int(m.interleaved))
    if m.sink:
        inputs[11] = g.constant(sink)
    if m.own_norm:
        inputs[14:16] = [g.constant(q_weight), g.constant(k_weight)]
        attrs["qk_norm_epsilon"] = EPSILON
    while not inputs[-1]:
        inputs.pop()
    out = g.node("GroupQueryAttention", inputs, 3, MS, **attrs)
    g.nodes[-1].output[1:] = outputs[1:3]
    out = out[0]
    if m.change == "attention_read":
        outputs.append(out)
    if gate and m.change == "tanh":
        out = g.node("Mul", [out, g.node("Tanh", [gate])])
    elif gate:
        act = g.node("Sigmoid", [gate])
        out = g.node("Mul", [act, out] if m.change == "swapped" else [out, act])
        if m.change == "sigmoid_read":
            outputs.append(act)
    g.nodes[-1].output[0] = "y"
    info = helper.make_tensor_value_info
    cache = ["B", k, "P", h]
    graph_inputs = [info("x", t, ["B", "S", m.width]), info("past_key", t, cache), info("past_value", t, cache),
                    info("mask", TensorProto.INT64, ["B", "T"])]  # fmt: skip
    if m.rotary == "onnx_rows":
        graph_inputs += [info(v, onnx_type(m.tables()[0].dtype), ["B", "S", m.half]) for v in ("cos_rows", "sin_rows")]
    elif m.rotary != "none":
        shape = {"first": [1]}.get(m.rotary, ([3] if m.rotary.startswith("mrope") else []) + ["B", "S"])
        graph_inputs.append(info("positions", TensorProto.INT64, shape))
    graph = helper.make_graph(g.nodes, "mixer", graph_inputs, [info(o, t, None) for o in outputs], g.constants)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def normed(g, m, value, heads, weight):
    value = g.reshape(value, [0, -1, m.dim])
    value = g.node("SimplifiedLayerNormalization", [value, g.constant(weight)], axis=-1, epsilon=EPSILON)
    return g.reshape(value, [0, -1, heads * m.dim])


def rotated(g, m, value, heads, cos, sin):
    if m.rotary in ("none", "own"):
        return value
    if m.cast:
        value = g.node("Cast", [value], to=TensorProto.FLOAT)
    shared = dict(num_heads=heads, interleaved=int(m.interleaved), rotary_embedding_dim=2 * m.half)
    if m.rotary.startswith("mrope"):
        layout = int(m.rotary == "mrope_interleaved")
        value = g.node(
            "MRotaryEmbedding", [value, "positions", cos, sin], domain=MS, mrope_section=SECTIONS[layout],
            mrope_layout=layout, **shared,
        )
    elif m.rotary.startswith("onnx"):
        inputs = [value, "cos_rows", "sin_rows"] if m.rotary == "onnx_rows" else [value, cos, sin, "positions"]
        value = g.node("RotaryEmbedding", inputs, **shared)
    else:
        value = g.node("RotaryEmbedding", [value, "positions", cos, sin], domain=MS, **shared)
    return g.node("Cast", [value], to=onnx_type(m.dtype)) if m.cast else value


def expected(m: Mixer, feeds, total: int):
    """Float64 y, present_key, present_value."""
    x, batch = f64(feeds["x"]) * 0.5, feeds["x"].shape[0]
    rows = x.shape[1]
    n, k, h = m.heads, m.kv_heads, m.dim
    cos, sin = map(f64, m.tables())
    (q_weight, k_weight), sink = m.weights()
    heads = x.reshape(batch, rows, -1, h)
    q, key, value = heads[:, :, : -2 * k], heads[:, :, -2 * k : -k], heads[:, :, -k:]
    gate = None
    if m.gate:
        q, gate = q[:, :, 0::2], q[:, :, 1::2]
    if m.norm:
        q, key = rms_norm(q, q_weight, epsilon=EPSILON), rms_norm(key, k_weight, epsilon=EPSILON)
    q, key, value = (v.reshape(batch, rows, -1) for v in (q, key, value))
    own = {}
    if m.rotary == "own":
        own = dict(cos=cos, sin=sin, position_ids=feeds["positions"], interleaved=m.interleaved)
    elif m.rotary != "none":
        q = turn(m, q, n, feeds, cos, sin)
        key = turn(m, key, k, feeds, *((sin, cos) if m.change == "key_turns_otherwise" else (cos, sin)))
    if m.own_norm:
        own |= dict(q_norm=q_weight, k_norm=k_weight, epsilon=EPSILON)
    attrs = dict(m.gqa)
    seqlens = feeds["mask"].sum(1) - 1
    out, keys, values = group_query_attention(
        q, key, value, feeds["past_key"], feeds["past_value"], seqlens, total, heads=n, kv_heads=k,
        local_window=attrs.get("local_window_size", -1), softcap=attrs.get("softcap", 0.0),
        smooth=attrs.get("smooth_softmax", 0) == 1, scale=attrs.get("scale"), head_sink=sink if m.sink else None,
        rotary_on=m.rotary == "own", **own,
    )
    if gate is not None:
        act = np.tanh if m.change == "tanh" else sigmoid
        out = out * act(gate.reshape(batch, rows, -1))
    return out, keys, values


def turn(m, x, heads, feeds, cos, sin):
    shared = dict(num_heads=heads, interleaved=m.interleaved)
    if m.rotary == "onnx_rows":
        return rotary(x, feeds["cos_rows"], feeds["sin_rows"], **shared)
    if m.rotary.startswith("mrope"):
        layout = int(m.rotary == "mrope_interleaved")
        return mrotary(x, feeds["positions"], cos, sin, sections=SECTIONS[layout], layout=layout, **shared)
    return rotary_by_position(x, feeds["positions"], cos, sin, **shared)


def feeds_of(rng, m: Mixer, lengths, rows, total, past_key, past_value):
    """Inputs of a step after which the entries have these lengths."""
    batch = len(lengths)
    mask = (np.arange(total)[None] < np.asarray(lengths)[:, None]).astype(np.int64)
    feeds = dict(x=normal(rng, (batch, rows, m.width), m.dtype), past_key=past_key, past_value=past_value, mask=mask)
    # A first prompt counts on from its first position.
    where = rng.integers(0, ANGLES - rows, (3, batch, rows))
    if m.rotary == "onnx_rows":
        feeds |= {name: table[where[0]] for name, table in zip(("cos_rows", "sin_rows"), m.tables())}
    elif m.rotary.startswith("mrope"):
        feeds["positions"] = where
    elif m.rotary == "first":
        feeds["positions"] = where[0, 0, :1]
    elif m.rotary != "none":
        feeds["positions"] = where[0]
    return feeds


def empty_cache(m, batch, capacity):
    """Full of NaN: what no step has written must never be read."""
    return [np.full((batch, m.kv_heads, capacity, m.dim), np.nan, m.dtype) for _ in range(2)]


def filled_cache(rng, m, lengths, capacity):
    caches = empty_cache(m, len(lengths), capacity)
    for cache in caches:
        for b, length in enumerate(lengths):
            cache[b, :, :length] = normal(rng, (m.kv_heads, length, m.dim), m.dtype)
    return caches


def tolerance_of(m: Mixer) -> Tolerance:
    """The model rounds to its type between its nodes: some roundings add up."""
    return Tolerance(2 * harness.tolerance_for(m.dtype).relative)


def ran() -> list[str]:
    return [name for name in target.STATE.fake.kernels() if name.startswith("mix_")] if target.STATE.fake else []


@dataclasses.dataclass
class Pair:
    """The model with fusion and without."""

    m: Mixer
    fused: object
    plain: object

    @classmethod
    def of(cls, m: Mixer, options=None):
        model = build(m)
        sessions = [harness.ep_session(model, {**(options or {}), "fusion": on}) for on in ("1", "0")]
        for session in sessions:
            harness.assert_all_on_ep(session)
        return cls(m, *sessions)

    def step(self, rng, lengths, rows, caches, total, *, shared=True, mixes=1):
        """One Run of each; gives the caches as the fused one leaves them. mixes: fused attentions that must have run."""
        m = self.m
        feeds = feeds_of(rng, m, lengths, rows, total, *caches)
        want = expected(m, feeds, total)
        capacity = want[1].shape[2]
        shapes = [want[0].shape, *[(len(lengths), m.kv_heads, capacity, m.dim)] * 2]
        known = {name: (shape, m.dtype) for name, shape in zip(("y", "present_key", "present_value"), shapes)}
        alias = {"present_key": "past_key", "present_value": "past_value"} if shared else None
        got = {}
        for how, session in (("fused", self.fused), ("plain", self.plain)):
            if target.STATE.fake:
                target.STATE.fake.clear_log()
            got[how] = run_bound(session, feeds, known, alias)
            if target.STATE.fake:
                count = mixes if how == "fused" else 0
                assert len(ran()) == count, f"{how}: {target.STATE.fake.kernels()}"
        tolerance = tolerance_of(m)
        for name, reference in zip(known, want):
            harness.assert_close(got["fused"][name], reference, tolerance, f"{name}: fused against float64")
            plain = np.where(np.isnan(reference), np.nan, harness.as_float64(got["plain"][name]))
            both = Tolerance(2 * tolerance.relative)
            harness.assert_close(got["fused"][name], plain, both, f"{name}: fused against fusion=0")
        return got["fused"]["present_key"], got["fused"]["present_value"]


def steps(rng, m: Mixer, batch=1, capacity=32, prompt=5, tokens=3, options=None, mixes=1):
    """A prompt, then tokens, in one cache."""
    pair = Pair.of(m, options)
    caches = empty_cache(m, batch, capacity)
    lengths = [prompt] * batch
    caches = pair.step(rng, lengths, prompt, caches, prompt, mixes=0)
    for _ in range(tokens):
        lengths = [n + 1 for n in lengths]
        caches = pair.step(rng, lengths, 1, caches, max(lengths), mixes=mixes)


EACH_TYPE = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


@EACH_TYPE
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_steps(rng, dim, batch, dtype):
    steps(rng, Mixer(dtype=dtype, dim=dim, cast=dtype != F32), batch=batch)


@EACH_TYPE
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (8, 2), (8, 1), (12, 1), (6, 2)])
def test_groups(rng, heads, kv_heads, dtype):
    steps(rng, Mixer(dtype=dtype, heads=heads, kv_heads=kv_heads, cast=dtype != F32), tokens=2)


@pytest.mark.parametrize("cast", [True, False], ids=["cast", "as_is"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("rotary", ["none", "own", "contrib", "first", "onnx", "onnx_rows", "mrope", "mrope_interleaved"])
def test_rotary(rng, rotary, interleaved, cast):
    steps(rng, Mixer(rotary=rotary, interleaved=interleaved, cast=cast, kv_heads=2), batch=2, tokens=2)


@pytest.mark.parametrize("rotary", ["none", "own", "mrope"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no_gate"])
def test_parts(rng, gate, norm, rotary):
    steps(rng, Mixer(gate=gate, norm=norm, rotary=rotary), batch=2, tokens=2)


@pytest.mark.parametrize("rotary", ["none", "own"])
@pytest.mark.parametrize("own_norm", [True, False], ids=["norm", "no_norm"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
def test_all_in_the_attention(rng, packed, own_norm, rotary):
    m = Mixer(gate=False, norm=False, own_norm=own_norm, rotary=rotary, packed=packed, kv_heads=2)
    steps(rng, m, batch=2, tokens=2)


@EACH_TYPE
@pytest.mark.parametrize("dim", [8, 24, 40, 80, 96, 192])
def test_head_sizes(rng, dim, dtype):
    steps(rng, Mixer(dtype=dtype, dim=dim, rotary="contrib", cast=dtype != F32), tokens=2)


@pytest.mark.parametrize("sink", [True, False], ids=["sink", "no_sink"])
@pytest.mark.parametrize(
    "gqa",
    [(("softcap", 1.5),), (("local_window_size", 3),), (("smooth_softmax", 1),), (("scale", 0.3),)],
    ids=lambda gqa: gqa[0][0],
)
def test_what_attention_can_do(rng, gqa, sink):
    steps(rng, Mixer(gqa=gqa, sink=sink and gqa[0][0] != "smooth_softmax"), batch=2, prompt=6, tokens=3)


@EACH_TYPE
@pytest.mark.parametrize("lengths", [(1,), (2,), (17,), (129,), (300,), (513,), (9, 4, 1), (200, 1, 77), (600, 16, 257)], ids=str)
@pytest.mark.parametrize("dim", [64, 256])
def test_lengths(rng, dim, lengths, dtype):
    """Entries of different lengths, in one part or several, in a cache with room."""
    m = Mixer(dtype=dtype, dim=dim, cast=dtype != F32)
    pair = Pair.of(m)
    caches = filled_cache(rng, m, [n - 1 for n in lengths], 640)
    # As a client with a captured graph says it: the mask is as long as the cache.
    for total in (max(*lengths, 2), 640):
        pair.step(rng, lengths, 1, caches, total)


@EACH_TYPE
@pytest.mark.parametrize("window", [1, 100, 200])
def test_windows_over_parts(rng, window, dtype):
    m = Mixer(dtype=dtype, cast=dtype != F32, gqa=(("local_window_size", window),))
    pair = Pair.of(m)
    lengths = (400, 90, 1)
    pair.step(rng, lengths, 1, filled_cache(rng, m, [n - 1 for n in lengths], 512), 400)


@pytest.mark.parametrize("lengths", [(1,), (2,), (40,), (300, 5)], ids=str)
@pytest.mark.parametrize("dim", [64, 80])
def test_a_cache_in_another_buffer(rng, dim, lengths):
    """Growing by a token, and of one capacity."""
    m = Mixer(dim=dim, rotary="contrib")
    pair = Pair.of(m)
    past = [n - 1 for n in lengths]
    pair.step(rng, lengths, 1, filled_cache(rng, m, past, max(past)), max(lengths), shared=False)
    if max(lengths) > 1:
        pair.step(rng, lengths, 1, filled_cache(rng, m, past, max(lengths) + 7), max(lengths), shared=False)


@pytest.mark.parametrize(
    "change", ["swapped", "tanh", "split_read", "norm_read", "rotary_read", "attention_read", "sigmoid_read", "key_turns_otherwise"]
)
def test_near_misses(rng, change):
    """What others read is written; what the kernel does not do stays with the nodes' own kernels."""
    m = Mixer(change=change)
    model = build(m)
    fused, plain = (harness.ep_session(model, {"fusion": on}) for on in ("1", "0"))
    names = [o.name for o in fused.get_outputs()]
    lengths = (9, 4)
    feeds = feeds_of(rng, m, lengths, 1, 9, *filled_cache(rng, m, (8, 3), 16))
    want = dict(zip(("y", "present_key", "present_value"), expected(m, feeds, 9)))
    fake = target.STATE.fake
    got = {}
    for how, session in (("fused", fused), ("plain", plain)):
        if fake:
            fake.clear_log()
        got[how] = run_bound(session, feeds, {name: None for name in names})
        if fake:
            kernels = fake.kernels()
            assert len(ran()) == (how == "fused"), kernels
            # The nodes that stay outside keep their kernels.
            kept = {"tanh": "unary", "norm_read": "norm", "rotary_read": "rotate", "key_turns_otherwise": "rotate"}.get(change)
            if kept:
                assert any(kept in name for name in kernels), kernels
    tolerance = tolerance_of(m)
    for name in names:
        if name in want:
            harness.assert_close(got["fused"][name], want[name], tolerance, f"{name}: against float64")
        open_ = np.isnan(want.get(name, np.zeros(1)))
        reference = np.where(open_, np.nan, harness.as_float64(got["plain"][name]))
        harness.assert_close(got["fused"][name], reference, Tolerance(2 * tolerance.relative), f"{name}: against fusion=0")


@pytest.mark.parametrize("why", ["bias", "bidirectional", "two_tokens"])
def test_what_the_kernel_does_not_do(rng, why):
    m = Mixer(gqa=(("causal", 0),) if why == "bidirectional" else ())
    rows = 2 if why == "two_tokens" else 1
    model = build(m)
    if why == "bias":
        proto = onnx.load_from_string(model)
        node = next(node for node in proto.graph.node if node.op_type == "GroupQueryAttention")
        node.input.extend([""] * (10 - len(node.input)) + ["bias"])
        bias = numpy_helper.from_array(np.zeros((1, 1, 1, 9), m.dtype), "bias")
        proto.graph.initializer.append(bias)
        model = proto.SerializeToString()
    session = harness.ep_session(model, {"fusion": "1"})
    lengths = (9, 4)
    feeds = feeds_of(rng, m, lengths, rows, 9, *filled_cache(rng, m, [n - rows for n in lengths], 16))
    fake = target.STATE.fake
    if fake:
        fake.clear_log()
    got = run_bound(session, feeds, {o.name: None for o in session.get_outputs()})
    assert not ran()
    for name, reference in zip(("y", "present_key", "present_value"), expected(m, feeds, 9)):
        harness.assert_close(got[name], reference, tolerance_of(m), name)


def test_a_small_gpu(rng):
    """What does not fit its shared memory stays with the nodes' own kernels."""
    steps(rng, Mixer(dim=256, heads=8), tokens=1, options={"shared_memory_limit": "49152"}, mixes=0)
