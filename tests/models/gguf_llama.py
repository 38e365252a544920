"""Reads a llama-architecture GGUF checkpoint of Q4_1 projections and a Q8_0 embedding, and runs it in numpy.

Block formats (32 values along K): Q4_1 is d f16, m f16, 16 bytes whose low nibbles are values 0..15 and whose high
nibbles are values 16..31, w = d*q + m. Q8_0 is d f16 and 32 int8, w = d*q.
Rows of Q and K are in GGUF's order: the pairs that the rotary embedding turns are neighbours (2i, 2i+1).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 32


@dataclass(frozen=True)
class Q4Matrix:
    """A [N, K] matrix: codes uint8 [N, K/32, 32] of 0..15, scales and minima f32 [N, K/32], w = scale*code + minimum"""

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray

    def dequantised(self) -> np.ndarray:
        """The matrix [N, K] in float64."""
        values = self.codes * self.scales.astype(np.float64)[..., None] + self.minima.astype(np.float64)[..., None]
        return values.reshape(len(values), -1)


@dataclass(frozen=True)
class Q8Matrix:
    """A [N, K] matrix: codes int8 [N, K/32, 32], scales float32 [N, K/32], w = scale*code."""

    codes: np.ndarray
    scales: np.ndarray

    def dequantised(self) -> np.ndarray:
        """The matrix [N, K] in float64."""
        return (self.codes * self.scales.astype(np.float64)[..., None]).reshape(len(self.codes), -1)


class LlamaGguf:
    """One checkpoint. Tensors stay in the memory-mapped file until they are asked for."""

    def __init__(self, path: Path) -> None:
        # gguf is needed for conversions only: importing this module must not need it.
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        self._fields: dict[str, Any] = {}
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if (architecture := self.field("general.architecture")) != "llama":
            raise ValueError(f"{path}: general.architecture: got '{architecture}', expected 'llama'")
        self.layers: int = self.field("llama.block_count")
        self.hidden: int = self.field("llama.embedding_length")
        self.intermediate: int = self.field("llama.feed_forward_length")
        self.heads: int = self.field("llama.attention.head_count")
        self.kv_heads: int = self.field("llama.attention.head_count_kv")
        self.head_size: int = self.field("llama.rope.dimension_count")
        self.context: int = self.field("llama.context_length")
        self.theta: float = self.field("llama.rope.freq_base")
        self.epsilon: float = self.field("llama.attention.layer_norm_rms_epsilon")
        self.vocab: int = len(self._data("token_embd.weight", "Q8_0"))

    def field(self, key: str) -> Any:
        """A metadata value; KeyError names the key that is missing."""
        if key not in self._fields:
            if (field := self._reader.get_field(key)) is None:
                raise KeyError(f"GGUF metadata '{key}' is missing")
            self._fields[key] = field.contents()  # seconds for a vocabulary
        return self._fields[key]

    def vector(self, name: str) -> np.ndarray:
        """A float32 tensor."""
        return np.array(self._data(name, "F32"), np.float32)

    def q4(self, *names: str) -> Q4Matrix:
        """One or more Q4_1 matrices, their rows one after another."""
        raw = np.concatenate([self._data(name, "Q4_1") for name in names])
        blocks = raw.reshape(len(raw), -1, 4 + BLOCK // 2)
        halves = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)
        packed = blocks[..., 4:]
        return Q4Matrix(np.concatenate([packed & 15, packed >> 4], axis=-1), halves[..., 0], halves[..., 1])

    def q8(self, name: str) -> Q8Matrix:
        """A Q8_0 matrix."""
        raw = self._data(name, "Q8_0")
        blocks = raw.reshape(len(raw), -1, 2 + BLOCK)
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
        return Q8Matrix(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), scales)

    def matrix(self, layer: int, name: str) -> np.ndarray:
        """A layer's projection [N, K] in float64, as `logits` uses it."""
        return self.q4(f"blk.{layer}.{name}.weight").dequantised()

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """The forward pass in float64 over ids [S] from an empty cache, from the definition: logits [S, vocab]."""
        embedding = self.q8("token_embd.weight").dequantised()
        x = embedding[ids]
        for layer in range(self.layers):
            x = x + self._attention(self._norm(x, f"blk.{layer}.attn_norm.weight"), layer)
            normed = self._norm(x, f"blk.{layer}.ffn_norm.weight")
            gate, up = (normed @ self.matrix(layer, name).T for name in ("ffn_gate", "ffn_up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.matrix(layer, "ffn_down").T
        return self._norm(x, "output_norm.weight") @ embedding.T

    def _attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        length, size = len(x), self.head_size
        q, k, v = (
            (x @ self.matrix(layer, name).T).reshape(length, heads, size).swapaxes(0, 1)
            for name, heads in (("attn_q", self.heads), ("attn_k", self.kv_heads), ("attn_v", self.kv_heads))
        )
        q, k = self._rotate(q), self._rotate(k)
        k, v = (np.repeat(part, self.heads // self.kv_heads, axis=0) for part in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(size)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return (weights @ v).swapaxes(0, 1).reshape(length, -1) @ self.matrix(layer, "attn_output").T

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """Rotary embedding of x [heads, S, D]: the pair (2i, 2i+1) turns by position * theta^(-2i/D)."""
        angles = np.arange(x.shape[1])[:, None] * self.theta ** (-np.arange(0, self.head_size, 2) / self.head_size)
        cos, sin = np.cos(angles), np.sin(angles)
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.vector(name)

    def _data(self, name: str, kind: str) -> np.ndarray:
        if name not in self._tensors:
            raise KeyError(f"GGUF tensor '{name}' is missing")
        tensor = self._tensors[name]
        if tensor.tensor_type.name != kind:
            raise ValueError(f"GGUF tensor '{name}': type: got {tensor.tensor_type.name}, expected {kind}")
        return tensor.data
