# servecast. `make` alone says what there is. Everything runs in .venv, which is made when it is needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SCENARIO ?= scenarios/chat-mistral-7b.toml

# A machine with a GPU has its own Python with torch, and no network: GPU_PYTHON brings what is there.
GPU_PYTHON   ?= python3
GPU_SCENARIO ?= scenarios/llama-3.1-8b-h100.toml
KERNELS      ?= bfloat16:128:4 bfloat16:128:1 float16:64:4 float16:64:1
GPU_MEASURE  ?= -m sim calibrate measure $(GPU_SCENARIO) --to out/gpu/measured.jsonl --seconds 180
GPU_VALIDATE ?= -m sim validate $(GPU_SCENARIO) --out out/gpu/validation --json

.DEFAULT_GOAL := help
.PHONY: help demo pictures test check format lint types walls fast bench bench-million profiles gpu clean

help:  ## this page
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.installed  ## set up, and compare the four policies on SCENARIO
	$(BIN)/servecast compare $(SCENARIO)

pictures: $(VENV)/.installed  ## docs/stall.svg and docs/capacity.svg, of SCENARIO (two minutes)
	$(BIN)/servecast compare $(SCENARIO) --out out/pictures/compare
	$(BIN)/servecast chart out/pictures/compare tokens --out docs/stall.svg
	$(BIN)/servecast capacity $(SCENARIO) --out out/pictures/capacity
	$(BIN)/servecast chart out/pictures/capacity capacity --out docs/capacity.svg

test: $(VENV)/.developer  ## set up, and pass all tests
	$(BIN)/python -m pytest -n auto

check: lint types walls fast  ## what to run before a commit: format, lint, types, import walls, fast tests

format: $(VENV)/.developer  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.developer  ## formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.developer  ## strict types
	$(BIN)/mypy

walls: $(VENV)/.developer  ## who may import what
	$(BIN)/lint-imports

fast: $(VENV)/.developer  ## the tests that are not marked slow
	$(BIN)/python -m pytest -n auto -m "not slow"

bench: $(VENV)/.developer  ## speed of the simulator, as ratios measured in one run
	$(BIN)/python tests/benchmarks/speed.py

bench-million: $(VENV)/.developer  ## a million requests on 64 replicas
	$(BIN)/python tests/benchmarks/speed.py --million

profiles: $(VENV)/.developer  ## make sim/profiles again, from an installed aiconfigurator-core (extra 'silicon')
	$(BIN)/servecast calibrate profiles --to sim/profiles

gpu: .stamps/gpu-validated  ## on a GPU: build kernels, test and measure, validate; go on where it was

.stamps/gpu-kernels:
	mkdir -p .stamps out/gpu
	$(GPU_PYTHON) -m gpu_backend.kernels $(KERNELS)
	touch $@

.stamps/gpu-tested: .stamps/gpu-kernels
	$(GPU_PYTHON) -m pytest -rs -s tests/test_gpu.py
	touch $@

.stamps/gpu-measured: .stamps/gpu-tested
	$(GPU_PYTHON) $(GPU_MEASURE)
	touch $@

.stamps/gpu-validated: .stamps/gpu-measured
	$(GPU_PYTHON) $(GPU_VALIDATE)
	touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.developer: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@ $(VENV)/.installed
