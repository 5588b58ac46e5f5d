"""Runs one target under Atheris, a coverage-guided fuzzer. Started by tools/fuzz, which installs it."""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-untyped, unused-ignore]  # tools/fuzz installs it: it is large, and not for every platform

with atheris.instrument_imports(include=["shim", "snapshotd", "elftools"]):
    from tests.fuzz.targets import TARGETS

name = sys.argv.pop(1)
atheris.Setup(sys.argv, TARGETS[name])
atheris.Fuzz()
