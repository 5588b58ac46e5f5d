"""Replaces several files, keys among them, so that an interruption or a full disk leaves the old ones.

Invariant: everything is on disk under temporary names before the first file is replaced. A file never exists with a
wider mode than its final one, under any name. The order of the files is that in which they are replaced.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import BadConfig


@dataclass(frozen=True)
class NewFile:
    path: Path
    content: bytes
    mode: int = 0o644
    group: int | None = None  # None: that of the process


def replace_all(files: Sequence[NewFile]) -> None:
    """Raises BadConfig with the reason; then nothing was replaced, unless it says so."""
    temporary = [(file, file.path.with_name(f".{file.path.name}.new")) for file in files]
    try:
        for file, new in temporary:
            _write(file, new)
    except OSError as error:
        for _, new in temporary:
            with contextlib.suppress(OSError):
                new.unlink()
        raise _failure(error, "nothing was changed") from error
    replaced: list[str] = []
    for file, new in temporary:
        try:
            os.replace(new, file.path)
            replaced.append(str(file.path))
        except OSError as error:
            done = f"replaced before: {', '.join(replaced)}" if replaced else "nothing was changed"
            raise _failure(error, done) from error
    for folder in {file.path.parent for file in files}:
        with contextlib.suppress(OSError):  # they are replaced
            _sync(folder)


def _write(file: NewFile, new: Path) -> None:
    new.unlink(missing_ok=True)  # of a run that was interrupted
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(file.content)
        out.flush()
        if file.group is not None:
            os.fchown(descriptor, -1, file.group)
        os.fchmod(descriptor, file.mode)
        os.fsync(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failure(error: OSError, done: str) -> BadConfig:
    return BadConfig(
        f"{error.filename or 'a file'} cannot be written: {error.strerror}; {done}",
        remedy="check the rights and the free space there, then run the same command again",
    )
