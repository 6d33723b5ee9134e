# `make demo` and `make test` are the two commands of the README; the logic is in scripts/ and CMake.
#
#   make demo | test | gpu-test | sanitize | bench | bench-demo | docs | lint | format |
#        build | clean
#
# PYTHON=python3 (offline): no .venv, no pip; that Python's torch, cmake and ninja are used, and the
# build tree goes on PYTHONPATH. Without it, .venv is made and filled on the first call.
#
#   JOBS=N         compile with N processes (else: by cores and free memory)
#   CMAKE_ARGS=... further arguments for cmake, e.g. -DTIDEGATE_CUDA=OFF
#   PARTS="..."    of bench: these parts alone, e.g. "ops baselines" (scripts/bench.sh names them)
SHELL := /bin/bash

# Only a PYTHON given on the command line counts: one left in the environment is not meant for us.
ifeq ($(origin PYTHON),command line)
export TIDEGATE_PYTHON := $(PYTHON)
endif
ifdef JOBS
export TIDEGATE_JOBS := $(JOBS)
endif
ifdef PARTS
export TIDEGATE_PARTS := $(PARTS)
endif
export CMAKE_ARGS

.PHONY: help setup build demo test gpu-test sanitize bench bench-demo docs lint format clean

help:
	@sed -n 's/^# \{0,1\}//p; /^SHELL/q' Makefile

setup:
	@scripts/setup.sh

build: setup
	@scripts/build.sh

demo: setup
	@scripts/demo.sh

test: setup
	@scripts/build.sh tidegate_tested
	@scripts/test.sh

gpu-test: build
	@scripts/gpu_test.sh

sanitize: build
	@scripts/sanitize.sh

bench: build
	@scripts/bench.sh

bench-demo: setup
	@scripts/bench_demo.sh

docs: setup
	@scripts/docs.sh

lint: setup
	@scripts/lint.sh

format: setup
	@scripts/lint.sh --fix

clean:
	rm -rf build
