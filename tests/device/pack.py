"""Fills .device with what a machine with a GPU and no network needs beside this repository:

    python tests/device/pack.py WHEEL [--models FOLDER]

runtime.tar.xz: onnxruntime and onnxruntime-genai-cuda for CPython 3.12, without what a decoder does not need.
pack.tar.xz: WHEEL, which is nxrt_ep_cuda's, and decoders with recorded traces. FOLDER holds one folder a model, with
model.onnx and model.trace.npz; those among the fixtures stay out, and those larger than MODEL_LIMIT.

The tree that travels to that machine at once, this repository included, may hold LIMIT: so of genai's CUDA code only
Hopper's is kept, and what is still too much travels in two calls (`run.sh keep`).
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from fatbin import CUBIN, entries

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACK = ROOT / ".device"
CACHE = ROOT / ".cache" / "device"
VERSIONS = ["onnxruntime==1.32.0", "onnxruntime-genai-cuda==0.18.0"]
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64"]
# Tools for making models, which import what that machine need not have.
LEFT_OUT = ("onnxruntime/transformers/", "onnxruntime/quantization/", "onnxruntime/tools/", "onnxruntime_genai/models/")
LIMIT, MODEL_LIMIT = 64 << 20, 6 << 20
ARCHITECTURE = 90


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--models", type=pathlib.Path)
    given = parser.parse_args()
    shutil.rmtree(PACK, ignore_errors=True)
    PACK.mkdir()
    shutil.copy(runtime_archive(), PACK / "runtime.tar.xz")
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        (folder / "models").mkdir()
        zipfile.ZipFile(given.wheel).extractall(folder / "site")
        if given.models:
            fill_models(folder / "models", given.models)
        compress(folder, PACK / "pack.tar.xz")
    total = travelling()
    sizes = ", ".join(f"{path.name} {path.stat().st_size / 2**20:.1f} MiB" for path in sorted(PACK.iterdir()))
    print(f".device: {sizes}; with the repository {total / 2**20:.1f} MiB")
    if total > LIMIT:
        print(f"more than {LIMIT >> 20} MiB: send runtime.tar.xz first, with `bash tests/device/run.sh keep`, then pack.tar.xz")


def runtime_archive() -> pathlib.Path:
    """The archive of both runtimes; made once for these versions."""
    archive = CACHE / ("-".join(VERSIONS).replace("==", "-") + ".tar.xz")
    if archive.exists():
        return archive
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads, tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", downloads, "--python-version", "3.12", "--implementation", "cp"]
        command += [part for platform in PLATFORMS for part in ("--platform", platform)]
        subprocess.run([*command, *VERSIONS], check=True)
        site = pathlib.Path(scratch) / "site"
        for path in pathlib.Path(downloads).glob("*.whl"):
            wheel = zipfile.ZipFile(path)
            wheel.extractall(site, [name for name in wheel.namelist() if not name.startswith(LEFT_OUT)])
        (cuda,) = site.glob("onnxruntime_genai/*genai-cuda.so")
        keep_hopper(cuda)
        compress(pathlib.Path(scratch), archive)
    return archive


def compress(folder: pathlib.Path, archive: pathlib.Path) -> None:
    """Everything in the folder, as an archive; whole or not at all."""
    partial = archive.with_suffix(".partial")
    subprocess.run(
        ["tar", "-C", folder, "--use-compress-program", "xz -6 -T2", "-cf", partial, *sorted(p.name for p in folder.iterdir())],
        check=True,
    )  # fmt: skip
    partial.rename(archive)


def keep_hopper(path: pathlib.Path) -> None:
    """Blanks the code of other architectures, so that the library compresses well."""
    image = bytearray(path.read_bytes())
    kept = 0
    for kind, architecture, offset, size in entries(image):
        if kind == CUBIN and architecture == ARCHITECTURE:
            kept += 1
        else:
            image[offset : offset + size] = bytes(size)
    if not kept:
        raise SystemExit(f"{path.name} holds no code for sm_{ARCHITECTURE}")
    path.write_bytes(image)


def fill_models(target: pathlib.Path, source: pathlib.Path) -> None:
    """Copies the decoders that are not among this repository's fixtures, for tests/ort/test_more_traces.py."""
    fixtures = {path.name.removesuffix(".tar.xz") for path in (ROOT / "tests/models/fixtures").glob("*.tar.xz")}
    for folder in sorted(source.iterdir()):
        model, trace = folder / "model.onnx", folder / "model.trace.npz"
        if folder.name in fixtures or not (model.exists() and trace.exists()):
            continue
        parts = [path for path in (model, folder / "model.onnx.data", trace) if path.exists()]
        size = sum(path.stat().st_size for path in parts)
        if size > MODEL_LIMIT:
            print(f"  left out {folder.name}: {size >> 20} MiB")
            continue
        (target / folder.name).mkdir()
        for path in parts:
            shutil.copy(path, target / folder.name / path.name.replace("model.trace", "trace"))
        print(f"  packed {folder.name}")


def travelling() -> int:
    """Bytes of everything that is sent along: what git knows and does not ignore, and .device."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    paths = [ROOT / name for name in listed.split("\0") if name] + list(PACK.rglob("*"))
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    main()
