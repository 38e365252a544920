"""The linear-attention layer as one launch: its parts present or absent, and what only looks like it.

The reference is float64, part by part; the plan without fusion is held to the same bound.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from onnx import helper, numpy_helper

import harness
from buffers import DeviceBuffer, onnx_type
from harness import BF16, F16, F32, FLOATS, Tolerance, name_of, normal
from reference import f64, sigmoid, silu
from reference.linear import causal_conv, delta_gate, gated_delta_net, linear_attention, linear_attention_gate
from target import STATE

pytestmark = pytest.mark.cuda_only("fusions of the CUDA plan")

MS = "com.microsoft"
# A launch rounds its outputs alone and is held to harness's tolerances. Node by node every tensor is rounded, by 2^-11 of
# it in f16 and 2^-9 in bf16, and the norm of an output that is a small difference multiplies that.
ROUNDED = {F32: Tolerance(5e-5), F16: Tolerance(2e-2), BF16: Tolerance(1.5e-1)}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer and what of it there is; `odd` names a change after which it must not be one launch any more."""

    dtype: np.dtype = F16
    state_dtype: np.dtype | None = None
    k_heads: int = 2
    v_heads: int = 2
    dk: int = 32
    dv: int = 32
    taps: int = 4
    rule: str = "gated_delta"
    scale: float = 1.0
    conv: bool = True
    conv_bias: bool = True
    activation: str = "silu"
    channels_last: bool = False
    order: str = "qkv"
    norms: bool = True
    q_scale: bool = True
    gate: bool = True
    norm: str | None = "silu"
    delta_net: bool = False
    packed: bool = False
    gdn_gate: str = "softplus"
    odd: str = ""

    @property
    def state(self) -> np.dtype:
        return F32 if self.delta_net else self.state_dtype or self.dtype

    @property
    def widths(self) -> dict[str, int]:
        keys = self.k_heads * self.dk
        return {"q": keys, "k": keys, "v": self.v_heads * self.dv}

    @property
    def channels(self) -> int:
        return sum(self.widths.values())

    @property
    def q_factor(self) -> np.ndarray:
        return np.asarray(self.dk**-0.5).astype(self.dtype)

    def splits(self) -> bool:
        return not self.packed and (self.conv or self.odd == "split_only")


