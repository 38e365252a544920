"""com.microsoft::MoE and com.microsoft::QMoE.

Where ORT CPU gives another answer than the definition, a test says so and float64 alone is the oracle.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import harness
from harness import BF16, F16, F32, Tolerance, check, name_of, normal
from reference.moe import dequantize, dequantize_fp4, dequantize_fp8, moe, pack, pack_columns, pack_cutlass, route
from reference.quant import pack_bits

MS = "com.microsoft"
E8M0, E4M3 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float8_e4m3fn)
# ORT CPU rounds each projection of an f16 model to f16 (measured up to 4e-3 of the maximum).
ORT_F16 = Tolerance(1e-2)
# Against int8 activations rounded in float64 (the CUDA EP leaves them exact): what f32 rounds the other way is off by a
# step, 1/127 of a block's maximum, in one of hundreds of terms.
LEVEL_4 = Tolerance(3e-3)
# Int8 activations against exact ones, twice in a row (measured up to 3e-2).
ORT_LEVEL_4 = Tolerance(6e-2)


@dataclasses.dataclass
class Sizes:
    E: int = 4
    H: int = 64
    I: int = 32  # noqa: E741
    k: int = 2


@dataclasses.dataclass
class Matrix:
    """A projection: what it is, and its tensors as the model has them."""

    exact: np.ndarray
    weights: np.ndarray
    scales: np.ndarray | None = None
    zero_points: np.ndarray | None = None
    global_scale: np.ndarray | None = None


def quantized(rng, E, N, K, *, bits, block, zero_points=None, scale=F32, packer=pack) -> Matrix:
    codes = rng.integers(0, 1 << bits, (E, N, K), dtype=np.uint8)
    blocks = -(-K // block) if block else 1
    scales = (rng.uniform(0.5, 1.5, (E, N, blocks)) / (1 << (bits - 1)) / np.sqrt(K)).astype(scale)
    points = packed = None
    if zero_points:
        points = rng.integers(0, 1 << bits, (E, N, blocks), dtype=np.uint8)
        packed = pack_bits(points, bits) if block else pack_bits(points[..., 0], bits)
    exact = dequantize(codes, scales, points, bits=bits, block=block)
    return Matrix(exact, packer(codes, bits), scales if block else scales[..., 0], packed)


def fp4(rng, E, N, K, *, kind, packer) -> Matrix:
    """kind 'fp4' (a power of two for 32 values) or 'nvfp4' (an E4M3 for 16)."""
    block = 32 if kind == "fp4" else 16
    codes = rng.integers(0, 16, (E, N, K), dtype=np.uint8)
    if kind == "fp4":
        scales = np.exp2(rng.integers(-3, 2, (E, N, K // block))).astype(E8M0)
    else:
        scales = rng.uniform(0.25, 2, (E, N, K // block)).astype(E4M3)
    factor = (rng.uniform(0.5, 1.5, E) / np.sqrt(K)).astype(F32)
    return Matrix(dequantize_fp4(codes, scales, factor, block), packer(codes), scales, None, factor)


def fp8(rng, E, N, K, *, block, scale=F32) -> Matrix:
    weights = normal(rng, (E, N, K)).astype(E4M3)
    if not block:
        factor = (rng.uniform(0.5, 1.5, E) / np.sqrt(K)).astype(F32)
        return Matrix(dequantize_fp8(weights, None, factor), weights, None, None, factor)
    scales = (rng.uniform(0.5, 1.5, (E, -(-N // block), -(-K // block))) / np.sqrt(K)).astype(scale)
    return Matrix(dequantize_fp8(weights, scales, block=block), weights, scales)


def dense(rng, E, N, K, dtype) -> Matrix:
    weights = (normal(rng, (E, N, K)) / np.sqrt(K)).astype(dtype)
    return Matrix(weights.astype(np.float64), weights)


@dataclasses.dataclass
class Node:
    op: str
    inputs: list
    attrs: dict
    reference: np.ndarray
    constants: tuple


def node(
    rng, make, sizes=None, *, dtype=F32, activation="swiglu", fusion=1, bias=True, fc3=False, normalize=1, mixer=0,
    tokens=(5,), logits=None, weights=None, alpha=None, beta=None, limit=None, limit_after=0, runtime=False, **attrs,
) -> Node:
    """make(rng, E, N, K, which) makes the projection `which` (1, 2 or 3); None makes dense ones, and so a MoE."""
    s = sizes or Sizes()
    quant = make is not None
    make = make or (lambda rng, E, N, K, which: dense(rng, E, N, K, dtype))
    gated = activation in ("swiglu", "geglu") and not fc3
    n1 = 2 * s.I if gated else s.I
    one, two = make(rng, s.E, n1, s.H, 1), make(rng, s.E, s.H, s.I, 2)
    three = make(rng, s.E, s.I, s.H, 3) if fc3 else None
    biases = [normal(rng, (s.E, n), dtype) if bias else None for n in (n1, s.H, s.I)]
    x = normal(rng, (*tokens, s.H), dtype)
    count = int(np.prod(tokens))
    if logits is None:  # no two the same, in any type: which of them goes first is for tests of their own
        logits = rng.permuted(np.tile(np.arange(s.E) - s.E // 2, (count, 1)), axis=1) / 4
    logits = logits.astype(dtype)
    mix = route(logits, s.k, normalize=bool(normalize), sparse_mixer=bool(mixer), weights=weights)
    extra = {"alpha": alpha, "beta": beta, "limit": limit}
    reference = moe(
        x, mix, one.exact, two.exact, three.exact if three else None, biases[0], biases[1], biases[2] if fc3 else None,
        activation=activation, fusion=fusion, limit_after=bool(limit_after),
        int8_block=attrs["block_size"] if attrs.get("accuracy_level") == 4 and not harness.on_cuda() else None,
        **{name: value for name, value in extra.items() if value is not None},
    )
    names = {"alpha": "activation_alpha", "beta": "activation_beta", "limit": "swiglu_limit"}
    attrs |= {names[name]: float(np.float32(value)) for name, value in extra.items() if value is not None}
    if limit_after:
        attrs["swiglu_limit_after_activation"] = 1
    if mixer:
        attrs["use_sparse_mixer"] = 1
    attrs |= dict(activation_type=activation, k=s.k, normalize_routing_weights=normalize)
    if fusion:
        attrs["swiglu_fusion"] = fusion
    if not quant:
        inputs = [x, logits, one.weights, biases[0], two.weights, biases[1]]
        inputs += [three.weights, biases[2]] if fc3 else [None, None]
        return Node("MoE", inputs, attrs, reference, () if runtime else tuple(range(2, 8)))
    of = lambda name: getattr(three, name) if fc3 else None  # noqa: E731
    inputs = [
        x, logits, one.weights, one.scales, biases[0], two.weights, two.scales, biases[1], of("weights"), of("scales"),
        biases[2] if fc3 else None, one.zero_points, two.zero_points, of("zero_points"), weights, one.global_scale,
        two.global_scale,
    ]  # fmt: skip
    constants = tuple(i for i in range(2, 17) if i != 14)
    return Node("QMoE", inputs, attrs, reference, () if runtime else constants)


def check_node(n: Node, **how) -> None:
    if np.dtype(n.inputs[0].dtype) == F16:
        how.setdefault("ort_tolerance", ORT_F16)
    if np.dtype(n.inputs[0].dtype) == BF16:
        how.setdefault("ort_cpu", "refuses")
    check(n.op, n.inputs, [n.reference], n.attrs, domain=MS, initializers=n.constants, **how)


def differs(n: Node, **how) -> None:
    """ORT CPU runs the node, to another answer than the definition's."""
    model = harness.build_node(
        n.op, n.inputs, n.attrs, domain=MS, initializers=n.constants, dynamic=False
    )
    theirs = harness.as_float64(harness.run_ort_cpu(model)["out0"])
    far = np.abs(theirs - n.reference).max() > 0.05 * np.abs(n.reference).max()
    assert far or not np.isfinite(theirs).all(), "ORT CPU agrees after all: let `check` compare"
    if harness.oracles_only():
        return
    dtype = np.dtype(n.inputs[0].dtype)
    known = {"out0": (n.reference.shape, dtype)}
    got = harness.run_node(model, known=known, **how)["out0"]
    harness.assert_close(got, n.reference, harness.tolerance_for(dtype), f"{n.op}: EP against float64")


