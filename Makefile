# servecast. `make` alone says what there is. Everything runs in .venv, which is made when it is needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SCENARIO ?= scenarios/chat-mistral-7b.toml

.DEFAULT_GOAL := help
.PHONY: help demo test check format lint types walls fast bench bench-million clean

help:  ## this page
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.installed  ## set up, and compare the four policies on SCENARIO
	$(BIN)/servecast compare $(SCENARIO)

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