class Built:
    """The model of a layer, its constants, and its reference."""

    def __init__(self, layer: Layer, rng: np.random.Generator):
        self.layer, self.nodes, self.constants, self.inputs, self.outputs = layer, [], {}, {}, {}
        self.weights = self.make_weights(rng)
        self.build()

    def make_weights(self, rng):
        it = self.layer
        made = {
            "conv_w": normal(rng, (it.channels, 1, it.taps), it.dtype, 0.5),
            "conv_b": normal(rng, it.channels, it.dtype, 0.1),
            "dt_bias": normal(rng, it.v_heads, F32, 0.5),
            "factor": -np.exp(normal(rng, it.v_heads, F32, 0.3)),
            "gamma": (1 + normal(rng, it.dv, F32, 0.1)).astype(it.dtype),
        }
        if it.delta_net:
            made["factor"] = normal(rng, it.v_heads, F32, 0.3)
        return made

    # ---- the graph ----

    def add(self, op, inputs, outputs, domain="", **attrs):
        outputs = [outputs] if isinstance(outputs, str) else outputs
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attrs))
        return outputs[0]

    def constant(self, name, value):
        self.constants[name] = np.asarray(value)
        return name

    def given(self, name, dtype, shape):
        self.inputs[name] = (dtype, shape)
        return name

    def wanted(self, name, dtype, shape):
        self.outputs[name] = (dtype, shape)
        return name

    def build(self):
        it = self.layer
        parts = self.build_parts()
        if not it.packed:
            parts = [self.build_rows(*part) for part in zip("qkv", parts)]
        out = self.build_delta_net(parts) if it.delta_net else self.build_attention(parts)
        if it.norm:
            z = self.given("z", it.dtype, ["B", "S", it.widths["v"]])
            gamma = self.constant("gamma", self.weights["gamma"])
            if it.odd == "gamma_of_run":
                del self.constants["gamma"]
                self.given("gamma", it.dtype, [it.dv])
            attrs = {} if it.norm == "silu" else {"activation": it.norm}
            self.add("GatedRMSNorm", [out, gamma, z], "y", MS, epsilon=1e-6, **attrs)
        else:
            self.add("Identity", [out], "y")
        self.wanted("y", it.dtype, ["B", "S", it.widths["v"]])

    def build_parts(self):
        """Values q, k, v (or the packed one)."""
        it = self.layer
        if not (it.conv or it.packed or it.splits()):
            return [self.given(part, it.dtype, ["B", "S", width]) for part, width in it.widths.items()]
        x = self.given("x", it.dtype, ["B", "S", it.channels])
        if it.conv:
            x = self.build_conv(x)
        if it.packed:
            return [x]
        sizes = self.constant("sizes", np.array([it.widths[part] for part in it.order]))
        self.add("Split", [x, sizes], [f"part_{part}" for part in it.order], axis=-1)
        if it.odd == "value_leaves":
            self.wanted("part_v", it.dtype, ["B", "S", it.widths["v"]])
        return [f"part_{part}" for part in "qkv"]

    def build_conv(self, x):
        it = self.layer
        last = it.channels_last
        length = it.taps - 1
        if not last:
            x = self.add("Transpose", [x], "x_t", perm=[0, 2, 1])
        shape = ["B", length, it.channels] if last else ["B", it.channels, length]
        past = self.given("conv_past", it.dtype, shape)
        inputs = [x, self.constant("conv_w", self.weights["conv_w"]), "", past]
        if it.conv_bias:
            inputs[2] = self.constant("conv_b", self.weights["conv_b"])
        if it.odd == "weight_of_run":
            del self.constants["conv_w"]
            self.given("conv_w", it.dtype, list(self.weights["conv_w"].shape))
        out = self.add(
            "CausalConvWithState", inputs, ["conv", "conv_present"], MS, activation=it.activation,
            channels_last=int(last),
        )  # fmt: skip
        self.wanted("conv_present", it.dtype, shape)
        return out if last else self.add("Transpose", [out], "conv_t", perm=[0, 2, 1])

    def build_rows(self, part, x):
        """Norms and factor of a part; heads apart for GatedDeltaNet."""
        it = self.layer
        heads, size = (it.v_heads, it.dv) if part == "v" else (it.k_heads, it.dk)
        apart = self.constant(f"{part}_apart", np.array([0, 0, heads, size]))
        flat = self.constant(f"{part}_flat", np.array([0, 0, heads * size]))
        normed = it.norms and part != "v" and not it.delta_net
        if normed:
            x = self.add("Reshape", [x, apart], f"{part}_heads")
            p = 1 if it.odd == "l1" else 2
            x = self.add("LpNormalization", [x], f"{part}_normed", axis=2 if it.odd == "other_axis" else -1, p=p)
            if not it.delta_net:
                x = self.add("Reshape", [x, flat], f"{part}_rows")
        if it.delta_net:
            x = self.add("Reshape", [x, apart], f"{part}_apart_rows")
        if part == "q" and it.q_scale and not it.delta_net:
            x = self.add("Mul", [x, self.constant("q_factor", it.q_factor)], "q_scaled")
        return x

    def build_gates(self, dtype):
        it = self.layer
        shape = ["B", "S", it.v_heads]
        a, b = self.given("a", it.dtype, shape), self.given("b", it.dtype, shape)
        if it.delta_net:
            return [self.add("Cast", [n], f"{n}_wide", to=onnx_type(F32)) if it.dtype != F32 else n for n in (a, b)]
        if not it.gate:
            return [a, b]
        dt_bias = self.constant("dt_bias", self.weights["dt_bias"])
        factor = self.constant("factor", self.weights["factor"])
        self.add("LinearAttentionGate", [a, dt_bias, factor, b], ["decay", "beta"], MS)
        if it.odd == "decay_leaves":
            self.wanted("decay", it.dtype, shape)
        return ["decay", "beta"]

    def build_attention(self, parts):
        it = self.layer
        past = self.given("past", it.state, ["B", it.v_heads, it.dk, it.dv])
        decay, beta = self.build_gates(it.dtype)
        self.add(
            "LinearAttention", [*parts, past, decay, beta], ["out", "present"], MS, q_num_heads=it.k_heads,
            kv_num_heads=it.v_heads, update_rule=it.rule, scale=it.scale,
        )  # fmt: skip
        self.wanted("present", it.state, ["B", it.v_heads, it.dk, it.dv])
        if it.odd == "output_leaves":
            self.wanted("out", it.dtype, ["B", "S", it.widths["v"]])
        return "out"

    def build_delta_net(self, parts):
        it = self.layer
        past = self.given("past", F32, ["B", it.v_heads, it.dv, it.dk])
        decay, beta = self.build_gates(F32)
        parts = [*parts, "", ""] if it.packed else parts
        gates = ["", ""]
        if it.gdn_gate != "none":
            gates = [self.constant("factor", self.weights["factor"]), self.constant("dt_bias", self.weights["dt_bias"])]
        self.add(
            "GatedDeltaNet", [*parts, "", decay, beta, past, *gates], ["apart", "present"], MS, scale=it.scale,
            update_rule=it.rule, gate_activation=it.gdn_gate, beta_activation="sigmoid", qk_l2_norm=int(it.norms),
        )  # fmt: skip
        self.wanted("present", F32, ["B", it.v_heads, it.dv, it.dk])
        flat = self.constant("out_flat", np.array([0, 0, it.widths["v"]]))
        return self.add("Reshape", ["apart", flat], "out")

    def model(self) -> bytes:
        def infos(values):
            return [helper.make_tensor_value_info(n, onnx_type(d), s) for n, (d, s) in values.items()]

        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "layer", infos(self.inputs), infos(self.outputs), constants)
        imports = [helper.make_opsetid("", 22), helper.make_opsetid(MS, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()

    # ---- feeds and reference ----

    def feeds(self, rng, batch, tokens):
        sizes = {"B": batch, "S": tokens}
        made = {}
        for name, (dtype, shape) in self.inputs.items():
            scale = {"past": 0.3, "a": 0.7}.get(name, 1.0)
            made[name] = self.weights.get(name)
            if made[name] is None:
                made[name] = normal(rng, [sizes.get(d, d) for d in shape], dtype, scale)
        it = self.layer
        if not it.gate and not it.delta_net or it.gdn_gate == "none" and it.delta_net:
            made["a"] = -np.abs(made["a"])
        if not it.gate and not it.delta_net:
            made["b"] = sigmoid(f64(made["b"])).astype(it.dtype)
        if not it.norms:
            # Keys of norm about 1, or the state explodes.
            for name in ("k", "x"):
                if name in made:
                    made[name] = (f64(made[name]) * it.dk**-0.5).astype(it.dtype)
        return made

    def reference(self, feeds):
        """Every output in float64."""
        it, w = self.layer, self.weights
        batch, tokens = feeds["a"].shape[:2]
        made, parts = {}, [feeds.get(part) for part in "qkv"]
        if "x" in feeds:
            x = f64(feeds["x"])
            if it.conv:
                past = f64(feeds["conv_past"])
                past = past.swapaxes(1, 2) if it.channels_last else past
                y, state = causal_conv(
                    x.swapaxes(1, 2), w["conv_w"], w["conv_b"] if it.conv_bias else None, past, activation=it.activation
                )
                x = y.swapaxes(1, 2)
                made["conv_present"] = state.swapaxes(1, 2) if it.channels_last else state
            edges = np.cumsum([0] + [it.widths[part] for part in it.order])
            parts = {part: x[..., edges[i] : edges[i + 1]] for i, part in enumerate(it.order)}
            made["part_v"] = parts["v"]
            parts = [parts[part] for part in "qkv"]
        heads = [it.k_heads, it.k_heads, it.v_heads]
        q, k, v = (f64(x).reshape(batch, tokens, n, -1) for x, n in zip(parts, heads))
        if it.norms and not it.delta_net:
            p, axis = (1 if it.odd == "l1" else 2), (2 if it.odd == "other_axis" else -1)
            q, k = (x / np.linalg.norm(x, p, axis, keepdims=True) for x in (q, k))
        if it.q_scale and not it.delta_net:
            q = q * f64(it.q_factor)
        a, b = f64(feeds["a"]), f64(feeds["b"])
        if it.delta_net:
            decay = delta_gate(a.reshape(-1, it.v_heads), w["factor"], w["dt_bias"], it.gdn_gate)
            out, present = gated_delta_net(
                *(x.reshape(batch * tokens, *x.shape[2:]) for x in (q, k, v)), decay,
                sigmoid(b).reshape(-1, it.v_heads), f64(feeds["past"]), rule=it.rule, scale=it.scale, l2=it.norms,
            )  # fmt: skip
            out = out.reshape(batch, tokens, -1)
        else:
            if it.gate:
                a, b = linear_attention_gate(a, w["dt_bias"], w["factor"], b)
            q, k, v = (x.reshape(batch, tokens, -1) for x in (q, k, v))
            out, states = linear_attention(
                q, k, v, feeds["past"], a, b, q_heads=it.k_heads, kv_heads=it.v_heads, rule=it.rule, scale=it.scale
            )
            present = states[-1]
        made |= {"present": present, "out": out, "decay": a, "y": out}
        if it.norm:
            rows = out.reshape(batch, tokens, it.v_heads, it.dv)
            z = f64(feeds["z"]).reshape(rows.shape)
            rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * f64(w["gamma"])
            made["y"] = (rows * (silu(z) if it.norm == "silu" else sigmoid(z))).reshape(out.shape)
        return {name: made[name] for name in self.outputs}


STATES = {"past": "present", "conv_past": "conv_present"}


class Runner:
    """A session whose tensors stay where they are: states in place, or in two sets that take turns."""

    def __init__(self, built: Built, fusion: bool, in_place: bool, **options):
        self.built, self.in_place = built, in_place
        self.session = harness.ep_session(built.model(), {"fusion": str(int(fusion)), **options})
        harness.assert_all_on_ep(self.session)
        self.buffers = {}

    def buffer(self, name, value):
        """The device memory of this name, which now holds `value`."""
        held = self.buffers.get((name, value.shape))
        if held is None:
            held = self.buffers[name, value.shape] = DeviceBuffer(value.shape, value.dtype, value)
        held.array[...] = value
        held.value.update_inplace(held.raw)
        return held

    def step(self, feeds, reference):
        binding = self.session.io_binding()
        bound = {}
        for name, value in feeds.items():
            held = self.buffer(name, value)
            binding.bind_input(name, held.device, 0, onnx_type(value.dtype), value.shape, held.pointer)
            if name in STATES and self.in_place:
                bound[STATES[name]] = held
        for name, (dtype, _) in self.built.outputs.items():
            shape = reference[name].shape
            if name not in bound:
                bound[name] = self.buffer(f"new {name}", np.full(shape, np.nan, np.float32).astype(dtype))
            binding.bind_output(name, bound[name].device, 0, onnx_type(dtype), shape, bound[name].pointer)
        if STATE.fake is not None:
            STATE.fake.clear_log()
        self.session.run_with_iobinding(binding)
        made = {}
        for name, held in bound.items():
            held.fetch()
            held.check_guards(name)
            made[name] = held.array.copy()
        return made


def launched() -> list[str] | None:
    """The kernels of the last step; nothing is known on a GPU."""
    return None if STATE.fake is None else STATE.fake.kernels()


def mixers(names: list[str]) -> int:
    return sum("_major_" in name and "step" not in name for name in names)


def run(layer: Layer, rng, *, batch=1, steps=(1, 1, 1), in_place=True, fused=True, beside="", options=None):
    """Steps of so many tokens, with and without fusion, each from the state that the float64 reference left.

    fused: whether the layer is one launch, "whole": with nothing else; beside: a kernel that then runs too.
    """
    built = Built(layer, rng)
    if harness.oracles_only():
        return
    runners = {on: Runner(built, on, in_place, **(options or {})) for on in (True, False)}
    state = {}
    for number, tokens in enumerate(steps):
        feeds = built.feeds(rng, batch, tokens) | state
        reference = built.reference(feeds)
        for on, runner in runners.items():
            got = runner.step(feeds, reference)
            for name, value in reference.items():
                what = f"{name}, step {number}, fusion {int(on)}"
                whole = on and fused == "whole" and tokens == 1
                bound = harness.tolerance_for(built.outputs[name][0]) if whole else ROUNDED[layer.dtype]
                harness.assert_close(got[name], value, bound, what)
            if (names := launched()) is not None:
                expected = int(on and fused and tokens == 1)
                assert mixers(names) == expected, f"step {number}, fusion {int(on)}: {names}"
                if expected and fused == "whole":
                    assert len(names) == 1, names
                assert not expected or any(beside in name for name in names), names
        state = {past: reference[present].astype(feeds[past].dtype) for past, present in STATES.items() if past in feeds}


WHOLE = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


@WHOLE
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("v_heads", [2, 4, 6])
def test_whole_layer(rng, dtype, v_heads, batch):
    """All parts, as many value heads as keys, twice and three times as many."""
    run(Layer(dtype=dtype, v_heads=v_heads), rng, batch=batch, fused="whole")


@WHOLE
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("v_heads", [2, 4])
def test_real_sizes(rng, dtype, v_heads, in_place):
    run(Layer(dtype=dtype, dk=128, dv=128, v_heads=v_heads), rng, in_place=in_place, fused="whole")


SQUARE = {
    "all": {},
    "channels_last": dict(channels_last=True),
    "other_order": dict(order="vkq"),
    "linear": dict(rule="linear", gate=False),
    "gated": dict(rule="gated", gate=False),
    "delta": dict(rule="delta", gate=False),
    "no_conv_bias": dict(conv_bias=False),
    "no_activation": dict(activation="none"),
    "no_norms": dict(norms=False),
    "sigmoid_norm": dict(norm="sigmoid"),
    "no_gate": dict(gate=False),
}


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 2)])
@pytest.mark.parametrize("how", SQUARE)
def test_square_states(rng, how, batch, heads, dtype):
    """Few heads, each with a key: four blocks share one."""
    layer = Layer(dtype=dtype, dk=128, dv=128, k_heads=heads, v_heads=heads, **SQUARE[how])
    run(layer, rng, batch=batch, steps=(1, 1), fused="whole", beside="quarter")


