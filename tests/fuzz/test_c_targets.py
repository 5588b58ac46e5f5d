"""Every kept input of the targets that are written in C, and mutations of them, under sanitizers (shim/fuzz)."""

from __future__ import annotations

import os
import subprocess
import zlib
from pathlib import Path

import pytest

from tests.shim.build import LIB, SHIM, build_once, sources

FUZZ = SHIM / "fuzz"
TARGETS = sorted(path.name for path in (FUZZ / "seeds").iterdir())
_MUTATIONS = {"commands": 1500}
_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}


@pytest.fixture(scope="session")
def built() -> Path:
    def build(folder: Path) -> None:
        made = subprocess.run(
            ["make", "-s", "-j2", "-C", FUZZ, f"BUILD={folder}", "all"], capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stdout + made.stderr

    return build_once("fuzz", sources(LIB, FUZZ), build)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_and_mutations_are_survived(name: str, built: Path, pytestconfig: pytest.Config) -> None:
    seed = zlib.crc32(f"{name} {pytestconfig.getoption('seed')}".encode())
    kept = sorted(str(path) for path in (FUZZ / "seeds" / name).iterdir())
    run = subprocess.run(
        [built / f"replay-{name}", str(seed), str(_MUTATIONS.get(name, 5000)), *kept],
        env=os.environ | _OPTIONS,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-6000:]


def test_every_target_has_kept_inputs() -> None:
    made = subprocess.run(["make", "-s", "-C", FUZZ, "list"], capture_output=True, text=True, check=True)
    assert made.stdout.split() == TARGETS
