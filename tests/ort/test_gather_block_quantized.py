"""com.microsoft::GatherBlockQuantized."""

import ml_dtypes
import numpy as np
import pytest
from onnx import numpy_helper

import harness
from harness import BF16, F16, F32, check, name_of
from reference.quant import gather_block_quantized, pack_bits

MS = "com.microsoft"
INT4, UINT4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)


def table(rng, kind, *, rows, columns, block_size, quantize_axis=1, dtype=F32, points=True, bits=4):
    """kind 'int4', 'uint4' (one value an element) or 'uint8' (`bits` packed along the last axis).

    Returns (data tensor, scales, zero-point tensor or None, unpacked q, unpacked zero points, default zero).
    """
    low, high = (-8, 8) if kind == "int4" else (0, 1 << bits)
    shape = (rows, columns)
    blocks = tuple(-(-d // block_size) if axis == quantize_axis else d for axis, d in enumerate(shape))
    q = rng.integers(low, high, shape)
    scales = rng.uniform(0.5, 1.5, blocks).astype(dtype)
    zero = rng.integers(low, high, blocks) if points else None
    if kind == "uint8":
        data = pack_bits(q, bits)
        packed_zero = pack_bits(zero, bits) if points else None
        default = 1 << (bits - 1)
    else:
        element = INT4 if kind == "int4" else UINT4
        data = numpy_helper.from_array(q.astype(element), "data")
        packed_zero = numpy_helper.from_array(zero.astype(element), "zero") if points else None
        default = 0
    return data, scales, packed_zero, q, zero, default


def case(rng, kind, indices, *, rows=11, columns=64, block_size=32, gather_axis=0, quantize_axis=1, attrs=None, **how):
    made = {k: how.pop(k) for k in ("dtype", "points", "bits") if k in how}
    data, scales, packed_zero, q, zero, default = table(
        rng, kind, rows=rows, columns=columns, block_size=block_size, quantize_axis=quantize_axis, **made
    )
    expected = gather_block_quantized(
        q, indices, scales, zero, default_zero=default, gather_axis=gather_axis, quantize_axis=quantize_axis,
        block_size=block_size,
    )
    attributes = dict(block_size=block_size, gather_axis=gather_axis, quantize_axis=quantize_axis)
    if kind == "uint8":
        attributes["bits"] = made.get("bits", 4)
    attributes.update(attrs or {})
    check(
        "GatherBlockQuantized", [data, indices, scales, packed_zero], [expected], attributes, domain=MS,
        initializers=(0, 2, 3), out_types={0: scales.dtype}, **how,
    )


def some(rng, shape, rows=11, dtype=np.int64):
    return rng.integers(-rows, rows, shape).astype(dtype)


@pytest.mark.parametrize("points", [True, False], ids=["points", "default"])
@pytest.mark.parametrize("index_type", [np.int32, np.int64], ids=["i32", "i64"])
@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_four_bit_types(rng, kind, block_size, index_type, points):
    case(
        rng, kind, some(rng, (2, 3), dtype=index_type), columns=2 * block_size, block_size=block_size, points=points
    )


@pytest.mark.parametrize("points", [True, False], ids=["points", "default"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_packed_bytes(rng, block_size, bits, points):
    case(
        rng, "uint8", some(rng, (2, 3)), columns=4 * block_size, block_size=block_size, bits=bits, points=points,
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_packed_zero_points_with_odd_block_counts(rng, blocks, bits):
    case(rng, "uint8", some(rng, (4,)), columns=16 * blocks, block_size=16, bits=bits)


@pytest.mark.parametrize("kind", ["int4", "uint4", "uint8"])
@pytest.mark.parametrize("columns", [40, 72, 24])
def test_partial_last_block(rng, kind, columns):
    case(rng, kind, some(rng, (5,)), columns=columns, block_size=32)


@pytest.mark.parametrize("kind", ["int4", "uint8"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
def test_scale_types(rng, kind, dtype):
    case(rng, kind, some(rng, (2, 3)), dtype=dtype, ort_cpu="refuses" if dtype == BF16 else "agrees")


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize("gather_axis, quantize_axis", [(1, 0), (1, 1), (0, 0), (-1, -2), (-2, -1)])
def test_axes(rng, kind, gather_axis, quantize_axis):
    size = (33, 48)[gather_axis]
    indices = rng.integers(-size, size, (2, 2)).astype(np.int64)
    case(
        rng, kind, indices, rows=33, columns=48, block_size=16, gather_axis=gather_axis % 2,
        quantize_axis=quantize_axis % 2, attrs=dict(gather_axis=gather_axis, quantize_axis=quantize_axis),
        may_decline="axis",
    )


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (2, 2, 2)], ids=str)
def test_index_shapes(rng, shape):
    case(rng, "uint8", some(rng, shape))


@pytest.mark.parametrize("kind", ["int4", "uint8"])
def test_index_out_of_range_gives_zeros(rng, kind):
    """Unlike ONNX Gather, which fails."""
    case(rng, kind, np.array([0, 11, -12, 10, -11, 2**31 - 1], np.int64))


@pytest.mark.parametrize("kind", ["int4", "uint8"])
def test_every_tier(rng, tier, kind):
    case(rng, kind, some(rng, (2, 7)), columns=96, provider_options=tier)


@pytest.mark.parametrize(
    "attrs", [dict(block_size=24), dict(block_size=8), dict(gather_axis=2), dict(quantize_axis=-3)], ids=str
)
def test_attributes_outside_the_schema(rng, attrs):
    data, scales, zero, *_ = table(rng, "uint8", rows=11, columns=64, block_size=32)
    model = harness.build_node(
        "GatherBlockQuantized", [data, some(rng, (3,)), scales, zero], dict(dict(block_size=32, bits=4), **attrs),
        domain=MS, initializers=(0, 2, 3),
    )
    harness.check_rejected(model, next(iter(attrs)))


def test_scales_of_a_wrong_shape(rng):
    data, scales, zero, *_ = table(rng, "uint8", rows=11, columns=64, block_size=32)
    model = harness.build_node(
        "GatherBlockQuantized", [data, some(rng, (3,)), scales[:, :1], zero], dict(block_size=32, bits=4),
        domain=MS, initializers=(0, 2, 3),
    )
    harness.check_rejected(model, "input 2")
