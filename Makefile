# Every target that needs the environment begins with tools/setup, which does nothing when nothing has changed.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-fast lint coverage docs bench clean

PYTHON := .venv/bin/python
# More workers than processors, because most tests wait for processes. Tests of one file stay together while others have work.
WORKERS ?= $(shell expr 2 \* `nproc`)
PARALLEL := -n $(WORKERS) --dist worksteal
PYTEST := $(PYTHON) -m pytest --durations=20 --durations-min=1
# With SAMPLE="--seed N" the tests run the sample of another day (tests/sampling.py).
SAMPLE ?=

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# The nodes of a lab have their own /tmp, /run and /dev/shm, so they cannot see a checkout that lies there. tools/elsewhere
# runs make again, in a place that they can see.
HIDDEN := $(filter /tmp/% /run/% /dev/shm/%,$(realpath $(CURDIR))/)
ifneq ($(HIDDEN),)

setup demo test test-all test-fast coverage docs bench: ; @tools/elsewhere $(MAKE) --no-print-directory $@

else

setup: ## install what is missing: packages, .venv, CRIU, generated code, the shim
	@tools/setup

demo: setup ## move a rank of a running training job between two nodes made on this machine
	@$(PYTHON) -m integration.demo

test test-all test-fast: export SNAPSHOT_LANE = ci
test-all: SAMPLE = --whole
test test-all: setup lint ## lint, unit tests and integration tests; test-all: every case of the exhaustive tests
	$(PYTEST) tests $(PARALLEL) $(SAMPLE)
	$(PYTEST) integration $(PARALLEL) $(SAMPLE)

test-fast: setup ## the unit tests alone
	$(PYTEST) tests $(PARALLEL) $(SAMPLE)

coverage: setup ## run the unit tests and report the lines that they reach, in Python and in C
	@tools/coverage

docs: setup ## build the documentation into build/site, and fail on a broken link
	$(PYTHON) -m mkdocs build --strict --site-dir build/site

bench: setup ## measure how long a move pauses the job
	@$(PYTHON) -m integration.bench

endif

lint: ## check Python, C and shell code; needs neither root nor CRIU nor torch
	@tools/lint

clean: ## remove what was built and cached (.venv and .criu stay)
	@if [ -e shim/Makefile ]; then $(MAKE) --no-print-directory -C shim clean; fi
	@rm -rf build dist bundle out tests/fakes/*/build .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
	@find . \( -path ./.venv -o -path ./.venv-lint -o -path ./.criu -o -path ./.git \) -prune -o \
		-name __pycache__ -type d -exec rm -rf {} +
