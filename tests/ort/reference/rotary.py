"""RotaryEmbedding (com.microsoft and ai.onnx 23) and MRotaryEmbedding."""

import numpy as np

from . import f64


def rotate(x, cos, sin, interleaved=False):
    """x [..., D]; cos, sin [..., R/2] broadcastable over x's leading axes; the first R of D are rotated."""
    x, cos, sin = f64(x), f64(cos), f64(sin)
    half = cos.shape[-1]
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    real, imaginary = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    new_real = real * cos - imaginary * sin
    new_imaginary = real * sin + imaginary * cos
    if interleaved:
        turned = np.stack([new_real, new_imaginary], -1).reshape(new_real.shape[:-1] + (2 * half,))
    else:
        turned = np.concatenate([new_real, new_imaginary], -1)
    return np.concatenate([turned, rest], -1)


def by_head(x, num_heads):
    """[B,S,H*D] or [B,H,S,D] -> [B,S,H,D], and the function that goes back."""
    if x.ndim == 4:
        return x.transpose(0, 2, 1, 3), lambda y: y.transpose(0, 2, 1, 3)
    b, s, hidden = x.shape
    return x.reshape(b, s, num_heads, hidden // num_heads), lambda y: y.reshape(b, s, hidden)


def rotary(x, cos_rows, sin_rows, *, num_heads, interleaved=False):
    """cos_rows, sin_rows [B,S,R/2]: the rows already picked by position."""
    heads, back = by_head(f64(x), num_heads)
    return back(rotate(heads, f64(cos_rows)[:, :, None], f64(sin_rows)[:, :, None], interleaved))


def rotary_by_position(x, position_ids, cos, sin, *, num_heads, interleaved=False):
    """position_ids [B,S], or [1] meaning that offset plus 0..S-1."""
    batch, length = (x.shape[0], x.shape[2]) if x.ndim == 4 else x.shape[:2]
    if position_ids.ndim == 1:
        position_ids = np.broadcast_to(position_ids[0] + np.arange(length), (batch, length))
    return rotary(x, cos[position_ids], sin[position_ids], num_heads=num_heads, interleaved=interleaved)


def mrope_axis(sections, layout):
    """Which of the three position streams each of the R/2 frequencies takes."""
    if layout == 0:
        return np.repeat([0, 1, 2], sections)
    axis = np.zeros(int(np.sum(sections)), int)
    axis[1 : 3 * sections[1] : 3] = 1
    axis[2 : 3 * sections[2] : 3] = 2
    return axis


def mrotary(x, position_ids, cos, sin, *, num_heads, sections, layout, interleaved=False):
    """position_ids [3,B,S] (time, height, width)."""
    axis = mrope_axis(sections, layout)
    column = np.arange(axis.size)
    rows = [table[position_ids[axis], :][column, :, :, column].transpose(1, 2, 0) for table in (f64(cos), f64(sin))]
    return rotary(x, *rows, num_heads=num_heads, interleaved=interleaved)
