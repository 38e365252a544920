"""One or a few small cases of every op that has a kernel here, as models that any onnxruntime can be asked to load,
and what availability.json says about models.

ai.onnx ops take the smallest of ONNX's own backend cases; the others come from the ops' own test modules.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort

import harness
import test_attention
import test_causal_conv_with_state
import test_gated_add
import test_gated_delta_net
import test_gated_rms_norm
import test_gather_block_quantized
import test_group_query_attention
import test_linear_attention
import test_linear_attention_gate
import test_matmul_nbits
import test_moe
import test_moe_group_router
import test_mrotary_embedding
import test_rotary_embedding
import test_scan
import test_simplified_layer_normalization
import test_skip_simplified_layer_normalization
from backend_cases import cases_of, is_single
from harness import F16, F32, Tolerance, normal
from reference import f64, sigmoid
from reference.norms import layer_norm
from test_backend_nodes import feeds_and_results

MS = "com.microsoft"
TABLE = json.loads(pathlib.Path(__file__).with_name("availability.json").read_text())
RUNTIMES = list(TABLE["opsets"])
# ONNX has no case of them, or none that is claimed.
OWN_CASES = ("SimplifiedLayerNormalization", "Scan")
# Where the smallest case needs what opset 28 allows: int32 shifts, a float Mod that floors.
CASES = {"BitShift": "test_bitshift_left_uint8", "Mod": "test_mod_mixed_sign_int32"}


# ---------------------------------------------------------------------------------------------------------- the table


def newer(runtime: str) -> bool:
    """Whether `runtime` is newer than the one that runs."""
    return RUNTIMES.index(runtime) > RUNTIMES.index(ort.__version__)


def known(field: dict) -> list:
    return [value for runtime, values in field.items() if not newer(runtime) for value in values]


def node_is_known(node: onnx.NodeProto, opset: int) -> bool:
    """Whether the running onnxruntime knows the node's op at the opset, its attributes and its input slots."""
    entry = TABLE["ops"][f"{node.domain}::{node.op_type}" if node.domain else node.op_type]
    attributes = set(known(entry["attributes"]))
    slots = max([n for runtime, n in entry["inputs"].items() if not newer(runtime)], default=0)
    variadic = node.op_type in ("Concat", "Max", "Mean", "Min", "Scan", "Sum")
    return (
        any(version <= opset for version in known(entry["versions"]))
        and all(a.name in attributes for a in node.attribute)
        and (variadic or len(node.input) <= slots)
    )


def is_known(model: onnx.ModelProto) -> bool:
    """Whether the running onnxruntime can load the model, by the table."""
    opset = {o.domain: o.version for o in model.opset_import}
    if opset.get("", 0) > TABLE["opsets"][ort.__version__]:
        return False
    # A model may carry the definition of an op as a local function: then nobody needs to know it.
    own = {(f.domain, f.name) for f in model.functions}
    nodes = [n for n in model.graph.node if (n.domain, n.op_type) not in own]
    return all(node_is_known(node, opset.get(node.domain, 1)) for node in nodes)


# ----------------------------------------------------------------------------------------------------------- the cases


@dataclasses.dataclass
class Case:
    """A model of one node, its inputs and what they must give (NaN: anything)."""

    name: str
    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    tolerance: Tolerance | None = None

    @property
    def op(self) -> str:
        node = self.model.graph.node[0]
        return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def as_case(name, op, inputs, reference, attrs=None, *, outputs=None, tolerance=None, **how) -> Case:
    """A case from the arguments of `harness.check`."""
    kept = {k: how[k] for k in ("out_types", "domain", "opset", "initializers", "dynamic") if k in how}
    flags = [r is not None for r in reference] if outputs is None else outputs
    node = harness.build_node(op, inputs, attrs, outputs=flags, **kept)
    expected = {f"out{i}": f64(r) for i, r in enumerate(reference) if r is not None}
    return Case(name, node.proto, node.feeds, expected, tolerance)


def recorded(module, name: str, *args, **how) -> Case:
    """The case that a test module's `case` would check."""
    with mock.patch.object(module, "check") as check:
        getattr(module, how.pop("function", "case"))(np.random.default_rng(7), *args, **how)
    (call,) = check.call_args_list
    case = as_case(name, *call.args, **call.kwargs)
    if case.op.startswith(MS):  # a newer ai.onnx beside it does not matter
        case.model.opset_import[0].version = 21
        case.model.ir_version = 10
    return case


def onnx_case(op: str) -> Case | None:
    """The smallest of ONNX's plain cases of one node, float32 before other types."""
    found = []
    for case in cases_of(op):
        wanted = is_single(case.model, op) and CASES.get(op, case.name) == case.name
        data = feeds_and_results(case, case.data_sets[0]) if wanted else None
        if data is not None:
            feeds, expected = data
            values = [*feeds.values(), *expected.values()]
            wide = any(v.dtype not in (F32, np.int64, np.int32, np.bool_) for v in values)
            found.append((wide, sum(v.size for v in values), case.name, case, feeds, expected))
    if not found:
        return None
    *_, case, feeds, expected = min(found, key=lambda f: f[:3])
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    model.ir_version = 10
    # The same node in the newest opset that the runtime has; where the op itself is newer the model must fail.
    newest = TABLE["opsets"][ort.__version__]
    for imported in model.opset_import:
        if imported.domain == "" and any(v <= newest for v in known(TABLE["ops"][op]["versions"])):
            imported.version = min(imported.version, newest)
    loose = {np.dtype(np.float32): 1e-5}
    worst = max([loose.get(v.dtype, 0.0) for v in expected.values()] + [0.0])
    return Case(case.name, model, feeds, expected, Tolerance(worst, 1e-6 if worst else 0.0))


