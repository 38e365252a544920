"""Models of one op, for measuring a kernel alone."""

from __future__ import annotations

from pathlib import Path

import onnx

from .weights import RandomWeights
from .writer import FLOAT, MICROSOFT, ModelWriter


def matmul_nbits(
    n: int,
    k: int,
    folder: Path | None,
    copies: int = 1,
    block_size: int = 32,
    accuracy_level: int = 4,
    io_dtype: int = FLOAT,
    seed: int = 0,
) -> onnx.ModelProto:
    """`copies` independent 4-bit MatMulNBits nodes: inputs x0.. [M, k], outputs y0.. [M, n], each with its own weights.

    Many copies make weights that no cache holds, which is what decoding meets.
    """
    writer = ModelWriter(folder)
    weights = RandomWeights(io_dtype, block_size, seed)
    for i in range(copies):
        writer.input(f"x{i}", io_dtype, ["M", k])
        writer.output(f"y{i}", io_dtype, ["M", n])
        matrix = weights.quantised(f"b{i}", n, k)
        inputs = [
            f"x{i}",
            writer.initializer(f"b{i}.codes", matrix.codes),
            writer.initializer(f"b{i}.scales", matrix.scales),
        ]
        attributes = {"K": k, "N": n, "bits": 4, "block_size": block_size, "accuracy_level": accuracy_level}
        writer.node("MatMulNBits", inputs, [f"y{i}"], f"matmul{i}", MICROSOFT, **attributes)
    return writer.finish()
