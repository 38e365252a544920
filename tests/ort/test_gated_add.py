"""com.microsoft::GatedAdd."""

import numpy as np
import pytest

import harness
from harness import BF16, F32, FLOATS, check, name_of, normal
from reference.norms import gated_add

MS = "com.microsoft"


def case(rng, shape=(2, 3, 64), *, dtype=F32, **how):
    x, y = normal(rng, shape, dtype), normal(rng, shape, dtype)
    gate = normal(rng, (*shape[:-1], 1), dtype)
    check("GatedAdd", [x, y, gate], [gated_add(x, y, gate)], domain=MS, **how)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", [(2, 3, 64), (5, 33), (7,), (2, 2, 2, 100), (0, 8), (2, 0, 8)], ids=str)
def test_shapes_and_types(rng, shape, dtype):
    case(rng, shape, dtype=dtype, ort_cpu="refuses" if dtype == BF16 else "agrees")


@pytest.mark.parametrize("width", [1, 8, 17, 33])
def test_every_tier(rng, tier, width):
    case(rng, (2, 3, width), provider_options=tier)


def test_projected_mode_is_declined(rng):
    """Only CUDA has it, and only in bf16; ORT CPU answers NOT_IMPLEMENTED."""
    x, y, gate, weight = (normal(rng, s, BF16) for s in ((2, 3, 8), (2, 3, 8), (2, 3, 4), (4, 1)))
    model = harness.build_node("GatedAdd", [x, y, gate, weight], domain=MS)
    with pytest.raises(Exception):
        harness.run_ort_cpu(model)
    harness.check_declined(model, "GatedAdd", "gate_weight")


def test_gate_of_a_wrong_shape(rng):
    model = harness.build_node(
        "GatedAdd", [normal(rng, (2, 8)), normal(rng, (2, 8)), normal(rng, (3, 1))], domain=MS
    )
    harness.check_hostile(model, "input 2")
