"""`python -m nxrt_ep_cuda explain MODEL.onnx [--json]`."""

import sys

from . import _package

if __name__ == "__main__":
    sys.exit(_package.main())
