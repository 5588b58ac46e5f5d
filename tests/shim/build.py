"""Builds what the tests of the shim need, once for all test processes.

The shim's own Makefile builds the libraries. Other builds that take seconds (sanitizers, the stand-in for NCCL) are kept
between runs in tests/.build, in a folder named after the content of their sources. A lock serialises concurrent builds.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.shim.jobs import REPOSITORY

SHIM = REPOSITORY / "shim"
LIB = SHIM / "lib"
BUILT = REPOSITORY / "tests" / ".build"


@functools.cache
def make_shim(*targets: str) -> None:
    """`make -C shim`."""
    with (SHIM / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(["make", "-s", "-j2", "-C", SHIM, *targets], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr


def sources(*folders: Path) -> list[Path]:
    """C files, headers and Makefiles."""
    found = (
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in {".c", ".h"} or path.name == "Makefile"
    )
    return sorted(found)


def build_once(name: str, from_: Iterable[Path], build: Callable[[Path], None]) -> Path:
    """Returns a folder that `build` has filled. It is reused as long as its source files stay the same."""
    digest = hashlib.sha256(subprocess.run(["cc", "--version"], capture_output=True, check=True).stdout)
    for path in from_:
        digest.update(f"{path}\0".encode() + path.read_bytes())
    folder = BUILT / f"{name}-{digest.hexdigest()[:16]}"
    done = folder / "done"
    BUILT.mkdir(exist_ok=True)
    with (BUILT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            for old in BUILT.glob(f"{name}-*"):
                shutil.rmtree(old)
            folder.mkdir()
            build(folder)
            done.touch()
    return folder
