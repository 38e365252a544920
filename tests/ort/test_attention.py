"""ai.onnx::Attention (opsets 23 to 25)."""

import numpy as np
import pytest

import harness
from harness import BF16, F16, F32, FLOATS, check, name_of, normal
from reference.attention import onnx_attention


def case(rng, *, B=2, S=4, L=6, H=4, Hk=2, D=8, Dv=None, dtype=F32, layout="4d", mask=None, past=None, causal=False,
         scale=None, softcap=0.0, nonpad=None, mode=None, opset=24, present=None, window=None, **how):
    """L new keys; past = cached keys (None: no cache). mask: a shape, with dtype bool or the data's."""
    Dv = Dv or D
    q, k, v = normal(rng, (B, H, S, D), dtype), normal(rng, (B, Hk, L, D), dtype), normal(rng, (B, Hk, L, Dv), dtype)
    attrs = {}
    if layout == "3d":
        q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(B, x.shape[2], -1) for x in (q, k, v))
        attrs.update(q_num_heads=H, kv_num_heads=Hk)
    past_key = past_value = None
    if past is not None:
        past_key, past_value = normal(rng, (B, Hk, past, D), dtype), normal(rng, (B, Hk, past, Dv), dtype)
    attn_mask = None
    if mask is not None:
        shape, kind = mask
        attn_mask = rng.random(shape) < 0.7 if kind == "bool" else normal(rng, shape, dtype)
        if kind == "bool":
            attn_mask[..., 0] = True
    lengths = None if nonpad is None else np.array(nonpad, np.int64)
    if window:
        attrs.update(left_window_size=window[0], right_window_size=window[1])
    for name, value in (("is_causal", int(causal)), ("scale", scale), ("softcap", softcap or None),
                        ("qk_matmul_output_mode", mode)):
        if value:
            attrs[name] = value
    y, keys, values, qk = onnx_attention(
        q, k, v, attn_mask, past_key, past_value, lengths, q_heads=H, kv_heads=Hk, causal=causal, scale=scale,
        softcap=softcap, mode=mode or 0, window=window or (-1, -1),
    )
    # onnx's shape inference writes 0 for a hidden size or key count that it cannot see.
    how.setdefault("dynamic", layout == "4d" and mode is None)
    with_cache = past is not None if present is None else present
    outputs = [y] + ([keys, values] if with_cache else [None, None]) + ([qk] if mode is not None else [])
    # ORT infers an extent of 0 for some outputs of symbolic inputs, and then refuses to bind anything else.
    how.setdefault("dynamic", layout == "4d" and mode is None)
    check(
        "Attention", [q, k, v, attn_mask, past_key, past_value, lengths], outputs, attrs, opset=opset, **how
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", ["3d", "4d"])
@pytest.mark.parametrize("opset", [23, 24])
def test_layouts_and_types(rng, opset, layout, causal, dtype):
    case(rng, layout=layout, causal=causal, dtype=dtype, opset=opset, ort_cpu="refuses" if dtype == BF16 else "agrees")


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("past", [0, 1, 7])
@pytest.mark.parametrize("S", [1, 4])
def test_cache(rng, S, past, causal, opset):
    case(rng, S=S, L=S, past=past, causal=causal, opset=opset)


@pytest.mark.parametrize("layout", ["3d", "4d"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (1, 1, 4, 6), (2, 1, 4, 6), (1, 4, 4, 6), (2, 4, 4, 6), (4, 4, 6)],
                         ids=str)
def test_masks(rng, shape, kind, layout):
    case(rng, mask=(shape, kind), layout=layout, ort_cpu="refuses" if shape == (1, 6) else "agrees")


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_with_cache_and_causality(rng, kind):
    case(rng, S=3, L=3, past=5, causal=True, mask=((2, 1, 3, 8), kind))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_short_mask(rng, kind):
    """A last dimension shorter than the keys is padded with -inf."""
    case(rng, mask=((4, 4), kind), may_decline="attn_mask", ort_cpu="refuses")


def test_fully_masked_rows_are_zero(rng):
    B, S, L, H, D = 1, 3, 4, 2, 8
    q, k, v = (normal(rng, (B, H, n, D)) for n in (S, L, L))
    mask = np.ones((S, L), bool)
    mask[1] = False
    y, *_ = onnx_attention(q, k, v, mask)
    assert not y[:, :, 1].any()
    check("Attention", [q, k, v, mask], [y], opset=24)


@pytest.mark.parametrize("softcap", [0.5, 5.0])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_softcap(rng, causal, softcap):
    case(rng, softcap=softcap, causal=causal, mask=((4, 6), "float"))


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_scale(rng, scale):
    case(rng, scale=scale)


@pytest.mark.parametrize("H, Hk", [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("layout", ["3d", "4d"])
def test_head_counts(rng, layout, H, Hk):
    case(rng, H=H, Hk=Hk, layout=layout)


@pytest.mark.parametrize("D, Dv", [(8, 12), (12, 8), (1, 1), (17, 33), (64, 64), (128, 64)])
@pytest.mark.parametrize("past", [None, 3])
def test_head_sizes(rng, past, D, Dv):
    case(rng, D=D, Dv=Dv, S=3, L=3, past=past)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_qk_output(rng, mode):
    case(rng, mode=mode, softcap=2.0, mask=((4, 6), "float"), present=False, may_decline="qk_matmul_output")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("nonpad", [(6, 6), (6, 4), (5, 6)], ids=str)
def test_nonpad_lengths(rng, nonpad, causal):
    """An external cache: only the first nonpad keys of each entry count."""
    case(rng, nonpad=nonpad, causal=causal, may_decline="nonpad_kv_seqlen")


@pytest.mark.parametrize("window", [(2, 0), (2, 1), (-1, 1), (0, -1), (0, 0)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("past", [None, 5])
def test_windows(rng, past, causal, window):
    """Opset 25: keys further left or right of the query's position are hidden."""
    case(rng, S=4, L=4, past=past, causal=causal, window=window, opset=25)


@pytest.mark.parametrize("S, L", [(1, 1), (1, 300), (130, 130)])
@pytest.mark.parametrize("dtype", [F32, F16], ids=name_of)
def test_long_sequences(rng, dtype, S, L):
    # ORT rounds scores and weights to f16 on the way.
    loose = dict(ort_tolerance=harness.Tolerance(4e-3)) if dtype == F16 else {}
    case(rng, S=S, L=L, causal=S == L, dtype=dtype, D=32, **loose)


TILES = {
    "heads_of_80": dict(S=70, L=140, D=80, Dv=128, causal=True),
    "heads_of_256": dict(B=1, S=40, L=70, D=256, Dv=40, mask=((4, 40, 70), "bool")),
    "heads_of_264": dict(B=1, S=20, L=70, D=64, Dv=264, window=(30, 5), opset=25),
    "window": dict(B=1, S=100, L=100, D=64, window=(20, 3), mask=((100, 100), "float"), opset=25),
    "cache": dict(B=1, S=20, L=20, past=300, D=64, H=2, causal=True, softcap=3.0),
    "one_row": dict(B=1, S=1, L=400, D=128, Dv=64, H=8, mask=((1, 8, 1, 400), "float")),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("name", TILES)
def test_tiles(rng, name, dtype):
    """More rows and keys than any tile holds, in the head sizes that have kernels of their own."""
    case(
        rng, dtype=dtype, ort_cpu="refuses" if dtype == BF16 else "agrees",
        ort_tolerance=harness.Tolerance(4e-3) if dtype == F16 else None, **TILES[name],
    )


@pytest.mark.parametrize("D", [8, 33, 64])
def test_every_tier(rng, tier, D):
    case(rng, D=D, S=3, L=3, past=5, causal=True, provider_options=tier)


@pytest.mark.parametrize(
    "slot, shape, word",
    [(1, (2, 2, 6, 9), "K"), (1, (2, 3, 6, 8), "K"), (2, (2, 2, 5, 8), "V"), (2, (1, 2, 6, 8), "V"),
     (3, (3, 6), "attn_mask"), (3, (4, 7), "attn_mask")],
    ids=str,
)
def test_wrong_shapes(rng, slot, shape, word):
    inputs = [normal(rng, s) for s in ((2, 4, 4, 8), (2, 2, 6, 8), (2, 2, 6, 8), (4, 6))]
    inputs[slot] = normal(rng, shape)
    model = harness.build_node("Attention", inputs, opset=24)
    harness.check_hostile(model, word)


@pytest.mark.parametrize("lengths", [(7, 6), (-1, 6)], ids=str)
def test_nonpad_outside_the_keys(rng, lengths):
    inputs = [normal(rng, s) for s in ((2, 4, 4, 8), (2, 2, 6, 8), (2, 2, 6, 8))]
    model = harness.build_node("Attention", [*inputs, None, None, None, np.array(lengths, np.int64)], opset=24)
    harness.check_rejected(model, "nonpad_kv_seqlen", data=True)
