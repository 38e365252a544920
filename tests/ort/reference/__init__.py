"""Float64 numpy references, written from each op's definition (specifications: onnx.ai and ORT's ContribOperators).

Every function widens its inputs to float64 first and returns float64; rounding to the op's dtype is part of the
reference only where the definition says so. NaN in a result marks a value that the definition leaves open.
Letters: B batch, S new tokens, P past, T total, H query heads, Hk key/value heads, D head size, M N K of a product.
"""

import numpy as np


def f64(value):
    """Widens one input; None stays None."""
    return None if value is None else np.asarray(value).astype(np.float64)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(0.0, x)