def ints(bits=4, block=32, **how):
    """Integer projections; `bits` may be one a projection."""
    return lambda rng, E, N, K, which: quantized(
        rng, E, N, K, bits=bits if isinstance(bits, int) else bits[which - 1], block=block, **how
    )


def int_attrs(bits=4, block=32, **attrs):
    attrs = dict(attrs, expert_weight_bits=bits if isinstance(bits, int) else bits[0])
    if not isinstance(bits, int):
        attrs |= {f"fc{i + 1}_expert_weight_bits": width for i, width in enumerate(bits)}
    return attrs | ({"block_size": block} if block else {})


def qmoe(rng, *, bits=4, block=32, zero_points=None, scale=None, dtype=F32, **how) -> Node:
    scale = dtype if scale is None else scale
    make = ints(bits, block, zero_points=zero_points, scale=scale)
    return node(rng, make, dtype=dtype, **int_attrs(bits, block), **how)


# --------------------------------------------------------------------------------------------------------------- dense


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity", "swiglu"])
def test_dense(rng, activation, bias, dtype):
    check_node(node(rng, None, activation=activation, fusion=int(activation == "swiglu"), bias=bias, dtype=dtype))


@pytest.mark.parametrize("normalize", [0, 1])
def test_dense_weights(rng, normalize):
    check_node(node(rng, None, Sizes(E=7, k=3), normalize=normalize))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
