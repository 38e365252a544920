"""com.microsoft::GroupQueryAttention."""

import numpy as np
import pytest

import harness
from harness import BF16, F16, F32, FLOATS, check, name_of, normal
from reference.attention import group_query_attention

MS = "com.microsoft"


def tables(rng, rows, half, dtype):
    """Cosines and sines of random angles: a table need not be a geometric one."""
    angle = rng.uniform(-np.pi, np.pi, (rows, half))
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def build(rng, *, B=2, S=5, heads=4, kv_heads=2, D=16, lengths=None, past=0, capacity=None, packed=False, dtype=F32,
          rotary=0, interleaved=False, window=-1, softcap=0.0, smooth=False, sink=False, bias=None, positions=None,
          qk_norm=False, scale=None, causal=True, two_d=False):
    """Inputs, attributes and reference. past = rows before this step (ragged: `lengths` = each entry's total).

    capacity = shared-buffer cache length; None = growing (or no past at all when past is 0).
    """
    totals = list(lengths) if lengths is not None else [past + S] * B
    total = max(totals) if past or lengths is None else S
    widths = (heads * D, kv_heads * D, kv_heads * D)
    q, k, v = (normal(rng, (B, S, w), dtype) for w in widths)
    if packed:
        q, k, v = np.concatenate([q, k, v], -1), None, None
    rows = capacity if capacity is not None else past
    past_key = past_value = None
    if rows:
        past_key, past_value = (normal(rng, (B, kv_heads, rows, D), dtype) for _ in range(2))
    seqlens = np.array(totals, np.int32) - 1
    cos = sin = None
    if rotary:
        cos, sin = tables(rng, max(64, total), rotary // 2, dtype)
    position_ids = None
    if positions is not None:
        position_ids = positions(B, S, total)
    attention_bias = None if bias is None else normal(rng, (bias[0], bias[1], S, total), dtype)
    head_sink = normal(rng, heads, dtype) if sink else None
    q_weight, k_weight = (normal(rng, D, dtype) if qk_norm else None for _ in range(2))
    attrs = dict(num_heads=heads, kv_num_heads=kv_heads)
    if rotary:
        attrs["do_rotary"] = 1
    if interleaved:
        attrs["rotary_interleaved"] = 1
    if window > 0:
        attrs["local_window_size"] = window
    if softcap:
        attrs["softcap"] = softcap
    if smooth:
        attrs["smooth_softmax"] = 1
    if scale is not None:
        attrs["scale"] = scale
    if not causal:
        attrs["causal"] = 0
    expected = group_query_attention(
        q, k, v, past_key, past_value, seqlens, total, cos, sin, position_ids, attention_bias, head_sink, q_weight,
        k_weight, heads=heads, kv_heads=kv_heads, scale=scale, local_window=window, softcap=softcap, smooth=smooth,
        interleaved=interleaved, rotary_on=bool(rotary), causal=causal, present_length=capacity,
    )
    inputs = [
        q, k, v, past_key, past_value, seqlens[:, None] if two_d else seqlens, np.array(total, np.int32), cos, sin,
        position_ids, attention_bias, head_sink, None, None, q_weight, k_weight,
    ]
    return inputs, attrs, list(expected)


def ort_cpu_refuses(*, dtype=F32, D=16, rotary=0, qk_norm=False, **_) -> bool:
    """Its limits: no bf16 kernel, no query/key norm, head sizes of whole vectors."""
    return dtype == BF16 or qk_norm or D % 8 != 0 or (rotary and (D % 16 != 0 or rotary % 16 != 0))


def case(rng, check_options=None, **how):
    inputs, attrs, expected = build(rng, **how)
    options = dict(check_options or {})
    if how.get("capacity") is not None:
        options.setdefault("alias", {1: 3, 2: 4})
    if ort_cpu_refuses(**how):
        options.setdefault("ort_cpu", "refuses")
    check(
        "GroupQueryAttention", inputs, expected, attrs, domain=MS, initializers=(7, 8, 11, 14, 15), **options,
    )


STEPS = {
    "prompt": dict(S=5),
    "one_token": dict(S=1, past=7),
    "chunk": dict(B=1, S=4, past=5),
    "first_token": dict(S=1),
    "shared_prompt": dict(S=5, capacity=12),
    "shared_token": dict(S=1, past=7, capacity=12),
    "shared_chunk": dict(B=1, S=4, past=5, capacity=12),
    "shared_full": dict(S=1, past=11, capacity=12),
}
EACH_STEP = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())


