"""The standard ops with symbolic shapes, broadcasting, every type, and the older opsets that exporters write."""

import numpy as np
import pytest
from onnx import TensorProto, helper

import harness
from harness import BF16, F16, F32, FLOATS, Tolerance, check, name_of, normal
from reference import f64, sigmoid, softplus

I32, I64, BOOL = np.dtype("i4"), np.dtype("i8"), np.dtype(bool)
# ORT CPU has no bf16 kernel for these; it has none for f16 either where the test says so by what it asserts.
PAIRS = [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (4,)), ((2, 3, 4), (1,)), ((2, 3, 4), ()), ((2, 1, 4), (3, 1)),
         ((5,), (2, 3, 5)), ((0, 4), (4,)), ((1,), (1, 1)), ((2, 3, 33), (2, 1, 33)), ((7, 17), (7, 1))]


def supported_by_ort_cpu(model) -> str:
    """'agrees' where ORT CPU opens the model, else 'refuses': the assertion itself is in `check`."""
    try:
        harness.cpu_session(model.serialize())
    except Exception:  # noqa: BLE001
        return "refuses"
    return "agrees"


def run(op, inputs, expected, attrs=None, **how):
    outputs = len(expected)
    probe = harness.build_node(
        op, inputs, attrs, outputs=outputs, out_types=how.get("out_types"), opset=how.get("opset", 21), dynamic=False,
        initializers=how.get("initializers", ()), domain=how.get("domain", ""),
    )
    how.setdefault("opset", 21)
    check(op, inputs, expected, attrs, ort_cpu=supported_by_ort_cpu(probe), **how)


BINARY = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Max": np.maximum, "Min": np.minimum,
}
COMPARE = {
    "Equal": np.equal, "Less": np.less, "LessOrEqual": np.less_equal, "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
}


@pytest.mark.parametrize("shapes", PAIRS, ids=str)
@pytest.mark.parametrize("op", BINARY)
def test_binary_broadcasting(rng, op, shapes):
    a, b = normal(rng, shapes[0]), normal(rng, shapes[1])
    run(op, [a, b], [BINARY[op](f64(a), f64(b))])


@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype("f8"), I32, I64], ids=name_of)
@pytest.mark.parametrize("op", BINARY)
def test_binary_types(rng, op, dtype):
    if dtype.kind == "i":
        a, b = (rng.integers(1, 100, s).astype(dtype) for s in ((3, 5), (5,)))
        expected = a // b if op == "Div" else BINARY[op](a, b)
    else:
        a, b = normal(rng, (3, 5), dtype), normal(rng, (5,), dtype)
        expected = BINARY[op](f64(a), f64(b))
    run(op, [a, b], [expected], out_types={0: dtype})


@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_integer_division_by_zero(rng, op):
    """Never the end of the process: an error or a value."""
    if harness.oracles_only():
        return
    model = harness.build_node(op, [np.ones(4, I64), np.zeros(4, I64)], opset=21, out_types={0: I64})
    try:
        harness.run_node(model)
    except Exception as error:  # noqa: BLE001
        assert op in str(error) or "fallback" in str(error)


def test_integers_wrap(rng):
    a = np.array([2**31 - 1, -(2**31)], I32)
    with np.errstate(over="ignore"):
        run("Add", [a, np.array([1, -1], I32)], [a + np.array([1, -1], I32)], out_types={0: I32})


@pytest.mark.parametrize("dtype", [F32, F16, I32, I64], ids=name_of)
@pytest.mark.parametrize("op", COMPARE)
def test_comparisons(rng, op, dtype):
    a = rng.integers(-2, 3, (4, 6)).astype(dtype)
    b = rng.integers(-2, 3, (6,)).astype(dtype)
    run(op, [a, b], [COMPARE[op](a, b)], out_types={0: BOOL})


def test_comparisons_with_nan():
    a = np.array([np.nan, 1, np.nan, np.inf], F32)
    b = np.array([np.nan, 1, 1, np.inf], F32)
    for op, f in COMPARE.items():
        run(op, [a, b], [f(a, b)], out_types={0: BOOL})


@pytest.mark.parametrize("op", ["And", "Or", "Xor"])
@pytest.mark.parametrize("shapes", [((3, 4), (4,)), ((2, 1), (1, 5)), ((0, 4), (4,))], ids=str)
def test_logic(rng, op, shapes):
    a, b = (rng.random(s) < 0.5 for s in shapes)
    f = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor}[op]
    run(op, [a, b], [f(a, b)], out_types={0: BOOL}, may_decline=op)


