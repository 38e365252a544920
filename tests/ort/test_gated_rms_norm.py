"""com.microsoft::GatedRMSNorm."""

import numpy as np
import pytest

import harness
from harness import F16, F32, FLOATS, check, name_of, normal
from reference.norms import gated_rms_norm

MS = "com.microsoft"


def case(rng, shape=(2, 3, 64), *, width=16, dtype=F32, activation="silu", epsilon=1e-6, **how):
    x, gate, scale = normal(rng, shape, dtype), normal(rng, shape, dtype), normal(rng, width, dtype)
    attrs = dict(epsilon=epsilon)
    if activation is not None:
        attrs["activation"] = activation
    expected = gated_rms_norm(x, scale, gate, epsilon=epsilon, activation=activation or "silu")
    check("GatedRMSNorm", [x, scale, gate], [expected], attrs, domain=MS, **how)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("activation", [None, "silu", "swish", "sigmoid"])
@pytest.mark.parametrize("width", [64, 32, 4])
def test_activations_and_types(rng, width, activation, dtype):
    case(rng, width=width, activation=activation, dtype=dtype)


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 2, 3, 64), (0, 64), (2, 0, 64)], ids=str)
def test_shapes(rng, shape):
    case(rng, shape)


def test_large_gates(rng):
    """exp(-x) overflows f32 beyond 88: the gate still goes to 0 or x."""
    x, scale = normal(rng, (2, 32)), normal(rng, 16)
    gate = (normal(rng, (2, 32)) * 200).astype(F32)
    check(
        "GatedRMSNorm", [x, scale, gate], [gated_rms_norm(x, scale, np.float64(gate))], dict(epsilon=1e-5), domain=MS
    )


@pytest.mark.parametrize("width", [1, 8, 17, 33])
def test_every_tier(rng, tier, width):
    case(rng, (2, 3, 2 * width), width=width, provider_options=tier)


def test_unknown_activation(rng):
    model = harness.build_node(
        "GatedRMSNorm", [normal(rng, (2, 8)), normal(rng, 8), normal(rng, (2, 8))], dict(activation="gelu"), domain=MS
    )
    harness.check_rejected(model, "activation", "gelu")


def test_width_that_does_not_divide(rng):
    model = harness.build_node(
        "GatedRMSNorm", [normal(rng, (2, 8)), normal(rng, 3), normal(rng, (2, 8))], domain=MS
    )
    harness.check_hostile(model, "scale")


def test_gate_of_a_wrong_shape(rng):
    model = harness.build_node(
        "GatedRMSNorm", [normal(rng, (2, 8)), normal(rng, 8), normal(rng, (3, 8))], domain=MS
    )
    harness.check_hostile(model, "input 2")
