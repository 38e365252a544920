"""GPU code within a shared library.

    python tests/device/fatbin.py LIBRARY ARCHITECTURES

fails unless the library holds an image for every CUDA source of this repository, each with machine code for all of the
architectures, such as 80,90a.
"""

from __future__ import annotations

import collections
import pathlib
import struct
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAGIC = struct.pack("<IH", 0xBA55ED50, 1)
CUBIN = 2


def images(library: bytes) -> Iterator[tuple[int, int]]:
    """(start of the first entry, end) of every fatbin."""
    at = library.find(MAGIC)
    while at >= 0:
        header, length = struct.unpack_from("<HQ", library, at + 6)
        end = at + header + length
        # The magic number may stand in other data, and in code that looks for it.
        if header == 16 and at + header < end <= len(library):
            yield at + header, end
        else:
            end = at + 1
        at = library.find(MAGIC, end)


def entries(library: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(kind, architecture, offset, size) of every piece of GPU code."""
    for start, end in images(library):
        yield from image_entries(library, start, end)


def image_entries(library: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    while start < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, start)
        yield kind, struct.unpack_from("<I", library, start + 28)[0], start + header, size
        start += header + size


def main(path: pathlib.Path, architectures: str) -> None:
    wanted = {int(name.rstrip("abcdefghijklmnopqrstuvwxyz")) for name in architectures.split(",")}
    sources = list((ROOT / "kernels").rglob("*.cu"))
    library = path.read_bytes()
    complete, sizes = 0, collections.Counter()
    for start, end in images(library):
        held = {architecture for kind, architecture, _, _ in image_entries(library, start, end) if kind == CUBIN}
        complete += wanted <= held
        sizes.update({architecture: size for _, architecture, _, size in image_entries(library, start, end)})
    if not sources or complete != len(sources):
        raise SystemExit(f"{path}: {complete} images with code for {architectures}, but {len(sources)} CUDA sources")
    kib = ", ".join(f"sm_{architecture} {size >> 10} KiB" for architecture, size in sorted(sizes.items()))
    print(f"{path}: {complete} images of CUDA kernels, {kib}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