def test_not(rng):
    a = rng.random((3, 5)) < 0.5
    run("Not", [a], [~a], out_types={0: BOOL})


UNARY = {
    "Neg": np.negative, "Exp": np.exp, "Sigmoid": sigmoid, "Tanh": np.tanh, "Softplus": softplus, "Floor": np.floor,
    "Sqrt": lambda x: np.sqrt(np.abs(x)), "Erf": None, "Identity": lambda x: x,
}


def erf(x):
    from math import erf as scalar

    return np.vectorize(scalar, otypes=[float])(x) if x.size else x


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (2, 3, 100), (1031,)], ids=str)
def test_unary(rng, op, shape, dtype):
    x = normal(rng, shape, dtype, 2.0)
    if op == "Sqrt":
        x = np.asarray(np.abs(x))
    expected = erf(f64(x)) if op == "Erf" else UNARY[op](f64(x))
    run(op, [x], [expected], opset=22)  # the first whose Softplus has bf16


@pytest.mark.parametrize("op", ["Exp", "Sigmoid", "Tanh", "Softplus", "Erf"])
def test_unary_extremes(op):
    """Overflow and saturation, infinities, and values whose result is small or close to 1."""
    x = np.array([-np.inf, -200, -88, -30, -1e-3, -0.0, 0.0, 1e-8, 1e-3, 1, 20, 60, 88, np.inf], F32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (erf(f64(x)) if op == "Erf" else UNARY[op](f64(x))).astype(F32)
    if op == "Exp":  # the largest result would hide the small ones
        x, expected = x[:-3], expected[:-3]
    if op == "Softplus":
        expected[0] = 0.0
    run(op, [x], [expected], ort_tolerance=Tolerance(1e-4, 1e-6))


@pytest.mark.parametrize("op", ["Exp", "Sigmoid", "Tanh", "Softplus", "Erf"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, 33])
def test_unary_every_tier(rng, tier, op, length):
    x = normal(rng, length, F32, 3.0)
    run(op, [x], [erf(f64(x)) if op == "Erf" else UNARY[op](f64(x))], provider_options=tier)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_gelu(rng, dtype, approximate):
    x = normal(rng, (3, 40), dtype, 2.0)
    wide = f64(x)
    if approximate == "tanh":
        expected = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    else:
        expected = 0.5 * wide * (1 + erf(wide / np.sqrt(2)))
    how = dict(ort_tolerance=Tolerance(4e-3)) if dtype == F16 else {}
    run("Gelu", [x], [expected], dict(approximate=approximate), opset=20, **how)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("exponent", [2.0, 0.5, 3.0, -1.0, 1.7])
def test_pow(rng, exponent, dtype):
    x = (np.abs(normal(rng, (3, 7))) + 0.1).astype(dtype)
    y = np.array(exponent, dtype)
    run("Pow", [x, y], [f64(x) ** f64(y)])


@pytest.mark.parametrize("dtype", [F32, F16, I64], ids=name_of)
@pytest.mark.parametrize("bounds", ["both", "low", "high", "none"])
def test_clip(rng, bounds, dtype):
    x = (normal(rng, (4, 5)) * 10).astype(dtype)
    low = np.array(-3, dtype) if bounds in ("both", "low") else None
    high = np.array(4, dtype) if bounds in ("both", "high") else None
    expected = f64(x)
    expected = expected if low is None else np.maximum(expected, f64(low))
    expected = expected if high is None else np.minimum(expected, f64(high))
    run("Clip", [x, low, high], [expected], out_types={0: dtype})


@pytest.mark.parametrize("dtype", [*FLOATS, I64, BOOL], ids=name_of)
@pytest.mark.parametrize("shapes", [((3, 4), (3, 4), (3, 4)), ((3, 1), (4,), ()), ((), (2, 3), (3,)), ((1,), (0, 3), (3,))],
                         ids=str)
def test_where(rng, shapes, dtype):
    condition = rng.random(shapes[0]) < 0.5
    a, b = ((normal(rng, s) * 10).astype(dtype) for s in shapes[1:])
    run("Where", [condition, a, b], [np.where(condition, a, b)], out_types={0: dtype})


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_sum_of_many(rng, count):
    shapes = [(3, 4), (4,), (1, 4), (3, 1), ()][:count]
    xs = [normal(rng, s) for s in shapes]
    expected = sum((f64(x) for x in xs), np.zeros(()))
    run("Sum", xs, [expected])


CAST_TYPES = [F32, F16, BF16, np.dtype("f8"), I32, I64, BOOL, np.dtype("u1"), np.dtype("i1")]


@pytest.mark.parametrize("to", CAST_TYPES, ids=name_of)
@pytest.mark.parametrize("dtype", CAST_TYPES, ids=name_of)
def test_cast(rng, dtype, to):
    x = rng.integers(0, 100, (3, 7)).astype(dtype)
    if dtype in (*FLOATS, np.dtype("f8")) and to in (*FLOATS, np.dtype("f8")):
        x = normal(rng, (3, 7), dtype)
    expected = x.astype(to)
    run("Cast", [x], [expected], dict(to=harness.onnx_type(to)), out_types={0: to}, tolerance=Tolerance(0.0))


def test_cast_rounds_to_even_and_keeps_specials():
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65504, 65520, 1e-8, -1e-8, np.inf, -np.inf, 2**-24, 2**-25], F32)
    with np.errstate(over="ignore"):
        run("Cast", [x], [x.astype(F16)], dict(to=TensorProto.FLOAT16), out_types={0: F16}, tolerance=Tolerance(0.0))
    y = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.3e38, np.inf, -np.inf, 1e-40], F32)
    run("Cast", [y], [y.astype(BF16)], dict(to=TensorProto.BFLOAT16), out_types={0: BF16}, tolerance=Tolerance(0.0))


