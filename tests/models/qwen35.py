"""Hybrid decoders (gated delta rule layers with an attention layer every fourth) with int4 weights, of any size; with
experts, `intermediate` is the shared one's.

The graph is the one onnxruntime-genai 0.18's exporter writes: int4-cpu (float activations, accuracy_level 4) or
int4-cuda (`--fp16`). `python -m tests.models.qwen35 0.8b OUT` writes 0.6 GB in seconds.

Dims: B batch, S new tokens, Hk/Hv key and value heads, Dk/Dv their sizes, C convolution channels = 2*Hk*Dk + Hv*Dv.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from .decoder import B, DecoderBuilder, Lengths, S
from .genai import GenaiModel, write_byte_tokenizer
from .weights import RandomWeights, WeightSource
from .writer import FLOAT, FLOAT16, INT64, MICROSOFT, ModelWriter, numpy_dtype


@dataclass(frozen=True)
class HybridConfig:
    """A decoder's dimensions."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    value_heads: int
    shared_embedding: bool
    vocab: int = 248320
    context: int = 262144
    head_size: int = 256
    rotary_dim: int = 64
    mrope_section: tuple[int, int, int] = (11, 11, 10)
    key_heads: int = 16
    key_size: int = 128
    value_size: int = 128
    kernel: int = 4
    theta: float = 1e7
    epsilon: float = 1e-6
    attention_interval: int = 4
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    io_dtype: int = FLOAT
    accuracy_level: int | None = 4

    @property
    def attention_layers(self) -> list[int]:
        """Layers that hold attention; the others hold the delta rule."""
        return [i for i in range(self.layers) if (i + 1) % self.attention_interval == 0]

    @property
    def linear_layers(self) -> list[int]:
        """Layers that hold the delta rule."""
        return [i for i in range(self.layers) if (i + 1) % self.attention_interval]

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


SIZES = {
    "tiny": HybridConfig(
        128, 256, 8, 4, 1, 4, True, vocab=1024, context=4096, head_size=64, rotary_dim=16, mrope_section=(3, 3, 2),
        key_heads=2, key_size=32, value_size=32,
    ),
    "moe-tiny": HybridConfig(
        128, 64, 4, 4, 1, 4, False, vocab=1024, context=4096, head_size=64, rotary_dim=16, mrope_section=(3, 3, 2),
        key_heads=2, key_size=32, value_size=32, experts=8, experts_per_token=2, expert_intermediate=64,
    ),
    "moe-small": HybridConfig(
        1024, 512, 4, 8, 2, 16, True, vocab=1024, context=4096, experts=128, experts_per_token=8,
        expert_intermediate=512,
    ),
    "0.8b": HybridConfig(1024, 3584, 24, 8, 2, 16, True),
    "2b": HybridConfig(2048, 6144, 24, 8, 2, 16, True),
    "4b": HybridConfig(2560, 9216, 32, 16, 4, 32, True),
    "9b": HybridConfig(4096, 12288, 32, 16, 4, 32, False),
    "35b-a3b": HybridConfig(
        2048, 512, 40, 16, 2, 32, False, experts=256, experts_per_token=8, expert_intermediate=512
    ),
}  # fmt: skip


def build(config: HybridConfig, weights: WeightSource, folder: Path | None) -> onnx.ModelProto:
    """Write the graph (and the weights, where `folder` is given) and return the model without its weights."""
    writer = ModelWriter(folder)
    decoder = DecoderBuilder(writer, weights, config.hidden, config.epsilon, config.io_dtype, config.accuracy_level)
    decoder.token_inputs()
    writer.input("position_ids", INT64, [3, B, S])
    decoder.kv_inputs(config.attention_layers, config.kv_heads)
    _states(config, writer.input, "past")
    writer.output("logits", config.io_dtype, [B, S, config.vocab])
    decoder.kv_outputs(config.attention_layers, config.kv_heads)
    _states(config, writer.output, "present")
    lengths = decoder.lengths()
    residual = decoder.shared_embedding(config.vocab) if config.shared_embedding else decoder.embedding(config.vocab)
    x = decoder.input_norm(residual)
    for layer in range(config.layers):
        attends = layer in config.attention_layers
        x = _attention(decoder, config, x, layer, lengths) if attends else _linear_attention(decoder, config, x, layer)
        x, residual = decoder.skip_norm(residual, x, layer, "post_attention_layernorm")
        x = _experts(decoder, config, x, layer) if config.experts else decoder.mlp(x, layer, config.intermediate)
        last = layer + 1 == config.layers
        x, residual = decoder.skip_norm(
            residual, x, layer + 1, "final_norm_layernorm" if last else "input_layernorm", last
        )
    decoder.lm_head(x, config.vocab)
    return writer.finish()


