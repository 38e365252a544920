"""Products over the sizes and types that choose other kernels: few rows and many, ragged edges, empty sums, every way that
a batch broadcasts, right operands that are constant and that arrive with the run."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import harness
from buffers import run_bound
from harness import BF16, F16, F32, Tolerance, name_of, normal
from reference import f64
from target import STATE
from test_matmul_nbits import case
from test_standard_ops import run

F64 = np.dtype("f8")
MS = "com.microsoft"
# ORT CPU sums f16 in f16.
HALF = {"ort_tolerance": Tolerance(1e-2)}
FLOATS = (F32, F16, BF16, F64)


def product(rng, a, b, dtype, constant=False, **how):
    a, b = normal(rng, a, dtype), normal(rng, b, dtype)
    run("MatMul", [a, b], [f64(a) @ f64(b)], out_types={0: dtype}, initializers=(1,) if constant else (), **HALF, **how)


# The last ones have few tiles, and long rows that blocks of a GPU share.
SIZES = [(1, 1, 64), (1, 33, 96), (3, 17, 130), (8, 16, 64), (9, 40, 95), (16, 130, 72), (17, 65, 65), (65, 63, 200),
         (130, 136, 136), (2, 5, 0), (40, 24, 0), (1, 300, 8), (70, 9, 1),
         (17, 65, 1030), (70, 130, 2112)]  # fmt: skip


@pytest.mark.parametrize("constant", [True, False], ids=["weight", "dynamic"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("M, N, K", SIZES)
def test_sizes(rng, M, N, K, dtype, constant):
    product(rng, (M, K), (K, N), dtype, constant)


@pytest.mark.parametrize("constant", [True, False], ids=["weight", "dynamic"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=name_of)
@pytest.mark.parametrize("M, N, K", [(5, 40, 128), (70, 130, 96)])
def test_every_tier(rng, tier, M, N, K, dtype, constant):
    product(rng, (M, K), (K, N), dtype, constant, provider_options=tier)


# The last ones broadcast in more ways than a launch has dims for.
BATCHES = [((3,), (3,)), ((1,), (3,)), ((3,), (1,)), ((2, 3), (3,)), ((2, 1), (3,)), ((3,), (2, 1)), ((2, 1, 2), (1, 3, 1)),
           ((0,), (1,)), ((2, 1, 2, 1, 2, 1), (1, 2, 1, 2, 1, 2)), ((2, 1, 2, 1, 2, 1, 2), (1, 2, 1, 2, 1, 2, 1))]  # fmt: skip


@pytest.mark.parametrize("constant", [True, False], ids=["weight", "dynamic"])
@pytest.mark.parametrize("dtype", [F32, F16, F64], ids=name_of)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_batches(rng, batch, dtype, constant):
    for M in (2, 18):
        product(rng, (*batch[0], M, 24), (*batch[1], 24, 19), dtype, constant)


@pytest.mark.parametrize("dtype", [np.dtype(t) for t in ("i4", "u4", "i8", "u8")], ids=name_of)
def test_whole_numbers(rng, dtype):
    a, b = rng.integers(0, 2**31 - 1, (2, 5, 19)).astype(dtype), rng.integers(0, 2**31 - 1, (19, 7)).astype(dtype)
    expected = (a @ b).astype(dtype)
    # They wrap; the check compares in float64.
    if dtype.itemsize == 8:
        a, b = a % 1000, b % 1000
        expected = a @ b
    run("MatMul", [a, b], [expected], out_types={0: dtype})


@pytest.mark.parametrize("constant", [True, False], ids=["weight", "dynamic"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_fused_matmul(rng, transposed, dtype, constant):
    for M, batch in ((1, ()), (6, (3,)), (37, (2,))):
        a, b = normal(rng, (*batch, M, 41), dtype), normal(rng, (*batch, 41, 23), dtype)
        expected = -0.5 * (f64(a) @ f64(b))
        a, b = (np.ascontiguousarray(np.swapaxes(x, -1, -2)) if t else x for x, t in zip((a, b), transposed))
        run(
            "FusedMatMul", [a, b], [expected], dict(alpha=-0.5, transA=transposed[0], transB=transposed[1]), domain=MS,
            out_types={0: dtype}, initializers=(1,) if constant else (), **HALF,
        )


@pytest.mark.parametrize("bias", [None, (23,), (1, 23), "rows", "all", ()], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_gemm(rng, transposed, dtype, bias):
    for M, K in ((1, 40), (7, 33), (50, 72), (3, 0)):
        a, b = normal(rng, (M, K), dtype), normal(rng, (K, 23), dtype)
        shape = {"rows": (M, 1), "all": (M, 23)}.get(bias, bias) if isinstance(bias, str) else bias
        c = None if bias is None else normal(rng, shape, dtype)
        expected = 0.5 * (f64(a) @ f64(b)) + (0 if c is None else -2.0 * f64(c))
        a, b = (np.ascontiguousarray(x.T) if t else x for x, t in zip((a, b), transposed))
        attrs = dict(alpha=0.5, beta=-2.0, transA=transposed[0], transB=transposed[1])
        run("Gemm", [a, b, c], [expected], attrs, out_types={0: dtype}, initializers=(1,) if M % 2 else (), **HALF)


@pytest.mark.parametrize("M", [1, 9, 17, 70])
@pytest.mark.parametrize("zero_points", [None, "packed", "float"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_matmul_nbits_half(rng, bits, block_size, zero_points, M):
    """Ragged N; K in whole blocks and in part of one."""
    dtype = BF16 if M == 9 else F16
    refused = dtype == BF16 or (bits == 8 and zero_points == "float")
    for N, K in ((19, 2 * block_size), (130, 2 * block_size + 13)):
        case(
            rng, M=M, N=N, K=K, bits=bits, block_size=block_size, dtype=dtype, zero_points=zero_points, bias=M == 70,
            ort_cpu="refuses" if refused else "agrees",
        )


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("M, N, K", [(17, 48, 1024), (64, 40, 2112), (130, 24, 4096)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_matmul_nbits_long_rows(rng, bits, M, N, K, dtype):
    """Few tiles: blocks share the columns."""
    ort_cpu = "refuses" if dtype == BF16 else "agrees"
    case(rng, M=M, N=N, K=K, bits=bits, dtype=dtype, zero_points="packed", bias=True, ort_cpu=ort_cpu)


# M, N for which the fake GPU's kernel makes such tiles; all are cut off at both ends.
TILES = {"small": (17, 50), "medium": (60, 2000), "large": (200, 1000)}


def check_tile(kernel, dtype):
    if STATE.fake:
        assert f"{kernel}_{name_of(dtype)}" in STATE.fake.kernels()
        STATE.fake.clear_log()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize(
    "bits, block_size, zero_points",
    [(2, 16, "packed"), (2, 64, None), (4, 16, "float"), (4, 32, "packed"), (4, 128, None), (4, 256, "packed"),
     (8, 16, "packed"), (8, 32, None), (8, 64, "float")],
)  # fmt: skip
@pytest.mark.parametrize("tile", TILES)
def test_matmul_nbits_tiles(rng, tile, bits, block_size, zero_points, dtype):
    M, N = TILES[tile]
    refused = dtype == BF16 or (bits == 8 and zero_points == "float")
    case(
        rng, M=M, N=N, K=block_size + 136, bits=bits, block_size=block_size, dtype=dtype, zero_points=zero_points,
        bias=block_size == 32, ort_cpu="refuses" if refused else "agrees",
    )
    check_tile(f"wgemm_{bits}_{tile}", dtype)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("K", [136, 131], ids=["vectors", "ragged"])
@pytest.mark.parametrize("tile", TILES)
def test_tiles(rng, tile, K, dtype):
    M, N = TILES[tile]
    product(rng, (M, K), (K, N), dtype, True)
    check_tile(f"wgemm_{tile}", dtype)


@pytest.mark.parametrize("dtype", [F32, F16], ids=name_of)
@pytest.mark.parametrize("M", [4, 40])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_matmul_nbits_every_tier(rng, tier, bits, M, dtype):
    case(rng, M=M, N=70, K=320, bits=bits, dtype=dtype, zero_points="packed", provider_options=tier)


@pytest.mark.parametrize("bits, zero_points", [(4, "packed"), (8, None)], ids=str)
def test_quantised_weights_of_many_megabytes(rng, bits, zero_points):
    """They reach a GPU in parts."""
    case(rng, M=1, N=9001, K=4096, bits=bits, dtype=F16, zero_points=zero_points)


@pytest.mark.parametrize("transposed", [0, 1])
def test_weights_of_many_megabytes(rng, transposed):
    a, b = normal(rng, (2, 2111), F16), normal(rng, (2, 2111, 4101), F16)
    expected = f64(a[:, None]) @ f64(b)
    b = np.ascontiguousarray(np.swapaxes(b, -1, -2)) if transposed else b
    run(
        "FusedMatMul", [a[:, None], b], [expected], dict(transB=transposed), domain=MS, out_types={0: F16},
        initializers=(1,), **HALF,
    )


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("external", [True, False], ids=["external", "inline"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_a_weight_in_several_shapes(rng, tmp_path, dtype, external, level):
    """Products share an initializer, each through a Reshape of its own."""
    x, y, w = normal(rng, (3, 128), dtype), normal(rng, (3, 512), dtype), normal(rng, (128, 512), dtype)
    shapes = {"tall": (512, 128), "two": (2, 128, 256), "four": (2, 2, 128, 128)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["as_it_is"])]
    constants = [numpy_helper.from_array(w, "w")]
    expected = {"as_it_is": f64(x) @ f64(w)}
    for name, shape in shapes.items():
        left = y if name == "tall" else x
        constants.append(numpy_helper.from_array(np.array(shape), f"shape_{name}"))
        nodes.append(helper.make_node("Reshape", ["w", f"shape_{name}"], [f"w_{name}"]))
        nodes.append(helper.make_node("MatMul", ["y" if left is y else "x", f"w_{name}"], [name]))
        expected[name] = f64(left) @ f64(w).reshape(shape)
    kind = harness.onnx_type(dtype)
    given = [helper.make_tensor_value_info(n, kind, ["M", v.shape[1]]) for n, v in (("x", x), ("y", y))]
    graph = helper.make_graph(
        nodes, "g", given, [helper.make_tensor_value_info(n, kind, None) for n in expected], constants
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = str(tmp_path / "model.onnx")
    onnx.save(model, path, save_as_external_data=external, location="weights")
    session = harness.ep_session(path, level=getattr(ort.GraphOptimizationLevel, level))
    harness.assert_all_on_ep(session)
    got = run_bound(session, {"x": x, "y": y}, {name: (value.shape, dtype) for name, value in expected.items()})
    for name, value in expected.items():
        harness.assert_close(got[name], value, harness.tolerance_for(dtype), name)


@pytest.mark.cuda_only("the order of a GPU's threads")
@pytest.mark.parametrize("dtype", [F32, F16], ids=name_of)
@pytest.mark.parametrize("M, N, K", [(1, 40, 200), (9, 65, 130), (70, 70, 72)])
def test_threads_in_another_order(rng, M, N, K, dtype):
    if not STATE.fake:
        pytest.skip("a GPU's own order differs anyway")
    STATE.fake.descending(1)
    try:
        product(rng, (M, K), (K, N), dtype)
        product(rng, (M, K), (K, N), dtype, True)
        case(rng, M=M, N=N, K=K, dtype=dtype, zero_points="packed")
    finally:
        STATE.fake.descending(0)


@pytest.mark.cuda_only("launches that overlap")
@pytest.mark.parametrize("constant", [True, False], ids=["weight", "dynamic"])
def test_weights_of_the_same_run_are_waited_for(rng, constant):
    """The GEMV reads its first weights before it waits for the kernel in front: not while that kernel writes them."""
    if not STATE.fake:
        pytest.skip("only the fake driver says which launches may overlap")
    a, b = normal(rng, (1, 64), F16), normal(rng, (64, 40), F16)
    STATE.fake.clear_log()
    model = harness.build_node("MatMul", [a, b], opset=21, initializers=(1,) if constant else ())
    harness.run_node(model, provider_options={"launch_overlap": "1", "cuda_graph": "off"})
    assert "gemv_f16" in STATE.fake.kernels()
    assert ("gemv_f16" in STATE.fake.overlapping()) == constant
