"""MatMulNBits and GatherBlockQuantized."""

import numpy as np

from . import f64


def pack_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs unsigned values along the last axis into bytes, low bits first; a partial last byte is filled with zeros."""
    per_byte = 8 // bits
    short = -values.shape[-1] % per_byte
    values = np.pad(values.astype(np.uint8), [(0, 0)] * (values.ndim - 1) + [(0, short)])
    groups = values.reshape(values.shape[:-1] + (-1, per_byte))
    packed = np.zeros(groups.shape[:-1], np.uint8)
    for lane in range(per_byte):
        packed |= groups[..., lane] << np.uint8(lane * bits)
    return packed


def unpack_bits(packed: np.ndarray, bits: int) -> np.ndarray:
    per_byte = 8 // bits
    lanes = [(packed >> np.uint8(lane * bits)) & np.uint8((1 << bits) - 1) for lane in range(per_byte)]
    return np.stack(lanes, -1).reshape(packed.shape[:-1] + (-1,))


def dequantize_blocks(blocks, scales, zero_points, *, bits, block_size, N, K):
    """blocks uint8 [N, k_blocks, block_size*bits/8] -> float64 [N, K]."""
    k_blocks = -(-K // block_size)
    q = unpack_bits(blocks.reshape(N, k_blocks, -1), bits).astype(np.float64)
    if zero_points is None:
        zero = np.full((N, k_blocks), float(1 << (bits - 1)))
    elif zero_points.dtype == np.uint8:
        zero = unpack_bits(zero_points.reshape(N, -1), bits)[:, :k_blocks].astype(np.float64)
    else:
        zero = f64(zero_points).reshape(N, k_blocks)
    weights = (q - zero[:, :, None]) * f64(scales).reshape(N, k_blocks)[:, :, None]
    return weights.reshape(N, -1)[:, :K]


def matmul_nbits(a, blocks, scales, zero_points=None, bias=None, *, bits=4, block_size, N, K):
    """a [..., K] times the dequantised [N, K] transposed, plus bias [N]."""
    weights = dequantize_blocks(blocks, scales, zero_points, bits=bits, block_size=block_size, N=N, K=K)
    y = f64(a) @ weights.T
    return y if bias is None else y + f64(bias)


def round_to_int8(a, block_size):
    """Activations of accuracy_level 4: symmetric int8, one scale a block of K."""
    a = f64(a)
    blocks = np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % block_size)])
    blocks = blocks.reshape(a.shape[:-1] + (-1, block_size))
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    rounded = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)) * scale
    return rounded.reshape(a.shape[:-1] + (-1,))[..., : a.shape[-1]]


def gather_block_quantized(q, indices, scales, zero_points, *, default_zero, gather_axis, quantize_axis, block_size):
    """q, zero_points: UNPACKED integers. An index out of range gives zeros.

    q [d0, ...]; scales and zero_points have q's shape with ceil(d/block_size) on quantize_axis.
    """
    q = np.asarray(q).astype(np.float64)
    block_of = np.arange(q.shape[quantize_axis]) // block_size
    scale = np.take(f64(scales), block_of, axis=quantize_axis)
    zero = default_zero if zero_points is None else np.take(f64(zero_points), block_of, axis=quantize_axis)
    table = (q - zero) * scale
    size = table.shape[gather_axis]
    indices = np.asarray(indices)
    wrapped = np.where(indices < 0, indices + size, indices)
    inside = (wrapped >= 0) & (wrapped < size)
    out = np.take(table, np.where(inside, wrapped, 0), axis=gather_axis)
    shape = (1,) * gather_axis + inside.shape + (1,) * (table.ndim - gather_axis - 1)
    return np.where(inside.reshape(shape), out, 0.0)
