"""Decoders that are too large, or too many, for the repository: `--more-models FOLDER` holds a folder a model, with
model.onnx and trace.npz. Nodes that are not claimed run on ORT's CPU EP."""

import pathlib

import onnx

import harness
import models


def test_every_recorded_step(more_model: pathlib.Path):
    fixture = models.Fixture(more_model.name, more_model)
    assert fixture.steps, f"{more_model}/trace.npz holds no step"
    said = harness.target.package().explain(fixture.path)
    session = harness.ep_session(fixture.path, fallback=said["claimed"] < said["nodes"])
    if said["claimed"] == said["nodes"]:
        harness.assert_all_on_ep(session)
        assert harness.fused_groups(session) == 1
    routed = any(node.op_type in ("MoE", "QMoE") for node in onnx.load(fixture.path, load_external_data=False).graph.node)
    order = [output.name for output in session.get_outputs()]
    inputs = {value.name for value in session.get_inputs()}
    for number, (given, expected) in enumerate(fixture.steps):
        known = {name: (expected[name].shape, expected[name].dtype) for name in order}
        feeds = {name: value for name, value in given.items() if name in inputs}
        got = harness.run_bound(session, feeds, known)
        if harness.on_cuda() and routed:
            # Of two experts that are almost equal either may be chosen: what that costs is part of the graph's own loss.
            fixture.recorded.check(number, got, "recorded states")
        else:
            models.assert_step(fixture, got, expected, f"step {number}")
