"""Asks a child with a user's rights for work on many files at once: the daemon's side of `snapshotd/files/closed.py`.

Requests and answers are in memory files. An answer comes from a process of the user, and its form is checked. Blocking.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from snapshotd.api.errors import Internal
from snapshotd.files import closed
from snapshotd.files.as_user import UserFiles
from snapshotd.files.closed import Row
from snapshotd.moves.closed_manifest import MAX_BRACKETS, MAX_BYTES

T = TypeVar("T")


class Seen(msgspec.Struct):
    """The child's answer to `closed_scan`."""

    rows: list[Row]
    older_left: int
    complete: bool
    crowd: tuple[int, int] | None


class Packed(msgspec.Struct):
    """… to `closed_pack`."""

    bad: list[int]
    digests: list[tuple[int, str]]


class MadeThere(msgspec.Struct):
    """… and to `closed_place`."""

    made: list[tuple[int, str, int, int, int]]
    taken: list[tuple[int, str, str]]


def ask(files: UserFiles, do: str, request: Any, answer: type[T], fds: Sequence[int] = (), size_bytes: int = 0) -> T:
    """A request whose result is in a memory file too."""
    with _memory() as result:
        send(files, do, request, [result, *fds], size_bytes)
        try:
            if (size := os.fstat(result).st_size) > MAX_BYTES:
                raise ValueError("too long")
            content = os.pread(result, size, 0)
            if content.count(b"[") + content.count(b"{") > MAX_BRACKETS:
                raise ValueError("too many lists")
            return msgspec.convert(json.loads(content), answer)
        except (ValueError, RecursionError) as error:
            raise Internal(f"the file worker sent a malformed answer: {error}") from error


def send(
    files: UserFiles, do: str, request: Any, fds: Sequence[int] = (), size_bytes: int = 0
) -> tuple[dict[str, Any], list[int]]:
    with _memory() as wanted:
        closed.write(wanted, request)
        return files.ask(do, [wanted, *fds], size_bytes)


@contextlib.contextmanager
def _memory() -> Iterator[int]:
    handle = os.memfd_create("closed files", os.MFD_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)
