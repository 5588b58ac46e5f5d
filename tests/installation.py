"""What another user needs to run ranks: a copy of the packages, and a Python, that every user can read.

The checkout may lie below /root, and the interpreter of .venv too: then only root can read them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def readable_copy(folder: Path) -> Path:
    """Copies the packages that `migrator run` needs into `folder`, for PYTHONPATH. The folders above it are not changed."""
    for package in ("migrator", "shim", "snapshotd"):
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.c", "*.h", "*.new")
        shutil.copytree(REPOSITORY / package, folder / package, ignore=ignored)
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    return folder


def readable_python() -> str:
    """A Python 3.11 or newer that every user can execute."""
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, sys._base_executable, "/usr/bin/python3"):  # type: ignore[attr-defined]
        if (
            _open_to_every_user(Path(python))
            and subprocess.run([python, "-I", "-c", check], check=False).returncode == 0
        ):
            return str(python)
    raise AssertionError("no Python 3.11 or newer that every user can execute: install python3 from the distribution")


def _open_to_every_user(program: Path) -> bool:
    """By the modes of the folders, because a process of root that changes its user id may keep root's capabilities."""
    folders = {*program.absolute().parents, *program.resolve().parents}
    return program.exists() and all(folder.stat().st_mode & 0o001 for folder in folders)
