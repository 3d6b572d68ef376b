# One virtual environment for everything; each target asks only for what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Of the fifteen thousand modules most are never imported; Python compiles the others when they are.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
INPUTS := pyproject.toml constraints.txt

# Else each process compiles all modules of tenure and of its tests again, and rewrites the latter's
# assertions: four of the thirteen seconds in which they are collected.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-exhaustive test-short matrix matrix-short lint mypy pyright bench tables soak faults dist-test release docs clean

demo: $(VENV)/.test
	$(BIN)/python -m tenure demo

# A worker for each core, and so one thread for each torch: the tests are many and small. In their own
# order: files with the most tests first would leave for the end those whose few tests take longest.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
PAGES := tenure docs examples README.md
QUICK := not slow and not exhaustive
# each takes every operator of torch, for minutes
SWEEPS := --ignore=tests/sweeps
# They import the libraries that people train with, which takes ten seconds in each worker; none of
# them uses the simulated accelerator, which renames a backend of torch and so has its own processes.
LIBRARY_TESTS := tests/integrations/test_accelerate.py tests/integrations/test_lightning.py \
	tests/integrations/test_transformers.py tests/scopes/test_metrics.py
ON_SIM := tests $(LIBRARY_TESTS:%=--ignore=%)
# Some searches look through the whole heap, in processes that have imported little: beside ten
# thousand other tests they take six times as long, and find no more.
SEARCHES := tests/heap tests/profiler/owners
OTHERS := tests $(SEARCHES:%=--ignore=%)

# All that is soon done; test-all is what has to hold before a change lands.
test: $(VENV)/.test
	$(PYTEST) -m "not simdevice and $(QUICK)" $(OTHERS) $(SWEEPS) $(PAGES)
	$(PYTEST) -m "not simdevice and $(QUICK)" $(SEARCHES)
	$(PYTEST) -m "simdevice and $(QUICK)" $(ON_SIM) $(SWEEPS)

# Also the slow ones, operators of torch, and the simulated accelerator once more with the rules of
# CUDA's allocator: what counts bytes. Tests of values alone have asked for it already.
test-all: $(VENV)/.test
	$(PYTEST) -m "not simdevice and not exhaustive" $(OTHERS) $(PAGES)
	$(PYTEST) -m "not simdevice and not exhaustive" $(SEARCHES)
	$(PYTEST) -m "simdevice and not exhaustive" $(ON_SIM)
	$(PYTEST) -m "simdevice and $(QUICK)" --sim-allocator=cuda tests/profiler tests/adaptive tests/paging

# What tries every allocation, every setting, and every sample of every operator: each night
test-exhaustive: $(VENV)/.test
	$(PYTEST) -m "not simdevice and exhaustive" tests
	$(PYTEST) -m "simdevice and exhaustive" $(ON_SIM)

# The tests that other versions of torch and Python have broken before: some files of each room.
SHORT := tests/torch tests/scopes/test_scope.py tests/scopes/test_autograd.py tests/heap/test_holders.py \
	tests/adaptive/test_toma.py tests/adaptive/decorators/test_collect.py tests/adaptive/step/test_step.py \
	tests/adaptive/step/test_step_exchange.py tests/adaptive/predict/test_scratch.py \
	tests/paging/forward/test_modes.py tests/paging/test_handle.py \
	tests/profiler/lines/test_line_profiler.py tests/profiler/lines/test_line_profiler_device.py \
	tests/testing/test_simulated_accelerator.py

test-short: $(VENV)/.test
	$(PYTEST) -m "not simdevice and $(QUICK)" $(SHORT)
	$(PYTEST) -m "simdevice and $(QUICK)" $(SHORT)

# `test` with other pairs of Python and torch: all, or the one of TORCH=2.15.0 PYTHON=3.12
matrix:
	python3 tests/matrix.py --python "$(filter-out python3,$(PYTHON))" --torch "$(TORCH)"

# `test-short` with the newest torch that is supported
matrix-short:
	python3 tests/matrix.py --short

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.house_rules
	$(MAKE) --jobs=2 mypy pyright

# on one core each, so `lint` runs them side by side
mypy pyright: $(VENV)/.lint
	$(BIN)/$@

# Also installs the libraries that are measured beside it. Rebuilds every table of the docs.
bench: $(VENV)/.bench
	for script in benchmarks/bench_*.py; do $(BIN)/python -m benchmarks.$$(basename $$script .py) || exit 1; done
	$(MAKE) tables
	$(BIN)/python -m pytest benchmarks -o addopts= --benchmark-only --benchmark-columns=median,iqr,rounds

# the tables of the docs, from the results that are there
tables: $(VENV)/.test
	$(BIN)/python -m benchmarks.tables

# The long form of tests/soak: some minutes, a table, and benchmarks/results/soak.json.
soak: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak

# 131 faults are planted one by one, and each must fail a test: some forty minutes
faults: $(VENV)/.test
	$(BIN)/python -m tests.planted_faults $(ONLY)

dist-test: $(VENV)/.test
	sh tests/dist_test.sh

# VERSION is given; DRY=--dry-run tells what it would do
release: $(VENV)/.lint
	sh release.sh $(DRY) $(VERSION)

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html
	@echo "Wrote docs/_build/html/index.html"

clean:
	rm -rf $(VENV) .venv-dist build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.test: $(VENV)/.python $(INPUTS)
	$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) -e '.[lint]'
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.test
	$(PIP) -e '.[docs]'
	@touch $@

# What `.ci/run` needs, installed at once: each installation builds tenure again.
$(VENV)/.ci: $(VENV)/.python $(INPUTS)
	$(PIP) -e '.[test,lint,docs]'
	@touch $(VENV)/.test $(VENV)/.lint $(VENV)/.docs $@