@pytest.mark.parametrize("activation, fusion", [("relu2", 0), ("geglu", 1), ("geglu", 2), ("swiglu", 2)])
def test_dense_beyond_ort_cpu(rng, activation, fusion, dtype):
    check_node(node(rng, None, activation=activation, fusion=fusion, dtype=dtype), ort_cpu="refuses")


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity", "swiglu", "relu2"])
def test_dense_fc3(rng, activation):
    check_node(node(rng, None, activation=activation, fusion=0, fc3=True), ort_cpu="refuses")


@pytest.mark.parametrize("H, I", [(1, 1), (7, 3), (17, 33), (100, 15), (16, 16)])
def test_dense_odd_sizes(rng, H, I):  # noqa: E741
    check_node(node(rng, None, Sizes(H=H, I=I)))


@pytest.mark.parametrize("tokens", [(1,), (2,), (13,), (2, 3), (1, 200)], ids=str)
def test_dense_tokens(rng, tokens):
    check_node(node(rng, None, Sizes(E=5, H=48, I=24, k=3), tokens=tokens))


@pytest.mark.cpu_only("CUDA packs experts at build")
def test_dense_weights_that_are_not_initializers(rng):
    check_node(node(rng, None, runtime=True), dynamic=False)


# ------------------------------------------------------------------------------------------------------------- integers


@pytest.mark.parametrize("zero_points", [None, "packed"])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 0])
@pytest.mark.parametrize("bits", [4, 8])
def test_bits_blocks_zero_points(rng, bits, block, zero_points):
    level = LEVEL_4 if bits == 8 and block else None  # ORT CPU has int8 activations at every level for 8 bits
    n = qmoe(rng, bits=bits, block=block, zero_points=zero_points, sizes=Sizes(H=128, I=128), weights_prepacked=0)
    check_node(n, ort_tolerance=ORT_LEVEL_4 if level else Tolerance(1e-4))


@pytest.mark.parametrize("zero_points", [None, "packed"])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 0])
def test_two_bits(rng, block, zero_points):
    n = qmoe(rng, bits=2, block=block, zero_points=zero_points, sizes=Sizes(H=128, I=128))
    check_node(n, ort_tolerance=Tolerance(3e-2))


@pytest.mark.parametrize("block", [512, 256])
def test_large_blocks(rng, block):
    n = qmoe(rng, block=block, zero_points="packed", sizes=Sizes(E=2, H=512, I=1024))
    check_node(n, ort_tolerance=Tolerance(1e-4))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("H, I", [(96, 32), (160, 96), (32, 224)])
def test_odd_counts_of_blocks(rng, bits, H, I):  # noqa: E741
    """Rows of zero points end on whole bytes."""
    n = qmoe(rng, bits=bits, zero_points="packed", sizes=Sizes(H=H, I=I))
    check_node(n, ort_tolerance=ORT_LEVEL_4 if bits != 4 else Tolerance(1e-4))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("H, I", [(40, 24), (12, 36), (200, 8)])
def test_rows_of_any_length(rng, bits, H, I):  # noqa: E741
    n = qmoe(rng, bits=bits, block=0, zero_points="packed", sizes=Sizes(H=H, I=I))
    check_node(n, ort_tolerance=Tolerance(1e-4))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype, scale", [(F16, F16), (BF16, BF16), (F16, F32), (F32, F16)], ids=name_of)
def test_types(rng, dtype, scale, bits):
    n = qmoe(rng, bits=bits, dtype=dtype, scale=scale, zero_points="packed")
    check_node(n, ort_tolerance=ORT_LEVEL_4)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
