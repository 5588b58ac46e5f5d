"""Where one stripe goes on the target: a file that keeps all of it, or a ring that another process empties.

For the child, so nothing heavy here. Invariant: `have` is the number of bytes that are verified and stored.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import threading
from pathlib import Path
from typing import Protocol

from snapshotd.proc.memory import OwnRoom
from snapshotd.proc.room import FLOOR_BYTES, mib
from snapshotd.transport.device import ring
from snapshotd.transport.device.records import Buffer, StripeError
from snapshotd.transport.device.ring import Ring

_FALLOC_FL_KEEP_SIZE = 1
#: Reserved in one call, during which nothing can be written.
_RESERVE_BYTES = 64 << 20
#: Written between two looks at the memory that is left. The processes of the other stripes write as well.
_LOOK_BYTES = 8 << 20
#: Nothing is allocated ahead if less is left: that is only for speed.
_AHEAD_BYTES = 1 << 30


class Place(Protocol):
    have: int

    def has_room(self, length: int) -> bool:
        """For the next bytes. If not, it gets room by itself."""

    def memory(self, length: int) -> memoryview:
        """For the next bytes, which have room, and count when they are stored."""

    def repeat(self, twin: int, into: memoryview) -> None:
        """Reads bytes that were stored before."""

    def store(self, length: int, *, zero: bool) -> None:
        """The next bytes are those in `memory`, or zeros."""

    def finish(self) -> None:
        """There are no more."""

    def reserve(self, expected_bytes: int) -> None:
        """Allocates pages ahead of the writes. In a thread; only a hint, so it never fails."""


def translated(error: OSError, what: str) -> StripeError:
    no_room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
    return StripeError("full" if no_room else "internal", f"{what}: {error.strerror}")


def must_be_left(room: OwnRoom, about: str) -> None:
    """Raises before the kernel would kill processes to find memory: none of them has what is needed here."""
    limited_by, left = room.tightest()
    if left < FLOOR_BYTES:
        raise StripeError(
            "full",
            f"memory has run out: {limited_by} has {mib(left)} left, less than the {mib(FLOOR_BYTES)} that must stay free,"
            f" {about}",
        )


class FilledRing:
    """The process that fills memory on the GPU empties it."""

    def __init__(self, path: str, ring_bytes: int, room: OwnRoom) -> None:
        self.have = 0
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            ring.create(path, ring_bytes, lambda: must_be_left(room, f"for {os.path.basename(path)}"))
            self._ring = Ring(path)
        except OSError as error:
            raise translated(error, f"creating {path} with {mib(ring_bytes)}") from error

    def has_room(self, length: int) -> bool:
        self._view(self.have, length)  # raises if there will never be any
        return self._ring.has_room(self.have + length)

    def memory(self, length: int) -> memoryview:
        self._ring.begin(self.have + length)
        return self._view(self.have, length)

    def repeat(self, twin: int, into: memoryview) -> None:
        """If the sender goes further back than the ring reaches, the digest is wrong."""
        into[:] = self._view(twin, len(into))

    def _view(self, at: int, length: int) -> memoryview:
        try:
            return self._ring.view(at, length)
        except ValueError as error:  # no sender of ours cuts a stripe like that
            raise StripeError("damaged", f"a record of {length} bytes at {at}: {error}") from error

    def store(self, length: int, *, zero: bool) -> None:
        if zero:
            ((_, address, _),) = self._ring.pieces(self.have, length)
            ctypes.memset(address, 0, length)
        self.have += length
        self._ring.wrote(self.have)

    def finish(self) -> None:
        """A daemon that restarts must not take what is in a ring for the stripe, so no file says so."""

    def reserve(self, expected_bytes: int) -> None:
        """It has its memory."""


class KeptFile:
    """Invariant: the file's size is `have`, so a reader may follow its growth. It only grows: a file of unexpected size has
    another writer, and is left alone."""

    def __init__(self, path: str, room: OwnRoom) -> None:
        self._path, self._room = Path(path), room
        self.have = self._looked = 0
        self._over = False
        self._buffer = Buffer()
        self._lock = threading.Lock()
        try:
            for left in (self._done_path, self._path):  # not truncated: a file of an earlier attempt may still be read
                left.unlink(missing_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise translated(error, f"creating {path}") from error

    @property
    def _done_path(self) -> Path:
        return self._path.with_name(self._path.name + ".done")

    def has_room(self, length: int) -> bool:
        return True

    def memory(self, length: int) -> memoryview:
        return self._buffer.payload[:length]

    def repeat(self, twin: int, into: memoryview) -> None:
        try:
            os.preadv(self._file, [into], twin)
        except OSError as error:
            raise translated(error, f"reading {self._path}") from error

    def store(self, length: int, *, zero: bool) -> None:
        try:
            self._check_size()
            if zero:
                os.ftruncate(self._file, self.have + length)
            else:
                self._write(self._buffer.payload[:length])
        except OSError as error:
            raise translated(error, f"writing {self._path}") from error
        self.have += length

    def _check_size(self) -> None:
        found = os.fstat(self._file).st_size
        if found != self.have:
            raise StripeError(
                "internal", f"another process writes {self._path}: it has {found} bytes, {self.have} were stored here"
            )

    def _write(self, data: memoryview) -> None:
        self._look()
        done = 0
        while done < len(data):  # a file system that is nearly full takes part of it
            done += os.pwritev(self._file, [data[done:]], self.have + done)

    def _look(self) -> None:
        if self.have < self._looked:
            return
        must_be_left(self._room, f"and {mib(self.have)} of {self._path.name} have arrived")
        self._looked = self.have + _LOOK_BYTES

    def finish(self) -> None:
        try:
            with self._lock:
                self._over = True  # nothing more is reserved
            self._check_size()
            os.ftruncate(self._file, self.have)  # releases what is still reserved
            fresh = self._path.with_name(self._path.name + ".fresh")
            fresh.write_text(json.dumps({"size": self.have}))
            fresh.rename(self._done_path)
        except OSError as error:
            raise translated(error, f"finishing {self._path}") from error

    def reserve(self, expected_bytes: int) -> None:
        at = 0
        while at < expected_bytes:
            at = max(at, self.have)
            if self._room.tightest()[1] < _AHEAD_BYTES + FLOOR_BYTES:
                return
            with self._lock:
                if self._over or _fallocate(self._file, _FALLOC_FL_KEEP_SIZE, at, _RESERVE_BYTES):
                    return
            at += _RESERVE_BYTES


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate.restype = ctypes.c_int
