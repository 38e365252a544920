"""Products that share their input, with the norm that makes it and the gated activation that takes them, as one kernel.
The oracle is float64; a session with fusion off must agree, and the fake driver's log says which kernels ran."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import harness
import target
from buffers import onnx_type, run_bound
from harness import BF16, F16, F32, Tolerance, name_of, normal
from reference import f64, silu
from reference.norms import rms_norm
from reference.quant import matmul_nbits, pack_bits

pytestmark = pytest.mark.cuda_only("kernels that a device runs for several nodes")

MS = "com.microsoft"
EPSILON = 1e-6


@dataclasses.dataclass
class Products:
    """y_i = norm(x + skip) W_i^T + c_i; of a gated pair silu(y_0) y_1."""

    dtype: np.dtype = F16
    M: tuple = (1, 1)
    K: int = 256
    # Columns of each product; "f" in `kinds` is one by 16-bit weights.
    N: tuple = (48, 16, 12)
    kinds: str = "qqf"
    norm: str = "skip"  # skip, rms, none
    sum_read: bool = True
    gated: bool = False
    bias: bool = False
    block_size: int = 32
    zero_points: bool = False
    scale: float = 1  # of x and skip
    change: str = ""

    def build(self, rng):
        """The model, its feeds, and the exact outputs."""
        t, names, nodes, constants, outputs = onnx_type(self.dtype), {}, [], [], []

        def constant(value, name):
            constants.append(numpy_helper.from_array(value, name))
            return name

        def row():
            return (normal(rng, (*self.M, self.K), np.float32) * self.scale).astype(self.dtype)

        feeds = {"x": row()}
        total = f64(feeds["x"])
        gamma = normal(rng, self.K, self.dtype)
        x, exact = "x", total
        if self.norm == "skip":
            feeds["skip"] = row()
            total = total + f64(feeds["skip"])
            sums = ["", "", "sum"] if self.sum_read else []
            nodes.append(helper.make_node("SkipSimplifiedLayerNormalization", ["x", "skip", constant(gamma, "gamma")],
                                          ["normed", *sums], domain=MS, epsilon=EPSILON))  # fmt: skip
            if self.sum_read:
                outputs.append("sum")
                names["sum"] = total
        elif self.norm == "rms":
            nodes.append(helper.make_node("SimplifiedLayerNormalization", ["x", constant(gamma, "gamma")], ["normed"],
                                          axis=-1, epsilon=EPSILON))  # fmt: skip
        if self.norm != "none":
            x, exact = "normed", rms_norm(total, gamma, epsilon=EPSILON)
        if self.change == "norm_read":
            outputs.append("normed")
            names["normed"] = exact
        made = []
        for i, (n, kind) in enumerate(zip(self.N, self.kinds)):
            node, value = self.product(rng, i, n, kind, x, exact, constant)
            nodes.append(node)
            made.append(value)
        if self.gated:
            nodes.append(helper.make_node("Sigmoid", ["y0"], ["s"]))
            nodes.append(helper.make_node("Mul", ["y0", "s"], ["a"]))
            nodes.append(helper.make_node("Mul", ["y1", "a"] if self.change == "swapped" else ["a", "y1"], ["y"]))
            names["y"] = silu(made[0]) * made[1]
            outputs.append("y")
            if self.change == "gate_read":
                outputs.append("y0")
                names["y0"] = made[0]
        else:
            outputs += [f"y{i}" for i in range(len(made))]
            names |= {f"y{i}": value for i, value in enumerate(made)}
        info = helper.make_tensor_value_info
        rows = [f"M{i}" for i in range(len(self.M))]
        given = [info(name, t, [*rows, self.K]) for name in feeds]
        graph = helper.make_graph(nodes, "products", given, [info(o, t, None) for o in outputs], constants)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString(), feeds, names

    def product(self, rng, i, n, kind, x, exact, constant):
        if kind == "f":
            w = (normal(rng, (self.K, n)) / np.sqrt(self.K)).astype(self.dtype)
            return helper.make_node("MatMul", [x, constant(w, f"w{i}")], [f"y{i}"]), exact @ f64(w)
        blocks = self.K // self.block_size
        q = rng.integers(0, 16, (n, blocks, self.block_size), dtype=np.uint8)
        scales = (rng.uniform(0.5, 1.5, (n, blocks)) / 8 / np.sqrt(self.K)).astype(self.dtype)
        points = pack_bits(rng.integers(0, 16, (n, blocks), dtype=np.uint8), 4) if self.zero_points else None
        bias = normal(rng, n, self.dtype) if self.bias else None
        inputs = [x, constant(pack_bits(q, 4), f"b{i}"), constant(scales, f"s{i}")]
        inputs.append(constant(points, f"z{i}") if self.zero_points else "")
        inputs += ["", constant(bias, f"c{i}")] if self.bias else []
        node = helper.make_node("MatMulNBits", inputs, [f"y{i}"], domain=MS, K=self.K, N=n, bits=4, block_size=self.block_size)
        shared = dict(bits=4, block_size=self.block_size, N=n, K=self.K)
        return node, matmul_nbits(exact, pack_bits(q, 4), scales, points, bias, **shared)


def fused_kernels() -> list[str]:
    fake = target.STATE.fake
    return [k for k in fake.kernels() if k.startswith(("lean_", "halves_", "row_"))] if fake else []


def check(rng, case: Products, fused: int = 1):
    """`fused`: launches of the kernel for several nodes."""
    model, feeds, want = case.build(rng)
    tolerance = harness.tolerance_for(case.dtype)
    if case.change or not fused:
        # Nodes that stay apart round to their type in between: some roundings add up.
        tolerance = Tolerance(2 * tolerance.relative)
    got = {}
    for how, options in (("fused", {"fusion": "1"}), ("plain", {"fusion": "0"})):
        session = harness.ep_session(model, options)
        fake = target.STATE.fake
        if fake:
            fake.clear_log()
        got[how] = run_bound(session, feeds, {name: None for name in want})
        if fake:
            assert len(fused_kernels()) == (fused if how == "fused" else 0), fake.kernels()
    for name, reference in want.items():
        harness.assert_close(got["fused"][name], reference, tolerance, f"{name}: fused against float64")
        plain = harness.as_float64(got["plain"][name])
        harness.assert_close(got["fused"][name], plain, Tolerance(2 * tolerance.relative), f"{name}: against fusion=0")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("norm", ["skip", "rms", "none"])
@pytest.mark.parametrize("M", [(1, 1), (1, 3), (2, 4), (16, 1)], ids=str)
def test_products_of_one_input(rng, dtype, norm, M):
    check(rng, Products(dtype=dtype, norm=norm, M=M))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("M", [(1, 1), (3, 1), (1, 11)], ids=str)
@pytest.mark.parametrize("change", ["", "swapped"])
def test_a_gated_pair(rng, dtype, M, change):
    check(rng, Products(dtype=dtype, M=M, N=(400, 400), kinds="qq", gated=True, change=change))


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layouts(rng, block_size, zero_points, bias):
    check(rng, Products(block_size=block_size, zero_points=zero_points, bias=bias, N=(24, 40), kinds="qq", K=384))


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("K", [128, 384, 2048, 8448])
def test_widths(rng, K, block_size, zero_points):
    """Whole slices and halves of them, one a warp and several."""
    check(rng, Products(K=K, block_size=block_size, zero_points=zero_points))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 6e3])
def test_rows_of_any_scale(rng, scale, dtype):
    """A row times gamma leaves a half's range; normalised it does not."""
    check(rng, Products(dtype=dtype, K=1024, N=(80, 80), kinds="qq", scale=scale, sum_read=scale > 1e-3))
    check(rng, Products(dtype=dtype, K=1024, N=(400, 400), kinds="qq", scale=scale, norm="rms", gated=True))


