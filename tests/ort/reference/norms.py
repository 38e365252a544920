"""The normalisations and GatedAdd."""

import numpy as np

from . import f64, sigmoid, silu


def rms_norm(x, scale, *, axis=-1, epsilon=1e-5):
    """SimplifiedLayerNormalization and RMSNormalization: the mean of squares over axes [axis, rank)."""
    x = f64(x)
    axes = tuple(range(axis % x.ndim, x.ndim))
    return x / np.sqrt((x**2).mean(axes, keepdims=True) + epsilon) * f64(scale)


def inverse_rms(x, *, axis=-1, epsilon=1e-5):
    x = f64(x)
    axes = tuple(range(axis % x.ndim, x.ndim))
    return 1.0 / np.sqrt((x**2).mean(axes, keepdims=True) + epsilon)


def layer_norm(x, scale, bias=None, *, axis=-1, epsilon=1e-5):
    """Returns (y, mean, 1/deviation)."""
    x = f64(x)
    axes = tuple(range(axis % x.ndim, x.ndim))
    mean = x.mean(axes, keepdims=True)
    inverse = 1.0 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + epsilon)
    y = (x - mean) * inverse * f64(scale)
    return (y if bias is None else y + f64(bias)), mean, inverse


def skip_simplified(x, skip, gamma, bias=None, *, epsilon=1e-12):
    """Returns (y, input + skip + bias); skip may lack the batch dimension."""
    total = f64(x) + f64(skip)
    if bias is not None:
        total = total + f64(bias)
    return rms_norm(total, gamma, epsilon=epsilon), total


def gated_rms_norm(x, scale, gate, *, epsilon=1e-5, activation="silu"):
    """RMS over each group of C = len(scale) elements of the last dimension, times the activated gate."""
    x, scale, gate = f64(x), f64(scale), f64(gate)
    groups = x.reshape(x.shape[:-1] + (x.shape[-1] // scale.shape[0], scale.shape[0]))
    normed = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + epsilon) * scale
    return normed.reshape(x.shape) * (sigmoid(gate) if activation == "sigmoid" else silu(gate))


def gated_add(x, y, gate):
    """X + round_to_T(Y * gate): the product is rounded to the tensors' type."""
    product = (f64(y) * f64(gate)).astype(np.asarray(x).dtype)
    return f64(x) + f64(product)


def lp_norm(x, *, axis=-1, p=2):
    """x / ||x||_p, and 0 where the norm is 0. There is no epsilon."""
    x = f64(x)
    size = np.abs(x).sum(axis, keepdims=True) if p == 1 else np.sqrt((x**2).sum(axis, keepdims=True))
    return np.divide(x, size, out=np.zeros_like(x), where=size != 0)