@EACH_STEP
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
def test_steps_and_types(rng, packed, dtype, step):
    case(rng, packed=packed, dtype=dtype, **step)


@EACH_STEP
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("rotary", [32, 16, 8], ids=["full", "half", "quarter"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
def test_rotary(rng, packed, rotary, interleaved, step):
    case(rng, D=32, packed=packed, rotary=rotary, interleaved=interleaved, **step)


@EACH_STEP
@pytest.mark.parametrize("window", [1, 2, 3, 6, 100])
def test_local_window(rng, window, step):
    """A query sees itself and the window - 1 tokens before it."""
    case(rng, window=window, rotary=16, **step)


@EACH_STEP
def test_softcap(rng, step):
    case(rng, softcap=1.5, **step)


@EACH_STEP
@pytest.mark.parametrize("dtype", [F32, F16], ids=name_of)
def test_smooth_softmax(rng, dtype, step):
    case(rng, smooth=True, dtype=dtype, **step)


@EACH_STEP
@pytest.mark.parametrize("dtype", [F32, F16], ids=name_of)
def test_head_sink(rng, dtype, step):
    case(rng, sink=True, dtype=dtype, **step)


@EACH_STEP
@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 1), (2, 4)], ids=str)
def test_attention_bias(rng, sizes, step):
    B = step.get("B", 2)
    case(rng, bias=(min(sizes[0], B), sizes[1]), **step)


@EACH_STEP
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("rotary", [0, 16], ids=["plain", "rotary"])
def test_query_and_key_norms(rng, rotary, dtype, step):
    """ORT CPU refuses the q_norm_weight and k_norm_weight inputs: float64 is the only oracle."""
    case(rng, qk_norm=True, rotary=rotary, dtype=dtype, **step)


def test_norm_epsilons(rng):
    inputs, attrs, _ = build(rng, qk_norm=True)
    q, k, v, *_, q_weight, k_weight = inputs
    for given, value in ((dict(qk_norm_epsilon=0.5), 0.5), (dict(q_norm_epsilon=0.5, k_norm_epsilon=0.5), 0.5)):
        expected = group_query_attention(
            q, k, v, None, None, inputs[5], 5, q_norm=q_weight, k_norm=k_weight, heads=4, kv_heads=2, epsilon=value
        )
        check(
            "GroupQueryAttention", inputs, list(expected), dict(attrs, **given), domain=MS, ort_cpu="refuses",
            initializers=(14, 15),
        )


@EACH_STEP
def test_seqlens_of_two_dimensions(rng, step):
    case(rng, two_d=True, rotary=16, **step)


@pytest.mark.parametrize("rotary", [0, 16], ids=["plain", "rotary"])
@pytest.mark.parametrize("capacity", [None, 12], ids=["growing", "shared"])
@pytest.mark.parametrize("lengths", [(5, 3), (1, 5), (5, 5), (2, 5, 4)], ids=str)
def test_ragged_prompt(rng, lengths, capacity, rotary):
    """Right-padded prompts: rows beyond an entry's own length are padding."""
    case(rng, B=len(lengths), S=5, lengths=lengths, capacity=capacity, rotary=rotary)


@pytest.mark.parametrize("rotary", [0, 16], ids=["plain", "rotary"])
@pytest.mark.parametrize("capacity", [None, 12], ids=["growing", "shared"])
@pytest.mark.parametrize("lengths", [(8, 4), (1, 8), (8, 8), (2, 8, 5)], ids=str)
def test_ragged_token(rng, lengths, capacity, rotary):
    """One more token for entries of different lengths in one cache."""
    case(rng, B=len(lengths), S=1, past=7, lengths=lengths, capacity=capacity, rotary=rotary)


@pytest.mark.parametrize("window", [2, 5])
def test_ragged_token_in_a_window(rng, window):
    case(rng, B=2, S=1, past=7, lengths=(8, 3), capacity=12, rotary=16, window=window)


def offset_positions(offset):
    return lambda B, S, total: np.broadcast_to(offset + np.arange(S) + total - S, (B, S)).astype(np.int64).copy()


@EACH_STEP
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
def test_position_ids(rng, packed, step):
    """Positions may differ from the cache position; a first prompt reads only the first one."""
    case(rng, rotary=16, positions=offset_positions(3), packed=packed, **step)


