"""com.microsoft::SkipSimplifiedLayerNormalization."""

import numpy as np
import pytest

import harness
from harness import F32, FLOATS, check, name_of, normal
from reference.norms import skip_simplified

MS = "com.microsoft"


def case(rng, shape=(2, 3, 64), *, skip_shape=None, dtype=F32, bias=False, epsilon=1e-5, total=True, **how):
    x = normal(rng, shape, dtype)
    skip = normal(rng, skip_shape or shape, dtype)
    gamma = normal(rng, shape[-1], dtype)
    b = normal(rng, shape[-1], dtype) if bias else None
    y, added = skip_simplified(x, skip, gamma, b, epsilon=epsilon)
    check(
        "SkipSimplifiedLayerNormalization", [x, skip, gamma, b], [y, None, None, added] if total else [y],
        dict(epsilon=epsilon), domain=MS, **how,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("shape", [(2, 3, 64), (5, 33), (1, 1, 8)], ids=str)
def test_shapes_and_types(rng, shape, bias, dtype):
    case(rng, shape, bias=bias, dtype=dtype)


def test_without_the_sum(rng):
    case(rng, total=False)


@pytest.mark.parametrize("skip_shape", [(1, 3, 64), (3, 64)], ids=str)
def test_skip_broadcasts_over_the_batch(rng, skip_shape):
    case(rng, (2, 3, 64), skip_shape=skip_shape, may_decline="input 1")


@pytest.mark.parametrize("epsilon", [1e-12, 1e-6, 1.0])
def test_epsilon(rng, epsilon):
    case(rng, epsilon=epsilon)


def test_no_rows(rng):
    case(rng, (2, 0, 8))


@pytest.mark.parametrize("width", [1, 8, 17, 33])
def test_every_tier(rng, tier, width):
    case(rng, (2, 3, width), provider_options=tier)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("width", [1024, 5120, 20001])
def test_long_rows(rng, width, dtype):
    case(rng, (2, 3, width), skip_shape=(3, width), bias=True, dtype=dtype)


def test_in_place(rng):
    """The sum may be written over the skip input's buffer."""
    case(rng, alias={3: 1})


def test_skip_of_a_wrong_shape(rng):
    model = harness.build_node(
        "SkipSimplifiedLayerNormalization",
        [normal(rng, (2, 3, 8)), normal(rng, (2, 4, 8)), normal(rng, 8)], domain=MS,
    )
    harness.check_hostile(model, "input 1")
