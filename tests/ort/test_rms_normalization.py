"""ai.onnx::RMSNormalization (opset 23)."""

import numpy as np
import pytest

import harness
from harness import BF16, F16, F32, FLOATS, check, name_of, normal
from reference.norms import rms_norm


def case(rng, shape, *, axis=-1, dtype=F32, scale_shape=None, epsilon=1e-5, **how):
    x = normal(rng, shape, dtype)
    scale = normal(rng, shape[axis % len(shape) :] if scale_shape is None else scale_shape, dtype)
    expected = [rms_norm(x, scale, axis=axis, epsilon=epsilon)]
    check("RMSNormalization", [x, scale], expected, dict(axis=axis, epsilon=epsilon), **how)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", [(2, 3, 64), (5, 33), (7,), (2, 2, 2, 100)], ids=str)
def test_shapes_and_types(rng, shape, dtype):
    case(rng, shape, dtype=dtype, ort_cpu="refuses" if dtype == BF16 else "agrees")


@pytest.mark.parametrize("axis", [0, 1, 2, -2, -1])
def test_axis(rng, axis):
    case(rng, (2, 3, 20), axis=axis)


@pytest.mark.parametrize("scale_shape", [(1,), (20,), (3, 1), (1, 20)], ids=str)
def test_scale_broadcasts(rng, scale_shape):
    """The scale is unidirectionally broadcastable to X."""
    case(rng, (2, 3, 20), axis=1, scale_shape=scale_shape, may_decline="input 1")


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 1.0])
def test_epsilon(rng, epsilon):
    case(rng, (3, 40), epsilon=epsilon)


def test_no_rows(rng):
    case(rng, (2, 0, 8))


@pytest.mark.parametrize("width", [1, 8, 17, 33])
def test_every_tier(rng, tier, width):
    case(rng, (3, width), provider_options=tier)
