"""ai.onnx Scan whose body is a step of the gated delta rule: exports in standard ops write linear attention so."""

import itertools

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import harness
from harness import F16, F32, Tolerance, check, name_of, normal
from reference import f64

NAMES = ("q", "k", "v", "decay", "beta")
ELEMENT = {F32: TensorProto.FLOAT, F16: TensorProto.FLOAT16}
# ORT CPU rounds every op of an f16 body to f16.
ORT_F16 = Tolerance(2e-2)


def body(dtype, *, order=NAMES, reduce=False, wide_decay=True, wide_beta=False, edit=None):
    """One step: inputs `state` [B, H, D, E] and those of `order`. reduce: sums instead of products by rows."""
    nodes, constants = [], {}

    def op(kind, *inputs, out=None, **attrs):
        name = out or f"t{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], **attrs))
        return name

    def axis(value):
        return constants.setdefault(f"axis{value}", numpy_helper.from_array(np.array([value], np.int64), f"axis{value}")).name

    def per_key(name):
        return op("Unsqueeze", name, axis(-1))

    def contract(vector, matrix):
        if reduce:
            return op("ReduceSum", op("Mul", matrix, per_key(vector)), axis(-2), keepdims=0)
        return op("Squeeze", op("MatMul", op("Unsqueeze", vector, axis(-2)), matrix), axis(-2))

    decay = "decay" if wide_decay else per_key("decay")
    decayed = op("Mul", op("Exp", per_key(decay)), "state") if reduce else op("Mul", "state", op("Exp", per_key(decay)))
    missing = op("Sub", "v", contract("k", decayed))
    update = op("Mul", missing, "beta" if wide_beta else per_key("beta"))
    outer = op("MatMul", per_key("k"), op("Unsqueeze", update, axis(-2)))
    op("Add", *((outer, decayed) if reduce else (decayed, outer)), out="new_state")
    nodes.append(helper.make_node("Identity", [contract("q", "new_state")], ["y"]))
    if edit:
        edit(nodes)
    info = lambda name: helper.make_tensor_value_info(name, ELEMENT[dtype], None)  # noqa: E731
    return helper.make_graph(
        nodes, "step", [info(n) for n in ("state", *order)], [info("new_state"), info("y")], list(constants.values())
    )


def reference(state, q, k, v, decay, beta):
    """float64, step by step."""
    s, out = f64(state), []
    for q_t, k_t, v_t, g_t, b_t in zip(*map(f64, (q, k, v, decay, beta))):
        g_t = g_t if g_t.ndim == 3 else g_t[..., None]
        b_t = b_t if b_t.ndim == 3 else b_t[..., None]
        s = s * np.exp(g_t)[..., None]
        s = s + k_t[..., None] * (b_t * (v_t - np.einsum("bhd,bhde->bhe", k_t, s)))[..., None, :]
        out.append(np.einsum("bhd,bhde->bhe", q_t, s))
    return s, np.stack(out)


def case(rng, *, T=5, B=2, H=3, D=8, E=6, dtype=F32, order=NAMES, decay=1, wide_beta=False, edit=None, reduce=False, **how):
    """decay: its last dim, 1 or D; None: it has none."""
    unit = lambda x: x / np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)  # noqa: E731
    made = {
        "q": unit(normal(rng, (T, B, H, D), F32)),
        "k": unit(normal(rng, (T, B, H, D), F32)),
        "v": normal(rng, (T, B, H, E), F32),
        "decay": -rng.uniform(0, 1.5, (T, B, H, *(() if decay is None else (decay,)))),
        "beta": rng.uniform(0, 1, (T, B, H, *((1,) if wide_beta else ()))),
    }
    made = {name: value.astype(dtype) for name, value in made.items()}
    state = normal(rng, (B, H, D, E), dtype)
    graph = body(dtype, order=order, reduce=reduce, wide_decay=decay is not None, wide_beta=wide_beta, edit=edit)
    if dtype == F16:
        how.setdefault("ort_tolerance", ORT_F16)
    check(
        "Scan", [state, *(made[name] for name in order)], list(reference(state, *made.values())),
        dict(body=graph, num_scan_inputs=5), opset=21, dynamic=False, **how,
    )


@pytest.mark.parametrize("dtype", [F32, F16], ids=name_of)
@pytest.mark.parametrize("T, B", [(1, 1), (1, 3), (7, 1), (7, 2), (70, 2)])
def test_steps_and_batches(rng, T, B, dtype):
    case(rng, T=T, B=B, dtype=dtype)


@pytest.mark.parametrize("decay", [None, 1, 8])
@pytest.mark.parametrize("wide_beta", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
def test_forms_of_the_body(rng, decay, wide_beta, reduce):
    case(rng, decay=decay, wide_beta=wide_beta, reduce=reduce)


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES))[::17], ids="-".join)
def test_inputs_in_any_order(rng, order):
    case(rng, order=order)


@pytest.mark.parametrize("D, E", [(16, 16), (128, 128), (32, 64), (4, 20)])
def test_sizes(rng, D, E):
    case(rng, D=D, E=E)


@pytest.mark.parametrize("T", [1, 6])
def test_the_state_is_updated_in_place(rng, T):
    case(rng, T=T, alias={0: 0})


def swapped(kind, other):
    """Another op in the place of the first of `kind`."""

    def edit(nodes):
        next(n for n in nodes if n.op_type == kind).op_type = other

    return edit


@pytest.mark.parametrize(
    "edit",
    [swapped("Exp", "Sigmoid"), swapped("Sub", "Add"), swapped("Add", "Sub")],
    ids=["gate", "delta", "update"],
)
def test_other_arithmetic_is_declined(rng, edit):
    graph = body(F32, edit=edit)
    shapes = dict(q=(1, 1, 2, 4), k=(1, 1, 2, 4), v=(1, 1, 2, 4), decay=(1, 1, 2, 1), beta=(1, 1, 2))
    inputs = [normal(rng, (1, 2, 4, 4), F32), *(normal(rng, shapes[name], F32) for name in NAMES)]
    model = harness.build_node("Scan", inputs, dict(body=graph, num_scan_inputs=5), outputs=2, opset=21, dynamic=False)
    harness.check_declined(model, "a step of the gated delta rule")


@pytest.mark.parametrize("name", ["scan_input_directions", "scan_output_directions"])
def test_backwards_is_declined(rng, name):
    shapes = dict(q=(1, 1, 2, 4), k=(1, 1, 2, 4), v=(1, 1, 2, 4), decay=(1, 1, 2, 1), beta=(1, 1, 2))
    inputs = [normal(rng, (1, 2, 4, 4), F32), *(normal(rng, shapes[name], F32) for name in NAMES)]
    attrs = {"body": body(F32), "num_scan_inputs": 5, name: [1] * (5 if "input" in name else 1)}
    model = harness.build_node("Scan", inputs, attrs, outputs=2, opset=21, dynamic=False)
    harness.check_declined(model, f"attribute '{name}'")
