"""com.microsoft::MatMulNBits."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import harness
from harness import BF16, F16, F32, Tolerance, check, name_of, normal
from reference.quant import matmul_nbits, pack_bits

MS = "com.microsoft"
# ORT CPU's f16 kernels accumulate in f16 (measured 2e-3 .. 8e-3 of the maximum at K = 300).
ORT_F16 = Tolerance(1.5e-2)
LEVEL_4 = Tolerance(harness.RELATIVE_ACCURACY_LEVEL_4)
ORT_LEVEL_4 = Tolerance(4e-2)  # measured up to 2.2e-2 on outputs of 37 values


def weights(rng, *, N, K, bits, block_size, dtype=F32, zero_points=None):
    """blocks, scales, zero points: the quantised [N, K]; zero_points None, 'packed' or 'float'."""
    k_blocks = -(-K // block_size)
    q = rng.integers(0, 1 << bits, (N, k_blocks, block_size), dtype=np.uint8)
    scales = (rng.uniform(0.5, 1.5, (N, k_blocks)) / (1 << (bits - 1)) / np.sqrt(K)).astype(dtype)
    points = None
    if zero_points == "packed":
        points = pack_bits(rng.integers(0, 1 << bits, (N, k_blocks), dtype=np.uint8), bits)
    elif zero_points == "float":
        points = rng.uniform(0, (1 << bits) - 1, (N, k_blocks)).astype(dtype)
    return pack_bits(q, bits), scales, points


def case(
    rng, *, M=3, N=24, K=96, bits=4, block_size=32, dtype=F32, zero_points=None, bias=False, level=None, lead=(), **how
):
    blocks, scales, points = weights(
        rng, N=N, K=K, bits=bits, block_size=block_size, dtype=dtype, zero_points=zero_points
    )
    a = normal(rng, (*lead, M, K), dtype)
    b = normal(rng, N, dtype) if bias else None
    attrs = dict(K=K, N=N, bits=bits, block_size=block_size)
    if level is not None:
        attrs["accuracy_level"] = level
    if level == 4:
        how.setdefault("tolerance", LEVEL_4)
        how.setdefault("ort_tolerance", ORT_LEVEL_4)
    if dtype == F16:
        how.setdefault("ort_tolerance", ORT_F16)
    check(
        "MatMulNBits",
        [a, blocks, scales, points, None, b],
        [matmul_nbits(a, blocks, scales, points, b, bits=bits, block_size=block_size, N=N, K=K)],
        attrs,
        domain=MS,
        initializers=(1, 2, 3, 5),
        **how,
    )


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero_points", [None, "packed", "float"])
def test_bits_blocks_zero_points(rng, bits, block_size, zero_points):
    refused = bits == 8 and zero_points == "float"  # ORT CPU has no kernel for it
    case(
        rng, M=2, N=17, K=2 * block_size, bits=bits, block_size=block_size, zero_points=zero_points,
        ort_cpu="refuses" if refused else "agrees",
    )


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero_points", [None, "packed", "float"])
def test_half_types(rng, dtype, bits, zero_points):
    refused = dtype == BF16 or (bits == 8 and zero_points == "float")
    case(
        rng, M=3, N=20, K=128, bits=bits, dtype=dtype, zero_points=zero_points, bias=True,
        ort_cpu="refuses" if refused else "agrees",
    )


@pytest.mark.parametrize("K", [33, 40, 47, 95, 97, 160, 300])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_partial_last_block(rng, bits, K):
    """K need not be a multiple of the block: the rest of the last block is padding."""
    case(rng, M=3, N=19, K=K, bits=bits, block_size=32, zero_points="packed")


@pytest.mark.parametrize("M", [1, 2, 4, 5, 16, 33, 1500])
def test_rows(rng, M):
    case(rng, M=M, N=48, K=128, block_size=32, zero_points="packed", bias=True)


@pytest.mark.parametrize("N", [1, 2, 3, 15, 16, 17, 64, 257])
def test_columns(rng, N):
    case(rng, M=2, N=N, K=64)


@pytest.mark.parametrize("M", [1, 7])
@pytest.mark.parametrize("zero_points", [None, "packed", "float"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_tier(rng, tier, bits, zero_points, M):
    refused = bits == 8 and zero_points == "float"
    case(
        rng, M=M, N=37, K=5 * 32 + 8, bits=bits, zero_points=zero_points, bias=True, provider_options=tier,
        ort_cpu="refuses" if refused else "agrees",
    )


@pytest.mark.parametrize("M", [1, 7])
@pytest.mark.parametrize("dtype", [F32, F16], ids=name_of)
@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("zero_points", [None, "packed"])
def test_accuracy_level_4_every_tier(rng, tier, zero_points, block_size, dtype, M):
    """int8 with one scale a block is off by 1.3e-2 of the maximum at worst here (simulated); small shapes scatter."""
    case(
        rng, M=M, N=129, K=10 * block_size, block_size=block_size, zero_points=zero_points, dtype=dtype, level=4,
        provider_options=tier,
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero_points", [None, "packed"])
def test_accuracy_level_4(rng, bits, zero_points):
    case(rng, M=4, N=129, K=320, bits=bits, zero_points=zero_points, bias=True, level=4)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_other_accuracy_levels(rng, level):
    """Levels 2 and 3 allow f16 and bf16 inside; the answer stays within what those types can hold."""
    bound = {2: Tolerance(1e-3), 3: Tolerance(8e-3)}.get(level)
    case(rng, M=4, N=40, K=128, level=level, tolerance=bound, ort_tolerance=bound)


@pytest.mark.parametrize("lead", [(2,), (2, 3), (0,)], ids=str)
def test_leading_dimensions(rng, lead):
    case(rng, M=3, lead=lead, zero_points="packed")


def test_no_rows(rng):
    case(rng, M=0)


def test_vector_input(rng):
    """A of rank 1 gives Y of rank 1."""
    blocks, scales, _ = weights(rng, N=24, K=64, bits=4, block_size=32)
    a = normal(rng, 64)
    check(
        "MatMulNBits", [a, blocks, scales],
        [matmul_nbits(a, blocks, scales, bits=4, block_size=32, N=24, K=64)],
        dict(K=64, N=24, bits=4, block_size=32), domain=MS, initializers=(1, 2), may_decline="rank",
    )


def test_weights_that_are_not_initializers(rng):
    blocks, scales, points = weights(rng, N=24, K=64, bits=4, block_size=32, zero_points="packed")
    a = normal(rng, (2, 64))
    check(
        "MatMulNBits", [a, blocks, scales, points],
        [matmul_nbits(a, blocks, scales, points, bits=4, block_size=32, N=24, K=64)],
        dict(K=64, N=24, bits=4, block_size=32), domain=MS, may_decline="initializer",
    )


def test_omitted_projection(rng):
    """A packed weight with a dimension of 0 stands for no projection: Y is the bias alone."""
    a, bias = normal(rng, (2, 64)), normal(rng, 24)
    blocks, scales = np.zeros((24, 0, 16), np.uint8), np.zeros((24, 0), F32)
    check(
        "MatMulNBits", [a, blocks, scales, None, None, bias], [np.broadcast_to(bias, (2, 24))],
        dict(K=64, N=24, bits=4, block_size=32), domain=MS, initializers=(1, 2, 5), may_decline="input 1",
    )


@pytest.mark.parametrize("layout", [1, 2])
def test_weights_prepacked_for_cuda_are_declined(rng, layout):
    """ORT CPU reads the CUDA layout as if it were the plain one and is silently wrong."""
    blocks, scales, _ = weights(rng, N=64, K=64, bits=4, block_size=32)
    model = harness.build_node(
        "MatMulNBits", [normal(rng, (2, 64)), blocks, scales],
        dict(K=64, N=64, bits=4, block_size=32, weight_prepacked=layout), domain=MS, initializers=(1, 2),
    )
    harness.check_declined(model, "MatMulNBits", "weight_prepacked")


@pytest.mark.parametrize(
    "attrs", [dict(bits=3), dict(block_size=24), dict(block_size=8), dict(K=0), dict(N=-1)], ids=str
)
def test_attributes_outside_the_schema(rng, attrs):
    blocks, scales, _ = weights(rng, N=24, K=64, bits=4, block_size=32)
    model = harness.build_node(
        "MatMulNBits", [normal(rng, (2, 64)), blocks, scales],
        dict(dict(K=64, N=24, bits=4, block_size=32), **attrs), domain=MS, initializers=(1, 2),
    )
    harness.check_rejected(model, "MatMulNBits", next(iter(attrs)))


@pytest.mark.parametrize(
    "slot, shape",
    [(1, (24, 2, 15)), (1, (23, 2, 16)), (2, (24, 3)), (3, (24, 2)), (5, (25,))],
    ids=str,
)
def test_weights_of_a_wrong_shape(rng, slot, shape):
    blocks, scales, points = weights(rng, N=24, K=64, bits=4, block_size=32, zero_points="packed")
    inputs = [normal(rng, (2, 64)), blocks, scales, points, None, normal(rng, 24)]
    inputs[slot] = np.zeros(shape, inputs[slot].dtype)
    model = harness.build_node(
        "MatMulNBits", inputs, dict(K=64, N=24, bits=4, block_size=32), domain=MS, initializers=(1, 2, 3, 5)
    )
    harness.check_rejected(model, "MatMulNBits", f"input {slot}")


def test_activations_of_a_wrong_width(rng):
    blocks, scales, _ = weights(rng, N=24, K=64, bits=4, block_size=32)
    model = harness.build_node(
        "MatMulNBits", [normal(rng, (2, 63)), blocks, scales], dict(K=64, N=24, bits=4, block_size=32),
        domain=MS, initializers=(1, 2),
    )
    harness.check_hostile(model, "input 0", "63", "64")


@pytest.mark.parametrize("through", ["Cast", "Reshape", "Identity", "Transpose"])
def test_scales_and_zero_points_through_another_node(rng, through):
    """Exporters keep f16 scales and cast them, or store a transposed or flat table: still weights, packed once."""
    N, K, block_size = 24, 64, 32
    blocks, scales, points = weights(rng, N=N, K=K, bits=4, block_size=block_size, dtype=F16, zero_points="float")
    if through != "Cast":
        scales, points = scales.astype(F32), points.astype(F32)
    a = normal(rng, (3, K))
    expected = matmul_nbits(a, blocks, scales, points, bits=4, block_size=block_size, N=N, K=K)
    stored = {"Reshape": lambda x: x.reshape(-1), "Transpose": lambda x: np.ascontiguousarray(x.T)}.get(
        through, lambda x: x
    )
    extra = {"Reshape": ["shape"]}.get(through, [])
    attrs = {"Cast": dict(to=TensorProto.FLOAT), "Transpose": dict(perm=[1, 0])}.get(through, {})
    nodes = [
        helper.make_node(through, [f"stored_{x}", *extra], [x], name=f"{through}_{x}", **attrs) for x in ("s", "z")
    ]
    nodes.append(
        helper.make_node(
            "MatMulNBits", ["a", "b", "s", "z"], ["y"], name="MatMulNBits_under_test", domain=MS,
            K=K, N=N, bits=4, block_size=block_size,
        )
    )
    initializers = [
        numpy_helper.from_array(blocks, "b"),
        numpy_helper.from_array(stored(scales), "stored_s"),
        numpy_helper.from_array(stored(points), "stored_z"),
        numpy_helper.from_array(np.array(scales.shape, np.int64), "shape"),
    ]
    harness.check_graph(nodes, {"a": a}, {"y": expected}, initializers)


def test_two_nodes_that_share_weights(rng):
    """One packed copy serves both, with different biases."""
    N, K, block_size = 24, 64, 32
    blocks, scales, _ = weights(rng, N=N, K=K, bits=4, block_size=block_size)
    a, bias = normal(rng, (3, K)), normal(rng, N)
    product = matmul_nbits(a, blocks, scales, bits=4, block_size=block_size, N=N, K=K)
    attrs = dict(domain=MS, K=K, N=N, bits=4, block_size=block_size)
    nodes = [
        helper.make_node("MatMulNBits", ["a", "b", "s"], ["y"], name="plain", **attrs),
        helper.make_node("MatMulNBits", ["a", "b", "s", "", "", "bias"], ["z"], name="biased", **attrs),
    ]
    initializers = [
        numpy_helper.from_array(blocks, "b"),
        numpy_helper.from_array(scales, "s"),
        numpy_helper.from_array(bias, "bias"),
    ]
    harness.check_graph(nodes, {"a": a}, {"y": product, "z": product + bias}, initializers)
