"""The standard ops over layouts that kernels take by different paths: sizes around vector widths, rows that are no whole
number of vectors, every way to broadcast, tensors that begin inside of another, long and many reductions."""

import itertools

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import harness
from buffers import run_bound
from harness import BF16, F16, F32, Tolerance, name_of, normal
from reference import f64
from test_standard_ops import BOOL, I32, I64, REDUCE, run

U8, I8, I16, F64 = (np.dtype(t) for t in ("u1", "i1", "i2", "f8"))


def values(rng, shape, dtype):
    """Small numbers of any type; whole ones for integers."""
    return rng.random(shape) < 0.5 if dtype == BOOL else np.asarray(normal(rng, shape) * 5).astype(dtype)


# --------------------------------------------------------------------------------------------------------- elementwise


@pytest.mark.parametrize("dtype", [U8, F16, F32, F64], ids=name_of)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 33, 257, 4099])
def test_lengths_around_vectors(rng, n, dtype):
    a, b = values(rng, n, dtype), values(rng, n, dtype)
    run("Max", [a, b], [np.maximum(a, b)], out_types={0: dtype})
    run("Equal", [a, b], [a == b], out_types={0: BOOL})
    x = np.abs(a)
    run("Sign", [x], [np.sign(x)], out_types={0: dtype})
    condition = rng.random(n) < 0.5
    run("Where", [condition, a, b], [np.where(condition, a, b)], out_types={0: dtype})


BROADCASTS = [
    ((7, 32), (32,)), ((7, 32), (7, 1)), ((32,), (7, 1)), ((3, 5, 64), (3, 1, 64)), ((3, 5, 64), (1, 5, 1)),
    ((3, 5, 33), (3, 1, 33)), ((2, 1, 3, 1, 16), (1, 2, 1, 5, 1)), ((1,), (2, 3, 16)), ((), (48,)), ((16, 1), (16, 48)),
    ((2, 1, 2, 1, 2, 1, 2, 8), (1, 2, 1, 2, 1, 2, 1, 8)), ((3, 1), (1, 40)), ((4, 40), (4, 40)),
]


@pytest.mark.parametrize("dtype", [F16, F32, I64, U8], ids=name_of)
@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
def test_broadcasts(rng, shapes, dtype):
    a, b = (values(rng, s, dtype) for s in shapes)
    run("Min", [a, b], [np.minimum(a, b)], out_types={0: dtype})
    run("Less", [a, b], [a < b], out_types={0: BOOL})
    condition = rng.random(np.broadcast_shapes(*shapes)[-1:]) < 0.5
    run("Where", [condition, a, b], [np.where(condition, a, b)], out_types={0: dtype})
    if dtype == F32:
        run("Pow", [np.abs(a), b], [np.abs(f64(a)) ** f64(b)], tolerance=Tolerance(1e-5))
        run("Mean", [a, b, a], [(2 * f64(a) + f64(b)) / 3])


def test_scalar_operands_of_either_side(rng):
    x, s = normal(rng, (5, 48), F16), normal(rng, (), F16)
    run("Sub", [x, s], [f64(x) - f64(s)])
    run("Sub", [s, x], [f64(s) - f64(x)])
    run("Div", [x, s], [f64(x) / f64(s)], initializers=(1,))


