"""SimplifiedLayerNormalization (ORT registers it in the ai.onnx domain)."""

import numpy as np
import pytest

import harness
from harness import F16, F32, FLOATS, check, name_of, normal
from reference.norms import inverse_rms, rms_norm


def case(rng, shape, *, axis=-1, dtype=F32, scale_dtype=None, epsilon=1e-5, saved=False, **how):
    x = normal(rng, shape, dtype)
    scale = normal(rng, shape[axis % len(shape) :], scale_dtype or dtype)
    expected = [rms_norm(x, scale, axis=axis, epsilon=epsilon)]
    if saved:
        expected.append(inverse_rms(x, axis=axis, epsilon=epsilon))
    check(
        "SimplifiedLayerNormalization", [x, scale], expected, dict(axis=axis, epsilon=epsilon),
        out_types={0: scale_dtype or dtype, 1: F32}, **how,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", [(2, 3, 64), (5, 33), (7,), (1, 1, 1), (2, 2, 2, 100)], ids=str)
def test_shapes_and_types(rng, shape, dtype):
    case(rng, shape, dtype=dtype)


@pytest.mark.parametrize("axis", [1, 2, -2, -1, 0])
def test_axis(rng, axis):
    case(rng, (2, 3, 20), axis=axis)


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 1.0])
def test_epsilon(rng, epsilon):
    case(rng, (3, 40), epsilon=epsilon)


def test_saved_inverse(rng):
    case(rng, (2, 3, 40), saved=True, may_decline="output 1")


def test_mixed_types(rng):
    """f16 data with an f32 scale: the output takes the scale's type."""
    case(rng, (2, 3, 40), dtype=F16, scale_dtype=F32, may_decline="type")


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
def test_no_rows(rng, shape):
    case(rng, shape)


@pytest.mark.parametrize("width", [1, 7, 8, 15, 16, 17, 31, 32, 33, 127])
def test_every_tier(rng, tier, width):
    case(rng, (3, width), provider_options=tier)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("width", [128, 256, 1000, 1024, 5120, 9000, 70000])
def test_long_rows(rng, width, dtype):
    case(rng, (3, width), dtype=dtype)


def test_large_values_do_not_overflow(rng):
    """Squares of f16 values beyond 255 do not fit f16: the sum is taken in f32."""
    x = (normal(rng, (4, 64)) * 3000).astype(F16)
    scale = normal(rng, 64, F16)
    check("SimplifiedLayerNormalization", [x, scale], [rms_norm(x, scale)], dict(axis=-1))


def test_scale_of_a_wrong_length(rng):
    model = harness.build_node("SimplifiedLayerNormalization", [normal(rng, (2, 8)), normal(rng, 7)])
    harness.check_hostile(model, "input 1", "7", "8")
