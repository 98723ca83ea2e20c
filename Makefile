# Folio's commands. On a fresh machine with Rust, a C compiler, make and network:
#
#   make demo     build the release library and the C demo, run it
#   make test     everything that CI runs
#
# Each installs what it still needs, and says so. The other targets are their parts, and:
#
#   make install PREFIX=/usr/local    the library, the headers, the CMake package and folio.pc;
#                                     FOLIO_CUDA=OFF leaves out the CUDA backend
#   make dist                         a tarball and a .deb of the same for machines without Rust, in build/dist;
#                                     DIST_ARCH=aarch64 for ARM
#   make test-readme                  the README's commands for C and C++, also out of the tree and without CUDA
#   make test-dist                    the x86-64 ones on bare Debian roots; needs root
#   make test-dist-aarch64            the ARM ones under qemu
#   make test-reproducible            tarball, .deb and wheel built twice, in two folders: the same bytes
#   make dist-wheel                   the Python package with the library of `make dist`, for the same machines
#   make test-dist-wheel              its tag, its library, and a program that loads it; DIST_ARCH=aarch64 under qemu
#   make test-aarch64                 the CPU tests and the C and C++ programs for ARM under qemu
#   make kernels                      compile every GPU kernel, without a GPU, and report on each
#   make wheel                        the Python package, with the library inside, to build/wheels
#   make test-torch-ops, test-vllm, test-sglang
#                                     the integrations, in a virtual environment of 7 GB with PyTorch and vLLM
#   make test-python-gpu              the Python packages on a GPU, with the PyTorch of PYTHON, and CuPy, JAX, Paddle, Numba
#   make test-grids-gpu               of them, the grids of the peers' unit tests
#   make test-vllm-gpu                vLLM's engine on a GPU, with the vLLM of PYTHON
#   make test-sglang-gpu              SGLang's, with the SGLang of PYTHON
#   make test-grids                   a sample of these on the CPU
#   make bench                        the CPU benchmarks
#   make pictures                     the pictures of the benchmarks, from the figures in the repository
#   make test SEED=7                  the same with other random cases
#   make fuzz SECONDS=600 SEED=7      corrupted calls of the C functions, against the oracle
#   make test-paddle                  the Paddle ops and the FastDeploy plugin, with PaddlePaddle's CPU wheel from PyPI
#   make test-paddle-gpu              their tests on a GPU, with the PaddlePaddle of PYTHON

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.NOTPARALLEL:
.DEFAULT_GOAL := demo
.PHONY: demo test install kernels bench nvrtc tools lint test-rust test-rows test-msrv fuzz docs cmake test-c \
    test-package test-torch test-memory dist test-dist dist-wheel test-dist-wheel test-aarch64 wheel test-python \
    test-python-gpu test-grids-gpu test-grids pictures test-torch-ops test-vllm test-vllm-gpu test-sglang \
    test-sglang-gpu test-paddle test-paddle-gpu paddle-tools test-reproducible test-dist-aarch64 test-readme clean

CARGO ?= cargo
CMAKE ?= cmake
CC ?= cc
PYTHON ?= python3
PREFIX ?= /usr/local
FOLIO_CUDA ?= ON
export CARGO_TARGET_DIR := $(CURDIR)/target
# More compiler processes than processors would only take memory.
export CMAKE_BUILD_PARALLEL_LEVEL := $(shell nproc)

BUILD := $(CURDIR)/build
PACKAGE := $(BUILD)/moved
STRICT := -Wall -Wextra -Wpedantic -Werror
say = @printf '\n== %s ==\n' "$(1)"

# --- The demo ------------------------------------------------------------------------------------

# Where there is a GPU the demo uses it, so its kernels are wanted.
demo: $(if $(wildcard /dev/nvidiactl),nvrtc)
	@.ci/need cc=gcc
	$(CARGO) build --lib --locked --release
	@mkdir -p $(BUILD)
	ln -sf libfolio.so target/release/libfolio.so.0
	$(CC) -std=gnu11 -O2 $(STRICT) -Iinclude examples-c/demo.c -o $(BUILD)/demo \
	    -Ltarget/release -Wl,-rpath,$(CARGO_TARGET_DIR)/release -lfolio -lm -ldl -pthread
	@echo
	$(BUILD)/demo

