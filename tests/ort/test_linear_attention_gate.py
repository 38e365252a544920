"""com.microsoft::LinearAttentionGate."""

import numpy as np
import pytest

import harness
from harness import F32, FLOATS, Tolerance, check, name_of, normal
from reference.linear import linear_attention_gate

MS = "com.microsoft"


def case(rng, shape=(2, 3, 4), *, dtype=F32, beta=True, spread=4.0, **how):
    a = normal(rng, shape, dtype, spread)
    dt_bias, decay_scale = normal(rng, shape[-1]), -rng.random(shape[-1]).astype(F32)
    b = normal(rng, shape, dtype, spread) if beta else None
    decay, update = linear_attention_gate(a, dt_bias, decay_scale, b)
    # ORT CPU takes log(1 + exp(x)), which loses small values; ours must not.
    how.setdefault("ort_tolerance", Tolerance(harness.RELATIVE[np.dtype(dtype)], 1e-6))
    check("LinearAttentionGate", [a, dt_bias, decay_scale, b], [decay, update], domain=MS, **how)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("beta", [True, False])
def test_types(rng, beta, dtype):
    case(rng, dtype=dtype, beta=beta)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 33), (2, 0, 4), (0, 3, 4)], ids=str)
def test_shapes(rng, shape):
    case(rng, shape)


def test_large_values(rng):
    """softplus(x) = x for large x and exp(x) for very negative x; sigmoid saturates."""
    case(rng, (2, 16, 4), spread=100.0)


def test_b_without_the_beta_output(rng):
    a, b = normal(rng, (2, 3, 4)), normal(rng, (2, 3, 4))
    dt_bias, decay_scale = normal(rng, 4), normal(rng, 4)
    decay, _ = linear_attention_gate(a, dt_bias, decay_scale)
    check("LinearAttentionGate", [a, dt_bias, decay_scale, b], [decay], domain=MS)


@pytest.mark.parametrize("heads", [1, 8, 17, 33])
def test_every_tier(rng, tier, heads):
    case(rng, (2, 3, heads), provider_options=tier)


def test_beta_without_b(rng):
    model = harness.build_node(
        "LinearAttentionGate", [normal(rng, (2, 3, 4)), normal(rng, 4), normal(rng, 4)], outputs=2, domain=MS
    )
    harness.check_rejected(model, "LinearAttentionGate")


@pytest.mark.parametrize("slot", [1, 2])
def test_wrong_lengths(rng, slot):
    made = [normal(rng, (2, 3, 4)), normal(rng, 4), normal(rng, 4)]
    made[slot] = normal(rng, 5)
    model = harness.build_node("LinearAttentionGate", made, domain=MS)
    harness.check_hostile(model, f"input {slot}")
