# make train   sets up .venv and trains the whole blueprint, small, on this machine's own text
# make train-vl   the same with a vision tower that learns to read, from pictures drawn on this machine
# make test    sets up .venv and passes lint, types, the import contract and the tests
# make test-adapters   sets up .venv-adapters and holds Atoll against mlx-lm, transformers, trl, peft, compressed-tensors and lm-eval
# A fresh machine needs Python 3.11 or newer, make and git.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
ADAPTERS := .venv-adapters

# Extra words for every `pip install`, for instance another index or a proxy.
ATOLL_PIP_ARGS ?=

# What `make train` trains, and any further words: make train CONFIG=mini ARGS="--minutes 30"
CONFIG ?= tiny
ARGS ?=

# Tests run side by side on this many processes, each with one thread.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --ignore=tests/adapters

.DEFAULT_GOAL := help
.PHONY: help setup train train-vl test test-adapters test-all lint format clean
.DELETE_ON_ERROR:

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | awk -F '\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

setup: $(READY)  ## make .venv and install everything into it

train: $(READY)  ## train CONFIG (tiny) for five minutes; ARGS="--minutes 30" for longer
	$(BIN)/atoll train $(CONFIG) $(ARGS)

train-vl: $(READY)  ## train tiny-vl for eight minutes: words and digits drawn on the spot, read aloud; ARGS as for train
	$(BIN)/atoll train tiny-vl $(ARGS)

test: lint  ## lint, types, import contract, and the tests (minutes)
	$(PYTEST) -m "not slow"

test-adapters: $(ADAPTERS)/ready  ## what Atoll writes, in the engines that load it (an environment of its own)
	OMP_NUM_THREADS=1 $(ADAPTERS)/bin/python -m pytest -n $(WORKERS) tests/adapters

test-all: lint test-adapters  ## everything, the slow tests too
	$(PYTEST)

lint: $(READY)  ## ruff, basedpyright, import-linter
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check --quiet src tests || { echo "make: some files are not formatted; run make format"; exit 1; }
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(READY)  ## put every file into the house's format
	$(BIN)/ruff check --fix --quiet src tests
	$(BIN)/ruff format src tests

clean:  ## remove .venv and what tools leave behind; runs/ stays
	rm -rf $(VENV) $(ADAPTERS) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- the environment

NOT_CPU := s/^torch==\(.*\)/torch==\1,!=\1+cpu/
INTERPRETED := triton==3.6.0 'numpy<2.4'
CARD := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)

$(VENV)/bin/python $(ADAPTERS)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) --version 2>/dev/null || echo "not there"); \
	  echo "make: Python 3.11 or newer is needed, and $(PYTHON) is $$found; give one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(@D)/..

$(READY): EXTRAS := dev
$(ADAPTERS)/ready: EXTRAS := dev,oracle

# With an NVIDIA card the CPU build of torch is ruled out; pip's own choice on Linux is then the CUDA build.
$(VENV)/ready $(ADAPTERS)/ready: %/ready: pyproject.toml constraints.txt | %/bin/python
	@sed -e '$(if $(filter-out 0,$(CARD)),$(NOT_CPU))' constraints.txt > $*/constraints.txt
	$*/bin/python -m pip install --quiet --disable-pip-version-check $(ATOLL_PIP_ARGS) -c $*/constraints.txt -e ".[$(EXTRAS)]"
	@# Triton's interpreter checks the kernels where there is no card; torch's CUDA build brings its own Triton.
	@if $*/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then \
	  $*/bin/python -m pip install --quiet --disable-pip-version-check $(ATOLL_PIP_ARGS) $(INTERPRETED) || exit 1; fi
	@touch $@
