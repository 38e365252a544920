"""com.microsoft::MRotaryEmbedding."""

import numpy as np
import pytest

import harness
from harness import BF16, F32, FLOATS, check, name_of, normal
from reference.rotary import mrotary, rotary_by_position

MS = "com.microsoft"
ROWS = 32


def build(rng, *, layout=1, sections=(2, 1, 1), D=16, heads=2, B=2, S=5, dtype=F32, interleaved=False, rank4=False,
          text=False):
    R = 2 * sum(sections)
    x = normal(rng, (B, heads, S, D) if rank4 else (B, S, heads * D), dtype)
    ids = rng.integers(0, ROWS, (3, B, S)).astype(np.int64)
    if text:
        ids[:] = ids[:1]
    angle = rng.uniform(-np.pi, np.pi, (ROWS, R // 2))
    cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
    attrs = dict(mrope_section=list(sections), mrope_layout=layout, interleaved=int(interleaved))
    if R != D:
        attrs["rotary_embedding_dim"] = R
    if R != D or not rank4:
        attrs["num_heads"] = heads
    return [x, ids, cos, sin], attrs


def case(rng, *, check_options=None, **how):
    inputs, attrs = build(rng, **how)
    expected = mrotary(
        *inputs, num_heads=how.get("heads", 2), sections=attrs["mrope_section"], layout=attrs["mrope_layout"],
        interleaved=bool(attrs["interleaved"]),
    )
    options = dict(check_options or {})
    if how.get("dtype") == BF16:
        options["ort_cpu"] = "refuses"
    check("MRotaryEmbedding", inputs, [expected], attrs, domain=MS, **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("rank4", [True, False], ids=["4d", "3d"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("layout", [0, 1])
def test_layouts_and_types(rng, layout, interleaved, rank4, dtype):
    case(rng, layout=layout, interleaved=interleaved, rank4=rank4, dtype=dtype)


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize(
    "sections, D", [((3, 3, 2), 16), ((4, 2, 2), 16), ((11, 11, 10), 64), ((11, 11, 10), 128), ((8, 0, 0), 16),
                    ((2, 0, 2), 16), ((0, 4, 4), 16), ((1, 1, 1), 16)], ids=str,
)
def test_sections(rng, sections, D, layout):
    case(rng, sections=sections, D=D, layout=layout)


@pytest.mark.parametrize("S", [0, 1, 20])
def test_lengths(rng, S):
    case(rng, S=S)


@pytest.mark.parametrize("layout", [0, 1])
def test_text_only_is_plain_rotary(rng, layout):
    """Where the three streams agree the op is RotaryEmbedding."""
    inputs, attrs = build(rng, layout=layout, sections=(3, 3, 2), text=True)
    x, ids, cos, sin = inputs
    check(
        "MRotaryEmbedding", inputs, [rotary_by_position(x, ids[0], cos, sin, num_heads=2)], attrs, domain=MS
    )


@pytest.mark.parametrize("D, sections", [(16, (2, 1, 1)), (64, (11, 11, 10)), (34, (5, 4, 4))], ids=str)
def test_every_tier(rng, tier, D, sections):
    case(rng, D=D, sections=sections, check_options=dict(provider_options=tier))


@pytest.mark.parametrize("position", [-1, ROWS, 2**40])
def test_position_outside_the_table(rng, position):
    inputs, attrs = build(rng)
    inputs[1][2, 1, 3] = position
    model = harness.build_node("MRotaryEmbedding", inputs, attrs, domain=MS)
    harness.check_hostile(model, "position_ids", str(position), data=True)


@pytest.mark.parametrize(
    "attrs", [dict(mrope_section=[2, 2, 1]), dict(mrope_section=[4]), dict(mrope_section=[5, -1, 0]),
              dict(mrope_layout=2)], ids=str,
)
def test_attributes_outside_the_schema(rng, attrs):
    inputs, given = build(rng)
    model = harness.build_node("MRotaryEmbedding", inputs, dict(given, **attrs), domain=MS)
    harness.check_rejected(model, next(iter(attrs)))


@pytest.mark.parametrize("slot, shape", [(1, (2, 2, 5)), (1, (3, 2, 4)), (1, (3, 1, 5)), (2, (ROWS, 5)), (3, (ROWS, 3))],
                         ids=str)
def test_wrong_shapes(rng, slot, shape):
    inputs, attrs = build(rng)
    inputs[slot] = np.zeros(shape, inputs[slot].dtype)
    model = harness.build_node("MRotaryEmbedding", inputs, attrs, domain=MS)
    harness.check_hostile(model, f"input {slot}")