@pytest.mark.parametrize("batch, v_heads", [(1, 4), (3, 2)])
@pytest.mark.parametrize("how", ["all", "channels_last", "delta"])
def test_square_states_that_one_block_takes(rng, how, batch, v_heads):
    """Heads that share a key, or many."""
    layer = Layer(dk=128, dv=128, v_heads=v_heads, **SQUARE[how])
    run(layer, rng, batch=batch, steps=(1, 1), fused="whole", beside="square")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("v_heads", [2, 6])
def test_f32_states(rng, dtype, v_heads):
    run(Layer(dtype=dtype, state_dtype=F32, v_heads=v_heads, dk=128, dv=128), rng, batch=3, fused="whole")


@pytest.mark.parametrize("delta_net", [False, True])
@pytest.mark.parametrize("dtype", [F16, F32], ids=name_of)
@pytest.mark.parametrize(
    "dk, dv", [(7, 9), (16, 16), (100, 50), (64, 80), (96, 192), (130, 36), (256, 256), (256, 32), (32, 256)]
)
def test_sizes(rng, dk, dv, dtype, delta_net):
    """Rows that fill no vector, and states larger than the registers."""
    run(Layer(dtype=dtype, dk=dk, dv=dv, v_heads=4, delta_net=delta_net), rng, batch=2, steps=(1, 1))


