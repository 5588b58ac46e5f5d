"""What one stripe is sent from: a file that another process writes, or a ring. For the child, so nothing heavy here."""

from __future__ import annotations

import os
from typing import Protocol

from snapshotd.transport.device.records import Buffer, StripeError
from snapshotd.transport.device.ring import TWINS_BYTES, Ring


class Source(Protocol):
    #: How far back the target still has what was sent; 0: all of it.
    window_bytes: int

    def available(self, announced: int) -> int:
        """How much of the stripe can be sent, of which the daemon has announced so much."""

    def read(self, buffer: Buffer, offset: int, length: int) -> memoryview:
        """These bytes, which are available; in `buffer`, if they have to be copied."""

    def must_have(self, offset: int) -> None:
        """Fails unless what follows `offset` is there. To be asked after it was used, too."""

    def sent(self, offset: int) -> None:
        """Everything before `offset` was sent."""


class GrowingFile:
    """The job's process writes it, so its bytes are copied before they are digested."""

    window_bytes = 0

    def __init__(self, path: str) -> None:
        self._path, self._file = path, -1

    def available(self, announced: int) -> int:
        return announced

    def read(self, buffer: Buffer, offset: int, length: int) -> memoryview:
        data = buffer.payload[:length]
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            count = os.preadv(self._file, [data], offset)
        except OSError as error:
            raise StripeError("internal", f"reading {self._path}: {error.strerror}") from error
        if count != length:
            raise StripeError("damaged", f"{self._path} has less than the {offset + length} bytes that were announced")
        return data

    def must_have(self, offset: int) -> None:
        """All of it stays."""

    def sent(self, offset: int) -> None:
        """It is not emptied."""


class SentRing:
    """A process of the daemon writes it. What was sent is overwritten, but for what a broken connection may have lost."""

    window_bytes = TWINS_BYTES

    def __init__(self, path: str) -> None:
        self._path = path
        self._ring: Ring | None = None

    def available(self, announced: int) -> int:
        """What is in the ring, which says it sooner than the daemon, once the daemon has announced anything."""
        if self._ring is None:
            if not announced:
                return 0
            try:
                self._ring = Ring(self._path)
            except (OSError, ValueError) as error:
                raise StripeError("internal", f"mapping {self._path}: {error}") from error
        return self._ring.written

    def read(self, buffer: Buffer, offset: int, length: int) -> memoryview:
        assert self._ring is not None
        return self._ring.view(offset, length)

    def must_have(self, offset: int) -> None:
        if self._ring is not None and not self._ring.still_has(offset):
            raise StripeError("internal", f"bytes of {self._path} that follow {offset} were overwritten")

    def sent(self, offset: int) -> None:
        assert self._ring is not None
        self._ring.release(offset)