@pytest.mark.parametrize("dtype", [I8, U8, I32, np.dtype("u8")], ids=name_of)
@pytest.mark.parametrize("op", ["BitwiseAnd", "BitwiseOr", "BitwiseXor"])
def test_bits(rng, op, dtype):
    a, b = (rng.integers(0, 120, (3, 19)).astype(dtype) for _ in range(2))
    f = {"BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor}[op]
    run(op, [a, b], [f(a, b)], out_types={0: dtype})


@pytest.mark.parametrize("dtype", [I8, I32, I64, F32], ids=name_of)
def test_remainders(rng, dtype):
    a = rng.integers(-50, 50, 67).astype(dtype)
    b = rng.integers(1, 9, 67).astype(dtype) * rng.choice([-1, 1], 67).astype(dtype)
    run("Mod", [a, b], [np.fmod(a, b)], dict(fmod=1), out_types={0: dtype})
    if dtype.kind == "i":
        run("Mod", [a, b], [np.mod(a, b)], out_types={0: dtype})
        run("Div", [a, b], [np.trunc(f64(a) / f64(b))], out_types={0: dtype})


UNARY = {
    "Abs": np.abs, "Sign": np.sign, "Relu": lambda x: np.maximum(x, 0), "Ceil": np.ceil, "Round": np.round,
    "Sin": np.sin, "Cos": np.cos, "Tan": np.tan, "Atan": np.arctan, "Sinh": np.sinh, "Cosh": np.cosh,
    "Asinh": np.arcsinh, "Reciprocal": lambda x: 1 / x, "Softsign": lambda x: x / (1 + np.abs(x)),
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1), "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "LeakyRelu": lambda x: np.where(x < 0, 0.01 * x, x), "ThresholdedRelu": lambda x: np.where(x > 1, x, 0),
    "Elu": lambda x: np.where(x < 0, np.expm1(x), x), "Celu": lambda x: np.where(x < 0, np.expm1(x), x),
    "Selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
    "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
}


@pytest.mark.parametrize("dtype", [F32, F16], ids=name_of)
@pytest.mark.parametrize("op", UNARY)
def test_unary_functions(rng, op, dtype):
    dtype = F32 if op == "Celu" else dtype
    x = normal(rng, 133, dtype, 1.4)
    x = x[np.abs(f64(x)) > 1e-2]
    run(op, [x], [UNARY[op](f64(x))], tolerance=Tolerance(1e-5 if dtype == F32 else 2e-3, 1e-6), opset=22)


@pytest.mark.parametrize("op", ["Asin", "Acos", "Atanh", "Acosh"])
def test_unary_functions_of_limited_domain(rng, op):
    x = rng.uniform(-0.95, 0.95, 70).astype(F32)
    f = {"Asin": np.arcsin, "Acos": np.arccos, "Atanh": np.arctanh, "Acosh": np.arccosh}[op]
    x = np.abs(x) + 1.1 if op == "Acosh" else x
    run(op, [x.astype(F32)], [f(f64(x.astype(F32)))], tolerance=Tolerance(1e-5, 1e-6))


def test_nan_and_infinity():
    x = np.array([np.nan, -np.inf, np.inf, 0.0, 1.0] * 7, F32)
    run("IsNaN", [x], [np.isnan(x)], out_types={0: BOOL})
    run("IsInf", [x], [np.isinf(x)], out_types={0: BOOL})
    run("IsInf", [x], [x == -np.inf], dict(detect_positive=0), out_types={0: BOOL})


@pytest.mark.parametrize("to", [F16, BF16, F32, I32, U8], ids=name_of)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, I64, BOOL], ids=name_of)
@pytest.mark.parametrize("n", [1, 7, 8, 15, 33, 515])
def test_cast_lengths(rng, n, dtype, to):
    x = np.abs(values(rng, n, dtype))
    run("Cast", [x], [x.astype(to)], dict(to=harness.onnx_type(to)), out_types={0: to}, tolerance=Tolerance(0.0))


# ------------------------------------------------------------------------------------------------------------ movement


@pytest.mark.parametrize("dtype", [U8, F16, F32, I64], ids=name_of)
@pytest.mark.parametrize(
    "shape, perm",
    [((65, 130), (1, 0)), ((3, 70, 50), (0, 2, 1)), ((40, 3, 50), (2, 1, 0)), ((2, 40, 3, 50), (0, 3, 2, 1)),
     ((2, 3, 4, 16), (0, 2, 1, 3)), ((20, 2, 33), (2, 0, 1)), ((5, 17, 16), (1, 2, 0)), ((2, 3, 2, 3, 2, 4), (5, 3, 1, 4, 2, 0)),
     ((64, 64), (1, 0)), ((1, 33, 1, 64), (3, 2, 1, 0))],
    ids=str,
)  # fmt: skip
def test_transposes(rng, shape, perm, dtype):
    x = values(rng, shape, dtype)
    run("Transpose", [x], [x.transpose(perm)], dict(perm=list(perm)), out_types={0: dtype})