@pytest.mark.parametrize("dk, dv", [(128, 128), (256, 256)])
def test_every_tier(rng, tier, dk, dv):
    run(Layer(dk=dk, dv=dv, v_heads=4), rng, steps=(1, 1), options=tier, fused="whole")


@pytest.mark.parametrize("k_heads, v_heads", [(1, 1), (1, 8), (3, 15), (16, 16)])
def test_heads(rng, k_heads, v_heads):
    run(Layer(k_heads=k_heads, v_heads=v_heads), rng, batch=2, steps=(1, 1), fused="whole")


@pytest.mark.parametrize("taps", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions(rng, channels_last, taps):
    run(Layer(taps=taps, channels_last=channels_last, v_heads=4), rng, batch=2, fused="whole")


@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv"])
def test_parts_in_any_order(rng, order):
    run(Layer(order=order, v_heads=4), rng, batch=2, fused="whole")


ABSENT = {
    "conv_bias": dict(conv_bias=False),
    "activation": dict(activation="none"),
    "norms": dict(norms=False),
    "q_scale": dict(q_scale=False, scale=0.0),
    "sigmoid_norm": dict(norm="sigmoid"),
    "gate": dict(gate=False),
    "conv": dict(conv=False),
    "conv_and_norms": dict(conv=False, norms=False),
    "split_only": dict(conv=False, odd="split_only"),
}


@pytest.mark.parametrize("dtype", [F16, F32], ids=name_of)
@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("v_heads", [2, 6])
def test_absent_parts(rng, v_heads, absent, dtype):
    run(Layer(dtype=dtype, v_heads=v_heads, **ABSENT[absent]), rng, batch=3, fused="whole")


def test_no_output_norm(rng):
    """The rule's own output is what leaves."""
    run(Layer(norm=None), rng, batch=2)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta"])
def test_rules(rng, rule):
    run(Layer(rule=rule, gate=False), rng, fused="whole")


@WHOLE
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gdn_gate", ["softplus", "sigmoid", "none"])
def test_gated_delta_net(rng, gdn_gate, packed, dtype):
    run(Layer(dtype=dtype, delta_net=True, gdn_gate=gdn_gate, packed=packed, v_heads=4), rng, batch=3, fused="whole")


@pytest.mark.parametrize("delta_net", [False, True])
def test_prompts_between_tokens(rng, delta_net):
    """More than one token: the nodes run one by one, from the states that the launch left."""
    run(Layer(delta_net=delta_net, v_heads=4), rng, batch=2, steps=(5, 1, 3, 1, 1))


# What others see, or what a Run decides, stays outside of the launch; the rest is still one.
SMALLER = {
    "value_leaves": "conv_",
    "decay_leaves": "gates_",
    "output_leaves": "norm_",
    "weight_of_run": "conv_",
    "gamma_of_run": "norm_",
    "l1": "norm_",
    "other_axis": "lp_",
}


@pytest.mark.parametrize("odd", SMALLER)
def test_largest_sound_part(rng, odd):
    run(Layer(odd=odd, v_heads=4), rng, batch=2, beside=SMALLER[odd])


def test_a_rule_alone_is_left_alone(rng):
    run(Layer(conv=False, norms=False, q_scale=False, gate=False, norm=None), rng, fused=False)


@pytest.mark.parametrize("taps", [9, 12])
def test_long_convolutions_stay_outside(rng, taps):
    run(Layer(taps=taps), rng)


@pytest.mark.parametrize("dk, dv", [(257, 32), (32, 260)])
def test_large_heads_are_left_alone(rng, dk, dv):
    run(Layer(dk=dk, dv=dv), rng, steps=(1,), fused=False)
