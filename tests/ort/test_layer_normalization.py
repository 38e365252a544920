"""ai.onnx::LayerNormalization (opset 17)."""

import numpy as np
import pytest

import harness
from harness import F32, FLOATS, Tolerance, check, name_of, normal
from reference.norms import layer_norm


def case(rng, shape, *, axis=-1, dtype=F32, bias=True, epsilon=1e-5, saved=False, offset=0.0, **how):
    x = (normal(rng, shape) + offset).astype(dtype)
    scale = normal(rng, shape[axis % len(shape) :], dtype)
    b = normal(rng, scale.shape, dtype) if bias else None
    expected = layer_norm(x, scale, b, axis=axis, epsilon=epsilon)
    check(
        "LayerNormalization", [x, scale, b], list(expected if saved else expected[:1]),
        dict(axis=axis, epsilon=epsilon), opset=17, out_types={1: F32, 2: F32}, **how,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 64), (5, 33), (7,)], ids=str)
def test_shapes_and_types(rng, shape, bias, dtype):
    case(rng, shape, bias=bias, dtype=dtype)


@pytest.mark.parametrize("axis", [0, 1, 2, -2, -1])
def test_axis(rng, axis):
    case(rng, (2, 3, 20), axis=axis)


def test_saved_mean_and_deviation(rng):
    case(rng, (2, 3, 40), saved=True, may_decline="output")


def test_large_mean(rng):
    """Two passes: the variance is not the difference of two large numbers. f32 itself holds 1e3 +- 6e-5."""
    case(rng, (4, 64), offset=1e3, tolerance=Tolerance(1e-4), ort_tolerance=Tolerance(1e-3))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("width", [128, 1024, 5120, 20001])
def test_long_rows(rng, width, dtype):
    case(rng, (3, width), dtype=dtype)


def test_no_rows(rng):
    case(rng, (2, 0, 8))


@pytest.mark.parametrize("width", [1, 8, 17, 33])
def test_every_tier(rng, tier, width):
    case(rng, (3, width), provider_options=tier)
