"""Whole ONNX graphs in float64: ai.onnx ops by onnx's ReferenceEvaluator, com.microsoft ops by this package.

Every f32, f16 and bf16 initializer, constant, input and Cast target becomes float64 first, and accuracy_level is
ignored: what comes out is the function that the weights define, without the rounding of any implementation. The same
graph with `rounding` shows what the declared types cost.
"""

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from . import attention, linear, norms, quant, rotary, softplus
from . import moe as experts

MS = "com.microsoft"
NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


class SimplifiedLayerNormalization(OpRun):
    def _run(self, x, scale, axis=-1, epsilon=1e-5, stash_type=None):
        return (norms.rms_norm(x, scale, axis=axis, epsilon=epsilon),)


class RMSNormalization(OpRun):
    """onnx's own reference computes in stash_type, f32."""

    def _run(self, x, scale, axis=-1, epsilon=1e-5, stash_type=None):
        return (norms.rms_norm(x, scale, axis=axis, epsilon=epsilon),)


class LpNormalization(OpRun):
    def _run(self, x, axis=-1, p=2):
        return (norms.lp_norm(x, axis=axis, p=p),)


class Softplus(OpRun):
    def _run(self, x):
        return (softplus(x),)


class SkipSimplifiedLayerNormalization(OpRun):
    op_domain = MS

    def _run(self, x, skip, gamma, bias=None, epsilon=1e-12):
        y, total = norms.skip_simplified(x, skip, gamma, bias, epsilon=epsilon)
        unused = np.zeros(0)  # mean and inverse deviation: no consumer may read them
        return (y, unused, unused, total)[: len(self.onnx_node.output)]


class GatedRMSNorm(OpRun):
    op_domain = MS

    def _run(self, x, scale, gate, epsilon=1e-5, activation="silu"):
        return (norms.gated_rms_norm(x, scale, gate, epsilon=epsilon, activation=activation),)


class GatedAdd(OpRun):
    op_domain = MS

    def _run(self, x, y, gate):
        return (x + y * gate,)


class MatMulNBits(OpRun):
    op_domain = MS

    def _run(self, a, b, scales, zero_points=None, g_idx=None, bias=None, K=None, N=None, accuracy_level=None, bits=4,
             block_size=None):
        assert g_idx is None
        if accuracy_level == 4:
            a = quant.round_to_int8(a, block_size)
        return (quant.matmul_nbits(a, b, scales, zero_points, bias, bits=bits, block_size=block_size, N=N, K=K),)


class GatherBlockQuantized(OpRun):
    op_domain = MS

    def _run(self, data, indices, scales, zero_points=None, bits=4, block_size=128, gather_axis=0, quantize_axis=1):
        assert data.dtype == np.uint8
        q = quant.unpack_bits(data, bits)
        if zero_points is not None:
            zero_points = quant.unpack_bits(zero_points, bits)[..., : scales.shape[-1]]
        return (
            quant.gather_block_quantized(
                q, indices, scales, zero_points, default_zero=1 << (bits - 1), gather_axis=gather_axis,
                quantize_axis=quantize_axis, block_size=block_size,
            ),
        )


class GroupQueryAttention(OpRun):
    op_domain = MS

    def _run(self, q, k, v, past_key, past_value, seqlens_k, total, cos=None, sin=None, position_ids=None, bias=None,
             head_sink=None, num_heads=None, kv_num_heads=None, scale=0.0, local_window_size=-1, softcap=0.0,
             do_rotary=0, rotary_interleaved=0):
        return attention.group_query_attention(
            q, k, v, past_key, past_value, seqlens_k, int(np.asarray(total).reshape(())), cos, sin, position_ids, bias,
            head_sink, heads=num_heads, kv_heads=kv_num_heads, scale=scale, local_window=local_window_size,
            softcap=softcap, rotary_on=bool(do_rotary), interleaved=bool(rotary_interleaved),
        )


class MRotaryEmbedding(OpRun):
    op_domain = MS

    def _run(self, x, position_ids, cos, sin, interleaved=0, is_packed_batching=0, mrope_layout=0, mrope_section=None,
             num_heads=0, rotary_embedding_dim=0):
        assert not is_packed_batching
        return (
            rotary.mrotary(
                x, position_ids, cos, sin, num_heads=num_heads, sections=mrope_section, layout=mrope_layout,
                interleaved=bool(interleaved),
            ),
        )


class RotaryEmbedding(OpRun):
    """ai.onnx 23: position_ids absent = the caches are [B,S,R/2]."""

    def _run(self, x, cos, sin, position_ids=None, interleaved=0, num_heads=0, rotary_embedding_dim=0):
        if position_ids is not None:
            cos, sin = cos[position_ids], sin[position_ids]
        return (rotary.rotary(x, cos, sin, num_heads=num_heads, interleaved=bool(interleaved)),)


