"""com.microsoft::MoEGroupRouter."""

import numpy as np
import pytest

import harness
from harness import BF16, F16, F32, check, name_of, normal
from reference import f64, sigmoid

pytestmark = pytest.mark.cpu_only("the CUDA EP declines the op")
MS = "com.microsoft"


def routed(logits, bias, *, n_group=1, topk_group=1, group_topk=2, top_k=1, router_sentinel=-10000.0):
    """The chosen experts' log scores; of equals the earlier is chosen."""
    s = sigmoid(f64(logits).reshape(-1, logits.shape[-1]))
    size = s.shape[1] // n_group
    out = np.full(s.shape, float(np.float32(router_sentinel)))
    for row, line in enumerate(s):
        biased = line + f64(bias)
        best = np.sort(biased.reshape(n_group, size), -1)[:, ::-1][:, :group_topk].sum(-1)
        groups = np.argsort(-best, kind="stable")[:topk_group]
        order = [e for e in np.argsort(-biased, kind="stable") if e // size in groups][:top_k]
        out[row, order] = np.log(np.maximum(line[order], 1e-20))
    return out


def case(rng, *, shape=(7, 16), dtype=F32, logits=None, bias=None, **attrs):
    logits = normal(rng, shape, dtype, 2.0) if logits is None else logits
    bias = normal(rng, logits.shape[-1], F32, 0.2) if bias is None else bias
    attrs.setdefault("top_k", 2)
    check("MoEGroupRouter", [logits, bias], [routed(logits, bias, **attrs)], attrs, domain=MS, initializers=(1,))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
@pytest.mark.parametrize("groups", [(1, 1), (4, 1), (4, 2), (8, 8)], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_groups(rng, top_k, groups, dtype):
    case(rng, dtype=dtype, top_k=top_k, n_group=groups[0], topk_group=groups[1])


@pytest.mark.parametrize("group_topk", [1, 2, 3, 9])
def test_group_sums(rng, group_topk):
    case(rng, n_group=4, topk_group=2, group_topk=group_topk)


def test_equals(rng):
    logits = rng.integers(-1, 2, (40, 24)).astype(F32)
    case(rng, logits=logits, bias=np.zeros(24, F32), n_group=6, topk_group=3, top_k=5)


@pytest.mark.parametrize("shape", [(2, 3, 8), (0, 8), (1, 512), (300, 64), (2, 1, 3, 8)], ids=str)
def test_shapes(rng, shape):
    case(rng, shape=shape)


def test_scores_below_all(rng):
    case(rng, logits=np.full((2, 4), -500, F32), bias=np.zeros(4, F32), router_sentinel=-77.5)


def test_infinite_bias_of_a_group(rng):
    bias = np.zeros(8, F32)
    bias[:4] = -1e30
    case(rng, shape=(5, 8), bias=bias, n_group=2, top_k=3)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
def test_scores_of_all_experts(rng, dtype):
    logits, bias = normal(rng, (9, 20), dtype, 2.0), normal(rng, 20)
    s = sigmoid(f64(logits))
    check(
        "MoEGroupRouter", [logits, bias], [None, s + f64(bias), s], dict(top_k=2), domain=MS, initializers=(1,),
        out_types={1: F32, 2: F32},
    )


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
@pytest.mark.parametrize("rows", [1, 17])
def test_projection(rng, rows, dtype):
    x, weights = normal(rng, (rows, 256), dtype), (normal(rng, (12, 256)) / 16).astype(dtype)
    bias = normal(rng, 12)
    s = sigmoid(f64(x) @ f64(weights).T)
    check(
        "MoEGroupRouter", [x, bias, weights], [None, s + f64(bias), s], dict(top_k=2), domain=MS,
        initializers=(1, 2), out_types={1: F32, 2: F32}, tolerance=harness.tolerance_for(F32),
    )


@pytest.mark.parametrize(
    "attrs", [dict(top_k=17), dict(n_group=3), dict(topk_group=3, n_group=2), dict(top_k=0)], ids=str
)
def test_attributes_outside_the_schema(rng, attrs):
    model = harness.build_node(
        "MoEGroupRouter", [normal(rng, (2, 16)), normal(rng, 16)], dict(dict(top_k=2), **attrs), domain=MS,
        initializers=(1,),
    )
    harness.check_rejected(model, "MoEGroupRouter", next(iter(attrs)))


def test_shapes_outside_the_schema(rng):
    inputs = [normal(rng, (2, 16)), normal(rng, 15)]
    model = harness.build_node("MoEGroupRouter", inputs, dict(top_k=2), domain=MS, initializers=(1,))
    harness.check_rejected(model, "MoEGroupRouter")