def generate(config: HybridConfig, folder: Path, seed: int = 0) -> Path:
    """Write a complete model folder with random weights."""
    build(config, RandomWeights(config.io_dtype, seed=seed), folder)
    GenaiModel(
        "qwen3_5_text",
        config.vocab,
        config.context,
        config.hidden,
        config.head_size,
        config.heads,
        config.kv_heads,
        config.layers,
        hybrid=True,
        position_ids=True,
    ).write(folder)
    write_byte_tokenizer(folder)
    return folder


def _states(config: HybridConfig, declare, prefix: str) -> None:
    for layer in config.linear_layers:
        declare(f"{prefix}.{layer}.conv", config.io_dtype, [B, config.channels, config.kernel - 1])
    for layer in config.linear_layers:
        declare(
            f"{prefix}.{layer}.recurrent", config.io_dtype, [B, config.value_heads, config.key_size, config.value_size]
        )


def _experts(decoder: DecoderBuilder, config: HybridConfig, x: str, layer: int) -> str:
    """The chosen experts' sum, and the shared expert behind its gate."""
    routed = decoder.experts(x, layer, config.experts, config.experts_per_token, config.expert_intermediate)
    shared = decoder.mlp(x, layer, config.intermediate)
    path = f"/model/layers.{layer}"
    gate = decoder.projection(x, f"model.layers.{layer}.shared_expert_gate", 1, config.hidden)
    gate = decoder.writer.op("Sigmoid", [gate], f"{path}/shared_expert_gate/Sigmoid", config.io_dtype, [B, S, 1])
    shape = [B, S, config.hidden]
    return decoder.writer.op(
        "GatedAdd", [routed, shared, gate], f"{path}/moe/GatedAdd", config.io_dtype, shape, MICROSOFT
    )


def _linear_attention(decoder: DecoderBuilder, config: HybridConfig, x: str, layer: int) -> str:
    """Convolution over [q k v], L2-normed q and k, the gated delta rule, a gated norm, the output projection."""
    w, io = decoder.writer, config.io_dtype
    weight, path = f"model.layers.{layer}.linear_attn", f"/model/layers.{layer}/linear_attn"
    keys, values = config.key_heads * config.key_size, config.value_heads * config.value_size
    qkv = decoder.projection(x, f"{weight}.qkv_proj", config.channels, config.hidden)
    z = decoder.projection(x, f"{weight}.z_proj", values, config.hidden)
    beta, alpha = (_small_projection(decoder, config, x, layer, name) for name in ("b_proj", "a_proj"))
    qkv = _convolution(decoder, config, qkv, layer)
    q, k, v = w.node(
        "Split",
        [qkv, w.int64s(keys, keys, values)],
        [(f"{path}/split_qkv/Split/output_{i}", io, [B, S, n]) for i, n in enumerate((keys, keys, values))],
        f"{path}/split_qkv/Split",
        axis=-1,
    )
    q, k = _l2_norm(decoder, config, q, layer, "q"), _l2_norm(decoder, config, k, layer, "k")
    scale = w.constant(np.array(config.key_size**-0.5, numpy_dtype(io)))
    q = w.op("Mul", [q, scale], f"{path}/q_scaled/Mul", io, [B, S, keys])
    decay, beta = _gate(decoder, config, alpha, beta, layer)
    out = w.node(
        "LinearAttention",
        [q, k, v, f"past.{layer}.recurrent", decay, beta],
        [(f"{path}/LinearAttention/output_0", io, [B, S, values]), f"present.{layer}.recurrent"],
        f"{path}/LinearAttention",
        MICROSOFT,
        q_num_heads=config.key_heads,
        kv_num_heads=config.value_heads,
        update_rule="gated_delta",
        scale=1.0,
        state_window=0,
    )[0]
    norm = decoder.vector(f"{weight}.norm.weight", (config.value_size,))
    out = w.op(
        "GatedRMSNorm", [out, norm, z], f"{path}/GatedRMSNorm", io, [B, S, values], MICROSOFT, epsilon=config.epsilon
    )
    return decoder.projection(out, f"{weight}.out_proj", config.hidden, values)