def test_activations(rng, dtype, activation):
    check_node(qmoe(rng, activation=activation, fusion=0, dtype=dtype, weights_prepacked=0))


@pytest.mark.parametrize("activation, fusion", [("relu2", 0), ("geglu", 1), ("geglu", 2), ("swiglu", 2)])
def test_beyond_ort_cpu(rng, activation, fusion):
    check_node(qmoe(rng, activation=activation, fusion=fusion), ort_cpu="refuses")


def test_unfused_swiglu_without_an_fc3_is_interleaved(rng):
    """As older exports of gpt-oss have it; ORT CPU wants the attribute."""
    check_node(qmoe(rng, fusion=0), ort_cpu="refuses")


@pytest.mark.parametrize("fusion", [1, 2])
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("alpha, beta", [(None, None), (1.702, 1.0)])
def test_swiglu(rng, alpha, beta, limit, fusion):
    n = qmoe(rng, alpha=alpha, beta=beta, limit=limit, fusion=fusion)
    check_node(n, ort_cpu="agrees" if fusion == 1 else "refuses")


@pytest.mark.parametrize("op", ["MoE", "QMoE"])
def test_swiglu_limit_after_activation(rng, op):
    how = dict(alpha=1.3, beta=0.5, limit=0.4, limit_after=1)
    check_node(node(rng, None, **how) if op == "MoE" else qmoe(rng, **how), ort_cpu="refuses")


@pytest.mark.parametrize("activation", ["swiglu", "silu", "relu"])
@pytest.mark.parametrize("bits", [4, (4, 8, 2), (8, 4, 8)], ids=str)
def test_fc3(rng, bits, activation):
    n = qmoe(rng, bits=bits, activation=activation, fusion=0, fc3=True, zero_points="packed")
    check_node(n, ort_cpu="refuses")


@pytest.mark.parametrize("bits", [(4, 8, 4), (8, 4, 8), (2, 4, 2), (8, 2, 8)], ids=str)
def test_bits_of_each_projection(rng, bits):
    check_node(qmoe(rng, bits=bits), ort_cpu="refuses")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("zero_points", [None, "packed"])