# --- The tests -----------------------------------------------------------------------------------

# What could not be tested is written to this file (.ci/skip, tests/harness/skips.rs), and told at the end.
test: export FOLIO_SKIPS := $(BUILD)/skips
# Everything is compiled once. Incremental compilation would pay for a second time with more and smaller units now.
test: export CARGO_INCREMENTAL := 0
test: tools nvrtc lint test-rust test-rows test-msrv fuzz docs kernels test-c test-package test-torch test-memory \
    test-python
	@printf '\nmake test: everything that ran passed; %s\n' "$$(.ci/skips $(FOLIO_SKIPS))"

tools:
	@mkdir -p $(BUILD)
	@rm -f $(BUILD)/skips
	@.ci/need cc=gcc c++=g++ cmake=cmake valgrind=valgrind doxygen=doxygen pkg-config=pkg-config readelf=binutils \
	    /usr/include/dlpack/dlpack.h=libdlpack-dev /usr/include/nlohmann/json.hpp=nlohmann-json3-dev \
	    /usr/share/doc/libopenblas-dev=libopenblas-dev
	@for part in fmt clippy; do $(CARGO) $$part --version >/dev/null 2>&1 || \
	    { echo "Folio's tests need cargo $$part; install it with: rustup component add rustfmt clippy"; exit 1; }; done

lint:
	$(call say,Format and lints)
	$(CARGO) fmt --all --check
	.ci/check-kernel-format || [ $$? = 77 ]
	$(CARGO) clippy --locked --all-targets --all-features -- -D warnings
	$(CARGO) clippy --locked --all-targets --no-default-features -- -D warnings

# Random cases are the same in every `make test`; `cargo test` and another SEED draw others.
SEED ?= 1
test-rust test-rows: export PROPTEST_RNG_SEED ?= $(SEED)

test-rust:
	$(call say,Rust tests)
	$(CARGO) test --locked --all-features

# The other instruction sets, the optimiser's other settings and a library without the CUDA backend may each hide what the
# debug run would not.
test-rows:
	$(call say,CPU tests in release and without the CUDA backend on each instruction set)
	.ci/test-rows

test-msrv:
	$(call say,The oldest Rust compiles everything)
	.ci/test-msrv

# How long, and from which seed.
SECONDS ?= 60
fuzz:
	$(call say,Fuzzing the C functions for $(SECONDS) seconds with seed $(SEED))
	.ci/fuzz $(SECONDS) $(SEED)

docs:
	$(call say,Documentation without a warning)
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps --all-features
	mkdir -p $(BUILD)
	doxygen docs/Doxyfile

cmake:
	$(call say,CMake build)
	$(CMAKE) -S . -B $(BUILD)/cmake -DCMAKE_INSTALL_PREFIX=$(PREFIX) -DFOLIO_CARGO_DIR=$(CARGO_TARGET_DIR)
	$(CMAKE) --build $(BUILD)/cmake

test-c: cmake
	$(call say,C and C++ programs)
	.ci/ctest $(BUILD)/cmake

# The package must work from wherever it was moved to, so it is installed in one place and used in another.
test-package: cmake
	$(call say,The installed package from a moved prefix)
	rm -rf $(BUILD)/installed $(PACKAGE) $(BUILD)/consumer-*
	$(CMAKE) --install $(BUILD)/cmake --prefix $(BUILD)/installed >/dev/null
	mv $(BUILD)/installed $(PACKAGE)
	test -s $(PACKAGE)/share/licenses/folio/LICENSE-MIT -a -s $(PACKAGE)/share/licenses/folio/LICENSE-APACHE
	for link in folio folio_static; do \
	    $(CMAKE) -S examples-c -B $(BUILD)/consumer-$$link -DCMAKE_PREFIX_PATH=$(PACKAGE) -DFOLIO_EXAMPLES_LINK=folio::$$link; \
	    $(CMAKE) --build $(BUILD)/consumer-$$link; \
	    .ci/ctest $(BUILD)/consumer-$$link; \
	done
	export PKG_CONFIG_PATH=$$(dirname $$(find $(PACKAGE) -name folio.pc)); \
	    $(CC) $(STRICT) examples-c/01_decode.c -o $(BUILD)/pkg-config-consumer -lm \
	        $$(pkg-config --cflags --libs folio) -Wl,-rpath,$$(pkg-config --variable=libdir folio); \
	    $(BUILD)/pkg-config-consumer

