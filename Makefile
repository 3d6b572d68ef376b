# One virtual environment for everything; each target asks only for what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
INPUTS := pyproject.toml constraints.txt

# Else each process compiles all modules of tenure and of its tests again, and rewrites the latter's
# assertions: four of the thirteen seconds in which they are collected.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all lint mypy pyright bench dist-test docs clean

demo: $(VENV)/.test
	$(BIN)/python -m tenure demo

# A worker for each core, and so one thread for each torch: the tests are many and small. Those that
# look through the whole heap run apart from those that fill it with what they import.
# The simulated accelerator renames torch's PrivateUse1 backend for a whole process, so it gets its own.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile
HEAP_FILES := tests/integrations/test_memory_watch.py tests/paging/test_named_memory.py
HEAP_TESTS := tests/profiler tests/heap $(HEAP_FILES) tenure docs examples README.md
# What imports the libraries that people train with, which takes each worker ten seconds, and fills
# its heap for all tests that come after. None of them uses the simulated accelerator.
LIBRARY_TESTS := tests/integrations/test_accelerate.py tests/integrations/test_lightning.py \
	tests/integrations/test_transformers.py tests/scopes/test_metrics.py
APART := tests/profiler tests/heap tests/sweeps $(HEAP_FILES) $(LIBRARY_TESTS)
OTHER_TESTS := tests $(APART:%=--ignore=%)

# All that is soon done; test-all is what has to hold before a change lands.
test: $(VENV)/.test
	$(PYTEST) -m "not simdevice and not slow and not exhaustive" $(HEAP_TESTS)
	$(PYTEST) -m "not simdevice and not slow and not exhaustive" $(OTHER_TESTS)
	$(PYTEST) -m "not simdevice and not slow and not exhaustive" $(LIBRARY_TESTS)
	$(PYTEST) -m "simdevice and not slow and not exhaustive" $(HEAP_TESTS)
	$(PYTEST) -m "simdevice and not slow and not exhaustive" $(OTHER_TESTS)

# Also the slow and exhaustive ones, every operator of torch, and the simulated accelerator once more
# with the rules of CUDA's allocator.
test-all: $(VENV)/.test
	$(PYTEST) -m "not simdevice" $(HEAP_TESTS)
	$(PYTEST) -m "not simdevice" $(OTHER_TESTS)
	$(PYTEST) -m "not simdevice" $(LIBRARY_TESTS)
	$(PYTEST) -m simdevice $(HEAP_TESTS)
	$(PYTEST) -m simdevice $(OTHER_TESTS)
	$(PYTEST) -m "simdevice and not slow" --sim-allocator=cuda tests/profiler
	$(PYTEST) -m "simdevice and not slow" --sim-allocator=cuda tests/adaptive tests/paging
	$(PYTEST) -m "not simdevice" tests/sweeps
	$(PYTEST) -m simdevice tests/sweeps

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --jobs=2 mypy pyright

# on one core each, so `lint` runs them side by side
mypy pyright: $(VENV)/.lint
	$(BIN)/$@

bench: $(VENV)/.test
	for script in benchmarks/bench_*.py; do $(BIN)/python -m benchmarks.$$(basename $$script .py) || exit 1; done
	$(BIN)/python -m pytest benchmarks -o addopts= --benchmark-only --benchmark-columns=median,iqr,rounds

dist-test: $(VENV)/.test
	PYTHON="$(PYTHON)" sh tests/dist_test.sh

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

$(VENV)/.docs: $(VENV)/.test
	$(PIP) -e '.[docs]'
	@touch $@