@pytest.mark.parametrize("dtype", [U8, F16, F32, I64], ids=name_of)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_many_pieces(rng, axis, dtype):
    """More than a launch takes, of odd and of even sizes."""
    x = values(rng, (3, 61, 64) if axis == 1 else (61, 3, 16) if axis == 0 else (3, 2, 122), dtype)
    sizes = [1, 2, 3, 5, 0, 4, 1, 1, 8, 2, 2, 2, 1, 1, 4, 8, 3, 3, 2, 8]
    sizes = sizes if axis < 2 else [2 * s for s in sizes]
    parts = np.split(x, np.cumsum(sizes)[:-1], axis)
    run("Split", [x, np.array(sizes, I64)], parts, dict(axis=axis), initializers=(1,), out_types=dict.fromkeys(range(20), dtype))
    run("Concat", parts, [x], dict(axis=axis), out_types={0: dtype})


@pytest.mark.parametrize("dtype", [U8, F16, F32, I64], ids=name_of)
def test_slices_that_keep_runs(rng, dtype):
    x = values(rng, (4, 9, 64), dtype)
    for starts, ends, steps in [((1, 0, 0), (4, 9, 64), (2, 1, 1)), ((0, 2, 16), (4, 8, 48), (1, 2, 1)),
                                ((0, 0, 3), (4, 9, 61), (1, 1, 1)), ((3, 8, 60), (0, 1, 2), (-1, -2, -3))]:
        index = tuple(slice(*s) for s in zip(starts, ends, steps))
        lists = [np.array(v, I64) for v in (starts, ends, range(3), steps)]
        run("Slice", [x, *lists], [x[index]], initializers=(1, 2, 3, 4), out_types={0: dtype})


@pytest.mark.parametrize("shape, target", [((2, 1, 3, 16), (2, 4, 3, 16)), ((1, 33), (5, 33)), ((3, 1), (3, 70)), ((5, 1, 1), (5, 2, 48))], ids=str)
def test_expand_runs(rng, shape, target):
    x = normal(rng, shape, F16)
    run("Expand", [x, np.array(target, I64)], [np.broadcast_to(x, target)], initializers=(1,))


def test_tile_of_every_dim(rng):
    x = normal(rng, (2, 1, 3, 2, 2))
    run("Tile", [x, np.array([2, 3, 1, 2, 2], I64)], [np.tile(x, (2, 3, 1, 2, 2))], initializers=(1,))


def ints(name, *numbers):
    return helper.make_tensor(name, TensorProto.INT64, [len(numbers)], numbers)


def test_tensors_that_begin_inside_of_another(rng):
    """Pieces of a split along the first dim need not move, so that they begin anywhere."""
    x, y = normal(rng, (7, 9), F16), normal(rng, (3, 9), F16)
    nodes = [
        helper.make_node("Add", ["x", "x"], ["double"]),
        helper.make_node("Split", ["double", "sizes"], ["a", "b", "c"], axis=0),
        helper.make_node("Mul", ["b", "y"], ["product"]),
        helper.make_node("Cast", ["b"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["b", "one"], ["sum"]),
        helper.make_node("Transpose", ["b"], ["turned"], perm=[1, 0]),
        helper.make_node("Concat", ["b", "y"], ["joined"], axis=1),
        helper.make_node("Gather", ["b", "rows"], ["row"]),
        helper.make_node("Neg", ["c"], ["negative"]),
    ]
    double = f64(x) * 2
    b = double[1:4]
    reference = {
        "product": b * f64(y), "wide": b, "sum": b.sum(1, keepdims=True), "turned": b.T,
        "joined": np.concatenate([b, f64(y)], 1), "row": b[[2, 0]], "negative": -double[4:],
    }
    constants = [ints("sizes", 1, 3, 3), ints("one", 1), ints("rows", 2, 0)]
    dtypes = {name: F32 if name == "wide" else F16 for name in reference}
    harness.check_graph(nodes, {"x": x, "y": y}, reference, constants, opset=21, out_dtypes=dtypes)


HEADS = {
    "the first 4 rows": [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "one"], ["rows"]),
        helper.make_node("Sub", ["rows", "four"], ["rest"]),
        helper.make_node("Concat", ["four", "rest"], ["sizes"], axis=0),
        helper.make_node("Split", ["negative", "sizes"], ["head", "tail"], axis=0),
    ],
    "the first half": [helper.make_node("Split", ["negative"], ["head", "tail"], axis=0, num_outputs=2)],
}


