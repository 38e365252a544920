"""`python -m <wheel> explain MODEL.onnx`: what an execution provider takes of a model, for people or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# (path, provider options) -> {"nodes": [{"name", "op", "group", "reason"}], "groups": int}
NativeExplain = Callable[[str, list[tuple[str, str]]], Mapping[str, Any]]


def report(native: NativeExplain, ep_name: str, model: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The explanation of one model file as plain data, ready for JSON."""
    if not os.path.exists(model):
        raise FileNotFoundError(f"no such model: '{model}'")
    found = native(model, [(name, str(value)) for name, value in options.items()])
    claimed = [node for node in found["nodes"] if node["group"] is not None]
    return {
        "model": model,
        "execution_provider": ep_name,
        "nodes": len(found["nodes"]),
        "claimed": len(claimed),
        "groups": [
            [{"name": n["name"], "op": n["op"]} for n in claimed if n["group"] == group]
            for group in range(found["groups"])
        ],
        "declined": [
            {"name": n["name"], "op": n["op"], "reason": n["reason"]}
            for n in found["nodes"]
            if n["group"] is None
        ],
    }


def as_text(explained: Mapping[str, Any]) -> str:
    """The report for people."""
    groups = explained["groups"]
    sizes = ", ".join(str(len(group)) for group in groups)
    lines = [
        f"{explained['model']}: {explained['execution_provider']} takes {explained['claimed']} of "
        f"{explained['nodes']} nodes in {len(groups)} group{'' if len(groups) == 1 else 's'}"
        + (f" ({sizes})" if len(groups) > 1 else "")
    ]
    declined = explained["declined"]
    if declined:
        counts = Counter(node["op"] for node in declined)
        lines.append("not taken: " + ", ".join(f"{op} x {n}" for op, n in counts.most_common()))
        lines += [f"  {node['reason']}" for node in declined]
    return "\n".join(lines)


def main(native: NativeExplain, module: str, ep_name: str, arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 1 when the model cannot be read."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="say which nodes of a model are taken, and why others are not")
    explain.add_argument("model", metavar="MODEL.onnx")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument(
        "-o", "--option", action="append", default=[], metavar="NAME=VALUE", help="a provider option of the session"
    )
    given = parser.parse_args(arguments)
    options = {}
    for option in given.option:
        name, equals, value = option.partition("=")
        if not equals:
            parser.error(f"'{option}' is not NAME=VALUE")
        options[name] = value
    try:
        explained = report(native, ep_name, given.model, options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        print(json.dumps(explained, indent=1) if given.json else as_text(explained), flush=True)
    except BrokenPipeError:
        # The reader, `head` say, has seen enough; what is still buffered must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
