#!/usr/bin/env bash
# Builds the fake CUDA driver with all kernels of this repository: build.sh OUT_DIR [CUDA_HOME]
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?usage: build.sh OUT_DIR [CUDA_HOME]}
cuda=${2:-$root/.cuda/nvidia/cu13}

command -v g++ >/dev/null || { echo 'build.sh: g++ is needed (apt-get install g++)' >&2; exit 1; }
for tool in ld objcopy make; do
    command -v "$tool" >/dev/null || { echo "build.sh: $tool is needed (apt-get install binutils make)" >&2; exit 1; }
done
for header in cuda.h cuda_fp16.h cccl/nv/target; do
    if [[ ! -f $cuda/include/$header ]]; then
        echo "build.sh: $cuda/include/$header is missing; CUDA's headers come with" >&2
        echo '    python3 -m pip install --target .cuda "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.2"' >&2
        exit 1
    fi
done

mkdir -p "$out"
# Builds of several sessions of pytest may share the directory.
exec 9>"$out/lock"
flock 9
exec make --no-print-directory --silent -f "$here/driver.mk" -f "$here/cudart/cudart.mk" -j 2 HERE="$here" ROOT="$root" OUT="$(cd "$out" && pwd)" CUDA="$cuda" all