@pytest.mark.parametrize("tail", [True, False], ids=["both", "head_alone"])
@pytest.mark.parametrize("which", HEADS)
def test_a_piece_that_was_all_of_a_tensor(rng, which, tail):
    """A split's first piece is an output; at first it is the whole, and later on a part."""
    names = ["head", "tail"][: 1 + tail]
    nodes = [helper.make_node("Neg", ["x"], ["negative"]), *HEADS[which]]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [n, 64]) for n in names]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 64])]
    graph = helper.make_graph(nodes, "g", given, outputs, [ints("zero", 0), ints("one", 1), ints("four", 4)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = harness.ep_session(model.SerializeToString())
    harness.assert_all_on_ep(session)
    for rows in (4, 7, 5, 20, 4) if which == "the first 4 rows" else (1, 2, 9, 1, 6):
        x = normal(rng, (rows, 64))
        head = 4 if which == "the first 4 rows" else -(-rows // 2)
        expected = {"head": -x[:head], "tail": -x[head:]}
        got = run_bound(session, {"x": x}, {name: (expected[name].shape, F32) for name in names})
        for name in names:
            np.testing.assert_array_equal(got[name], expected[name], f"{name} of {rows} rows")


@pytest.mark.parametrize("fill", [np.array([2.5], F32), np.array([1.5], F16), np.array([7], I64), np.array([3], U8)], ids=str)
def test_a_fill_of_symbolic_length(rng, fill):
    x = values(rng, (19, 3), fill.dtype)
    value = helper.make_tensor("v", harness.onnx_type(fill.dtype), [1], fill)
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["filled"], value=value),
        helper.make_node("Max", ["filled", "x"], ["most"]),
    ]
    harness.check_graph(nodes, {"x": x}, {"most": np.maximum(f64(x), f64(fill))}, opset=21,
                        out_dtypes={"most": fill.dtype})


def test_a_range_over_a_symbolic_length(rng):
    x = normal(rng, (19, 3))
    scalar = lambda name, value: helper.make_tensor(name, TensorProto.INT64, [], [value])  # noqa: E731
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["positions"]),
        helper.make_node("Cast", ["positions"], ["steps"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["steps", "axis"], ["column"]),
        helper.make_node("Mul", ["column", "x"], ["scaled"]),
        helper.make_node("Add", ["positions", "offset"], ["shifted"]),
    ]
    offset = np.arange(19, dtype=I64) * 10
    reference = {"scaled": np.arange(19)[:, None] * f64(x), "shifted": np.arange(19) * 11}
    constants = [scalar("zero", 0), scalar("one", 1), ints("axis", 1)]
    harness.check_graph(nodes, {"x": x, "offset": offset}, reference, constants, opset=21, out_dtypes={"shifted": I64})


# ------------------------------------------------------------------------------------------------- indices and scatters


@pytest.mark.parametrize("dtype", [U8, F16, F32, I64], ids=name_of)
@pytest.mark.parametrize("width", [1, 3, 16, 33])
def test_gather_rows(rng, width, dtype):
    x = values(rng, (2, 11, width), dtype)
    indices = rng.integers(-11, 11, (3, 5)).astype(I64)
    run("Gather", [x, indices], [np.take(x, indices, 1)], dict(axis=1), out_types={0: dtype})


@pytest.mark.parametrize("dtype", [U8, F16, F32, I64], ids=name_of)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gather_elements(rng, axis, dtype):
    x = values(rng, (4, 6, 5), dtype)
    shape = [3, 4, 5]
    shape[axis] = 9
    indices = rng.integers(-x.shape[axis], x.shape[axis], shape).astype(I32)
    within = x[tuple(slice(None) if a == axis else slice(n) for a, n in enumerate(shape))]
    expected = np.take_along_axis(within, indices.astype(I64) % x.shape[axis], axis)
    run("GatherElements", [x, indices], [expected], dict(axis=axis), out_types={0: dtype})