@pytest.mark.parametrize("bits, block", [(3, 32), (3, 64), ((3, 4, 3), 32), ((4, 3, 4), 128)], ids=str)
def test_three_bits(rng, bits, block, zero_points, dtype):
    sizes = Sizes(H=256, I=128)

    def make(rng, E, N, K, which):
        width = bits if isinstance(bits, int) else bits[which - 1]
        matrix = quantized(rng, E, N, K, bits=width, block=block, scale=dtype)
        if zero_points:
            points = np.full((E, N, K // block), 1 << (width - 1), np.uint8)
            matrix.zero_points = pack(points, width)
        return matrix

    n = node(rng, make, sizes, dtype=dtype, weights_prepacked=0, **int_attrs(bits, block))
    check_node(n, ort_cpu="refuses" if isinstance(bits, tuple) or zero_points else "agrees")


@pytest.mark.parametrize("dtype", [F32, F16], ids=name_of)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_accuracy_level_4(rng, bits, dtype):
    n = qmoe(rng, bits=bits, dtype=dtype, sizes=Sizes(H=256, I=128), zero_points="packed", accuracy_level=4)
    check_node(n, tolerance=LEVEL_4, ort_tolerance=ORT_LEVEL_4)


@pytest.mark.cpu_only("CUDA packs experts at build")
def test_weights_that_are_not_initializers(rng):
    check_node(qmoe(rng, runtime=True, zero_points="packed"), dynamic=False)


@pytest.mark.parametrize("tokens", [2, 19, 120])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_tier(rng, tier, bits, tokens):
    """Experts of few rows and of many go different ways."""
    n = qmoe(rng, bits=bits, zero_points="packed", tokens=(tokens,))
    check_node(n, provider_options=tier, ort_tolerance=ORT_LEVEL_4)


@pytest.mark.parametrize("tokens", [2, 120])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
def test_every_tier_dense(rng, tier, dtype, tokens):
    check_node(node(rng, None, Sizes(H=72, I=40), dtype=dtype, tokens=(tokens,)), provider_options=tier)


@pytest.mark.parametrize("tokens", [2, 120])
@pytest.mark.parametrize("kind", ["fp4", "nvfp4", "fp8"])
def test_every_tier_of_small_floats(rng, tier, kind, tokens):
    if kind == "fp8":
        make = lambda rng, E, N, K, which: fp8(rng, E, N, K, block=32)  # noqa: E731
        attrs = dict(expert_weight_bits=8, block_size=32)
    else:
        make, attrs = float4(kind, pack_columns), {}
    n = node(rng, make, Sizes(H=96, I=64), quant_type=kind, tokens=(tokens,), **attrs)
    check_node(n, provider_options=tier, ort_cpu="refuses")


def test_every_tier_at_level_4(rng, tier):
    n = qmoe(rng, sizes=Sizes(H=256, I=128), tokens=(19,), accuracy_level=4)
    check_node(n, provider_options=tier, tolerance=LEVEL_4, ort_tolerance=ORT_LEVEL_4)


# -------------------------------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize("op", ["MoE", "QMoE"])
def test_equal_logits(rng, op):
    """Of equal logits the later expert goes first."""
    s = Sizes(E=6, k=2)
    logits = rng.integers(0, 2, (40, s.E)).astype(F32)
    make = node(rng, None, s, logits=logits, tokens=(40,)) if op == "MoE" else None
    check_node(make or qmoe(rng, sizes=s, logits=logits, tokens=(40,)))


def test_negative_logits(rng):
    s = Sizes(E=9, k=3)
    logits = -np.abs(normal(rng, (7, s.E), F32, 30.0)) - 5
    check_node(qmoe(rng, sizes=s, logits=logits, tokens=(7,)))


@pytest.mark.parametrize("k", [1, 4])
def test_all_experts_or_one(rng, k):
    check_node(qmoe(rng, sizes=Sizes(E=4, k=k)))


def test_one_expert_for_all_tokens(rng):
    """The others have no token."""
    logits = normal(rng, (33, 4))
    logits[:, 2] = 50
    check_node(qmoe(rng, sizes=Sizes(k=1), logits=logits, tokens=(33,)))


@pytest.mark.parametrize("E, k, tokens", [(256, 8, 3), (512, 16, 3), (700, 5, 3), (700, 5, 20)])
def test_many_experts(rng, E, k, tokens):
    check_node(qmoe(rng, sizes=Sizes(E=E, H=32, I=32, k=k), tokens=(tokens,), weights_prepacked=0))


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("normalize", [0, 1])
def test_logits_that_say_no(rng, normalize, tokens):
    """Experts of probability zero are chosen where no others are left."""
    logits = np.full((tokens, 6), -np.inf, F32)
    logits[:, 2] = 1
    check_node(node(rng, None, Sizes(E=6, k=3), logits=logits, normalize=normalize, tokens=(tokens,)))


def test_more_rows_than_one_pass(rng):
    """An expert of all tokens, and more pairs than are worked on at once."""
    logits = normal(rng, (2100, 4))
    logits[:, 1] = 50
    s = Sizes(H=32, I=16, k=4)
    check_node(qmoe(rng, block=16, sizes=s, logits=logits, tokens=(2100,)))


@pytest.mark.parametrize("tokens", [(1,), (2,), (3, 7), (0,), (2, 0), (130,)], ids=str)
def test_tokens(rng, tokens):
    check_node(qmoe(rng, tokens=tokens))


@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
def test_router_weights(rng, dtype, normalize):
    weights = rng.uniform(0, 1, (5, 4)).astype(dtype)
    check_node(qmoe(rng, dtype=dtype, normalize=normalize, weights=weights))


def test_router_weights_of_zero(rng):
    check_node(qmoe(rng, weights=np.zeros((5, 4), F32), bias=True))


def test_router_weights_may_be_negative(rng):
    """ORT CPU leaves those experts out."""
    weights = rng.uniform(-1, 1, (5, 4)).astype(F32)
    differs(qmoe(rng, normalize=0, weights=weights))


def test_weights_that_are_not_normalized(rng):
    """The shares of a softmax over all experts, as in MoE; ORT CPU's QMoE normalises them always."""
    differs(qmoe(rng, sizes=Sizes(E=16, k=2), normalize=0))


@pytest.mark.parametrize("op", ["MoE", "QMoE"])
@pytest.mark.parametrize("E", [2, 8, 16, 40])
def test_sparse_mixer(rng, E, op):
    """ORT CPU does not look at the attribute."""
    logits = np.round(normal(rng, (30, E), F32, 2.0) * 8) / 8
    logits[: 10] = 3 + 0.01 * rng.integers(0, 6, (10, E))
    how = dict(mixer=1, logits=logits, tokens=(30,), normalize=0)
    differs(node(rng, None, Sizes(E=E), **how) if op == "MoE" else qmoe(rng, sizes=Sizes(E=E), **how))


# ---------------------------------------------------------------------------------------------------- prepacked weights


def cutlass(bits, block, **how):
    return ints(bits, block, packer=pack_cutlass, **how)


@pytest.mark.parametrize("said", [True, False], ids=["", "unsaid"])
@pytest.mark.parametrize("zero_points", [None, "packed"])
@pytest.mark.parametrize("block", [32, 64, 128, 0])
@pytest.mark.parametrize("bits", [4, 8])
def test_prepacked_for_cutlass(rng, bits, block, zero_points, said):
    """Exporters leave `weights_prepacked` out; ORT CPU then reads such weights as if they lay in rows. (Those of 8
    bits it reads so always.)"""
    make = cutlass(bits, block, zero_points=zero_points)
    attrs = int_attrs(bits, block) | ({"weights_prepacked": 1} if said else {})
    n = node(rng, make, Sizes(H=128, I=256), tokens=(9,), **attrs)
    if not said or bits == 8:
        differs(n)
    else:
        check_node(n, ort_cpu="agrees" if block and not zero_points else "refuses")


@pytest.mark.parametrize("activation, fusion", [("swiglu", 1), ("swiglu", 2), ("relu", 0)])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
def test_prepacked_half_types(rng, dtype, activation, fusion):
    make = cutlass(4, 32, scale=dtype)
    how = dict(activation=activation, fusion=fusion, dtype=dtype, **int_attrs())
    n = node(rng, make, Sizes(H=64, I=128), weights_prepacked=1, **how)
    check_node(n, ort_cpu="agrees" if fusion == 1 else "refuses")


@pytest.mark.parametrize("dims", ["prepacked", "rows"])
def test_prepacked_by_the_attribute(rng, dims):
    """The dims may then be either's: the bytes are what the attribute says."""
    n = node(rng, cutlass(4, 32), Sizes(H=128, I=128), weights_prepacked=1, **int_attrs())
    if dims == "rows":
        for slot in (2, 5):
            E, K, packed = n.inputs[slot].shape
            n.inputs[slot] = n.inputs[slot].reshape(E, packed * 2, K // 2)
    check_node(n)


# ---------------------------------------------------------------------------------------------------------- fp4, fp8


def float4(kind, packer):
    return lambda rng, E, N, K, which: fp4(rng, E, N, K, kind=kind, packer=packer)


def rows_of_four(codes):
    return pack_bits(codes, 4)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
@pytest.mark.parametrize("kind", ["fp4", "nvfp4"])
def test_fp4(rng, kind, dtype):
    n = node(rng, float4(kind, pack_columns), Sizes(H=96, I=64), dtype=dtype, quant_type=kind)
    check_node(n, ort_cpu="refuses")


def test_fp4_in_rows(rng):
    n = node(rng, float4("fp4", rows_of_four), Sizes(H=96, I=64), quant_type="fp4", block_size=32)
    check_node(n, ort_cpu="refuses")


@pytest.mark.parametrize("dims", ["columns", "rows"])
def test_nvfp4_in_rows(rng, dims):
    """weights_prepacked 1: rows of K, under the dims of the other layout."""
    n = node(rng, float4("nvfp4", rows_of_four), Sizes(H=96, I=64), quant_type="nvfp4", weights_prepacked=1)
    if dims == "columns":
        for slot in (2, 5):
            E, N, packed = n.inputs[slot].shape
            n.inputs[slot] = n.inputs[slot].reshape(E, packed * 2, N // 2)
    check_node(n, ort_tolerance=ORT_LEVEL_4)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
@pytest.mark.parametrize("block", [0, 16, 128])
def test_fp8(rng, block, dtype):
    make = lambda rng, E, N, K, which: fp8(rng, E, N, K, block=block)  # noqa: E731
    sizes = Sizes(E=3, H=200, I=72)
    attrs = dict(quant_type="fp8", expert_weight_bits=8) | ({"block_size": block} if block else {})
    check_node(node(rng, make, sizes, dtype=dtype, **attrs), ort_cpu="refuses")


def test_fp8_fc3(rng):
    make = lambda rng, E, N, K, which: fp8(rng, E, N, K, block=32, scale=F16)  # noqa: E731
    n = node(rng, make, fusion=0, fc3=True, quant_type="fp8", expert_weight_bits=8, block_size=32)
    check_node(n, ort_cpu="refuses")