class LinearAttention(OpRun):
    op_domain = MS

    def _run(self, q, k, v, past=None, decay=None, beta=None, q_num_heads=None, kv_num_heads=None,
             update_rule="gated_delta", scale=0.0, state_window=0, chunk_size=64):
        out, states = linear.linear_attention(
            q, k, v, past, decay, beta, q_heads=q_num_heads, kv_heads=kv_num_heads, rule=update_rule, scale=scale
        )
        return out, states[-1]


class LinearAttentionGate(OpRun):
    op_domain = MS

    def _run(self, a, dt_bias, decay_scale, b=None):
        return linear.linear_attention_gate(a, dt_bias, decay_scale, b)[: len(self.onnx_node.output)]


class GatedDeltaNet(OpRun):
    op_domain = MS

    def _run(self, q, k, v, cu_seqlens, decay, beta, state, a_log=None, dt_bias=None, update_rule="gated_delta",
             scale=0.0, gate_activation="none", beta_activation="none", qk_l2_norm=0, chunk_size=64):
        assert q.ndim == 4 and cu_seqlens is None
        flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v, decay, beta)]
        gate = linear.delta_gate(flat[3], a_log, dt_bias, gate_activation)
        rate = linear.sigmoid(flat[4]) if beta_activation == "sigmoid" else flat[4]
        out, last = linear.gated_delta_net(
            *flat[:3], gate, rate, state, rule=update_rule, scale=scale, l2=bool(qk_l2_norm)
        )
        return out.reshape(v.shape), last


class CausalConvWithState(OpRun):
    op_domain = MS

    def _run(self, x, weight, bias=None, past=None, activation="none", ndim=1, state_window=0, dilation=1):
        assert ndim == 1
        return linear.causal_conv(x, weight, bias, past, activation=activation, dilation=dilation)


class MoE(OpRun):
    op_domain = MS

    def _run(self, x, logits, fc1, b1, fc2, b2=None, fc3=None, b3=None, **how):
        return (mixed(x, logits, None, (fc1, fc2, fc3), (b1, b2, b3), **how),)


class QMoE(OpRun):
    """Integers in rows of K, or prepacked."""

    op_domain = MS

    def _run(self, x, logits, fc1, s1, b1, fc2, s2, b2=None, fc3=None, s3=None, b3=None, z1=None, z2=None, z3=None,
             weights=None, expert_weight_bits=4, block_size=0, quant_type="int", weights_prepacked=None,
             accuracy_level=None, **how):
        assert quant_type == "int"
        prepacked = fc2.shape[1] != x.shape[-1]
        unpack = experts.unpack_cutlass if prepacked else quant.unpack_bits

        def matrix(codes, scales, zero_points):
            if codes is None:
                return None
            codes = unpack(codes, expert_weight_bits)
            assert codes.shape[-1] // (block_size or codes.shape[-1]) == scales.shape[-1] or scales.ndim == 2
            assert zero_points is None
            return experts.dequantize(codes, scales.reshape(*codes.shape[:2], -1), bits=expert_weight_bits, block=block_size)

        matrices = matrix(fc1, s1, z1), matrix(fc2, s2, z2), matrix(fc3, s3, z3)
        return (mixed(x, logits, weights, matrices, (b1, b2, b3), **how),)


def mixed(x, logits, weights, matrices, biases, k=1, normalize_routing_weights=0, use_sparse_mixer=0,
          activation_type="relu", swiglu_fusion=0, activation_alpha=1.0, activation_beta=0.0, swiglu_limit=np.inf,
          swiglu_limit_after_activation=0):
    shares = experts.route(
        logits, k, normalize=bool(normalize_routing_weights), sparse_mixer=bool(use_sparse_mixer), weights=weights
    )
    return experts.moe(
        x, shares, *matrices, *biases, activation=activation_type, fusion=swiglu_fusion, alpha=activation_alpha,
        beta=activation_beta, limit=swiglu_limit, limit_after=bool(swiglu_limit_after_activation),
    )


OPS = [
    SimplifiedLayerNormalization, RMSNormalization, LpNormalization, Softplus, SkipSimplifiedLayerNormalization,
    GatedRMSNorm, MatMulNBits, GatherBlockQuantized, GroupQueryAttention, MRotaryEmbedding, RotaryEmbedding,
    LinearAttention, LinearAttentionGate, GatedDeltaNet, CausalConvWithState, GatedAdd, MoE, QMoE,
]  # fmt: skip


