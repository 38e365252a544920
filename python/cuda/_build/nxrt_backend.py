"""PEP 517 entry points of the wheel `nxrt-ep-cuda`; the work is done in python/common."""

import sys
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_PROJECT.parent / "common"))

from cdylib_backend import CdylibBackend  # noqa: E402  (needs the path above)

_backend = CdylibBackend(
    project=_PROJECT, package="ep-cuda", library="libnxrt_ep_cuda.so", module="nxrt_ep_cuda"
)
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
build_wheel = _backend.build_wheel
build_sdist = _backend.build_sdist
