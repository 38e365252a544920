"""com.microsoft::MoE and com.microsoft::QMoE: many tokens in every format, what is declined, whole decoders."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import harness
from harness import BF16, F16, F32, Tolerance, name_of
from reference.moe import pack_columns, pack_cutlass
from reference.quant import unpack_bits
from test_moe import (
    MS,
    ORT_LEVEL_4,
    Matrix,
    Node,
    Sizes,
    check_node,
    cutlass,
    float4,
    fp8,
    int_attrs,
    ints,
    node,
    qmoe,
    rows_of_four,
)
from tests.models import qwen35

# -------------------------------------------------------------------------------------------- many tokens, every format

FORMATS = {
    "dense": (None, {}),
    "int2": (ints(2, 32, zero_points="packed"), int_attrs(2)),
    "int4": (ints(4, 32), int_attrs()),
    "int4 16": (ints(4, 16, zero_points="packed"), int_attrs(4, 16)),
    "int4 128": (ints(4, 128, zero_points="packed"), int_attrs(4, 128)),
    "int4, float scales": (ints(4, 32, zero_points="packed"), int_attrs()),
    "int8": (ints(8, 64, zero_points="packed"), int_attrs(8, 64)),
    "fp4": (float4("fp4", pack_columns), dict(quant_type="fp4")),
    "nvfp4": (float4("nvfp4", pack_columns), dict(quant_type="nvfp4")),
    "fp8": (
        lambda rng, E, N, K, which: fp8(rng, E, N, K, block=32),
        dict(quant_type="fp8", expert_weight_bits=8, block_size=32),
    ),
}


def of_format(rng, name, dtype, sizes, **how) -> Node:
    make, attrs = FORMATS[name]
    if name.startswith("int"):
        attrs = attrs | {"weights_prepacked": 0}
    if name.startswith("int") and "float" not in name:
        inner = make
        make = lambda rng, E, N, K, which: in_type(inner(rng, E, N, K, which), dtype)  # noqa: E731
    return node(rng, make, sizes, dtype=dtype, **attrs, **how)


def in_type(matrix: Matrix, dtype) -> Matrix:
    """The same with scales of another type; they are rounded first."""
    blocks = np.repeat(matrix.scales, -(-matrix.exact.shape[2] // matrix.scales.shape[2]), axis=2)
    scales = matrix.scales.astype(dtype)
    again = np.repeat(scales.astype(np.float64), -(-matrix.exact.shape[2] // matrix.scales.shape[2]), axis=2)
    exact = np.rint(matrix.exact / blocks) * again
    return dataclasses.replace(matrix, exact=exact, scales=scales)


def close_to_float64(n: Node) -> None:
    """Without ORT CPU, whose own rounding other tests bound."""
    if harness.oracles_only():
        return
    model = harness.build_node(n.op, n.inputs, n.attrs, domain=MS, initializers=n.constants)
    dtype = np.dtype(n.inputs[0].dtype)
    got = harness.run_node(model, known={"out0": (n.reference.shape, dtype)})["out0"]
    harness.assert_close(got, n.reference, harness.tolerance_for(dtype), f"{n.op}: EP against float64")


@pytest.mark.parametrize("tokens", [1, 7, 12, 210])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_every_format(rng, name, dtype, tokens):
    close_to_float64(of_format(rng, name, dtype, Sizes(E=3, H=128, I=256), tokens=(tokens,)))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("zero_points", [None, "packed"])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_whole_groups_of_columns(rng, block, zero_points, dtype, tokens):
    make = ints(4, block, zero_points=zero_points, scale=dtype)
    attrs = int_attrs(4, block, weights_prepacked=0)
    close_to_float64(node(rng, make, Sizes(E=9, H=640, I=384, k=3), dtype=dtype, tokens=(tokens,), **attrs))


@pytest.mark.parametrize("tokens", [2, 11])
@pytest.mark.parametrize("name", ["int4", "int8", "fp4"])
def test_columns_that_whole_groups_would_pad(rng, name, tokens):
    close_to_float64(of_format(rng, name, F16, Sizes(E=2, H=1600, I=1600), tokens=(tokens,)))


@pytest.mark.parametrize("tokens", [4, 40])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("activation", ["relu", "relu2", "gelu", "silu", "identity", "swiglu"])
def test_fc3_of_halves(rng, activation, dtype, tokens):
    sizes = Sizes(H=100, I=15)
    close_to_float64(node(rng, None, sizes, activation=activation, fusion=0, fc3=True, dtype=dtype, tokens=(tokens,)))


@pytest.mark.parametrize("tokens", [2, 30])
@pytest.mark.parametrize("H, I", [(1, 1), (7, 3), (17, 33), (100, 15), (16, 16), (200, 130)])
def test_odd_sizes_of_halves(rng, H, I, tokens):  # noqa: E741
    close_to_float64(node(rng, None, Sizes(H=H, I=I), dtype=F16, tokens=(tokens,)))


def test_more_tokens_than_one_pass(rng):
    close_to_float64(node(rng, None, Sizes(E=3, H=16, I=8, k=1), dtype=F16, tokens=(4500,)))


# ------------------------------------------------------------------------------------------------------------- declines


def declined(n: Node, *words):
    model = harness.build_node(n.op, n.inputs, n.attrs, domain=MS, initializers=n.constants)
    harness.check_declined(model, n.op, *words)


def test_dims_of_either_layout_are_declined(rng):
    n = qmoe(rng, sizes=Sizes(H=64, I=64), activation="relu", fusion=0)
    declined(n, "weights_prepacked to 0 or 1")


def test_prepacked_dims_of_rows_are_declined(rng):
    declined(node(rng, cutlass(4, 32), Sizes(H=64, I=128), weights_prepacked=0, **int_attrs()), "dims of prepacked")


def test_nvfp4_rows_without_their_attribute_are_declined(rng):
    declined(node(rng, float4("nvfp4", rows_of_four), Sizes(H=96, I=64), quant_type="nvfp4"), "weights_prepacked is 1")


def test_fp8_activations_are_declined(rng):
    declined(node(rng, float4("fp4", pack_columns), Sizes(H=96, I=64), quant_type="wfp4afp8"), "quant_type")


@pytest.mark.cuda_only("the CPU EP unpacks them in the Run")
@pytest.mark.parametrize("op", ["MoE", "QMoE"])
def test_weights_that_are_not_initializers_are_declined(rng, op):
    n = node(rng, None, runtime=True) if op == "MoE" else qmoe(rng, runtime=True)
    model = harness.build_node(n.op, n.inputs, n.attrs, domain=MS, dynamic=False)
    harness.check_declined(model, n.op, "input 2", "a constant")


@pytest.mark.parametrize(
    "attrs",
    [
        dict(expert_weight_bits=5), dict(block_size=24), dict(block_size=8), dict(weights_prepacked=2),
        dict(activation_type="tanh"), dict(swiglu_fusion=3), dict(k=5), dict(k=0), dict(use_sparse_mixer=1, k=3),
        dict(quant_type="int4"), dict(activation_type="relu"), dict(activation_type="geglu", swiglu_fusion=0),
    ],
    ids=str,
)  # fmt: skip
def test_attributes_outside_the_schema(rng, attrs):
    n = qmoe(rng, sizes=Sizes(k=2))
    n.attrs |= attrs
    model = harness.build_node(n.op, n.inputs, n.attrs, domain=MS, initializers=n.constants)
    harness.check_rejected(model, "QMoE")


@pytest.mark.parametrize(
    "slot, shape",
    [
        (2, (4, 64, 31)), (2, (4, 63, 32)), (2, (3, 64, 32)), (3, (4, 64, 3)), (3, (4, 64)), (4, (4, 63)),
        (5, (4, 63, 16)), (6, (4, 64, 2)), (7, (4, 65)), (11, (4, 64, 2)), (12, (4, 33)),
    ],
    ids=str,
)  # fmt: skip
def test_shapes_outside_the_schema(rng, slot, shape):
    n = qmoe(rng, zero_points="packed")
    n.inputs[slot] = np.zeros(shape, n.inputs[slot].dtype)
    model = harness.build_node(n.op, n.inputs, n.attrs, domain=MS, initializers=n.constants)
    harness.check_rejected(model, "QMoE")


@pytest.mark.parametrize("slot, shape", [(0, (5, 63)), (1, (4, 4)), (1, (5, 5)), (14, (5, 3))], ids=str)
def test_shapes_at_run_time(rng, slot, shape):
    n = qmoe(rng, weights=rng.uniform(0, 1, (5, 4)).astype(F32))
    n.inputs[slot] = np.zeros(shape, F32)
    model = harness.build_node(n.op, n.inputs, n.attrs, domain=MS, initializers=n.constants)
    harness.check_hostile(model)


def test_scales_behind_casts(rng):
    """Exporters leave the scales in float16 and cast them; ORT may or may not have folded that."""
    n = qmoe(rng, scale=F16)
    model = harness.build_node(
        n.op, [*n.inputs[:3], n.inputs[3].astype(F32), *n.inputs[4:6], n.inputs[6].astype(F32), *n.inputs[7:]], n.attrs,
        domain=MS, initializers=n.constants, dynamic=False,
    )  # fmt: skip
    graph = model.proto.graph
    for slot in (3, 6):
        kept = [t for t in graph.initializer if t.name != f"in{slot}"]
        half = helper.make_tensor(f"half{slot}", TensorProto.FLOAT16, n.inputs[slot].transpose(2, 0, 1).shape,
                                  n.inputs[slot].transpose(2, 0, 1).tobytes(), raw=True)  # fmt: skip
        del graph.initializer[:]
        graph.initializer.extend([*kept, half])
        graph.node.insert(0, helper.make_node("Transpose", [f"turned{slot}"], [f"in{slot}"], perm=[1, 2, 0]))
        graph.node.insert(0, helper.make_node("Cast", [f"half{slot}"], [f"turned{slot}"], to=TensorProto.FLOAT))
    if harness.oracles_only():
        return
    levels = harness.ort.GraphOptimizationLevel
    for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_ALL):
        session = harness.ep_session(model.serialize(), level=level)
        harness.assert_all_on_ep(session)
        got = harness.run_bound(session, model.feeds, {"out0": (n.reference.shape, F32)})["out0"]
        harness.assert_close(got, n.reference, harness.tolerance_for(F32), f"QMoE at level {level}")


def test_random_nodes(rng):
    """Sizes, types and attributes drawn together."""
    for _ in range(25):
        bits, block = int(rng.choice([2, 4, 8])), int(rng.choice([0, 16, 32, 64]))
        unit = block or 8
        E = int(rng.integers(1, 12))
        sizes = Sizes(E, unit * int(rng.integers(1, 5)), unit * int(rng.integers(1, 5)), int(rng.integers(1, E + 1)))
        dtype = [F32, F16, BF16][rng.integers(3)]
        activation = str(rng.choice(["swiglu", "relu", "gelu", "silu", "identity"]))
        n = qmoe(
            rng, bits=bits, block=block, sizes=sizes, dtype=dtype, activation=activation,
            fusion=int(activation == "swiglu"), zero_points="packed" if rng.integers(2) else None,
            bias=bool(rng.integers(2)), tokens=(int(rng.integers(1, 30)),), weights_prepacked=0,
        )  # fmt: skip
        check_node(n, ort_tolerance=ORT_LEVEL_4)


def test_decoder_with_experts(tmp_path, request):
    """A generated hybrid decoder is one fused node, and as good as ORT CPU's; packed for CUTLASS, its every bit is the
    same."""
    seed = request.config.stash_seed
    qwen35.generate(qwen35.SIZES["moe-tiny"], tmp_path, seed=seed)
    model = onnx.load(tmp_path / "model.onnx")
    for node in model.graph.node:  # f32 throughout: what is off then is a mistake
        kept = [a for a in node.attribute if a.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
    packed = onnx.ModelProto()
    packed.CopyFrom(model)
    tensors = {t.name: t for t in packed.graph.initializer}
    for node in packed.graph.node:
        if node.op_type == "QMoE":
            for slot in (2, 5):
                codes = unpack_bits(numpy_helper.to_array(tensors[node.input[slot]]), 4)
                tensors[node.input[slot]].CopyFrom(numpy_helper.from_array(pack_cutlass(codes, 4), node.input[slot]))
    sessions = [harness.cpu_session(model.SerializeToString())]
    if not harness.oracles_only():
        sessions += [harness.ep_session(m.SerializeToString()) for m in (model, packed)]
        for session in sessions[1:]:
            harness.assert_all_on_ep(session)
            assert harness.fused_groups(session) == 1
    feeds, tokens = {}, 9
    for given in sessions[0].get_inputs():
        sizes = {"batch_size": 1, "past_sequence_length": 0, "kv_cache_dim": 64}
        shape = [d if isinstance(d, int) else sizes.get(d, tokens) for d in given.shape]
        feeds[given.name] = np.zeros(shape, F32 if "float" in given.type else np.int64)
    feeds["input_ids"] = np.random.default_rng(seed).integers(0, 1024, (1, tokens))
    feeds["attention_mask"] += 1
    feeds["position_ids"] += np.arange(tokens)
    theirs, *ours = ([np.asarray(v) for v in session.run(None, feeds)] for session in sessions)
    for got in ours:
        for name, a, b, c in zip(sessions[0].get_outputs(), got, theirs, ours[0]):
            harness.assert_close(a, b, Tolerance(1e-4), name.name)
            np.testing.assert_array_equal(a, c)