def test_a_row_with_one_large_element(rng):
    case = Products(K=512, N=(80, 24), kinds="qq", norm="rms")
    model, feeds, _ = case.build(rng)
    feeds["x"][..., 77] = 60000
    got = {how: run_bound(harness.ep_session(model, {"fusion": how}), feeds, {"y0": None, "y1": None}) for how in "01"}
    for name in ("y0", "y1"):
        harness.assert_close(got["1"][name], harness.as_float64(got["0"][name]), harness.tolerance_for(F16), name)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("K", [256, 1024, 4352])
def test_blocks_go_from_lot_to_lot(rng, K, gated, dtype):
    """More tiles of weights than the blocks of one launch take at once."""
    N = (6000, 6000) if gated else (9000, 40, 16)
    check(rng, Products(dtype=dtype, K=K, N=N, kinds="qq" if gated else "qqf", gated=gated, M=(1, 1)))


def test_activations_of_one_sign(rng):
    """A row far from zero: what is added to a weight to make it a float comes off again."""
    case = Products(N=(80, 24), kinds="qq", norm="none", M=(1, 1))
    model, feeds, _ = case.build(rng)
    feeds = {name: np.abs(x) + np.asarray(8, x.dtype) for name, x in feeds.items()}
    got = {how: run_bound(harness.ep_session(model, {"fusion": how}), feeds, {"y0": None, "y1": None}) for how in "01"}
    for name in ("y0", "y1"):
        harness.assert_close(got["1"][name], harness.as_float64(got["0"][name]), harness.tolerance_for(F16), name)