REDUCE = {
    "ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceMax": np.max, "ReduceMin": np.min,
    "ReduceSumSquare": lambda x, axis, keepdims: np.sum(x**2, axis=axis, keepdims=keepdims),
}


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, (0,), (-1,), (1,), (0, 2), (0, 1, 2), (-2, -1)], ids=str)
@pytest.mark.parametrize("op", REDUCE)
def test_reductions(rng, op, axes, keepdims):
    x = normal(rng, (3, 4, 5))
    if axes is None or len(set(axes)) == x.ndim:
        x = np.abs(x)  # a lone sum may cancel to nearly nothing, which would be no scale for its rounding
    expected = REDUCE[op](f64(x), axis=axes, keepdims=bool(keepdims))
    inputs = [x] if axes is None else [x, np.array(axes, I64)]
    may = dict(may_decline=op) if op == "ReduceMin" else {}
    run(op, inputs, [expected], dict(keepdims=keepdims), initializers=(1,), **may)


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceMax", "ReduceSumSquare"])
@pytest.mark.parametrize("axes", [(0,), (-1,), (0, 2)], ids=str)
def test_reductions_of_older_opsets(rng, op, axes):
    """Before opset 18 the axes are an attribute."""
    x = normal(rng, (3, 4, 5))
    run(op, [x], [REDUCE[op](f64(x), axis=axes, keepdims=True)], dict(axes=list(axes)), opset=13)


def test_reduce_sum_of_opset_11(rng):
    x = normal(rng, (3, 4, 5))
    run("ReduceSum", [x], [f64(x).sum(1, keepdims=True)], dict(axes=[1]), opset=11)


@pytest.mark.parametrize("op", REDUCE)
@pytest.mark.parametrize("dtype", [F16, I32, I64], ids=name_of)
def test_reduction_types(rng, op, dtype):
    x = (normal(rng, (3, 40)) * 3).astype(dtype)
    expected = REDUCE[op](f64(x), axis=(1,), keepdims=True)
    if dtype.kind == "i" and op == "ReduceMean":
        expected = np.trunc(expected)
    may = dict(may_decline=op) if dtype.kind == "i" or op == "ReduceMin" else {}
    how = dict(ort_tolerance=Tolerance(1e-2)) if dtype == F16 else {}
    run(op, [x, np.array([1], I64)], [expected], dict(keepdims=1), initializers=(1,), out_types={0: dtype}, **may, **how)


@pytest.mark.parametrize("noop", [0, 1])
def test_empty_axes(rng, noop):
    x = normal(rng, (3, 4))
    expected = f64(x) if noop else f64(x).sum(keepdims=True)
    run("ReduceSum", [x, np.zeros(0, I64)], [expected], dict(noop_with_empty_axes=noop), initializers=(1,))


def test_mask_sum(rng):
    """The exporters' length computation: an int64 mask summed over its last axis."""
    mask = (rng.random((3, 17)) < 0.5).astype(I64)
    run("ReduceSum", [mask, np.array([1], I64)], [mask.sum(1, keepdims=True)], out_types={0: I64}, initializers=(1,))


