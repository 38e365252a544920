"""MoE and QMoE under CUDA graphs: tokens are routed on the device, so that one graph serves every choice of experts."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

import harness
import target
from harness import F16, F32, name_of, normal
from test_moe import Sizes, int_attrs, ints, node

pytestmark = pytest.mark.cuda_only("CUDA graphs")
RUNS = 6


def on_device(value: np.ndarray) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value), "cuda", 0)


def made(rng, op, dtype, tokens):
    """RUNS nodes of the same weights: other tokens, which go to other experts."""
    seed = int(rng.integers(1 << 30))
    sizes = Sizes(E=16, H=128, I=64, k=3)
    nodes = []
    for _ in range(RUNS):
        # The weights come first.
        again = np.random.default_rng(seed)
        logits = normal(rng, (tokens, sizes.E), dtype, 3.0)
        quant = dict(make=ints(scale=dtype), **int_attrs(weights_prepacked=0)) if op == "QMoE" else dict(make=None)
        nodes.append(node(Draws(again, rng), sizes=sizes, dtype=dtype, tokens=(tokens,), logits=logits, **quant))
    return nodes


class Draws:
    """`first` draws what has three dims (weights and scales) or E rows (biases), `then` all else."""

    def __init__(self, first, then):
        self.first, self.then = first, then

    def __getattr__(self, name):
        def draw(*args, **how):
            size = how.get("size", args[-1] if args and isinstance(args[-1], tuple) else ())
            of_weights = len(size) == 3 or (len(size) == 2 and size[0] == 16)
            return getattr(self.first if of_weights else self.then, name)(*args, **how)

        return draw


def choices(n) -> set:
    return {tuple(sorted(row)) for row in np.argsort(n.inputs[1].astype(np.float32), -1)[:, -3:].tolist()}


@pytest.mark.parametrize("how", ["in_place", "moving"])
@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("dtype", [F16, F32], ids=name_of)
@pytest.mark.parametrize("op", ["MoE", "QMoE"])
def test_one_graph_for_every_choice_of_experts(rng, op, dtype, tokens, how):
    nodes = made(rng, op, dtype, tokens)
    for a, b in zip(nodes, nodes[1:]):
        assert all(x is y is None or np.array_equal(x, y) for x, y in zip(a.inputs[2:], b.inputs[2:])), "other weights"
        assert choices(a) != choices(b)
    n = nodes[0]
    model = harness.build_node(n.op, n.inputs, n.attrs, domain="com.microsoft", initializers=n.constants)
    session = harness.ep_session(model.serialize(), {"cuda_graph": "strict"})
    harness.assert_all_on_ep(session)
    held: dict = {}
    before = target.package().counters()
    for number, n in enumerate(nodes):
        io = session.io_binding()
        for slot, name in enumerate(["in0", "in1"]):
            if how == "in_place" and name in held:
                held[name].update_inplace(np.ascontiguousarray(n.inputs[slot]))
            else:
                # The old one stays until the new one is there, so that it lies elsewhere.
                held[name] = on_device(n.inputs[slot])
            io.bind_ortvalue_input(name, held[name])
        out = on_device(np.full(n.reference.shape, np.nan, dtype))
        io.bind_ortvalue_output("out0", out)
        session.run_with_iobinding(io)
        harness.assert_close(out.numpy(), n.reference, harness.tolerance_for(np.dtype(dtype)), f"run {number}")
    after = target.package().counters()
    done = {name: after[name] - before[name] for name in ("captures", "replays", "eager_runs", "read_backs")}
    assert done == {"captures": 1, "replays": RUNS, "eager_runs": 0, "read_backs": 0}