def test_position_ids_per_entry(rng):
    positions = lambda B, S, total: np.array([[9], [2]], np.int64)  # noqa: E731
    case(rng, S=1, past=7, rotary=16, positions=positions)


@EACH_STEP
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (6, 2), (8, 1), (9, 3)])
def test_head_counts(rng, heads, kv_heads, step):
    case(rng, heads=heads, kv_heads=kv_heads, **step)


@pytest.mark.parametrize("step", ["prompt", "one_token", "shared_token"])
@pytest.mark.parametrize("D", [8, 24, 32, 40, 64, 80, 96, 128, 256])
def test_head_sizes(rng, D, step):
    case(rng, D=D, rotary=D, **STEPS[step])


@pytest.mark.parametrize("D", [1, 3, 7, 17, 33])
@pytest.mark.parametrize("step", ["prompt", "one_token"])
def test_any_head_size(rng, D, step):
    case(rng, D=D, **STEPS[step])


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_scale(rng, scale):
    case(rng, scale=scale)


@pytest.mark.parametrize("step", ["prompt", "one_token"])
def test_bidirectional(rng, step):
    case(rng, check_options=dict(may_decline="causal"), causal=False, **STEPS[step])


@pytest.mark.parametrize("step", ["prompt", "one_token", "shared_token", "shared_chunk"])
@pytest.mark.parametrize("D", [16, 72])
def test_every_tier(rng, tier, D, step):
    case(rng, check_options=dict(provider_options=tier), D=D, rotary=D, **STEPS[step])


@pytest.mark.parametrize("S, past", [(130, 0), (1, 300), (1, 1023)])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_long_contexts(rng, dtype, S, past):
    """Longer than any tile of a blocked softmax."""
    case(rng, S=S, past=past, dtype=dtype, D=32)