def _small_projection(decoder: DecoderBuilder, config: HybridConfig, x: str, layer: int, name: str) -> str:
    weight = decoder.vector(
        f"model.layers.{layer}.linear_attn.{name}.MatMul.weight",
        (config.hidden, config.value_heads),
        0.0,
        config.hidden**-0.5,
    )
    path = f"/model/layers.{layer}/linear_attn/{name}/MatMul"
    return decoder.writer.op("MatMul", [x, weight], path, config.io_dtype, [B, S, config.value_heads])


def _convolution(decoder: DecoderBuilder, config: HybridConfig, x: str, layer: int) -> str:
    w, io, channels = decoder.writer, config.io_dtype, config.channels
    weight, path = f"model.layers.{layer}.linear_attn", f"/model/layers.{layer}/linear_attn"
    x = w.op("Transpose", [x], f"{path}/qkv_proj/Transpose", io, [B, channels, S], perm=[0, 2, 1])
    filters = decoder.vector(f"{weight}.conv1d.weight", (channels, 1, config.kernel), 0.0, 0.5)
    bias = w.initializer(f"{weight}.conv1d.bias", np.zeros(channels, numpy_dtype(io)))
    x = w.node(
        "CausalConvWithState",
        [x, filters, bias, f"past.{layer}.conv"],
        [(f"{path}/CausalConvWithState/output_0", io, [B, channels, S]), f"present.{layer}.conv"],
        f"{path}/CausalConvWithState",
        MICROSOFT,
        ndim=1,
        activation="silu",
        state_window=0,
    )[0]
    return w.op("Transpose", [x], f"{path}/conv_out/Transpose", io, [B, S, channels], perm=[0, 2, 1])


def _l2_norm(decoder: DecoderBuilder, config: HybridConfig, x: str, layer: int, name: str) -> str:
    w, io, heads, size = decoder.writer, config.io_dtype, config.key_heads, config.key_size
    path = f"/model/layers.{layer}/linear_attn/{name}_l2norm"
    x = w.op("Reshape", [x, w.int64s(0, 0, heads, size)], f"{path}/flat/Reshape", io, [B, S, heads, size])
    x = w.op("LpNormalization", [x], f"{path}/LpNormalization", io, [B, S, heads, size], axis=-1, p=2)
    return w.op("Reshape", [x, w.int64s(0, 0, heads * size)], f"{path}/unflat/Reshape", io, [B, S, heads * size])


def _gate(decoder: DecoderBuilder, config: HybridConfig, alpha: str, beta: str, layer: int) -> list[str]:
    """Decay -exp(A)*softplus(alpha + dt) and beta = sigmoid(beta), [B, S, Hv] each. A and dt are always float."""
    weight, path = (f"model.layers.{layer}.linear_attn", f"/model/layers.{layer}/linear_attn/LinearAttentionGate")
    heads, rng = config.value_heads, np.random.default_rng(layer)
    # As trained models have them: time constants between one token and a few hundred.
    dt = decoder.writer.initializer(f"{weight}.dt_bias", rng.uniform(-5, 1, heads).astype(np.float32))
    rate = decoder.writer.initializer(f"{weight}.neg_exp_A", -rng.uniform(0.1, 8, heads).astype(np.float32))
    outputs = [(f"{path}/output_{i}", config.io_dtype, [B, S, heads]) for i in range(2)]
    return decoder.writer.node("LinearAttentionGate", [alpha, dt, rate, beta], outputs, path, MICROSOFT)