def test_16_bit_weights(rng):
    check(rng, Products(kinds="fff"))


def test_many_products(rng):
    check(rng, Products(N=(16,) * 8, kinds="q" * 8))
    check(rng, Products(N=(16,) * 9, kinds="q" * 9), fused=0)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("N", [8, 1000])
@pytest.mark.parametrize("K", [128, 3584])
def test_one_row_alone(rng, dtype, N, K):
    check(rng, Products(dtype=dtype, K=K, N=(N,), kinds="q", norm="none", M=(1, 1), bias=N == 8))


def test_one_product_with_its_norm(rng):
    check(rng, Products(N=(1000,), kinds="q", sum_read=False))


def test_a_norm_that_others_read_stays_outside(rng):
    check(rng, Products(change="norm_read"))


def test_a_gate_that_others_read_stays_outside(rng):
    check(rng, Products(N=(80, 80), kinds="qq", gated=True, change="gate_read"))


def test_many_rows_run_one_by_one(rng):
    check(rng, Products(M=(1, 17)), fused=0)


@pytest.mark.parametrize("case", [
    Products(dtype=F32, N=(24, 8), kinds="qq"), Products(K=320, N=(24, 8), kinds="qq"),
    Products(N=(24,), kinds="q", norm="none", M=(2, 1)), Products(N=(24,), kinds="f", norm="none"),
    Products(block_size=16, N=(24, 8), kinds="qq"), Products(block_size=256, N=(24, 8), kinds="qq"),
], ids=["float32", "half_a_group", "one_alone", "floats_alone", "blocks_of_16", "blocks_of_256"])  # fmt: skip
def test_what_stays_apart(rng, case):
    check(rng, case, fused=0)


def test_lesser_gpus(rng):
    """Rows that do not fit 48 KiB of shared memory run one by one."""
    model, feeds, want = Products(K=16384, M=(8, 1), N=(16, 16), kinds="qq").build(rng)
    got = run_bound(harness.ep_session(model, {"fusion": "1", "shared_memory_limit": "49152"}), feeds, {name: None for name in want})
    for name, reference in want.items():
        harness.assert_close(got[name], reference, harness.tolerance_for(F16), name)
    assert not fused_kernels()