@pytest.mark.parametrize("axis", [0, 1, -1, 2])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_softmax(rng, axis, dtype):
    x = normal(rng, (3, 4, 9), dtype, 3.0)
    wide = np.exp(f64(x) - f64(x).max(axis, keepdims=True))
    run("Softmax", [x], [wide / wide.sum(axis, keepdims=True)], dict(axis=axis))


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("dtype", [F32, I32, I64], ids=name_of)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cumsum(rng, axis, dtype, reverse, exclusive):
    x = (normal(rng, (3, 5)) * 5).astype(dtype)
    wide = f64(x)
    wide = np.flip(wide, axis) if reverse else wide
    total = np.cumsum(wide, axis)
    total = total - wide if exclusive else total
    total = np.flip(total, axis) if reverse else total
    run("CumSum", [x, np.array(axis, I64)], [total], dict(exclusive=exclusive, reverse=reverse), out_types={0: dtype},
        initializers=(1,))


MATMULS = [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 6)), ((4,), (4, 5)),
           ((3, 4), (4,)), ((4,), (4,)), ((0, 4), (4, 5)), ((3, 0), (0, 5)), ((1, 70), (70, 130)), ((37, 64), (64, 33)),
           ((2, 3, 4), (4,)), ((1, 300), (300, 1))]


@pytest.mark.parametrize("constant", [True, False], ids=["weight", "dynamic"])
@pytest.mark.parametrize("shapes", MATMULS, ids=str)
def test_matmul(rng, shapes, constant):
    a, b = normal(rng, shapes[0]), normal(rng, shapes[1])
    if np.prod((f64(a) @ f64(b)).shape) == 1:
        # A lone sum may cancel to nearly nothing, and its own size would be no scale for its rounding.
        a, b = np.abs(a), np.abs(b)
    run("MatMul", [a, b], [f64(a) @ f64(b)], initializers=(1,) if constant else ())


@pytest.mark.parametrize("constant", [True, False], ids=["weight", "dynamic"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("M", [1, 5, 40])
def test_matmul_half_types(rng, M, dtype, constant):
    """ORT CPU refuses bf16."""
    a, b = normal(rng, (M, 96), dtype), normal(rng, (96, 40), dtype)
    run("MatMul", [a, b], [f64(a) @ f64(b)], initializers=(1,) if constant else (), ort_tolerance=Tolerance(1e-2))


@pytest.mark.parametrize("constant", [True, False], ids=["weight", "dynamic"])
@pytest.mark.parametrize("shapes", [((1, 100), (100, 37)), ((7, 33), (33, 17)), ((2, 5, 16), (2, 16, 9))], ids=str)
def test_matmul_every_tier(rng, tier, shapes, constant):
    a, b = normal(rng, shapes[0]), normal(rng, shapes[1])
    run("MatMul", [a, b], [f64(a) @ f64(b)], initializers=(1,) if constant else (), provider_options=tier)


@pytest.mark.parametrize("bias", [None, (5,), (1, 5), (3, 1), (3, 5), ()], ids=str)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_gemm(rng, transposed, bias):
    a, b = normal(rng, (3, 4)), normal(rng, (4, 5))
    c = None if bias is None else normal(rng, bias)
    expected = 0.5 * f64(a) @ f64(b) + (0 if c is None else 2.0 * f64(c))
    a, b = (np.ascontiguousarray(x.T) if t else x for x, t in zip((a, b), transposed))
    run("Gemm", [a, b, c], [expected], dict(alpha=0.5, beta=2.0, transA=transposed[0], transB=transposed[1]),
        initializers=(1, 2))


# ------------------------------------------------------------------------------------------------- shape and movement


@pytest.mark.parametrize("dtype", [*FLOATS, I64, I32, BOOL, np.dtype("u1")], ids=name_of)
@pytest.mark.parametrize("perm", [None, (0, 2, 1), (2, 0, 1), (1, 0, 2), (0, 1, 2)], ids=str)
def test_transpose(rng, perm, dtype):
    x = (normal(rng, (3, 4, 5)) * 5).astype(dtype)
    run("Transpose", [x], [x.transpose(perm)], dict(perm=list(perm)) if perm else {}, out_types={0: dtype})


@pytest.mark.parametrize("allowzero", [0, 1])
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "value"])
@pytest.mark.parametrize(
    "shape, target", [((2, 3, 4), (6, 4)), ((2, 3, 4), (0, -1)), ((2, 3, 4), (-1,)), ((2, 3, 4), (0, 0, 2, 2)),
                      ((2, 3, 4), (1, 2, 3, 4, 1)), ((0, 4), (0, 4)), ((1,), ())], ids=str,
)
def test_reshape(rng, shape, target, constant, allowzero):
    x = normal(rng, shape)
    if allowzero and 0 in target:
        if x.size or -1 in target:
            return  # allowzero asks for an empty tensor
        resolved = target
    else:
        resolved = [shape[i] if d == 0 else d for i, d in enumerate(target)]
    run("Reshape", [x, np.array(target, I64)], [x.reshape(resolved)], dict(allowzero=allowzero),
        initializers=(1,) if constant else ())


