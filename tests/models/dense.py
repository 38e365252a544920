"""Llama-style decoders with int4 weights, of any size: the graph that onnxruntime-genai's exporter writes for them.

`python -m tests.models.dense tiny OUT` writes a folder that onnxruntime-genai loads.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from .decoder import B, DecoderBuilder, Lengths, S
from .genai import GenaiModel, write_byte_tokenizer
from .weights import RandomWeights, WeightSource
from .writer import FLOAT, FLOAT16, ModelWriter


@dataclass(frozen=True)
class DenseConfig:
    """A decoder's dimensions. `qk_norm` norms each head of Q and K; `shared_embedding` ties it to the LM head."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    context: int
    theta: float = 10000.0
    epsilon: float = 1e-6
    shared_embedding: bool = False
    qk_norm: bool = False
    rotary_interleaved: bool = False
    io_dtype: int = FLOAT
    accuracy_level: int | None = 4


SIZES = {
    "tiny": DenseConfig(128, 256, 4, 4, 2, 32, 1024, 4096),
    "tiny-qk-norm": DenseConfig(128, 256, 4, 4, 2, 64, 1024, 4096, qk_norm=True),
    "135m": DenseConfig(576, 1536, 30, 9, 3, 64, 49152, 8192, theta=100000.0, epsilon=1e-5, shared_embedding=True),
    "1b": DenseConfig(2048, 8192, 16, 32, 8, 64, 128256, 131072, theta=500000.0, epsilon=1e-5, shared_embedding=True),
}


def build(
    config: DenseConfig, weights: WeightSource, folder: Path | None, producer: str = "nxrt-ep test models"
) -> onnx.ModelProto:
    """Write the graph (and the weights, where `folder` is given) and return the model without its weights."""
    writer = ModelWriter(folder, producer)
    decoder = DecoderBuilder(writer, weights, config.hidden, config.epsilon, config.io_dtype, config.accuracy_level)
    layers = list(range(config.layers))
    decoder.token_inputs()
    decoder.kv_inputs(layers, config.kv_heads)
    writer.output("logits", config.io_dtype, [B, S, config.vocab])
    decoder.kv_outputs(layers, config.kv_heads)
    lengths = decoder.lengths()
    residual = decoder.shared_embedding(config.vocab) if config.shared_embedding else decoder.embedding(config.vocab)
    x = decoder.input_norm(residual)
    for layer in layers:
        x = _attention(decoder, config, x, layer, lengths)
        x, residual = decoder.skip_norm(residual, x, layer, "post_attention_layernorm")
        x = decoder.mlp(x, layer, config.intermediate)
        last = layer + 1 == config.layers
        x, residual = decoder.skip_norm(
            residual, x, layer + 1, "final_norm_layernorm" if last else "input_layernorm", last
        )
    decoder.lm_head(x, config.vocab)
    return writer.finish()


def genai_model(config: DenseConfig, **changes: object) -> GenaiModel:
    """What genai_config.json says of this decoder."""
    model = GenaiModel(
        "qwen3" if config.qk_norm else "llama",
        config.vocab,
        config.context,
        config.hidden,
        config.head_size,
        config.heads,
        config.kv_heads,
        config.layers,
    )
    return replace(model, **changes)


def generate(config: DenseConfig, folder: Path, seed: int = 0) -> Path:
    """Write a complete model folder with random weights."""
    build(config, RandomWeights(config.io_dtype, seed=seed), folder)
    genai_model(config).write(folder)
    write_byte_tokenizer(folder)
    return folder


def _attention(decoder: DecoderBuilder, config: DenseConfig, x: str, layer: int, lengths: Lengths) -> str:
    weight = f"model.layers.{layer}.attn"
    q, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    packed = decoder.projection(x, f"{weight}.qkv_proj", q + 2 * kv, config.hidden)
    rotary = decoder.rotary_caches(config.context, config.head_size, config.theta)
    qkv = _split_and_norm(decoder, config, packed, layer, q, kv) if config.qk_norm else (packed, "", "")
    x = decoder.attention(
        qkv, layer, (config.heads, config.kv_heads), config.head_size, lengths, rotary, config.rotary_interleaved
    )
    return decoder.projection(x, f"{weight}.o_proj", config.hidden, q)


def _split_and_norm(
    decoder: DecoderBuilder, config: DenseConfig, packed: str, layer: int, q: int, kv: int
) -> tuple[str, str, str]:
    w, path = decoder.writer, f"/model/layers.{layer}/attn"
    parts = w.node(
        "Split",
        [packed, w.int64s(q, kv, kv)],
        [(f"{path}/qkv_proj/Split/output_{i}", config.io_dtype, [B, S, n]) for i, n in enumerate((q, kv, kv))],
        f"{path}/qkv_proj/Split",
        axis=-1,
    )
    return (
        decoder.head_norm(parts[0], layer, "q", q, config.head_size),
        decoder.head_norm(parts[1], layer, "k", kv, config.head_size),
        parts[2],
    )


def main() -> None:
    """Write a llama-style decoder with random int4 weights."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--fp16", action="store_true", help="float16 activations and no accuracy_level, as exported for CUDA"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = SIZES[args.size]
    if args.fp16:
        config = replace(config, io_dtype=FLOAT16, accuracy_level=None)
    print(generate(config, args.folder, args.seed))


if __name__ == "__main__":
    main()
