"""What the built library holds, by `nm` of binutils."""

import re
import subprocess

import pytest

pytestmark = pytest.mark.cpu_only("vector instructions")


def symbols(library: str) -> list[str]:
    done = subprocess.run(["nm", "--demangle", library], capture_output=True, text=True, check=True)
    return [line.split(" ", 2)[2] for line in done.stdout.splitlines() if line[17:18] in "tT"]


def test_vector_instructions_are_inlined(ep_library):
    """A vector intrinsic that has a body of its own is called where one instruction should be: its caller lost its
    target features (a closure does not inherit them), and the loop runs at half the speed."""
    found = symbols(ep_library)
    assert len(found) > 500, "the library holds no symbols: nothing was checked"
    outlined = [s for s in found if re.search(r"core_arch::(x86|simd)", s) and not s.endswith("_xgetbv")]
    assert not outlined, f"{len(outlined)} intrinsics are called: {outlined[:20]}"
