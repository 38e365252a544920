"""The pieces that every decoder graph of onnxruntime-genai's exporter is made of, with its names and attributes.

Dims: B batch_size, S sequence_length, T total_sequence_length, H heads, D head size, E hidden size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from .weights import Quantised, WeightSource
from .writer import INT32, INT64, MICROSOFT, UINT8, ModelWriter, Tensor, numpy_dtype

B, S, T, PAST = "batch_size", "sequence_length", "total_sequence_length", "past_sequence_length"


@dataclass(frozen=True)
class Lengths:
    """What GroupQueryAttention reads besides data: names of seqlens_k int32[B] and total_sequence_length int32."""

    seqlens_k: str
    total: str


def rotary_tables(length: int, rotary_dim: int, theta: float, dtype: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position * theta^(-2i/rotary_dim), each [length, rotary_dim/2]."""
    inverse = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    cos, sin = (np.empty((length, rotary_dim // 2), numpy_dtype(dtype)) for _ in range(2))
    for start in range(0, length, 16384):
        angle = np.arange(start, min(start + 16384, length), dtype=np.float64)[:, None] * inverse
        cos[start : start + len(angle)], sin[start : start + len(angle)] = (np.cos(angle), np.sin(angle))
    return cos, sin


class DecoderBuilder:
    """Appends decoder pieces to a ModelWriter.

    Args: `io_dtype` FLOAT or FLOAT16, the type of activations; `accuracy_level` of MatMulNBits, None leaves it out.
    """

    def __init__(
        self,
        writer: ModelWriter,
        weights: WeightSource,
        hidden: int,
        epsilon: float,
        io_dtype: int,
        accuracy_level: int | None,
    ) -> None:
        self.writer, self.weights = writer, weights
        self.hidden, self.epsilon, self.io_dtype = hidden, epsilon, io_dtype
        self._accuracy_level = accuracy_level
        self._lm_head: Quantised | None = None

    def token_inputs(self) -> None:
        """Declare input_ids [B, S] and attention_mask [B, T]."""
        self.writer.input("input_ids", INT64, [B, S])
        self.writer.input("attention_mask", INT64, [B, T])

    def lengths(self) -> Lengths:
        """seqlens_k = sum(attention_mask) - 1, total_sequence_length = attention_mask.shape[1]."""
        w, base = self.writer, "/model/attn_mask_reformat/attn_mask_subgraph"
        one = w.int64s(1)
        summed = w.op("ReduceSum", ["attention_mask", one], f"{base}/ReduceSum", INT64, [B], keepdims=0)
        last = w.op("Sub", [summed, one], f"{base}/Sub", INT64, [B])
        seqlens = w.op("Cast", [last], f"{base}/Sub/Cast", INT32, [B], to=INT32)
        shape = w.op("Shape", ["attention_mask"], f"{base}/Shape", INT64, [2])
        length = w.op("Gather", [shape, w.constant(np.array(1, np.int64))], f"{base}/Gather", INT64, [], axis=0)
        return Lengths(seqlens, w.op("Cast", [length], f"{base}/Gather/Cast", INT32, [], to=INT32))

    def embedding(self, vocab: int) -> str:
        """Token embeddings from a floating-point table."""
        table = self.writer.initializer(
            "model.embed_tokens.weight", self.weights.dense("model.embed_tokens.weight", (vocab, self.hidden), 0.0, 1.0)
        )
        return self.writer.op(
            "Gather", [table, "input_ids"], "/model/embed_tokens/Gather", self.io_dtype, [B, S, self.hidden]
        )

    def shared_embedding(self, vocab: int) -> str:
        """Token embeddings from the LM head's quantised matrix, which is written once and used by both."""
        w, matrix = self.writer, self._lm_head_matrix(vocab)
        codes, scales = self._write_quantised("lm_head", matrix)[:2]
        row = self.hidden * matrix.bits // 8
        flat = w.op("Reshape", [codes, w.int64s(vocab, row)], "/model/embed_tokens/Reshape", UINT8, [vocab, row])
        return w.op(
            "GatherBlockQuantized",
            [flat, "input_ids", scales],
            "/model/embed_tokens/GatherBlockQuantized",
            self.io_dtype,
            [B, S, self.hidden],
            MICROSOFT,
            bits=matrix.bits,
            block_size=matrix.block_size,
            gather_axis=0,
            quantize_axis=1,
        )

    def lm_head(self, x: str, vocab: int) -> None:
        """logits [B, S, vocab], the graph's first output."""
        matrix = self._lm_head_matrix(vocab)
        self._matmul_nbits(x, "lm_head", "/lm_head/MatMul_Q4", matrix, "logits")

    def projection(self, x: str, weight: str, n: int, k: int) -> str:
        """x [B, S, k] times the quantised matrix `weight` [n, k]: [B, S, n]. `weight` is a dotted name."""
        path = "/" + re.sub(r"\.(?!\d)", "/", weight)
        return self._matmul_nbits(
            x,
            weight,
            f"{path}/MatMul_Q4",
            self.weights.quantised(weight, n, k),
            (f"{path}/MatMul/output_0", self.io_dtype, [B, S, n]),
        )

    def vector(self, name: str, shape: tuple[int, ...], mean: float = 1.0, std: float = 0.1) -> str:
        """A small floating-point initializer."""
        return self.writer.initializer(name, self.weights.dense(name, shape, mean, std))

    def rms_norm(self, x: str, weight: str, name: str, shape: list[int | str], output: str | None = None) -> str:
        """RMS norm over the last axis of x, of `shape`."""
        value = output or f"{name}/output_0"
        node = self.writer.node
        return node(
            "SimplifiedLayerNormalization",
            [x, self.vector(weight, (int(shape[-1]),))],
            [(value, self.io_dtype, shape)],
            name,
            epsilon=self.epsilon,
            axis=-1,
            stash_type=1,
        )[0]

    def head_norm(self, x: str, layer: int, name: str, width: int, head_size: int) -> str:
        """RMS norm of each head of x [B, S, width]; `name` is q or k."""
        w, path = self.writer, f"/model/layers.{layer}/attn/{name}_norm"
        flat = f"sequence_length * num_{'attention' if name == 'q' else 'key_value'}_heads"
        x = w.op("Reshape", [x, w.int64s(0, -1, head_size)], f"{path}/Reshape_1", self.io_dtype, [B, flat, head_size])
        weight = f"model.layers.{layer}.attn.{name}_norm.layernorm.weight"
        x = self.rms_norm(x, weight, f"{path}/SimplifiedLayerNormalization", [B, flat, head_size])
        return w.op("Reshape", [x, w.int64s(0, -1, width)], f"{path}/Reshape_2", self.io_dtype, [B, S, width])

    def input_norm(self, x: str) -> str:
        """The first layer's norm, which has no residual yet."""
        path = "/model/layers.0/input_layernorm"
        return self.rms_norm(
            x,
            "model.layers.0.input_layernorm.weight",
            f"{path}/LayerNorm",
            [B, S, self.hidden],
            output=f"{path}/output_0",
        )

    def skip_norm(self, skip: str, x: str, layer: int, kind: str, last: bool = False) -> tuple[str, str]:
        """(norm(skip + x), skip + x); the sum is not asked for when `last`."""
        path, shape = f"/model/layers.{layer}/{kind}", [B, S, self.hidden]
        weight = self.vector(f"model.layers.{layer}.{kind}.weight", (self.hidden,))
        outputs: list = [(f"{path}/output_0", self.io_dtype, shape)]
        if not last:
            outputs += ["", "", (f"{path}/output_3", self.io_dtype, shape)]
        names = self.writer.node(
            "SkipSimplifiedLayerNormalization",
            [skip, x, weight],
            outputs,
            f"{path}/SkipLayerNorm",
            MICROSOFT,
            epsilon=self.epsilon,
        )
        return names[0], names[-1]

    def mlp(self, x: str, layer: int, intermediate: int) -> str:
        """down(silu(gate(x)) * up(x))."""
        weight, path, shape = (f"model.layers.{layer}.mlp", f"/model/layers.{layer}/mlp", [B, S, intermediate])
        gate = self.projection(x, f"{weight}.gate_proj", intermediate, self.hidden)
        up = self.projection(x, f"{weight}.up_proj", intermediate, self.hidden)
        sigmoid = self.writer.op("Sigmoid", [gate], f"{path}/act_fn/Sigmoid", self.io_dtype, shape)
        silu = self.writer.op("Mul", [gate, sigmoid], f"{path}/act_fn/Mul", self.io_dtype, shape)
        product = self.writer.op("Mul", [silu, up], f"{path}/Mul", self.io_dtype, shape)
        return self.projection(product, f"{weight}.down_proj", self.hidden, intermediate)

    def experts(self, x: str, layer: int, experts: int, top: int, intermediate: int) -> str:
        """QMoE, gate and up interleaved. Without an accuracy_level it is the export for CUDA, whose experts are packed
        for CUTLASS: FC2 then has other dims (FC1's are the same numbers where 2 I = H)."""
        weight, path = f"model.layers.{layer}.moe", f"/model/layers.{layer}/moe"
        router = self.projection(x, f"{weight}.router", experts, self.hidden)
        reshape = [router, self.writer.int64s(-1, experts)]
        router = self.writer.op("Reshape", reshape, f"{path}/router/Reshape", self.io_dtype, ["tokens", experts])
        inputs = [x, router]
        for name, n, k in (
            ("gate_up_proj", 2 * intermediate, self.hidden),
            ("down_proj", self.hidden, intermediate),
        ):
            name = f"{weight}.experts.{name}"
            matrix = self.weights.quantised(name, experts * n, k)
            dims = (experts, n, k // 2) if self._accuracy_level is not None else (experts, k, n // 2)
            scales = (experts, n, k // matrix.block_size)
            inputs += [
                self.writer.initializer(f"{name}.qweight", replace(matrix.codes, shape=dims)),
                self.writer.initializer(f"{name}.scales", replace(matrix.scales, shape=scales)),
                self.vector(f"{name}.bias", (experts, n), 0.0),
            ]
        return self.writer.op(
            "QMoE",
            [*inputs, *[""] * 6],
            f"{path}/QMoE",
            self.io_dtype,
            [B, S, self.hidden],
            MICROSOFT,
            activation_alpha=1.0,
            activation_beta=0.0,
            activation_type="swiglu",
            expert_weight_bits=matrix.bits,
            k=top,
            normalize_routing_weights=1,
            swiglu_fusion=1,
            use_sparse_mixer=0,
            block_size=matrix.block_size,
        )

    def kv_inputs(self, layers: list[int], kv_heads: int) -> None:
        """Declare past keys, then past values: [B, H, past, D] each, with D left symbolic as the exporter leaves it."""
        for part in ("key", "value"):
            for layer in layers:
                self.writer.input(f"past_key_values.{layer}.{part}", self.io_dtype, [B, kv_heads, PAST, "kv_cache_dim"])

    def kv_outputs(self, layers: list[int], kv_heads: int) -> None:
        """Declare present keys, then present values."""
        for part in ("key", "value"):
            for layer in layers:
                self.writer.output(f"present.{layer}.{part}", self.io_dtype, [B, kv_heads, T, "kv_cache_dim"])

    def attention(
        self,
        qkv: tuple[str, str, str],
        layer: int,
        heads: tuple[int, int],
        head_size: int,
        lengths: Lengths,
        rotary: tuple[str, str] | None,
        interleaved: bool = False,
    ) -> str:
        """GroupQueryAttention; `qkv` may be (packed, "", ""), `rotary` names the cos and sin tables, if any."""
        path = f"/model/layers.{layer}/attn/GroupQueryAttention"
        past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        names = self.writer.node(
            "GroupQueryAttention",
            [*qkv, *past, lengths.seqlens_k, lengths.total, *(rotary or ("", "")), "", "", ""],
            [
                (f"{path}/output_0", self.io_dtype, [B, S, heads[0] * head_size]),
                f"present.{layer}.key",
                f"present.{layer}.value",
            ],
            path,
            MICROSOFT,
            num_heads=heads[0],
            kv_num_heads=heads[1],
            scale=float(head_size**-0.5),
            local_window_size=-1,
            softcap=0.0,
            do_rotary=int(rotary is not None),
            rotary_interleaved=int(interleaved),
        )
        return names[0]

    def rotary_caches(self, length: int, rotary_dim: int, theta: float, dtype: int | None = None) -> tuple[str, str]:
        """Write cos_cache and sin_cache [length, rotary_dim/2] once and return their names."""
        if not self.writer.has_initializer("cos_cache"):
            cos, sin = rotary_tables(length, rotary_dim, theta, dtype or self.io_dtype)
            self.writer.initializer("cos_cache", cos)
            self.writer.initializer("sin_cache", sin)
        return "cos_cache", "sin_cache"

    def _lm_head_matrix(self, vocab: int) -> Quantised:
        if self._lm_head is None:
            self._lm_head = self.weights.quantised("lm_head", vocab, self.hidden)
        return self._lm_head

    def _write_quantised(self, weight: str, matrix: Quantised) -> list[str]:
        """Names of codes, scales and (where there are some) zero points, each written once."""
        parts: list[tuple[str, Tensor]] = [
            (f"{weight}.MatMul.weight_Q{matrix.bits}", matrix.codes),
            (f"{weight}.MatMul.weight_scales", matrix.scales),
        ]
        if matrix.zero_points is not None:
            parts.append((f"{weight}.MatMul.weight_zp", matrix.zero_points))
        for name, tensor in parts:
            if not self.writer.has_initializer(name):
                self.writer.initializer(name, tensor)
        return [name for name, _ in parts]

    def _matmul_nbits(self, x: str, weight: str, node: str, matrix: Quantised, output: str | tuple) -> str:
        level = {} if self._accuracy_level is None else {"accuracy_level": self._accuracy_level}
        return self.writer.node(
            "MatMulNBits",
            [x, *self._write_quantised(weight, matrix)],
            [output],
            node,
            MICROSOFT,
            K=matrix.k,
            N=matrix.n,
            **level,
            bits=matrix.bits,
            block_size=matrix.block_size,
        )[0]
