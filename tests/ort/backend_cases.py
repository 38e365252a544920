"""ONNX's own backend node tests, generated through the onnx package, one op at a time.

onnx.backend.test.case.node.collect_testcases builds all 1900 cases in half a minute; importing an op's module alone
registers only its own.
"""

from __future__ import annotations

import functools
import importlib
import warnings

import onnx
from onnx.backend.test.case import node as node_cases

# Module of an op's cases where it is not the op's name in lower case.
MODULES = {
    "And": "and_",
    "CausalConvWithState": "causal_conv_with_state",
    "GreaterOrEqual": "greater_or_equal",
    "LessOrEqual": "less_or_equal",
    "LinearAttention": "linear_attention",
    "Not": "not_",
    "Or": "or_",
    "Range": "rangeop",
    "ReduceLogSum": "reduce_log_sum",
    "ReduceLogSumExp": "reduce_log_sum_exp",
}

# The standard ops that the EP must claim (specs of the exporters' graphs), each with at least one plain case. Constant
# is not among them: ORT makes an initializer of it before any EP is asked.
REQUIRED = (
    "Add And Attention Cast CastLike CausalConvWithState Clip Concat ConstantOfShape CumSum Div Equal Erf Exp "
    "Expand Floor Gather Gelu Gemm GreaterOrEqual LayerNormalization Less LinearAttention LpNormalization MatMul Max "
    "Min Mul Neg Not Pow RMSNormalization Range ReduceMax ReduceMean ReduceSum ReduceSumSquare Reshape RotaryEmbedding "
    "Shape Sigmoid Slice Softmax Softplus Split Sqrt Squeeze Sub Sum Tanh Tile Transpose Unsqueeze Where"
).split()
# Neighbours of the same families: tested wherever the EP claims them.
WELCOME = (
    "Abs Ceil Compress Conv Cos Flatten Greater HardSwish Identity LeakyRelu LessOrEqual Log LogSoftmax Mean Mod OneHot "
    "Or Pad Reciprocal ReduceL1 ReduceL2 ReduceMin ReduceProd Relu Round Sign Sin Size SwiGLU Swish TensorScatter Trilu "
    "TopK Xor"
).split()


@functools.cache
def cases_of(op: str) -> list:
    """The cases of one op, single-node and expanded into its function body."""
    known = len(node_cases._NodeTestCases)
    name = f"{node_cases.__name__}.{MODULES.get(op, op.lower())}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(name)
    found = node_cases._NodeTestCases[known:]
    assert found, f"{name} registers no case"
    return list(found)


def is_single(model: onnx.ModelProto, op: str) -> bool:
    return len(model.graph.node) == 1 and model.graph.node[0].op_type == op
