"""MoE and QMoE, and the layouts that their weights come in. E experts, T tokens, H hidden, I inter."""

import numpy as np

from . import f64, sigmoid, silu
from .quant import pack_bits, round_to_int8, unpack_bits

JITTER = 0.01  # the sparse mixer's


def route(logits, k, *, normalize=False, sparse_mixer=False, weights=None):
    """Mixing weights float64 [T, E], zero for experts that are not chosen. Of equal logits the later expert goes first
    (in the sparse mixer the earlier one)."""
    logits = f64(logits)
    out = np.zeros_like(logits)
    for row, line in enumerate(logits):
        if sparse_mixer:
            chosen, shares = _mix(line)
        else:
            chosen = sorted(range(len(line)), key=lambda e: (-line[e], -e))[:k]
            among = line[chosen] if normalize else line
            shares = np.exp(line[chosen] - line.max()) / np.exp(among - line.max()).sum()
        if weights is not None:
            shares = f64(weights)[row, chosen]
            if normalize:
                shares = shares / shares.sum() if shares.sum() else np.zeros(k)
        out[row, chosen] = shares
    return out


def _mix(line):
    """Two experts: the greatest, and the greatest of the others; each weighed by a softmax over those close to it."""
    chosen, shares, left = [], [], np.ones(len(line), bool)
    for _ in range(2):
        best = int(np.argmax(np.where(left, line, -np.inf)))
        close = left & (line[best] - line <= 2 * JITTER * np.maximum(np.abs(line), line[best]))
        chosen.append(best)
        shares.append(1 / np.exp(line[close] - line[best]).sum())
        left[best] = False
    return chosen, np.array(shares)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


PLAIN = {
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu": gelu_tanh,
    "silu": silu,
    "identity": lambda x: x,
}


def moe(
    x, mix, fc1, fc2, fc3=None, b1=None, b2=None, b3=None, *, activation="relu", fusion=0, alpha=1.0, beta=0.0,
    limit=np.inf, limit_after=False, int8_block=None,
):
    """x [..., H]; mix [T, E] as `route` gives it; fc1 [E, N1, H], fc2 [E, H, I], fc3 [E, I, H], biases [E, N].
    int8_block: what enters a product is rounded to int8, with a scale for each block (accuracy level 4)."""
    rows = f64(x).reshape(-1, x.shape[-1])
    out = np.zeros_like(rows)

    def project(rows, weight, bias, e):
        rows = round_to_int8(rows, int8_block) if int8_block else rows
        y = rows @ f64(weight[e]).T
        return y if bias is None else y + f64(bias[e])

    for e in range(mix.shape[1]):
        tokens = np.flatnonzero(mix[:, e])
        if not tokens.size:
            continue
        first = project(rows[tokens], fc1, b1, e)
        gated = activation in ("swiglu", "geglu")
        if fc3 is not None:
            gate, up = first, project(rows[tokens], fc3, b3, e)
        elif gated and fusion == 2:
            gate, up = np.split(first, 2, -1)
        elif gated:
            gate, up = first[:, 0::2], first[:, 1::2]
        else:
            gate, up = first, 1.0
        if activation == "swiglu":
            clamped = np.clip(up, -limit, limit) + beta
            held = np.minimum(gate, limit)
            inner = np.minimum(gate * sigmoid(alpha * gate), limit) if limit_after else held * sigmoid(alpha * held)
            inner = inner * clamped
        else:
            inner = PLAIN.get(activation, gelu_tanh)(gate) * up
        out[tokens] += mix[tokens, e, None] * project(inner, fc2, b2, e)
    return out.reshape(x.shape)


def dequantize(codes, scales, zero_points=None, *, bits, block):
    """codes uint8 [E, N, K] and scales and zero points [E, N, blocks], one element each; block 0: the whole row."""
    K = codes.shape[-1]
    of = np.arange(K) // block if block else np.zeros(K, int)
    zero = float(1 << (bits - 1)) if zero_points is None else f64(zero_points)[..., of]
    return (f64(codes) - zero) * f64(scales)[..., of]


def pack_three(codes):
    """A stream of three-bit codes, low bits first, along the last axis; each row ends on a whole byte."""
    bits = np.stack([(codes >> np.uint8(i)) & 1 for i in range(3)], -1).reshape(codes.shape[:-1] + (-1,))
    return np.packbits(bits, axis=-1, bitorder="little")


def pack(codes, bits):
    return pack_three(codes) if bits == 3 else pack_bits(codes, bits)


def cutlass_order(N, K, bits):
    """Which code, of [N, K] flattened, comes next as CUTLASS's mixed GEMM reads a matrix on sm_80: int [N * K].

    Columns of K: k is permuted within each load of the matrix unit (128 bits of a thread quartet: 32 codes of 4 bits,
    16 of 8), 4 (2) columns take turns in tiles of 64, and in each 32-bit word the even codes come before the odd ones.
    """
    load, across, word = 128 // bits, 16 // bits, 32 // bits
    # Quartet member q holds the pairs (8 p + 2 q, 8 p + 2 q + 1) of every p.
    order = np.arange(load).reshape(-1, 4, 2).transpose(1, 0, 2).ravel()
    columns = np.arange(N * K).reshape(N, K // load, load)[..., order]
    tiles = columns.reshape(N // across, across, K // 64, 64).transpose(0, 2, 1, 3)
    words = tiles.reshape(-1, word)
    return np.concatenate([words[:, 0::2], words[:, 1::2]], -1).ravel()


def pack_cutlass(codes, bits):
    """codes [E, N, K] prepacked: uint8 [E, K, N * bits / 8]."""
    E, N, K = codes.shape
    words = codes.reshape(E, -1)[:, cutlass_order(N, K, bits)]
    return pack_bits(words, bits).reshape(E, K, N * bits // 8)


def unpack_cutlass(packed, bits):
    """The codes [E, N, K] of prepacked ones."""
    E, K, row = packed.shape
    N = row * 8 // bits
    codes = np.empty((E, N * K), np.uint8)
    codes[:, cutlass_order(N, K, bits)] = unpack_bits(packed.reshape(E, -1), bits)
    return codes.reshape(E, N, K)


def pack_columns(codes):
    """4-bit codes [E, N, K], neighbours in N in a byte: uint8 [E, K, N / 2]."""
    return pack_bits(codes.transpose(0, 2, 1), 4)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dequantize_fp4(codes, scales, global_scale, block):
    """codes [E, N, K] of E2M1, scales [E, N, K / block], global_scale [E]."""
    return E2M1[codes] * np.repeat(f64(scales), block, -1) * f64(global_scale)[:, None, None]


def dequantize_fp8(weights, scales=None, global_scale=None, block=0):
    """weights [E, N, K] of E4M3FN; scales [E, ceil(N / block), ceil(K / block)] or global_scale [E]."""
    if scales is None:
        return f64(weights) * f64(global_scale)[:, None, None]
    _, N, K = weights.shape
    return f64(weights) * np.repeat(np.repeat(f64(scales), block, 1), block, 2)[:, :N, :K]


__all__ = [
    "dequantize", "dequantize_fp4", "dequantize_fp8", "moe", "pack", "pack_columns", "pack_cutlass", "route",
    "unpack_bits",
]
