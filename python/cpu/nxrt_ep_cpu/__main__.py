"""`python -m nxrt_ep_cpu explain MODEL.onnx [--json]`."""

import sys

from . import _native, get_ep_name
from ._shared.explain import main

if __name__ == "__main__":
    sys.exit(main(_native.explain, "nxrt_ep_cpu", get_ep_name()))