def gelus(rng) -> list[Case]:
    from math import erf

    def gelu(x):
        return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))

    def fast(x):
        return 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))

    x, bias = normal(rng, (3, 17)), normal(rng, 17)
    return [
        as_case("gelu", "Gelu", [x], [gelu(f64(x))], domain=MS),
        as_case("bias_gelu", "BiasGelu", [x, bias], [gelu(f64(x) + f64(bias))], domain=MS),
        as_case("fast_gelu", "FastGelu", [x, bias], [fast(f64(x) + f64(bias))], domain=MS),
        as_case("quick_gelu", "QuickGelu", [x], [f64(x) * sigmoid(1.5 * f64(x))], dict(alpha=1.5), domain=MS),
    ]


def other_ms(rng) -> list[Case]:
    a, b = normal(rng, (2, 9, 5)), normal(rng, (2, 9, 7))
    product = 0.5 * np.swapaxes(f64(a), -1, -2) @ f64(b)
    x, skip, gamma, beta = normal(rng, (2, 3, 8)), normal(rng, (2, 3, 8)), normal(rng, 8), normal(rng, 8)
    total = f64(x) + f64(skip)
    return [
        as_case("fused_matmul", "FusedMatMul", [a, b], [product], dict(transA=1, alpha=0.5), domain=MS),
        as_case(
            "skip_layer_norm", "SkipLayerNormalization", [x, skip, gamma, beta],
            [layer_norm(total, gamma, beta, epsilon=1e-5)[0], None, None, total], dict(epsilon=1e-5), domain=MS,
        ),
    ]


def ms_cases() -> list[Case]:
    """Ops of com.microsoft, in the forms that came with different runtimes."""
    gqa, conv, gdn = test_group_query_attention, test_causal_conv_with_state, test_gated_delta_net
    linear, nbits = test_linear_attention, test_matmul_nbits
    gather, rotary = test_gather_block_quantized, test_rotary_embedding
    rows = np.array([[0, 3, 7], [10, -1, 2]])
    return [
        recorded(gqa, "gqa"),
        recorded(gqa, "gqa_packed_rotary", packed=True, D=32, rotary=32, past=7, S=1, capacity=12),
        recorded(gqa, "gqa_window_softcap", window=3, softcap=1.5, dtype=F16),
        recorded(gqa, "gqa_sink_bias", sink=True, bias=(1, 1)),
        recorded(gqa, "gqa_qk_norm", qk_norm=True),
        recorded(gqa, "gqa_not_causal", causal=False),
        recorded(conv, "conv"),
        recorded(conv, "conv_dilation", dilation=2),
        recorded(conv, "conv_channels_last", channels_last=True, dtype=F16),
        recorded(linear, "linear_attention"),
        recorded(linear, "linear_attention_f32_state", dtype=F16, state_dtype=F32),
        recorded(test_linear_attention_gate, "linear_attention_gate"),
        recorded(gdn, "gdn", gate="softplus", beta_activation="sigmoid", l2=True),
        recorded(gdn, "gdn_lower_bound", gate="kda", attrs=dict(gate_lower_bound=-5.0)),
        recorded(test_gated_rms_norm, "gated_rms_norm", activation=None),
        recorded(test_gated_rms_norm, "gated_rms_norm_sigmoid", activation="sigmoid"),
        recorded(test_gated_add, "gated_add"),
        *[recorded(nbits, f"nbits_{bits}", bits=bits, zero_points="packed", bias=True) for bits in (2, 4, 8)],
        recorded(nbits, "nbits_float_zero_points", zero_points="float"),
        recorded(nbits, "nbits_level_4", level=4, dtype=F16),
        recorded(gather, "gather_int4", "int4", rows),
        recorded(gather, "gather_uint8", "uint8", rows),
        recorded(gather, "gather_8_bits", "uint8", rows, bits=8),
        recorded(test_moe, "moe", "swiglu", True, F32, function="test_dense"),
        recorded(test_moe_group_router, "moe_group_router", n_group=4, topk_group=2),
        recorded(test_moe, "qmoe", 4, 32, "packed", function="test_bits_blocks_zero_points"),
        recorded(rotary, "rotary", function="ms_case"),
        recorded(test_mrotary_embedding, "mrotary"),
        recorded(test_skip_simplified_layer_normalization, "skip_simplified", bias=True),
    ]


def onnx_extra() -> list[Case]:
    return [
        recorded(test_simplified_layer_normalization, "simplified", (2, 3, 64)),
        recorded(test_attention, "attention_cache", past=3, opset=23),
        recorded(test_scan, "scan"),
    ]


@functools.cache
def cases() -> dict[str, Case]:
    """name -> case; every op of the table has one."""
    rng = np.random.default_rng(7)
    found = ms_cases() + gelus(rng) + other_ms(rng) + onnx_extra()
    missing = []
    for op in TABLE["ops"]:
        if "::" not in op and op not in OWN_CASES:
            case = onnx_case(op)
            found.append(case) if case else missing.append(op)
    assert not missing, f"no case of {missing}"
    untested = set(TABLE["ops"]) - {c.op for c in found}
    assert not untested, f"no case of {untested}"
    by_name = {c.name: c for c in found}
    assert len(by_name) == len(found)
    return by_name