# The commands of the README for readers in C and C++, and those that build outside of the tree and without CUDA. The
# latter have a build folder of Cargo's own, so that the others' stays up to date.
OUTSIDE := $(BUILD)/readme/outside
test-readme:
	$(call say,The README's commands)
	@.ci/need c++=g++ cmake=cmake pkg-config=pkg-config /usr/include/nlohmann/json.hpp=nlohmann-json3-dev \
	    /usr/share/doc/libopenblas-dev=libopenblas-dev
	.ci/readme $(CURDIR) "Decode, in C"
	rm -rf $(BUILD)/readme/local
	mkdir -p $(OUTSIDE)
	ln -sfn $(CURDIR) $(OUTSIDE)/folio
	.ci/readme $(OUTSIDE) "In your build" 2
	.ci/test-without-cuda $(BUILD)/readme/local
	rm -rf $(BUILD)/readme/local
	$(MAKE) install FOLIO_CUDA=OFF PREFIX=$(BUILD)/readme/local CARGO_TARGET_DIR=$(OUTSIDE)/build/cargo
	.ci/test-without-cuda $(BUILD)/readme/local

test-torch: test-package
	$(call say,PyTorch operators)
	@if $(PYTHON) -c 'import torch, ninja' 2>/dev/null; then \
	    TORCH_EXTENSIONS_DIR=$(BUILD)/torch $(PYTHON) examples-c/torch_op/test_folio_torch.py $(PACKAGE); \
	else \
	    .ci/skip "PyTorch operators" "$(PYTHON) has no PyTorch with ninja"; \
	fi

# Before anything is built: the package needs most of it. Python's headers are those of the ops' module.
paddle-tools:
	@.ci/need cc=gcc c++=g++ cmake=cmake pkg-config=pkg-config git=git $(PYTHON)=python3
	@.ci/need "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h=python3-dev"
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || .ci/need ensurepip=python3-venv

test-paddle: paddle-tools test-package
	$(call say,Paddle ops and FastDeploy plugin)
	.ci/test-paddle $(PACKAGE) $(BUILD) $(PYTHON)

# On a machine with a GPU, whose Python has PaddlePaddle for CUDA, pytest, and the ops as docs/paddle.md builds them with it.
test-paddle-gpu:
	$(call say,Paddle ops and FastDeploy plugin on a GPU)
	@$(PYTHON) -c 'import paddle; assert paddle.is_compiled_with_cuda(), "PaddlePaddle is a CPU build"; \
	    assert paddle.device.cuda.device_count(), "PaddlePaddle finds no GPU"'
	cd integrations/paddle && $(PYTHON) -m pytest --quiet tests -k "not cpu"
	cd integrations/fastdeploy && $(PYTHON) -m pytest --quiet tests -k "not cpu"

MEMORY_TESTS := -DCMAKE_PREFIX_PATH=$(PACKAGE) -DFOLIO_TEST_STANDARDS="C11;CXX17" -DCMAKE_BUILD_TYPE=Debug
# A program's own operator new stays its own: one of them fills memory to see who writes to it.
VALGRIND := valgrind;--quiet;--soname-synonyms=somalloc=nouserintercepts;--error-exitcode=99;--leak-check=full;--show-leak-kinds=definite,indirect;--errors-for-leak-kinds=definite,indirect

# C's leaks and double frees of Folio's handles show too: Rust's allocator is malloc.
test-memory: test-package
	$(call say,C and C++ programs under AddressSanitizer and valgrind)
	for programs in tests/c examples-c; do \
	    build=$(BUILD)/memory-$${programs//\//-}; \
	    $(CMAKE) -S $$programs -B $$build-asan $(MEMORY_TESTS) -DFOLIO_SANITIZE=address,undefined; \
	    $(CMAKE) --build $$build-asan; \
	    .ci/ctest $$build-asan; \
	    $(CMAKE) -S $$programs -B $$build-valgrind $(MEMORY_TESTS) "-DFOLIO_TEST_LAUNCHER=$(VALGRIND)"; \
	    $(CMAKE) --build $$build-valgrind; \
	    .ci/ctest $$build-valgrind; \
	done

# --- Python --------------------------------------------------------------------------------------

PYTHON_TEST := $(BUILD)/venv-python

# One wheel for every Python 3. FOLIO_WHEEL_LIBRARY names a library that is to go into it; else it is built, into the
# build folder that `make demo` uses too.
wheel: $(if $(FOLIO_WHEEL_LIBRARY)$(filter OFF,$(FOLIO_CUDA)),,nvrtc)
	$(call say,The Python wheel)
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || .ci/need ensurepip=python3-venv
	rm -rf $(BUILD)/wheels $(PYTHON_TEST)
	$(PYTHON) -m venv $(PYTHON_TEST)
	FOLIO_CUDA=$(FOLIO_CUDA) FOLIO_WHEEL_LIBRARY=$(abspath $(FOLIO_WHEEL_LIBRARY)) $(PYTHON_TEST)/bin/pip \
	    --disable-pip-version-check wheel --quiet --no-deps --wheel-dir $(BUILD)/wheels ./python
	@ls $(BUILD)/wheels/*.whl

# The commands of the README for readers in Python make the wheel. The tests run in a virtual environment that has
# nothing else; the checkout's modules are not on its path.
test-python:
	$(call say,The Python package)
	rm -rf $(BUILD)/env
	.ci/readme $(CURDIR) "Decode, in Python"
	$(PYTHON_TEST)/bin/pip --disable-pip-version-check install --quiet $(BUILD)/wheels/*.whl pytest numpy ml_dtypes
	cd python && env -u FOLIO_LIBRARY -u PYTHONPATH $(PYTHON_TEST)/bin/python -m pytest --quiet

# On a machine with a GPU, whose Python has PyTorch, NumPy, cffi and pytest: nothing is installed. CuPy, JAX, Paddle and
# Numba are tested where they and ml_dtypes are there. The library is that of `make demo`, or FOLIO_LIBRARY's.
GPU_SOURCES := $(CURDIR)/python/src:$(CURDIR)/integrations/torch/src:$(CURDIR)/integrations/sglang/src
GPU_TESTS := test-python-gpu test-grids-gpu test-grids
$(GPU_TESTS): export PYTHONPATH := $(GPU_SOURCES)
$(GPU_TESTS): export FOLIO_LIBRARY ?= $(CARGO_TARGET_DIR)/release/libfolio.so
test-python-gpu: test-grids-gpu
	$(call say,The Python packages on a GPU)
	cd python && $(PYTHON) -m pytest --quiet tests/test_gpu.py tests/test_gpu_frameworks.py
	cd integrations/torch && $(PYTHON) -m pytest --quiet tests -k "not cpu"
	cd integrations/sglang && $(PYTHON) -m pytest --quiet tests -k "not cpu"
	cd integrations/vllm && $(PYTHON) -m pytest --quiet tests/test_plans_gpu.py

# Grids of the peers' unit tests, whole; the last lines of the output say how many runs each was.
test-grids-gpu:
	$(call say,Grids of the peers on a GPU)
	@$(PYTHON) -c 'import torch; assert torch.cuda.is_available(), "PyTorch finds no GPU"'
	cd python && $(PYTHON) -m pytest --quiet tests/grids -k "not cpu"

# Some combinations of each, which SEED draws, on the CPU.
test-grids: export FOLIO_GRIDS_SEED ?= $(SEED)
test-grids:
	$(call say,A sample of the grids of the peers)
	cd python && $(PYTHON) -m pytest --quiet tests/grids -k "not cuda"

# --- PyTorch, vLLM and SGLang --------------------------------------------------------------------

ENGINES := $(BUILD)/venv-vllm
INTEGRATIONS := integrations/torch integrations/vllm integrations/sglang

# Not parts of `make test`, for their size: PyTorch and vLLM are downloaded.
test-torch-ops: $(ENGINES)/folio
	$(call say,PyTorch operators and tensors of frameworks)
	cd integrations/torch && $(ENGINES)/bin/python -m pytest --quiet tests
	cd python && $(ENGINES)/bin/python -m pytest --quiet tests/test_frameworks.py -k "not paddle"

test-sglang: $(ENGINES)/folio
	$(call say,The SGLang backend)
	cd integrations/sglang && $(ENGINES)/bin/python -m pytest --quiet tests

test-vllm: $(ENGINES)/folio
	$(call say,vLLM on Folio and on its own backend)
	cd integrations/vllm && $(ENGINES)/bin/python -m pytest --quiet tests

# On a machine with a GPU, whose Python has vLLM for CUDA, pytest, and Folio's packages as docs/vllm.md installs them.
test-vllm-gpu:
	$(call say,vLLM on a GPU: on Folio and on its own backends)
	@$(PYTHON) -c 'from vllm.platforms import current_platform; assert current_platform.is_cuda(), "vLLM finds no GPU"'
	cd integrations/vllm && $(PYTHON) -m pytest --quiet tests/test_engine.py

# On a machine with a GPU, whose Python has SGLang, pytest, and Folio's packages as docs/sglang.md installs them. So many
# engines are run at a time.
test-sglang-gpu: export FOLIO_SGLANG_ENGINES ?= 4
test-sglang-gpu:
	$(call say,SGLang on a GPU: on Folio and on its own Triton backend)
	@$(PYTHON) -c 'from sglang.srt.utils import is_cuda; assert is_cuda(), "SGLang finds no GPU"'
	@$(PYTHON) -c 'from importlib.metadata import entry_points as found; \
	    assert found(group="sglang.srt.plugins", name="folio"), "SGLang finds no plugin folio: install integrations/sglang"'
	cd integrations/sglang && $(PYTHON) -m pytest --quiet tests/test_engine.py

.PHONY: $(ENGINES)/folio
$(ENGINES)/folio: wheel $(ENGINES)/installed
	$(ENGINES)/bin/uv pip install --quiet --python $(ENGINES)/bin/python --no-deps --reinstall \
	    $(BUILD)/wheels/*.whl $(addprefix ./,$(INTEGRATIONS))

$(ENGINES)/installed: integrations/vllm/tests/requirements.txt integrations/vllm/tests/overrides.txt
	$(call say,PyTorch and vLLM into $(ENGINES))
	rm -rf $(ENGINES)
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip --disable-pip-version-check install --quiet uv
	UV_HTTP_TIMEOUT=600 $(ENGINES)/bin/uv pip install --quiet --python $(ENGINES)/bin/python \
	    --requirement integrations/vllm/tests/requirements.txt --override integrations/vllm/tests/overrides.txt
	touch $@

# --- The rest ------------------------------------------------------------------------------------

nvrtc:
	@.ci/fetch-nvrtc

# Status 77 says that there is no compiler, and why.
kernels: nvrtc
	$(call say,GPU kernels)
	$(CARGO) run --locked --example kernels || [ $$? = 77 ]

# The library alone, out of the build folder that `make demo` uses too: no test and no example is built.
install: $(if $(filter OFF,$(FOLIO_CUDA)),,nvrtc)
	@.ci/need cc=gcc $(CMAKE)=cmake
	$(CMAKE) -S . -B $(BUILD)/install -DCMAKE_INSTALL_PREFIX=$(PREFIX) -DFOLIO_CARGO_DIR=$(CARGO_TARGET_DIR) \
	    -DFOLIO_CUDA=$(FOLIO_CUDA) -DFOLIO_BUILD_TESTS=OFF -DFOLIO_BUILD_EXAMPLES=OFF
	$(CMAKE) --build $(BUILD)/install
	$(CMAKE) --install $(BUILD)/install --prefix $(PREFIX)

# The linker is zig's, which knows the symbols of old glibcs; see packaging/dist.
DIST_ARCH ?= $(shell uname -m)
DIST := $(BUILD)/dist
dist: nvrtc
	@.ci/need cmake=cmake objdump=binutils dpkg-deb=dpkg python3=python3-pip \
	    $(DIST_ARCH)-linux-gnu-gcc=$(if $(filter $(shell uname -m),$(DIST_ARCH)),gcc,gcc-$(subst _,-,$(DIST_ARCH))-linux-gnu)
	@.ci/need-rust-target $(DIST_ARCH)-unknown-linux-gnu
	@.ci/fetch-zig
	packaging/dist $(DIST_ARCH) $(DIST)

# The oldest Debian that is still served, and the one that this project is developed on.
DIST_SUITES ?= bullseye bookworm
test-dist: DIST_ARCH := x86_64
test-dist: dist
	$(call say,The tarball and the .deb on bare Debian)
	.ci/test-dist $(DIST) $(DIST_SUITES)

# ARM's under emulation, which needs no root.
test-dist-aarch64: DIST_ARCH := aarch64
test-dist-aarch64: dist
	$(call say,The tarball and the .deb for AArch64 under emulation)
	@.ci/need aarch64-linux-gnu-g++=g++-aarch64-linux-gnu pkg-config=pkg-config qemu-aarch64=qemu-user \
	    /usr/aarch64-linux-gnu/include/stdio.h=libc6-dev-arm64-cross
	.ci/test-dist-aarch64 $(DIST)

dist-wheel: dist
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || .ci/need ensurepip=python3-venv
	packaging/wheel $(DIST_ARCH) $(DIST) $(PYTHON)

test-dist-wheel: dist-wheel
	$(call say,The wheel for $(DIST_ARCH))
	@$(if $(filter $(shell uname -m),$(DIST_ARCH)),,.ci/need qemu-$(DIST_ARCH)=qemu-user \
	    /usr/$(DIST_ARCH)-linux-gnu/include/stdio.h=libc6-dev-$(if $(filter aarch64,$(DIST_ARCH)),arm64,amd64)-cross)
	.ci/test-dist-wheel $(DIST) $(DIST_ARCH) 2.28

# Compiles everything twice, kernels included where FOLIO_CACHE_DIR does not keep them.
test-reproducible: dist-wheel
	$(call say,A second build gives the same bytes)
	.ci/test-reproducible $(DIST) $(DIST_ARCH) $(PYTHON)

test-aarch64:
	$(call say,CPU tests for AArch64 under emulation)
	@.ci/need aarch64-linux-gnu-g++=g++-aarch64-linux-gnu cmake=cmake qemu-aarch64=qemu-user \
	    /usr/aarch64-linux-gnu/include/stdio.h=libc6-dev-arm64-cross
	@.ci/need-rust-target aarch64-unknown-linux-gnu
	.ci/test-aarch64

bench:
	$(CARGO) bench --locked --bench cpu

# Byte for byte the same wherever they are made, as long as matplotlib is the same.
PICTURES := $(BUILD)/venv-pictures
pictures: $(PICTURES)/bin/python
	$(PICTURES)/bin/python benches/gpu/plot.py
	$(PICTURES)/bin/python benches/cpu/plot.py

$(PICTURES)/bin/python:
	$(PYTHON) -m venv $(PICTURES)
	$(PICTURES)/bin/pip --disable-pip-version-check install --quiet matplotlib==3.11.2

clean:
	rm -rf $(BUILD)
	$(CARGO) clean
