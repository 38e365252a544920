"""GroupQueryAttention (com.microsoft) and Attention (ai.onnx 23/24)."""

import numpy as np

from . import f64
from .norms import rms_norm
from .rotary import rotate


def softmax_with_sink(scores, sink=None):
    """Softmax over the last axis; a sink adds exp(sink) to the denominator; a row of -inf gives zeros."""
    top = scores.max(-1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)


def group_query_attention(
    q, k, v, past_key, past_value, seqlens_k, total, cos=None, sin=None, position_ids=None, bias=None, head_sink=None,
    q_norm=None, k_norm=None, *, heads, kv_heads, scale=None, local_window=-1, softcap=0.0, smooth=False,
    interleaved=False, rotary_on=False, causal=True, epsilon=1e-6, present_length=None,
):
    """q [B,S,H*D] (or packed QKV with k = v = None), k, v [B,S,Hk*D], past [B,Hk,P,D] or None.

    seqlens_k[b] + 1 is the batch entry's total length; entry b had max(0, total_b - S) tokens before (none when S
    is the whole `total`: the first prompt, right-padded). Returns (output, present_key, present_value); output rows
    of padding and cache rows at or beyond total_b are open.
    """
    q, k, v, past_key, past_value = map(f64, (q, k, v, past_key, past_value))
    B, S, _ = q.shape
    if k is None:
        D = q.shape[-1] // (heads + 2 * kv_heads)
        q, k, v = np.split(q, [heads * D, (heads + kv_heads) * D], -1)
    D = q.shape[-1] // heads
    scale = scale or 1.0 / np.sqrt(D)
    q, k, v = q.reshape(B, S, heads, D), k.reshape(B, S, kv_heads, D), v.reshape(B, S, kv_heads, D)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, epsilon=epsilon), rms_norm(k, k_norm, epsilon=epsilon)
    P = 0 if past_key is None else past_key.shape[2]
    length = max(P, total) if present_length is None else present_length
    first_prompt = S == total
    seqlens_k = np.asarray(seqlens_k).reshape(-1)
    out = np.full((B, S, heads, D), np.nan)
    keys, values = np.full((2, B, kv_heads, length, D), np.nan)
    for b in range(B):
        here = int(seqlens_k[b]) + 1
        before = 0 if first_prompt else here - S
        valid = min(S, here - before)
        if rotary_on:
            if position_ids is None:
                where = before + np.arange(S)
            else:
                where = position_ids[0, 0] + np.arange(S) if first_prompt else position_ids[b]
            q[b], k[b] = (rotate(x, cos[where][:, None], sin[where][:, None], interleaved) for x in (q[b], k[b]))
        if before:
            keys[b, :, :before], values[b, :, :before] = past_key[b, :, :before], past_value[b, :, :before]
        keys[b, :, before:here] = k[b, :valid].transpose(1, 0, 2)
        values[b, :, before:here] = v[b, :valid].transpose(1, 0, 2)
        row, column = before + np.arange(valid)[:, None], np.arange(here)[None]
        hidden = (column > row) if causal else np.zeros((valid, here), bool)
        if local_window > 0:
            hidden = hidden | (column <= row - local_window)
        for h in range(heads):
            own = h * kv_heads // heads
            scores = scale * q[b, :valid, h] @ keys[b, own, :here].T
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            if bias is not None:
                scores = scores + f64(bias)[b % bias.shape[0], h % bias.shape[1], :valid, :here]
            scores = np.where(hidden, -np.inf, scores)
            sink = f64(head_sink)[h] if head_sink is not None else (0.0 if smooth else None)
            out[b, :valid, h] = softmax_with_sink(scores, sink) @ values[b, own, :here]
    return out.reshape(B, S, heads * D), keys, values


def onnx_attention(
    q, k, v, mask=None, past_key=None, past_value=None, nonpad=None, *, q_heads=None, kv_heads=None, causal=False,
    scale=None, softcap=0.0, mode=0, window=(-1, -1),
):
    """Returns (Y, present_key, present_value, qk_matmul_output of `mode`); 3-D inputs need the head counts."""
    q, k, v = map(f64, (q, k, v))
    flat = q.ndim == 3
    if flat:
        q, k, v = (
            x.reshape(x.shape[0], x.shape[1], n, -1).transpose(0, 2, 1, 3)
            for x, n in ((q, q_heads), (k, kv_heads), (v, kv_heads))
        )
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        k, v = np.concatenate([f64(past_key), k], 2), np.concatenate([f64(past_value), v], 2)
    B, H, S, D = q.shape
    T = k.shape[2]
    group = H // k.shape[1]
    scores = (1.0 / np.sqrt(D) if scale is None else scale) * q @ np.repeat(k, group, 1).swapaxes(-1, -2)
    stages = [scores]
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    stages.append(scores)
    if mask is not None:
        extra = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else f64(mask)
        if extra.shape[-1] < T:
            extra = np.pad(extra, [(0, 0)] * (extra.ndim - 1) + [(0, T - extra.shape[-1])], constant_values=-np.inf)
        scores = scores + extra
    column, row = np.arange(T), np.arange(S)[:, None]
    offset = np.full((B, 1, 1, 1), past) if nonpad is None else (np.asarray(nonpad) - S).reshape(B, 1, 1, 1)
    if causal:
        scores = np.where(column > row + offset, -np.inf, scores)
    if window[0] >= 0:
        scores = np.where(column < row + offset - window[0], -np.inf, scores)
    if window[1] >= 0:
        scores = np.where(column > row + offset + window[1], -np.inf, scores)
    if nonpad is not None:
        scores = np.where(column >= np.asarray(nonpad).reshape(B, 1, 1, 1), -np.inf, scores)
    stages.append(np.broadcast_to(scores, (B, H, S, T)))
    weights = softmax_with_sink(stages[-1])
    stages.append(weights)
    y = weights @ np.repeat(v, group, 1)
    if flat:
        y = y.transpose(0, 2, 1, 3).reshape(B, S, -1)
    return y, k, v, stages[mode]