@pytest.mark.parametrize("dtype", [F16, F32], ids=name_of)
@pytest.mark.parametrize("batch, depth", [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)])
def test_gather_nd(rng, batch, depth, dtype):
    x = values(rng, (3, 4, 5), dtype)
    lead = (3, 4)[:batch] + (2, 3)
    indices = np.stack([rng.integers(-x.shape[batch + d], x.shape[batch + d], lead) for d in range(depth)], -1)
    expected = np.empty(lead + x.shape[batch + depth :], dtype)
    for at in itertools.product(*map(range, lead)):
        expected[at] = x[at[:batch]][tuple(indices[at])]
    run("GatherND", [x, indices.astype(I64)], [expected], dict(batch_dims=batch))


SCATTERS = {"none": lambda a, b: b, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize("dtype", [F32, I64, I32], ids=name_of)
@pytest.mark.parametrize("reduction", SCATTERS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scatter_elements(rng, axis, reduction, dtype):
    x = values(rng, (4, 6, 5), dtype)
    shape = [3, 4, 5]
    shape[axis] = x.shape[axis] if reduction == "none" else 9
    indices = rng.integers(-x.shape[axis], x.shape[axis], shape)
    if reduction == "none":  # which of two updates of one element stays is open
        indices = rng.permuted(np.broadcast_to(np.moveaxis(np.arange(x.shape[axis])[:, None, None], 0, axis), shape), axis=axis)
    updates = values(rng, shape, dtype)
    expected = x.astype(F64)
    for at in itertools.product(*map(range, shape)):
        to = list(at)
        to[axis] = indices[at]
        expected[tuple(to)] = SCATTERS[reduction](expected[tuple(to)], f64(updates[at]))
    run("ScatterElements", [x, indices.astype(I64), updates], [expected], dict(axis=axis, reduction=reduction),
        out_types={0: dtype})


@pytest.mark.parametrize("dtype", [F32, I64], ids=name_of)
@pytest.mark.parametrize("reduction", SCATTERS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scatter_nd(rng, depth, reduction, dtype):
    x = values(rng, (4, 6, 8), dtype)
    count = 4 if reduction == "none" else 13
    tuples = [tuple(int(v) for v in rng.integers(0, x.shape[:depth])) for _ in range(count)]
    tuples = list(dict.fromkeys(tuples)) if reduction == "none" else tuples
    updates = values(rng, (len(tuples),) + x.shape[depth:], dtype)
    expected = x.astype(F64)
    for to, update in zip(tuples, updates):
        expected[to] = SCATTERS[reduction](expected[to], f64(update))
    run("ScatterND", [x, np.array(tuples, I64), updates], [expected], dict(reduction=reduction), out_types={0: dtype})


@pytest.mark.parametrize("op", ["GatherElements", "GatherND", "ScatterElements", "ScatterND"])
@pytest.mark.parametrize("index", [5, -6, 2**40])
def test_indices_outside(rng, op, index):
    x = normal(rng, (5, 1))
    inputs = [x, np.array([[0], [index]], I64)]
    if op == "ScatterElements":
        inputs.append(normal(rng, (2, 1)))
    elif op == "ScatterND":
        inputs.append(normal(rng, (2, 1)))
    harness.check_hostile(harness.build_node(op, inputs, opset=18), op, str(index), data=True)


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("dtype", [F16, F32], ids=name_of)
def test_tensor_scatter(rng, dtype, mode):
    past, update = values(rng, (2, 3, 9, 8), dtype), values(rng, (2, 3, 4, 8), dtype)
    starts = np.array([1, 5] if mode == "linear" else [7, 0], I64)
    expected = past.copy()
    for b, s in itertools.product(range(2), range(4)):
        expected[b, :, (starts[b] + s) % 9] = update[b, :, s]
    run("TensorScatter", [past, update, starts], [expected], dict(mode=mode), opset=24, alias={0: 0})


# ---------------------------------------------------------------------------------------------------- pads, triangles...


@pytest.mark.parametrize("dtype", [U8, F16, F32, I64], ids=name_of)
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pad(rng, mode, dtype):
    x = values(rng, (3, 4, 5), dtype)
    pads = [(0, 1), (2, 0), (3, 2)]
    how = dict(constant_values=7) if mode == "constant" else {}
    expected = np.pad(x, pads, mode, **how)
    flat = np.array([p[0] for p in pads] + [p[1] for p in pads], I64)
    value = np.array(7, dtype) if mode == "constant" else None
    run("Pad", [x, flat, value], [expected], dict(mode=mode), initializers=(1,), out_types={0: dtype})


def test_negative_pads_crop(rng):
    x = normal(rng, (5, 9))
    run("Pad", [x, np.array([-1, 2, 1, -3], I64)], [np.pad(x[1:, :-3], [(0, 1), (2, 0)])], initializers=(1,))


@pytest.mark.parametrize("dtype", [F16, F32, I64, BOOL], ids=name_of)
@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, -100, -2, 0, 3, 100])
def test_trilu(rng, k, upper, dtype):
    x = values(rng, (2, 5, 7), dtype)
    f = np.triu if upper else np.tril
    inputs = [x] if k is None else [x, np.array(k, I64)]
    run("Trilu", inputs, [f(x, k or 0)], dict(upper=upper), out_types={0: dtype})


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [F32, I64], ids=name_of)
def test_one_hot(rng, dtype, axis):
    indices = rng.integers(-6, 6, (3, 4))
    off_on = np.array([2, 9], dtype)
    expected = np.moveaxis(np.where(np.arange(5) == np.where(indices < 0, indices + 5, indices)[..., None], 9, 2), -1, axis)
    run("OneHot", [indices.astype(I64), np.array(5, I64), off_on], [expected], dict(axis=axis), initializers=(1,),
        out_types={0: dtype})


