"""Writes opsets.txt: for every op of ONNX's default domain the opset versions that redefined it.

    python abi/src/onnx/opsets.py > abi/src/onnx/opsets.txt

Taken from the newest supported onnxruntime, since its view decides what a node's since-version is.
Other domains need no table: com.microsoft has one version of every op.
"""

import collections

import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

versions = collections.defaultdict(set)
for schema in get_all_operator_schema():
    if schema.domain == "":
        versions[schema.name].add(schema.since_version)
print(f"# Made by opsets.py from onnxruntime {onnxruntime.__version__}: op, then its since-versions.")
for name in sorted(versions):
    print(name, *sorted(versions[name]))
