"""ai.onnx::LpNormalization (opsets 1 and 22)."""

import numpy as np
import pytest

import harness
from harness import BF16, F16, F32, FLOATS, check, name_of, normal
from reference.norms import lp_norm


def case(rng, shape=(2, 3, 64), *, axis=-1, p=2, dtype=F32, opset=22, zero_rows=False, **how):
    x = normal(rng, shape, dtype)
    if zero_rows:
        x[0] = 0
    check("LpNormalization", [x], [lp_norm(x, axis=axis, p=p)], dict(axis=axis, p=p), opset=opset, **how)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_axis_norm_and_type(rng, axis, p, dtype):
    case(rng, axis=axis, p=p, dtype=dtype, ort_cpu="refuses" if dtype == BF16 else "agrees")


@pytest.mark.parametrize("opset", [1, 13, 21])
def test_older_opsets(rng, opset):
    case(rng, opset=opset)


@pytest.mark.parametrize("p", [1, 2])
def test_zero_rows_give_zeros(rng, p):
    """There is no epsilon: x/||x||, and 0 where the norm is 0."""
    case(rng, p=p, zero_rows=True)


@pytest.mark.parametrize("p", [1, 2])
def test_small_values(rng, p):
    x = (normal(rng, (3, 40)) * 1e-18).astype(F32)  # squares are f32 denormals or 0; their sum must not be lost
    x[1] *= np.float32(1e3)
    check(
        "LpNormalization", [x[1:2]], [lp_norm(x[1:2], p=p)], dict(p=p), opset=22,
    )


def test_f16_sums_are_not_rounded_to_f16(rng):
    x = (normal(rng, (2, 600)) * 50).astype(F16)  # the sum of squares is far beyond 65504
    check("LpNormalization", [x], [lp_norm(x)], opset=22)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (5,)], ids=str)
def test_shapes(rng, shape):
    case(rng, shape)


@pytest.mark.parametrize("width", [1, 8, 17, 33])
def test_every_tier(rng, tier, width):
    case(rng, (2, 3, width), provider_options=tier)