def widen(tensor: TensorProto) -> None:
    """A narrow floating tensor to float64, in place."""
    if tensor.data_type in NARROW:
        values = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def widened(model: onnx.ModelProto, keep_accuracy_level: bool) -> onnx.ModelProto:
    """The same graph in float64, without the functions that stand in for com.microsoft ops."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    del wide.functions[:], wide.graph.value_info[:]
    for tensor in wide.graph.initializer:
        widen(tensor)
    for value in [*wide.graph.input, *wide.graph.output]:
        if value.type.tensor_type.elem_type in NARROW:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in wide.graph.node:
        for attribute in node.attribute:
            assert attribute.type != onnx.AttributeProto.GRAPH, f"{node.name}: subgraphs are not widened"
            if attribute.type == onnx.AttributeProto.TENSOR:
                widen(attribute.t)
            if attribute.name == "accuracy_level" and not keep_accuracy_level:
                attribute.i = 0
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in NARROW:
                attribute.i = TensorProto.DOUBLE
    return wide


def declared_types(model: onnx.ModelProto) -> dict[str, np.dtype]:
    """Tensor name -> the floating dtype that the graph gives it; names of other tensors are absent.

    A node's outputs have the type of its first floating input, but for Cast, Constant and the graph's own outputs.
    """
    kinds: dict[str, int] = {t.name: t.data_type for t in model.graph.initializer}
    kinds |= {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    own = {o.name: o.type.tensor_type.elem_type for o in model.graph.output}
    for node in model.graph.node:
        attributes = {a.name: a for a in node.attribute}
        if node.op_type == "Cast":
            kind = attributes["to"].i
        elif node.op_type == "Constant":
            kind = attributes["value"].t.data_type if "value" in attributes else TensorProto.INT64
        else:
            kind = next((kinds[n] for n in node.input if kinds.get(n) in NARROW), TensorProto.INT64)
        kinds |= {n: own.get(n, kind) for n in node.output}
    return {n: onnx.helper.tensor_dtype_to_np_dtype(k) for n, k in kinds.items() if k in NARROW}


class Float64Model:
    """Runs a model in float64.

    rounding = a random generator: every tensor is rounded to the type that the graph gives it, products get the random
    error of a sum in f32, and with keep_accuracy_level int8 activations are rounded where the graph asks for them. Each
    run is then a draw of what a faithful implementation computes, and its distance from the exact run a measure of how
    much this graph amplifies rounding on these inputs.
    """

    def __init__(
        self, model: onnx.ModelProto, *, rounding: np.random.Generator | None = None, keep_accuracy_level: bool = False
    ):
        self.outputs = [o.name for o in model.graph.output]
        self.inputs = {i.name for i in model.graph.input}
        self.rounding = rounding
        self.types = declared_types(model) if rounding else {}
        wide = widened(model, keep_accuracy_level)
        self.constants = {t.name: numpy_helper.to_array(t) for t in wide.graph.initializer}
        self.nodes = ReferenceEvaluator(wide, new_ops=OPS).rt_nodes_

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name; floating feeds are widened, feeds that the model lacks are ignored."""
        values = {"": None, **self.constants}
        for name in self.inputs:
            value = feeds[name]
            values[name] = value if value.dtype.kind in "iub" else value.astype(np.float64)
        for node in self.nodes:
            results = node.run(*(values[n] for n in node.input))
            if self.rounding and node.onnx_node.op_type in ("MatMul", "MatMulNBits"):
                results = (self.summed_in_f32(results[0], values[node.input[0]].shape[-1]),)
            for name, value in zip(node.output, results):
                if name in self.types and value.dtype == np.float64:
                    # Its error with either sign: a fused kernel rounds elsewhere, and its errors are others of this size.
                    error = value.astype(self.types[name]).astype(np.float64) - value
                    value = value + error * self.rounding.choice((-1.0, 1.0), value.shape)
                values[name] = value
            values[""] = None  # not what an unused output left there
        for name in self.outputs:
            assert values[name].dtype == np.float64, f"{name} was computed in {values[name].dtype}"
        return {n: values[n] for n in self.outputs}

    def summed_in_f32(self, product: np.ndarray, K: int) -> np.ndarray:
        """K terms of random sign, added one after the other: partial sum i is sqrt(i/K) of the result in the root mean
        square and is rounded by 0.41 units of 2^-24 (uniform, over a binade), so the errors add up to 0.29 sqrt(K)."""
        size = np.sqrt((product**2).mean(-1, keepdims=True))
        return product + 0.29 * np.sqrt(K) * 2.0**-24 * size * self.rounding.standard_normal(product.shape)