# ---------------------------------------------------------------------------------------------- reductions and searches

SHAPES = [((5, 64), (1,)), ((5, 1500), (1,)), ((2, 4097), (1,)), ((3, 40, 7), (0, 1)), ((70, 33), (0,)), ((600, 3), (0,)),
          ((2, 3, 4, 5, 6), (1, 3)), ((2, 3, 4, 5, 6), (0, 2, 4)), ((9, 8, 16), (1, 2)), ((1, 1), (0,)), ((33, 7), (1,))]  # fmt: skip


@pytest.mark.parametrize("dtype", [F16, F32, I64, F64], ids=name_of)
@pytest.mark.parametrize("shape, axes", SHAPES, ids=str)
def test_reduction_shapes(rng, shape, axes, dtype):
    x = values(rng, shape, dtype)
    tolerance = Tolerance(2e-3 if dtype == F16 else 1e-5)
    for op in ("ReduceSum", "ReduceMax", "ReduceMin"):
        expected = REDUCE[op](f64(x), axis=axes, keepdims=True)
        how = dict(ort_tolerance=Tolerance(2e-2)) if dtype == F16 else {}
        run(op, [x, np.array(axes, I64)], [expected], initializers=(1,), out_types={0: dtype}, tolerance=tolerance, **how)


MORE = {
    "ReduceL1": lambda x: np.abs(x).sum(1, keepdims=True), "ReduceL2": lambda x: np.sqrt((x * x).sum(1, keepdims=True)),
    "ReduceProd": lambda x: x.prod(1, keepdims=True), "ReduceLogSum": lambda x: np.log(x.sum(1, keepdims=True)),
    "ReduceLogSumExp": lambda x: np.log(np.exp(x).sum(1, keepdims=True)),
}


@pytest.mark.parametrize("shape", [(3, 9), (2, 9, 40), (2, 40, 3)], ids=str)
@pytest.mark.parametrize("op", MORE)
def test_more_reductions(rng, op, shape):
    x = np.abs(normal(rng, shape)) + 0.5
    run(op, [x.astype(F32), np.array([1], I64)], [MORE[op](f64(x.astype(F32)))], initializers=(1,), tolerance=Tolerance(1e-5))


