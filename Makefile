# Every target that needs the environment begins with tools/setup, which does nothing when nothing has changed.
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-rollback test test-all test-fast test-systemd lint coverage docs bench bench-scale chaos package clean

PYTHON := .venv/bin/python
# The tests start some thousand processes in Python: they are slow without its compiled files.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(PYTHON) -m pytest --durations=20 --durations-min=1
# With SAMPLE="--seed N" the tests run the sample of another day (tests/sampling.py).
SAMPLE ?=

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# The nodes of a lab have their own /tmp, /run and /dev/shm, so they cannot see a checkout that lies there. tools/elsewhere
# runs make again, in a place that they can see.
HIDDEN := $(filter /tmp/% /run/% /dev/shm/%,$(realpath $(CURDIR))/)
ifneq ($(HIDDEN),)

setup demo demo-rollback test test-all test-fast test-systemd coverage docs bench bench-scale chaos package: ; @tools/elsewhere $(MAKE) --no-print-directory $@

else

setup: ## install what is missing: packages, .venv, CRIU, generated code, the shim
	@tools/setup

demo: setup ## move a rank of a running training job between nodes made on this machine, by hand and by itself (KEEP=1: keep the page)
	@$(PYTHON) -m integration.demo $(if $(KEEP),--keep)

demo-rollback: setup ## power a node off under a protected training job, which goes on from its last snapshot
	@$(PYTHON) -m integration.demo_rollback

test test-all test-fast: export SNAPSHOT_LANE = ci
test-all: SAMPLE = --whole
test test-all: setup lint ## lint, unit tests and integration tests; test-all: every case of the exhaustive tests
	tools/test tests $(SAMPLE)
	tools/test integration $(SAMPLE)
	$(if $(filter test-all,$@),$(MAKE) --no-print-directory test-systemd)

test-fast: setup ## the unit tests alone
	tools/test tests $(SAMPLE)

# Part of `make test-all` only: it builds the packages, which takes as long as the tests themselves, and needs mmdebstrap and
# systemd-nspawn, which `make setup` does not install. To run it with packages that are built already:
# SNAPSHOT_LANE=systemd SNAPSHOT_PACKAGES=FOLDER .venv/bin/python -m pytest integration/systemd
test-systemd: export SNAPSHOT_LANE = systemd
test-systemd: export SNAPSHOT_PACKAGES = build/packages
test-systemd: setup ## install the Debian package on nodes that boot systemd, and move ranks there
	@rm -rf build/packages && tools/package build/packages
	$(PYTEST) integration/systemd

coverage: setup ## run the unit tests and report the lines that they reach, in Python and in C
	@tools/coverage

docs: setup ## build the documentation into build/site, and fail on a broken link
	$(PYTHON) -m mkdocs build --strict --site-dir build/site

bench: setup ## measure how long a move pauses the job
	@$(PYTHON) -m integration.bench

bench-scale: setup ## measure how long the driver needs to stop an NCCL job of up to 4,096 ranks (simulated daemons)
	@$(PYTHON) -m integration.bench_scale

# Variables: MINUTES, SEED, SOAK (a number of moves without faults, instead of faults), CHAOS (more options, as --autopilot and --rollback: --help).
MINUTES ?= 15
chaos: setup ## move ranks at random under random faults (MINUTES=15 SEED=N), or SOAK=500 times without faults
	@$(PYTHON) -m integration.chaos --minutes $(MINUTES) $(addprefix --seed ,$(SEED)) $(addprefix --soak ,$(SOAK)) $(CHAOS)

package: setup ## build the wheel and the Debian packages of this commit into dist/
	@tools/package

endif

lint: ## check Python, C and shell code; needs neither root nor CRIU nor torch
	@tools/lint

clean: ## remove what was built and cached (.venv and .criu stay)
	@if [ -e shim/Makefile ]; then $(MAKE) --no-print-directory -C shim clean; fi
	@rm -rf build dist bundle out tests/fakes/*/build .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
	@find . \( -path ./.venv -o -path ./.venv-lint -o -path ./.criu -o -path ./.git \) -prune -o \
		-name __pycache__ -type d -exec rm -rf {} +
