"""com.microsoft::GatedDeltaNet."""

import numpy as np
import pytest

import harness
from harness import BF16, F16, F32, FLOATS, check, name_of, normal
from reference import f64, sigmoid
from reference.linear import RULES, delta_gate, gated_delta_net

MS = "com.microsoft"


def case(rng, *, B=2, S=5, heads=2, value_heads=2, dk=8, dv=6, dtype=F32, gate_dtype=None, rule="gated_delta",
         gate="none", beta_activation="none", l2=False, scale=0.0, per_key=False, bias_shape=None, state=True,
         lengths=None, rank4=False, packed=False, final=True, attrs=None, **how):
    """Token-major inputs; lengths = ragged packing through cu_seqlens."""
    gate_dtype = gate_dtype or dtype
    tokens = sum(lengths) if lengths is not None else B * S
    B = len(lengths) if lengths is not None else B
    q = normal(rng, (tokens, heads, dk), dtype)
    k = normal(rng, (tokens, heads, dk))
    if not l2:
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    k = k.astype(dtype)
    v = normal(rng, (tokens, value_heads, dv), dtype)
    decay_shape = (tokens, value_heads, dk) if per_key else (tokens, value_heads)
    decay = normal(rng, decay_shape, gate_dtype) if gate != "none" else -np.abs(normal(rng, decay_shape, gate_dtype))
    decay = decay if "gated" in rule else None
    beta = None
    if "delta" in rule:
        beta = (rng.random((tokens, value_heads)) if beta_activation == "none" else
                normal(rng, (tokens, value_heads))).astype(gate_dtype)
    initial = normal(rng, (B, value_heads, dv, dk)) if state else None
    use_gate = gate != "none" and decay is not None
    a_log = normal(rng, value_heads) if use_gate else None
    dt_bias = normal(rng, bias_shape or value_heads) if use_gate else None
    cu = None if lengths is None else np.cumsum([0, *lengths]).astype(np.int32)

    effective = None if decay is None else delta_gate(decay, a_log, dt_bias, gate if use_gate else "none")
    rate = None if beta is None else (sigmoid(f64(beta)) if beta_activation == "sigmoid" else beta)
    out, last = gated_delta_net(q, k, v, effective, rate, initial, rule=rule, scale=scale, l2=l2, cu_seqlens=cu)

    if rank4:
        q, k, v, out = (x.reshape(B, S, *x.shape[1:]) for x in (q, k, v, out))
        decay, beta = (None if x is None else x.reshape(B, S, *x.shape[1:]) for x in (decay, beta))
    if packed:
        lead = q.shape[:-2]
        q = np.concatenate([x.reshape(*lead, -1) for x in (q, k, v)], -1)
        k = v = None
    attributes = dict(update_rule=rule, gate_activation=gate if use_gate else "none", beta_activation=beta_activation,
                      qk_l2_norm=int(l2), scale=scale, **(attrs or {}))
    check(
        "GatedDeltaNet", [q, k, v, cu, decay, beta, initial, a_log, dt_bias], [out, last] if final else [out],
        attributes, domain=MS, out_types={1: F32}, alias={1: 6} if state and final else None, **how,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rank4", [True, False], ids=["rank4", "rank3"])
def test_rules_and_types(rng, rank4, rule, dtype):
    case(rng, rule=rule, dtype=dtype, rank4=rank4)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("gate", ["softplus", "qwen", "sigmoid", "kda"])
def test_fused_gates(rng, gate, dtype):
    case(rng, gate=gate, beta_activation="sigmoid", l2=True, dtype=dtype, rank4=True)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
def test_f32_gates_with_half_data(rng, dtype):
    case(rng, gate="softplus", beta_activation="sigmoid", l2=True, dtype=dtype, gate_dtype=F32, rank4=True)


@pytest.mark.parametrize("value_heads", [2, 4, 6])
def test_inverse_grouped_queries(rng, value_heads):
    case(rng, heads=2, value_heads=value_heads, gate="softplus", l2=True, rank4=True)


@pytest.mark.parametrize("gate", ["none", "softplus", "sigmoid"])
@pytest.mark.parametrize("bias_shape", [(2,), (2, 8), (16,)], ids=str)
def test_decay_per_key_dimension(rng, bias_shape, gate):
    case(rng, per_key=True, gate=gate, bias_shape=bias_shape, rank4=True, may_decline="decay")


@pytest.mark.parametrize("lengths", [(3, 5), (1, 1), (0, 4), (4, 0, 2), (7,), (33, 1, 0, 50, 5)], ids=str)
@pytest.mark.parametrize("state", [True, False], ids=["state", "fresh"])
def test_ragged_packing(rng, state, lengths):
    case(rng, lengths=lengths, state=state, may_decline="cu_seqlens")


@pytest.mark.parametrize("S", [0, 1, 2, 65, 130])
def test_lengths(rng, S):
    """ORT CPU wants at least one token; an empty step copies the state, as in LinearAttention."""
    case(
        rng, S=S, rank4=True, gate="softplus", beta_activation="sigmoid", l2=True,
        ort_cpu="agrees" if S else "refuses",
    )


@pytest.mark.parametrize("rank4", [True, False], ids=["rank4", "rank3"])
def test_packed_qkv(rng, rank4):
    case(rng, packed=True, value_heads=4, rank4=rank4, may_decline="packed")


def test_without_the_final_state(rng):
    case(rng, final=False)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_scale(rng, scale):
    case(rng, scale=scale)


@pytest.mark.parametrize("S", [1, 5])
@pytest.mark.parametrize("dk, dv", [(1, 1), (7, 9), (17, 33), (32, 32), (100, 50), (128, 128), (256, 32)])
def test_every_tier(rng, tier, dk, dv, S):
    case(rng, S=S, dk=dk, dv=dv, rank4=True, provider_options=tier)


def test_state_updates_are_declined(rng):
    q = normal(rng, (2, 5, 2, 8))
    v, decay = normal(rng, (2, 5, 2, 6)), -np.abs(normal(rng, (2, 5, 2)))
    model = harness.build_node(
        "GatedDeltaNet",
        [q, q, v, None, decay, np.abs(decay), normal(rng, (2, 2, 6, 8)), None, None, np.array([1, 1], np.int32)],
        dict(state_update_capacity=2), outputs=3, out_types={1: F32, 2: F32}, domain=MS,
    )
    harness.check_declined(model, "GatedDeltaNet", "state_update_capacity")


@pytest.mark.parametrize("attrs", [dict(update_rule="foo"), dict(gate_activation="x"), dict(beta_activation="y")], ids=str)
def test_attributes_outside_the_schema(rng, attrs):
    q = normal(rng, (2, 5, 2, 8))
    v, decay = normal(rng, (2, 5, 2, 6)), -np.abs(normal(rng, (2, 5, 2)))
    model = harness.build_node(
        "GatedDeltaNet", [q, q, v, None, decay, np.abs(decay), normal(rng, (2, 2, 6, 8))], attrs, outputs=2,
        out_types={1: F32}, domain=MS,
    )
    harness.check_rejected(model, next(iter(attrs)))


@pytest.mark.parametrize("slot, shape", [(1, (2, 5, 3, 8)), (2, (2, 5, 3, 6)), (4, (2, 5, 3)), (5, (2, 4, 2)),
                                         (6, (2, 2, 8, 6)), (6, (1, 2, 6, 8))], ids=str)
def test_wrong_shapes(rng, slot, shape):
    q = normal(rng, (2, 5, 2, 8))
    v, decay = normal(rng, (2, 5, 2, 6)), -np.abs(normal(rng, (2, 5, 2)))
    made = [q, q, v, None, decay, np.abs(decay), normal(rng, (2, 2, 6, 8))]
    made[slot] = normal(rng, shape)
    model = harness.build_node("GatedDeltaNet", made, outputs=2, out_types={1: F32}, domain=MS)
    harness.check_hostile(model, f"input {slot}")