def _attention(decoder: DecoderBuilder, config: HybridConfig, x: str, layer: int, lengths: Lengths) -> str:
    """Gated attention: per-head norms, multimodal rotary embedding, GroupQueryAttention, a sigmoid gate."""
    w, io, size = decoder.writer, config.io_dtype, config.head_size
    weight, path = f"model.layers.{layer}.attn", f"/model/layers.{layer}/attn"
    q, kv = config.heads * size, config.kv_heads * size
    packed = decoder.projection(x, f"{weight}.qkv_proj", 2 * q + 2 * kv, config.hidden)
    q_gate, k, v = w.node(
        "Split",
        [packed, w.int64s(2 * q, kv, kv)],
        [(f"{path}/qkv_proj/Split/output_{i}", io, [B, S, n]) for i, n in enumerate((2 * q, kv, kv))],
        f"{path}/qkv_proj/Split",
        axis=-1,
    )
    q_gate = w.op(
        "Reshape",
        [q_gate, w.int64s(0, 0, config.heads, 2 * size)],
        f"{path}/q_gate/Reshape",
        io,
        [B, S, config.heads, 2 * size],
    )
    queries, gate = w.node(
        "Split",
        [q_gate, w.int64s(size, size)],
        [(f"{path}/q_gate/Split/output_{i}", io, [B, S, config.heads, size]) for i in range(2)],
        f"{path}/q_gate/Split",
        axis=-1,
    )
    queries = w.op("Reshape", [queries, w.int64s(0, 0, q)], f"{path}/q_proj/Reshape", io, [B, S, q])
    gate = w.op("Reshape", [gate, w.int64s(0, 0, q)], f"{path}/gate/Reshape", io, [B, S, q])
    queries, k = (decoder.head_norm(queries, layer, "q", q, size), decoder.head_norm(k, layer, "k", kv, size))
    queries, k = (_rotary(decoder, config, queries, layer, "q"), _rotary(decoder, config, k, layer, "k"))
    out = decoder.attention((queries, k, v), layer, (config.heads, config.kv_heads), size, lengths, None)
    gate = w.op("Sigmoid", [gate], f"{path}/gate/Sigmoid", io, [B, S, q])
    out = w.op("Mul", [out, gate], f"{path}/gate/Mul", io, [B, S, q])
    return decoder.projection(out, f"{weight}.o_proj", config.hidden, q)


def _rotary(decoder: DecoderBuilder, config: HybridConfig, x: str, layer: int, name: str) -> str:
    """MRotaryEmbedding in float, whatever the type of activations."""
    w, heads = decoder.writer, config.heads if name == "q" else config.kv_heads
    path, shape = (f"/model/layers.{layer}/attn/{name}_rotary/MRotaryEmbedding", [B, S, heads * config.head_size])
    caches = decoder.rotary_caches(config.context, config.rotary_dim, config.theta, FLOAT)
    half = config.io_dtype != FLOAT
    if half:
        x = w.node(
            "Cast", [x], [(f"{path}/root_input/Cast/output_0", FLOAT, shape)], f"{path}/root_input/Cast", to=FLOAT
        )[0]
    x = w.node(
        "MRotaryEmbedding",
        [x, "position_ids", *caches],
        [(f"{path}/output_0/Cast/output_0" if half else f"{path}/output_0", FLOAT, shape)],
        path,
        MICROSOFT,
        interleaved=0,
        rotary_embedding_dim=config.rotary_dim,
        num_heads=heads,
        mrope_section=list(config.mrope_section),
        mrope_layout=1,
        is_packed_batching=0,
    )[0]
    if half:
        x = w.node(
            "Cast", [x], [(f"{path}/output_0", config.io_dtype, shape)], f"{path}/output_0/Cast", to=config.io_dtype
        )[0]
    return x


def main() -> None:
    """Write a hybrid decoder with random int4 weights."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="keep the first layers only")
    parser.add_argument(
        "--fp16", action="store_true", help="float16 activations and no accuracy_level, as exported for CUDA"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = SIZES[args.size]
    if args.layers:
        config = replace(config, layers=args.layers)
    if args.fp16:
        config = replace(config, io_dtype=FLOAT16, accuracy_level=None)
    print(generate(config, args.folder, args.seed))


if __name__ == "__main__":
    main()
