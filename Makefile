# Every target that needs tools runs them from .venv, which `make setup` fills from constraints.txt.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup reproduce test lint format docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with the pinned tools (again only when the pins change)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

reproduce: setup  ## train the MLP of the paper's first table with all four optimizers, and report
	$(BIN)/virtualgrad reproduce mlp --seeds 3 --resume --out runs/mlp
	$(BIN)/virtualgrad report runs/mlp

# Two test workers share the machine: one torch thread each avoids fighting over cores.
test: export OMP_NUM_THREADS := 1
test: lint  ## everything CI checks: lint, types, tests with coverage
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term

lint: setup  ## ruff and mypy, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup  ## let ruff format and fix what it safely can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: export NO_MKDOCS_2_WARNING := 1
docs: setup  ## build the site into build/site; every warning is an error
	$(BIN)/mkdocs build --strict

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .coverage .coverage.* htmlcov .hypothesis .pytest_cache .ruff_cache .mypy_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
