"""Where a generated decoder's weights come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .writer import UINT8, Tensor, numpy_dtype

# Standard deviation of weights before training; activations stay near 1 through the norms.
INIT_STD = 0.02
# Standard deviation of the random 4-bit codes around their zero point, in steps. A step is then INIT_STD / CODE_STD.
CODE_STD = 2.6


@dataclass(frozen=True)
class Quantised:
    """MatMulNBits' [N, K] matrix: codes [N, K/block, block*bits/8], scales [N, K/block], zero points or None."""

    n: int
    k: int
    bits: int
    block_size: int
    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None = None


class WeightSource(Protocol):
    """Gives a decoder builder its tensors by name. All shapes are the graph's, row-major."""

    def quantised(self, name: str, n: int, k: int) -> Quantised:
        """A quantised [n, k] projection."""

    def dense(self, name: str, shape: tuple[int, ...], mean: float, std: float) -> Tensor:
        """A tensor kept in floating point; `mean` and `std` tell a random source what is typical."""


class RandomWeights:
    """Random int4 weights at the speed of the disk.

    Codes come from a pool of bytes drawn once, read at a different offset for each matrix: drawing gigabytes of fresh
    numbers would take minutes and measure nothing more. Codes are normal around the zero point 8, so that products have
    no common offset.
    """

    _POOL = 8 * 1024 * 1024 - 257

    def __init__(self, io_dtype: int, block_size: int = 32, seed: int = 0) -> None:
        self._io_dtype, self._block_size = io_dtype, block_size
        self._rng = np.random.default_rng(seed)
        codes = np.clip(
            np.rint(self._rng.standard_normal(2 * self._POOL, dtype=np.float32) * CODE_STD + 8), 0, 15
        ).astype(np.uint8)
        self._codes = codes[0::2] | codes[1::2] << 4
        self._unit = self._rng.standard_normal(1 << 20, dtype=np.float32)

    def quantised(self, name: str, n: int, k: int) -> Quantised:
        blocks = -(-k // self._block_size)
        codes_shape = (n, blocks, self._block_size // 2)
        codes = Tensor(UINT8, codes_shape, self._cycle(self._codes, int(np.prod(codes_shape, dtype=np.int64))))
        step = INIT_STD / CODE_STD
        return Quantised(n, k, 4, self._block_size, codes, self._normal((n, blocks), step, step / 10))

    def dense(self, name: str, shape: tuple[int, ...], mean: float, std: float) -> Tensor:
        return self._normal(shape, mean, std)

    def _normal(self, shape: tuple[int, ...], mean: float, std: float) -> Tensor:
        pool = (self._unit * np.float32(std) + np.float32(mean)).astype(numpy_dtype(self._io_dtype))
        return Tensor(self._io_dtype, shape, self._cycle(pool, int(np.prod(shape, dtype=np.int64))))

    def _cycle(self, pool: np.ndarray, count: int):
        start = int(self._rng.integers(0, pool.size))

        def chunks() -> Iterator[np.ndarray]:
            at, left = start, count
            while left:
                chunk = pool[at : at + left]
                yield chunk
                left -= chunk.size
                at = 0

        return chunks
