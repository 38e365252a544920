"""Types of the pyo3 module."""

import os
from typing import TypedDict

VERSION: str

class Verdict(TypedDict):
    name: str
    op: str
    group: int | None
    reason: str | None

class Explanation(TypedDict):
    nodes: list[Verdict]
    groups: int

def options() -> list[tuple[str, str, str, str]]: ...
def explain(path: str | os.PathLike[str], options: list[tuple[str, str]]) -> Explanation: ...
