"""Writes availability.json: the first of the supported ONNX Runtimes that knows each version, attribute and input slot
of every op that the EP has a kernel for.

    python tests/ort/make_availability.py .cache/ort-*/bin/python .venv/bin/python > tests/ort/availability.json

takes one interpreter for each ONNX Runtime (`make older-orts` and `make test` install them). test_older.py compares
the table with the schemas of whichever runtime it runs on, and a Rust test compares its ops with the op table.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = pathlib.Path(__file__).with_name("availability.json")
DOMAINS = ("", "com.microsoft")
# Ops of com.microsoft whose namesakes in ai.onnx have a kernel here, but not they.
NOT_HERE = {f"com.microsoft::{op}" for op in ("Attention", "GatherND", "Pad", "Range", "SwiGLU", "Trilu")}


def key_of(domain: str, op: str) -> str:
    return f"{domain}::{op}" if domain else op


def schemas() -> dict:
    """What the running onnxruntime knows: op -> its since-versions, attributes and number of input slots."""
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    ops: dict[str, dict] = {}
    for schema in get_all_operator_schema():
        if schema.domain not in DOMAINS:
            continue
        op = ops.setdefault(key_of(schema.domain, schema.name), {"versions": set(), "attributes": set(), "inputs": 0})
        op["versions"].add(schema.since_version)
        op["attributes"].update(schema.attributes)
        op["inputs"] = max(op["inputs"], len(schema.inputs))
    for op in ops.values():
        op["versions"], op["attributes"] = sorted(op["versions"]), sorted(op["attributes"])
    return {"runtime": onnxruntime.__version__, "opset": newest_opset(), "ops": ops}


def newest_opset() -> int:
    """The newest opset of ai.onnx that the running onnxruntime loads: it has schemas of some that it does not."""
    import onnxruntime
    from onnx import TensorProto, helper

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "graph", value[:1], value[1:])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for opset in range(21, 99):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception:  # noqa: BLE001 - ORT raises many types
            return opset - 1
    raise AssertionError("every opset loads")


def candidates() -> set[str]:
    """Every word in quotes in the kernels' sources; those that are names of ops count."""
    text = "".join(path.read_text() for path in sorted((ROOT / "kernels" / "ops").rglob("*.rs")))
    return set(re.findall(r'"([A-Z][A-Za-z0-9]+)"', text))


def first_known(dumps: list[dict], op: str, field: str) -> dict[str, list]:
    """runtime -> what of `field` it is the first to know."""
    known: set = set()
    found = {}
    for dump in dumps:
        values = dump["ops"].get(op, {}).get(field, [])
        new = [v for v in values if v not in known]
        if new:
            found[dump["runtime"]] = new
        known.update(values)
    return found


def first_inputs(dumps: list[dict], op: str) -> dict[str, int]:
    """runtime -> number of input slots, where it grows."""
    most, found = -1, {}
    for dump in dumps:
        count = dump["ops"].get(op, {}).get("inputs", -1)
        if count > most:
            most = found[dump["runtime"]] = count
    return found


def main(pythons: list[str]) -> None:
    dumps = []
    for python in pythons:
        done = subprocess.run([python, __file__, "--dump"], capture_output=True, text=True, check=True)
        dumps.append(json.loads(done.stdout))
    dumps.sort(key=lambda d: [int(part) for part in d["runtime"].split(".")])
    names = candidates()
    ops = sorted(op for op in dumps[-1]["ops"] if op.split("::")[-1] in names and op not in NOT_HERE)
    print('{\n"opsets": ' + json.dumps({d["runtime"]: d["opset"] for d in dumps}) + ',\n"ops": {')
    lines = []
    for op in ops:
        entry = {
            "versions": first_known(dumps, op, "versions"),
            "attributes": first_known(dumps, op, "attributes"),
            "inputs": first_inputs(dumps, op),
        }
        lines.append(f"{json.dumps(op)}: {json.dumps(entry)}")
    print(",\n".join(lines) + "\n}\n}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--dump"]:
        print(json.dumps(schemas()))
    elif len(sys.argv) > 1:
        main(sys.argv[1:])
    else:
        sys.exit(__doc__)
