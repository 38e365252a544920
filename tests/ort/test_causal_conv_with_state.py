"""CausalConvWithState: com.microsoft v1 and ai.onnx v27."""

import numpy as np
import pytest

import harness
from harness import BF16, F16, F32, FLOATS, check, name_of, normal
from reference.linear import causal_conv

MS = "com.microsoft"
OPSET = 27
DOMAINS = pytest.mark.parametrize("domain", [MS, ""], ids=["ms", "onnx"])


def to_last(x):
    return None if x is None else np.ascontiguousarray(np.moveaxis(x, 1, -1))


def case(rng, *, B=2, C=6, T=5, taps=4, activation="silu", bias=True, past=True, dilation=1, channels_last=False,
         dtype=F32, domain=MS, attrs=None, **how):
    length = (taps - 1) * dilation
    x, weight = normal(rng, (B, C, T), dtype), normal(rng, (C, 1, taps), dtype)
    b = normal(rng, C, dtype) if bias else None
    state = normal(rng, (B, C, length), dtype) if past else None
    y, present = causal_conv(x, weight, b, state, activation=activation or "none", dilation=dilation)
    attributes = dict(attrs or {})
    if activation is not None:
        attributes["activation"] = activation
    if dilation != 1:
        attributes["dilation"] = dilation
    if channels_last:
        attributes["channels_last"] = 1
        x, state, y, present = map(to_last, (x, state, y, present))
    if dtype == BF16 or (domain == "" and T == 0):
        how["ort_cpu"] = "refuses"  # no bf16 kernel; the function body's Conv rejects an empty sequence
    check(
        "CausalConvWithState", [x, weight, b, state], [y, present], attributes, domain=domain, opset=OPSET,
        alias={1: 3} if past else None, **how,
    )


@DOMAINS
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("activation", [None, "none", "silu", "swish"])
def test_activations_and_types(rng, activation, dtype, domain):
    case(rng, activation=activation, dtype=dtype, domain=domain)


@DOMAINS
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 40])
def test_lengths(rng, T, taps, domain):
    """T < k - 1 keeps the newest columns of the past, T = 0 keeps it all, k = 1 has an empty state."""
    case(rng, T=T, taps=taps, domain=domain)


@DOMAINS
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("T", [0, 1, 2, 5])
def test_without_past(rng, T, bias, domain):
    case(rng, past=False, bias=bias, T=T, domain=domain)


@pytest.mark.parametrize("dilation", [2, 3])
@pytest.mark.parametrize("T", [0, 1, 4, 20])
def test_dilation(rng, T, dilation):
    case(rng, dilation=dilation, T=T)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("past", [True, False], ids=["past", "fresh"])
@pytest.mark.parametrize("T", [0, 1, 2, 9])
def test_channels_last(rng, T, past, dtype):
    case(rng, channels_last=True, T=T, past=past, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(
    "T, dilation, taps", [(64, 1, 4), (1030, 1, 4), (1096, 1, 4), (2100, 1, 6), (70, 30, 4), (200, 40, 3)]
)
def test_many_positions(rng, T, dilation, taps, channels_last, dtype):
    case(rng, T=T, dilation=dilation, taps=taps, channels_last=channels_last, dtype=dtype)


def test_channels_last_with_several_channel_axes(rng):
    """[B, T, d1, d2] with channels d1*d2."""
    B, T, C, taps = 2, 5, 6, 4
    x, weight = normal(rng, (B, C, T)), normal(rng, (C, 1, taps))
    bias, past = normal(rng, C), normal(rng, (B, C, taps - 1))
    y, present = causal_conv(x, weight, bias, past)
    x, past, y, present = (to_last(a).reshape(a.shape[0], a.shape[2], 2, 3) for a in (x, past, y, present))
    check(
        "CausalConvWithState", [x, weight, bias, past], [y, present], dict(channels_last=1), domain=MS, opset=OPSET,
        alias={1: 3}, may_decline="channels_last",
    )


def test_channels_last_with_dilation(rng):
    case(rng, channels_last=True, dilation=2, T=3)


@pytest.mark.parametrize("channels", [1, 8, 17, 33, 256])
@pytest.mark.parametrize("T", [1, 9])
def test_every_tier(rng, tier, T, channels):
    case(rng, C=channels, T=T, provider_options=tier)


@pytest.mark.parametrize(
    "attrs, word",
    [
        (dict(ndim=2), "ndim"), (dict(ndim=3), "ndim"), (dict(state_window=3), "state_window"),
        (dict(state_update_capacity=2, channels_last=1), "state_update_capacity"),
        (dict(input_channels=6, channels_last=1), "input_channel"),
        (dict(state_length=5, channels_last=1), "state_length"),
        (dict(state_channels_last=0, channels_last=1), "state_channels_last"),
    ],
    ids=lambda v: v if isinstance(v, str) else str(v),
)
def test_cuda_only_attributes_are_declined(rng, attrs, word):
    """ORT CPU refuses them when the session is created."""
    ndim = attrs.get("ndim", 1)
    W = attrs.get("state_window", 0)
    last = attrs.get("channels_last", 0)  # ORT's shape inference allows the others with channels_last only
    x = normal(rng, (2, 5, 6) if last else (2, 6) + (3,) * (ndim - 1) + (5,))
    weight = normal(rng, (6, 1) + (2,) * (ndim - 1) + (4,))
    past = None if last else normal(rng, ((W,) if W else ()) + (2, 6) + (3,) * (ndim - 1) + (3,))
    model = harness.build_node("CausalConvWithState", [x, weight, None, past], attrs, outputs=2, domain=MS)
    with pytest.raises(Exception):
        harness.run_ort_cpu(model)
    harness.check_declined(model, "CausalConvWithState", word)


def test_unknown_activation(rng):
    model = harness.build_node(
        "CausalConvWithState", [normal(rng, (2, 6, 5)), normal(rng, (6, 1, 4))], dict(activation="gelu"), outputs=2,
        domain=MS,
    )
    harness.check_rejected(model, "activation")


@pytest.mark.parametrize("slot, shape", [(1, (5, 1, 4)), (1, (6, 2, 4)), (2, (5,)), (3, (2, 6, 4)), (3, (1, 6, 3)),
                                         (3, (2, 5, 3))], ids=str)
def test_wrong_shapes(rng, slot, shape):
    made = [normal(rng, s) for s in ((2, 6, 5), (6, 1, 4), (6,), (2, 6, 3))]
    made[slot] = normal(rng, shape)
    model = harness.build_node("CausalConvWithState", made, outputs=2, domain=MS)
    harness.check_hostile(model, f"input {slot}")
