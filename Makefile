# Every target that needs the environment begins with tools/setup, which does nothing when nothing changed.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast lint bench clean

PYTHON := .venv/bin/python
AGAIN := --last-failed --last-failed-no-failures none

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## install what is missing: packages, .venv, CRIU, generated code, the shim
	@tools/setup

demo: setup ## move a rank of a running training job between two nodes made on this machine
	@$(PYTHON) -m integration.demo

test: export SNAPSHOT_LANE = ci
test: setup lint ## everything: lint, unit tests, integration tests
	@# Real processes on a machine that may be busy: what failed is run once more by itself, and must pass then.
	$(PYTHON) -m pytest tests || { echo "make: once more, by itself, what failed:"; $(PYTHON) -m pytest tests $(AGAIN); }
	$(PYTHON) -m pytest integration || { echo "make: once more, by itself, what failed:"; $(PYTHON) -m pytest integration $(AGAIN); }

test-fast: setup ## the unit tests alone
	$(PYTHON) -m pytest tests

lint: setup ## ruff (rules and format) and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: setup ## measure how long a move pauses the job
	@$(PYTHON) -m integration.bench

clean: ## remove what was built and cached (.venv and .criu stay)
	@if [ -e shim/Makefile ]; then $(MAKE) --no-print-directory -C shim clean; fi
	@rm -rf build dist bundle out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . \( -path ./.venv -o -path ./.criu -o -path ./.git \) -prune -o -name __pycache__ -type d -exec rm -rf {} +