@pytest.mark.parametrize("target", [(5, 5), (-1, -1), (-1, 7), (0, 0, 0, 0), (-2, 12)], ids=str)
def test_reshape_that_does_not_fit(rng, target):
    model = harness.build_node("Reshape", [normal(rng, (2, 3, 4)), np.array(target, I64)], opset=21)
    harness.check_hostile(model, "Reshape")


@pytest.mark.parametrize("dtype", [F32, F16, I64, BOOL], ids=name_of)
@pytest.mark.parametrize("axis", [0, 1, -1, 2])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_concat(rng, count, axis, dtype):
    shapes = [[2, 3, 4] for _ in range(count)]
    for i, shape in enumerate(shapes):
        shape[axis] = i  # the first is empty on the axis
    shapes[-1][axis] = 5
    xs = [(normal(rng, s) * 3).astype(dtype) for s in shapes]
    run("Concat", xs, [np.concatenate(xs, axis)], dict(axis=axis), out_types={0: dtype})


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("given", [True, False], ids=["sizes", "equal"])
def test_split(rng, given, axis):
    x = normal(rng, (6, 9, 12))
    size = x.shape[axis]
    sizes = [1, 0, size - 1] if given else [size // 3] * 3
    parts = np.split(x, np.cumsum(sizes)[:-1], axis)
    inputs, attrs = [x, np.array(sizes, I64)], dict(axis=axis)
    if not given:
        inputs, attrs = [x], dict(axis=axis, num_outputs=3)
    run("Split", inputs, parts, attrs, initializers=(1,))


def test_split_uneven_num_outputs(rng):
    x = normal(rng, (7, 3))
    run("Split", [x], [x[:3], x[3:6], x[6:]], dict(num_outputs=3))


def test_split_of_opset_13(rng):
    x = normal(rng, (6, 4))
    run("Split", [x, np.array([2, 4], I64)], [x[:2], x[2:]], initializers=(1,), opset=13)


SLICES = [
    ([0], [2], [0], None), ([1], [-1], [1], None), ([-3], [2**62], [-1], None), ([0, 1], [3, 5], [0, 2], [2, 3]),
    ([-1], [-100], [0], [-1]), ([5], [2], [1], [-2]), ([3], [3], [1], None), ([100], [200], [0], None),
]


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "value"])
@pytest.mark.parametrize("starts, ends, axes, steps", SLICES, ids=str)
def test_slice(rng, starts, ends, axes, steps, constant):
    x = normal(rng, (4, 6, 7))
    index = [slice(None)] * 3
    for k, axis in enumerate(axes):
        step = steps[k] if steps else 1
        stop = None if step < 0 and ends[k] < -x.shape[axis] else ends[k]
        index[axis] = slice(starts[k], stop, step)
    inputs = [x, *(np.array(v, I64) for v in (starts, ends, axes)), None if steps is None else np.array(steps, I64)]
    run("Slice", inputs, [x[tuple(index)]], initializers=(1, 2, 3, 4) if constant else ())


@pytest.mark.parametrize("index_type", [I32, I64], ids=name_of)
@pytest.mark.parametrize("dtype", [F32, F16, I64], ids=name_of)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0,)], ids=str)
def test_gather(rng, shape, axis, dtype, index_type):
    x = (normal(rng, (5, 6, 7)) * 9).astype(dtype)
    indices = rng.integers(-x.shape[axis], x.shape[axis], shape).astype(index_type)
    run("Gather", [x, indices], [np.take(x, indices, axis)], dict(axis=axis), out_types={0: dtype})


@pytest.mark.parametrize("index", [5, -6, 2**40])
def test_gather_outside(rng, index):
    model = harness.build_node("Gather", [normal(rng, (5, 6)), np.array([0, index], I64)], opset=21)
    harness.check_hostile(model, "Gather", str(index), data=True)


