"""Manages the stripe files of a source: device memory of its ranks that is on no GPU, until the move has ended.

They are image_dir/parked/MOVE/device-PID-NUMBER. Invariant: while a process reports its device memory as offloaded, its files
exist, complete. They are removed only when the move has ended, so that a restarted daemon can still undo it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from snapshotd.api.errors import Damaged, Full, Where
from snapshotd.moves.journal import Journal
from snapshotd.moves.record_parts import OffloadedMemory
from snapshotd.moves.rules import Mark

#: Their names, also on the wire.
NAME = re.compile(r"device-[1-9][0-9]{0,9}-[0-9]{1,2}")

#: Allocated in one call. Before each the caller looks whether there is memory.
_STEP_BYTES = 64 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_…
_TRIES = 5  # to make a folder whose parent another move may just have removed

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def names_of(inner_pid: int, stripes: int) -> list[str]:
    return [f"device-{inner_pid}-{number}" for number in range(stripes)]


def following(device: Sequence[OffloadedMemory]) -> list[OffloadedMemory]:
    """The same, with the files' names on the target when they follow over the image channel. They differ from the stripes'
    names, because a receiver there may still write to those."""
    return [msgspec.structs.replace(one, stripes=[f"follow-{name}" for name in one.stripes]) for one in device]


def folder_of(image_dir: Path, move: str) -> Path:
    return image_dir / "parked" / move


def make_folder(image_dir: Path, move: str) -> Path:
    folder = folder_of(image_dir, move)
    shutil.rmtree(folder, ignore_errors=True)
    for left in reversed(range(_TRIES)):
        try:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700)
            break
        except FileNotFoundError:
            if not left:
                raise
    return folder


def allocate(path: Path, expected_bytes: int, look: Callable[[int], None]) -> None:
    """Creates a file and allocates all its pages, so that this takes no time while the job waits. Blocking. Raises Full.

    `look` is called with the bytes of each step before it is taken, and raises Full if memory has become scarce. Without it
    the kernel would kill processes to find memory for the file, and none of them has that memory."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    enlarge(path, expected_bytes, look)


def enlarge(path: Path, expected_bytes: int, look: Callable[[int], None]) -> None:
    """Does the same for an existing file; it never shrinks. Blocking. Raises Full."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        at = os.fstat(fd).st_size
        while at < expected_bytes:
            step_bytes = min(_STEP_BYTES, expected_bytes - at)
            look(step_bytes)
            if _libc.fallocate(fd, 0, at, step_bytes) == 0:
                at += step_bytes
                continue
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise Full(
                    f"{path} cannot be made {expected_bytes >> 20} MiB large: {os.strerror(number)}",
                    where=Where.SOURCE_RUNNING,
                )
    finally:
        os.close(fd)


def empty(path: Path) -> None:
    """Frees its memory; its size stays, because it may still be sent. Blocking."""
    with opened(path.parent, [path.name], os.O_RDWR) as (fd,):
        size = os.fstat(fd).st_size
        if size:
            _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, 0, size)


@contextlib.contextmanager
def opened(folder: Path, names: Sequence[str], flags: int) -> Iterator[list[int]]:
    """Descriptors of the files, in order."""
    with contextlib.ExitStack() as stack:
        fds = []
        for name in names:
            fds.append(os.open(folder / name, flags | os.O_CLOEXEC | os.O_NOFOLLOW))
            stack.callback(os.close, fds[-1])
        yield fds


def sweep(image_dir: Path, move: str) -> None:
    """Removes the files of a move that has ended. Idempotent."""
    shutil.rmtree(folder_of(image_dir, move), ignore_errors=True)
    with contextlib.suppress(OSError):  # other moves have files
        (image_dir / "parked").rmdir()


def sweep_ended(image_dir: Path, journal: Journal) -> None:
    """At start: removes the files of moves that have ended, or are not in the journal."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(image_dir / "parked"):
            known = next((log for log in journal.all() if log.move == name and log.begin.role == "source"), None)
            if known is None or known.last_mark is Mark.SETTLED:
                sweep(image_dir, name)


def sizes_of(device: Sequence[OffloadedMemory]) -> dict[str, int]:
    """The size of each stripe, as the source described it."""
    return {name: size for one in device for name, size in zip(one.stripes, one.bytes, strict=True)}


def must_match(device: Sequence[OffloadedMemory], sizes: Mapping[str, int], filled_bytes: int | None = None) -> None:
    """Raises Damaged unless the stripes have these sizes, and so many bytes were filled."""
    expected = sizes_of(device)
    wrong = [name for name, size in expected.items() if sizes.get(name) != size]
    if wrong or filled_bytes not in {None, sum(expected.values())}:
        raise Damaged(
            f"device memory did not arrive whole: {', '.join(wrong) or f'{filled_bytes} bytes were filled'}",
            where=Where.SOURCE_FROZEN,
        )
