"""LinearAttention: com.microsoft v1 and ai.onnx v27."""

import numpy as np
import pytest

import harness
from harness import BF16, F16, F32, FLOATS, Tolerance, check, name_of, normal
from reference.linear import RULES, linear_attention

MS = "com.microsoft"
OPSET = 27


def inputs(rng, *, B=2, T=5, q_heads=2, kv_heads=2, key_heads=None, dk=8, dv=6, dtype=F32, state_dtype=None,
           past=True, per_key=False, one_beta=False, rule="gated_delta"):
    key_heads = key_heads or kv_heads
    keys = rng.standard_normal((B, T, key_heads, dk))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    return [
        normal(rng, (B, T, q_heads * dk), dtype),
        keys.reshape(B, T, key_heads * dk).astype(dtype),
        normal(rng, (B, T, kv_heads * dv), dtype),
        normal(rng, (B, kv_heads, dk, dv), state_dtype or dtype) if past else None,
        -np.abs(normal(rng, (B, T, kv_heads * (dk if per_key else 1)))).astype(dtype) if "gated" in rule else None,
        rng.random((B, T, 1 if one_beta else kv_heads)).astype(dtype) if "delta" in rule else None,
    ]


def case(rng, *, rule="gated_delta", q_heads=2, kv_heads=2, scale=0.0, domain=MS, attrs=None, dtype=F32,
         state_dtype=None, past=True, check_options=None, **shape):
    made = inputs(
        rng, rule=rule, q_heads=q_heads, kv_heads=kv_heads, dtype=dtype, state_dtype=state_dtype, past=past, **shape
    )
    out, states = linear_attention(*made, q_heads=q_heads, kv_heads=kv_heads, rule=rule, scale=scale)
    attributes = dict(q_num_heads=q_heads, kv_num_heads=kv_heads, update_rule=rule, scale=scale, **(attrs or {}))
    options = dict(check_options or {})
    if (dtype == BF16 and domain == MS) or (domain == "" and shape.get("T") == 0):
        options["ort_cpu"] = "refuses"  # no bf16 kernel; the function body cannot reshape an empty sequence
    check(
        "LinearAttention", made, [out, states[-1]], attributes, domain=domain, opset=OPSET,
        out_types={1: state_dtype or dtype}, alias={1: 3} if past else None, **options,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("state_dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("T", [1, 37])
def test_real_sizes_of_every_type(rng, T, state_dtype, dtype):
    refused = BF16 in (dtype, state_dtype) or (dtype, state_dtype) == (F32, F16)
    how = dict(check_options=dict(ort_cpu="refuses")) if refused else {}
    case(rng, T=T, dk=128, dv=128, q_heads=2, kv_heads=4, dtype=dtype, state_dtype=state_dtype, **how)


DOMAINS = pytest.mark.parametrize("domain", [MS, ""], ids=["ms", "onnx"])


@DOMAINS
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_rules_and_types(rng, dtype, rule, domain):
    case(rng, rule=rule, dtype=dtype, domain=domain)


@DOMAINS
@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
def test_f32_state_with_half_data(rng, dtype, domain):
    case(rng, dtype=dtype, state_dtype=F32, domain=domain)


@DOMAINS
@pytest.mark.parametrize("T", [0, 1, 2, 64, 65, 200])
@pytest.mark.parametrize("past", [True, False], ids=["past", "fresh"])
def test_lengths(rng, past, T, domain):
    case(rng, T=T, past=past, domain=domain)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("past", [True, False], ids=["past", "fresh"])
@pytest.mark.parametrize("T", [0, 1])
def test_short_steps_of_every_rule(rng, T, past, rule):
    case(rng, rule=rule, T=T, past=past)


@DOMAINS
@pytest.mark.parametrize("rule", RULES)
def test_grouped_queries(rng, rule, domain):
    """More query heads than states: consecutive queries share one."""
    case(rng, rule=rule, q_heads=6, kv_heads=2, domain=domain)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("key_heads", [2, 6])
def test_inverse_grouped_queries(rng, key_heads, rule):
    """More states than queries; the keys may have either head count."""
    case(rng, rule=rule, q_heads=2, kv_heads=6, key_heads=key_heads)


def test_onnx_rejects_inverse_grouped_queries(rng):
    made = inputs(rng, q_heads=2, kv_heads=4, key_heads=2)
    model = harness.build_node(
        "LinearAttention", made, dict(q_num_heads=2, kv_num_heads=4), outputs=2, opset=OPSET
    )
    with pytest.raises(Exception, match="q_num_heads"):
        harness.run_ort_cpu(model)
    if not harness.oracles_only():
        with pytest.raises(Exception, match="q_num_heads"):
            harness.ep_session(model.serialize())


@DOMAINS
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_decay_per_key_dimension(rng, rule, domain):
    case(rng, rule=rule, per_key=True, domain=domain)


@DOMAINS
@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
def test_one_beta_for_all_heads(rng, rule, domain):
    case(rng, rule=rule, one_beta=True, domain=domain)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_scale(rng, scale):
    case(rng, scale=scale)


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_chunk_size_changes_nothing(rng, chunk_size):
    case(rng, T=70, attrs=dict(chunk_size=chunk_size))


@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize(
    "dk, dv", [(1, 1), (7, 9), (16, 16), (17, 33), (32, 32), (64, 80), (100, 50), (128, 128), (256, 32), (300, 20)]
)
def test_every_tier(rng, tier, dk, dv, T):
    case(rng, T=T, dk=dk, dv=dv, check_options=dict(provider_options=tier))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("T", [2, 33, 100])
@pytest.mark.parametrize("dk, dv", [(64, 32), (128, 16), (256, 16)])
def test_many_tokens_of_16_bits(rng, dk, dv, T, rule, dtype):
    """Prompts of the sizes that CUDA multiplies as matrices, in chunks of 32 tokens."""
    refused = dict(check_options=dict(ort_cpu="refuses")) if dtype == BF16 else {}
    case(rng, T=T, dk=dk, dv=dv, rule=rule, dtype=dtype, state_dtype=F32, q_heads=1, kv_heads=2, key_heads=1, **refused)


def prompt(rng, dtype):
    return inputs(rng, B=1, T=70, dk=64, dv=16, dtype=dtype, state_dtype=F32)


def check_prompt(made, scale=0.0):
    out, states = linear_attention(*made, q_heads=2, kv_heads=2, scale=scale)
    check(
        "LinearAttention", made, [out, states[-1]], dict(q_num_heads=2, kv_num_heads=2, scale=scale), domain=MS,
        opset=OPSET, out_types={1: F32}, alias={1: 3}, ort_cpu="refuses" if made[0].dtype == BF16 else "agrees",
    )


def decays(rng, kind, shape):
    if kind == "cuts":  # e^-60000 here and there, hardly any decay elsewhere
        return np.where(rng.random(shape) < 0.2, -60000.0, -0.01 * rng.random(shape))
    return {"none": np.zeros(shape), "slow": -1e-4 * rng.random(shape), "fast": -20 * rng.random(shape)}[kind]


HALVES = pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)


@HALVES
@pytest.mark.parametrize("kind", ["none", "slow", "fast", "cuts"])
@pytest.mark.parametrize("one_key", [False, True], ids=["keys", "one_key"])
def test_adversarial_gates(rng, one_key, kind, dtype):
    """Decays that a cumulated product or logarithm would spoil; beta of 1 and one key for all tokens, which cancel."""
    made = prompt(rng, dtype)
    made[4] = decays(rng, kind, made[4].shape).astype(dtype)
    made[5] = np.ones_like(made[5]) if kind != "fast" else made[5]
    if one_key:
        made[1][:] = made[1][:, :1]
    check_prompt(made)


@HALVES
@pytest.mark.parametrize("factor", [1e-9, 1e8])
def test_states_beyond_half(rng, factor, dtype):
    """A state that a half cannot hold, beside columns that it can: decay and scale bring the outputs into range."""
    made = prompt(rng, dtype)
    made[3][:, 0] *= factor
    made[3][:, 1, :, ::3] *= factor
    made[4][:] = -0.01
    check_prompt(made, scale=min(1.0, 1e-2 / factor))


def test_strong_decay(rng):
    """exp of a large negative log decay is 0, not NaN."""
    made = inputs(rng)
    made[4] = np.full_like(made[4], -200.0)
    out, states = linear_attention(*made, q_heads=2, kv_heads=2)
    check(
        "LinearAttention", made, [out, states[-1]], dict(q_num_heads=2, kv_num_heads=2), domain=MS, opset=OPSET,
        alias={1: 3},
    )


@pytest.mark.parametrize("window", [1, 3])
def test_state_window_is_declined(rng, window):
    made = inputs(rng)
    made[3] = np.broadcast_to(made[3], (window, *made[3].shape)).copy()
    model = harness.build_node(
        "LinearAttention", made, dict(q_num_heads=2, kv_num_heads=2, state_window=window), outputs=2, domain=MS
    )
    with pytest.raises(Exception, match="state_window|linear_attention"):
        harness.run_ort_cpu(model)
    harness.check_declined(model, "LinearAttention", "state_window")


@pytest.mark.parametrize(
    "attrs, word",
    [(dict(update_rule="foo"), "update_rule"), (dict(q_num_heads=0), "q_num_heads"), (dict(kv_num_heads=-2), "kv_num_heads")],
    ids=str,
)
def test_attributes_outside_the_schema(rng, attrs, word):
    model = harness.build_node(
        "LinearAttention", inputs(rng), dict(dict(q_num_heads=2, kv_num_heads=2), **attrs), outputs=2, domain=MS
    )
    harness.check_rejected(model, word)


@pytest.mark.parametrize("slot", [4, 5])
def test_required_gate_is_absent(rng, slot):
    made = inputs(rng)
    made[slot] = None
    model = harness.build_node(
        "LinearAttention", made, dict(q_num_heads=2, kv_num_heads=2), outputs=2, domain=MS
    )
    harness.check_rejected(model, {4: "decay", 5: "beta"}[slot])


@pytest.mark.parametrize("slot, axis", [(1, 1), (2, 1), (3, 0), (3, 1), (3, 2), (3, 3), (4, 2), (5, 2), (4, 1)])
def test_wrong_shapes(rng, slot, axis):
    """One element too many on one axis of one input."""
    made = inputs(rng, B=2, T=3, q_heads=4, kv_heads=4, dk=8, dv=8)
    shape = list(made[slot].shape)
    shape[axis] += 1
    made[slot] = np.zeros(shape, F32)
    model = harness.build_node(
        "LinearAttention", made, dict(q_num_heads=4, kv_num_heads=4), outputs=2, domain=MS
    )
    harness.check_hostile(model, f"input {slot}")