TILES = {
    "prompt_128": dict(S=70, D=128, rotary=128, kv_heads=1),
    "chunk_256": dict(B=1, S=40, past=90, D=256, rotary=64, interleaved=True),
    "window_80": dict(S=70, D=80, window=33, rotary=32),
    "bias_64": dict(S=66, D=64, bias=(1, 4), softcap=2.0, qk_norm=True),
    "ragged_128": dict(S=70, D=128, lengths=(70, 9), capacity=80),
    "sink_96": dict(B=1, S=33, past=300, D=96, sink=True, capacity=400),
    "prompt_264": dict(S=20, D=264),
    "token_512": dict(S=1, past=100, D=512, heads=8),
    "tokens_128": dict(B=1, S=3, past=200, D=128, heads=8, window=150),
    "tokens_64": dict(B=1, S=2, past=333, D=64, heads=14, capacity=400),
    "tokens_256": dict(B=1, S=2, past=150, D=256, heads=8, sink=True),
    "token_256": dict(S=1, past=200, D=256, heads=8, lengths=(201, 60), capacity=256),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("name", TILES)
def test_tiles(rng, name, dtype):
    """More rows and keys than any tile holds, in the head sizes that have kernels of their own."""
    case(rng, dtype=dtype, **TILES[name])


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(
    "step",
    [dict(S=5), dict(S=1, past=7), dict(S=1, past=70, D=64), dict(B=1, S=4, past=5), dict(S=40, D=64), dict(S=20, D=17)],
    ids=str,
)
def test_rows_behind_the_length_are_not_read(rng, dtype, step):
    inputs, attrs, expected = build(rng, dtype=dtype, rotary=16, capacity=80, **step)
    for cache in inputs[3:5]:
        cache[:, :, step.get("past", 0) :] = np.nan
    # Whoever copies the cache may copy what is behind the length.
    for cache in expected[1:]:
        cache[:, :, step.get("past", 0) + step["S"] :] = np.nan
    check(
        "GroupQueryAttention", inputs, expected, attrs, domain=MS, alias={1: 3, 2: 4}, initializers=(7, 8),
        ort_cpu="refuses" if ort_cpu_refuses(dtype=dtype, rotary=16, D=step.get("D", 16)) else "agrees",
    )


def test_everything_at_once(rng):
    case(
        rng, S=1, past=7, capacity=12, lengths=(8, 5), packed=True, D=32, rotary=16, interleaved=True, window=4, softcap=2.0,
        sink=True, bias=(1, 4),
    )


def test_large_scores(rng):
    """exp would overflow without the running maximum."""
    inputs, attrs, _ = build(rng)
    inputs[0] = inputs[0] * np.float32(100)
    inputs[1] = inputs[1] * np.float32(10)
    expected = group_query_attention(*inputs[:5], inputs[5], 5, heads=4, kv_heads=2)
    # Scores near 1e3 hold 6e-5 in f32, which exp turns into a relative error of the same size.
    check(
        "GroupQueryAttention", inputs, list(expected), attrs, domain=MS,
        tolerance=harness.Tolerance(1e-3), ort_tolerance=harness.Tolerance(1e-3),
    )


@pytest.mark.parametrize(
    "slot, value, word",
    [
        (16, np.array([3, 3], np.int32), "query_seqlens"),
        (12, np.ones(1, F32), "k_scale"),
    ],
    ids=["query_seqlens", "k_scale"],
)
def test_inputs_that_may_be_declined(rng, slot, value, word):
    inputs, attrs, _ = build(rng, past=4)
    inputs += [None] * (17 - len(inputs))
    inputs[slot] = value
    model = harness.build_node("GroupQueryAttention", inputs, attrs, outputs=3, domain=MS)
    harness.check_declined(model, "GroupQueryAttention", word)


def test_quantised_cache_is_declined(rng):
    inputs, attrs, _ = build(rng, S=1, past=7)
    inputs[3], inputs[4] = (np.zeros(x.shape, np.int8) for x in inputs[3:5])
    inputs[12] = inputs[13] = np.ones(1, F32)
    model = harness.build_node(
        "GroupQueryAttention", inputs,
        dict(attrs, k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR", kv_cache_bit_width=8), outputs=3,
        out_types={1: np.dtype(np.int8), 2: np.dtype(np.int8)}, domain=MS,
    )
    harness.check_declined(model, "GroupQueryAttention", "past_key")


def resident_rows(total, capacity, window):
    """L(T) of the definition: how many of the newest positions a window cache of `capacity` rows holds."""
    if total <= capacity:
        return total
    reclaimed = capacity - window + 1
    return total - reclaimed * -(-(total - capacity) // reclaimed)


@pytest.mark.parametrize("capacity", [4, 5, 7])
@pytest.mark.parametrize("S, past", [(1, 3), (1, 4), (1, 7), (1, 30), (3, 0), (9, 0), (3, 2), (6, 9), (20, 5)])
@pytest.mark.parametrize("rotary", [0, 16], ids=["plain", "rotary"])
def test_sliding_window_cache(rng, rotary, S, past, capacity):
    """A cache of only the window: the newest positions from row 0 on, evicted in whole groups."""
    window, heads, kv_heads, D = 4, 4, 2, 16
    B = 1 if S > 1 and past else 2
    total = past + S
    inputs, attrs, (out, keys, values) = build(rng, B=B, S=S, past=past, rotary=rotary, window=window)
    kept_before, kept_after = resident_rows(past, capacity, window), resident_rows(total, capacity, window)
    for slot, history in ((3, inputs[3]), (4, inputs[4])):
        cache = normal(rng, (B, kv_heads, capacity, D))
        if past:
            cache[:, :, :kept_before] = history[:, :, past - kept_before :]
        inputs[slot] = cache
    expected = [out]
    for present in (keys, values):
        rows = np.full((B, kv_heads, capacity, D), np.nan)
        rows[:, :, :kept_after] = present[:, :, total - kept_after : total]
        expected.append(rows)
    check(
        "GroupQueryAttention", inputs, expected, dict(attrs, sliding_window_cache=1), domain=MS, initializers=(7, 8),
        alias={1: 3, 2: 4}, may_decline="sliding_window_cache",
    )


def test_windowed_cache_smaller_than_the_window(rng):
    inputs, attrs, _ = build(rng, S=1, past=7, capacity=8)
    attrs = dict(attrs, local_window_size=9, sliding_window_cache=1)
    model = harness.build_node("GroupQueryAttention", inputs, attrs, outputs=3, domain=MS)
    harness.check_hostile(model, "past_key")


@pytest.mark.parametrize("S", [1, 4])
def test_cache_of_another_node(rng, S):
    """Keys of no rows: the past is attended as it is (layers that share one cache)."""
    inputs, attrs, _ = build(rng, B=1, S=S, past=9 - S)
    q, past = inputs[0], [normal(rng, (1, 2, 9, 16)) for _ in range(2)]
    keys = [x[:, :, 9 - S :].transpose(0, 2, 1, 3).reshape(1, S, 32) for x in past]
    expected = group_query_attention(q, *keys, *past, np.array([8]), 9, heads=4, kv_heads=2)
    nothing = np.zeros((1, 0, 32), F32)
    inputs = [q, nothing, nothing, *past, np.array([8], np.int32), np.array(9, np.int32)]
    check("GroupQueryAttention", inputs, list(expected), attrs, domain=MS, alias={1: 3, 2: 4})


@pytest.mark.parametrize("capacity", [None, 12], ids=["growing", "shared"])
def test_chunk_of_two_entries(rng, capacity):
    """Chunked prefill of a batch, which ORT CPU refuses."""
    options = dict(ort_cpu="refuses")
    case(rng, B=2, S=4, past=5, capacity=capacity, rotary=16, check_options=options)
    case(rng, B=2, S=4, past=5, lengths=(9, 6), capacity=capacity, rotary=16, check_options=options)


HOSTILE = {
    "seqlens_beyond_the_cache": (dict(S=1, past=7, capacity=12), 5, np.array([7, 12], np.int32), "seqlens_k"),
    "negative_seqlens": (dict(S=1, past=7, capacity=12), 5, np.array([-2, 7], np.int32), "seqlens_k"),
    "seqlens_beyond_a_growing_cache": (dict(S=1, past=7), 5, np.array([9, 7], np.int32), "seqlens_k"),
    "huge_seqlens": (dict(S=1, past=7, capacity=12), 5, np.array([2**31 - 1, 7], np.int32), "seqlens_k"),
    "total_beyond_the_cache": (dict(S=1, past=7, capacity=12), 6, np.array(14, np.int32), "total_sequence_length"),
    "negative_total": (dict(S=1, past=7, capacity=12), 6, np.array(-1, np.int32), "total_sequence_length"),
    "too_few_seqlens": (dict(), 5, np.array([4], np.int32), "input 5"),
    "query_width": (dict(), 0, np.zeros((2, 5, 63), F32), "input 0"),
    "key_width": (dict(), 1, np.zeros((2, 5, 16), F32), "input 1"),
    "value_length": (dict(), 2, np.zeros((2, 4, 32), F32), "input 2"),
    "past_batch": (dict(S=1, past=7), 3, np.zeros((1, 2, 7, 16), F32), "input 3"),
    "past_heads": (dict(S=1, past=7), 3, np.zeros((2, 3, 7, 16), F32), "input 3"),
    "past_head_size": (dict(S=1, past=7), 4, np.zeros((2, 2, 7, 15), F32), "input 4"),
    "cos_width": (dict(rotary=16), 7, np.zeros((64, 9), F32), "input 7"),
    "cos_rows": (dict(rotary=16), 7, np.zeros((3, 8), F32), "cos_cache"),
    "position_beyond_the_table": (
        dict(S=1, past=7, rotary=16, positions=offset_positions(0)), 9, np.array([[64], [7]], np.int64), "position_ids"
    ),
    "negative_position": (
        dict(S=1, past=7, rotary=16, positions=offset_positions(0)), 9, np.array([[-1], [7]], np.int64), "position_ids"
    ),
    "bias_columns": (dict(bias=(1, 1)), 10, np.zeros((1, 1, 5, 4), F32), "input 10"),
    "sink_length": (dict(sink=True), 11, np.zeros(3, F32), "input 11"),
}


# Bad values of a tensor; in the other cases shapes are wrong, or the one value that the host knows.
BAD_DATA = (
    "seqlens_beyond_the_cache", "negative_seqlens", "seqlens_beyond_a_growing_cache", "huge_seqlens",
    "position_beyond_the_table", "negative_position",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(rng, name):
    how, slot, value, word = HOSTILE[name]
    inputs, attrs, _ = build(rng, **how)
    inputs[slot] = value
    model = harness.build_node("GroupQueryAttention", inputs, attrs, outputs=3, domain=MS)
    harness.check_hostile(model, word, data=name in BAD_DATA)


@pytest.mark.parametrize("attrs", [dict(num_heads=3), dict(num_heads=0), dict(kv_num_heads=0)], ids=str)
def test_attributes_outside_the_schema(rng, attrs):
    inputs, given, _ = build(rng)
    model = harness.build_node("GroupQueryAttention", inputs, dict(given, **attrs), outputs=3, domain=MS)
    harness.check_rejected(model, next(iter(attrs)))
