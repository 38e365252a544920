#!/usr/bin/env bash
# Runs the device suite on a machine with a GPU, from the repository's root, and prints one table:
#
#     bash tests/device/run.sh [--fake-cuda DRIVER] [STAGE...]
#
# Stages: ops traces replay genai memcheck racecheck; all of them fit one call of ten minutes. The stage keep only takes what
# lies in .device along to the next call, for packs that travel in parts. Needs what `make device-pack` made, and a python3
# (3.12) with numpy, onnx, ml_dtypes, pytest and pytest-xdist. Details go to $OUT.
# --fake-cuda tries this script without a GPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-/tmp/device-out}
kept=/tmp/nxrt-device
mkdir -p "$kept" && cp .device/*.tar.xz "$kept"
[[ ${1:-} == keep ]] && exit
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT" "$work/log"
fake=()
[[ ${1:-} == --fake-cuda ]] && { fake=(--fake-cuda "$2"); shift 2; }
stages=${*:-ops traces replay genai memcheck racecheck}
jobs=$(($(nproc) > 8 ? 8 : $(nproc)))

for archive in "$kept"/*.tar.xz; do tar -xf "$archive" -C "$work"; done
export PYTHONPATH="$work/site:$PWD" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 RUST_BACKTRACE=0
[[ ${#fake[@]} -gt 0 ]] && export PYTHONPATH="$(dirname "${fake[1]}"):$PYTHONPATH"
# Where images of machines with a GPU keep the toolkit and the driver, if nobody has said so.
export PATH="$PATH:/usr/local/cuda/bin"
[[ -d /usr/local/nvidia/lib64 ]] && export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64"
# What onnxruntime-genai's CUDA library links: PyTorch's wheels bring them.
libraries=$(python3 -c 'import glob, site; print(":".join(d for s in site.getsitepackages() for d in glob.glob(s + "/nvidia/*/lib")))')

# suite STAGE SECONDS [pytest's arguments]: no test starts after SECONDS, and 45 s later the stage is ended.
suite() {
    local name=$1 seconds=$2
    shift 2
    local start=$SECONDS
    timeout -k 5 $((seconds + 45)) ${wrap[@]+"${wrap[@]}"} python3 -m pytest -q --tb=short --rootdir "$PWD" -p no:cacheprovider -p tests.device.watch \
        --device-log "$work/log/$name.jsonl" --device-seconds "$seconds" --ep cuda "${fake[@]}" "$@" >"$work/log/$name.txt" 2>&1
    local code=$?
    echo "$name $code $((SECONDS - start))" >>"$work/log/stages"
    echo "--- $name: exit $code after $((SECONDS - start)) s: $(tail -n 1 "$work/log/$name.txt")"
}

# Under the sanitizer a test takes many times as long, in one thread: a selection that runs every kernel, in shards.
sanitize() {
    local tool=$1 shards=$2 number
    for ((number = 0; number < shards; number++)); do
        wrap=(compute-sanitizer --tool "$tool" --target-processes application-only --print-limit 20 --log-file "$work/log/$tool-$number.sanitizer")
        suite "$tool-$number" 250 -p no:xdist --device-tests tests/device/sanitized.txt --device-shard "$number/$shards" "${listed[@]}" &
    done
}
mapfile -t listed < <(cut -d: -f1 tests/device/sanitized.txt | sort -u)

# The checkpoint is too large to travel; the wheel's own tests build a model by themselves.
others=(--ignore=tests/ort/test_checkpoint.py --ignore=tests/ort/test_traces.py --ignore=tests/ort/test_cuda_replay.py
    --ignore=tests/ort/test_cuda_memory.py --ignore=tests/ort/test_genai.py)
has() { [[ " $stages " == *" $1 "* ]]; }
wrap=()
(has memcheck && sanitize memcheck 8; has racecheck && sanitize racecheck 6; wait) &
has ops && suite ops 230 -n "$jobs" --dist worksteal "${others[@]}" tests/ort
has replay && suite replay 60 -n "$jobs" --dist worksteal tests/ort/test_cuda_replay.py tests/ort/test_cuda_memory.py
has traces && suite traces 110 -n "$jobs" --dist worksteal --more-models "$work/models" tests/ort/test_traces.py tests/ort/test_more_traces.py
has genai && LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" suite genai 60 -n "$jobs" tests/ort/test_genai.py
wait
python3 -m tests.device.report "$work/log" "$OUT"
tar -C "$work" -cJf "$OUT/log.tar.xz" log
