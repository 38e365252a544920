"""RotaryEmbedding: com.microsoft v1 and ai.onnx 23."""

import numpy as np
import pytest

import harness
from harness import BF16, F32, FLOATS, check, name_of, normal
from reference.rotary import rotary, rotary_by_position

MS = "com.microsoft"
ROWS = 32


def tables(rng, shape, dtype):
    angle = rng.uniform(-np.pi, np.pi, shape)
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def tensor(rng, layout, *, B=2, S=5, heads=3, D=16, dtype=F32):
    return normal(rng, (B, S, heads * D) if layout == "3d" else (B, heads, S, D), dtype)


def ms_case(rng, *, layout="3d", D=16, R=None, heads=3, B=2, S=5, dtype=F32, interleaved=False, offset=False, **how):
    x = tensor(rng, layout, B=B, S=S, heads=heads, D=D, dtype=dtype)
    cos, sin = tables(rng, (ROWS, (R or D) // 2), dtype)
    ids = rng.integers(0, ROWS, (B, S)).astype(np.int64)
    if offset:
        ids = np.array([4], np.int64)
    attrs = dict(interleaved=int(interleaved))
    if R:
        attrs.update(rotary_embedding_dim=R, num_heads=heads)
    expected = rotary_by_position(x, ids, cos, sin, num_heads=heads, interleaved=interleaved)
    if not R and layout == "3d":
        # Without num_heads the head size is twice the table's width.
        expected = rotary_by_position(x, ids, cos, sin, num_heads=x.shape[-1] // D, interleaved=interleaved)
    how.setdefault("ort_cpu", "refuses" if dtype == BF16 else "agrees")
    check("RotaryEmbedding", [x, ids, cos, sin], [expected], attrs, domain=MS, **how)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("offset", [True, False], ids=["offset", "ids"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("layout", ["3d", "4d"])
def test_ms(rng, layout, interleaved, offset, dtype):
    ms_case(rng, layout=layout, interleaved=interleaved, offset=offset, dtype=dtype)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("layout", ["3d", "4d"])
@pytest.mark.parametrize("R", [2, 4, 8, 12])
def test_ms_partial(rng, R, layout, interleaved):
    ms_case(rng, R=R, layout=layout, interleaved=interleaved)


@pytest.mark.parametrize("S", [0, 1, 20])
def test_ms_lengths(rng, S):
    ms_case(rng, S=S)


def test_ms_scale_attribute(rng):
    """Documented as 'custom scale'; ORT CPU ignores it. Supported the same way, or declined by name."""
    x = tensor(rng, "3d")
    cos, sin = tables(rng, (ROWS, 8), F32)
    ids = rng.integers(0, ROWS, (2, 5)).astype(np.int64)
    check(
        "RotaryEmbedding", [x, ids, cos, sin], [rotary_by_position(x, ids, cos, sin, num_heads=3)], dict(scale=2.0),
        domain=MS, may_decline="scale",
    )


@pytest.mark.parametrize("D", [2, 6, 16, 32, 34, 64, 80, 128])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
def test_ms_every_tier(rng, tier, interleaved, D):
    ms_case(rng, D=D, interleaved=interleaved, provider_options=tier)


def onnx_case(rng, *, layout="4d", D=16, R=None, heads=3, B=2, S=5, dtype=F32, interleaved=False, ids=True, **how):
    x = tensor(rng, layout, B=B, S=S, heads=heads, D=D, dtype=dtype)
    half = (R or D) // 2
    attrs = dict(interleaved=int(interleaved))
    if R:
        attrs["rotary_embedding_dim"] = R
    if layout == "3d":
        attrs["num_heads"] = heads
    if ids:
        cos, sin = tables(rng, (ROWS, half), dtype)
        positions = rng.integers(0, ROWS, (B, S)).astype(np.int64)
        expected = rotary_by_position(x, positions, cos, sin, num_heads=heads, interleaved=interleaved)
    else:
        cos, sin = tables(rng, (B, S, half), dtype)
        positions = None
        expected = rotary(x, cos, sin, num_heads=heads, interleaved=interleaved)
    how.setdefault("ort_cpu", "refuses" if dtype == BF16 else "agrees")
    check("RotaryEmbedding", [x, cos, sin, positions], [expected], attrs, opset=23, **how)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("ids", [True, False], ids=["ids", "rows"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("layout", ["3d", "4d"])
def test_onnx(rng, layout, interleaved, ids, dtype):
    onnx_case(rng, layout=layout, interleaved=interleaved, ids=ids, dtype=dtype)


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "rows"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("layout", ["3d", "4d"])
@pytest.mark.parametrize("R", [2, 4, 8, 12])
def test_onnx_partial(rng, R, layout, interleaved, ids):
    onnx_case(rng, R=R, layout=layout, interleaved=interleaved, ids=ids)


@pytest.mark.parametrize("D", [2, 6, 34, 64])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
def test_onnx_every_tier(rng, tier, interleaved, D):
    onnx_case(rng, D=D, interleaved=interleaved, provider_options=tier)


@pytest.mark.parametrize("position", [-1, ROWS, 2**40])
@pytest.mark.parametrize("domain", [MS, ""], ids=["ms", "onnx"])
def test_position_outside_the_table(rng, domain, position):
    x = tensor(rng, "4d")
    cos, sin = tables(rng, (ROWS, 8), F32)
    ids = np.zeros((2, 5), np.int64)
    ids[1, 3] = position
    inputs = [x, ids, cos, sin] if domain else [x, cos, sin, ids]
    model = harness.build_node("RotaryEmbedding", inputs, domain=domain)
    harness.check_hostile(model, "position_ids", str(position), data=True)


@pytest.mark.parametrize("width", [7, 9])
def test_table_of_a_wrong_width(rng, width):
    x = tensor(rng, "4d")
    cos, sin = tables(rng, (ROWS, width), F32)
    model = harness.build_node("RotaryEmbedding", [x, cos, sin, np.zeros((2, 5), np.int64)])
    harness.check_hostile(model, "cos_cache")
