# Everything lands in .venv; nothing but Python 3.11 or newer is needed beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two pytest workers with one thread each finish sooner than one worker with two.
WORKERS ?= 2

.PHONY: setup demo check test clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,dev]'
	touch $@

demo: setup  ## train, fit, evaluate and report on embedded data
	$(BIN)/maple demo --out runs/demo

check: setup  ## lint, format, types, layers
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/lint-imports
	$(BIN)/mypy

test: check  ## check, then every test and doctest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

clean:
	rm -rf $(VENV) runs dist build .pytest_cache .mypy_cache .ruff_cache
