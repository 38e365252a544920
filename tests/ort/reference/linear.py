"""LinearAttention, GatedDeltaNet, LinearAttentionGate and CausalConvWithState."""

import numpy as np

from . import f64, sigmoid, silu, softplus

RULES = ("linear", "gated", "delta", "gated_delta")


def linear_attention(q, k, v, past=None, decay=None, beta=None, *, q_heads, kv_heads, rule="gated_delta", scale=0.0):
    """q [B,T,Hq*dk], k [B,T,Hkey*dk] (Hkey by shape), v [B,T,Hkv*dv], state [B,Hkv,dk,dv] k-major.

    Returns (output [B,T,max(Hq,Hkv)*dv], the state after each token [T+1,B,Hkv,dk,dv]).
    """
    B, T, _ = q.shape
    dk, dv = q.shape[-1] // q_heads, v.shape[-1] // kv_heads
    key_heads = k.shape[-1] // dk
    scale = scale or 1.0 / np.sqrt(dk)
    out_heads = max(q_heads, kv_heads)
    q = np.repeat(f64(q).reshape(B, T, q_heads, dk), out_heads // q_heads, 2)
    k = np.repeat(f64(k).reshape(B, T, key_heads, dk), kv_heads // key_heads, 2)
    v = f64(v).reshape(B, T, kv_heads, dv)
    state = np.zeros((B, kv_heads, dk, dv)) if past is None else f64(past)
    states, out = [state], np.zeros((B, T, out_heads, dv))
    for t in range(T):
        if rule in ("gated", "gated_delta"):
            g = f64(decay)[:, t].reshape(B, kv_heads, -1)  # one value a head, or one a key dimension
            state = state * np.exp(g)[..., None]
        update = v[:, t]
        if rule in ("delta", "gated_delta"):
            b = f64(beta)[:, t].reshape(B, -1, 1)  # one value a head, or one for all
            update = b * (update - np.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], update)
        states.append(state)
        shared = np.repeat(state, out_heads // kv_heads, 1)
        out[:, t] = scale * np.einsum("bhk,bhkv->bhv", q[:, t], shared)
    return out.reshape(B, T, out_heads * dv), np.stack(states)


def delta_gate(decay, a_log, dt_bias, activation, lower_bound=-5.0):
    """GatedDeltaNet's effective log decay; decay [tokens,H] or [tokens,H,dk], dt_bias [H], [H,dk] or [H*dk]."""
    decay = f64(decay)
    if activation == "none":
        return decay
    a_log, dt_bias = f64(a_log), f64(dt_bias)
    if decay.ndim == 3:
        a_log, dt_bias = a_log[:, None], dt_bias.reshape(a_log.size, -1)
    raw = decay + dt_bias
    if activation in ("softplus", "qwen"):
        return -np.exp(a_log) * softplus(raw)
    return lower_bound * sigmoid(np.exp(a_log) * raw)


def gated_delta_net(q, k, v, decay, beta, state, *, rule="gated_delta", scale=0.0, l2=False, cu_seqlens=None):
    """q,k [tokens,H,dk], v [tokens,Hv,dv]; decay and beta already effective; state [B,Hv,dv,dk] V-major or None.

    cu_seqlens None = uniform packing over the state's batch. Returns (output [tokens,Hv,dv], state).
    """
    q, k = f64(q), f64(k)
    if l2:
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True)) for x in (q, k))
    tokens, value_heads = v.shape[:2]
    if cu_seqlens is None:
        batch = state.shape[0]
        cu_seqlens = np.arange(batch + 1) * (tokens // batch)
    outs, finals = [], []
    for b in range(len(cu_seqlens) - 1):
        part = slice(cu_seqlens[b], cu_seqlens[b + 1])
        flat = [
            None if x is None else x[part].reshape(1, cu_seqlens[b + 1] - cu_seqlens[b], int(np.prod(x.shape[1:])))
            for x in (q, k, v, decay, beta)
        ]
        past = None if state is None else f64(state)[b : b + 1].swapaxes(-1, -2)
        out, states = linear_attention(
            *flat[:3], past, *flat[3:], q_heads=q.shape[1], kv_heads=value_heads, rule=rule, scale=scale
        )
        outs.append(out[0].reshape(-1, value_heads, v.shape[-1]))
        finals.append(states[-1][0].swapaxes(-1, -2))
    return np.concatenate(outs), np.stack(finals)


def linear_attention_gate(a, dt_bias, decay_scale, b=None):
    decay = f64(decay_scale) * softplus(f64(a) + f64(dt_bias))
    return decay, None if b is None else sigmoid(f64(b))


def causal_conv(x, weight, bias=None, past=None, *, activation="none", dilation=1):
    """x [B,C,T], weight [C,1,k], state [B,C,(k-1)*dilation]. Returns (y, present)."""
    x, weight = f64(x), f64(weight)
    B, C, T = x.shape
    taps = weight.shape[-1]
    length = (taps - 1) * dilation
    past = np.zeros((B, C, length)) if past is None else f64(past)
    full = np.concatenate([past, x], -1)
    y = sum(full[..., j * dilation : j * dilation + T] * weight[:, 0, j][None, :, None] for j in range(taps))
    if bias is not None:
        y = y + f64(bias)[None, :, None]
    return (silu(y) if activation in ("silu", "swish") else y), full[..., full.shape[-1] - length :]
