# make install   the virtual environment, once       make check      the whole gate of a change
# make serve     everything on this machine          make test-slow  the real model, minutes
# make test      all quick tests                     make clean      what the tools left behind
# make chaos     every fault, and docs/reliability.md, minutes

PYTHON ?= python3
PIP_ARGS ?=
# Options for `pointsman serve`, for example: make serve ARGS="--port 9000"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUICK := not gpu and not slow

SLOW := slow and not gpu
SIDE_BY_SIDE := -n 2 --dist loadfile

# $(1): a name, $(2): which tests, $(3): how. Many look at the clock, and a shared machine may take it from them: if at most
# two failed, they run once more, alone. A fault that shows only now and then may pass that way: .ci/again names them.
PYTEST = $(BIN)/python -m pytest -o cache_dir=.pytest_cache/$(1) $(2)
TESTED = $(PYTEST) $(3) || { .ci/again .pytest_cache/$(1) && $(PYTEST) --last-failed --last-failed-no-failures none; }

# The flow tests run whole pipelines: one at a time.
define QUICK_TESTS
$(call TESTED,parts,-m "$(QUICK)" --ignore tests/flow,$(SIDE_BY_SIDE))
$(call TESTED,flow,-m "$(QUICK)" tests/flow)
endef

.DEFAULT_GOAL := help
.PHONY: help install serve test test-slow chaos check clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; say which: make install PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install $(PIP_ARGS) "torch==2.13.*"
	$(BIN)/python -m pip install $(PIP_ARGS) --no-build-isolation -e ".[dev]"
	$(BIN)/python -m pip check
	@touch $(STAMP)

serve: install
	@exec $(BIN)/pointsman serve $(ARGS)

test: install
	$(QUICK_TESTS)

test-slow: install
	$(call TESTED,slow,-m "$(SLOW)",$(SIDE_BY_SIDE))

chaos: install
	$(BIN)/python -m tests.chaos.run --report docs/reliability.md --json docs/reliability.json

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(QUICK_TESTS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find gateway workers pipeline tiering tests -name __pycache__ -type d -prune -exec rm -rf {} +