@pytest.mark.parametrize("axes", [(0,), (-1,), (0, 2), (1, -1), (3, 0)], ids=str)
def test_unsqueeze_and_squeeze(rng, axes):
    x = normal(rng, (3, 4))
    rank = 2 + len(axes)
    where = tuple(a % rank for a in axes)
    if max(where) >= rank or len(set(where)) != len(where):
        return
    y = np.expand_dims(x, where)
    run("Unsqueeze", [x, np.array(axes, I64)], [y], initializers=(1,))
    run("Squeeze", [y, np.array(axes, I64)], [x], initializers=(1,))


def test_squeeze_everything(rng):
    x = normal(rng, (1, 3, 1))
    run("Squeeze", [x], [x.reshape(3)])


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "value"])
@pytest.mark.parametrize("shape, target", [((3, 1), (3, 4)), ((1,), (2, 3)), ((3, 4), (1,)), ((), (2,)), ((3, 1), (2, 1, 4)),
                                           ((1, 4), (0, 4))], ids=str)
def test_expand(rng, shape, target, constant):
    x = normal(rng, shape)
    expected = np.broadcast_to(x, np.broadcast_shapes(shape, target))
    run("Expand", [x, np.array(target, I64)], [expected], initializers=(1,) if constant else ())


@pytest.mark.parametrize("repeats", [(2, 3), (1, 1), (0, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, I64], ids=name_of)
def test_tile(rng, dtype, repeats):
    x = (normal(rng, (2, 5)) * 5).astype(dtype)
    run("Tile", [x, np.array(repeats, I64)], [np.tile(x, repeats)], out_types={0: dtype}, initializers=(1,))


@pytest.mark.parametrize("value", [None, np.array([2.5], F32), np.array([7], I64), np.array([1.5], F16)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (0, 2), ()], ids=str)
def test_constant_of_shape(shape, value):
    attrs = {} if value is None else dict(value=helper.make_tensor("v", harness.onnx_type(value.dtype), [1], value))
    dtype = F32 if value is None else value.dtype
    expected = np.full(shape, 0 if value is None else value[0], dtype)
    run("ConstantOfShape", [np.array(shape, I64)], [expected], attrs, out_types={0: dtype})


@pytest.mark.parametrize("bounds", [(0, 5, 1), (3, 20, 4), (10, 0, -3), (5, 5, 1), (5, 0, 1)], ids=str)
@pytest.mark.parametrize("dtype", [I64, I32, F32], ids=name_of)
def test_range(dtype, bounds):
    values = [np.array(b, dtype) for b in bounds]
    run("Range", values, [np.arange(*bounds).astype(dtype)], out_types={0: dtype})


@pytest.mark.parametrize("start, end", [(0, None), (1, None), (-2, None), (0, 2), (1, -1), (2, 1)], ids=str)
def test_shape(rng, start, end):
    x = normal(rng, (2, 3, 4, 5))
    attrs = dict(start=start) | ({} if end is None else dict(end=end))
    run("Shape", [x], [np.array(x.shape[start:end], I64)], attrs, out_types={0: I64})


def test_shape_arithmetic_in_one_graph(rng):
    """Shape -> Gather -> Mul -> Concat -> Reshape, the way exporters merge and split heads."""
    x = normal(rng, (2, 3, 8))
    constant = lambda name, value: helper.make_tensor(name, TensorProto.INT64, [len(value)], value)  # noqa: E731
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Slice", ["s", "zero", "two"], ["lead"]),
        helper.make_node("Concat", ["lead", "heads"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
        helper.make_node("Transpose", ["y"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Gather", ["s", "zero"], ["b"], axis=0),
        helper.make_node("Gather", ["s", "one"], ["n"], axis=0),
        helper.make_node("Mul", ["b", "n"], ["rows"]),
        helper.make_node("Concat", ["rows", "rest"], ["flat"], axis=0),
        helper.make_node("Reshape", ["x", "flat"], ["z"]),
    ]
    initializers = [
        constant("zero", [0]), constant("one", [1]), constant("two", [2]), constant("heads", [4, 2]),
        constant("rest", [-1]),
    ]
    reference = {"t": f64(x).reshape(2, 3, 4, 2).transpose(0, 2, 1, 3), "z": f64(x).reshape(6, 8)}
    harness.check_graph(nodes, {"x": x}, reference, initializers, opset=21)