def test_sums_of_exponentials_that_overflow(rng):
    x = np.array([[200, 201, 199], [-300, -301, -299], [0, -np.inf, 1]], F32)
    top = f64(x).max(1, keepdims=True)
    expected = np.log(np.exp(f64(x) - top).sum(1, keepdims=True)) + top
    run("ReduceLogSumExp", [x, np.array([1], I64)], [expected], initializers=(1,))


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_bools_and_bytes_reduce(rng, op):
    f = REDUCE[op]
    for dtype in (U8, I8, BOOL):
        x = values(rng, (4, 37), dtype)
        run(op, [x, np.array([1], I64)], [f(x, axis=1, keepdims=True)], initializers=(1,), out_types={0: dtype}, opset=20)


@pytest.mark.parametrize("op, f", [("ArgMax", np.argmax), ("ArgMin", np.argmin)])
@pytest.mark.parametrize("dtype", [F16, F32, I32, U8], ids=name_of)
@pytest.mark.parametrize("shape, axis", [((4, 9), 1), ((4, 3000), 1), ((40, 5), 0), ((2, 20, 30), 1), ((3, 1), 1)], ids=str)
def test_arg(rng, shape, axis, dtype, op, f):
    x = values(rng, shape, dtype)
    first = f(x, axis)
    last = x.shape[axis] - 1 - f(np.flip(x, axis), axis)
    run(op, [x], [first], dict(axis=axis, keepdims=0), out_types={0: I64})
    run(op, [x], [np.expand_dims(last, axis)], dict(axis=axis, select_last_index=1), out_types={0: I64})


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("shape, axis, k", [((5, 8), -1, 3), ((3, 100), -1, 50), ((2, 1500), 1, 4), ((9, 4, 3), 0, 9),
                                            ((2, 64, 3), 1, 40), ((4, 1), 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, I64], ids=name_of)
def test_top_k(rng, dtype, shape, axis, k, largest):
    x = values(rng, shape, dtype)
    order = np.argsort(-f64(x) if largest else f64(x), axis=axis, kind="stable")
    order = np.take(order, range(k), axis)
    run("TopK", [x, np.array([k], I64)], [np.take_along_axis(x, order, axis), order], dict(axis=axis, largest=largest),
        initializers=(1,), out_types={0: dtype, 1: I64})


@pytest.mark.parametrize("dtype", [F32, F16, I32, F64], ids=name_of)
@pytest.mark.parametrize("exclusive, reverse", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("shape, axis", [((3, 100), 1), ((2, 32), 1), ((70, 5), 0), ((3, 1), 1), ((2, 9, 4), 1)], ids=str)
def test_cumulative_sums(rng, shape, axis, exclusive, reverse, dtype):
    x = values(rng, shape, dtype)
    wide = np.flip(f64(x), axis) if reverse else f64(x)
    total = np.cumsum(wide, axis) - (wide if exclusive else 0)
    total = np.flip(total, axis) if reverse else total
    attrs = dict(exclusive=exclusive, reverse=reverse)
    run("CumSum", [x, np.array(axis, I64)], [total], attrs, out_types={0: dtype}, initializers=(1,))
    run("CumSum", [x, np.array(axis, I32)], [total], attrs, out_types={0: dtype})


def test_a_view_of_a_shape_value_as_data(rng):
    """The root of a width, as LinearAttention's expansion takes it: a kernel reads what only a view shows of a dim."""
    x = normal(rng, (2, 36))
    nodes = [
        helper.make_node("Shape", ["x"], ["width"], start=1, end=2),
        helper.make_node("Div", ["width", "four"], ["part"]),
        helper.make_node("Squeeze", ["part"], ["scalar"]),
        helper.make_node("Cast", ["scalar"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Sqrt", ["float"], ["root"]),
        helper.make_node("Mul", ["x", "root"], ["y"]),
    ]
    harness.check_graph(
        nodes, {"x": x}, {"y": 3 * f64(x), "scalar": np.array(9.0)},
        [numpy_helper.from_array(np.array([4]), "four")], out_dtypes={"scalar": np.dtype("i8")},
    )
