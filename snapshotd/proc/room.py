"""The memory of this machine that moves may use: what is free, less what moves have reserved and do not use yet.

Free memory alone is no answer. Two moves that begin at the same time would both count it, and so would the source and the
target of one move where both are on one machine, as in a lab. So a daemon states what its moves have reserved and not taken
yet, in a file of its own in a folder that all daemons of the machine share. The other daemons do not count it as free.

Invariant: a reservation is checked and stated under one lock (`turn`), so no byte is promised twice. It is lost with its
daemon: a file whose owner holds no lock on it does not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotd.proc.memory import OwnRoom, close_all

#: Kept free in addition to what moves need, for the node itself.
RESERVE_BYTES = 256 << 20
#: Less than this is dangerous: a move is undone.
FLOOR_BYTES = 128 << 20
_LOCK, _ID = "lock", "id"
_DIGITS = 20


@dataclass(frozen=True)
class Free:
    """What a further reservation may use, and how it was computed."""

    left_bytes: int  # the node's available memory, or what the tightest cgroup of this daemon leaves
    limited_by: str
    reserved_bytes: int  # by moves, and not taken yet

    @property
    def bytes(self) -> int:
        return max(0, self.left_bytes - self.reserved_bytes)

    def __str__(self) -> str:
        reserved = f", of which {mib(self.reserved_bytes)} are reserved for other moves" if self.reserved_bytes else ""
        return f"{self.limited_by} has {mib(self.left_bytes)} left{reserved}"


class Room:
    """What one daemon has reserved. Every method may be called from any thread; all block, but only for moments."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder = folder
        self._own = OwnRoom()
        self._lock = threading.RLock()
        self._depth = 0
        self._file = -1
        self._reserved: dict[str, Callable[[], int]] = {}  # what is reserved and not taken yet, by purpose
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._turn_fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        opened = [self._turn_fd]
        self._closing = weakref.finalize(self, close_all, opened)  # also if it is forgotten
        self._name = f"claim-{node}-{os.getpid()}-{secrets.token_hex(4)}"
        with self.turn():
            fresh = folder / f"fresh-{self._name}"  # a file of that name without a lock on it is that of a dead daemon
            self._file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened.append(self._file)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            fresh.rename(folder / self._name)
            with contextlib.suppress(FileExistsError), open(folder / _ID, "x", opener=_private) as file:
                file.write(secrets.token_hex(8))
        #: The same on all nodes that share this machine's memory.
        self.machine = (folder / _ID).read_text()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """What is checked and reserved inside is not promised to any other move. Re-entrant."""
        with self._lock:
            self._depth += 1
            if self._depth == 1 and self._turn_fd >= 0:
                fcntl.flock(self._turn_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth and self._turn_fd >= 0:  # closed: its number may be another file's by now
                    self._write()
                    fcntl.flock(self._turn_fd, fcntl.LOCK_UN)

    def count(self, purpose: str, untaken: Callable[[], int]) -> None:
        """From now on what `untaken` returns is reserved: bytes that were promised and are not used yet."""
        with self._lock:
            self._reserved[purpose] = untaken

    def shrink(self, purpose: str, taken: Callable[[], int]) -> None:
        """From now on what `taken` returns is taken of the reservation: it is used, and so it is not free either."""
        with self._lock:
            untaken = self._reserved.get(purpose)
            if untaken is not None:
                self._reserved[purpose] = lambda: max(0, untaken() - max(0, taken()))

    def give_up(self, purpose: str) -> None:
        """Nothing is reserved for this any more. Idempotent."""
        with self._lock:
            known = self._reserved.pop(purpose, None)
        if known is not None:
            self.state()

    def free(self, *, without: str = "", own_groups: bool = True) -> Free:
        """What a further reservation may use. `without`: a purpose that does not count, because its own is asked for.
        `own_groups`: False for memory that this daemon's cgroups are not charged with, because a rank will use it."""
        limited_by, left_bytes = self._own.tightest() if own_groups else self._own.node()
        with self._lock:
            own = sum(untaken() for purpose, untaken in self._reserved.items() if purpose != without)
        return Free(left_bytes, limited_by, own + self._others_bytes())

    def left(self) -> tuple[str, int]:
        """What limits this daemon now, and how much memory that leaves, reserved or not."""
        return self._own.tightest()

    def state(self) -> None:
        """Tells the other daemons of this machine what is reserved now. What moves have taken since is no longer."""
        with self.turn():
            pass

    def close(self) -> None:
        """Gives everything up."""
        with self._lock, contextlib.suppress(OSError):
            (self._folder / self._name).unlink(missing_ok=True)
            self._file = self._turn_fd = -1
            self._closing()
            self._own.close()

    def _write(self) -> None:
        if self._file >= 0:
            total = sum(untaken() for untaken in self._reserved.values())
            os.pwrite(self._file, f"{max(0, total):0{_DIGITS}d}".encode(), 0)

    def _others_bytes(self) -> int:
        found = 0
        for path in self._folder.glob("claim-*"):
            if path.name == self._name:
                continue
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:  # its daemon lives
                    found += int(file.read(_DIGITS) or b"0")
                else:
                    path.unlink(missing_ok=True)
        return found


def mib(size_bytes: int) -> str:
    """Rounded up."""
    return f"{-(-size_bytes >> 20)} MiB"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
